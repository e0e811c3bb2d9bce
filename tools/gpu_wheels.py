"""Makes a folder of wheels for a machine that has torch, torchvision, Lightning and numpy, but no network.

    bash tools/gpu_wheels.sh [--python 3.12] [--extra text] [FOLDER]

The folder holds what `bash test.sh --gpu` needs beside these, and `requirements.txt` with their versions. It is at most
60 MB, so that it can travel with a copy of the clone. Exit code 3 when it cannot be made, with the reason.
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
LIMIT = 60_000_000  # bytes

THERE = ["torch", "torchvision", "pytorch-lightning", "torchmetrics", "lightning-utilities", "numpy", "pillow"]
THERE += ["tqdm", "fsspec", "sympy", "networkx", "jinja2"]
"""Packages that the machine has: torch, torchvision, Lightning, and what they require."""

# MLflow 3.17.2 tracks in SQLite with these three; the full package requires pandas, pyarrow, SciPy and scikit-learn.
MLFLOW = ["mlflow-skinny", "alembic", "sqlalchemy"]
# Only data.digits, figures, tables, remote storage, `reproduce`, the server's event loop and MLflow's access to
# Databricks import these, and the GPU's suite uses none of them.
LEFT_OUT = ["mlflow", "scikit-learn", "scipy", "matplotlib", "pyarrow", "uvloop", "cryptography"]
TESTS = ["pytest", "pytest-xdist"]
SOURCE_ONLY = ["deepspeed"]
"""Published without wheels; built here without its CUDA kernels, which makes the wheel fit every machine."""

PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 26, 24, 17)), "manylinux2014_x86_64"]
PLATFORMS += ["manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


class NotMade(Exception):
    """The folder could not be made; the text says why and what to do."""


def requirements(extras: Sequence[str]) -> list[str]:
    """What the GPU's suite needs beside THERE, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    versions = {name_of(line): line for line in wanted}
    mlflow = versions["mlflow"].replace("mlflow", MLFLOW[0])
    chosen = [line for name, line in versions.items() if name not in {*THERE, *LEFT_OUT}]
    return [*chosen, mlflow, *MLFLOW[1:], *TESTS]


def name_of(requirement: str) -> str:
    """The package's name as an index writes it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0]).lower()


def resolve(wanted: Sequence[str], python: str, place: Path) -> list[str]:
    """NAME==VERSION of all that is to be installed, the versions of requirements.lock.

    Raises:
        NotMade: when there are no such versions, or no network.
    """
    files = {name: place / f"{name}.txt" for name in ("wanted", "there", "found")}
    files["wanted"].write_text("\n".join(wanted))
    # A requirement that holds on no system takes a package, and what only it requires, out of the resolution.
    files["there"].write_text("\n".join(f"{name}; sys_platform == 'none'" for name in [*THERE, *LEFT_OUT]))
    _call(
        *(str(UV), "pip", "compile", str(files["wanted"]), "--override", str(files["there"])),
        *("--constraint", str(ROOT / "requirements.lock"), "--output-file", str(files["found"])),
        *("--python-version", python, "--python-platform", "x86_64-manylinux_2_28"),
        *("--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"),
    )
    return files["found"].read_text().split("\n")[:-1]


def download(pinned: Sequence[str], python: str, folder: Path) -> None:
    """Fetches a wheel of each, for a Python on x86-64 Linux; those that have none are built.

    Raises:
        NotMade: when one cannot be had.
    """
    pip = [str(UV), "tool", "run", "--quiet", "pip"]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    wheels = [line for line in pinned if name_of(line) not in SOURCE_ONLY]
    target = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    _call(*pip, "download", "--quiet", *target, "--dest", str(folder), *wheels)
    built = [line for line in pinned if name_of(line) in SOURCE_ONLY]
    if built:
        none = ["--no-binary", ",".join(map(name_of, built))]
        _call(*pip, "wheel", "--quiet", "--no-deps", *none, "--wheel-dir", str(folder), *built, DS_BUILD_OPS="0")


def check_size(folder: Path, limit: int = LIMIT) -> int:
    """Bytes of all files in the folder.

    Raises:
        NotMade: when they are more than the limit; with the largest.
    """
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    if (total := sum(sizes.values())) <= limit:
        return total
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    named = "\n".join(f"    {size / 1e6:6.1f} MB  {name}" for name, size in largest)
    raise NotMade(
        f"{folder} would hold {total / 1e6:.1f} MB, more than {limit / 1e6:.0f} MB. The largest files:\n{named}\n"
        "Leave out an extra, or add to LEFT_OUT in tools/gpu_wheels.py what the GPU's suite does without."
    )


def _call(*command: str, **variables: str) -> None:
    environment = dict(os.environ) | variables
    if "PIP_INDEX_URL" in environment:  # uv does not read pip's variables
        environment.setdefault("UV_DEFAULT_INDEX", environment["PIP_INDEX_URL"])
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise NotMade(f"{command[0]}: {error.strerror}. Remove .venv and start again.") from error
    if done.returncode == 0:
        return
    lines = [line for line in re.sub(r"\w+://\S+", "…", done.stderr).splitlines() if line.strip()]
    reason = "\n".join(f"    {line}" for line in lines[-6:])
    if re.search(r"dns|connect|network|timed? ?out|resolve host|Max retries", done.stderr, re.IGNORECASE):
        raise NotMade(f"the package index is not reachable. Run this on a machine that has a network.\n{reason}")
    raise NotMade(f"{Path(command[0]).name} {command[1]} failed:\n{reason}")


def make(folder: Path, python: str, extras: Sequence[str]) -> int:
    """Makes the folder; it appears only when it is complete.

    Returns:
        The bytes that it holds.

    Raises:
        NotMade: when it cannot be made, or is there already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NotMade(f"{folder} is not an empty folder. Name another one, or remove it.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".gpu_wheels-", dir=folder.parent) as place:
            new = Path(place) / "wheels"
            new.mkdir()
            pinned = resolve(requirements(extras), python, Path(place))
            download(pinned, python, new)
            (new / "requirements.txt").write_text("\n".join(pinned) + "\n")
            total = check_size(new)
            if folder.is_dir():
                folder.rmdir()
            shutil.move(new, folder)
    except OSError as error:
        raise NotMade(f"{error.filename or folder}: {error.strerror}.") from error
    return total


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="gpu_wheels.sh"
    )
    running = ".".join(map(str, sys.version_info[:2]))
    words.add_argument("folder", nargs="?", type=Path, default=Path("gpu_wheels"), help="default: gpu_wheels")
    words.add_argument("--python", default=running, metavar="3.N", help=f"of the GPU machine; default: {running}")
    words.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml beside deepspeed")
    given = words.parse_args()
    if not re.fullmatch(r"3\.\d+", given.python):
        words.error(f"--python is a version such as 3.12, not {given.python!r}")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if unknown := set(given.extra) - set(known):
        words.error(f"--extra is one of {', '.join(known)}, not {', '.join(sorted(unknown))}")
    try:
        total = make(given.folder.absolute(), given.python, ["deepspeed", *given.extra])
    except NotMade as error:
        print(f"Cannot make {given.folder}: {error}", file=sys.stderr)
        sys.exit(3)
    print(f"{given.folder}: {total / 1e6:.1f} MB for Python {given.python}. On the GPU machine, in the clone:\n")
    print(f"    python3 -m pip install --no-index --no-deps --find-links '{given.folder}' --target gpu_packages \\")
    print(f"        -r '{given.folder / 'requirements.txt'}'")
    print('    PYTHONPATH="$PWD/gpu_packages" DEEPLIGHTNING_PYTHON=python3 bash test.sh --gpu')


if __name__ == "__main__":
    main()
