"""Whatever is wrong with config, machine, data, store or checkpoint ends with one note, the right exit code, and no
trace: no traceback, no new file, no run that seems to go on.

Most commands are forked from a process that has torch imported (see `commands.py`), a few are started as a person
starts them: those whose time and memory are measured, and one per exit code.
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

SECONDS = 10  # no bad input takes longer, not even beside busy neighbours


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files() -> dict[str, bytes]:
    """Everything in the working directory, but compiled code."""
    found = (path for path in Path().rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): path.read_bytes() for path in found}


def _seconds(start) -> float:
    """Return what a command may take ten seconds of: the time, or CPU time where it is a new process, which imports
    all beside other tests."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime if start is real else time.monotonic()


@pytest.fixture
def refused(command, here):
    """`refused(code, argument, …)` runs a command that must end with this exit code, leaves no trace, and gives the
    words of its only note."""

    def run(code: int, *arguments: object, notes: int = 1, start=command, **variables: str) -> str:
        before, folders = files(), set(here.rglob("*/"))
        begin = _seconds(start)
        outcome = start(*arguments, cwd=here, **variables)
        assert _seconds(start) - begin < SECONDS
        assert outcome.code == code, outcome
        assert "Traceback" not in outcome.out + outcome.err
        lines = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == notes, outcome
        assert outcome.err.startswith(("error: ", "warning: ")), outcome
        assert "Artifact storage path" not in outcome.out
        assert files() == before
        assert {folder for folder in here.rglob("*/") if folder.name != "__pycache__"} == folders
        return outcome.err.partition("error: ")[2]

    return run


# ---- the config file


def exponential_bomb() -> bytes:
    """Three kilobytes of anchors that stand for 9 ** 100 values."""
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 4)}]" for n in range(1, 101)]
    return "\n".join(["a0: &a0 [x, x, x, x]", *levels]).encode()


def large_bomb() -> bytes:
    """Five megabytes of anchors."""
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 90_000)]
    text = "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x]", *levels]).encode()
    assert len(text) > 5_000_000
    return text


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
    "deep mappings": (
        "\n".join(" " * n + "a:" for n in range(1200)).encode(),
        "c.yaml:61:61: nested more than 60 deep",
    ),
    "a bomb of merges": (
        b"a0: &a0 {x: 1, y: 2}\n"
        + b"".join(b"a%d: &a%d {<<: [%s]}\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 50)),
        "this config expands to more than 50000 values",
    ),
    "a large file": (b"a: " + b"x" * 5_000_000, "c.yaml: a config has at most 1000 kB; is this the right file?"),
}


@pytest.mark.parametrize(("content", "words"), CONFIGS.values(), ids=CONFIGS)
def test_a_file_that_is_no_config(refused, content, words):
    """One note that names the file, and the line where there is one; exit 2."""
    Path("c.yaml").write_bytes(content)
    assert words in refused(2, "train", "c.yaml")


def test_a_config_file_that_is_not_there(refused):
    """The note says which YAML files are; a folder is told apart; also when a fresh process is asked."""
    Path("other.yaml").write_text("seed: 1\n")
    assert refused(2, "train", "no.yaml", start=real) == "no.yaml: there is no such config file\n"
    assert refused(2, "check", "no.yaml").startswith("no.yaml: there is no such config file")
    assert refused(2, "train", ".") == ".: this is a folder, a pipe or a device; name a YAML file\n"
    assert "cannot be read: File name too long" in refused(2, "train", "x" * 300)


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
    """A note, not a traceback of the operating system's error."""
    Path("c.yaml").write_text(tiny.read_text())
    assert note in refused(code, *words)


def test_links_that_go_round_are_no_config(refused):
    """A note, not an endless search."""
    Path("c.yaml").symlink_to("d.yaml")
    Path("d.yaml").symlink_to("c.yaml")
    assert "c.yaml: cannot be read: Too many levels of symbolic links" in refused(2, "train", "c.yaml")


@pytest.mark.parametrize("bomb", [exponential_bomb, large_bomb])
def test_a_bomb_costs_little_time_and_memory(bomb):
    """A fresh process that is given 200 MB of address space and two seconds of CPU answers a config of anchors within
    anchors with its note."""
    Path("c.yaml").write_bytes(bomb())

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (200_000_000, 200_000_000))
        resource.setrlimit(resource.RLIMIT_CPU, (2, 2))

    command = [sys.executable, "-m", "deeplightning", "train", "c.yaml"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, preexec_fn=limit)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: c.yaml")
    assert len(done.stderr.splitlines()) == 1


# ---- data


def test_a_label_outside_the_network_of_a_module_that_names_no_classes(command, tiny, here):
    """Found when it comes along, before the loss could fail with an index error."""
    (here / "own_data.py").write_text(
        "from deeplightning.data.digits import Digits\n\n\nclass Nameless(Digits):\n"
        "    def setup(self, stage=None):\n        super().setup(stage)\n        self.class_names = []\n"
    )
    settings = ("data.module.type=own_data.Nameless", "model.network.params.num_classes=5")
    outcome = command("train", tiny, *settings, cwd=here, code=3)
    assert re.search("error: the data holds label [5-9], the network has 5 outputs .labels 0 to 4.; ", outcome.err)
    assert "Traceback" not in outcome.err


# ---- the tracking store


def test_a_store_that_another_process_prepares(refused, tiny, tmp_path):
    """While another process makes the store, the experiment's number is not known: after the wait the note names the
    lock."""
    folder = tmp_path / "new"
    folder.mkdir()
    where = (f"logger.params.tracking_uri={folder}", "logger.params.experiment_name=mine")
    with FileLock(folder / "mlflow.db.lock"):
        told = refused(3, "train", tiny, *where, DEEPLIGHTNING_TRACKING_WAIT="1")
    assert f"{folder}/mlflow.db.lock has been locked by another process for 1 seconds." in told


# ---- checkpoints


class Hostile:
    """A pickle that would make a file when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch made",)


@pytest.mark.parametrize("use", [["train.resume_ckpt={}"], ["stages=[test]", "test.ckpt={}"]], ids=["resume", "test"])
def test_a_checkpoint_that_is_none(refused, train, tiny, tmp_path, store, use):
    """Exit 4, naming file and reason; nothing of it is executed, no run is begun. A test reads it as a resume does."""
    good, path = train("train.max_steps=1").folder, tmp_path / "bad.ckpt"
    torch.save({**torch.load(good / "last.ckpt", weights_only=True), "extra": Hostile()}, path)
    before = {*store.glob("*/*")}
    told = refused(4, "train", tiny, *(text.format(path) for text in use))
    assert f"{path}: " in told
    assert "holds more than plain values; it was not loaded, and nothing in it was" in told
    assert {*store.glob("*/*")} == before
    assert not Path("made").exists()


def test_a_run_folder_without_weights(refused, tiny, here):
    """Exit 4 for each verb that wants a RUN: a folder that is none, a word that is none."""
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
    """What a person starts ends like what is forked here."""
    assert refused(code, "train", tiny, *overrides, start=real)
