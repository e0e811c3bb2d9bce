"""The server's container: the Dockerfile copies the modules that the server imports, and installs locked versions.

No container engine is needed: the tests copy and install the same files into a folder and a new environment.
"""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from hashlib import sha256
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from served import COLOURS, colour_run, encoded, picture, probabilities, wait_until

from serve.device import PACKAGE

ROOT = Path(__file__).resolve().parents[2]
PIP = "python -m pip install --no-cache-dir --require-hashes"
UV = ".uv/bin/uv pip install --system --no-cache --compile-bytecode"
HEAVY = ("torch", "torchvision", "pytorch_lightning", "mlflow", "pandas", "onnx")


def instructions():
    """Return (instruction, arguments) of the Dockerfile's stage that serves a mounted bundle."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    stages = [number for number, (word, _) in enumerate(lines) if word == "FROM"]
    assert lines[stages[-1] :] == [["FROM", "base AS server"]]
    return [(word, rest.strip()) for word, rest in lines[stages[0] : stages[1]]]


def arguments(instruction):
    """Return the arguments of each instruction of one kind."""
    return [rest for word, rest in instructions() if word == instruction]


def copied():
    """Return sources and target of each COPY."""
    return [(words[:-1], words[-1]) for words in map(str.split, arguments("COPY"))]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """The container's working directory, with the files that are copied into it."""
    folder = tmp_path_factory.mktemp("container") / "app"
    for sources, target in copied():
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                (folder / target).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / source, folder / target / Path(source).name)
    return folder


def test_the_server_finds_all_of_its_modules_in_the_container(app):
    """All of our modules that the server may import are copied, and none needs torch."""
    modules = [f"serve.{path.stem}" for path in sorted((app / "serve").glob("*.py")) if path.stem != "__init__"]
    program = (
        f"import sys, {', '.join(modules)}\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] in ('serve', 'deeplightning')))\n"
        f"print(*({{*sys.modules}} & {set(HEAVY)!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=app, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours, heavy = done.stdout.splitlines()
    assert [path for path in ours.split() if not path.startswith(f"{app}/")] == []
    assert heavy == ""


def test_what_is_installed_is_what_the_server_imports_at_the_versions_of_the_lock(app):
    """serve/requirements.txt has the locked version of each library that a copied file imports, and no other."""
    names = set()
    for path in app.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(str(node.module).partition(".")[0])
    foreign = names - sys.stdlib_module_names - {"serve", "deeplightning", "tokenizers"}  # an optional package
    found = packages_distributions()
    needed = {found[name][0].lower().replace("_", "-") for name in foreign}
    lock = [line.removesuffix("\\").strip() for line in (ROOT / "requirements.lock").read_text().splitlines()]
    expected = [line for line in lock if line.partition("==")[0] in needed]
    assert (app / "requirements.txt").read_text().splitlines() == expected


def test_the_engine_gets_what_is_copied():
    """.dockerignore excludes everything except the copied files and the bundles of runs."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    included = {line.removeprefix("!") for line in lines if line.startswith("!")}
    sources = [source.removesuffix("/") for sources, _ in copied() for source in sources]
    assert [s for s in sources if not {s, s.partition("/")[0]} & included] == []
    bundles = {"bundle", "mlruns/*/*/artifacts/bundle"}
    assert included - bundles == {s for s in sources if not s.startswith("serve/")}
    assert set(lines) - {f"!{line}" for line in included} == {"*", "**/__pycache__"}


def install(app, home, device="cpu", **variables):
    """Run the Dockerfile's RUN line in `app` with our uv, into a new environment `home`."""
    uv = Path(sys.executable).with_name("uv")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, home], env=environment, check=True)
    (line,) = arguments("RUN")
    assert line.count(PIP) == line.count(UV) == 1
    line = line.replace(PIP, "true").replace(UV, shlex.join([str(uv), "pip", "install", "-q", "--python", str(home)]))
    environment["DEVICE"] = device
    return subprocess.run(["bash", "-ec", line], cwd=app, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def python(app):
    """The interpreter of an environment that the Dockerfile's RUN line has filled."""
    home = app.parent / "env"
    cache = {"UV_CACHE_DIR": str(ROOT / ".uv" / "cache")} if (ROOT / ".uv" / "cache").is_dir() else {}
    assert arguments("ARG") == ["DEVICE=cpu"]
    done = install(app, home, **cache)
    assert done.returncode == 0, done.stderr
    return home / "bin" / "python"


def wheel(folder, name, needs):
    """Write an empty package of version 1.0 and return its line for a lock."""
    stem = f"{name.replace('-', '_')}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    extras = "Provides-Extra: cuda\nProvides-Extra: cudnn\n"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{extras}Requires-Dist: {needs}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(f"{stem}.dist-info/{file}", text)
    return f"{name}==1.0 \\\n    --hash=sha256:{sha256(path.read_bytes()).hexdigest()}\n"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_image_gets_no_file_but_those_of_the_lock(tmp_path, device):
    """The build fails for another file of a locked package, and for an unlocked one other than onnxruntime-gpu."""
    app, files = tmp_path / "app", tmp_path / "files"
    app.mkdir()
    files.mkdir()
    lock = [wheel(files, "needed", "needed_too"), wheel(files, "needed_too", "needed_too")]
    lock.append(wheel(files, "onnxruntime", "needed"))
    wheel(files, "onnxruntime-gpu", "needed")
    offline = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(files), "UV_CACHE_DIR": str(tmp_path / "cache")}

    def build(name, lock):
        (app / "requirements.txt").write_text("onnxruntime==1.0\n")
        (app / "requirements.lock").write_text("".join(lock))
        done = install(app, tmp_path / name, device, **offline)
        if done.returncode:
            return done.stderr
        return sorted(path.name.partition("-")[0] for path in (tmp_path / name).rglob("*-1.0.dist-info"))

    runtime = "onnxruntime" if device == "cpu" else PACKAGE.partition("[")[0].replace("-", "_")
    expected = ["needed", "needed_too", runtime]
    assert build("complete", lock) == expected
    assert {path.name for path in app.iterdir()} == {"requirements.txt", "requirements.lock"}
    incomplete = build("incomplete", [lock[0], *lock[2:]])
    assert incomplete == expected if device == "cuda" else "needed-too" in incomplete, incomplete
    lock[1] = re.sub("sha256:.*", f"sha256:{'0' * 64}", lock[1])
    assert "Hash mismatch for `needed-too==1.0`" in build("other", lock)


def test_a_device_that_the_image_does_not_know_ends_the_build(tmp_path):
    """An unknown DEVICE fails the build with the allowed values."""
    done = install(tmp_path, tmp_path / "home", "rocm")
    assert (done.returncode, done.stderr) == (2, "DEVICE is rocm; it can be cpu or cuda\n")


@pytest.mark.slow
def test_the_server_runs_from_the_copied_files_alone(app, python, tmp_path):
    """The Dockerfile's entry point starts a server that passes its health check, answers, and ends on SIGTERM. Torch is
    not installed, and the installed size is the one in the Dockerfile."""
    installed = {path.name for path in python.parents[1].glob("lib/python*/site-packages/*")}
    assert installed.isdisjoint(HEAVY)
    assert {"onnxruntime", "httptools", "flask"} <= installed
    size = sum(path.stat().st_size for path in python.parents[1].rglob("*") if path.is_file() and not path.is_symlink())
    stated = re.search(r"image of some [0-9]+ MB, ([0-9]+) are what is installed", (ROOT / "Dockerfile").read_text())
    assert size / 1e6 == pytest.approx(int(stated[1]), rel=0.15)

    bundle = colour_run(tmp_path / "run").bundle
    (entry,) = arguments("ENTRYPOINT")
    command = [str(bundle) if word == "/bundle" else word for word in json.loads(entry)]
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": "/nonexistent"}
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [python, *command[1:], "--port", "0", "--max-batch", "4"], cwd=app, env=environment, stdout=out
        )
    try:
        wait_until(lambda: "Serving image_classification" in log.read_text() or server.poll() is not None, 60)
        port = re.search(r"http://0\.0\.0\.0:([0-9]+)", log.read_text())[1]
        (check,) = [json.loads(rest[rest.index("CMD ") + 4 :]) for rest in arguments("HEALTHCHECK")]
        assert arguments("EXPOSE") == ["5000"]
        program = check[2].replace(":5000/", f":{port}/")
        assert program != check[2]
        subprocess.run([python, check[1], program], cwd=app, env=environment, check=True)
        body = json.dumps({"images": [encoded(picture(colour)) for colour in COLOURS]}).encode()
        address, headers = f"http://127.0.0.1:{port}/predict", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=30) as answer:
            predictions = json.load(answer)["predictions"]
        assert [one["label"] for one in predictions] == list(COLOURS)
        assert predictions[0]["predictions"][0]["probability"] == pytest.approx(probabilities("red").max(), abs=1e-5)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=15)
    assert code == 0
