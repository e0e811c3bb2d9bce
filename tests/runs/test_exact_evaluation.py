"""Sets of 1 to 17 samples on 1, 2 and 3 processes: what is judged and predicted is that of the whole set in one piece.

In batches of 4 these have every kind of end: whole batches, short ones, processes with one sample less, and processes
with none. Each number of processes is one job, which goes through all the sizes of a group.
"""

import copy
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
"""Sizes that have every kind of end: on one process or on several."""
OTHERS = tuple(sorted({*SIZES} - {*ENDS}))
GROUPS = [
    pytest.param(ENDS, id="every kind of end"),
    pytest.param(OTHERS, id="the other sizes", marks=pytest.mark.slow),
]
FILES = ("val_predictions.csv", "test_predictions.csv", "predictions.csv")
METRICS = """\
{acc: {type: deeplightning.task.metrics.Accuracy},
 macro: {type: torchmetrics.classification.MulticlassF1Score, params: {num_classes: 10}},
 auroc: {type: torchmetrics.classification.MulticlassAUROC, params: {num_classes: 10}}}
"""


def judge() -> None:
    """Called in each process of a job: one launch for each size, which judges; one that is negative trains."""
    from deeplightning.config.examine import load_config
    from deeplightning.run.train import launch

    path, folder, checkpoint, processes, *sizes = sys.argv[1:]
    warnings.filterwarnings("ignore")  # torchmetrics tells that classes are missing
    settings = [
        f"engine.processes={processes}",
        "~logger",
        f"logger={{type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{folder}'}}, pictures: null}}",
        "data.module={type: own.Few, params: {size: 1}}",
        "data.batch_size=4",
        f"model.metrics={METRICS}",
        "stages=[validate,test,predict]",
        f"test.ckpt='{checkpoint}'",
    ]
    loaded = load_config(path, settings)

    def launched(name: str, size: int, stages: list[str]) -> None:
        cfg = copy.deepcopy(loaded)
        cfg.data.module.params["size"], cfg.logger.params["name"], cfg.stages = size, name, stages
        launch(cfg)

    for size in map(int, sizes):
        if size < 0:
            launched(f"trained on {-size}", -size, ["train"])
        else:
            launched(str(size), size, ["validate", "test", "predict"])


@pytest.fixture(scope="module")
def checkpoint(train):
    """Of a network that is right about most of the digits."""
    return train("train.num_epochs=4").folder / "last.ckpt"


@pytest.fixture(scope="module")
def folders(command, tiny, place, checkpoint, tmp_path_factory):
    """`folders(sizes)[processes]` holds a run folder for each size; each group of sizes runs once."""
    done = {}

    def run(sizes):
        if sizes not in done:
            made = done[sizes] = {world: tmp_path_factory.mktemp(f"of {world}") for world in WORLDS}
            for world, folder in made.items():
                job = {"cwd": place, "ranks": world, "main": "test_exact_evaluation:judge"}
                trained = [-2] if sizes == ENDS else [-1, -3]
                command(tiny, folder, checkpoint, world, *sizes, *trained, **job, code=0)
        return done[sizes]

    return run


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Probabilities (17, 10) and labels (17,), computed in one piece from scikit-learn's digits."""
    digits = load_digits()
    pixels = np.rint(digits.images[: max(SIZES), None] * (255 / 16)) / 255
    network = SimpleCNN(num_classes=10, num_channels=1, image_size=8).double()
    network.load_state_dict({name.removeprefix("network."): v.double() for name, v in weights(checkpoint).items()})
    with torch.inference_mode():
        probabilities = network((torch.from_numpy(pixels) - MEAN) / STD).softmax(1)
    return probabilities.numpy(), digits.target[: max(SIZES)]


def values(path: Path) -> list[dict[str, float]]:
    """What a training tracked, point by point."""
    kept = [
        {n: float(v) for n, v in row.items() if v and n not in ("train_auroc", "train_macro")} for row in csv_rows(path)
    ]
    assert any("train_loss_epoch" in row for row in kept)
    assert any("train_loss" in row for row in kept)
    return kept


@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("world", WORLDS)
def test_metrics_are_those_of_the_whole_set(world, sizes, folders, expected):
    """Loss, accuracy and F1 of validation and test equal scikit-learn's; a metric that keeps all its samples is that
    of one process."""
    made = folders(sizes)
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
            found, alone = (json.loads((made[n] / str(size) / "version_0" / file).read_text()) for n in (world, 1))
            assert found == pytest.approx(alone, abs=1e-6), size
            assert {name: found[f"{stage}_{name}"] for name in values} == pytest.approx(values, abs=1e-6), size


@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("name", FILES)
def test_predictions_are_in_data_order_and_the_same_for_any_number_of_processes(name, sizes, folders, expected):
    """Each sample once, with the class and the probability that the whole set in one piece gives."""
    made = folders(sizes)
    for size in sizes:
        found = csv_rows(made[1] / str(size) / "version_0" / name)
        assert [int(row["index"]) for row in found] == list(range(size))
        assert [int(row["label"]) for row in found] == expected[1][:size].tolist()
        assert [int(row["predicted_class"]) for row in found] == expected[0][:size].argmax(1).tolist()
        largest = [float(row["predicted_probability"]) for row in found]
        assert largest == pytest.approx(expected[0][:size].max(1), abs=1e-6)
        texts = {(made[world] / str(size) / "version_0" / name).read_bytes() for world in WORLDS}
        assert len(texts) == 1, size


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
def test_training_with_fewer_samples_than_processes_is_that_of_one_process(size, folders):
    """One to three samples for up to three processes: weights of two epochs within 1e-6, and equal points and means.
    F1 and AUROC are no means over samples, so those of a step are left out."""
    alone, *others = (
        folders(ENDS if size == 2 else OTHERS)[world] / f"trained on {size}" / "version_0" for world in WORLDS
    )
    for other in others:
        ours, theirs = weights(other / "last.ckpt"), weights(alone / "last.ckpt")
        assert ours.keys() == theirs.keys()
        assert max((ours[name] - theirs[name]).abs().max() for name in ours) < 1e-6
        found, true = (values(run / "metrics.csv") for run in (other, alone))
        assert found == [pytest.approx(row, abs=1e-6) for row in true]
