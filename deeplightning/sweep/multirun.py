"""`deeplightning train CONFIG key=a,b --multirun`: a run for each point of a grid, and one table of their results.

Uses neither a study nor Optuna: a file per point records how its run ended, and the same command continues with points
that have not finished. A point is identified by the digest of its complete config, so a larger grid runs only its new
points. All points run with the code from the start of the command.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import json
import logging
import math
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeplightning.callbacks import TRIAL
from deeplightning.config.examine import examine, load_config
from deeplightning.config.schema import Config
from deeplightning.config.secrets import without_secrets
from deeplightning.config.source import is_file, read
from deeplightning.config.tree import dump, line, plain, scalar
from deeplightning.faults import ConfigError, Fault, RunError, SetupError, count, error_of
from deeplightning.launch import Job, apply_environment, array_of
from deeplightning.process.identity import DECIDED, require_single_process
from deeplightning.process.terminal import in_columns, say, say_path
from deeplightning.reproduce.past import PastRun
from deeplightning.runfolder import RUNS_FILE, RunFolder, make_private, read_object, write_whole
from deeplightning.sweep.frozen_code import SearchCode, code_of_grid, own_code
from deeplightning.sweep.worker import Forked, Train, TrialServer, failure_in
from deeplightning.tracking.parent import Parent, Stopped

log = logging.getLogger("deeplightning")

MAX_CHECKED = 100  # points whose complete config is checked before the first run
MAX_POINTS = 1000
FINISHED, FAILED, UNDERWAY = "finished", "failed", "under way"

_RANGE = re.compile(r"range\((.*)\)", re.DOTALL)
_OPEN, _CLOSE = "([{", ")]}"


@dataclass
class Point:
    """One run of the grid."""

    words: list[str]  # the overrides of swept keys
    config: str  # the complete config, as YAML with unresolved references
    file: Path  # the record of the run, as JSON

    @property
    def record(self) -> dict[str, Any]:
        """State, folder and id of its run, failure, and the digests of the code that it ran with."""
        record = read_object(self.file)
        if (former := record.get("folder")) and not Path(former).is_dir():  # the store may have been moved
            record["folder"] = str(self.file.parents[4].joinpath(*Path(former).parts[-3:]))
        return record

    def update_record(self, **values: object) -> None:
        """Add values to the record."""
        write_whole(self.file, json.dumps(self.record | values, indent=2))

    def is_finished(self, code: dict[str, str]) -> bool:
        """Return whether the run finished with this code and still exists."""
        record = self.record
        has_run = bool(record.get("folder")) and RunFolder(Path(record["folder"])).config.is_file()
        return record.get("state") == FINISHED and self.has_code(code) and has_run

    def has_code(self, code: dict[str, str]) -> bool:
        """Return whether its run began with this code; a larger or smaller grid imports more or fewer files."""
        past = self.record.get("code") or {}
        is_part = past.keys() <= code.keys() or code.keys() <= past.keys()  # else a file was moved or replaced
        return is_part and all(code.get(file, digest) == digest for file, digest in past.items())


def multirun(path: Path, overrides: Sequence[str], train: Train, jobs: int = 1) -> Path:
    """Run each point of a grid that has not finished, then print and write the table of all.

    Args:
        train: calls `deeplightning train` in this process; it runs in processes forked from this one.
        jobs: the number of runs at the same time.

    Returns:
        The folder with the table, `runs.csv`.

    Raises:
        ConfigError: an override cannot be parsed, or a point's config is wrong.
        SetupError: another process works on this grid, or its code cannot be sealed.
        RunError: runs failed.
        Stopped: a signal ended the command.
    """
    require_single_process("--multirun")
    keys, grid = points(overrides)
    with contextlib.closing(code_of_grid(path, grid[0])) as code:
        cfg = load_config(path, grid[0])
        # Check the complete config of the first points; a wrong config of a later one fails when it starts.
        checked = (examine(path, point, importing=True) for point in grid[:MAX_CHECKED])  # for `own_code`
        faults = dict.fromkeys(fault for report in checked for fault in report.faults)
        if faults:
            raise error_of([*faults])
        if cfg.train.seeds is not None and cfg.train.seeds > 1:
            message = f"cannot be combined with --multirun; use `seed=range({cfg.train.seeds})` and `train.seeds=null`"
            raise ConfigError(Fault(message, "train.seeds", found=str(cfg.train.seeds)))
        if cfg.train.resume_ckpt is not None and "train.resume_ckpt" not in keys:
            raise ConfigError(Fault("all runs would continue the same one; use `model.init_from`", "train.resume_ckpt"))
        apply_environment(cfg)
        return Grid(cfg, path, keys, grid, train, jobs, code).run()


class Grid:
    """The runs of a grid, started by this process; the runs of one config with several seeds are a grid too.

    Args:
        parent: the parent run; None if there is only a folder.
    """

    VERB = "multirun"
    tag = ""  # the tag that marks the runs of a parent run

    def __init__(
        self,
        cfg: Config,
        path: Path,
        keys: Sequence[str],
        grid: Sequence[list[str]],
        train: Train,
        jobs: int,
        seal: SearchCode,
        parent: Parent | None = None,
    ):
        from deeplightning.callbacks.log_lines import one_line_warnings, to_terminal

        to_terminal(cfg)
        one_line_warnings()
        self.cfg, self.path, self.keys, self.jobs = cfg, path, [*keys], jobs
        self.parent = parent or Parent(cfg, path.stem, "multiruns")
        self.home = self.parent.home
        self.server = TrialServer(is_remote=cfg.engine.launcher is not None)
        self.workers = Forked(train, self.server)
        self.code, self.seal = own_code(), seal
        self.points = [self._point(words) for words in grid]
        self._start_times: dict[int, float] = {}

    def _point(self, words: list[str]) -> Point:
        is_other = any(re.match(r"(data|model)($|[/.]module\b)", key) for key in self.keys)  # perhaps another module
        cfg = (examine(self.path, words, importing=True).config if is_other else None) or self.cfg
        # Values of variables count, except where the run is tracked.
        source = read(self.path, [*words, *(cfg.unread or ())])
        meant = dump(plain(source.root) | {"logger": None}) if source.secrets.variable_paths else ""
        config = dump(without_secrets(source.root, self.cfg.secrets.in_clear()))
        name = hashlib.sha256((config + meant).encode()).hexdigest()[:16]
        swept = [f"{k}={self.cfg.redact(v)}" for k, _, v in (w.partition("=") for w in words) if k in self.keys]
        return Point(swept, config, self.home / "points" / f"{name}.json")

    def run(self) -> Path:
        """Run all points that have not finished, and write the table; return its folder."""
        with contextlib.closing(self.server):
            try:
                make_private(self.home / "points", self.home.parents[2])  # STORE/multiruns/EXPERIMENT/NAME
                lock = RunFolder(self.home).lock()
            except OSError as error:
                message = f"{self.home}: the folder of these runs cannot be written: {error.strerror}"
                raise SetupError(message) from error
            if lock is None:
                raise SetupError(f"another process works on these runs, in {self.home}; wait for it, or end it")
            self.seal.drop_others()
            try:
                self._open()
                try:
                    with self.workers.forward_signals():
                        self._loop()
                except BaseException:
                    self.workers.interrupt(signal.SIGKILL)
                    raise
                finally:
                    self._write()
            except BaseException as error:
                self._close(error)
                raise
            finally:
                lock.release()
            self._close(None)
        return self.parent.folder

    def _open(self) -> None:
        """Prepare for the first run."""

    def _close(self, error: BaseException | None) -> None:
        """Clean up after the last run, or after an error."""

    def _loop(self) -> None:
        waiting = [number for number, point in enumerate(self.points) if not point.is_finished(self.code)]
        done = len(self.points) - len(waiting)
        finished = f", {done} of them finished before" if done else ""
        job = Job(self.cfg, self.path, tuple(self.points[0].words))
        self.workers.array = array_of(job, len(waiting), self.keys, self.home / "slurm-array")
        log.info("%-10s %s%s; %s", self.VERB, count(len(self.points), "run"), finished, self.home)
        while True:
            while self.workers.signal is None and waiting and len(self.workers) < self.jobs:
                self._start(waiting.pop(0))
            if not len(self.workers):
                break
            self.server.listen(self._answer)
            for number, code in self.workers.ended().items():
                self._record_end(number, code)
        done = sum(point.record.get("state") == FINISHED for point in self.points)
        if self.workers.signal is not None:
            name = signal.Signals(self.workers.signal).name
            message = f"interrupted by {name} after {done} of {len(self.points)} runs; the same command continues"
            raise Stopped(message, 128 + self.workers.signal)
        if done < len(self.points):
            records = [(number, point.record) for number, point in enumerate(self.points)]
            reasons = dict.fromkeys(r.get("failure", "") for _, r in records if r.get("state") != FINISHED)
            shown = "; ".join([*reasons][:3]) + (f"; and {len(reasons) - 3} other reasons" if len(reasons) > 3 else "")
            raise RunError(f"{len(self.points) - done} of {len(self.points)} runs failed: {shown}")

    def _start(self, number: int) -> None:
        """Start a run, or continue an interrupted one."""
        point = self.points[number]
        more = self._resume_overrides(point)
        write_whole(file := point.file.with_suffix(".yaml"), point.config)
        if not more:  # a new run: the record and the output name an earlier one
            point.file.with_suffix(".log").unlink(missing_ok=True)
            point.update_record(run=None, folder=None)
        point.update_record(state=UNDERWAY, words=point.words, code=self.code, failure=None)
        address = self.server.address_for(number, self.cfg.train.checkpoint.monitor or "")
        log.info("%-10s %s%s", f"run {number}", "  ".join(point.words), "  (continues)" if more else "")
        self._start_times[number] = time.monotonic()
        of_parent = self.parent.environment(number, self.tag)
        environment = {TRIAL: address, DECIDED: None, "MLFLOW_RUN_ID": None, **of_parent}
        arguments = [str(file), *more, *self._tracking_overrides(point)]
        self.workers.start(number, arguments, point.file.with_suffix(".log"), environment)

    def _tracking_overrides(self, point: Point) -> list[str]:
        """Return the tracker's overrides: the name of the run, unless the config sets one."""
        if not self.parent.is_tracked or "run_name" in self.cfg.logger.params or not point.words:
            return []
        name = " ".join(re.sub(r"^[^=]*\.", "", word) for word in point.words)
        return [f"logger.params.run_name={line(name[:200])}"]

    def _resume_overrides(self, point: Point) -> list[str]:
        """Return the override that resumes an interrupted run from its latest checkpoint."""
        record = point.record
        if record.get("state") != UNDERWAY or not point.has_code(self.code) or not record.get("folder"):
            return []
        return resume_override(RunFolder(Path(record["folder"])))

    def _answer(self, message: dict[str, Any]) -> dict[str, object]:
        """Record the folder that a run reports."""
        if "folder" in message:
            self.points[int(message["trial"])].update_record(run=message.get("run"), folder=message["folder"])
        return {}

    def _record_end(self, number: int, code: int) -> None:
        """Record how a run ended."""
        point, seconds = self.points[number], time.monotonic() - self._start_times.pop(number)
        file = point.file.with_suffix(".log")
        if folders := re.findall(r"^Artifact storage path: (.+)$", file.read_text(errors="replace"), re.MULTILINE):
            point.update_record(folder=folders[-1])
        if code == 0:
            point.update_record(state=FINISHED)
            log.info("%-10s finished in %.0f s", f"run {number}", seconds)
        elif self.workers.signal is not None:
            log.info("%-10s interrupted; the same command continues it", f"run {number}")
        else:
            reason = failure_in(file, code)
            point.update_record(state=FAILED, failure=self.cfg.redact(reason)[:1000])
            log.warning("run %d failed: %s (%s)", number, reason, file)

    def _table(self) -> list[list[str]]:
        """Return a header and a row for each run: number, state, values of the swept keys, results, the run's id in the
        tracker, and the folder."""
        records = [point.record for point in self.points]
        results = [
            PastRun(RunFolder(Path(record["folder"])), None, None).results if record.get("state") == FINISHED else {}
            for record in records
        ]
        metrics = [name for name in dict.fromkeys(n for each in results for n in each) if name != "best step"]
        table = [["run", "state", *self.keys, *metrics, "id", "folder"]]
        for number, (point, record, result) in enumerate(zip(self.points, records, results, strict=True)):
            values = dict(word.split("=", 1) for word in point.words)
            shown = [f"{result[name]:.6g}" if isinstance(result.get(name), float) else "-" for name in metrics]
            row = [str(number), record.get("state") or "to come", *(values[key] for key in self.keys), *shown]
            table.append([*row, record.get("run") or "", record.get("folder") or ""])
        return table

    def _write(self) -> None:
        table, out = self._table(), io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(table)
        write_whole(self.parent.folder / RUNS_FILE, out.getvalue())
        say(in_columns([row[:-2] for row in table], RUNS_FILE))
        self._summarize()
        say_path(self.parent.folder, "Artifact storage path: ")
        sys.stdout.flush()

    def _summarize(self) -> None:
        """Print and write more about the runs."""


def resume_override(folder: RunFolder) -> list[str]:
    """Return the override that resumes a run from its latest checkpoint; [] if it has none."""
    checkpoints = folder.checkpoints()
    return [f"train.resume_ckpt={line(str(checkpoints[0]))}"] if checkpoints else []


def points(overrides: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the keys that have several values, and the overrides of each point, the last key varying first.

    `a,b,c` means the values a, b and c; `range(STOP)`, `range(START,STOP)` and `range(START,STOP,STEP)` mean numbers
    below STOP. A comma inside quotes or brackets is part of a value.

    Raises:
        ConfigError: lists every override that cannot be parsed, or there are more than `MAX_POINTS` points.
    """
    keys, choices, faults = list[str](), list[list[str]](), list[Fault]()
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or is_file(word) or key.startswith(("~", "+")):
            choices.append([word])
            continue
        try:
            values = values_of(text)
        except ValueError as error:
            faults.append(Fault(str(error), key, f"override {word}"))
            continue
        if len(values) > 1:
            keys.append(key)
        choices.append([f"{key}={value}" for value in values])
    if faults:
        raise ConfigError(faults)
    if (number := math.prod(map(len, choices))) > MAX_POINTS:
        message = f"this grid has {number} points, more than {MAX_POINTS}; `deeplightning tune` samples a space"
        raise ConfigError(Fault(message))
    return keys, [[*point] for point in itertools.product(*choices)]


def values_of(text: str) -> list[str]:
    """Return the values that an override's text lists; the text itself if it is not a list.

    Raises:
        ValueError: the text cannot be parsed.
    """
    in_range = _RANGE.fullmatch(text.strip())
    parts = _split_at_commas(in_range[1] if in_range else text)
    if "" in parts and (in_range or len(parts) > 1):
        raise ValueError(f"there is no value between two commas, or at an end: {text:.60}")
    if in_range is None:
        return parts if len(parts) > 1 else [text]
    numbers = [scalar(part) for part in parts]
    if not 1 <= len(numbers) <= 3 or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        raise ValueError(f"range takes one to three numbers, range(STOP) or range(START,STOP,STEP), not {text:.60}")
    start, stop, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    if step == 0 or not 0 < (stop - start) / step <= MAX_POINTS:
        raise ValueError(f"{text:.60} contains no number, or more than {MAX_POINTS}")
    numbers = [start + step * number for number in range(math.ceil((stop - start) / step - 1e-9))]
    return [line(round(value, 12)) for value in numbers]


def _split_at_commas(text: str) -> list[str]:
    """Split a text at commas outside quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        if char == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]
