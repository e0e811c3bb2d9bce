"""Train the mixed runs of a bisection, each once and in a child process, under one parent run.

The file of a trial records how its run ended, under the digest of config, code, environment and overrides. A killed run
resumes from its latest checkpoint; a run that has ended is not repeated while its run folder exists.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from deeplightning.config.schema import Config
from deeplightning.faults import SetupError
from deeplightning.process import die_with_parent
from deeplightning.process.identity import DECIDED
from deeplightning.reproduce.again import Plan, Say, prepare, quoted
from deeplightning.reproduce.past import PastRun
from deeplightning.runfolder import RunFolder, read_object, write_whole
from deeplightning.tracking.environment import REPRODUCES
from deeplightning.tracking.metrics_file import last_values
from deeplightning.tracking.parent import Parent, Stopped
from deeplightning.tracking.store import Store
from deeplightning_lab.bisect_run import Parts

FINISHED, FAILED, UNDERWAY, MACHINE = "finished", "failed", "under way", "machine"
"""States of a trial. MACHINE: it failed for a reason that may lie in the machine, such as a full disk."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVE_SECONDS = 60.0
"""Time for the run of a killed bisection to save a checkpoint and end."""
_FOLDER = re.compile(r"^Artifact storage path: (.+)$", re.MULTILINE)
_REPORTED_ELSEWHERE = ("code: what will be run", "warning: other versions than then")
_MAX_NAME_CHARACTERS = 200


class Enough(Exception):
    """Raised when `max_runs` runs were started."""


def start_process(plan: Plan, python: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a training process, which saves a checkpoint and ends when this process ends, even by SIGKILL.

    Args:
        plan: what is run, and where.
        python: the interpreter.
        log: the file for its output.
    """
    run = [python, "-m", "deeplightning", "train", str(plan.config), *plan.overrides]
    command = [sys.executable, "-P", die_with_parent.__file__, *run]
    with log.open("wb") as out:
        # In a session of its own it does not get Ctrl-C from the terminal; this process forwards it once.
        return subprocess.Popen(
            command,
            cwd=plan.directory,
            env=plan.variables,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def measured(run: PastRun) -> dict[str, float]:
    """Return the metrics of a run: the last value of each series, and the results of its stages."""
    results = {n: v for n, v in run.results.items() if isinstance(v, int | float) and n != "best step"}
    return last_values(run.series or {}) | results


@dataclass
class Trial:
    """One mixed run.

    Attributes:
        file: the JSON file with its record.
    """

    file: Path

    @property
    def known(self) -> dict[str, Any]:
        """Number, name, state, seconds, folder and id of its run, its metrics, and the reason of a failure."""
        return read_object(self.file)

    def note(self, **values: object) -> None:
        """Add values to the record."""
        write_whole(self.file, json.dumps(self.known | values, indent=2))

    @property
    def is_over(self) -> bool:
        known = self.known
        if known.get("state") == FINISHED:
            return bool(known.get("folder")) and RunFolder(known["folder"]).config.is_file()
        return known.get("state") == FAILED

    def value(self, metric: str) -> float | None:
        """Return a metric of the run, or None if the run failed or has no such finite metric."""
        value = (self.known.get("values") or {}).get(metric)
        return value if self.known.get("state") == FINISHED and value is not None and math.isfinite(value) else None

    def reason(self, metric: str) -> str:
        """Return why there is no value."""
        return str(self.known.get("failure") or f"it has no finite {metric}")


@dataclass
class Trials:
    """Train mixed runs one after another.

    Attributes:
        cfg: the first run's config, whose logger all use.
        parent: the parent run, open.
        sign: the tag of this bisection's runs in the store.
        home: the folder for the trials' files.
        store: where all are tracked.
        overrides: `key=value` that all get.
        salt: everything else that affects their metrics, the same for all.
        max_runs: most runs to start; None: no limit.
        say: prints messages.
        made: the trials in their order, each with its differences and its seed.
        begun: the number of runs that this command has started.
        signal: the last SIGINT or SIGTERM, or None.
    """

    cfg: Config
    parent: Parent
    sign: str
    home: Path
    store: Store | None
    overrides: Sequence[str]
    salt: str
    max_runs: int | None
    say: Say
    made: list[tuple[Trial, str, int | None]] = field(default_factory=list)
    begun: int = 0
    signal: int | None = None
    _process: subprocess.Popen[bytes] | None = None
    _reported: set[str] = field(default_factory=set)

    def run(self, parts: Parts, name: str, seed: int | None = None) -> Trial:
        """Train a mixed run, unless it has been trained before.

        Args:
            name: a description for people.
            seed: of the run; None: that of its config.

        Raises:
            Enough: no further run may be started.
            SetupError: it failed for a reason that may lie in the machine.
            Stopped: a signal ended it.
        """
        overrides = [*self.overrides, *([f"seed={seed}"] if seed is not None else [])]
        digest = hashlib.sha256("\0".join([parts.digest(), self.salt, *overrides]).encode()).hexdigest()[:16]
        trial = Trial(self.home / "trials" / f"{digest}.json")
        if not trial.is_over:
            self._refuse_more()
            self._train(trial, parts, name, overrides)
        self.made.append((trial, name, seed))
        return trial

    def _refuse_more(self) -> None:
        if self.signal is not None:
            over = sum(trial.is_over for trial, _, _ in self.made)
            message = f"interrupted by {signal.Signals(self.signal).name} after {over} runs; the same command continues"
            raise Stopped(message, 128 + self.signal)
        if self.max_runs is not None and self.begun >= self.max_runs:
            raise Enough

    def _train(self, trial: Trial, parts: Parts, name: str, overrides: Sequence[str]) -> None:
        before, log = trial.known, trial.file.with_suffix(".log")
        more = self._to_continue(before)
        number = before["number"] if before.get("state") == UNDERWAY else self._next_number()
        trial.note(number=number, name=name, state=UNDERWAY, failure=None)
        self.begun += 1
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="deeplightning-bisect-", ignore_cleanup_errors=True) as folder:
            top = Path(folder)
            mixed = RunFolder(top / "mixture")
            parts.write(mixed)
            (top / "run").mkdir()
            plan = prepare(PastRun(mixed, self.store, None, trust=True), top / "run", overrides, True, self._say_once)
            if self.parent.is_tracked:
                plan.overrides.append(f"logger.params.run_name={quoted(f'{number} {name}'[:_MAX_NAME_CHARACTERS])}")
            plan.overrides += more
            plan.variables.update(self.parent.environment(number, self.sign))
            for variable in (REPRODUCES, DECIDED, "MLFLOW_RUN_ID"):
                plan.variables.pop(variable, None)
            self._process = start_process(plan, parts.python, log)
            try:
                if self.signal is not None:  # it came before the process was started
                    self._process.send_signal(signal.SIGINT)
                code = self._process.wait()
            finally:
                self._process = None
            output = log.read_text(errors="replace")
            found = _FOLDER.findall(output)
            ran = RunFolder(found[-1]) if found else None
            # A logger may write to the working directory.
            if ran is not None and top.resolve() in ran.path.resolve().parents:
                kept = self.home / "runs" / f"{number}-{ran.path.name}"
                shutil.rmtree(kept, ignore_errors=True)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(ran.path, kept)
                ran = RunFolder(kept)
        trial.note(seconds=round(time.monotonic() - begun, 1), folder=str(ran.path) if ran is not None else None)
        if code == 0 and ran is not None:
            trial.note(state=FINISHED, values=measured(PastRun(ran, None, None)))
        else:
            self._failed(trial, code, output.replace(str(plan.config), plan.config.name), log)

    def _next_number(self) -> int:
        numbers = [Trial(file).known.get("number", -1) for file in (self.home / "trials").glob("*.json")]
        return max(numbers, default=-1) + 1

    def _failed(self, trial: Trial, code: int, output: str, log: Path) -> None:
        """Record why a run failed.

        Raises:
            SetupError: the reason may lie in the machine; a second failure is recorded as the run's own.
            Stopped: it was interrupted.
        """
        if self.signal is not None:
            self._refuse_more()
        notes = re.findall(r"^(?:\x1b\[\d+m)?error(?:\x1b\[0m)?[^:]*: (.*)$", output, re.MULTILINE)
        raised = re.findall(r"^[\w.]+(?:Error|Exception)\b.*$", output, re.MULTILINE)
        number = -code if code < 0 else code - 128
        ended = f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"
        reason = self.cfg.redact(((raised if code == 1 else []) or notes or [ended])[-1])[:1000]
        of_machine = number > 0 or code == 3
        if of_machine and not trial.known.get("failed_here"):
            trial.note(state=MACHINE, failure=reason, failed_here=True)
            raise SetupError(
                f"run {trial.known['number']} of the bisection ended: {reason} ({log}). The same command continues; "
                "if this run fails so again, it counts as one that cannot be made"
            )
        trial.note(state=FAILED, failure=reason, log=str(log))

    def _to_continue(self, known: dict[str, Any]) -> list[str]:
        """Return the override with which an unfinished run resumes; delete a run that left no checkpoint."""
        if known.get("state") != UNDERWAY or self.parent.store is None or self.parent.run_id is None:
            return []
        run_id = self.parent.known(self.sign).get(known["number"])
        roots = self.parent.store.artifact_root
        place = next(roots.glob(f"*/{run_id}/artifacts"), None) if run_id and roots else None
        if place is not None:
            folder, until = RunFolder(place), time.monotonic() + SAVE_SECONDS
            while (lock := folder.lock()) is None and time.monotonic() < until:
                time.sleep(0.1)
            if lock is not None:
                lock.release()
            if lock is not None and folder.checkpoints():
                return [f"train.resume_ckpt={quoted(place)}"]
        if run_id is not None:
            self.parent.delete(run_id, place)
        return []

    def _say_once(self, text: str) -> None:
        if text not in self._reported and not text.startswith(_REPORTED_ELSEWHERE):
            self._reported.add(text)
            self.say(text)

    @contextlib.contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Forward SIGINT and SIGTERM to the run as SIGINT.

        After one signal the run saves a checkpoint and ends, after a second it ends at once.
        """

        def pass_on(number: int, frame: FrameType | None) -> None:
            self.signal = number
            if self._process is not None:
                self._process.send_signal(signal.SIGINT)

        before = {number: signal.signal(number, pass_on) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
