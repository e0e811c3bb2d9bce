"""Group the runs of one setting for `deeplightning compare`: their metrics, and their scores on single test samples."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from deeplightning.config.schema import Mode
from deeplightning.faults import CheckpointError, count
from deeplightning.report.facts import is_inside
from deeplightning.reproduce.past import PastRun, by_stage, past_run
from deeplightning.runfolder import RUNS_FILE, RunFolder

MAX_CSV_BYTES = 512 * 2**20
"""Maximum size of a CSV file that is read."""

FREE_KEYS = ("seed", "data.fold", "logger.", "train.resume_ckpt", "serve.")
"""Keys that may differ between the runs of one setting."""

Key = tuple[object, object]
"""Seed and fold of a run; runs of two settings with the same key form a pair."""


@dataclass(frozen=True)
class SampleScores:
    """Scores of a run on the samples of its test set.

    Attributes:
        score: name of the score: accuracy, exact match, squared error or IoU.
        mode: whether a lower or a higher score is better.
        digest: digest of the indices and the labels or targets; it identifies the test set.
        values: (N,), float64.
    """

    score: str
    mode: Mode
    digest: str
    values: np.ndarray


@dataclass
class Member:
    """A run of a group."""

    run: PastRun

    @cached_property
    def key(self) -> Key:
        config = self.run.config
        return config.get("seed"), config.get("data.fold")

    @property
    def metrics(self) -> dict[str, float]:
        return self.run.metrics

    @cached_property
    def sample_scores(self) -> SampleScores | None:
        return read_sample_scores(self.run.folder)


@dataclass
class Group:
    """The runs of one setting.

    Attributes:
        name: name from the user or the tracker.
        members: runs, sorted by seed.
        notes: caveats about a comparison, each a sentence.
    """

    name: str
    members: list[Member]
    notes: list[str] = field(default_factory=list)

    @cached_property
    def metrics(self) -> list[str]:
        """Names of all metrics, those of the test set first."""
        return by_stage(name for member in self.members for name in member.metrics)

    def values(self, metric: str) -> dict[Key, float]:
        """Return the finite values of a metric by seed and fold; runs with the same key are averaged."""
        found: dict[Key, list[float]] = {}
        for member in self.members:
            value = member.metrics.get(metric, math.nan)
            if math.isfinite(value):
                found.setdefault(member.key, []).append(value)
        return {key: sum(values) / len(values) for key, values in found.items()}

    @property
    def seeds(self) -> str:
        """Seeds as text, such as `seeds 42 to 46`."""
        keys = [member.key[0] for member in self.members]
        seeds = sorted({key for key in keys if isinstance(key, int)})
        if not seeds:
            return "seeds unknown"
        if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
            return f"seeds {seeds[0]} to {seeds[-1]}"
        more = f" and {len(seeds) - 8} more" if len(seeds) > 8 else ""
        return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds[:8]))}{more}"

    @property
    def description(self) -> str:
        return f"{self.name} ({count(len(self.members), 'run')}, {self.seeds})"


def group_of(name: str, runs: Sequence[PastRun], notes: Sequence[str] = ()) -> Group:
    """Return a group of runs, without duplicates.

    Raises:
        CheckpointError: none of them has metrics.
    """
    unique = {run.folder.path: run for run in runs}
    members = [Member(run) for run in unique.values()]
    measured = [member for member in members if member.metrics]
    if not measured:
        what = "this run has" if len(members) == 1 else f"these {len(members)} runs have"
        raise CheckpointError(f"{name}: {what} no metrics to compare; `deeplightning runs` shows the status")
    measured.sort(key=lambda member: tuple(str(part).rjust(12) for part in member.key))
    group = Group(name, measured, [*notes])
    if len(measured) < len(members):
        group.notes.append(f"{count(len(members) - len(measured), 'run')} without metrics left out")
    group.notes += _independence_notes(measured)
    return group


def _independence_notes(members: Sequence[Member]) -> list[str]:
    """Return reasons why runs are not independent samples of one setting."""
    notes, first = [], members[0].run.config
    keys = {key for member in members for key in first.keys() ^ member.run.config.keys()}
    keys |= {key for member in members for key, value in member.run.config.items() if first.get(key) != value}
    if differing := sorted(key for key in keys if not key.startswith(FREE_KEYS)):
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        notes.append(f"its runs differ in more than the seed: {', '.join(differing[:3])}{more}")
    distinct = {member.key for member in members}
    if len(distinct) < len(members):
        notes.append(f"{len(members)} runs have {count(len(distinct), 'seed')}; runs with the same seed count once")
    if len({key[1] for key in distinct}) > 1:
        # Nadeau, Bengio: Inference for the Generalization Error. Machine Learning 52, 2003.
        notes.append("folds share training samples, so the intervals are too narrow")
    return notes


def runs_in(folder: Path) -> tuple[list[PastRun], list[str]] | None:
    """Return the finished runs in a folder of `train --seeds` or `--multirun`, and notes; None for any other folder.

    Raises:
        CheckpointError: the files of a run are missing.
        SetupError: the store cannot be queried.
    """
    table = folder / RUNS_FILE
    if not is_inside(RunFolder(folder), table, MAX_CSV_BYTES):
        return None
    with table.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if {"state", "folder"} <= row.keys()]
    finished = [row for row in rows if row["state"] == "finished"]
    found = []
    for row in finished:
        near = RunFolder(Path(folder, "../../..", *Path(row["folder"] or "").parts[-3:]).resolve())  # a moved store
        place = str(near.path) if row["folder"] and near.config.is_file() else row["folder"]
        is_local = bool(place) and Path(place).is_dir()
        found.append(past_run(place if is_local or not row.get("id") else f"runs:/{row['id']}", remote=False))
    skipped = len(rows) - len(finished)
    return found, [f"{skipped} of its {len(rows)} runs left out: not finished"] if skipped else []


def read_sample_scores(folder: RunFolder) -> SampleScores | None:
    """Return the scores of a run on single test samples, or None if there are none."""
    path = folder.stage_predictions("test")
    if not is_inside(folder, path, MAX_CSV_BYTES):
        return None
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            names = next(rows, [])
            columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        return _scores_of(columns)
    except (OSError, ValueError, KeyError, csv.Error, MemoryError):
        return None


def _scores_of(columns: dict[str, tuple[str, ...]]) -> SampleScores | None:
    targets = [name for name in columns if name.startswith("target")]
    score: str
    mode: Mode = "max"
    if {"label", "predicted_class"} <= columns.keys():
        score, truth = "accuracy", ["label"]
        values = np.array(columns["label"], np.int64) == np.array(columns["predicted_class"], np.int64)
    elif {"labels", "predicted_labels"} <= columns.keys():
        score, truth = "exact match", ["labels"]
        values = np.array(columns["labels"]) == np.array(columns["predicted_labels"])
    elif targets:
        score, truth, mode = "squared error", targets, "min"
        errors = [
            np.array(columns[f"prediction{name.removeprefix('target')}"], float) - np.array(columns[name], float)
            for name in targets
        ]
        values = np.square(errors).mean(0)
    elif "iou" in columns:
        score, truth = "IoU", []
        values = np.array(columns["iou"], float)
    else:
        return None
    values = values.astype(float)
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    digest = hashlib.sha256()
    for name in ("index", *truth):
        digest.update("\n".join(columns[name]).encode() + b"\0")
    return SampleScores(score, mode, digest.hexdigest(), values)
