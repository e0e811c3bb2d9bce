"""On 1, 2 and 3 processes, metrics and predictions of 1 to 17 samples equal those of the complete set in one batch.

In batches of 4 the last batch is full or short, and processes have one sample less, or none. Each number of processes
is one job, which evaluates all the sizes of a group.
"""

import copy
import functools
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics
import torch
from conftest import weights
from sklearn.datasets import load_digits
from tiny import csv_rows

from deeplightning.data.digits import MEAN, STD
from deeplightning.model.cnn import SimpleCNN

SIZES = range(1, 18)
WORLDS = (1, 2, 3)
ENDS = (1, 5, 12)
"""Sizes that have every kind of last batch, on one process or on several."""
OTHERS = tuple(sorted({*SIZES} - {*ENDS}))
GROUPS = [
    pytest.param(ENDS, id="every kind of last batch"),
    pytest.param(OTHERS, id="the other sizes", marks=pytest.mark.slow),
]
METRICS = """\
{acc: {type: deeplightning.task.metrics.Accuracy},
 macro: {type: torchmetrics.classification.MulticlassF1Score, params: {num_classes: 10}},
 auroc: {type: torchmetrics.classification.MulticlassAUROC, params: {num_classes: 10}}}
"""


def judge() -> None:
    """Evaluate each size, in each process of a job; a negative size trains instead."""
    from deeplightning.config.examine import load_config
    from deeplightning.run.train import launch

    path, folder, checkpoint, processes, *sizes = sys.argv[1:]
    warnings.filterwarnings("ignore")  # torchmetrics warns that classes are missing
    settings = [
        f"engine.processes={processes}",
        "~logger",
        f"logger={{type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{folder}'}}, pictures: null}}",
        "data.module={type: own.SameDigits, params: {size: 1}}",
        "data.batch_size=4",
        f"model.metrics={METRICS}",
        "stages=[validate,test,predict]",
        f"test.ckpt='{checkpoint}'",
    ]
    loaded = load_config(path, settings)

    for size in map(int, sizes):
        cfg = copy.deepcopy(loaded)
        cfg.data.module.params["size"] = abs(size)
        cfg.logger.params["name"] = str(size) if size > 0 else f"trained on {-size}"
        cfg.stages = ["validate", "test", "predict"] if size > 0 else ["train"]
        launch(cfg)


@pytest.fixture(scope="module")
def checkpoint(train):
    """A checkpoint of a network that classifies most of the digits correctly."""
    return train("train.num_epochs=4").folder / "last.ckpt"


@pytest.fixture(scope="module")
def folders(command, tiny, place, checkpoint, tmp_path_factory):
    """`folders(sizes)[processes]` contains a run folder for each size; each group of sizes runs once."""

    @functools.cache
    def run(sizes):
        made = {world: tmp_path_factory.mktemp(f"of {world}") for world in WORLDS}
        for world, folder in made.items():
            job = {"cwd": place, "ranks": world, "main": "test_exact_evaluation:judge"}
            trained = [-2] if sizes == ENDS else [-1, -3]
            command(tiny, folder, checkpoint, world, *sizes, *trained, **job, code=0)
        return made

    return run


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Probabilities (17, 10) and labels (17,), computed in one batch from scikit-learn's digits."""
    digits = load_digits()
    pixels = np.rint(digits.images[: max(SIZES), None] * (255 / 16)) / 255
    network = SimpleCNN(num_classes=10, num_channels=1, image_size=8).double()
    network.load_state_dict({name.removeprefix("network."): v.double() for name, v in weights(checkpoint).items()})
    with torch.inference_mode():
        probabilities = network((torch.from_numpy(pixels) - MEAN) / STD).softmax(1)
    return probabilities.numpy(), digits.target[: max(SIZES)]


def values(path: Path) -> list[dict[str, float]]:
    """Return the logged points of a training."""
    points = [
        {n: float(v) for n, v in row.items() if v and n not in ("train_auroc", "train_macro")} for row in csv_rows(path)
    ]
    assert any("train_loss_epoch" in row for row in points)
    assert any("train_loss" in row for row in points)
    return points


@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("world", WORLDS)
def test_metrics_are_those_of_the_whole_set(world, sizes, folders, expected):
    """Loss, accuracy and F1 of validation and test equal scikit-learn's; a metric that stores all its samples equals
    that of one process."""
    by_world = folders(sizes)
    for size in sizes:
        probabilities, labels = expected[0][:size], expected[1][:size]
        predicted = probabilities.argmax(1)
        values = {
            "loss": sklearn.metrics.log_loss(labels, probabilities, labels=range(10)),
            "acc": sklearn.metrics.accuracy_score(labels, predicted),
            "macro": sklearn.metrics.f1_score(labels, predicted, average="macro"),
        }
        for stage in ("val", "test"):
            file = f"{stage}_results.json"
            found, alone = (json.loads((by_world[n] / str(size) / "version_0" / file).read_text()) for n in (world, 1))
            assert found == pytest.approx(alone, abs=1e-6), size
            assert {name: found[f"{stage}_{name}"] for name in values} == pytest.approx(values, abs=1e-6), size


@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("name", ["val_predictions.csv", "test_predictions.csv", "predictions.csv"])
def test_predictions_are_in_data_order_and_the_same_for_any_number_of_processes(name, sizes, folders, expected):
    """Each sample has one row, with the class and probability that the complete set in one batch gives."""
    by_world = folders(sizes)
    for size in sizes:
        found = csv_rows(by_world[1] / str(size) / "version_0" / name)
        assert [int(row["index"]) for row in found] == list(range(size))
        assert [int(row["label"]) for row in found] == expected[1][:size].tolist()
        assert [int(row["predicted_class"]) for row in found] == expected[0][:size].argmax(1).tolist()
        largest = [float(row["predicted_probability"]) for row in found]
        assert largest == pytest.approx(expected[0][:size].max(1), abs=1e-6)
        texts = {(by_world[world] / str(size) / "version_0" / name).read_bytes() for world in WORLDS}
        assert len(texts) == 1, size


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_training_with_fewer_samples_than_processes_is_that_of_one_process(size, folders):
    """With one to three samples for up to three processes, weights after two epochs are within 1e-6, and points and
    means are equal. F1 and AUROC of a step are not compared: they are not means over samples."""
    alone, *others = (
        folders(ENDS if size == 2 else OTHERS)[world] / f"trained on {size}" / "version_0" for world in WORLDS
    )
    for other in others:
        ours, theirs = weights(other / "last.ckpt"), weights(alone / "last.ckpt")
        assert ours.keys() == theirs.keys()
        assert max((ours[name] - theirs[name]).abs().max() for name in ours) < 1e-6
        found, true = (values(run / "metrics.csv") for run in (other, alone))
        assert found == [pytest.approx(row, abs=1e-6) for row in true]
