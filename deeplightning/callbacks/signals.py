"""On Ctrl-C and SIGTERM finish the batch, save `last.ckpt` and mark the run KILLED; on a second signal end immediately.

The launcher may add signals with the same effect, such as those that warn of preemption by a queue: see
`deeplightning.launch.ProcessHooks`. All others are left to the user.
"""

import math
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint as LightningCheckpoint
from torch import distributed

from deeplightning.callbacks.loop_position import between_steps
from deeplightning.launch import ProcessHooks
from deeplightning.private.lightning import keep_signals
from deeplightning.process import streams
from deeplightning.process.identity import own_rank
from deeplightning.process.streams import INTERRUPTED, Interrupted
from deeplightning.transfer import to_device


class Signals(LightningCheckpoint):
    """Raise `Interrupted` after a signal: at the end of the batch or, in a training with several processes, of the next
    batch on all of them (after a validation over a stream); at once before the first stage and on a second signal.

    A process that is blocked waiting for another does not handle its signal: see `process.ranks`.

    Lightning calls callbacks of this base class last, including a user's ModelCheckpoint.
    """

    def __init__(self, launcher: ProcessHooks) -> None:
        self._launcher = launcher
        self._received = self._batches = 0
        self._has_stage_started = False
        self._previous_handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._any_signal: torch.Tensor | None = None
        self._reduction: distributed.Work | None = None

    def setup(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Install the handlers. Lightning 2.6 would then install its own handler for SIGTERM, which communicates with
        the other processes from inside the handler."""
        keep_signals(trainer)
        self._install()

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread() and not self._previous_handlers:
            numbers = [*INTERRUPTED, *self._launcher.signals]
            if streams.received_signal is not None:  # a library has swallowed the handler's exception
                raise self._interrupted(streams.received_signal, at_once=True)
            self._previous_handlers = {number: signal.signal(number, self._handle) for number in numbers}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received and number in self._launcher.signals:
            return  # a queue repeats its warning; finish the batch first
        if number == signal.SIGTERM and self._received in self._launcher.signals:
            return  # a queue sends it between its warning and SIGKILL
        if self._received or not self._has_stage_started:
            if streams.defer_signal(number, frame):
                return
            raise self._interrupted(number, at_once=True)
        self._received = number

    def _interrupted(self, received: int, at_once: bool = False) -> Interrupted:
        """Return the exception for a signal, after notifying the launcher on rank 0."""
        number = signal.Signals(received)
        if own_rank() == 0:
            self._launcher.before_end(number, self._batches)
        return Interrupted(number.name, INTERRUPTED.get(number, INTERRUPTED[signal.SIGTERM]), at_once)

    def _raise_if_received(self, trainer: Trainer, *_: object, **__: object) -> None:
        if received := self._signal_to_handle(trainer):
            raise self._interrupted(received)

    def _signal_to_handle(self, trainer: Trainer) -> int:
        """Return the signal that ends the run at this batch, or 0."""
        trains, alone = trainer.state.fn == "fit", trainer.world_size == 1
        if trains and not between_steps(trainer):
            return 0  # a checkpoint would lack the accumulated gradients
        # Processes may evaluate different numbers of batches, so they cannot reduce after each.
        if trains and not alone and trainer.validating and math.inf in trainer.num_val_batches:
            return 0
        return self._received if alone or not trains else self._received_on_any_rank(trainer)

    def _received_on_any_rank(self, trainer: Trainer) -> int:
        """Return the signal that any process had received at the previous call, equal on all processes, or 0.

        The result is one call late: the processes continue during the reduction, and none waits for another.
        """
        device = trainer.strategy.root_device
        answer, self._any_signal = self._any_signal, to_device(torch.tensor(self._received), device)
        work = self._reduction
        self._reduction = distributed.all_reduce(self._any_signal, distributed.ReduceOp.MAX, async_op=True)
        if answer is None or work is None:
            return 0
        # On another stream it waits only for that reduction, not for what the GPU computes in this step.
        with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
            work.wait()
            return int(answer)

    def _begin(self, *_: object, **__: object) -> None:
        self._any_signal = self._reduction = None
        self._install()
        self._has_stage_started = True

    on_train_start = on_validation_start = on_test_start = on_predict_start = _begin

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        self._batches += 1
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if not is_last and (received := self._signal_to_handle(trainer)):  # else finish the epoch
            pl_module.on_train_batch_end(*batch)  # Lightning would call it next; the checkpoint needs its changes
            raise self._interrupted(received)

    def on_train_end(self, trainer: Trainer, *_: object) -> None:
        self._raise_if_received(trainer)
        if trainer.world_size > 1:
            self._raise_if_received(trainer)  # gets the result of the call before

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _raise_if_received

    def _restore(self, *_: object, **__: object) -> None:
        for number, handler in self._previous_handlers.items():
            # A queue's signal that is repeated while a checkpoint is saved must not end the process.
            signal.signal(number, signal.SIG_IGN if {number, self._received} <= {*self._launcher.signals} else handler)
        self._previous_handlers, self._has_stage_started = {}, False

    on_exception = teardown = _restore
