"""End a run that makes no progress."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pytorch_lightning import Callback

from deeplightning.process import member

if TYPE_CHECKING:
    from deeplightning.process.ranks import Ranks


class Watchdog(Callback):
    """End a run with exit code 5 if a process starts or ends no batch for some time. Lightning's Timer only limits the
    total time.

    All processes end; the reason names the process that is not waiting for others, with file and line of its main
    thread. With `engine.max_restarts`, all are restarted. Work between two batches counts as well, such as saving a
    checkpoint or a callback.

    Args:
        seconds: the limit; choose more than a batch, or the work between two batches, can take.

    Raises:
        ValueError: it is not above 0.
    """

    def __init__(self, seconds: float = 300.0):
        if not seconds > 0:
            raise ValueError(f"seconds must be above 0, not {seconds}")
        self.seconds = seconds
        self._progress = 0
        self._ended: threading.Event | None = None

    def _begin(self, *_: object, **__: object) -> None:
        if self._ended is not None:  # a validation during training
            return
        group = member.current() or member.supervise(0, starts_others=True)  # a single process
        self._ended = threading.Event()
        threading.Thread(target=self._watch, args=(group, self._ended), name="watchdog", daemon=True).start()

    def _watch(self, group: Ranks, ended: threading.Event) -> None:
        # Count polls instead of seconds: a suspended machine or a stopped process does not poll either.
        pause, idle_polls, seen = min(1.0, self.seconds / 10), 0, self._progress
        while not ended.wait(pause):
            idle_polls = idle_polls + 1 if self._progress == seen else 0
            seen = self._progress
            if idle_polls * pause >= self.seconds:
                group.report_no_progress(self.seconds)
                return

    def _count_progress(self, *_: object, **__: object) -> None:
        self._progress += 1

    def _end(self, *_: object, **__: object) -> None:
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _count_progress
    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _count_progress

    on_train_start = on_validation_start = on_test_start = on_predict_start = _begin
    on_exception = teardown = _end
