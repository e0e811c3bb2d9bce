"""A checkpoint is on the disk whole or not at all, and reading one executes nothing."""

import enum
import os
import pickle
import resource
import signal
import zipfile
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deeplightning.engine import checkpoint_io
from deeplightning.engine.checkpoint_io import SafeCheckpointIO
from deeplightning.engine.checkpoint_reading import load_weights, read_checkpoint
from deeplightning.faults import CheckpointError, SetupError


class RunsACommand:
    """What a hostile pickle holds."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.fixture
def checkpoint():
    torch.manual_seed(0)
    return {"state_dict": {"weight": torch.randn(100, 100)}, "epoch": 3, "callbacks": {"kept": [1.5, "word", None]}}


@pytest.fixture
def path(tmp_path, checkpoint):
    path = tmp_path / "folder" / "last.ckpt"
    SafeCheckpointIO().save_checkpoint(checkpoint, path)
    return path


def in_a_child(do):
    """Runs a function in a process of its own; its exit code, negative where a signal ended it."""
    child = os.fork()
    if child == 0:
        try:
            do()
            os._exit(0)
        except SetupError as error:
            os.write(2, str(error).encode())
            os._exit(3)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_what_is_saved_comes_back(path, checkpoint):
    """Tensors, numbers and texts are the same, nothing but the file is left, and folders are made."""
    found = SafeCheckpointIO().load_checkpoint(path, weights_only=False)
    assert torch.equal(found.pop("state_dict")["weight"], checkpoint.pop("state_dict")["weight"])
    assert found == checkpoint
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]


def test_values_of_numpy_come_back_as_plain_ones(tmp_path, checkpoint):
    """In dicts, lists and tuples, also as keys; those of the user stay as they are."""
    own = {"best": np.float64(1.5), np.int64(3): [np.arange(3)[::-1], (np.bool_(True),)], "words": np.array(["a"])}
    SafeCheckpointIO().save_checkpoint(checkpoint | {"own": own}, tmp_path / "last.ckpt")
    found = read_checkpoint(tmp_path / "last.ckpt")["own"]
    assert (found["best"], found[3][0].tolist(), found[3][1], found["words"]) == (1.5, [2, 1, 0], (True,), ["a"])
    assert (type(own["best"]), type(own[3][0])) == (np.float64, np.ndarray)


def test_what_is_not_read_again_is_left_out_of_checkpoints(tmp_path, checkpoint, caplog):
    """At the top and one level below, also what cannot be saved at all; one note names the places, and the values of
    the user stay."""
    io, path = SafeCheckpointIO(), tmp_path / "last.ckpt"
    own = {"at": datetime(2026, 1, 1), "kept": [np.float64(1.5)], "call": lambda: None, "self": []}
    own["self"].append(own["self"])
    given = checkpoint | {
        "own": own,
        "day": datetime(2026, 1, 1),
        "callbacks": {"Mine": {"at": datetime}, "Other": {"n": 1}},
    }
    for _ in range(2):
        io.save_checkpoint(given, path)
    found = read_checkpoint(path)
    assert (found["own"], found["callbacks"], "day" in found) == ({"kept": [1.5]}, {"Other": {"n": 1}}, False)
    assert (own.keys(), given.keys()) == (
        {"at", "kept", "call", "self"},
        checkpoint.keys() | {"own", "day", "callbacks"},
    )
    (note,) = [each.getMessage() for each in caplog.records]
    assert (
        "leave out callbacks['Mine'], own['at'], own['call'], own['self'], day: only plain values can be restored"
        in note
    )


class Colour(enum.Enum):
    RED = 1


def test_a_key_that_is_not_read_again_is_left_out_with_its_value(tmp_path, checkpoint):
    """The checkpoint stays readable, whatever the type of the key."""
    own = {Colour.RED: 1, (1, 2): 2, 3: Colour.RED, "kept": 4}
    SafeCheckpointIO().save_checkpoint(checkpoint | {"own": own}, tmp_path / "last.ckpt")
    assert read_checkpoint(tmp_path / "last.ckpt")["own"] == {(1, 2): 2, "kept": 4}


@pytest.mark.parametrize(
    "left_out", [[5], [[]], [["a"]], [[[], "a"]], [["own", []]], [["own", "a", 1]], [["epoch", None]]]
)
def test_places_that_were_tampered_with_are_not_looked_at(left_out, tmp_path, checkpoint):
    """They change nothing, and no hook is called."""
    torch.save(checkpoint | {"left_out": left_out}, tmp_path / "last.ckpt")
    io = SafeCheckpointIO()
    io.trainer = SimpleNamespace(lightning_module=object(), datamodule=None)
    assert io.load_checkpoint(tmp_path / "last.ckpt").keys() == checkpoint.keys()


def test_what_was_left_out_is_put_back_from_the_modules_as_they_are(tmp_path, checkpoint):
    """Nothing else changes, nor do places that the modules no longer have; without modules there is nothing to ask."""
    day, io = datetime(2026, 1, 1), SafeCheckpointIO()

    class Data:
        def state_dict(self):
            return {"day": day, "n": 8}

    class Module:
        def on_save_checkpoint(self, checkpoint):
            checkpoint |= {"day": day, "own": {"day": day, "n": 8}, "new": day}

    own = {"own": {"day": day, "n": 7, "gone": day}, "day": day, "gone": day, Data.__qualname__: {"day": day, "n": 7}}
    io.save_checkpoint(checkpoint | own, tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["own"] == {"n": 7}
    io.trainer = SimpleNamespace(lightning_module=Module(), datamodule=Data())
    found = io.load_checkpoint(tmp_path / "last.ckpt")
    assert {name: found[name] for name in own if name in found} == {
        "own": {"day": day, "n": 7},
        "day": day,
        Data.__qualname__: {"day": day, "n": 7},
    }
    assert found.keys() == checkpoint.keys() | {"own", "day", Data.__qualname__}


def test_a_kill_while_saving_leaves_the_old_file_whole(path, checkpoint):
    """Killed after half of the bytes, the process leaves the checkpoint from before."""
    before = path.read_bytes()

    class KillsWhenPickled:
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGKILL)

    def save():
        SafeCheckpointIO().save_checkpoint({**checkpoint, "state_dict": {}, "last": KillsWhenPickled()}, path)

    assert in_a_child(save) == -signal.SIGKILL
    assert path.read_bytes() == before
    assert read_checkpoint(path)["epoch"] == 3


def test_a_full_disk_while_saving_leaves_the_old_file_whole(path, checkpoint, capfd):
    """A write that fails half-way is told with the path, and leaves the checkpoint from before and nothing else."""
    before = path.read_bytes()

    def save():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        SafeCheckpointIO().save_checkpoint({**checkpoint, "epoch": 4}, path)

    assert in_a_child(save) == 3
    assert f"{path}: the checkpoint cannot be written: File too large" in capfd.readouterr().err
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path, checkpoint):
    """Saving below a file is a SetupError with the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"file/last\.ckpt: the checkpoint cannot be written"):
        SafeCheckpointIO().save_checkpoint(checkpoint, tmp_path / "file" / "last.ckpt")


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle", "zip"])
def test_a_hostile_file_is_refused_and_nothing_of_it_is_executed(form, tmp_path):
    """A pickle that would run a command, in each form that torch reads."""
    mark, path = tmp_path / "executed", tmp_path / "hostile.ckpt"
    hostile = {"state_dict": RunsACommand(mark)}
    if form == "pickle":
        path.write_bytes(pickle.dumps(hostile))
    elif form == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(hostile, protocol=2))
            archive.writestr("archive/version", "3")
    else:
        torch.save(hostile, path, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(CheckpointError, match=f"{path}: "):
        read_checkpoint(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(hostile))  # would have run it
    assert mark.exists()


def test_weights_of_another_network_are_refused_with_their_names(path):
    """Missing, unknown and differently shaped tensors are counted and named."""
    module = torch.nn.Linear(3, 2)
    with pytest.raises(CheckpointError) as caught:
        load_weights(module, read_checkpoint(path), path)
    assert f"{path}: of another network: 2 tensors differ" in str(caught.value)
    assert "bias is missing" in str(caught.value)
    assert "weight is (100, 100), the network expects (2, 3)" in str(caught.value)


def test_a_value_that_becomes_unreadable_is_left_out_then(tmp_path, checkpoint):
    """At the first save it was a plain one."""
    io, path = SafeCheckpointIO(), tmp_path / "last.ckpt"
    for value in (None, datetime(2026, 1, 1)):
        io.save_checkpoint(checkpoint | {"own": value}, path)
    assert "own" not in read_checkpoint(path)


def test_a_large_value_is_tried_once(tmp_path, checkpoint, monkeypatch):
    """Averaged weights are not pickled twice at each save."""
    tried, real = [], checkpoint_io._is_unsafe
    monkeypatch.setattr(checkpoint_io, "_is_unsafe", lambda *entry: tried.append(entry[0]) or real(*entry))
    io = SafeCheckpointIO()
    for _ in range(3):
        io.save_checkpoint(checkpoint | {"large": torch.zeros(300_000), "small": 1}, tmp_path / "last.ckpt")
    assert (tried.count("large"), tried.count("small")) == (1, 3)
    assert len(read_checkpoint(tmp_path / "last.ckpt")["large"]) == 300_000
