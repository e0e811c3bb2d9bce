"""What a search knows, in an SQLite file of Optuna's: its trials, each drawn after a kill as it would be without one.

A trial is written whole, with its values, when it is drawn. What is drawn follows from the seed, the trial's number and
the trials before, and not from how often the search was interrupted.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from deeplightning.checks.space import Dimension, size
from deeplightning.checks.targets import is_grid
from deeplightning.config.schema import Target, Tune
from deeplightning.config.target import build
from deeplightning.config.tree import line
from deeplightning.private.optuna import storage_and_id, trial_id

log = logging.getLogger("deeplightning")

NAME = "search"
REDRAWN = 100  # times that a point is drawn again which was tried already
OVER = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)

Point = dict[str, Any]
"""A value for each key of the space."""


def begin(database: Path, mode: str, notes: dict[str, Any]) -> None:
    """Makes the file of a new search, whole or not at all."""
    beside = database.with_name(f".{database.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    storage = _storage(beside)
    study = optuna.create_study(storage=storage, study_name=NAME, direction=_direction(mode))
    for name, value in notes.items():
        study.set_user_attr(name, value)
    storage.engine.dispose()
    beside.replace(database)


def notes_of(database: Path) -> dict[str, Any]:
    """What `begin` and `Study.note` have written into a file."""
    storage = _storage(database)
    try:
        notes: dict[str, Any] = optuna.load_study(study_name=NAME, storage=storage).user_attrs
        return notes
    finally:
        storage.engine.dispose()


def _direction(mode: str) -> StudyDirection:
    return StudyDirection.MAXIMIZE if mode == "max" else StudyDirection.MINIMIZE


def _storage(database: Path) -> Any:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Another search's driver never writes here; somebody who looks at the file with Optuna's dashboard may lock it.
    return optuna.storages.RDBStorage(f"sqlite:///{database}", engine_kwargs={"connect_args": {"timeout": 60}})


def is_of_storage(error: Exception) -> bool:
    """Whether the file of a study is what failed, as it does where it is damaged or its disk is full. Of damaged texts
    in it Optuna says nothing itself: what is raised while it reads them is of any class."""
    if isinstance(error, optuna.exceptions.StorageInternalError | SQLAlchemyError):
        return True
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("optuna.storages") for frame in frames)


class Study:
    """The trials of a search.

    Args:
        database: its file, made by `begin`.
        tune: what the config says of it.
        space: the dimensions of `tune.space`.
        seed: what is drawn follows from it.
    """

    def __init__(self, database: Path, tune: Tune, space: Sequence[Dimension], seed: int):
        self.tune, self.space, self.seed = tune, space, seed
        self._storage = _storage(database)
        # What is drawn is drawn elsewhere: Optuna's grid sampler would stop a loop that is not there.
        self._study = optuna.load_study(
            study_name=NAME, storage=self._storage, sampler=optuna.samplers.RandomSampler(seed=0)
        )
        self._study.pruner = build(tune.pruner) if tune.pruner is not None else optuna.pruners.NopPruner()
        self._distributions = {d.key: _distribution(d) for d in space}
        self._sampler_for(0)  # so that what it refuses is reported at once

    # ---- what is known

    @property
    def notes(self) -> dict[str, Any]:
        return self._study.user_attrs

    def note(self, name: str, value: object) -> None:
        self._study.set_user_attr(name, value)

    def trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def unfinished(self) -> list[FrozenTrial]:
        """Trials that were under way, in their order."""
        return [trial for trial in self.trials() if trial.state == TrialState.RUNNING]

    def total(self) -> int:
        """How many trials there are in the end: not more than there are points to try."""
        points = size(self.space)
        if self.tune.sampler is not None and "search_space" in self.tune.sampler.params:
            points = None
        return self.tune.num_trials if points is None else min(self.tune.num_trials, points)

    def point(self, trial: FrozenTrial) -> Point:
        """The values of a trial, as the config has them."""
        return {d.key: _meant(d, trial.params[d.key]) for d in self.space}

    def best(self) -> FrozenTrial | None:
        done = [trial for trial in self.trials() if trial.state == TrialState.COMPLETE and trial.value is not None]
        return min(done, key=self._rank) if done else None

    def ranked(self) -> list[FrozenTrial]:
        """All trials: the best first, behind them those that were pruned, that failed, and that are not over."""
        order = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING, TrialState.WAITING]
        return sorted(self.trials(), key=lambda trial: (order.index(trial.state), self._rank(trial), trial.number))

    def _rank(self, trial: FrozenTrial) -> float:
        value = trial.value if trial.value is not None else self.last_value(trial)
        if value is None or math.isnan(value):
            return math.inf
        return -value if self.tune.mode == "max" else value

    def last_value(self, trial: FrozenTrial) -> float | None:
        return trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else None

    def importances(self) -> dict[str, float]:
        """How much of the differences each key explains, all together 1; {} where there is too little to tell.

        Hutter, Hoos, Leyton-Brown: An Efficient Approach for Assessing Hyperparameter Importance. ICML 2014.
        """
        done = [trial for trial in self.trials() if trial.state == TrialState.COMPLETE]
        if len(done) < 4 or len({trial.value for trial in done}) < 2:
            return {}
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=self.seed % 2**32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return dict(optuna.importance.get_param_importances(self._study, evaluator=evaluator))
            except (ValueError, RuntimeError) as error:  # it cannot tell
                log.info("importance  not known: %s", error)
                return {}

    # ---- what happens

    def draw(self) -> FrozenTrial:
        """A new trial, at a point that none of the others has, as far as there is one."""
        known = self.trials()
        tried = [self.point(trial) for trial in known]
        number = len(known)
        # Drawn in memory: in the file there is no trial that is not to be run.
        apart = optuna.create_study(direction=self._study.direction)
        here, there = storage_and_id(self._study), storage_and_id(apart)
        self._copy_attributes(here, there)
        trial: Any = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apart.add_trials(known)
            for attempt in range(REDRAWN):
                apart.sampler = self._sampler_for(number, attempt)
                apart.ask(self._distributions)
                trial = apart.get_trials(deepcopy=False)[-1]
                if not any(self._same(self.point(trial), other) for other in tried):
                    break
            else:
                trial = self._any_other(trial, tried, number)
        self._copy_attributes(there, here)
        made = create_trial(
            state=TrialState.RUNNING,
            params=trial.params,
            distributions=trial.distributions,
            system_attrs=trial.system_attrs,
        )
        self._study.add_trial(made)
        return self._study.get_trials(deepcopy=False)[number]

    @staticmethod
    def _copy_attributes(here: tuple[Any, int], there: tuple[Any, int]) -> None:
        """What a sampler notes of the study as a whole: how far a sequence has come."""
        known = there[0].get_study_system_attrs(there[1])
        for name, value in here[0].get_study_system_attrs(here[1]).items():
            if known.get(name) != value:
                there[0].set_study_system_attr(there[1], name, value)

    def _any_other(self, trial: FrozenTrial, tried: list[Point], number: int) -> FrozenTrial:
        """A point that is left, where the sampler keeps coming to those that it knows."""
        count = size(self.space)
        if count is None or count > 100_000:
            return trial
        points = [
            dict(zip((d.key for d in self.space), values, strict=True))
            for values in itertools.product(*(d.values() for d in self.space))
        ]
        left = [point for point in points if not any(self._same(point, other) for other in tried)]
        if left:
            point = random.Random(f"{self.seed} {number}").choice(left)
            trial.params = {d.key: _written(d, point[d.key]) for d in self.space}
        return trial

    def report(self, number: int, step: int, value: float) -> bool:
        """Notes the metric of a trial after `step` epochs; whether the pruner gives the trial up."""
        trial = self._trial(number)
        if step not in trial.intermediate_values:
            self._storage.set_trial_intermediate_value(trial_id(trial), step, value)
            trial = self._trial(number)
        return bool(self._study.pruner.prune(self._study, trial))

    def attribute(self, number: int, **values: object) -> None:
        for name, value in values.items():
            self._storage.set_trial_user_attr(trial_id(self._trial(number)), name, value)

    def finish(self, number: int, is_best_kept: bool) -> float | None:
        """Ends a trial; its value is that of the weights that its run keeps. None: it had none that is a number.

        Args:
            is_best_kept: whether the run keeps the best weights by this metric, else the last.
        """
        values = self._trial(number).intermediate_values
        finite = [value for value in values.values() if math.isfinite(value)]
        value = values[max(values)] if values else math.nan
        if is_best_kept and finite:
            value = max(finite) if self.tune.mode == "max" else min(finite)
        if not math.isfinite(value):
            return None
        self._study.tell(number, value)
        return value

    def prune(self, number: int) -> None:
        self._study.tell(number, state=TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        self.attribute(number, failure=reason[:1000])
        self._study.tell(number, state=TrialState.FAIL)

    def let_go(self) -> None:
        """Closes the file, until it is used again: a forked process must not share the connection."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    # ---- how

    def _trial(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _same(self, one: Point, other: Point) -> bool:
        return all(d.same(one[d.key], other[d.key]) for d in self.space)

    def _sampler_for(self, number: int, attempt: int = 0) -> object:
        """The sampler that draws the trial of a number."""
        target = self.tune.sampler
        name, params = (target.type, dict(target.params)) if target else ("optuna.samplers.TPESampler", {})
        if is_grid(name):
            grid = {d.key: [_written(d, value) for value in d.values()] for d in self.space}
            params.setdefault("search_space", grid)
        # An object that is made anew begins its numbers anew, and would draw after each kill what it has drawn before.
        # The order of a grid, and the scrambling of a sequence, must be those of the other trials.
        seed = params.get("seed", self.seed)
        steady = name.endswith((".GridSampler", ".QMCSampler"))
        drawn = seed if steady or number == attempt == 0 else _mixed(seed, number, attempt)
        if "seed" in params or name.startswith("optuna."):
            params["seed"] = drawn
        named = Target(type=name, params=params, place=target.place if target else None, name="tune.sampler")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return build(named)


def _mixed(*numbers: int | None) -> int:
    return random.Random(" ".join(map(str, numbers))).randrange(2**32)


def _distribution(dimension: Dimension) -> BaseDistribution:
    d = dimension
    if d.kind == "choice":
        return CategoricalDistribution([_written(d, value) for value in d.choices])
    if d.is_whole:
        return IntDistribution(int(d.low), int(d.high), log=d.is_log, step=int(d.step or 1))
    return FloatDistribution(d.low, d.high, log=d.is_log, step=d.step)


def _written(dimension: Dimension, value: object) -> Any:
    """A value as Optuna keeps it: choices as text, since it knows no lists and mappings, and takes 1 for true."""
    return line(value) if dimension.kind == "choice" else value


def _meant(dimension: Dimension, written: Any) -> object:
    if dimension.kind == "choice":
        return next(value for value in dimension.choices if line(value) == written)
    return int(written) if dimension.is_whole else float(written)


def plain_text(point: Point) -> str:
    """A point in a line, for people."""
    return "  ".join(f"{key}={_short(value)}" for key, value in point.items())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else line(value)
