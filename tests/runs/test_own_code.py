"""User code: where it is found, how its errors are reported, and what a run keeps of it."""

import importlib
import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from commands import real

from deeplightning import own_code
from deeplightning.config.examine import examine
from deeplightning.faults import PROJECTS

WAVE = """\
from test import width

from torch import nn

import own_helper


class Net(nn.Sequential):
    def __init__(self, classes):
        assert own_helper.CHOICE == width
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))
"""
HOOK = """\
import logging

import pytorch_lightning as pl

log = logging.getLogger(__name__)


class Hook(pl.Callback):
    def on_train_start(self, trainer, module):
        log.debug("hardly")
        log.info("begins on %d", trainer.global_rank)
        logging.getLogger("users.other").warning("careful")
"""
OWN = {
    "wave": WAVE,  # a name of the standard library
    "test": "width = 8\n",
    "own_helper": "from test import width as CHOICE\n",
    "criteria": "from torch import nn\n\n\nclass Loss(nn.CrossEntropyLoss):\n    pass\n",
    "hook": HOOK,
    "digits": "from deeplightning.data.digits import Digits\n\n\nclass Data(Digits):\n    pass\n",
    **dict.fromkeys(("torch", "serve"), "raise RuntimeError('never imported')\n"),
}
NAMES = (
    "data.module.type=digits.Data",
    "~model.network",
    "model.network={type: wave.Net, params: {classes: 10}}",
    "model.loss.type=criteria.Loss",
    "train.callbacks=[{type: hook.Hook}]",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory whose files have the names of installed modules."""
    folder = tmp_path_factory.mktemp("work") / "my code"
    folder.mkdir()
    for name, text in OWN.items():
        (folder / f"{name}.py").write_text(text)
    for name in ("z3", "onnxscript/docs"):  # torch tries to import both
        (folder / name).mkdir(parents=True)
        (folder / name / "notes.txt").write_text("no code\n")
    return folder


@pytest.fixture(scope="module")
def done(command, tiny, place):
    """A run of two processes with a bundle, and the progress bar of `rich`."""
    more = ("engine.processes=2", "train.export=true", "logger.progress=bar", "logger.ranks=[0, 1]")
    return command("train", tiny, *NAMES, *more, "train.num_epochs=1", cwd=place, ranks=2, code=0)


def test_own_files_come_before_installed_modules(done, tiny, place):
    """`check` and `train` import user files before installed modules, in every process; libraries are unaffected."""
    for importing in ([], ["--import"]):
        real("check", *importing, tiny, *NAMES, cwd=place, code=0)
    assert (done.folder / "bundle" / "model.onnx").is_file()
    with zipfile.ZipFile(done.folder / "code.zip") as code:
        kept = {name.removeprefix("0/") for name in code.namelist() if name.startswith("0/")}
    assert kept == {f"{name}.py" for name in OWN if name not in ("torch", "serve")}


def test_a_file_that_hides_an_installed_module_is_one_warning(done):
    """The warning names both files and appears in one process of the run."""
    message = f"wave.py hides {Path(random.__file__).with_name('wave.py')}, which libraries may need: rename it"
    assert sum(outcome.err.count(message) for outcome in done.ranks) == 1, done


def test_what_own_loggers_say_is_in_the_log_of_its_rank(done):
    """All loggers write to the log file of their rank from INFO on; terminal lines of several ranks name the rank."""
    for rank, outcome in enumerate(done.ranks):
        text = (done.folder / "logs" / f"rank_{rank}.log").read_text()
        assert text.count(f" INFO hook: begins on {rank}\n") == 1
        assert text.count(" WARNING users.other: careful\n") == 1
        assert text.count(": first loss ") == 1
        assert "hardly" not in text
        assert outcome.err.count(f"[rank {rank}] careful\n") == 1, outcome
        shown = [line for line in outcome.out.splitlines() if "first loss" in line or "epoch" in line.split()[:1]]
        assert all(line.startswith(f"[rank {rank}] ") for line in shown), outcome
        assert any("first loss" in line for line in shown), outcome


def test_a_message_on_a_name_says_which_file_was_read(command, tiny, place, tmp_path):
    """The error names the user's file if there is one, and the installed one otherwise."""
    for importing in ([], ["--import"]):
        outcome = command("check", *importing, tiny, "model.network={type: wave.Nett}", cwd=place)
        assert "wave has no `Nett`. Did you mean wave.Net? `wave` was read from wave.py." in outcome.err, outcome
        outcome = command("check", *importing, tiny, "model.network={type: yaml.Nett}", cwd=tmp_path)
        assert f"yaml has no `Nett`. `yaml` was read from {yaml.__file__}." in outcome.err, outcome
        outcome = command("check", *importing, tiny, "model.network={type: __main__.Nett}", cwd=tmp_path)
        assert "put the class of a script or notebook into a file" in outcome.err, outcome


@pytest.mark.parametrize("module", ["serve", pytest.param("deeplightning.torch_server", marks=pytest.mark.slow)])
def test_our_server_starts_beside_a_serve_py(module, place):
    """The servers start with `-P`, as `deeplightning serve` starts them, beside a user file `serve.py`."""
    done = subprocess.run([sys.executable, "-P", "-m", module, "--help"], cwd=place, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:6]) == (0, "usage:"), done.stderr


def test_no_file_of_a_foreign_run_folder_is_imported(done, command, tmp_path):
    """No file of a run folder from elsewhere is imported, even if the folder is the working directory."""
    folder = tmp_path / "from the web"
    folder.mkdir()
    config = (done.folder / "cfg.yaml").read_text().replace("wave.Net", "timm.layers.Mlp")
    config = config.replace("digits.Data", "deeplightning.data.digits.Digits")
    (folder / "cfg.yaml").write_text(config.replace("criteria.Loss", "torch.nn.CrossEntropyLoss"))
    for name in ("best.ckpt", "last.ckpt"):
        if (done.folder / name).is_file():
            (folder / name).write_bytes((done.folder / name).read_bytes())
    for name in ("timm", "rich", "random", "torch", "deeplightning"):
        (folder / f"{name}.py").write_text("open('executed', 'w')\n")
    for more in ([], ["--allow", "timm"]):
        outcome = command("export", folder, *more, cwd=folder)
        assert outcome.code != 0
        assert not (folder / "executed").exists(), outcome


@pytest.mark.parametrize("importing", [[], ["--import"]])
def test_code_beside_a_base_is_found(command, tiny, tmp_path, importing):
    """The folders of all composed files are searched, the nearest first."""
    middle, deep, here = tmp_path / "middle", tmp_path / "deep", tmp_path / "here"
    for folder in (middle, deep, here):
        folder.mkdir()
    (deep / "base.yaml").write_text(f"_base_: {tiny}\n")
    (middle / "base.yaml").write_text("_base_: ../deep/base.yaml\n")
    (middle / "c.yaml").write_text(
        "_base_: base.yaml\nmodel: {loss: {type: lossy.Loss}, network: {type: netty.Net, params: {~num_classes: 0}}}\n"
    )
    text = "from torch import nn\nclass Loss(nn.CrossEntropyLoss):\n    pass\n"
    (deep / "lossy.py").write_text(text)
    (deep / "netty.py").write_text("raise RuntimeError('the farther one')\n")
    (middle / "netty.py").write_text("from deeplightning.model.cnn import SimpleCNN as Net\n")
    override = "model.network.params={num_classes: 10, num_channels: 1, image_size: 8}"
    arguments = ("check", *importing, middle / "c.yaml", override)
    command(*arguments, cwd=here, code=0)
    refused = command(*arguments, "model.loss.type=lost.Loss", cwd=here, code=2)
    assert f"Searched: {here}, {middle}, {deep}, {tiny.parent}, and what is installed." in refused.err


def test_code_beside_a_base_is_kept_with_the_run(command, tiny, tmp_path):
    """`code.zip` of the run contains the code."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "b.yaml").write_text(f"_base_: {tiny}\n")
    (tmp_path / "base" / "beside_a_base.py").write_text("from torch.nn import CrossEntropyLoss as Loss\n")
    (tmp_path / "c.yaml").write_text("_base_: base/b.yaml\nmodel: {loss: {type: beside_a_base.Loss}}\n")
    outcome = command("train", "c.yaml", "train.num_epochs=1", cwd=tmp_path, code=0)
    with zipfile.ZipFile(outcome.folder / "code.zip") as code:
        assert json.loads(code.read("manifest.json"))["roots"] == [str(tmp_path / "base")]


# ---- user files that cannot be imported

LOSS = "from torch.nn import CrossEntropyLoss\n{}\n\n\nclass L(CrossEntropyLoss):\n    pass\n"
LACKS = "importing mine (for `mine.L`) needs not_there, which is not installed here ({}): pip install its-project"
FAILS = "importing mine (for `mine.L`) failed: {}"
DEEP = f"{Path('package', 'deep.py')}:1"
BROKEN = {
    # the text after the first line, the exit code, the message
    "a package": ("import not_there", 3, LACKS.format("mine.py:2")),
    "a submodule": ("from not_there.part import thing", 3, LACKS.format("mine.py:2")),
    "a package that a user file needs": ("import helper", 3, LACKS.format("helper.py:3")),
    "a package that a user package needs": ("from package.part import thing", 3, LACKS.format(DEEP)),
}
RAISES = {
    "a library": ("raise OSError('libfoo.so not found')", 3, FAILS.format("OSError: libfoo.so not found (mine.py:2)")),
    "an error": ("if True:\n    raise RuntimeError('no')", 2, FAILS.format("RuntimeError: no (mine.py:3)")),
    "a bare error": ("raise Exception", 2, FAILS.format("Exception (mine.py:2)")),
}
ONLY_IMPORTED = {
    **RAISES,
    "a library in C": ("import ctypes\nctypes.CDLL('libfoo.so')", 3, "OSError: libfoo.so: "),
    "a missing submodule": ("import torch.not_there", 2, "No module named 'torch.not_there' (mine.py:2)"),
}
HARMLESS = {
    "behind try": "try:\n    import not_there\nexcept ImportError:\n    not_there = None",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import not_there",
    "in a function": "def late():\n    import not_there",
    "in a circle": "import circle",
    "conditional": "if len(__name__) == 0:\n    raise OSError('libfoo.so not found')",
    "caught": "try:\n    raise OSError('libfoo.so not found')\nexcept OSError:\n    pass",
}


@pytest.fixture
def mine(tmp_path, tiny, monkeypatch):
    """`mine(text, importing)` writes `mine.py` into an empty working directory and checks a config with its loss."""
    (tmp_path / "helper.py").write_text("import os\n\nimport not_there\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "part.py").write_text("from .deep import thing\n")
    (tmp_path / "package" / "deep.py").write_text("from not_there import thing\n")
    (tmp_path / "circle.py").write_text("import mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PROJECTS, "not_there", "its-project")
    before = set(sys.modules)

    def check(text, importing):
        (tmp_path / "mine.py").write_text(LOSS.format(text))
        for name in set(sys.modules) - before:
            if own_code.is_own(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]
        importlib.invalidate_caches()
        return examine(tiny, ["model.loss.type=mine.L"], importing=importing)

    yield check
    check("", False)


@pytest.mark.parametrize(
    ("text", "code", "message", "importing"),
    [
        *((*case, True) for case in BROKEN.values()),
        *(pytest.param(*case, False, marks=[pytest.mark.slow] * (n > 1)) for n, case in enumerate(BROKEN.values())),
        *((*case, True) for case in ONLY_IMPORTED.values()),
    ],
)
def test_a_user_file_that_cannot_be_imported_is_reported(mine, text, code, message, importing):
    """The error names the line. A missing library has exit code 3, and a missing package its install command."""
    report = mine(text, importing)
    (fault,) = report.faults
    assert (fault.key, report.exit_code) == ("model.loss.type", code)
    assert message in fault.message, fault


def test_an_import_that_may_fail_is_no_fault(mine):
    """Optional imports of a user file, and errors that only an import would raise, are no fault."""
    for text in HARMLESS.values():
        for importing in (False, True):
            report = mine(text, importing)
            assert (report.faults, report.unchecked) == ([], []), text
    for text, *_ in RAISES.values():  # the import reports the error
        assert mine(text, False).faults == [], text


@pytest.mark.parametrize("verb", ["check", "train", "explain", "check --dry-run"])
def test_a_package_that_is_not_installed_is_reported_by_each_verb(command, tiny, tmp_path, verb):
    """Each verb gives the same message and exit code 3."""
    (tmp_path / "mine.py").write_text(LOSS.format("import skimage.not_there"))
    outcome = command(*verb.split(), tiny, "model.loss.type=mine.L", cwd=tmp_path, code=3)
    message = "needs skimage, which is not installed here (mine.py:2): pip install scikit-image"
    assert f"model.loss.type: importing mine (for `mine.L`) {message}" in outcome.err


@pytest.mark.parametrize("function", ["__init__(self)", "forward(self, *batch)"])
def test_a_package_that_a_function_needs(command, tiny, tmp_path, function):
    """A missing package that a function imports is reported only when the function is called."""
    text = LOSS.format("").replace("    pass", f"    def {function}:\n        import skimage.not_there")
    (tmp_path / "mine.py").write_text(text)
    for verb in (["train"], ["check", "--dry-run"]):
        outcome = command(*verb, tiny, "model.loss.type=mine.L", cwd=tmp_path, code=3)
        assert outcome.err.count("error: ") == 1
        assert "needs skimage, which is not installed here (mine.py:7): pip install scikit-image" in outcome.err
    assert command("check", tiny, "model.loss.type=mine.L", cwd=tmp_path).code == 0


def test_what_pip_installs_into_a_folder_is_no_own_code(tmp_path):
    """A folder of `pip install --target` is not user code; the working directory and other import roots are."""
    for name in ("target", "mine", "here"):
        (tmp_path / name).mkdir()
    for name in ("target", "here"):
        (tmp_path / name / "library-1.0.dist-info").mkdir()
    script = "from deeplightning import own_code\nprint(*map(own_code.is_user_file, PLACES))"
    places = [str(tmp_path / name / "module.py") for name in ("target", "mine", "here")]
    path = f"{tmp_path / 'target'}{os.pathsep}{tmp_path / 'mine'}"
    done = subprocess.run(
        [sys.executable, "-c", script.replace("PLACES", repr(places))],
        cwd=tmp_path / "here", env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "False True True\n", done.stderr


def test_the_standard_library_is_no_own_code_with_homebrew(tmp_path):
    """Its `sitecustomize` sets `sys.base_prefix` to a link, so that `sysconfig` has other paths than the modules."""
    (tmp_path / "opt").symlink_to(sys.base_prefix)
    script = (
        "import json, sys\nsys.modules.pop('sysconfig', None)\n"
        f"sys.base_prefix = sys.base_exec_prefix = sys.exec_prefix = {str(tmp_path / 'opt')!r}\n"
        "from deeplightning import own_code\nprint(own_code.is_user_file(json.__file__))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
