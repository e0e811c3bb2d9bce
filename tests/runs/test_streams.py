"""Training on iterable datasets with and without a length, and the number of steps of a training."""

import logging
import math

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from deeplightning.faults import ConfigError, SetupError
from deeplightning.image_spec import ImageSpec
from deeplightning.task.networks import MisfitError

pytestmark = pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")

BATCH = 8


def samples(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return [{"image": images[i], "label": labels[i], "index": torch.tensor(i)} for i in range(count)]


class Stream(IterableDataset):
    """A stream without a length."""

    def __init__(self, *counts):
        self.counts, self.epoch = counts, 0

    def __iter__(self):
        count = self.counts[min(self.epoch, len(self.counts) - 1)]
        self.epoch += 1  # at the first sample: Lightning creates one iterator more
        yield from samples(count)


class Sized(Stream):
    """A stream with `counts` samples in its epochs and the length `promised`."""

    def __init__(self, promised, *counts):
        super().__init__(*counts)
        self.promised = promised

    def __len__(self):
        return self.promised


class Wrong(DataLoader):
    """A loader of a map-style dataset whose length is wrong."""

    def __len__(self):
        return super().__len__() + 1


class Data(pl.LightningDataModule):
    def __init__(self, stream, loader=DataLoader, sets=1):
        super().__init__()
        self.stream, self.loader, self.sets = stream, loader, sets
        self.class_names = [str(number) for number in range(10)]
        self.image_spec = ImageSpec(8, 8, "L", mean=(0.5,), std=(0.25,))

    def train_dataloader(self):
        return self.loader(self.stream, BATCH)

    def val_dataloader(self):
        loaders = [DataLoader(samples(20, seed=1 + number), BATCH) for number in range(self.sets)]
        return loaders if self.sets > 1 else loaders[0]


class Plain(pl.LightningModule):
    """A linear classifier, written as in Lightning's manual."""

    def __init__(self, cfg=None, optimizer=None):
        super().__init__()
        torch.manual_seed(3)
        self.network, self.optimizer = torch.nn.Linear(64, 10), optimizer

    def loss(self, batch):
        logits = self.network(batch["image"].flatten(1).float() / 255)
        return torch.nn.functional.cross_entropy(logits, batch["label"])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch), batch_size=len(batch["label"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1) if self.optimizer is None else self.optimizer(self)


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("promised", "settings"),
    [
        *((24, []), (40, []), (80, ["train.accumulator_factor=2"]), (24, ["train.val_every_n_epoch=2"])),
        (40, ["train.limit_batches={train: 2}"]),  # this limit counts, not the later end of the stream
    ],
)
def test_an_epoch_ends_where_its_stream_ends(fit, caplog, promised, settings):
    """An epoch reads all five batches and ends with a validation; a wrong length gives one warning with both numbers,
    and the weights are those of a training without a length."""
    fixed = ["train.num_epochs=2", "train.checkpoint={monitor: val_loss}", *settings]
    done = fit(*fixed, task=Plain, data=lambda cfg: Data(Sized(promised, 40)))
    length = promised // BATCH
    text = f"epoch 1 of the training data has 5 batches, its length says {length}; each epoch ends with its data"
    assert [text for text in messages(caplog) if "batches" in text] == ([] if length == 5 else [text])
    steps = 3 if "accumulator" in str(settings) else 2 if "limit" in str(settings) else 5
    assert done.seen.validations == [(0, steps), (1, 2 * steps)]["every" in str(settings) :]
    assert done.trainer.current_epoch == 2
    free = fit(*fixed, task=Plain, data=lambda cfg: Data(Stream(40)))
    assert torch.equal(done.task.network.weight, free.task.network.weight)


def test_each_epoch_of_a_stream_may_have_a_length_of_its_own(fit, caplog):
    """Epochs of three, six and four batches, with a length of three, each end with a validation."""
    data = lambda cfg: Data(Sized(24, 24, 48, 32))  # noqa: E731
    done = fit("train.num_epochs=3", task=Plain, data=data)
    assert done.seen.validations == [(0, 3), (1, 9), (2, 13)]
    assert len([text for text in messages(caplog) if "its length says 3" in text]) == 1
    parts = fit("train.num_epochs=3", "train.val_every_n_epoch=0.5", task=Plain, data=data)
    assert {(0, 3), (1, 9), (2, 13)} <= {*parts.seen.validations}


def test_another_loader_whose_length_is_wrong_is_refused(fit):
    """A map-style loader with a wrong length ends the run with exit code 3: its epoch would not be validated."""
    words = "epoch 1 of the training data has 5 batches, but its length says 6"
    with pytest.raises(SetupError, match=words) as error:
        fit("train.num_epochs=1", task=Plain, data=lambda cfg: Data(samples(40), Wrong))
    assert error.value.exit_code == 3


def test_streams_may_be_concatenated(fit, caplog):
    """A sum of streams is used without a length: its `__len__` raises if its parts have none."""
    caplog.set_level(logging.INFO, "deeplightning")
    done = fit("train.num_epochs=1", task=Plain, data=lambda cfg: Data(Stream(24) + Stream(16)))
    assert done.trainer.global_step == 5
    assert [text for text in caplog.messages if text.startswith("length")] == ["length     1 epoch; steps unknown"]


# ---- how many steps

BY_LIGHTNING = "train.callbacks=[{type: GradientAccumulationScheduler, params: {scheduling: {1: 4}}}]"
CYCLE = "model.scheduler={type: OneCycleLR, params: {max_lr: 0.1, total_steps: auto}, call: {interval: step}}"


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (["train.accumulator_factor=4", "train.accumulator_epoch=1"], 9 + 3),
        (["train.accumulator_factor=4", "train.accumulator_epoch=1", "train.max_steps=11"], 11),
        ([BY_LIGHTNING], 9 + 3),
    ],
)
def test_a_schedule_of_auto_length_is_as_long_as_the_training(fit, caplog, settings, steps):
    """With accumulation from the second epoch on, the start block and the schedule have the number of steps taken."""
    caplog.set_level(logging.INFO, "deeplightning")
    done = fit("train.num_epochs=2", CYCLE, *settings)
    assert done.trainer.global_step == steps
    assert done.trainer.lr_scheduler_configs[0].scheduler.total_steps == steps
    assert next(text for text in caplog.messages if text.startswith("length")).endswith(f"; {steps} steps")


@pytest.mark.parametrize(
    ("call", "limits", "length"),
    [
        ("interval: epoch", ("train.num_epochs=6",), 6),
        ("interval: epoch, frequency: 2", ("train.num_epochs=6",), 3),
        ("interval: epoch", ("train.num_epochs=6", "train.max_steps=18"), 2),
        (
            *("interval: epoch",),
            ("train.num_epochs=6", "train.max_steps=18", "train.accumulator_factor=4", "train.accumulator_epoch=5"),
            2,
        ),
        (
            *("interval: epoch",),
            ("train.num_epochs=6", "train.max_steps=24", "train.accumulator_factor=4", "train.accumulator_epoch=1"),
            6,
        ),
        ("interval: step, frequency: 9", ("train.num_epochs=6",), 6),
        ("interval: epoch", ("train.num_epochs=6", "train.accumulator_factor=4", "train.accumulator_epoch=1"), 6),
    ],
)
def test_a_schedule_of_auto_length_counts_its_own_steps(call, limits, length, fit):
    """A cosine over all steps of the schedule ends at 0 with the training, whatever its interval and frequency."""
    cosine = f"model.scheduler={{type: CosineAnnealingLR, params: {{T_max: auto}}, call: {{{call}}}}}"
    trainer = fit(cosine, *limits).trainer
    assert trainer.lr_scheduler_configs[0].scheduler.T_max == length
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


WARM_UP = "model.scheduler={type: StepLR, params: {step_size: 1}, warmup: 0.5}"


@pytest.mark.parametrize(
    ("setting", "error", "words"),
    [
        (CYCLE, MisfitError, "total_steps: `auto` needs the number of steps, .* not known: .* set train.max_steps"),
        (WARM_UP, ConfigError, "set train.max_steps"),
    ],
)
def test_what_needs_the_length_of_a_stream_says_so(fit, setting, error, words):
    """A schedule of `auto` length and a warm-up over a fraction of the training need `train.max_steps` for a stream."""
    with pytest.raises(error, match=words):
        fit(setting, data=lambda cfg: Data(Stream(40)))
    assert fit(setting, "train.max_steps=4", data=lambda cfg: Data(Stream(40))).trainer.global_step == 4


def test_a_training_without_a_number_of_epochs_has_only_a_number_of_steps(fit):
    """With `max_steps` alone, OneCycleLR can have `total_steps: auto` but not `epochs: auto`."""
    limits = "train.num_epochs=null", "train.max_steps=12"
    assert fit(CYCLE, *limits).trainer.lr_scheduler_configs[0].scheduler.total_steps == 12
    with pytest.raises(MisfitError, match=r"number of epochs, .* set train.num_epochs, or model.scheduler.call"):
        fit(CYCLE.replace("interval: step", "interval: epoch"), *limits)
    with pytest.raises(MisfitError, match=r"`auto` works for total_steps, T_max, not \{'epochs'\}"):
        fit(CYCLE.replace("total_steps: auto", "epochs: auto, steps_per_epoch: 9"), *limits)


def test_a_step_that_takes_the_whole_set_says_its_size(fit, caplog):
    """The start block says that a step takes all 134 samples if batch size times accumulation is 320."""
    caplog.set_level(logging.INFO, "deeplightning")
    fit("train.num_epochs=1", "train.accumulator_factor=20")
    (text,) = [text for text in caplog.messages if text.startswith("batch ")]
    assert "134 samples a step, the whole training set: 16 per process x 20 batches accumulated" in text


# ---- what is called when


class Twice(torch.optim.SGD):
    """Calls its closure twice, as SAM and similar optimizers do."""

    def step(self, closure=None):
        closure()
        return super().step(closure)


def test_an_optimizer_that_calls_its_closure_twice_does_not_accumulate(fit):
    """Such an optimizer ends the run with exit code 2 at the first accumulated step: it would count the gradients of
    the earlier batches twice. Without accumulation it trains."""
    task = lambda cfg: Plain(cfg, lambda module: Twice(module.parameters(), lr=0.1))  # noqa: E731
    words = "train.accumulator_factor: Twice calls its closure several times a step"
    with pytest.raises(ConfigError, match=words) as error:
        fit("train.accumulator_factor=2", task=task)
    assert error.value.exit_code == 2
    assert fit("train.num_epochs=1", task=task).trainer.global_step == 9


@pytest.mark.parametrize("frequency", [1, 3])
def test_a_schedule_by_a_metric_steps_in_the_epochs_that_have_it(fit, frequency):
    """With a validation every second epoch, the schedule steps, here halving the rate, only in epochs with one."""
    rule = "{type: ReduceLROnPlateau, params: {patience: 0, factor: 0.5, threshold: 10.0}, call: {monitor: val_loss}}"
    settings = ["train.num_epochs=6", "train.val_every_n_epoch=2", f"model.scheduler={rule}"]
    done = fit(*settings, f"model.scheduler.call.frequency={frequency}")
    steps = 6 // math.lcm(2, frequency)
    assert done.trainer.optimizers[0].param_groups[0]["lr"] == 0.05 * 0.5**steps


@pytest.mark.slow
def test_each_of_several_validation_sets_can_be_monitored(fit):
    """A metric of one set is monitored by Lightning's name; the name without an index is refused with the right one."""
    data = lambda cfg: Data(samples(40), sets=2)  # noqa: E731
    second = "train.checkpoint={monitor: val_loss/dataloader_idx_1, mode: min}"
    done = fit("train.num_epochs=1", second, task=Plain, data=data)
    assert (done.folder / "best.ckpt").exists()
    first = r".*val_loss/dataloader_idx_1. Set train.checkpoint.monitor=val_loss/dataloader_idx_0$"
    with pytest.raises(ConfigError, match=f"'val_loss'; this run has {first}"):
        fit("train.num_epochs=1", "train.checkpoint={monitor: val_loss, mode: min}", task=Plain, data=data)
    with pytest.raises(ConfigError, match="no metric is called 'val_loss/dataloader_idx_1'"):
        fit("train.num_epochs=1", second, task=Plain, data=lambda cfg: Data(samples(40)))


class Two(Plain):
    """Two optimizers, each of which steps at every batch."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
        self.log("train_loss", loss)

    def configure_optimizers(self):
        return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]


def test_all_points_of_a_run_with_several_optimizers_count_steps_alike(fit):
    """Losses, learning rates and gradient norms are logged at the same steps."""
    done = fit("train.num_epochs=2", "logger.gradient_norm=true", task=Two, data=lambda cfg: Data(samples(40)))
    steps = [step for step, _ in done.series("train_loss")]
    assert steps == [*range(10)]
    assert [step for step, _ in done.series("lr-0")] == [step for step, _ in done.series("lr-1")] == steps
    assert [step for step, _ in done.series("grad_norm-0")] == steps
