"""Train the mixed runs of a bisection, each once and in a child process, under one parent run.

A trial's file records the outcome of its run. It is named by the digest of config, code, environment and overrides. A
killed run resumes from its latest checkpoint; a run that has ended is not repeated while its run folder exists.
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
"""States of a trial. MACHINE: it failed, perhaps because of the machine, such as a full disk."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVE_SECONDS = 60.0
"""How long to wait until the run of a killed bisection has saved a checkpoint and ended."""
_FOLDER_LINE = re.compile(r"^Artifact storage path: (.+)$", re.MULTILINE)
_REPORTED_ELSEWHERE = ("code: what will be run", "warning: other versions than then")
_MAX_NAME_CHARACTERS = 200


class RunLimitReached(Exception):
    """Raised when `max_runs` runs have been started."""


def start_process(plan: Plan, python: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a training process. It saves a checkpoint and ends when this process ends, even by SIGKILL.

    Args:
        plan: command, working directory and environment.
        python: the interpreter.
        log: the file for its output.
    """
    run = [python, "-m", "deeplightning", "train", str(plan.config), *plan.overrides]
    command = [sys.executable, "-P", die_with_parent.__file__, *run]
    with log.open("wb") as out:
        # In its own session it does not receive Ctrl-C from the terminal; this process forwards it once.
        return subprocess.Popen(
            command,
            cwd=plan.directory,
            env=plan.variables,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_metrics(run: PastRun) -> dict[str, float]:
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
    def record(self) -> dict[str, Any]:
        """Number, name, state, seconds, folder and metrics of its run, and the reason for a failure."""
        return read_object(self.file)

    def update(self, **values: object) -> None:
        """Add values to the record."""
        write_whole(self.file, json.dumps(self.record | values, indent=2))

    @property
    def has_ended(self) -> bool:
        record = self.record
        if record.get("state") == FINISHED:
            return bool(record.get("folder")) and RunFolder(record["folder"]).config.is_file()
        return record.get("state") == FAILED

    def value(self, metric: str) -> float | None:
        """Return a metric of the run, or None if the run failed or has no such finite metric."""
        value = (self.record.get("values") or {}).get(metric)
        return value if self.record.get("state") == FINISHED and value is not None and math.isfinite(value) else None

    def reason(self, metric: str) -> str:
        """Return why the run has no value of a metric."""
        return str(self.record.get("failure") or f"it has no finite {metric}")


@dataclass
class Trials:
    """Train mixed runs one after another.

    Attributes:
        cfg: the first run's config; all runs use its logger.
        parent: the parent run, open.
        search_id: the tag of this bisection's runs in the store.
        home: the folder for the trials' files.
        store: the tracking store of all runs.
        overrides: `key=value` for all runs.
        salt: everything else that affects the metrics of all runs.
        max_runs: most runs to start; None: no limit.
        say: prints messages.
        history: the trials in order, each with its description and its seed.
        started: the number of runs that this command started.
        signal: the last SIGINT or SIGTERM, or None.
    """

    cfg: Config
    parent: Parent
    search_id: str
    home: Path
    store: Store | None
    overrides: Sequence[str]
    salt: str
    max_runs: int | None
    say: Say
    history: list[tuple[Trial, str, int | None]] = field(default_factory=list)
    started: int = 0
    signal: int | None = None
    _process: subprocess.Popen[bytes] | None = None
    _reported: set[str] = field(default_factory=set)

    def run(self, parts: Parts, name: str, seed: int | None = None) -> Trial:
        """Train a mixed run, unless it has been trained before.

        Args:
            name: a description for the user.
            seed: the seed of the run; None: the one in its config.

        Raises:
            RunLimitReached: no further run may be started.
            SetupError: it failed, perhaps because of the machine.
            Stopped: a signal ended it.
        """
        overrides = [*self.overrides, *([f"seed={seed}"] if seed is not None else [])]
        digest = hashlib.sha256("\0".join([parts.digest(), self.salt, *overrides]).encode()).hexdigest()[:16]
        trial = Trial(self.home / "trials" / f"{digest}.json")
        if not trial.has_ended:
            self._check_may_start()
            self._train(trial, parts, name, overrides)
        self.history.append((trial, name, seed))
        return trial

    def _check_may_start(self) -> None:
        if self.signal is not None:
            done = sum(trial.has_ended for trial, _, _ in self.history)
            message = f"interrupted by {signal.Signals(self.signal).name} after {done} runs; the same command continues"
            raise Stopped(message, 128 + self.signal)
        if self.max_runs is not None and self.started >= self.max_runs:
            raise RunLimitReached

    def _train(self, trial: Trial, parts: Parts, name: str, overrides: Sequence[str]) -> None:
        before, log = trial.record, trial.file.with_suffix(".log")
        more = self._resume_overrides(before)
        number = before["number"] if before.get("state") == UNDERWAY else self._next_number()
        trial.update(number=number, name=name, state=UNDERWAY, failure=None)
        self.started += 1
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="deeplightning-bisect-", ignore_cleanup_errors=True) as folder:
            top = Path(folder)
            mixed = RunFolder(top / "mixture")
            parts.write(mixed)
            (top / "run").mkdir()
            plan = prepare(PastRun(mixed, self.store, None, trust=True), top / "run", overrides, True, self._log_once)
            if self.parent.is_tracked:
                plan.overrides.append(f"logger.params.run_name={quoted(f'{number} {name}'[:_MAX_NAME_CHARACTERS])}")
            plan.overrides += more
            plan.variables.update(self.parent.environment(number, self.search_id))
            for variable in (REPRODUCES, DECIDED, "MLFLOW_RUN_ID"):
                plan.variables.pop(variable, None)
            self._process = start_process(plan, parts.python, log)
            try:
                if self.signal is not None:  # received before the process started
                    self._process.send_signal(signal.SIGINT)
                code = self._process.wait()
            finally:
                self._process = None
            output = log.read_text(errors="replace")
            found = _FOLDER_LINE.findall(output)
            ran = RunFolder(found[-1]) if found else None
            # A logger may write to the working directory, which is temporary.
            if ran is not None and top.resolve() in ran.path.resolve().parents:
                target = self.home / "runs" / f"{number}-{ran.path.name}"
                shutil.rmtree(target, ignore_errors=True)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(ran.path, target)
                ran = RunFolder(target)
        trial.update(seconds=round(time.monotonic() - start, 1), folder=str(ran.path) if ran is not None else None)
        if code == 0 and ran is not None:
            trial.update(state=FINISHED, values=run_metrics(PastRun(ran, None, None)))
        else:
            self._record_failure(trial, code, output.replace(str(plan.config), plan.config.name), log)

    def _next_number(self) -> int:
        numbers = [Trial(file).record.get("number", -1) for file in (self.home / "trials").glob("*.json")]
        return max(numbers, default=-1) + 1

    def _record_failure(self, trial: Trial, code: int, output: str, log: Path) -> None:
        """Record why a run failed.

        Raises:
            SetupError: the machine may be the cause; a second such failure is attributed to the run.
            Stopped: it was interrupted.
        """
        if self.signal is not None:
            self._check_may_start()
        errors = re.findall(r"^(?:\x1b\[\d+m)?error(?:\x1b\[0m)?[^:]*: (.*)$", output, re.MULTILINE)
        raised = re.findall(r"^[\w.]+(?:Error|Exception)\b.*$", output, re.MULTILINE)
        number = -code if code < 0 else code - 128
        ended = f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"
        reason = self.cfg.redact(((raised if code == 1 else []) or errors or [ended])[-1])[:1000]
        is_machine_failure = number > 0 or code == 3
        if is_machine_failure and not trial.record.get("failed_here"):
            trial.update(state=MACHINE, failure=reason, failed_here=True)
            raise SetupError(
                f"run {trial.record['number']} of the bisection ended: {reason} ({log}). The same command continues; "
                "if this run fails in this way again, it counts as unresolved"
            )
        trial.update(state=FAILED, failure=reason, log=str(log))

    def _resume_overrides(self, record: dict[str, Any]) -> list[str]:
        """Return the override that resumes an unfinished run; delete a run without a checkpoint."""
        if record.get("state") != UNDERWAY or self.parent.store is None or self.parent.run_id is None:
            return []
        run_id = self.parent.find_runs(self.search_id).get(record["number"])
        root = self.parent.store.artifact_root
        artifacts = next(root.glob(f"*/{run_id}/artifacts"), None) if run_id and root else None
        if artifacts is not None:
            folder, deadline = RunFolder(artifacts), time.monotonic() + SAVE_SECONDS
            while (lock := folder.lock()) is None and time.monotonic() < deadline:
                time.sleep(0.1)
            if lock is not None:
                lock.release()
            if lock is not None and folder.checkpoints():
                return [f"train.resume_ckpt={quoted(artifacts)}"]
        if run_id is not None:
            self.parent.delete(run_id, artifacts)
        return []

    def _log_once(self, text: str) -> None:
        if text not in self._reported and not text.startswith(_REPORTED_ELSEWHERE):
            self._reported.add(text)
            self.say(text)

    @contextlib.contextmanager
    def forward_signals(self) -> Iterator[None]:
        """Forward SIGINT and SIGTERM to the run as SIGINT.

        After one signal the run saves a checkpoint and ends; after a second it ends at once.
        """

        def forward(number: int, frame: FrameType | None) -> None:
            self.signal = number
            if self._process is not None:
                self._process.send_signal(signal.SIGINT)

        before = {number: signal.signal(number, forward) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
