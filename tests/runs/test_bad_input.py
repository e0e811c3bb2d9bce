"""Whatever is wrong with config, machine, data, store or checkpoint ends with one note, the right exit code, and no
trace: no traceback, no new file, no run that seems to go on.

Most commands are forked from a process that has torch imported (see `commands.py`), a few are started as a person
starts them: those whose time and memory are measured, and one per exit code.
"""

import io
import os
import pickle
import random
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import write_mnist
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
    "tab-indented": (b"data:\n\tbatch_size: 4\n", "c.yaml:2:1: a tab in the indentation; YAML wants spaces"),
    "two documents": (b"data: {}\n---\nmodel: {}\n", "c.yaml:2:1: not YAML: but found another document"),
    "no YAML": (b"data: {a: 1\nb: ]\n", "c.yaml:2:"),
    "a recursive anchor": (b"data: &a\n  x: *a\n", "c.yaml:1:7: an alias inside its own anchor has no end"),
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
        (("init", "p", "--kind", "images", "--data", "9" * 400), 2, "no file can have so long a name: 9"),
    ],
    ids=["override", "run", "data"],
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


# ---- the machine


def test_gpus_that_are_not_there(refused, tiny):
    """Exit 3: what was asked for, what there is, and how to go on."""
    told = refused(3, "train", tiny, "engine.gpus=[97, 98]")
    assert told.startswith("override engine.gpus=[97, 98]: engine.gpus: asks for GPU indexes 97, 98; this machine has ")
    assert "`engine.gpus=null` runs on the CPU" in told
    if not torch.cuda.is_available():
        assert "asks for GPU indexes 0, 1; this machine has none;" in refused(3, "train", tiny, "engine.gpus=[0,1]")


# ---- data

MNIST = ["data.module={type: deeplightning.data.mnist.MNIST}", "model.network.params.image_size=28"]


def mnist(folder: Path, labels: np.ndarray, cut: int | None = None) -> Path:
    """A set of black images in MNIST's four files."""
    return write_mnist(folder, np.zeros((len(labels), 28, 28), np.uint8), labels.astype(np.uint8), cut)


def test_data_that_are_not_there(refused, tiny, tmp_path):
    """Exit 3: the file that is missed, and both ways to get it."""
    told = refused(3, "train", tiny, *MNIST, f"data.root={tmp_path}/no where")
    assert f"{tmp_path}/no where/MNIST/raw/train-images-idx3-ubyte is missing." in told
    assert "data.module.params.download=true" in told
    told = refused(3, "train", tiny, "data.module={type: deeplightning.data.image_folder.ImageFolder}", "data.root=no")
    assert "/no is not a folder. Set data.root to the one that holds the images." in told


@pytest.mark.parametrize("cut", [0, 10, 5000])
def test_a_data_file_that_is_cut_off(refused, tiny, tmp_path, cut):
    """Exit 3: the file, and where it can be told, how long it is and should be."""
    root = mnist(tmp_path / "set", np.arange(50) % 10, cut)
    told = refused(3, "train", tiny, *MNIST, f"data.root={root}")
    assert f"{root}/MNIST/raw/train-images-idx3-ubyte is " in told


def test_a_label_outside_the_classes(refused, tiny, tmp_path):
    """Both numbers are named: exit 3 in a file, exit 2 where the network has fewer outputs than the data classes."""
    root = mnist(tmp_path / "set", np.arange(50) % 13)
    told = refused(3, "train", tiny, *MNIST, f"data.root={root}")
    assert "label 12 of sample 12 is outside the 10 classes, 0 to 9" in told
    told = refused(2, "train", tiny, "model.network.params.num_classes=5")
    assert "the data has 10 classes (labels 0 to 9), the network 5 outputs" in told
    assert "model.network.params.num_classes=10" in told


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


@pytest.fixture(scope="module")
def trained(command, tiny, place):
    """A run that is well, and with it a store."""
    outcome = command("train", tiny, cwd=place, code=0)
    return outcome.folder


def statuses(store: Path) -> dict[str, int]:
    """How many runs of the store have which status."""
    connection = sqlite3.connect(store / "mlflow.db")
    try:
        return dict(connection.execute("SELECT status, count(*) FROM runs GROUP BY status").fetchall())
    finally:
        connection.close()


def test_a_store_that_cannot_be_made(refused, tiny):
    """Exit 3, naming the folder: here it would lie below a file."""
    Path("file").write_text("")
    assert "file/store" in refused(3, "train", tiny, "logger.params.tracking_uri=file/store")


def test_a_store_that_can_only_be_read(tiny, tmp_path, store, trained):
    """Exit 3, naming the database; nothing is added. Root runs the command without its power to write everywhere."""
    powerless = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if powerless and (
        shutil.which("setpriv") is None or subprocess.run([*powerless, "true"], check=False, stderr=-3).returncode
    ):
        pytest.skip("root may write anything, and there is no setpriv to take that from it")
    folder = tmp_path / "read only"
    folder.mkdir()
    shutil.copy(store / "mlflow.db", folder)
    (folder / "mlflow.db").chmod(0o444)
    folder.chmod(0o555)
    before = [path.name for path in folder.iterdir()]
    command = [*powerless, sys.executable, "-m", "deeplightning", "train", tiny, f"logger.params.tracking_uri={folder}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    folder.chmod(0o755)
    assert done.returncode == 3, done.stderr
    assert f"The tracking store {folder / 'mlflow.db'} cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in folder.iterdir()] == before
    assert files() == {}


@pytest.fixture
def locked(tmp_path, store, trained):
    """A store of its own, the connection that holds its database, and what runs it had before."""
    folder = tmp_path / "locked"
    folder.mkdir()
    shutil.copy(store / "mlflow.db", folder)
    before = statuses(folder)
    connection = sqlite3.connect(folder / "mlflow.db", isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    yield folder, connection, before
    connection.close()


def test_a_store_that_another_process_holds(refused, tiny, locked):
    """It is waited for, then the note names the database, the seconds, and what can be done; exit 3."""
    folder, *_ = locked
    begin = time.monotonic()
    told = refused(3, "train", tiny, f"logger.params.tracking_uri={folder}", DEEPLIGHTNING_TRACKING_WAIT="1")
    assert time.monotonic() - begin > 1
    assert f"The tracking store {folder}/mlflow.db has been locked by another process for 1 seconds." in told
    assert "DEEPLIGHTNING_TRACKING_WAIT" in told


def test_a_store_that_another_process_prepares(refused, tiny, tmp_path):
    """The same while another process makes the store, and the experiment's number is not known before: the note names
    the lock."""
    folder = tmp_path / "new"
    folder.mkdir()
    where = (f"logger.params.tracking_uri={folder}", "logger.params.experiment_name=mine")
    with FileLock(folder / "mlflow.db.lock"):
        told = refused(3, "train", tiny, *where, DEEPLIGHTNING_TRACKING_WAIT="1")
    assert f"{folder}/mlflow.db.lock has been held by another process for 1 seconds." in told


def test_a_store_that_is_freed_in_time_is_used(command, tiny, locked, here):
    """Waiting is announced, and helps: the run starts when the other process lets go."""
    folder, connection, before = locked
    started = command.start(
        "train", tiny, f"logger.params.tracking_uri={folder}", cwd=here, DEEPLIGHTNING_TRACKING_WAIT="30"
    )
    told, end = started.files.with_suffix(".err"), time.monotonic() + 20
    while not (told.exists() and "warning: Waiting for the tracking database" in told.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    connection.execute("ROLLBACK")
    started.end(code=0)
    assert statuses(folder)["FINISHED"] == before["FINISHED"] + 1


# ---- the run


def test_a_loss_that_is_no_number(command, tiny, here, tracked):
    """Exit 5 at the first one, naming metric and step; the run is FAILED with that reason, no weights are spoilt."""
    overrides = ["model.optimizer.params.lr=1e30", "train.checkpoint={monitor: val_loss}", "train.num_epochs=3"]
    outcome = command("train", tiny, *overrides, cwd=here, code=5)
    assert "Traceback" not in outcome.err
    (note,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert note.startswith("error: train_loss is nan at step ")
    assert "(epoch 1)" in note
    run = tracked(outcome.folder)
    assert run.status == "FAILED"
    assert any("train_loss is nan at step" in value for value in run.tags.values())
    assert list(outcome.folder.glob("*.ckpt")) == []


def test_a_validation_that_is_no_number_is_never_best(command, tiny, place, tracked):
    """Weights that are judged NaN are not kept as best.ckpt, and it is said."""
    overrides = ["model.loss.type=own.NoNumber", "train.checkpoint={monitor: val_loss}", "train.num_epochs=1"]
    outcome = command("train", tiny, *overrides, cwd=place)
    assert "val_loss is nan after epoch 1: not kept as best" in outcome.out + outcome.err
    assert not (outcome.folder / "best.ckpt").exists()
    assert tracked(outcome.folder).status != "RUNNING"


# ---- checkpoints


class Hostile:
    """A pickle that would make a file when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch made",)


def damaged(kind: str, good: Path, folder: Path) -> Path:
    """A checkpoint that is wrong in one way."""
    path, content = folder / "bad.ckpt", bytearray(good.read_bytes())
    old_format = io.BytesIO()
    if kind == "a flipped bit":
        with zipfile.ZipFile(good) as archive:
            largest = max(archive.infolist(), key=lambda item: item.file_size)
        content[largest.header_offset + 200] ^= 1
    elif kind == "a hostile pickle of the old format":
        torch.save({"state_dict": Hostile()}, old_format, _use_new_zipfile_serialization=False)
    contents = {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "random bytes": random.Random(0).randbytes(5000),
        "a flipped bit": content,
        "a hostile pickle": pickle.dumps(Hostile()),
        "a hostile pickle of the old format": old_format.getvalue(),
    }
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "a hostile pickle in a checkpoint":
        torch.save({**torch.load(good, weights_only=True), "extra": Hostile()}, path)
    elif kind == "only weights":
        torch.save(torch.load(good, weights_only=True)["state_dict"], path)
    elif kind == "a folder":
        path.mkdir()
    return path


CHECKPOINTS = {
    "missing": "there is no such checkpoint",
    "empty": "damaged or no checkpoint at all",
    "truncated": "damaged or no checkpoint at all",
    "random bytes": "damaged or no checkpoint at all",
    "a flipped bit": "damaged: the checksum of ",
    "a hostile pickle": "damaged or no checkpoint at all",
    "a hostile pickle of the old format": "damaged or no checkpoint at all",
    "a hostile pickle in a checkpoint": "holds more than plain values; it was not loaded, and nothing of it was",
    "only weights": "a checkpoint holds a `state_dict`",
    "a folder": "",
}


USES = {"resume": ["train.resume_ckpt={}"], "test": ["stages=[test]", "test.ckpt={}"]}


@pytest.mark.parametrize(
    ("kind", "use"),
    [*((kind, "resume") for kind in CHECKPOINTS), ("missing", "test"), ("a hostile pickle in a checkpoint", "test")],
)
def test_a_checkpoint_that_is_none(refused, tiny, tmp_path, trained, store, kind, use):
    """Exit 4, naming file and reason; nothing of it is executed, no run is begun. A test reads it as a resume does."""
    path = damaged(kind, trained / "last.ckpt", tmp_path)
    before = statuses(store)
    told = refused(4, "train", tiny, *(text.format(path) for text in USES[use]))
    assert str(path) in told
    assert CHECKPOINTS[kind] in told
    assert statuses(store) == before
    assert not Path("made").exists()


OTHER_NETWORKS = """\
from torch import nn

from deeplightning.model.cnn import SimpleCNN


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def wider():
    network = SimpleCNN(10, 1, image_size=8)
    network.features[0], network.features[3] = nn.Conv2d(1, 20, 5, padding=2), nn.Conv2d(20, 32, 5, padding=2)
    return network
"""


@pytest.mark.parametrize("use", USES)
def test_a_checkpoint_of_another_network(refused, tiny, trained, store, use, here):
    """Exit 4, naming the file and the first tensors that do not fit; no run is begun."""
    (here / "own_net.py").write_text(OTHER_NETWORKS)
    before, path = statuses(store), trained / "last.ckpt"
    overrides = [text.format(path) for text in USES[use]]
    for network in ("model.network={type: own_net.linear}", "model.network={type: own_net.wider}"):
        told = refused(4, "train", tiny, *overrides, network)
        assert str(path) in told
        assert "of another network" in told
    assert statuses(store) == before


def test_a_run_folder_without_weights(refused, tiny, here):
    """Exit 4 for each verb that wants a RUN: a folder that is none, a word that is none."""
    (here / "empty").mkdir()
    for verb in ("test", "predict", "export", "serve"):
        assert "empty" in refused(4, verb, "empty")
    assert refused(4, "test", "no_such_run")


def test_no_run_seems_to_go_on(store, trained):
    """After all of the above the store holds no run in state RUNNING."""
    assert "RUNNING" not in statuses(store)


@pytest.mark.parametrize(
    ("code", "overrides"),
    [(3, ["data.module.type=deeplightning.data.mnist.MNIST", "data.root=no"]), (4, ["train.resume_ckpt=no.ckpt"])],
)
def test_a_fresh_process_says_the_same(refused, tiny, code, overrides):
    """What a person starts ends like what is forked here."""
    assert refused(code, "train", tiny, *overrides, start=real)
