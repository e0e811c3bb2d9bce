"""What a step does beside a GPU: nothing that waits for it. On a machine without one the same code runs on CPU tensors:
`transfer.is_asynchronous` says of the CPU what it says of a GPU, and the data module takes it for its GPU."""

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
def beside_a_gpu(monkeypatch):
    """Runs what is done beside a GPU, on the CPU."""
    monkeypatch.setattr(transfer, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(ImageData, "_gpu", lambda self: torch.device("cpu"))


# ---- seeds


def drawn() -> list:
    return [random.random(), np.random.rand(), torch.rand(3).tolist()]


@pytest.mark.parametrize("word", [0, 7, 2**63 + 5, 2**64 - 1])
def test_a_step_is_seeded_as_by_manual_seed(word, monkeypatch):
    """Python, NumPy and torch draw the same; `torch.manual_seed`, which formats tracebacks, is not called."""
    random.seed(word)
    np.random.seed(word >> 32)
    torch.manual_seed(word)
    expected = drawn()
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("slow"))
    random_state._seed_from(word)
    assert drawn() == expected


# ---- a run


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


class Look(pl.Callback):
    """Notes what is counted from the start of a batch to that of the next, and whether its step is logged."""

    def __init__(self, monkeypatch):
        self.counts, self.steps, self._begun = Counts(), [], None
        for name in ("item", "tolist", "cpu", "cuda", "pin_memory", "to"):
            self._watch(monkeypatch, name)

    def _watch(self, monkeypatch, name):
        own = getattr(torch.Tensor, name)

        def call(tensor, *args, **kwargs):
            moves = name != "to" or "device" in kwargs or any(isinstance(a, torch.device | str) for a in args)
            self.counts.found[f".{name}()"] += moves
            return own(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, call)

    def on_train_start(self, *_):
        self.counts.__enter__()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._end()
        self._begun = Counter(self.counts.found), trainer.log_every_n_steps == 1

    def on_train_epoch_end(self, *_):
        self._begun = None  # the last batch may have rows that do not count, and is looked at

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
def test_a_step_that_is_not_logged_waits_for_nothing(overrides, copies, beside_a_gpu, fit, monkeypatch):
    """No number is read and nothing copied, but for pictures that are not on the GPU: they go there in one copy."""
    look = Look(monkeypatch)
    watched(fit, monkeypatch, look, "logger.log_every_n_steps=4", *overrides)
    unlogged = [found for due, found in look.steps if not due]
    assert len(unlogged) >= 10
    assert unlogged == [copies] * len(unlogged)


@pytest.mark.slow
def test_a_run_beside_a_gpu_is_that_of_the_cpu(fit, request):
    """The same weights, and the same points at the same steps; with augmentation, the set in memory or moved."""
    words = ["logger.log_every_n_steps=4", AUGMENT]
    here = fit(*words)
    request.getfixturevalue("beside_a_gpu")
    for where in ("true", "device"):
        there = fit(*words, f"data.module.params.in_memory={where}")
        assert bool(there.data.dataset("train").on_device) is (where == "device")
        expected = here.task.network.state_dict()
        assert all(torch.equal(values, expected[name]) for name, values in there.task.network.state_dict().items())
        for name in ("train_loss", "train_acc", "train_loss_epoch", "val_loss", "lr"):
            assert there.series(name) == here.series(name), name


class Points(pl.Callback):
    """Notes at each checkpoint which steps' losses the logger has; `fails_at`: raises before this step."""

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
    """The steps of which a CSVLogger has a loss."""
    rows = trainer.logger.experiment.metrics
    return sorted({int(row["step"]) for row in rows if "train_loss" in row})


def watched(fit, monkeypatch, callback, *overrides):
    """Trains with one more callback."""
    from deeplightning import callbacks

    own = callbacks.run_callbacks
    monkeypatch.setattr(callbacks, "run_callbacks", lambda cfg: [*own(cfg), callback])
    fit(*overrides)


def test_what_waits_is_logged_before_a_checkpoint_and_when_a_run_fails(beside_a_gpu, fit, monkeypatch):
    """A run that resumes would not log these points again; nor are the last before a failure lost."""
    points = Points(fails_at=14)
    monkeypatch.setattr("pytorch_lightning.loggers.csv_logs.ExperimentWriter.save", lambda self: None)
    words = ["logger.log_every_n_steps=4", "train.checkpoint={every_n_steps: 6}", "train.num_epochs=2"]
    with pytest.raises(RuntimeError, match="the end"):
        watched(fit, monkeypatch, points, *words)
    assert points.steps == [(6, [0, 4]), (9, [0, 4, 8]), (12, [0, 4, 8])]
    assert logged(points.trainer) == [0, 4, 8, 12]


# ---- a loss that is not a number


def test_no_weights_that_a_loss_has_spoilt_are_saved(beside_a_gpu, fit, monkeypatch):
    """Where only logged steps are looked at, and those late, the last loss is looked at before a checkpoint is."""
    points = Points()
    words = ["model.optimizer.params.lr=1e20", "logger.log_every_n_steps=1000", "train.checkpoint={every_n_steps: 5}"]
    with pytest.raises(RunError, match=r"train_loss is (nan|inf) at step 4 \(epoch 1\)"):
        watched(fit, monkeypatch, points, *words)
    assert points.steps == []


def test_the_loss_of_a_logged_step_is_looked_at_when_the_next_is_logged(beside_a_gpu, monkeypatch):
    """With the step that it is from; others are not looked at."""
    look, trainer = steps.FiniteLoss(), SimpleNamespace(global_step=0, current_epoch=0, log_every_n_steps=1)
    look.on_before_backward(trainer, None, torch.tensor(1.0))
    trainer.global_step, trainer.log_every_n_steps = 1, sys.maxsize
    look.on_before_backward(trainer, None, torch.tensor(float("nan")))
    trainer.global_step, trainer.log_every_n_steps = 2, 1
    look.on_before_backward(trainer, None, torch.tensor(float("inf")))
    trainer.global_step = 3
    with pytest.raises(RunError, match=r"train_loss is inf at step 2 \(epoch 1\)"):
        look.on_before_backward(trainer, None, torch.tensor(2.0))


def test_a_label_without_an_output_is_named_without_a_look_at_a_batch(beside_a_gpu, fit, monkeypatch):
    """The labels of the set are looked at once, on the CPU."""
    monkeypatch.setattr("deeplightning.task.classes.Classification.check_outputs", lambda self, outputs: None)
    with pytest.raises(LabelError, match="the data holds label 9, the network has 7 outputs"):
        fit("model.network.params.num_classes=7")


def test_deferred_numbers_are_those_of_the_moment():
    """What happens to the tensor afterwards changes nothing."""
    values = torch.tensor([1.0, 2.0])
    late = transfer.Deferred(values)
    values.fill_(3)
    assert late.read() == [1.0, 2.0]
    assert not late.is_late


# ---- on a GPU


class Strict(pl.Callback):
    """Has torch raise where a step that is not logged would wait for the GPU."""

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
    """As torch itself sees it (`set_sync_debug_mode`); and the points are there in the end."""
    strict = Strict()
    in_memory = f"data.module.params.in_memory={where}"
    watched(fit, monkeypatch, strict, "engine.gpus=1", "logger.log_every_n_steps=4", in_memory, AUGMENT)
    assert strict.steps >= 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_numbers_of_a_gpu_arrive():
    """What was sent and fetched without a wait is what it was, whatever the GPU does meanwhile."""
    device = torch.device("cuda", 0)
    values = torch.arange(1000.0)
    there = transfer.to_device(values, device)
    late = transfer.Deferred(there)
    there.fill_(3)
    assert late.is_late
    assert late.read() == values.tolist()
