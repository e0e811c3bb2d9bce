"""Ctrl-C and SIGTERM are polite: the batch is finished, `last.ckpt` saved, the run marked KILLED. A second is not."""

import signal
import threading
from types import FrameType
from typing import Any

import pytorch_lightning as pl

from deeplightning.callbacks.record import Interrupted

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Signals(pl.Callback):
    """Turns a signal into `Interrupted` at the end of the batch, on all processes at the same one."""

    def __init__(self) -> None:
        self._received = 0
        self._before: dict[int, Any] = {}

    def _install(self) -> None:
        """Takes the signals over. Not in `setup`: Lightning puts its own handler for SIGTERM in place after that, which
        talks to the other processes from inside the handler."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            self._before = {number: signal.signal(number, self._handle) for number in EXIT_CODES}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            raise Interrupted(signal.Signals(number).name, EXIT_CODES[signal.Signals(number)], at_once=True)
        self._received = number

    def _look(self, trainer: pl.Trainer) -> None:
        received = bool(self._received)
        if trainer.world_size > 1:
            received = trainer.strategy.reduce_boolean_decision(received, all=False)
        if received:
            number = signal.Signals(self._received or signal.SIGINT)
            raise Interrupted(number.name, EXIT_CODES[number])

    def on_train_start(self, *_: Any) -> None:
        self._install()

    def on_validation_start(self, *_: Any) -> None:
        self._install()

    def on_test_start(self, *_: Any) -> None:
        self._install()

    def on_predict_start(self, *_: Any) -> None:
        self._install()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:  # else the epoch is brought to its end
            self._look(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._look(trainer)

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
        self._before = {}
