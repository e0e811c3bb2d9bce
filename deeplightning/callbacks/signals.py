"""Ctrl-C and SIGTERM are polite: the batch is finished, `last.ckpt` saved, the run marked KILLED. A second is not."""

import signal
import threading
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import SLURMEnvironment
from torch import distributed

from deeplightning.callbacks.record import Interrupted, between_steps

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Signals(pl.Callback):
    """Turns a signal into `Interrupted`: at the end of the batch, of several processes on all at the end of the next
    one; before the first stage has begun, and a second signal always, at once.

    Of several processes one may be blocked, waiting for another, and heeds nothing: `engine.ranks` sees to that.
    """

    def __init__(self) -> None:
        self._received = 0
        self._under_way = False
        self._before: dict[int, Any] = {}
        self._asked: torch.Tensor | None = None
        self._gathered: distributed.Work | None = None

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Takes the signals over. Lightning 2.6 would put its own handler for SIGTERM in place after this, which talks
        to the other processes from inside the handler; only Slurm's, which puts a job back into the queue, is kept."""
        connector: Any = trainer._signal_connector
        if not isinstance(getattr(trainer.strategy, "cluster_environment", None), SLURMEnvironment):
            connector.register_signal_handlers = lambda: None
            self._install()

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread() and not self._before:
            self._before = {number: signal.signal(number, self._handle) for number in EXIT_CODES}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received or not self._under_way:
            raise Interrupted(signal.Signals(number).name, EXIT_CODES[signal.Signals(number)], at_once=True)
        self._received = number

    def _look(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == "fit" and not between_steps(trainer):
            return  # what is saved now would lack the gradients that wait
        received = self._received if trainer.world_size == 1 else self._received_by_any(trainer)
        if received:
            number = signal.Signals(received)
            raise Interrupted(number.name, EXIT_CODES[number])

    def _received_by_any(self, trainer: pl.Trainer) -> int:
        """The signal that a process had received when this was last asked, on all the same, or 0.

        The answer is that of the last look: while it is gathered the processes go on, and none waits for another.
        """
        answer, self._asked = self._asked, torch.tensor(self._received, device=trainer.strategy.root_device)
        work, self._gathered = (
            self._gathered,
            distributed.all_reduce(self._asked, distributed.ReduceOp.MAX, async_op=True),
        )
        if answer is None or work is None:
            return 0
        work.wait()
        return int(answer)

    def _begin(self) -> None:
        self._asked = self._gathered = None
        self._install()  # under Slurm Lightning has put its own in place
        self._under_way = True

    def on_train_start(self, *_: Any) -> None:
        self._begin()

    def on_validation_start(self, *_: Any) -> None:
        self._begin()

    def on_test_start(self, *_: Any) -> None:
        self._begin()

    def on_predict_start(self, *_: Any) -> None:
        self._begin()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:  # else the epoch is brought to its end
            self._look(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._look(trainer)
        if trainer.world_size > 1:
            self._look(trainer)  # for the answer to the look before

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._look(trainer)

    def on_test_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._look(trainer)

    def on_predict_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._look(trainer)

    def on_exception(self, *_: Any) -> None:
        self._restore()

    def teardown(self, *_: Any, **__: Any) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before, self._under_way = {}, False
