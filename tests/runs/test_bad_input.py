"""Invalid config, machine, data, store or checkpoint: one error line, the right exit code, and no other effect.

There is no traceback, no new file and no run that looks unfinished. Most commands are forked from a process that has
imported torch (see `commands.py`); those whose time and memory are measured, and one per exit code, are new processes.
"""

import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import environment, real
from filelock import FileLock

SECONDS = 10  # no invalid input takes longer, even on a busy machine


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files() -> dict[str, bytes]:
    """Return all files in the working directory except compiled code."""
    found = (path for path in Path().rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): path.read_bytes() for path in found}


def _seconds(start) -> float:
    """Return the clock that is limited: wall time, or CPU time for a new process, which imports everything."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime if start is real else time.monotonic()


@pytest.fixture
def refused(command, here):
    """`refused(code, argument, …)` runs a command that must end with this exit code, and returns its only error."""

    def run(code: int, *arguments: object, start=command, **variables: str) -> str:
        before, folders = files(), set(here.rglob("*/"))
        begin = _seconds(start)
        outcome = start(*arguments, cwd=here, **variables)
        assert _seconds(start) - begin < SECONDS
        assert outcome.code == code, outcome
        assert "Traceback" not in outcome.out + outcome.err
        assert len(re.findall("^error: ", outcome.err, re.MULTILINE)) == 1, outcome
        assert outcome.err.startswith(("error: ", "warning: ")), outcome
        assert "Artifact storage path" not in outcome.out
        assert files() == before
        assert {folder for folder in here.rglob("*/") if folder.name != "__pycache__"} == folders
        return outcome.err.partition("error: ")[2]

    return run


CONFIGS = {
    "empty": (b"", "c.yaml: this file is empty; a config is a mapping of keys such as `data:`"),
    "only comments": (b"# nothing\n\n", "c.yaml: this file is empty"),
    "a list": (b"- 1\n", "c.yaml: this file holds a list; a config is a mapping"),
    "binary": (bytes(range(256)) * 50, "c.yaml: not text in UTF-8 (byte 128 is 0x80); is this the right file?"),
    "zero bytes": (bytes(5000), "c.yaml: not YAML: unacceptable character"),
    "tab-indented": (b"data:\n\tbatch_size: 4\n", "c.yaml:2:1: a tab in the indentation; YAML needs spaces"),
    "two documents": (b"data: {}\n---\nmodel: {}\n", "c.yaml:2:1: not YAML: but found another document"),
    "no YAML": (b"data: {a: 1\nb: ]\n", "c.yaml:2:"),
    "a recursive anchor": (b"data: &a\n  x: *a\n", "c.yaml:1:7: an alias inside its own anchor is circular"),
    "nested": ("\n".join(" " * n + "a:" for n in range(1200)).encode(), "c.yaml:61:61: nested more than 60 deep"),
    "a bomb of merges": (
        b"a0: &a0 {x: 1, y: 2}\n"
        + b"".join(b"a%d: &a%d {<<: [%s]}\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 50)),
        "this config expands to more than 50000 values",
    ),
    "a large file": (b"a: " + b"x" * 5_000_000, "c.yaml: a config has at most 1000 kB; is this the right file?"),
}


@pytest.mark.parametrize(("content", "words"), CONFIGS.values(), ids=CONFIGS)
def test_a_file_that_is_no_config(refused, content, words):
    """A file that is not a config ends with exit code 2 and one error that names the file, and the line if any."""
    Path("c.yaml").write_bytes(content)
    assert words in refused(2, "train", "c.yaml")


def test_a_config_file_that_cannot_be_read(refused):
    """A missing file, a folder, a too long name and a cycle of links each end with exit code 2 and their own error."""
    assert refused(2, "train", "no.yaml", start=real) == "no.yaml: there is no such config file\n"
    assert refused(2, "check", "no.yaml").startswith("no.yaml: there is no such config file")
    assert refused(2, "train", ".") == ".: this is a folder, a pipe or a device; name a YAML file\n"
    assert "cannot be read: File name too long" in refused(2, "train", "x" * 300)
    Path("c.yaml").symlink_to("d.yaml")
    Path("d.yaml").symlink_to("c.yaml")
    assert "c.yaml: cannot be read: Too many levels of symbolic links" in refused(2, "train", "c.yaml")


@pytest.mark.parametrize(
    ("words", "code", "note"),
    [
        (("check", "c.yaml", "version=" + "9" * 400), 2, "version: must be at most 1, not 9"),
        (("report", "9" * 400), 4, "There is no tracking store"),
        (("init", "p", "--kind", "images", "--data", "9" * 400), 3, "999: there is no such file or folder"),
        (
            ("train", "c.yaml", "logger.params.tracking_uri=" + "x" * 400),
            *((2, "this file name is too long: ") if sys.version_info < (3, 14) else (3, "File name too long")),
        ),  # `Path.exists` raises no error since Python 3.14
    ],
    ids=["override", "run", "data", "store"],
)
def test_a_name_that_no_file_can_have(refused, tiny, words, code, note):
    """A name that is too long for the file system is one error, without a traceback."""
    Path("c.yaml").write_text(tiny.read_text())
    assert note in refused(code, *words)


@pytest.mark.parametrize(("levels", "width"), [(101, 4), (90_000, 9)], ids=["3 kB", "5 MB"])
def test_a_bomb_costs_little_time_and_memory(levels, width):
    """A new process with 200 MB of address space and two CPU seconds refuses anchors of `width` ** `levels` values."""
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    Path("c.yaml").write_text("\n".join([f"a0: &a0 [{', '.join('x' * width)}]", *lines]))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (200_000_000, 200_000_000))
        resource.setrlimit(resource.RLIMIT_CPU, (2, 2))

    command = [sys.executable, "-m", "deeplightning", "train", "c.yaml"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, preexec_fn=limit)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: c.yaml")
    assert len(done.stderr.splitlines()) == 1


def test_a_label_outside_the_network_of_a_module_that_names_no_classes(command, tiny, here):
    """Such a label is an error of the data when its batch arrives, before the loss fails with an index error."""
    (here / "own_data.py").write_text(
        "from deeplightning.data.digits import Digits\n\n\nclass Nameless(Digits):\n"
        "    def setup(self, stage=None):\n        super().setup(stage)\n        self.class_names = []\n"
    )
    settings = ("data.module.type=own_data.Nameless", "model.network.params.num_classes=5")
    outcome = command("train", tiny, *settings, cwd=here, code=3)
    assert re.search("error: the data holds label [5-9], the network has 5 outputs .labels 0 to 4.; ", outcome.err)
    assert "Traceback" not in outcome.err


def test_a_store_that_another_process_prepares(refused, tiny, tmp_path):
    """While another process creates the store, a run waits for the lock, then ends with exit code 3 and names it."""
    folder = tmp_path / "new"
    folder.mkdir()
    where = (f"logger.params.tracking_uri={folder}", "logger.params.experiment_name=mine")
    with FileLock(folder / "mlflow.db.lock"):
        error = refused(3, "train", tiny, *where, DEEPLIGHTNING_TRACKING_WAIT="1")
    assert f"{folder}/mlflow.db.lock has been locked by another process for 1 seconds." in error


class Hostile:
    """A pickle that creates a file when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch made",)


@pytest.mark.parametrize("use", [["train.resume_ckpt={}"], ["stages=[test]", "test.ckpt={}"]], ids=["resume", "test"])
def test_a_checkpoint_with_code_is_refused(refused, train, tiny, tmp_path, store, use):
    """A resume and a test refuse it with exit code 4, file and reason; no code in it runs, and no run is created."""
    good, path = train("train.max_steps=1").folder, tmp_path / "bad.ckpt"
    torch.save({**torch.load(good / "last.ckpt", weights_only=True), "extra": Hostile()}, path)
    before = {*store.glob("*/*")}
    error = refused(4, "train", tiny, *(text.format(path) for text in use))
    assert f"{path}: " in error
    assert "holds more than plain values; it was not loaded, and nothing in it was" in error
    assert {*store.glob("*/*")} == before
    assert not Path("made").exists()


def test_a_run_folder_without_weights(refused, here):
    """Each verb that takes a RUN ends with exit code 4 for a folder that is not a run, and for an unknown name."""
    (here / "empty").mkdir()
    for verb in ("test", "predict", "export", "serve"):
        assert "empty" in refused(4, verb, "empty")
    assert refused(4, "test", "no_such_run")


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        pytest.param(3, ["data.module.type=deeplightning.data.mnist.MNIST", "data.root=no"], marks=pytest.mark.slow),
        (4, ["train.resume_ckpt=no.ckpt"]),
    ],
)
def test_a_fresh_process_says_the_same(refused, tiny, code, overrides):
    """A new process ends with the same exit code and one error, like a forked one."""
    assert refused(code, "train", tiny, *overrides, start=real)
