"""Choose and start cases until the time is up.

Each kind first starts one case; then the kind is next that is furthest behind its target number per hour. Seed, kind
and number determine all random choices of a case.
"""

import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from storm import worker
from storm.worker import Case, Result


@dataclass
class Tally:
    """Counts of the cases of one kind."""

    cases: int = 0
    tried: int = 0
    broken: int = 0
    seconds: float = 0.0
    skipped: str = ""


@dataclass
class Storm:
    """One run of the storm.

    Attributes:
        modules: the kinds by name.
        base: existing folder for the cases.
        seconds: time after which no case starts.
        jobs: how many cases run in parallel.
        report: called with each result and the folder of the case.
        only: run only the case with this number of each kind.
        until_broken: start no case after a broken promise.
    """

    modules: dict[str, ModuleType]
    base: Path
    seed: int
    seconds: float
    jobs: int
    report: Callable[[Result, Path], None]
    only: int | None = None
    until_broken: bool = False
    tallies: dict[str, Tally] = field(default_factory=dict)
    elapsed: float = 0.0

    def __post_init__(self) -> None:
        for kind in self.modules:
            self.tallies.setdefault(kind, Tally())
        self._next = dict.fromkeys(self.modules, 0 if self.only is None else self.only)
        self._running: dict[int, Case] = {}

    def run(self) -> None:
        """Start cases until the time is up, and wait for the last ones; Ctrl-C ends all of them."""
        begun = time.monotonic()
        try:
            while True:
                late = time.monotonic() - begun > self.seconds
                late |= self.until_broken and any(tally.broken for tally in self.tallies.values())
                while len(self._running) < self.jobs and not late and (kind := self._choose()) is not None:
                    case = worker.start(self.modules[kind], kind, self.seed, self._next[kind], self.base)
                    self._next[kind] += 1
                    self._running[case.answer] = case
                if not self._running:
                    return
                self._collect()
                self.elapsed = time.monotonic() - begun
        finally:
            for case in self._running.values():
                case.end("the storm was interrupted")
            self.elapsed = time.monotonic() - begun

    def _choose(self) -> str | None:
        open_ = [kind for kind, tally in self.tallies.items() if not tally.skipped]
        if self.only is not None:
            open_ = [kind for kind in open_ if self._next[kind] == self.only]
        if not open_:
            return None
        running = [case.kind for case in self._running.values()]
        return min(open_, key=lambda kind: self._progress(kind, running.count(kind)))

    def _progress(self, kind: str, running: int) -> float:
        """Return the fraction of the target per hour that was tried; -1 for kinds without any case yet."""
        tally = self.tallies[kind]
        if not tally.cases and not running:
            return -1.0
        mean = tally.tried / tally.cases if tally.cases else 1.0
        return (tally.tried + running * mean) / float(self.modules[kind].HOUR)

    def _collect(self) -> None:
        """Wait until a case ends or exceeds its limit."""
        now = time.monotonic()
        first = min(case.begun + case.limit for case in self._running.values())
        ready, _, _ = select.select(list(self._running), [], [], max(0.0, first - now))
        late = [] if ready else [case for case in self._running.values() if case.begun + case.limit <= now]
        ended = [(self._running.pop(answer), None) for answer in ready]
        ended += [(self._running.pop(case.answer), f"not ended after {case.limit:.0f} s") for case in late]
        for case, reason in ended:
            self._count(case.end(reason), case.folder)

    def _count(self, result: Result, folder: Path) -> None:
        tally = self.tallies[result.kind]
        if result.held is None:
            tally.skipped = result.message
        else:
            tally.cases += 1
            tally.tried += result.count
            tally.broken += not result.held
            tally.seconds += result.seconds
        self.report(result, folder)
