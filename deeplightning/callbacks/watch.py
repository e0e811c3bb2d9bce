"""End a run without progress."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pytorch_lightning import Callback

from deeplightning.process import member

if TYPE_CHECKING:
    from deeplightning.process.ranks import Ranks


class Watchdog(Callback):
    """End a run with exit code 5 when a process has begun or ended no batch for some time. Lightning's Timer ends those
    alone that take too long.

    All processes end, the reason names the one that does not wait for others, with file and line of its main thread,
    and with `engine.max_restarts` all are started again. What comes between two batches counts as well: the saving of a
    checkpoint, a callback's work.

    Args:
        seconds: the limit; choose more than a batch, or the work between two batches, can take.

    Raises:
        ValueError: that is not above 0.
    """

    def __init__(self, seconds: float = 300.0):
        if not seconds > 0:
            raise ValueError(f"seconds must be above 0, not {seconds}")
        self.seconds = seconds
        self._progress = 0
        self._over: threading.Event | None = None

    def _begin(self, *_: object, **__: object) -> None:
        if self._over is not None:  # a validation inside a training
            return
        group = member.here() or member.begin(0, starts_others=True)  # a process by itself
        self._over = threading.Event()
        threading.Thread(target=self._watch, args=(group, self._over), name="watchdog", daemon=True).start()

    def _watch(self, group: Ranks, over: threading.Event) -> None:
        # Looks are counted, not seconds: a machine that slept, or a process that was stopped, has missed them too.
        pause, looks, seen = min(1.0, self.seconds / 10), 0, self._progress
        while not over.wait(pause):
            looks = looks + 1 if self._progress == seen else 0
            seen = self._progress
            if looks * pause >= self.seconds:
                group.report_no_progress(self.seconds)
                return

    def _step(self, *_: object, **__: object) -> None:
        self._progress += 1

    def _end(self, *_: object, **__: object) -> None:
        if self._over is not None:
            self._over.set()
            self._over = None

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _step
    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _step

    on_train_start = on_validation_start = on_test_start = on_predict_start = _begin
    on_exception = teardown = _end
