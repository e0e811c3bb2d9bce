"""Create a folder of wheels for a machine that has torch, torchvision, Lightning and numpy, but no network.

    bash tools/gpu_wheels.sh [--python 3.12] [--extra text] [FOLDER]

The folder contains what `bash test.sh --gpu` needs besides these, and `requirements.txt` with versions. It is at most
60 MB, so that it can be copied with the clone. Exits with code 3 and the reason if it cannot be created.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")
MAX_BYTES = 60_000_000

PREINSTALLED = ["torch", "torchvision", "pytorch-lightning", "torchmetrics", "lightning-utilities", "numpy", "pillow"]
PREINSTALLED += ["tqdm", "fsspec", "sympy", "networkx", "jinja2"]
"""Packages that the machine has: torch, torchvision, Lightning, and their requirements."""

# MLflow 3.17.2 tracks in SQLite with these three; the full package requires pandas, pyarrow, SciPy and scikit-learn.
MLFLOW = ["mlflow-skinny", "alembic", "sqlalchemy"]
# Only data.digits, figures, tables, remote storage, `reproduce`, the server's event loop and MLflow's access to
# Databricks import these, and the GPU tests use none of them.
EXCLUDED = ["mlflow", "scikit-learn", "scipy", "matplotlib", "pyarrow", "uvloop", "cryptography"]
TESTS = ["pytest", "pytest-xdist"]
SOURCE_ONLY = ["deepspeed"]
"""Published without wheels; built here without CUDA kernels, so that the wheel runs on every machine."""

PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 26, 24, 17)), "manylinux2014_x86_64"]
PLATFORMS += ["manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


class WheelsError(Exception):
    """Raised if the folder cannot be created; the message has the reason and the next step."""


def requirements(extras: Sequence[str]) -> list[str]:
    """Return the requirements of the GPU tests except PREINSTALLED, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    versions = {name_of(line): line for line in wanted}
    mlflow = versions["mlflow"].replace("mlflow", MLFLOW[0])
    chosen = [line for name, line in versions.items() if name not in {*PREINSTALLED, *EXCLUDED}]
    return [*chosen, mlflow, *MLFLOW[1:], *TESTS]


def name_of(requirement: str) -> str:
    """Return the normalized package name of a requirement."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0]).lower()


def resolve(wanted: Sequence[str], python: str, scratch: Path) -> list[str]:
    """Return NAME==VERSION of all packages to install, with the versions of requirements.lock.

    Raises:
        WheelsError: there are no such versions, or no network.
    """
    files = {name: scratch / f"{name}.txt" for name in ("wanted", "excluded", "found")}
    files["wanted"].write_text("\n".join(wanted))
    # An override that applies to no system removes a package, and what only it requires, from the resolution.
    files["excluded"].write_text("\n".join(f"{name}; sys_platform == 'none'" for name in [*PREINSTALLED, *EXCLUDED]))
    _run(
        *(str(UV), "pip", "compile", str(files["wanted"]), "--override", str(files["excluded"])),
        *("--constraint", str(ROOT / "requirements.lock"), "--output-file", str(files["found"])),
        *("--python-version", python, "--python-platform", "x86_64-manylinux_2_28"),
        *("--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"),
    )
    return files["found"].read_text().split("\n")[:-1]


def download(pinned: Sequence[str], python: str, folder: Path) -> None:
    """Download a wheel of each package for a Python on x86-64 Linux; build those of SOURCE_ONLY.

    Raises:
        WheelsError: a wheel cannot be downloaded or built.
    """
    pip = [str(UV), "tool", "run", "--quiet", "pip"]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    wheels = [line for line in pinned if name_of(line) not in SOURCE_ONLY]
    target = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    _run(*pip, "download", "--quiet", *target, "--dest", str(folder), *wheels)
    built = [line for line in pinned if name_of(line) in SOURCE_ONLY]
    if built:
        none = ["--no-binary", ",".join(map(name_of, built))]
        _run(*pip, "wheel", "--quiet", "--no-deps", *none, "--wheel-dir", str(folder), *built, DS_BUILD_OPS="0")


def check_size(folder: Path, limit: int = MAX_BYTES) -> int:
    """Return the total bytes of the files in a folder.

    Raises:
        WheelsError: they exceed the limit; the message lists the largest files.
    """
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    if (total := sum(sizes.values())) <= limit:
        return total
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    named = "\n".join(f"    {size / 1e6:6.1f} MB  {name}" for name, size in largest)
    raise WheelsError(
        f"{folder} would have {total / 1e6:.1f} MB, more than {limit / 1e6:.0f} MB. The largest files:\n{named}\n"
        "Omit an extra, or add packages that the GPU tests do not use to EXCLUDED in tools/gpu_wheels.py."
    )


def _run(*command: str, **variables: str) -> None:
    environment = dict(os.environ) | variables
    if "PIP_INDEX_URL" in environment:  # uv does not read pip's variables
        environment.setdefault("UV_DEFAULT_INDEX", environment["PIP_INDEX_URL"])
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise WheelsError(f"{command[0]}: {error.strerror}. Remove .venv and start again.") from error
    if done.returncode == 0:
        return
    lines = [line for line in re.sub(r"\w+://\S+", "…", done.stderr).splitlines() if line.strip()]
    reason = "\n".join(f"    {line}" for line in lines[-6:])
    if re.search(r"dns|connect|network|timed? ?out|resolve host|Max retries", done.stderr, re.IGNORECASE):
        raise WheelsError(f"the package index is not reachable. Run this on a machine that has a network.\n{reason}")
    raise WheelsError(f"{Path(command[0]).name} {command[1]} failed:\n{reason}")


def make(folder: Path, python: str, extras: Sequence[str]) -> int:
    """Create the folder; it appears only when it is complete.

    Returns:
        Its total bytes.

    Raises:
        WheelsError: it cannot be created, or already has files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WheelsError(f"{folder} is not an empty folder. Choose another one, or remove it.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".gpu_wheels-", dir=folder.parent) as scratch:
            new = Path(scratch) / "wheels"
            new.mkdir()
            pinned = resolve(requirements(extras), python, Path(scratch))
            download(pinned, python, new)
            (new / "requirements.txt").write_text("\n".join(pinned) + "\n")
            total = check_size(new)
            if folder.is_dir():
                folder.rmdir()
            shutil.move(new, folder)
    except OSError as error:
        raise WheelsError(f"{error.filename or folder}: {error.strerror}.") from error
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="gpu_wheels.sh"
    )
    running = ".".join(map(str, sys.version_info[:2]))
    parser.add_argument("folder", nargs="?", type=Path, default=Path("gpu_wheels"), help="default: gpu_wheels")
    parser.add_argument("--python", default=running, metavar="3.N", help=f"for the GPU machine; default: {running}")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml besides deepspeed")
    args = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", args.python):
        parser.error(f"--python is a version such as 3.12, not {args.python!r}")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if unknown := set(args.extra) - set(known):
        parser.error(f"--extra is one of {', '.join(known)}, not {', '.join(sorted(unknown))}")
    try:
        total = make(args.folder.absolute(), args.python, ["deepspeed", *args.extra])
    except WheelsError as error:
        print(f"Cannot create {args.folder}: {error}", file=sys.stderr)
        sys.exit(3)
    print(f"{args.folder}: {total / 1e6:.1f} MB for Python {args.python}. On the GPU machine, in the clone:\n")
    print(f"    python3 -m pip install --no-index --no-deps --find-links '{args.folder}' --target gpu_packages \\")
    print(f"        -r '{args.folder / 'requirements.txt'}'")
    print('    PYTHONPATH="$PWD/gpu_packages" DEEPLIGHTNING_PYTHON=python3 bash test.sh --gpu')


if __name__ == "__main__":
    main()
