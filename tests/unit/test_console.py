"""What a line per epoch says of speed: `deeplightning.callbacks.console`."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from deeplightning.callbacks import console
from deeplightning.callbacks.console import Console
from deeplightning.callbacks.watch import samples_in


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: now.seconds)
    return now


def test_an_epochs_samples_per_second_are_those_of_training_alone(clock, caplog):
    """26 samples a process in 4 seconds, of two processes; what validations take is left out."""
    caplog.set_level(logging.INFO, "deeplightning")
    train = SimpleNamespace(num_epochs=3, checkpoint=SimpleNamespace(monitor=None), early_stop=None)
    cfg = SimpleNamespace(logger=SimpleNamespace(progress="off"), train=train)
    shown = Console(cfg, None, SimpleNamespace(best=None))
    numbers = {"current_epoch": 0, "world_size": 2, "global_rank": 0, "accumulate_grad_batches": 1}
    metrics = {"progress_bar_metrics": {}, "callback_metrics": {"train_loss": torch.tensor(0.5)}}
    parts = {"lightning_module": SimpleNamespace(automatic_optimization=True), "callbacks": []}
    trainer = SimpleNamespace(**numbers, **metrics, **parts, state=SimpleNamespace(fn="fit"))

    def validates(seconds):
        shown.on_validation_start(trainer, None)
        clock.seconds += seconds
        shown.on_validation_end(trainer, None)

    for _ in range(2):
        shown.on_train_epoch_start(trainer, None)
        for number, size in enumerate((16, 10)):
            clock.seconds += 2
            shown.on_train_batch_end(trainer, None, torch.tensor(0.5), {"image": torch.zeros(size, 1)}, number)
            validates(3 if number == 0 else 5)
    shown.on_train_epoch_start(trainer, None)
    lines = [message for message in caplog.messages if message.startswith("epoch 1")]
    assert lines == ["epoch 1 of 3  train_loss 0.5000  (12.0 s, 13 samples/s)"] * 2


def test_a_line_is_one_write_so_that_lines_of_several_ranks_stay_apart(monkeypatch):
    """Standard output may be unbuffered, as in the processes of a launch."""
    written = []
    stream = SimpleNamespace(write=written.append, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr(sys, "stdout", stream)
    console._Terminal("[rank 1] ").emit(logging.makeLogRecord({"msg": "one\ntwo", "levelno": logging.INFO}))
    assert written == ["[rank 1] one\n[rank 1] two\n"]


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ({"image": torch.zeros(3, 1), "index": torch.zeros(3)}, 3),
        ((torch.zeros(4), torch.zeros(4)), 4),
        (torch.zeros(5, 2), 5),
        ({"name": "a", "parts": [torch.zeros(6, 2)]}, 6),
        ({"factor": torch.tensor(1.0)}, 0),
        ("text", 0),
    ],
)
def test_the_rows_of_a_batch_are_counted(batch, rows):
    """Of mappings, sequences and tensors; a number has none."""
    assert samples_in(batch) == rows
