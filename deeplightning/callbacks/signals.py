"""On Ctrl-C and SIGTERM finish the batch, save `last.ckpt` and mark the run KILLED; on a second signal end at once.

The launcher that has started the process may add signals that do the same, such as those by which a queue takes a job
back: see `deeplightning.launch.ProcessHooks`. All others are the user's own.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint as LightningCheckpoint
from torch import distributed

from deeplightning.callbacks.record import between_steps
from deeplightning.launch import ProcessHooks
from deeplightning.private.lightning import keep_signals
from deeplightning.process import streams
from deeplightning.process.identity import own_rank
from deeplightning.process.streams import INTERRUPTED, Interrupted


class Signals(LightningCheckpoint):
    """Turn a signal into `Interrupted`: at the end of the batch, of several processes on all at the end of the next
    one; before the first stage has begun, and a second signal always, at once.

    Of several processes one may be blocked, waiting for another, and receives no signal: `process.ranks` handles that.

    Lightning calls callbacks of this base last, a ModelCheckpoint of the user's as well.
    """

    def __init__(self, launcher: ProcessHooks) -> None:
        self._launcher = launcher
        self._received = self._batches = 0
        self._under_way = False
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._asked: torch.Tensor | None = None
        self._gathered: distributed.Work | None = None

    def setup(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Install the handlers. Lightning 2.6 would put its own handler for SIGTERM in place after this, which talks
        to the other processes from inside the handler."""
        keep_signals(trainer)
        self._install()

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread() and not self._before:
            numbers = [*INTERRUPTED, *self._launcher.signals]
            if streams.heard is not None:  # a library has swallowed what its handler raised
                raise self._interrupted(streams.heard, at_once=True)
            self._before = {number: signal.signal(number, self._handle) for number in numbers}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received and number in self._launcher.signals:
            return  # a queue repeats its warning; the batch is finished first
        if number == signal.SIGTERM and self._received in self._launcher.signals:
            return  # a queue sends it after its warning, before it kills
        if self._received or not self._under_way:
            if streams.is_deferred(number, frame):
                return
            raise self._interrupted(number, at_once=True)
        self._received = number

    def _interrupted(self, received: int, at_once: bool = False) -> Interrupted:
        """Return the error of a signal, after rank 0 has told the launcher."""
        number = signal.Signals(received)
        if own_rank() == 0:
            self._launcher.before_end(number, self._batches)
        return Interrupted(number.name, INTERRUPTED.get(number, INTERRUPTED[signal.SIGTERM]), at_once)

    def _look(self, trainer: Trainer, *_: object, **__: object) -> None:
        if received := self._heard(trainer):
            raise self._interrupted(received)

    def _heard(self, trainer: Trainer) -> int:
        """Return the signal that ends the run now, or 0."""
        if trainer.state.fn == "fit" and not between_steps(trainer):
            return 0  # what is saved now would lack the gradients that wait
        return self._received if trainer.world_size == 1 else self._received_by_any(trainer)

    def _received_by_any(self, trainer: Trainer) -> int:
        """Return the signal that a process had received when this was last asked, on all the same, or 0.

        The answer is that of the last look: while it is gathered the processes continue, and none waits for another.
        """
        answer, self._asked = self._asked, torch.tensor(self._received, device=trainer.strategy.root_device)
        work = self._gathered
        self._gathered = distributed.all_reduce(self._asked, distributed.ReduceOp.MAX, async_op=True)
        if answer is None or work is None:
            return 0
        work.wait()
        return int(answer)

    def _begin(self, *_: object, **__: object) -> None:
        self._asked = self._gathered = None
        self._install()
        self._under_way = True

    on_train_start = on_validation_start = on_test_start = on_predict_start = _begin

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        self._batches += 1
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if not is_last and (received := self._heard(trainer)):  # else the epoch is brought to its end
            pl_module.on_train_batch_end(*batch)  # Lightning would call it now, and the checkpoint has what it changes
            raise self._interrupted(received)

    def on_train_end(self, trainer: Trainer, *_: object) -> None:
        self._look(trainer)
        if trainer.world_size > 1:
            self._look(trainer)  # for the answer to the look before

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _look

    def _restore(self, *_: object, **__: object) -> None:
        for number, handler in self._before.items():
            # Said again while a checkpoint is saved it must not end the process.
            signal.signal(number, signal.SIG_IGN if {number, self._received} <= {*self._launcher.signals} else handler)
        self._before, self._under_way = {}, False

    on_exception = teardown = _restore
