"""A large checkpoint is written while training continues, and is on the disk complete or not at all."""

import io
import os
import signal
import threading
from collections import OrderedDict

import pytest
import torch
from conftest import digest
from test_checkpoint_io import in_a_child

from deeplightning.engine import background, checkpoint_io
from deeplightning.engine.background import Snapshot, Writer
from deeplightning.engine.checkpoint_io import SafeCheckpointIO, read_checkpoint
from deeplightning.faults import SetupError


class Waits:
    """Pickling it waits until `go` is set, and sets `begun`."""

    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        self.begun.set()
        assert self.go.wait(60)
        return OrderedDict, ()  # one of the few that reading allows


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Checkpoints of any size are written in the background, also on a CPU."""
    monkeypatch.setattr(background, "MIN_BYTES", 0)
    monkeypatch.setattr(background, "is_asynchronous", lambda device: True)


@pytest.fixture
def files():
    """A SafeCheckpointIO; what it writes is done at the end."""
    found = SafeCheckpointIO()
    yield found
    found.teardown()


@pytest.fixture
def learned():
    """A checkpoint of a network with a shared weight, and of its optimizer, as Lightning makes it; with the network."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Linear(20, 10))
    network[1].weight = torch.nn.Parameter(network[0].weight.data.t())
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.randn(3, 10)).sum().backward()
    optimizer.step()
    return {"state_dict": network.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3}, network


def saved(checkpoint):
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.getvalue()


def test_a_copy_is_saved_with_the_same_bytes_and_does_not_change(learned):
    """Byte for byte what saving at once would write, shared weights included; later steps change nothing in it."""
    checkpoint, network = learned
    expected, copied = saved(checkpoint), Snapshot(checkpoint)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 17
    assert saved(copied.finished()) == expected


def test_jobs_run_in_order_and_none_after_one_that_failed():
    """The error comes at the next call; a job that was waiting does not run; after `wait` all is as at the start."""
    writer, go, done = Writer(), threading.Event(), []

    def fails():
        assert go.wait(60)
        raise SetupError("no space")

    writer.submit(lambda: done.append(1))
    writer.then(lambda: done.append(2))
    writer.submit(fails)
    writer.then(lambda: done.append(3))
    go.set()
    with pytest.raises(SetupError, match="no space"):
        writer.wait()
    writer.then(lambda: done.append(4))
    writer.close()
    assert done == [1, 2, 4]


def test_an_error_is_raised_at_each_check_until_it_was_waited_for():
    """Nobody can overlook it."""
    writer = Writer()
    writer.submit(lambda: (_ for _ in ()).throw(SetupError("no space")))
    writer._jobs[0].result()
    for ask in (writer.check, writer.check, writer.wait):
        with pytest.raises(SetupError, match="no space"):
            ask()
    writer.close()


def test_the_old_checkpoint_stays_until_the_new_one_is_complete(files, learned, tmp_path):
    """While the new one is written, `last.ckpt` is the one from before; saving returns at once."""
    path, waits = tmp_path / "last.ckpt", Waits()
    files.save_checkpoint(learned[0], path)
    with files.in_background():
        files.save_checkpoint({**learned[0], "epoch": 4, "waits": waits}, path)
    assert waits.begun.wait(60)
    assert read_checkpoint(path)["epoch"] == 3
    waits.go.set()
    files.writer.wait()
    assert read_checkpoint(path)["epoch"] == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_only_who_asks_gets_a_checkpoint_later(files, learned, tmp_path):
    """A callback of a user's that saves a checkpoint can read it at once."""
    files.save_checkpoint(learned[0], tmp_path / "own.ckpt")
    assert read_checkpoint(tmp_path / "own.ckpt")["epoch"] == 3


def test_one_checkpoint_at_a_time_is_copied_and_written(files, learned, tmp_path, monkeypatch):
    """The next one is copied when the one before has been written: there is one copy in memory."""
    events = []

    def noted(what, real):
        def call(*args):
            events.append(f"{what} begins")
            result = real(*args)
            events.append(f"{what} ends")
            return result

        return call

    monkeypatch.setattr(checkpoint_io, "Snapshot", noted("copy", Snapshot))
    monkeypatch.setattr(checkpoint_io, "_write", noted("write", checkpoint_io._write))
    with files.in_background():
        for name in ("best.ckpt", "last.ckpt"):
            files.save_checkpoint(learned[0], tmp_path / name)
    files.writer.wait()
    assert events == ["copy begins", "copy ends", "write begins", "write ends"] * 2


def test_a_kill_while_the_background_writes_leaves_the_old_file(learned, tmp_path):
    """After kill -9 the checkpoint from before is there, complete."""
    path = tmp_path / "last.ckpt"
    SafeCheckpointIO().save_checkpoint(learned[0], path)

    def save():
        files, waits = SafeCheckpointIO(), Waits()
        with files.in_background():
            files.save_checkpoint({**learned[0], "epoch": 4, "waits": waits}, path)
        waits.begun.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(save) == -signal.SIGKILL
    assert read_checkpoint(path)["epoch"] == 3


def test_small_checkpoints_and_little_memory_are_written_at_once(learned, monkeypatch):
    """A copy and a thread cost more than writing a small checkpoint; without memory for a copy there is none."""
    assert background.gains(learned[0])
    monkeypatch.setattr(background, "free_memory", lambda: 1000)
    assert not background.gains(learned[0])
    monkeypatch.undo()
    assert not background.gains(learned[0])


# ---- whole runs

CHECKPOINTS = "train.checkpoint={monitor: val_loss, save_top_k: 2, every_n_steps: 3}"

OWN = '''\
"""What these runs add."""

import pytorch_lightning as pl

from deeplightning.callbacks import callback_of
from deeplightning.callbacks.record import Record
from deeplightning.engine import background, checkpoint_io


def always():
    """Checkpoints of any size are written in the background, also on a CPU."""
    background.MIN_BYTES, background.is_asynchronous = 0, lambda device: True


def slowly():
    """Only whoever waits for a checkpoint lets it be written."""
    import threading

    always()
    go, write, wait = threading.Event(), checkpoint_io._write, background.Writer.wait

    def late(*args):
        go.wait()
        write(*args)

    def waits(self):
        go.set()
        wait(self)

    checkpoint_io._write, background.Writer.wait = late, waits


class Blocks(pl.Callback):
    """Makes `last.ckpt` a folder, which nothing can replace, before the second checkpoint."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (0, 4):
            path = callback_of(trainer, Record).folder.last
            trainer.strategy.checkpoint_io.writer.wait()
            path.unlink()
            path.mkdir()
            (path / "file").touch()


class Fails(pl.Callback):
    """Fails in the fifth batch, behind a checkpoint."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 4:
            raise ValueError("a fault of the user's")
'''


@pytest.fixture(scope="module")
def own(place):
    path = place / "in_the_background.py"
    path.write_text(OWN)
    yield
    path.unlink()


def test_a_run_leaves_the_same_files_as_one_that_writes_at_once(train, own):
    """The weights in `last.ckpt`, `best.ckpt` and the next best, and `best.json`."""
    ends = []
    for hook in ("null", "in_the_background.always"):
        folder = train(CHECKPOINTS, "train.num_epochs=3", f"engine.setup_hook={hook}").folder
        ends.append(({path.name: digest(path) for path in folder.glob("*.ckpt")}, (folder / "best.json").read_text()))
        assert not list(folder.glob(".*ckpt*"))
    assert ends[0] == ends[1]
    assert len(ends[0][0]) == 3


def test_a_checkpoint_that_cannot_be_written_in_the_background_ends_the_run(train, own):
    """Exit code 3 with the path and the reason, as where it is written at once."""
    done = train(
        CHECKPOINTS,
        "engine.setup_hook=in_the_background.always",
        "train.callbacks=[{type: in_the_background.Blocks}]",
        code=3,
    )
    assert "last.ckpt: the checkpoint cannot be written: Is a directory" in done.err


def test_a_run_that_fails_waits_for_the_checkpoint_that_is_written(train, own):
    """An error in the fifth batch leaves the checkpoint of the third step."""
    callbacks = "train.callbacks=[{type: in_the_background.Fails}]"
    done = train(CHECKPOINTS, "engine.setup_hook=in_the_background.slowly", callbacks, code=5)
    assert read_checkpoint(done.folder / "last.ckpt")["global_step"] == 3
