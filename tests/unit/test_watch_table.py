"""`runs --watch`: what a row shows of a run, and what fits into a terminal."""

import pytest
from rich.cells import cell_len

from deeplightning.cli.watch import Pace, _cut, fitting, pace, paced, row
from deeplightning.tracking.names import EPOCH_STEPS, STEP_SAMPLES, STEPS, TRAINING_BEGAN
from deeplightning.tracking.running import Running
from deeplightning.tracking.tracker import Point

TAGS = {STEPS: "100", EPOCH_STEPS: "25", STEP_SAMPLES: "64", TRAINING_BEGAN: "1000"}
PARAMS = {"train/num_epochs": "4", "train/checkpoint/monitor": "val_acc"}


def losses(*points: tuple[int, int]) -> list[Point]:
    """Points of the loss at steps and milliseconds."""
    return [Point("train_loss", 0.5, moment, step) for step, moment in points]


def run(status: str = "RUNNING", tags: dict | None = None, newest: tuple = ()) -> Running:
    """A run of 100 steps in 4 epochs."""
    return Running("a1", "wide", "Default", status, 0, TAGS if tags is None else tags, PARAMS, newest)


def test_a_row_has_epoch_step_metric_speed_and_time_left():
    """Ten steps a second, of 64 samples; 49 of 100 steps are to be done."""
    points = losses(*((step, 1000 + 100 * step) for step in range(0, 51, 5)))
    newest = (points[-1], Point("val_acc", 0.75, 5000, 49), Point("system/cpu", 3.0, 99_000, 70))
    found = row(run(newest=newest), points, now=100_000)
    assert found == {
        "name": "wide",
        "id": "a1",
        "experiment": "Default",
        "status": "RUNNING",
        "epoch": "3/4",
        "step": "51/100",
        "metric": "val_acc 0.7500",
        "samples/s": "640",
        "left": "0:05",
        "last point": "0:01 ago",
    }


@pytest.mark.parametrize("tags", [{}, {STEPS: "-1", EPOCH_STEPS: "many", STEP_SAMPLES: "9" * 40}])
def test_what_is_not_known_is_empty(tags):
    """Of a run of another program, or where anybody has written other tags."""
    points = losses((0, 1000), (5, 1500))
    found = row(run(tags=tags, newest=(points[-1],)), points, now=2000)
    assert (found["epoch"], found["step"], found["samples/s"], found["left"]) == ("", "6", "", "")
    assert found["metric"] == "train_loss 0.5000"


def test_a_run_that_has_ended_has_no_time_left():
    """Its speed and its metric stay."""
    points = losses((0, 1000), (50, 6000))
    found = row(run("FAILED", newest=(points[-1],)), points, now=9000)
    assert (found["status"], found["left"], found["last point"], found["step"]) == ("FAILED", "", "", "51/100")


def test_a_pace_is_that_of_the_last_epoch_of_this_launch():
    """Points of an earlier launch do not count; a validation counts for the whole, and not for a step."""
    points = losses((0, 0), (10, 500), *((step, 100_000 + 100 * step) for step in range(11, 50)), (50, 109_000))
    found = pace(points, began=50_000, epoch=25)
    assert found.step == pytest.approx(0.1)
    assert found.all == pytest.approx((109_000 - 102_500) / 1000 / 25)


@pytest.mark.parametrize("points", [(), ((1, 5),), ((1, 5), (1, 9)), ((1, 5), (2, 5)), ((1, 9), (2, 5))])
def test_one_moment_or_one_step_has_no_pace(points):
    """Nor has a clock that was set back."""
    assert pace(losses(*points)) is None
    assert isinstance(pace(losses((0, 0), (10, 1000))), Pace)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["val_loss", "train_loss", "a"], "train_loss"),
        (["val_loss", "lr", "train_acc_epoch", "generator_loss"], "generator_loss"),
        (["val_loss", "lr"], None),
    ],
)
def test_the_speed_is_taken_from_a_metric_of_training(names, expected):
    """Not from one that is tracked once an epoch."""
    assert paced(names) == expected


def test_a_narrow_terminal_drops_columns_and_cuts_the_name_last():
    """In the order of their worth; whatever the width, all columns that are left fit."""
    points = losses((30, 4000), (50, 6000))
    one = row(run(newest=(points[-1],)), points, now=9000) | {"name": "a-long-name-of-a-run-with-its-number-17"}
    every = [*fitting([one], None)]
    assert every == ["name", "experiment", "status", "epoch", "step", "metric", "samples/s", "left", "last point"]
    dropped = []
    for columns in range(140, 55, -1):
        widths = fitting([one], columns)
        assert sum(widths.values()) + 2 * (len(widths) - 1) < columns
        dropped += [name for name in every if name not in widths and name not in dropped]
    assert dropped == ["experiment", "last point", "step", "samples/s"]
    assert fitting([one, one], None)["id"] == 2  # equal names do not tell the runs apart


@pytest.mark.parametrize("name", ["wide-digits-with-augmentation-17", "日本語の長い名前の実験その十七", "ab"])
def test_a_name_that_is_cut_keeps_its_ends(name):
    """Also where a sign takes two columns."""
    cut = _cut(name, 12)
    assert cell_len(cut) <= 12
    assert cut == name or (cut.startswith(name[:2]) and cut.endswith(name[-2:]) and "…" in cut)
