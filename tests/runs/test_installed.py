"""The journey of a user without a clone: the wheel in a separate environment, an empty folder, `init`, `train`,
`serve`, `ask`. The wheel uses the packages of the environment that runs the tests; nothing is downloaded."""

import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from commands import environment, free_port
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
LIMIT_SECONDS = 300  # of a command on a busy machine
SHORT = ["train.num_epochs=4", "data.module.params.limit=600"]
JOURNEYS = {
    "images": ([], 10),
    "text": (["--text", "a charming film", "the plot is dull"], 2),
    "own": ([], 10),
    "table": (["row.json"], 1),
    "signal": (["signal.json"], 1),
    "regression": (["row.json"], 1),
    "segmentation": (["shapes/images/0000.jpg"], 1),
}
"""By kind of project, the arguments of `ask`, and the number of answers."""

pytestmark = pytest.mark.slow


def wheel_from_sdist(folder: Path) -> Path:
    """Build a wheel from the source distribution, as an installer does."""
    (path,) = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(path) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(folder / "source")
    (source,) = (folder / "source").iterdir()
    program = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"])
    return Path(path)


class Installed:
    """The command of a wheel in a separate environment; `start` starts it, `add` installs another wheel.

    Args:
        place: the folder of the environment.
        packages: folders with the packages that the wheel needs.
    """

    def __init__(self, place, wheel, packages):
        self.command, self.python = str(place / "bin" / "deeplightning"), place / "bin" / "python"
        self.env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        self._uv("venv", "--offline", "--python", sys.executable, place)
        site = place / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        # Paths in a .pth file are searched last, and .pth files in them are not read: an editable clone is not found.
        (site / "shared.pth").write_text("\n".join(map(str, packages)))
        self.add(wheel)
        program = "import deeplightning as d, serve as s; print(d.__file__, s.__file__, sep='\\n')"
        where = subprocess.run([self.python, "-c", program], cwd=place, env=self.env, capture_output=True, text=True)
        ours = [str(site / top / "__init__.py") for top in ("deeplightning", "serve")]
        assert where.stdout.splitlines() == ours, where.stderr

    def __call__(self, *arguments, cwd, code=0, **variables):
        options = {"cwd": cwd, "env": self.env | variables, "timeout": LIMIT_SECONDS}
        done = subprocess.run([self.command, *arguments], capture_output=True, text=True, **options)
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done.stderr if code else done.stdout

    def _uv(self, *arguments):
        uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
        assert uv, "uv is among the packages of the tests"
        done = subprocess.run([uv, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def add(self, wheel):
        self._uv("pip", "install", "--offline", "--no-deps", "--python", self.python, wheel)

    def start(self, *argv, cwd):
        return subprocess.Popen(
            [self.command, *argv], cwd=cwd, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the packages of this one."""
    return Installed(tmp_path_factory.mktemp("an environment"), wheel, PACKAGES)


@pytest.fixture
def without_plugins(wheel, tmp_path):
    """An environment with the packages of this one, without the plug-ins."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for folder in PACKAGES:
        for path in Path(folder).iterdir():
            if not path.name.startswith("deeplightning"):
                (packages / path.name).symlink_to(path)
    return Installed(tmp_path / "environment", wheel, [packages])


def test_the_source_distribution_gives_the_same_wheel(wheel, tmp_path):
    """A wheel built from the source distribution is identical to ours byte for byte."""
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(wheel_from_sdist(tmp_path)) as theirs:
        assert sorted(ours.namelist()) == sorted(theirs.namelist())
        assert [name for name in ours.namelist() if ours.read(name) != theirs.read(name)] == []


@pytest.mark.parametrize("kind", JOURNEYS)
def test_from_nothing_to_an_answer(installed, tmp_path, kind):
    """The commands that `init` prints lead to right answers, in an empty folder with a space in its path."""
    arguments, count = JOURNEYS[kind]
    place = tmp_path / "an empty folder"
    place.mkdir()
    installed("init", "my project", "--kind", kind, cwd=place)
    project = place / "my project"
    trained = installed("train", *SHORT, cwd=project)
    assert trained.splitlines()[-1].startswith(f"Artifact storage path: {project / 'mlruns'}")
    port = free_port()
    server = installed.start("serve", "last", "--port", port, cwd=project)
    try:
        printed = [line := server.stdout.readline()]
        while line and f"http://127.0.0.1:{port}" not in line:
            printed.append(line := server.stdout.readline())
        assert line, printed
        url = f"http://127.0.0.1:{port}/predict"
        lines = [json.loads(line) for line in installed("ask", *arguments, cwd=project, PREDICT_URL=url).splitlines()]
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert len(lines) == count
    if kind == "regression":
        return
    if kind == "segmentation":
        assert [one["label"] for one in lines[0]["classes"]] == ["ground", "disc", "square", "triangle"]
        assert sum(one["pixels"] for one in lines[0]["classes"]) == 32 * 32
        return
    right = [line for line in lines if _truth(kind, line) == line["label"]]
    assert len(right) >= 0.7 * count, lines


def _truth(kind, line):
    if kind == "text":
        return "negative" if "dull" in line["text"] else "positive"
    if kind in ("table", "signal"):  # the class of the project's example file
        return {"table": "class_0", "signal": "quick"}[kind]
    digit = Path(line["image"]).stem
    return digit if kind == "images" else ("even", "odd")[int(digit) % 2]


def test_an_example_trains_where_it_is(installed, tmp_path):
    """An example trains by its pkg:// address; its modules are in the run's code.zip, as in a clone."""
    out = installed("train", "pkg://deeplightning/examples/own_code/even_or_odd.yaml", *SHORT, cwd=tmp_path)
    run = Path(out.splitlines()[-1].removeprefix("Artifact storage path: "))
    with zipfile.ZipFile(run / "code.zip") as code:
        assert {"own_data.py", "own_network.py", "own_loss.py"} <= {Path(name).name for name in code.namelist()}
    assert [path.name for path in tmp_path.iterdir()] == ["mlruns"]


SEARCH = """\
_base_: config.yaml
tune: {metric: val_acc, num_trials: 2, space: {model.optimizer.params.lr: {log_uniform: [0.001, 0.1]}}}
"""


def test_a_verb_of_a_plugin_works_when_its_wheel_is_installed(without_plugins, tmp_path):
    """Until a plug-in's wheel is installed, its verb and its config section are exit code 3 with a pip command."""
    without_plugins("init", "p", "--kind", "table", cwd=tmp_path)
    project = tmp_path / "p"
    (project / "search.yaml").write_text(SEARCH)
    for verb in ("tune", "check"):
        error = without_plugins(verb, "search.yaml", cwd=project, code=3)
        assert "`tune` is a plug-in: pip install 'deeplightning[tune]'" in error
    (wheel,) = WheelBuilder(str(ROOT / "plugins" / "deeplightning-tune")).build(
        directory=str(tmp_path), versions=["standard"]
    )
    without_plugins.add(wheel)
    assert "best" in without_plugins("tune", "search.yaml", *SHORT[:1], cwd=project)
