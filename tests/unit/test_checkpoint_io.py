"""A checkpoint is written completely or not at all, and reading one executes nothing."""

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
from deeplightning.faults import CheckpointError, ConfigError, SetupError


class RunsACommand:
    """An object whose pickle runs a command when it is loaded."""

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
    """Run a function in a forked process; return its exit code, which is negative if a signal ended it."""
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
    """Tensors, numbers and texts are loaded as they were saved; saving creates the folder and leaves one file."""
    found = SafeCheckpointIO().load_checkpoint(path, weights_only=False)
    assert torch.equal(found.pop("state_dict")["weight"], checkpoint.pop("state_dict")["weight"])
    assert found == checkpoint
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]


def test_values_of_numpy_come_back_as_plain_ones(tmp_path, checkpoint):
    """NumPy values in dicts, lists and tuples and as keys are saved as plain ones; the user's objects do not change."""
    own = {"best": np.float64(1.5), np.int64(3): [np.arange(3)[::-1], (np.bool_(True),)], "words": np.array(["a"])}
    SafeCheckpointIO().save_checkpoint(checkpoint | {"own": own}, tmp_path / "last.ckpt")
    found = read_checkpoint(tmp_path / "last.ckpt")["own"]
    assert (found["best"], found[3][0].tolist(), found[3][1], found["words"]) == (1.5, [2, 1, 0], (True,), ["a"])
    assert (type(own["best"]), type(own[3][0])) == (np.float64, np.ndarray)


def test_unsafe_entries_are_left_out(tmp_path, checkpoint, caplog):
    """Entries that could not be saved or loaded again are left out, at the top and one level below; one warning names
    them, and the user's objects do not change."""
    io, path = SafeCheckpointIO(), tmp_path / "last.ckpt"
    own = {"at": datetime(2026, 1, 1), "kept": [np.float64(1.5)], "call": lambda: None, "self": []}
    own["self"].append(own["self"])
    callbacks = {"Mine": {"at": datetime}, "Other": {"n": 1}}
    given = checkpoint | {"own": own, "day": datetime(2026, 1, 1), "callbacks": callbacks}
    for _ in range(2):
        io.save_checkpoint(given, path)
    found = read_checkpoint(path)
    assert (found["own"], found["callbacks"], "day" in found) == ({"kept": [1.5]}, {"Other": {"n": 1}}, False)
    assert own.keys() == {"at", "kept", "call", "self"}
    assert given.keys() == checkpoint.keys() | {"own", "day", "callbacks"}
    (note,) = caplog.messages
    places = "callbacks['Mine'], own['at'], own['call'], own['self'], day"
    assert f"leave out {places}: only plain values can be restored" in note


class Colour(enum.Enum):
    RED = 1


def test_a_key_that_is_not_read_again_is_left_out_with_its_value(tmp_path, checkpoint):
    """The checkpoint can be read, whatever the type of a key."""
    own = {Colour.RED: 1, (1, 2): 2, 3: Colour.RED, "kept": 4}
    SafeCheckpointIO().save_checkpoint(checkpoint | {"own": own}, tmp_path / "last.ckpt")
    assert read_checkpoint(tmp_path / "last.ckpt")["own"] == {(1, 2): 2, "kept": 4}


@pytest.mark.parametrize(
    "left_out", [[5], [[]], [["a"]], [[[], "a"]], [["own", []]], [["own", "a", 1]], [["epoch", None]]]
)
def test_a_malformed_list_of_left_out_entries_is_ignored(left_out, tmp_path, checkpoint):
    """It changes nothing, and no hook of the modules is called."""
    torch.save(checkpoint | {"left_out": left_out}, tmp_path / "last.ckpt")
    io = SafeCheckpointIO()
    io.trainer = SimpleNamespace(lightning_module=object(), datamodule=None)
    assert io.load_checkpoint(tmp_path / "last.ckpt").keys() == checkpoint.keys()


def test_what_was_left_out_is_put_back_from_the_modules_as_they_are(tmp_path, checkpoint):
    """Left-out entries get the modules' present values, if the modules still have them; nothing else changes. Without
    modules the entries are absent."""
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
    """A process that is killed while it writes leaves the previous checkpoint unchanged."""
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
    """If a write fails, the error has the path, and only the previous checkpoint remains."""
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
    """Saving below a path that is a file is a SetupError with the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match=r"file/last\.ckpt: the checkpoint cannot be written"):
        SafeCheckpointIO().save_checkpoint(checkpoint, tmp_path / "file" / "last.ckpt")


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle", "zip"])
def test_a_hostile_file_is_refused_and_nothing_of_it_is_executed(form, tmp_path):
    """A pickle that would run a command is refused in each format that torch reads."""
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
    pickle.loads(pickle.dumps(hostile))  # runs the command: the file was hostile
    assert mark.exists()


def test_weights_of_another_network_are_refused_with_their_names(path):
    """The error counts and names the tensors that are missing, unknown or of another shape."""
    with pytest.raises(CheckpointError) as caught:
        load_weights(torch.nn.Linear(3, 2), read_checkpoint(path), path)
    assert f"{path}: of another network: 2 tensors differ" in str(caught.value)
    assert "bias is missing" in str(caught.value)
    assert "weight is (100, 100), the network expects (2, 3)" in str(caught.value)


def test_a_value_that_becomes_unreadable_is_left_out_then(tmp_path, checkpoint):
    """An entry that was plain at the first save and is not at the second is left out of the second checkpoint."""
    io, path = SafeCheckpointIO(), tmp_path / "last.ckpt"
    for value in (None, datetime(2026, 1, 1)):
        io.save_checkpoint(checkpoint | {"own": value}, path)
    assert "own" not in read_checkpoint(path)


def test_a_large_value_is_tried_once(tmp_path, checkpoint, monkeypatch):
    """Whether a large value can be restored is tested at the first save only, a small one at each."""
    tried, real = [], checkpoint_io._is_unsafe
    monkeypatch.setattr(checkpoint_io, "_is_unsafe", lambda *entry: tried.append(entry[0]) or real(*entry))
    io = SafeCheckpointIO()
    for _ in range(3):
        io.save_checkpoint(checkpoint | {"large": torch.zeros(300_000), "small": 1}, tmp_path / "last.ckpt")
    assert (tried.count("large"), tried.count("small")) == (1, 3)
    assert len(read_checkpoint(tmp_path / "last.ckpt")["large"]) == 300_000


def test_an_entry_of_the_run_that_a_hook_replaces_is_refused(path, checkpoint):
    """A hook's `config` would make the checkpoint unreadable, or a resumed run compare the wrong config."""
    io, config = SafeCheckpointIO(), {"model": {}}
    io.trainer = SimpleNamespace(own_entries={"config": config})
    io.save_checkpoint(checkpoint | {"config": config}, path)
    with pytest.raises(ConfigError, match="`on_save_checkpoint` sets 'config', which the run sets; use another key"):
        io.save_checkpoint(checkpoint | {"config": {"model": "resnet18"}}, path)


def test_weights_alone_are_saved_after_a_complete_checkpoint(path, checkpoint):
    """Lightning saves weights alone without the hooks that add the run's entries."""
    io = SafeCheckpointIO()
    io.trainer = SimpleNamespace(own_entries={"config": {}})
    io.save_checkpoint({"state_dict": checkpoint["state_dict"]}, path)
    assert read_checkpoint(path).keys() == {"state_dict"}


def test_weights_of_a_module_that_loads_leniently_must_have_its_shapes():
    """With `strict_loading = False` tensors may be missing, but none may have another shape."""
    module = torch.nn.Linear(2, 3)
    module.strict_loading = False
    load_weights(module, {"state_dict": {"bias": torch.ones(3)}}, "a.ckpt")
    assert module.bias.tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match="weight is"):
        load_weights(module, {"state_dict": {"weight": torch.ones(4, 2)}}, "a.ckpt")
