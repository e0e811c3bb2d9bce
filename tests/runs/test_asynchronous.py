"""A training step does not synchronise with the GPU, except when it is logged.

The same code runs here on CPU tensors: `transfer.is_asynchronous` is true for the CPU, and the data module uses the CPU
as its GPU.
"""

import random
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deeplightning import transfer
from deeplightning.callbacks import random_state, steps
from deeplightning.data.images import ImageData
from deeplightning.faults import RunError
from deeplightning.task.networks import LabelError

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal"}
AUGMENT = (
    "data.module.params.augment=[{type: deeplightning.data.augment.RandomCrop, params: {padding: 1}}, "
    "{type: deeplightning.data.augment.RandomHorizontalFlip}]"
)


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """Run the code path of a GPU on the CPU."""
    monkeypatch.setattr(transfer, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(ImageData, "_gpu", lambda self: torch.device("cpu"))


def draw() -> list:
    return [random.random(), np.random.rand(), torch.rand(3).tolist()]


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**64 - 1])
def test_a_step_is_seeded_as_by_manual_seed(seed, monkeypatch):
    """Python, NumPy and torch draw the same numbers without a call of `torch.manual_seed`, which formats tracebacks."""
    random.seed(seed)
    np.random.seed(seed >> 32)
    torch.manual_seed(seed)
    expected = draw()
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("slow"))
    random_state._seed_from(seed)
    assert draw() == expected


class Counts(TorchDispatchMode):
    """Counts the operations that would wait for a GPU, or copy to or from it."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
        if name in WAITS or name == "_pin_memory" or (name == "_to_copy" and (kwargs or {}).get("device") is not None):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class StepCounts(pl.Callback):
    """Records the operations from the start of each batch to that of the next, and whether the step is logged."""

    def __init__(self, monkeypatch):
        self.counts, self.steps, self._begun = Counts(), [], None
        for name in ("item", "tolist", "cpu", "cuda", "pin_memory", "to"):
            self._watch(monkeypatch, name)

    def _watch(self, monkeypatch, name):
        original = getattr(torch.Tensor, name)

        def call(tensor, *args, **kwargs):
            moves = name != "to" or "device" in kwargs or any(isinstance(a, torch.device | str) for a in args)
            self.counts.found[f".{name}()"] += moves
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, call)

    def on_train_start(self, *_):
        self.counts.__enter__()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._end()
        self._begun = Counter(self.counts.found), trainer.log_every_n_steps == 1

    def on_train_epoch_end(self, *_):
        self._begun = None  # the last batch may have padding rows, and is read

    def _end(self):
        if self._begun is not None:
            before, due = self._begun
            self.steps.append((due, {name: n for name, n in (self.counts.found - before).items() if n}))

    def on_train_end(self, *_):
        self.counts.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (["data.module.params.in_memory=device"], {}),
        (["data.module.params.in_memory=true"], {".to()": 1}),
        (["data.module.params.in_memory=device", AUGMENT], {}),
    ],
    ids=["pictures on the GPU", "pictures pinned", "augmented"],
)
def test_a_step_that_is_not_logged_waits_for_nothing(overrides, copies, cpu_as_gpu, fit, monkeypatch):
    """An unlogged step reads no number and copies nothing, except images in pinned memory, in one copy."""
    counts = StepCounts(monkeypatch)
    fit_with(counts, fit, monkeypatch, "logger.log_every_n_steps=4", *overrides)
    unlogged = [found for due, found in counts.steps if not due]
    assert len(unlogged) >= 10
    assert unlogged == [copies] * len(unlogged)


@pytest.mark.slow
def test_asynchronous_steps_give_the_same_run(fit, request):
    """Weights and logged points equal those of synchronous steps; with augmentation, in host memory or on the GPU."""
    settings = ["logger.log_every_n_steps=4", AUGMENT]
    synchronous = fit(*settings)
    expected = synchronous.task.network.state_dict()
    request.getfixturevalue("cpu_as_gpu")
    for where in ("true", "device"):
        fitted = fit(*settings, f"data.module.params.in_memory={where}")
        assert bool(fitted.data.dataset("train").on_device) is (where == "device")
        assert all(torch.equal(values, expected[name]) for name, values in fitted.task.network.state_dict().items())
        for name in ("train_loss", "train_acc", "train_loss_epoch", "val_loss", "lr"):
            assert fitted.series(name) == synchronous.series(name), name


class Points(pl.Callback):
    """Records at each checkpoint which steps' losses the logger has; raises before the step `fails_at`."""

    def __init__(self, fails_at=None):
        self.fails_at, self.steps, self.trainer = fails_at, [], None

    def setup(self, trainer, module, stage):
        self.trainer = trainer

    def on_save_checkpoint(self, trainer, *_):
        self.steps.append((trainer.global_step, logged(trainer)))

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.fails_at:
            raise RuntimeError("the end")


def logged(trainer):
    """Return the steps of which the CSVLogger has a loss."""
    rows = trainer.logger.experiment.metrics
    return sorted({int(row["step"]) for row in rows if "train_loss" in row})


def fit_with(callback, fit, monkeypatch, *overrides):
    """Train with one more callback."""
    from deeplightning import callbacks

    original = callbacks.run_callbacks
    monkeypatch.setattr(callbacks, "run_callbacks", lambda cfg: [*original(cfg), callback])
    fit(*overrides)


def test_deferred_points_are_logged_before_a_checkpoint_and_when_a_run_fails(cpu_as_gpu, fit, monkeypatch):
    """Deferred points are logged before each checkpoint, since a resumed run would not log them, and on a failure."""
    points = Points(fails_at=14)
    monkeypatch.setattr("pytorch_lightning.loggers.csv_logs.ExperimentWriter.save", lambda self: None)
    settings = ["logger.log_every_n_steps=4", "train.checkpoint={every_n_steps: 6}", "train.num_epochs=2"]
    with pytest.raises(RuntimeError, match="the end"):
        fit_with(points, fit, monkeypatch, *settings)
    assert points.steps == [(6, [0, 4]), (9, [0, 4, 8]), (12, [0, 4, 8])]
    assert logged(points.trainer) == [0, 4, 8, 12]


def test_no_weights_that_a_loss_has_spoilt_are_saved(cpu_as_gpu, fit, monkeypatch):
    """The last loss is checked before a checkpoint is saved, although only logged steps are checked, and later."""
    points = Points()
    settings = ["model.optimizer.params.lr=1e20", "logger.log_every_n_steps=1000"]
    with pytest.raises(RunError, match=r"train_loss is (nan|inf) at step 4 \(epoch 1\)"):
        fit_with(points, fit, monkeypatch, *settings, "train.checkpoint={every_n_steps: 5}")
    assert points.steps == []


def test_the_loss_of_a_logged_step_is_checked_when_the_next_is_logged(cpu_as_gpu):
    """The error names the step of the loss; losses of unlogged steps are not read."""
    check = steps.FiniteLoss()
    for step, log_every, loss in ((0, 1, 1.0), (1, sys.maxsize, float("nan")), (2, 1, float("inf"))):
        trainer = SimpleNamespace(global_step=step, current_epoch=0, log_every_n_steps=log_every)
        check.on_before_backward(trainer, None, torch.tensor(loss))
    trainer.global_step = 3
    with pytest.raises(RunError, match=r"train_loss is inf at step 2 \(epoch 1\)"):
        check.on_before_backward(trainer, None, torch.tensor(2.0))


def test_a_label_without_an_output_is_named_without_reading_a_batch(cpu_as_gpu, fit, monkeypatch):
    """The labels of the training set are checked once, on the CPU."""
    monkeypatch.setattr("deeplightning.task.classes.Classification.check_outputs", lambda self, outputs: None)
    with pytest.raises(LabelError, match="the data holds label 9, the network has 7 outputs"):
        fit("model.network.params.num_classes=7")


def test_deferred_numbers_are_those_of_the_moment():
    """A Deferred keeps the values that the tensor had when it was made."""
    values = torch.tensor([1.0, 2.0])
    deferred = transfer.Deferred(values)
    values.fill_(3)
    assert deferred.read() == [1.0, 2.0]
    assert not deferred.is_late


class Strict(pl.Callback):
    """Makes torch raise where an unlogged step would synchronise with the GPU."""

    def __init__(self):
        self.steps = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        strict = trainer.log_every_n_steps > 1 and not trainer.is_last_batch and trainer.global_step > 1
        self.steps += strict
        torch.cuda.set_sync_debug_mode("error" if strict else "default")

    def on_train_batch_end(self, *_):
        torch.cuda.set_sync_debug_mode("default")

    on_exception = on_train_batch_end


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("where", ["auto", "device", "true"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_a_gpu_a_step_that_is_not_logged_waits_for_nothing(where, fit, monkeypatch):
    """torch's own check (`set_sync_debug_mode`) finds no synchronisation in an unlogged step."""
    strict = Strict()
    in_memory = f"data.module.params.in_memory={where}"
    fit_with(strict, fit, monkeypatch, "engine.gpus=1", "logger.log_every_n_steps=4", in_memory, AUGMENT)
    assert strict.steps >= 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_numbers_of_a_gpu_arrive():
    """Values copied to the GPU and back without a wait are unchanged, although the GPU overwrites its copy."""
    values = torch.arange(1000.0)
    moved = transfer.to_device(values, torch.device("cuda", 0))
    deferred = transfer.Deferred(moved)
    moved.fill_(3)
    assert deferred.is_late
    assert deferred.read() == values.tolist()
