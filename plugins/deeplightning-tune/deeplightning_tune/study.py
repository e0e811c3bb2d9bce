"""Store the trials of a search in an SQLite file of Optuna's.

A trial is written with all of its values when it is drawn. The draw depends on the seed, the trial's number and the
earlier trials, but not on interruptions of the search.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import sqlite3
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from deeplightning.config.schema import Target
from deeplightning.config.target import build
from deeplightning.config.tree import line
from deeplightning.tracking.store import refuse_journal
from deeplightning_tune.section import Tune
from deeplightning_tune.space import Dimension, size

NAME = "search"
MAX_REDRAWS = 100  # for a point that was already tried
MAX_POINTS = 100_000  # largest space whose points are listed to find untried ones

Point = dict[str, Any]
"""Value for each key of the space."""


def begin(database: Path, mode: str, notes: dict[str, Any]) -> None:
    """Create the file of a new search atomically."""
    partial = database.with_name(f".{database.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    storage = _storage(partial)
    study = optuna.create_study(storage=storage, study_name=NAME, direction="maximize" if mode == "max" else "minimize")
    for name, value in notes.items():
        study.set_user_attr(name, value)
    storage.engine.dispose()
    partial.replace(database)


def notes_of(database: Path) -> dict[str, Any]:
    """Return the notes that `begin` and `Study.note` wrote to a file."""
    storage = _storage(database)
    try:
        notes: dict[str, Any] = optuna.load_study(study_name=NAME, storage=storage).user_attrs
        return notes
    finally:
        storage.engine.dispose()


def _storage(database: Path) -> Any:
    refuse_journal(database)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # No other search writes here, but a user who opens the file in Optuna's dashboard may lock it.
    options = {"creator": lambda: sqlite3.connect(database, timeout=60, check_same_thread=False)}
    return optuna.storages.RDBStorage("sqlite:///study.db", engine_kwargs=options)  # a URL changes `?`, `%` and `{`


def is_storage_error(error: Exception) -> bool:
    """Return whether an error comes from the file of a study, for example because it is damaged or the disk is full.

    Optuna does not report damaged texts itself: reading them raises exceptions of any class.
    """
    if isinstance(error, optuna.exceptions.StorageInternalError | SQLAlchemyError):
        return True
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("optuna.storages") for frame in frames)


class Study:
    """Trials of a search.

    Args:
        database: its file, created by `begin`.
        tune: the section `tune` of the config.
        space: the dimensions of `tune.space`.
        seed: seed of all draws.
    """

    def __init__(self, database: Path, tune: Tune, space: Sequence[Dimension], seed: int):
        self.tune, self.space, self.seed = tune, space, seed
        self._storage = _storage(database)
        # `draw` makes its own sampler: Optuna's grid sampler would stop Optuna's loop, which does not run here.
        self.study = optuna.load_study(
            study_name=NAME, storage=self._storage, sampler=optuna.samplers.RandomSampler(seed=0)
        )
        self._id = self._storage.get_study_id_from_name(NAME)
        self.study.pruner = build(tune.pruner) if tune.pruner is not None else optuna.pruners.NopPruner()
        self._distributions = {d.key: _distribution(d) for d in space}
        self._sampler_for(0)  # reports invalid arguments now

    # ---- queries

    @property
    def notes(self) -> dict[str, Any]:
        """Notes on the search as a whole."""
        return self.study.user_attrs

    def note(self, name: str, value: object) -> None:
        """Add to `notes`."""
        self.study.set_user_attr(name, value)

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, by number."""
        return self.study.get_trials(deepcopy=False)

    def unfinished(self) -> list[FrozenTrial]:
        """Return the trials that have not ended, by number."""
        return [trial for trial in self.trials() if trial.state == TrialState.RUNNING]

    def total(self) -> int:
        """Return the number of trials at the end, at most the number of points."""
        points = size(self.space)
        if self.tune.sampler is not None and "search_space" in self.tune.sampler.params:
            points = None
        return self.tune.num_trials if points is None else min(self.tune.num_trials, points)

    def point(self, trial: FrozenTrial) -> Point:
        """Return the values of a trial, as the config has them."""
        return {d.key: _from_optuna(d, trial.params[d.key]) for d in self.space}

    def num_ended(self) -> int:
        """Return the number of trials that have ended."""
        return sum(trial.state.is_finished() for trial in self.trials())

    def best(self) -> FrozenTrial | None:
        """Return the best of the finished trials, or None."""
        done = [trial for trial in self.trials() if trial.state == TrialState.COMPLETE and trial.value is not None]
        return min(done, key=self._rank) if done else None

    def ranked(self) -> list[FrozenTrial]:
        """Return all trials: finished ones from the best, then pruned, failed and unfinished ones."""
        order = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING, TrialState.WAITING]
        return sorted(self.trials(), key=lambda trial: (order.index(trial.state), self._rank(trial), trial.number))

    def _rank(self, trial: FrozenTrial) -> float:
        value = self.value(trial)
        if value is None or math.isnan(value):
            return math.inf
        return -value if self.tune.mode == "max" else value

    def value(self, trial: FrozenTrial) -> float | None:
        """Return the value of a trial, or the last value that it reported, or None."""
        reported = trial.intermediate_values
        return reported[max(reported)] if trial.value is None and reported else trial.value

    # ---- updates

    def draw(self) -> FrozenTrial:
        """Add a trial, at an untried point if there is one."""
        known = self.trials()
        tried = [trial.params for trial in known]
        number = len(known)
        # Drawn in memory, so that the file contains only trials that run.
        memory = optuna.storages.InMemoryStorage()
        draft = optuna.create_study(storage=memory, study_name=NAME, direction=self.study.direction)
        stored, drafted = (self._storage, self._id), (memory, memory.get_study_id_from_name(NAME))
        self._copy_attributes(stored, drafted)
        trial: Any = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            draft.add_trials(known)
            for attempt in range(MAX_REDRAWS):
                draft.sampler = self._sampler_for(number, attempt)
                draft.ask(self._distributions)
                trial = draft.get_trials(deepcopy=False)[-1]
                if not any(self._same(trial.params, other) for other in tried):
                    break
            else:
                trial = self._move_to_untried(trial, tried, number)
        self._copy_attributes(drafted, stored)
        drawn = create_trial(
            state=TrialState.RUNNING,
            params=trial.params,
            distributions=trial.distributions,
            system_attrs=trial.system_attrs,
        )
        self.study.add_trial(drawn)
        return self.study.get_trials(deepcopy=False)[number]

    @staticmethod
    def _copy_attributes(source: tuple[Any, int], target: tuple[Any, int]) -> None:
        """Copy a sampler's attributes of the whole study, such as its position in a sequence."""
        known = target[0].get_study_system_attrs(target[1])
        for name, value in source[0].get_study_system_attrs(source[1]).items():
            if known.get(name) != value:
                target[0].set_study_system_attr(target[1], name, value)

    def _move_to_untried(self, trial: FrozenTrial, tried: list[Point], number: int) -> FrozenTrial:
        """Move a trial to a random untried point, for a sampler that keeps drawing tried ones."""
        count = size(self.space)
        if count is None or count > MAX_POINTS:
            return trial
        values = [[_to_optuna(d, value) for value in d.values()] for d in self.space]
        points = [dict(zip((d.key for d in self.space), point, strict=True)) for point in itertools.product(*values)]
        random.Random(f"{self.seed} {number}").shuffle(points)
        untried = (point for point in points if not any(self._same(point, other) for other in tried))
        trial.params = next(untried, trial.params)  # the first: comparing all points takes minutes
        return trial

    def report(self, number: int, step: int, value: float) -> bool:
        """Record the metric of a trial after `step` epochs, and return whether the pruner stops the trial."""
        trial = self._trial(number)
        if step not in trial.intermediate_values:
            self._storage.set_trial_intermediate_value(self._trial_id(number), step, value)
            trial = self._trial(number)
        return bool(self.study.pruner.prune(self.study, trial))

    def attribute(self, number: int, **values: object) -> None:
        """Record values of a trial."""
        for name, value in values.items():
            self._storage.set_trial_user_attr(self._trial_id(number), name, value)

    def finish(self, number: int, is_best_kept: bool, best: float | None = None) -> float | None:
        """End a trial.

        Args:
            is_best_kept: whether the run keeps the best weights by this metric, rather than the last.
            best: value in the run's best.json, which may be from inside an epoch.

        Returns:
            The trial's value for the weights that its run keeps; None if that is not a number.
        """
        values = self._trial(number).intermediate_values
        finite = [value for value in (*values.values(), best) if value is not None and math.isfinite(value)]
        value = values[max(values)] if values else math.nan
        if is_best_kept and finite:
            value = max(finite) if self.tune.mode == "max" else min(finite)
        if not math.isfinite(value):
            return None
        self.study.tell(number, value)
        return value

    def prune(self, number: int) -> None:
        """End a trial as pruned."""
        self.study.tell(number, state=TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """End a trial as failed."""
        self.attribute(number, failure=reason[:1000])
        self.study.tell(number, state=TrialState.FAIL)

    def disconnect(self) -> None:
        """Close the file until its next use: a forked process must not share the connection."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    # ---- helpers

    def _trial(self, number: int) -> FrozenTrial:
        return self.trials()[number]

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)

    @staticmethod
    def _same(one: Point, other: Point) -> bool:
        """Return whether the params of two trials are the same, up to rounding of numbers."""
        pairs = [(value, other[key]) for key, value in one.items()]
        return all(a == b if isinstance(a, str) else math.isclose(a, b, rel_tol=1e-12) for a, b in pairs)

    def _sampler_for(self, number: int, attempt: int = 0) -> object:
        """Return the sampler for a trial and an attempt to draw it."""
        target = self.tune.sampler
        name, params = (target.type, dict(target.params)) if target else ("optuna.samplers.TPESampler", {})
        if self.tune.makes_grid:
            grid = {d.key: [_to_optuna(d, value) for value in d.values()] for d in self.space}
            params["search_space"] = grid
        # After a kill, a new sampler with the same seed would repeat its draws, so the seed depends on the trial.
        # The order of a grid and the scrambling of a sequence must be the same for all trials.
        seed = params.get("seed", self.seed)
        is_fixed = name.endswith((".GridSampler", ".QMCSampler"))
        drawn = seed if is_fixed or number == attempt == 0 else _mixed_seed(seed, number, attempt)
        if "seed" in params or name.startswith("optuna."):
            params["seed"] = drawn
        named = Target(type=name, params=params, place=target.place if target else None, name="tune.sampler")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return build(named)


def _mixed_seed(*numbers: int | None) -> int:
    return random.Random(" ".join(map(str, numbers))).randrange(2**32)


def _distribution(dimension: Dimension) -> BaseDistribution:
    d = dimension
    if d.kind == "choice":
        return CategoricalDistribution([_to_optuna(d, value) for value in d.choices])
    if d.is_whole:
        return IntDistribution(int(d.low), int(d.high), log=d.is_log, step=int(d.step or 1))
    return FloatDistribution(d.low, d.high, log=d.is_log, step=d.step)


def _to_optuna(dimension: Dimension, value: object) -> Any:
    """Convert a value to Optuna's form: choices as text, since Optuna has no lists and treats 1 as true."""
    return line(value) if dimension.kind == "choice" else value


def _from_optuna(dimension: Dimension, written: Any) -> object:
    if dimension.kind == "choice":
        return next(value for value in dimension.choices if line(value) == written)
    return int(written) if dimension.is_whole else float(written)


def plain_text(point: Point) -> str:
    """Format a point in one line."""
    return "  ".join(f"{key}={short(value)}" for key, value in point.items())


def short(value: object) -> str:
    """Format a value for a table."""
    return f"{value:.4g}" if isinstance(value, float) else line(value)
