"""Abilities that go through several parts, each in a small run: batches of any kind, loaders' functions, sums over
processes, and schedules that know how long a training is."""

from typing import Any, NamedTuple

import pytest
import torch

from deeplightning.data.digits import Digits
from deeplightning.data.of_datasets import OfDatasets

PARTS = '''
import torch
from torchmetrics import Metric


class Right(Metric):
    """How many answers are right: a sum, over batches and processes."""

    def __init__(self):
        super().__init__()
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs, labels):
        self.right += (outputs.argmax(1) == labels).sum()

    def compute(self):
        return self.right
'''


@pytest.fixture(scope="module")
def own(command, tiny, tmp_path_factory):
    """`own(override, …)` trains the tiny config where `parts.py` can be imported."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "parts.py").write_text(PARTS)

    def run(*overrides, ranks=1):
        return command("train", tiny, *overrides, cwd=folder, ranks=ranks, code=0)

    return run


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[Any]


@pytest.mark.parametrize("kind", [Digits, OfDatasets])
def test_nested_batches_move_to_the_device(kind, tiny):
    """Every tensor in a mapping of lists, and in a named tuple, whose kind stays; texts and numbers as they are. The
    device `meta` stands for a GPU."""
    from deeplightning.checks.examine import load_config

    batch = {"a": [torch.ones(2), {"b": torch.zeros(1)}], "text": ["one", "two"], "pair": Pair(torch.ones(3), [1, "x"])}
    moved = kind(load_config(tiny)).transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert [moved["a"][0].device.type, moved["a"][1]["b"].device.type] == ["meta"] * 2
    assert moved["text"] == ["one", "two"]
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].left.device.type == "meta"
    assert moved["pair"].right == [1, "x"]


def brighter(batch):
    """A batch as the loader hands it on."""
    return {**batch, "image": batch["image"] // 2 + 100}


def test_a_loader_takes_functions_by_name(fit):
    """`data.loader.collate_fn` names a function of the user's: each batch goes through it."""
    collate = "data.loader.collate_fn={ref: test_rows.brighter}"
    plain, changed = (fit("train.num_epochs=1", *more).series("val_loss") for more in ((), (collate,)))
    assert plain != changed


def test_a_metric_may_be_a_sum(own, tracked):
    """A metric of the user's that counts: over 16 samples in batches of 16, and of 5 in two processes, the same share
    as `acc` says."""
    metrics = "model.metrics={right: {type: parts.Right}, acc: {type: deeplightning.task.metrics.Accuracy}}"
    for more, ranks in (((), 1), (("engine.processes=2", "data.batch_size=5"), 2)):
        found = tracked(own(metrics, "logger.log_every_n_steps=1", *more, ranks=ranks).folder).metrics
        assert found["val_right"] == pytest.approx(16 * found["val_acc"])
        assert found["train_right_epoch"] == pytest.approx(134 * found["train_acc_epoch"], abs=1e-3)


def test_accumulation_leaves_evaluation_undivided(fit):
    """With weights that stay, `val_loss` and the loss of an epoch are those of a run without accumulation."""
    still = ["model.optimizer.params.lr=0.0", "train.num_epochs=1"]
    plain, by_four = (fit(*still, f"train.accumulator_factor={factor}") for factor in (1, 4))
    for name in ("val_loss", "train_loss_epoch"):
        assert by_four.series(name)[0][1] == pytest.approx(plain.series(name)[0][1], rel=1e-6)


def warm_up(optimizer, total_steps, share):
    """Linear from 0 to the whole rate over a share of the steps, then linear to 0."""
    warm = max(1, round(share * total_steps))
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / warm if step < warm else (total_steps - step) / (total_steps - warm)
    )


def test_a_schedule_of_ones_own_knows_how_many_steps_there_are(fit):
    """Linear warm-up over a ninth, then decay, with `total_steps: auto`: 34 batches accumulated by 4 are 9 steps, the
    tail among them, in each of two epochs; the peak is at step 2 of 18, and the rate would be 0 at step 18."""
    schedule = "{type: test_rows.warm_up, params: {total_steps: auto, share: 0.1111}, call: {interval: step}}"
    fitted = fit(f"model.scheduler={schedule}", "data.batch_size=4", "train.accumulator_factor=4")
    expected = [0.0, 0.025, *(0.05 * (18 - step) / 16 for step in range(2, 18))]
    assert fitted.seen.rates == pytest.approx(expected)


def test_tensorboard_has_one_file_with_the_expected_points(own, tmp_path):
    """TensorBoard's logger beside the other: on two processes one file of events, with a point of `train_loss` at each
    logged step."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = "{type: pytorch_lightning.loggers.TensorBoardLogger, params: {save_dir: 'FOLDER'}}".replace(
        "FOLDER", str(tmp_path)
    )
    outcome = own(f"logger.extra=[{board}]", "engine.processes=2", ranks=2)
    assert outcome.folder.exists()
    events = list(tmp_path.glob("**/events.out.*"))
    assert len(events) == 1
    found = EventAccumulator(str(events[0])).Reload().Scalars("train_loss")
    assert [point.step for point in found] == [0, 4, 8]
