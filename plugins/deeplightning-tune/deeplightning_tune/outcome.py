"""Format the trials of a search as a table for a terminal and as CSV, and draw two pictures of them."""

from __future__ import annotations

import csv
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from deeplightning.config.tree import line
from deeplightning_tune.study import Study, short

log = logging.getLogger("deeplightning")

STATE_NAMES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "interrupted",
    TrialState.WAITING: "waiting",
}


def rows(study: Study) -> list[list[str]]:
    """Return a header row, then a row for each trial, the best first."""
    table = [["rank", "trial", "state", study.tune.metric, "epochs", *(d.key for d in study.space)]]
    for rank, trial in enumerate(study.ranked(), start=1):
        value, point = study.value(trial), study.point(trial)
        place = str(rank) if trial.state == TrialState.COMPLETE else "-"
        shown = "-" if value is None else f"{value:.6g}"
        epochs = str(max(trial.intermediate_values, default=0))
        values = [words if len(words := short(point[d.key])) <= 40 else f"{words[:39]}…" for d in study.space]
        table.append([place, str(trial.number), STATE_NAMES[trial.state], shown, epochs, *values])
    return table


def as_csv(study: Study) -> str:
    """Return the trials as CSV, with untruncated values."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["trial", "state", study.tune.metric, "epochs", *(d.key for d in study.space), "failure", "run"])
    for trial in study.trials():
        point, attrs = study.point(trial), trial.user_attrs
        values = [
            study.value(trial),
            max(trial.intermediate_values, default=0),
            *(line(point[d.key]) for d in study.space),
        ]
        writer.writerow(
            [trial.number, STATE_NAMES[trial.state], *values, attrs.get("failure", ""), attrs.get("run") or ""]
        )
    return out.getvalue()


def draw(study: Study, folder: Path) -> None:
    """Draw the finished trials as parallel coordinates and, if there are enough, the importance of each key.

    The importances follow Hutter, Hoos, Leyton-Brown: An Efficient Approach for Assessing Hyperparameter
    Importance. ICML 2014.
    """
    done = [trial for trial in study.trials() if trial.state == TrialState.COMPLETE]
    if len(done) < 2:
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from optuna.visualization.matplotlib import plot_parallel_coordinate, plot_param_importances

    from deeplightning.runfolder import write_whole
    from deeplightning.tracking import picture

    shown, metric = _with_short_labels(study, done), study.tune.metric
    plots: dict[str, Callable[[], Any]] = {
        "parallel_coordinates.png": lambda: plot_parallel_coordinate(shown, target_name=metric)
    }
    if len(done) >= 4 and len({trial.value for trial in done}) > 1:
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=study.seed % 2**32)
        plots["importances.png"] = lambda: plot_param_importances(shown, evaluator=evaluator, target_name=metric)
    for name, plot in plots.items():
        with pyplot.rc_context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                figure = plot().figure
            except (ValueError, RuntimeError) as error:  # too few distinct values
                log.info("%-10s %s not drawn: %s", "pictures", name, error)
                continue
            write_whole(folder / name, picture.to_png(figure))
            pyplot.close(figure)


def _with_short_labels(study: Study, done: Sequence[FrozenTrial]) -> optuna.Study:
    """Return a study of the finished trials with short keys, since Optuna cuts labels, and with escaped texts.

    matplotlib would parse text between dollar signs as mathematics.
    """
    labels = {d.key: ".".join([part for part in d.key.split(".") if part != "params"][-2:]) for d in study.space}
    if len({*labels.values()}) < len(labels):
        labels = {key: key for key in labels}

    def plain(value: Any) -> Any:
        return value.replace("$", r"\$") if isinstance(value, str) else value

    shown = optuna.create_study(direction=study.study.direction)
    for trial in done:
        kinds = {
            labels[key]: CategoricalDistribution([*map(plain, kind.choices)])
            if isinstance(kind, CategoricalDistribution)
            else kind
            for key, kind in trial.distributions.items()
        }
        values = {labels[key]: plain(value) for key, value in trial.params.items()}
        shown.add_trial(create_trial(value=trial.value, params=values, distributions=kinds))
    return shown
