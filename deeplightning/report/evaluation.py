"""Evaluate a stage's CSV file of answers: per-class metrics, confusions and drawings."""

import csv
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deeplightning.figures import class_plots, curves, measures
from deeplightning.figures.style import Drawing
from deeplightning.report.facts import STAGES, Facts, is_inside

MAX_ANSWERS_BYTES = 512 * 2**20
"""Maximum size of a file of answers."""

MAX_CLASSES = 100_000


@dataclass
class Evaluation:
    """Results on a data set."""

    of: str  # name of the data set
    drawings: dict[str, Drawing] = field(default_factory=dict)  # by file name
    # For each class: name, precision, recall, F1 and number of samples.
    per_class: list[tuple[str, float, float, float, int]] = field(default_factory=list)
    # True class, predicted class and count, the most frequent first.
    confused: list[tuple[str, str, int]] = field(default_factory=list)


def evaluate(run: Facts) -> Evaluation | None:
    """Evaluate the run's answers to its test set, else to its validation set. Return None if none are readable."""
    stage = run.stage
    if stage is None or not is_inside(run.folder, path := run.folder.stage_predictions(stage), MAX_ANSWERS_BYTES):
        return None
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            names = next(rows, [])
            columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        found, prefix = Evaluation(STAGES[stage]), run.folder.results(stage).name.partition("_")[0]
        if {"label", "predicted_class", "predicted_label"} <= columns.keys():
            _evaluate_classes(run, columns, prefix, found)
        elif {"labels", "predicted_labels"} <= columns.keys():
            _evaluate_labels(columns, prefix, found)
        elif targets := [name for name in columns if name.startswith("target")]:
            _evaluate_targets(run, targets, columns, prefix, found)
        return found
    except (OSError, ValueError, KeyError, csv.Error, OverflowError, MemoryError):
        return None


def _evaluate_targets(run: Facts, targets: list[str], columns: dict[str, Any], prefix: str, found: Evaluation) -> None:
    predictions = [f"prediction{name.removeprefix('target')}" for name in targets]
    truth, predicted = (np.stack([np.array(columns[name], float) for name in of], 1) for of in (targets, predictions))
    kept = np.isfinite(truth).all(1) & np.isfinite(predicted).all(1)
    names = run.classes if len(run.classes) == len(targets) else targets
    if kept.any():
        drawing = curves.truth_against_prediction(truth[kept], predicted[kept], names, found.of)
        found.drawings[f"{prefix}_truth"] = drawing


def _evaluate_classes(run: Facts, columns: dict[str, Any], prefix: str, found: Evaluation) -> None:
    labels, predicted = (np.array(columns[name], np.int64) for name in ("label", "predicted_class"))
    number = max(int(labels.max()), int(predicted.max())) + 1
    if min(labels.min(), predicted.min()) < 0 or number > MAX_CLASSES:
        raise ValueError("no classes")
    names = {int(p): name for p, name in zip(predicted, columns["predicted_label"], strict=True)}
    names |= dict(enumerate(run.classes[:MAX_CLASSES]))
    number = max(number, len(run.classes[:MAX_CLASSES]))
    class_names = [names.get(n, str(n)) for n in range(number)]
    each = measures.from_counts(
        *(np.bincount(one, minlength=number) for one in (labels[labels == predicted], predicted, labels))
    )
    found.per_class = list(zip(class_names, *(one.tolist() for one in each), strict=True))
    found.confused = [(class_names[t], class_names[p], n) for t, p, n in measures.most_confused(labels, predicted)]
    if number <= class_plots.MAX_MATRIX_CLASSES:
        counts = measures.confusion(labels, predicted, number)
        found.drawings[f"{prefix}_confusion_matrix"] = class_plots.confusion_matrix(counts, class_names, found.of)
    found.drawings[f"{prefix}_classes"] = class_plots.precision_recall(each, class_names, found.of)
    probability = np.array(columns.get("predicted_probability", []), float)
    if not len(probability) or not np.isfinite(probability).all():
        return
    reliability = measures.reliability(probability, labels == predicted)
    found.drawings[f"{prefix}_reliability"] = class_plots.reliability(reliability, found.of)
    if number == 2 and 0 < labels.sum() < len(labels):
        score = np.where(predicted == 1, probability, 1 - probability)
        found.drawings[f"{prefix}_roc"] = class_plots.two_classes(score, labels == 1, class_names[1], found.of)


def _evaluate_labels(columns: dict[str, Any], prefix: str, found: Evaluation) -> None:
    names = [name.removeprefix("probability_") for name in columns if name.startswith("probability_")]
    true, answered = (
        np.array([[name in row for name in names] for row in (set(text.split("|")) for text in columns[column])])
        for column in ("labels", "predicted_labels")
    )
    each = measures.from_counts((true & answered).sum(0), answered.sum(0), true.sum(0))
    found.per_class = list(zip(names, *(one.tolist() for one in each), strict=True))
    found.drawings[f"{prefix}_classes"] = class_plots.precision_recall(each, names, found.of)
