"""Provide a run that is hard to resume, and user code that kills it at a numbered event.

Events are: before or after a batch, halfway through a checkpoint file, before or after a file is synced, renamed or
linked, before or after lines are appended to `metrics.jsonl` or sent.
"""

KILLS = '''\
"""Counts the events of each process. KILL=RANKS:NUMBER sends SIGKILL, or the signal that HOW names, to these ranks at
the event of this number of the first one."""

import functools
import io
import os
import pathlib
import signal

import pytorch_lightning as pl
import torch

from deeplightning.tracking.delivery import Delivery
from deeplightning.tracking.metrics_file import MetricsFile

rank = os.environ.get("LOCAL_RANK", "0")
log = pathlib.Path(os.environ["EVENTS"])
victims, number = os.environ.get("KILL", "-:0").split(":")
how = signal.Signals[os.environ.get("HOW", "SIGKILL")]
main, count = os.getpid(), 0
log.with_name(f"{log.name}.{rank}.pid").write_text(str(main))


def happens(what):
    global count
    if os.getpid() != main:
        return
    count += 1
    with log.with_name(f"{log.name}.{rank}").open("a") as file:
        file.write(what + "\\n")
    if rank == victims[0] and count == int(number):
        for victim in victims[1:] + victims[0]:
            os.kill(int(log.with_name(f"{log.name}.{victim}.pid").read_text()), how)


def around(owner, name, what):
    real = getattr(owner, name)

    @functools.wraps(real)
    def called(*args, **kwargs):
        happens(f"before {what}")
        result = real(*args, **kwargs)
        happens(f"after {what}")
        return result

    setattr(owner, name, called)


def save(content, file, *args, real=torch.save, **kwargs):
    """Writes a checkpoint in two halves."""
    buffer = io.BytesIO()
    real(content, buffer, *args, **kwargs)
    half = len(buffer.getvalue()) // 2
    file.write(buffer.getvalue()[:half])
    file.flush()
    happens("inside a checkpoint")
    file.write(buffer.getvalue()[half:])


torch.save = save
for name in ("replace", "fsync", "link"):
    around(os, name, name)
around(MetricsFile, "append", "append")
around(Delivery, "deliver", "deliver")


class Events(pl.Callback):
    """Counts the hooks of a run as events."""

    def setup(self, trainer, module, stage):
        happens(f"setup of {stage}")

    def teardown(self, trainer, module, stage):
        happens(f"teardown of {stage}")

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        happens(f"before batch {batch_idx} of epoch {trainer.current_epoch}")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        happens(f"after batch {batch_idx} of epoch {trainer.current_epoch}")

    def on_validation_batch_end(self, trainer, module, *args):
        happens(f"in the validation of epoch {trainer.current_epoch}")

    def on_validation_end(self, trainer, module):
        happens(f"after the validation of epoch {trainer.current_epoch}")

    def on_train_epoch_end(self, trainer, module):
        happens(f"at the end of epoch {trainer.current_epoch}")
'''

GOES_WRONG = '''\
"""User code that fails."""

import builtins
import logging
import os
import pathlib
import signal
import time

import pytorch_lightning as pl
import torch


class NoSuchData(Exception):
    exit_code = 3


class At(pl.Callback):
    """Calls the method `what` before the third batch of an epoch, on one rank or (None) on all. `when` contains the
    numbers of the launch's restarts in which it does."""

    def __init__(self, rank, what, epoch=0, when="0"):
        self.at, self.rank, self.what, self.when = (epoch, 2), rank, what, str(when)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        is_here = (trainer.current_epoch, batch_idx) == self.at and self.rank in (trainer.global_rank, None)
        if is_here and start in self.when:
            getattr(self, self.what)(module)

    def fault(self, module):
        raise KeyError("a fault of the user's")

    def data(self, module):
        raise NoSuchData("a picture cannot be read")

    def kill(self, module):
        os.kill(os.getpid(), signal.SIGKILL)

    def crash(self, module):
        os.kill(os.getpid(), signal.SIGSEGV)

    def stop(self, module):
        os.kill(os.getpid(), signal.SIGSTOP)

    def leave(self, module):
        os._exit(7)

    def sleep(self, module):
        print("sleeps", flush=True)
        time.sleep(1000)

    def spoil(self, module):
        with torch.no_grad():
            next(module.parameters()).fill_(float("nan"))

    def edit(self, module):
        for file in os.environ["EDITS"].split(os.pathsep):
            pathlib.Path(file).write_text("raise RuntimeError('this was edited')\\n")
        self.kill(module)

    def abort_late(self, module):
        builtins.late = AbortsLate()


class AbortsLate:
    """Aborts the process during interpreter shutdown, after the exit functions, as a library's thread may."""

    def __del__(self, abort=os.abort):
        abort()
'''
FAULT = 1 + GOES_WRONG.splitlines().index('        raise KeyError("a fault of the user\'s")')
SLEEPS = 1 + GOES_WRONG.splitlines().index("        time.sleep(1000)")

SETTINGS = [
    "model.network={type: own.Dropout}",
    "model.optimizer.groups=[{match: bias, weight_decay: 0.1}]",
    "model.scheduler={type: torch.optim.lr_scheduler.OneCycleLR, warmup: 0.5, call: {interval: step}}",
    "model.scheduler.params={max_lr: 0.1, total_steps: auto}",
    "data.num_workers=2",
    "data.module.params.in_memory=false",
    "data.module.params.augment=[{type: deeplightning.data.augment.RandomCrop, params: {padding: 1}}]",
    "train.num_epochs=6",
    "train.limit_batches={train: 0.9}",
    "train.accumulator_factor=2",
    "train.early_stop={metric: val_acc, mode: max, patience: 1, delta: 0.5}",
    "train.checkpoint={monitor: val_loss, save_top_k: 2, every_n_steps: 3}",
    "train.callbacks=[{type: kills.Events}]",
    "train.resume_ckpt=auto",
    "stages=[train,test]",
    "logger.log_every_n_steps=1",
]

WRITING = ("inside a checkpoint", "before fsync", "before replace")
