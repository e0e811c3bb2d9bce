"""The gradient of an optimizer step is the mean over its samples, however batches and processes divide them.

References are trainings in one process with one batch per step. 134 samples are two batches of 64 and one of 6.
"""

import pytest
import torch
from conftest import digest
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader

from deeplightning.callbacks.sample_weights import SampleWeights
from deeplightning.engine.checkpoint_reading import read_checkpoint

THREE_LOSSES = (
    "~model.loss",
    "model.loss={ce: {type: torch.nn.CrossEntropyLoss}, margin: {type: torch.nn.MultiMarginLoss, weight: 0.5}, "
    "smooth: {type: torch.nn.CrossEntropyLoss, params: {label_smoothing: 0.2}, weight: 2.0}}",
)


def assert_close(gradients, expected):
    """Assert that there are as many steps, and that each gradient is within 1e-6."""
    assert len(gradients) == len(expected)
    assert min(gradient.abs().max() for gradient in expected) > 0.01
    assert max((ours - theirs).abs().max() for ours, theirs in zip(gradients, expected, strict=True)) < 1e-6


# ---- accumulated batches


class TimeFirst(LightningModule):
    """A module that is not ours, whose batches (T, B, 3) have as many samples each, but other lengths T."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = torch.nn.GRU(3, 2)

    def training_step(self, batch, batch_idx):
        return self.network(batch)[1].square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self):
        samples = [torch.full((1 + number, 3), float(number)) for number in range(8)]
        pairs = [[0, 1], [6, 7], [2, 3], [4, 5]]
        return DataLoader(samples, batch_sampler=pairs, collate_fn=torch.nn.utils.rnn.pad_sequence)


def test_batches_of_another_module_count_alike_if_the_loader_does_not_give_their_sizes():
    """Two batches to a step end with the weights of plain Lightning, whatever the first dimension of a batch is."""
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    weights = []
    for callbacks in ([], [SampleWeights()]):
        task = TimeFirst()
        Trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=callbacks, **options).fit(task)
        weights.append(torch.cat([weight.detach().flatten() for weight in task.parameters()]))
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_four_accumulated_batches_have_the_gradient_of_one(fit):
    """Gradients of 4 x 16 and 1 x 64 samples are equal within 1e-6 over two epochs, also in the short last step."""
    accumulated, expected = (fit(s).seen.gradients for s in ("train.accumulator_factor=4", "data.batch_size=64"))
    assert_close(accumulated, expected)
    assert len(expected) == 6


def test_a_tail_with_a_short_batch_weighs_each_sample_alike(fit):
    """Five batches of 12 per step are steps of 60, 60 and 12 + 2 samples, with the gradients of single batches."""
    accumulated = fit("data.batch_size=12", "train.accumulator_factor=5")
    assert_close(accumulated.seen.gradients, fit("data.batch_size=60").seen.gradients)


def test_the_tail_of_an_epoch_is_a_step_and_nothing_leaks(fit):
    """Six batches, four per step, are two steps an epoch; no gradient is carried over to the second epoch."""
    no_learning = ("train.accumulator_factor=4", "model.optimizer.params.lr=0.0")
    fitted = fit(*no_learning, "train.limit_batches.train=6")
    assert fitted.trainer.global_step == 4
    again = fit(*no_learning, "train.limit_batches.train=4")
    assert torch.equal(fitted.seen.gradients[2], again.seen.gradients[1])
    halves = fit("data.batch_size=32", "train.limit_batches.train=3", "model.optimizer.params.lr=0.0").seen.gradients
    assert_close(
        fitted.seen.gradients, [(halves[0] + halves[1]) / 2, halves[2], (halves[3] + halves[4]) / 2, halves[5]]
    )


def test_accumulation_counts_batches_and_steps(fit):
    """Eight batches, four per step, are eight backward passes and two optimizer steps, also in the checkpoint."""
    fitted = fit("train.accumulator_factor=4", "train.limit_batches.train=8", "train.num_epochs=1")
    assert (fitted.seen.backward, len(fitted.seen.gradients)) == (8, 2)
    saved = torch.load(fitted.folder / "last.ckpt", weights_only=True)
    loops = saved["loops"]["fit_loop"]
    steps = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]
    assert (loops["epoch_loop.batch_progress"]["total"]["completed"], steps["completed"]) == (8, 2)
    assert saved["global_step"] == 2


def test_a_validation_between_accumulated_batches_changes_nothing(fit):
    """A validation after the fourth of nine batches, with three per step, changes no bit of any gradient."""
    often = fit("train.accumulator_factor=3", "train.val_every_n_epoch=0.5")
    assert [step for _, step in often.seen.validations] == [1, 3, 4, 6]
    assert all(map(torch.equal, often.seen.gradients, fit("train.accumulator_factor=3").seen.gradients))


def test_accumulation_from_an_epoch_on(fit):
    """Eight batches an epoch, four per step from epoch 1 on, are 8 + 2 optimizer steps."""
    fitted = fit("train.accumulator_epoch=1", "train.accumulator_factor=4", "train.limit_batches.train=8")
    assert len(fitted.seen.gradients) == fitted.trainer.global_step == 10
    assert [step for step, _ in fitted.series("val_loss")] == [7, 9]


def test_accumulation_from_an_epoch_on_survives_a_resume(train):
    """With two batches per step from epoch 1 on, 9 + 5 steps, a run stopped after 11 resumes to the same bits."""
    settings = ("train.accumulator_epoch=1", "train.accumulator_factor=2")
    part = train(*settings, "train.max_steps=11")
    resumed = train(*settings, f"train.resume_ckpt='{part.folder}'")
    assert digest(resumed.folder / "last.ckpt") == digest(train(*settings).folder / "last.ckpt")


# ---- several losses


def test_three_losses_are_one_gradient(fit):
    """The gradient of three losses is the weighted sum of the gradient of each."""
    once = ("~train.num_epochs", "train.max_steps=1")
    smooth = "model.loss={type: torch.nn.CrossEntropyLoss, params: {label_smoothing: 0.2}}"
    alone = [(), ("model.loss={type: torch.nn.MultiMarginLoss}",), ("~model.loss", smooth)]
    ce, margin, smoothed = (fit(*loss, *once).seen.gradients[0] for loss in alone)
    assert_close(fit(*THREE_LOSSES, *once).seen.gradients, [ce + 0.5 * margin + 2 * smoothed])


# ---- processes


@pytest.mark.parametrize(
    ("spread", "single"),
    [
        ("engine.processes=2 data.batch_size=16 train.accumulator_factor=2", "data.batch_size=64"),
        pytest.param(
            *("engine.processes=3 data.batch_size=7 train.accumulator_factor=3", "data.batch_size=63"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two", "three"],
)
@pytest.mark.parametrize(
    "clip",
    [
        pytest.param("{value: 0.5}", id="norm"),
        pytest.param("{value: 0.05, algorithm: value}", id="value", marks=pytest.mark.slow),
    ],
)
def test_processes_together_have_the_gradient_of_one(spread, single, clip, command, tiny, place, fit, tmp_path):
    """Processes compute the clipped gradient of three losses that one process computes, also in the last step of an
    epoch, where 129 = 64 + 64 + 1 samples leave a process without one."""
    settings = [*THREE_LOSSES, "data.module.params.limit=145", f"train.gradient_clip={clip}"]
    writes = f"train.callbacks=[{{type: own.Gradients, params: {{file: '{tmp_path / 'gradients.pt'}'}}}}]"
    ranks = 3 if "processes=3" in spread else 2
    command("train", tiny, *settings, *spread.split(), writes, cwd=place, ranks=ranks, code=0)
    expected = fit(*settings, single)
    assert len(expected.data.dataset("train")) == 129
    assert_close(torch.load(tmp_path / "gradients.pt"), expected.seen.gradients)


@pytest.mark.parametrize(
    "backend",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "deepspeed_stage_2")), "deepspeed_stage_3"],
)
def test_engines_that_shard_step_by_the_gradient_of_one_process(backend, job, fit):
    """Under engines with sharded gradients, the weights after two epochs of three accumulated, clipped steps, the last
    of one sample, are those of one process within 1e-6."""
    settings = [*THREE_LOSSES, "data.module.params.limit=145", "train.gradient_clip={value: 0.5}"]
    spread = ["data.batch_size=16", "train.accumulator_factor=2", f"engine.backend={backend}"]
    ours = read_checkpoint(job(*settings, *spread).folder / "last.ckpt")["state_dict"]
    single = fit(*settings, "data.batch_size=64")
    theirs = read_checkpoint(single.folder / "last.ckpt")["state_dict"]
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max() for name in ours) < 1e-6
    start = fit(*settings, "train.num_epochs=1", "model.optimizer.params.lr=0.0").task.state_dict()
    assert max((start[name] - theirs[name]).abs().max() for name in ours) > 0.01


WEIGHED = "model.loss={type: torch.nn.CrossEntropyLoss, params: {weight: [1.0, 2.0, 3.0, 4.0, 5.0, 1, 2, 3, 4, 5]}}"


@pytest.mark.parametrize("loss", [(), (WEIGHED,)], ids=["plain", "class weights"])
def test_points_and_means_of_several_processes_count_each_sample_once(loss, job, tracked):
    """`train_loss`, `train_acc` and their epoch means are those of one process, also if a process has no sample."""
    settings = (*loss, "data.module.params.limit=145", "model.optimizer.params.lr=0.0", "logger.log_every_n_steps=1")
    expected = tracked(job(*settings, "data.batch_size=64", ranks=1).folder).series()
    series = tracked(job(*settings, "data.batch_size=32", ranks=2).folder).series()
    assert len(expected["train_loss"]) == 6
    for name in ("train_loss", "train_acc", "train_loss_epoch", "train_acc_epoch"):
        assert series[name] == [(step, pytest.approx(value, abs=1e-6)) for step, value in expected[name]]


# ---- clipping


@pytest.mark.parametrize(
    ("clip", "size"),
    [
        pytest.param("{value: 0.05}", lambda g: g.norm(), id="norm"),
        pytest.param("{value: 0.05, norm_type: .inf}", lambda g: g.abs().max(), id="largest", marks=pytest.mark.slow),
        pytest.param("{value: 0.005, algorithm: value}", lambda g: 10 * g.abs().max(), id="value"),
    ],
)
def test_gradients_are_clipped(clip, size, fit):
    """No step's gradient exceeds the limit, and the limit is reached."""
    gradients = fit(f"train.gradient_clip={clip}", "train.num_epochs=1").seen.gradients
    sizes = [size(gradient).item() for gradient in gradients]
    assert max(sizes) == pytest.approx(0.05, rel=1e-3)
    assert size(fit("train.num_epochs=1").seen.gradients[0]) > 0.05
