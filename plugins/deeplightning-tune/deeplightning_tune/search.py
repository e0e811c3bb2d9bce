"""Run the loop of a search: draw trials, train them, stop bad ones early, and write the result.

The same command resumes a search from its Optuna file and its frozen code.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import shlex
import signal
import sys
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import deeplightning.run.train  # noqa: F401  (imports everything now, because the files may change later)
from deeplightning.callbacks import TRIAL
from deeplightning.config.examine import load_config
from deeplightning.config.schema import Config
from deeplightning.config.secrets import without_secrets
from deeplightning.config.source import read
from deeplightning.config.tree import dump
from deeplightning.faults import CheckpointError, ConfigError, Fault, RunError, SetupError, UserError, count
from deeplightning.launch import Job, apply_environment, array_of, launcher_of
from deeplightning.process.identity import DECIDED, require_single_process
from deeplightning.process.terminal import in_columns, say, say_path
from deeplightning.runfolder import FolderLock, RunFolder, make_private, read_object, write_whole
from deeplightning.sweep.frozen_code import FOLDER, SearchCode, own_code
from deeplightning.sweep.multirun import resume_override
from deeplightning.sweep.worker import Forked, Train, TrialServer, failure_in
from deeplightning.tracking.environment import redacted
from deeplightning.tracking.parent import Parent, Stopped
from deeplightning_tune.resume import changed_settings, code_of_search, is_intact
from deeplightning_tune.section import search_of
from deeplightning_tune.space import space_of

if TYPE_CHECKING:
    import optuna

log = logging.getLogger("deeplightning")

GRACE_SECONDS = 10.0  # for the process of an earlier command to end
_FATAL_CODES = {3: SetupError, 4: CheckpointError}  # that end the search: other trials would fail too


def search(path: Path, overrides: Sequence[str], train: Train) -> Path:
    """Run the search of a config to its end, or resume it.

    Args:
        train: runs `deeplightning train` in the calling process; called in forked processes.

    Returns:
        The folder of the result: `best.yaml`, `trials.csv`, pictures.

    Raises:
        ConfigError: the config is invalid, has no search, or differs from that of the search to resume; or the frozen
            code of that search is gone and the code has changed.
        SetupError: another process runs this search, or a trial cannot run here.
        RunError: no trial finished.
        Stopped: a signal ended the search.
    """
    require_single_process("a search")
    with contextlib.closing(code_of_search(path, overrides)) as code:
        cfg = load_config(path, list(overrides))
        apply_environment(cfg)
        if search_of(cfg) is None:
            hint = (
                "for example tune: {metric: val_acc, mode: max, space: {model.optimizer.params.lr: {log_uniform: …}}}"
            )
            raise ConfigError(Fault(f"there is no search in this config: {hint}", "tune", str(path)))
        if "train" not in cfg.stages:
            raise ConfigError(Fault("a search trains: add `train` to the stages", "stages"))
        if cfg.train.resume_ckpt is not None:
            message = "each trial of a search starts from scratch; to start from given weights, use `model.init_from`"
            raise ConfigError(Fault(message, "train.resume_ckpt"))
        launcher_of(cfg)  # reports invalid arguments before the search begins
        with _Search(cfg, path, overrides, train, code) as new_or_resumed:
            return new_or_resumed.run()


class _Search:
    """A new or resumed search, run by this process."""

    def __init__(self, cfg: Config, path: Path, overrides: Sequence[str], train: Train, code: SearchCode):
        from deeplightning.callbacks.log_lines import one_line_warnings, to_terminal

        to_terminal(cfg)
        one_line_warnings()
        self.cfg, self.path, self.overrides, self.code = cfg, path, overrides, code
        tune = search_of(cfg)
        assert tune is not None, "`search` checked it"
        self.tune = tune
        self.name = self.tune.name or path.stem
        self.space = space_of(self.tune.space)
        self.parent = Parent(cfg, self.name)
        self.home = self.parent.home
        self.database = self.home / "study.db"
        self.server = TrialServer(is_remote=cfg.engine.launcher is not None)
        self.workers = Forked(train, self.server)
        self.study: Any = None
        self.sign = ""
        self._lock: FolderLock | None = None
        self._pruned: dict[int, str] = {}
        self._logged_names: dict[int, list[str]] = {}
        self._start_times: dict[int, float] = {}
        self._imports: list[str] | None = None  # modules that the first trial imported; None: unknown
        self._error: UserError | None = None

    def __enter__(self) -> _Search:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        if self._lock is not None:
            self._lock.release()

    def run(self) -> Path:
        """Run the search and return the folder of its result."""
        try:
            return self._run()
        except Exception as error:
            if (reported := self._as_reported(error)) is error:
                raise
            raise reported from error

    def _run(self) -> Path:
        self._open()
        log.info("%-10s %s", "search", self._summary())
        for notice in self.code.notices:
            log.warning("%-10s %s", "code", notice)
        job = Job(self.cfg, self.path, tuple(self.overrides))
        remaining = self.study.total() - self.study.num_ended()
        self.workers.array = array_of(job, remaining, [d.key for d in self.space], self.home / "slurm-array")
        with self.workers.forward_signals():
            try:
                self._loop()
                self._conclude()
            except BaseException as error:
                self._abort(self._as_reported(error))
                raise
            finally:
                say_path(self.parent.folder, "Artifact storage path: ")
        return self.parent.folder

    # ---- the start

    def _open(self) -> None:
        """Open the search, new or resumed.

        Raises:
            SetupError: another process runs it, or its files cannot be written.
            ConfigError: it started with another config.
        """
        from deeplightning_tune import outcome, study  # noqa: F401  (imported now, because the files may change later)

        try:
            make_private(self.home / "trials", self.home.parents[2])  # STORE/searches/EXPERIMENT/NAME
            self._lock = RunFolder(self.home).lock()
        except OSError as error:
            raise SetupError(f"{self.home}: the search's folder cannot be written: {error.strerror}") from error
        if self._lock is None:
            raise SetupError(f"another process runs the search {self.name}, in {self.home}; wait for it, or end it")
        self._drop_if_deleted()
        is_new = not self.database.exists()
        if is_new:
            notes = {
                "sign": uuid.uuid4().hex,
                "config": self._frozen_config(),
                "settings": dump(self.cfg.public()),
                "code": own_code(),
                "sealed": self.code.name,
            }
            assert self.tune.mode is not None, "set by load_config"
            study.begin(self.database, self.tune.mode, notes)
        self.study = self._study()
        notes = self.study.notes
        try:
            self.sign, config, settings = notes["sign"], notes["config"], yaml.safe_load(notes["settings"])
            seed = settings["seed"]
        except (AttributeError, KeyError, TypeError, yaml.YAMLError) as error:  # not what was written
            raise self._file_error(error) from error
        self.config = self.home / "search.yaml"
        write_whole(self.config, config)
        self._restore_seed(seed)
        if faults := changed_settings(settings, self.cfg.public(), self.name, self.config):
            raise ConfigError(faults)
        self._record_code(notes.get("sealed"))
        run_id = notes.get("run") or (None if is_new else self.parent.find_runs(self.sign).get(None))
        opened = self.parent.open(run_id, self.sign)
        if opened != notes.get("run"):
            self.study.note("run", opened)
        if self.parent.folder != self.home:
            write_whole(self.parent.folder / "search.yaml", notes["config"])

    def _record_code(self, noted: str | None) -> None:
        """Record the frozen code of the search.

        Raises:
            SetupError: another process started the search in the meantime, with its own frozen code.
        """
        if noted not in (None, self.code.name) and is_intact(self.home / FOLDER / str(noted)):
            raise SetupError(f"another process started the search {self.name} in the meantime; run the command again")
        if noted != self.code.name:
            self.study.note("sealed", self.code.name)
        self.code.kept = True
        self.code.drop_others()

    def _study(self) -> Any:
        from deeplightning_tune.study import Study

        assert self.cfg.seed is not None
        return Study(self.database, self.tune, self.space, self.cfg.seed)

    def _as_reported(self, error: BaseException) -> BaseException:
        """Return the error to report: an error of the search's file is a SetupError."""
        from deeplightning_tune.study import is_storage_error

        return self._file_error(error) if isinstance(error, Exception) and is_storage_error(error) else error

    def _file_error(self, error: Exception) -> SetupError:
        reason = " ".join(str(error.__cause__ or error).split("\n[SQL")[0].split())[:200]
        return SetupError(
            f"{self.database}: the file of this search cannot be read or written ({reason}). Once that is fixed, the "
            f"same command continues; to start another search: tune.name=NEW, or remove {self.home}"
        )

    def _drop_if_deleted(self) -> None:
        """Start the search over if its run was deleted in the tracker."""
        if not self.database.exists():
            return
        former = self._study()
        run_id = former.notes.get("run")
        former.disconnect()
        if run_id is not None and not self.parent.run_exists(run_id):
            kept = RunFolder(self.home).former(self.database)
            self.database.rename(kept)
            log.warning(
                "The run %s of this search was deleted: it starts over. Its trials are kept in %s.", run_id, kept
            )

    def _frozen_config(self) -> str:
        """Return the config of all trials as YAML: files and overrides merged, references unresolved."""
        source = read(self.path, [*self.overrides, *(self.cfg.unread or ())])
        tree = without_secrets(source.root, self.cfg.secrets.in_clear())
        tree["seed"] = self.cfg.seed
        tree["tune"] = {**tree["tune"], "name": self.name}
        return dump(tree)

    def _restore_seed(self, original: int) -> None:
        """Use the original seed of the search."""
        if original != self.cfg.seed:
            requested, self.cfg.seed, self.study.seed = self.cfg.seed, original, original
            log.info("%-10s %s as in earlier trials, not %s, to keep trials comparable", "seed", original, requested)

    def _summary(self) -> str:
        ended, total = self.study.num_ended(), self.study.total()
        done = f", {ended} of them ended," if ended else ""
        keys = ", ".join(d.key for d in self.space)
        fewer = f" (the space has no more points; tune.num_trials is {self.tune.num_trials})"
        return (
            f"{self.name}: {count(total, 'trial')}{done}{fewer if total < self.tune.num_trials else ''} over {keys}; "
            f"{self.tune.metric}, {self.tune.mode}; {self.database}"
        )

    # ---- the loop

    def _loop(self) -> None:
        waiting = [trial.number for trial in self.study.unfinished()]
        # If a trial was killed before it recorded the id of its run, only the tracker has it.
        is_unknown = self.parent.is_tracked and any(self._run_of(number)[0] is None for number in waiting)
        children = self.parent.find_runs(self.sign) if is_unknown else {}
        while True:
            while self.workers.signal is None and self._error is None and len(self.workers) < self.tune.parallel:
                if waiting:
                    self._start(waiting.pop(0), children)
                elif len(self.study.trials()) < self.study.total():
                    self._start(self.study.draw().number, children)
                else:
                    break
            if not len(self.workers):
                break
            self.server.listen(self._handle_message)
            for number, code in self.workers.ended().items():
                self._record_end(number, code)
        if self._error is not None:
            raise self._error
        if self.workers.signal is not None:
            number = signal.Signals(self.workers.signal)
            ended = self.study.num_ended()
            again = shlex.join(["deeplightning", "tune", str(self.path), *self.overrides])
            message = f"interrupted by {number.name} after {ended} of {self.study.total()} trials; to continue: {again}"
            raise Stopped(message, 128 + number)

    def _run_of(self, number: int) -> tuple[str | None, Path | None]:
        attrs = self.study.trials()[number].user_attrs
        return attrs.get("run"), Path(attrs["folder"]) if attrs.get("folder") else None

    def _start(self, number: int, children: Mapping[int | None, str]) -> None:
        """Start a trial, or resume an unfinished one."""
        point = self.study.point(self.study.trials()[number])
        more = self._resume_overrides(number, children)
        file = self.home / "trials" / f"trial-{number}.yaml"
        write_whole(file, self._trial_config(point, self.parent.overrides(f"trial-{number}"), is_trial=True))
        environment: dict[str, str | None] = {
            TRIAL: self.server.address_for(number, self.tune.metric),
            DECIDED: None,
            "MLFLOW_RUN_ID": None,
            **self.parent.environment(number, self.sign),
        }
        _import_again(self._imports or ())
        self._imports = self._imports and []
        self._start_times[number] = time.monotonic()
        from deeplightning_tune.study import plain_text

        log.info("%-10s %s%s", f"trial {number}", plain_text(point), "  (continues)" if more else "")
        self.study.disconnect()
        self.workers.start(number, [str(file), *more], file.with_suffix(".log"), environment)

    def _resume_overrides(self, number: int, children: Mapping[int | None, str]) -> list[str]:
        """Return the overrides that resume an unfinished trial in its run.

        A trial without a checkpoint starts over; its former run is deleted.
        """
        run_id, place = self._run_of(number)
        run_id = run_id or children.get(number)
        if (place is None or not place.is_dir()) and run_id is not None and self.parent.store is not None:
            roots = self.parent.store.artifact_root  # of a store that may have been moved
            place = next(roots.glob(f"*/{run_id}/artifacts"), place) if roots else place
        if place is not None and place.is_dir():
            folder, until = RunFolder(place), time.monotonic() + GRACE_SECONDS
            while (lock := folder.lock()) is None and time.monotonic() < until:
                time.sleep(0.1)
            if lock is not None:
                lock.release()
            if more := resume_override(folder):
                return more
        if run_id is not None:
            self.parent.delete(run_id, place)
        if run_id is not None or place is not None:
            self.study.attribute(number, run=None, folder=None)
        return []

    def _with_references(self, text: str) -> str:
        """Return a text with references in place of values from the environment."""
        found = self.cfg.secrets.values
        for value in sorted(found, key=len, reverse=True):
            text = text.replace(value, found[value])
        return text

    def _trial_config(self, point: Mapping[str, object], more: Sequence[str], is_trial: bool) -> str:
        """Return the search's config with the values of a point, for `deeplightning train`."""
        values = [d.override(redacted(point[d.key], self._with_references)) for d in self.space]
        # An export can take longer than a trial; `deeplightning export` creates the bundle of the chosen run.
        own = ["train.export=false", "train.seeds=null", *more] if is_trial else []
        # References to the environment in choices stay references.
        return dump(without_secrets(read(self.config, ["~tune", *values, *own]).root, self.cfg.secrets.in_clear()))

    def _handle_message(self, message: dict[str, Any]) -> dict[str, object]:
        """Handle a message of a trial: the folder of its run, its metric, or other metrics' names."""
        number = int(message["trial"])
        if "folder" in message:
            self.study.attribute(number, run=message.get("run"), folder=message["folder"])
        elif "absent" in message:
            self._logged_names[number] = message["absent"]
        elif "value" in message:
            step, value = int(message["step"]), float(message["value"])
            if self.study.report(number, step, value):
                self._pruned[number] = f"after epoch {step}: {self.tune.metric} {value:.6g}"
                return {"prune": True}
            # Modules imported here are shared by all forked trials. Not with GPUs: a library that initializes CUDA on
            # import would make CUDA unusable in all processes forked later. Launched processes import by themselves.
            is_needed = self._imports is None and self.cfg.engine.gpus is None and self.cfg.engine.launcher is None
            return {"tell": "modules"} if is_needed else {}
        elif "modules" in message:
            self._imports = [str(name) for name in message["modules"]]
        return {}

    def _record_end(self, number: int, code: int) -> None:
        """Record the end of a trial whose process has ended."""
        reason = failure_in(self.home / "trials" / f"trial-{number}.log", code)
        seconds = time.monotonic() - self._start_times.pop(number)
        name = f"trial {number}"
        if number in self._pruned:
            self.study.prune(number)
            log.info("%-10s pruned in %.0f s %s", name, seconds, self._pruned.pop(number))
        elif code == 0:
            kept, (_, place) = self.cfg.train.checkpoint.monitor == self.tune.metric, self._run_of(number)
            best = read_object(RunFolder(place).best_score).get("value") if kept and place is not None else None
            value = self.study.finish(number, kept, best)
            if value is None:
                self._fail(number, self._missing_value_reason(number))
                return
            best = self.study.best()
            log.info(
                "%-10s finished in %.0f s: %s %.6g%s",
                *(name, seconds, self.tune.metric, value),
                ", the best so far"
                if best.number == number
                else f"; the best is trial {best.number}, {best.value:.6g}",
            )
        elif self.workers.signal is not None or (self._error is not None and code in (130, 143)):
            self._remove_if_empty(number)
            log.info("%-10s interrupted; the same command continues it", name)
        elif code in _FATAL_CODES:
            self._error = self._error or _FATAL_CODES[code](f"{reason} (trial {number}; the same command continues)")
            self.workers.interrupt()
        else:
            if code < 0:
                self._remove_if_empty(number)
            self._fail(number, reason)

    def _remove_if_empty(self, number: int) -> None:
        """Remove the run of a trial that was killed before its first checkpoint or metric."""
        run_id, place = self._run_of(number)
        if run_id is None or self.study.trials()[number].intermediate_values:
            return
        if place is not None and RunFolder(place).checkpoints():
            return
        self.parent.delete(run_id, place)
        self.study.attribute(number, run=None, folder=None)

    def _missing_value_reason(self, number: int) -> str:
        values = self.study.trials()[number].intermediate_values
        if values:
            return f"{self.tune.metric} is {values[max(values)]}"
        logged = ", ".join(self._logged_names.get(number, ())) or "none"
        return f"{self.tune.metric} was not logged; logged metrics: {logged}"

    def _fail(self, number: int, reason: str) -> None:
        self.study.fail(number, self.cfg.redact(reason))
        log.warning("trial %d failed: %s (%s)", number, reason, self.home / "trials" / f"trial-{number}.log")

    # ---- the end

    def _conclude(self) -> None:
        """Write the result, and close the parent run.

        Raises:
            RunError: no trial finished.
        """
        best = self.study.best()
        self._write(pictures=True)
        if best is None:
            reasons = list(dict.fromkeys(t.user_attrs.get("failure", "pruned") for t in self.study.trials()))
            shown = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} other reasons" if len(reasons) > 3 else "")
            raise RunError(f"none of {len(self.study.trials())} trials finished: {shown}")
        self.parent.close("FINISHED")

    def _write(self, pictures: bool) -> None:
        from deeplightning_tune import outcome
        from deeplightning_tune.study import plain_text

        folder, best = self.parent.folder, self.study.best()
        say(self.cfg.redact(in_columns(outcome.rows(self.study), "trials.csv")))
        write_whole(folder / "trials.csv", self.cfg.redact(outcome.as_csv(self.study)))
        if pictures:
            outcome.draw(self.study, folder)
        tags = {}
        if best is not None:
            point = self.study.point(best)
            write_whole(folder / "best.yaml", self._best_config(best, point))
            tags = {"best_trial": str(best.number), "best_run": str(best.user_attrs.get("run"))}
            found = f"trial {best.number}, {self.tune.metric} {best.value:.6g}"
            log.info("%-10s %s: %s", "best", found, plain_text(point))
            if best.user_attrs.get("folder"):
                log.info("%-10s %s", "its run", best.user_attrs["folder"])
            log.info("%-10s deeplightning train %s", "again", shlex.quote(str(folder / "best.yaml")))
        self.parent.log(self._points(), tags)

    def _best_config(self, best: optuna.trial.FrozenTrial, point: Mapping[str, object]) -> str:
        head = f"# The best of {len(self.study.trials())} trials of the search {self.name}: trial {best.number}, "
        return f"{head}{self.tune.metric} {best.value:.6g}.\n{self._trial_config(point, (), is_trial=False)}"

    def _points(self) -> list[Any]:
        """Return the points of the best value so far, under the metric's own name, and of the value of each finished
        trial; the step is the number of the trial.

        Lists of runs show the last point of a metric.
        """
        from deeplightning.tracking.entities import Point

        points, best, latest, metric = [], None, 0, self.tune.metric
        pick = max if self.tune.mode == "max" else min
        for trial in self.study.trials():
            if trial.state.name != "COMPLETE" or trial.value is None or trial.datetime_complete is None:
                continue
            best = trial.value if best is None else pick(best, trial.value)
            time_ms = int(trial.datetime_complete.timestamp() * 1000)
            latest = max(latest, time_ms)  # an earlier trial may end later: of two points the later one is shown
            points += [
                Point(metric, best, latest, trial.number),
                Point(f"trial_{metric}", trial.value, time_ms, trial.number),
            ]
        return points

    def _abort(self, error: BaseException) -> None:
        """Kill the trials and close the parent run after an error or an interruption."""
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        self.workers.interrupt(signal.SIGKILL)
        with contextlib.suppress(Exception):  # the store may have caused the error
            if not isinstance(error, RunError):
                self._write(pictures=False)
            self.parent.close("KILLED" if stopped else "FAILED", self.cfg.redact(str(error)))


def _import_again(names: Iterable[str]) -> None:
    """Import the modules that another process of this program has imported, in the same order; skip failures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
