"""What the tests of whole runs share: a working directory with own code, a tracking store, and `deeplightning` to call.

A run is told by `TINY` and overrides. Those that several tests look at are made once, by fixtures. It imports nothing
that takes long to import: each worker and each small test file loads it.
"""

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two spinning threads beside a busy neighbour are slower than one
import pytest
from commands import Commands, Outcome

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="deeplightning-state-")  # which runs are one's own
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

pytest_plugins = ["leftovers"]

TINY = """\
seed: 7
data:
  module: {type: deeplightning.data.digits.Digits, params: {limit: 150}}    # 134 train, 16 validate, 150 test
  batch_size: 16
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05, momentum: 0.9}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 2, export: false}
logger:
  params: {tracking_uri: STORE, system_metrics: false}
  log_every_n_steps: 4
  pictures: null
"""

OWN = '''\
"""A user's own code, in the working directory."""

import os
import pathlib
import signal
import time

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn

from deeplightning.data.digits import Digits
from deeplightning.task.img_classif import ImageClassification


class Raises(ImageClassification):
    """Fails in its third batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise KeyError("a fault of the user's")
        return super().training_step(batch, batch_idx)


class Spiky(ImageClassification):
    """Multiplies the loss of some steps by a thousand."""

    def __init__(self, cfg, steps):
        super().__init__(cfg)
        self.steps = steps

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1000 if self.global_step in self.steps else 1)


class Stuck(ImageClassification):
    """Waits in its first batch until a file is there."""

    def __init__(self, cfg, file):
        super().__init__(cfg)
        self.file = pathlib.Path(file)

    def training_step(self, batch, batch_idx):
        print("stuck", flush=True)
        while not self.file.exists():
            time.sleep(0.01)
        return super().training_step(batch, batch_idx)


class Guarded(Digits):
    """Takes a password."""

    def __init__(self, cfg, token, **params):
        super().__init__(cfg, **params)
        self.token = token


class Failing(Guarded):
    """Says its password when it fails."""

    def read(self):
        raise RuntimeError(f"the server refused {self.token}")


class Waits(pl.Callback):
    """Stops in the third batch of the second epoch, or in the validation after it, until a file is there."""

    def __init__(self, until, validating=False):
        self.until = pathlib.Path(until)
        self.validating = validating

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 2 and not self.validating:
            self.wait()

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1 and self.validating:
            self.wait()

    def wait(self):
        print("waits", flush=True)
        while not self.until.exists():
            time.sleep(0.01)


class Killed(pl.Callback):
    """Kills its process before a batch, or in the validation before it; the signal leaves no time to save anything."""

    def __init__(self, epoch, batch, validating=False):
        self.at, self.validating = (epoch, batch), validating

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        if self.validating:
            self.on_train_batch_start(trainer, module, batch, trainer.fit_loop.epoch_loop.batch_progress.current.ready)


class Normed(nn.Sequential):
    """A network with convolutions and batch norm."""

    def __init__(self):
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
        super().__init__(*layers)


class Hungry(nn.Module):
    """A network that takes 8 MB for each sample; or as much as a GPU does not have, for more than so many."""

    def __init__(self, most=1000):
        super().__init__()
        self.last, self.most = nn.Linear(64, 10), most

    def forward(self, images):
        if len(images) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        much = torch.ones(len(images), 2_000_000)
        return self.last(images.flatten(1)) * much[:, :1]


class Tied(nn.Module):
    """A network whose two layers share their weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, images):
        return self.last(self.second(self.first(images.flatten(1)).relu()).relu())


class Partitioned(pl.Callback):
    """Says whether DeepSpeed has every parameter in parts when a test begins."""

    def on_test_start(self, trainer, module):
        held = [(p.ds_status.name, p.numel()) for p in module.network.parameters()]
        told = "all in parts" if set(held) == {("NOT_AVAILABLE", 0)} else str(held)
        print("parameters of the test:", told, flush=True)


class AsksForSteps(ImageClassification):
    """A task that builds its own schedule from the number of steps, as Lightning's manual shows it."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.network.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Gradients(pl.Callback):
    """Writes down the gradients of each optimizer step, as the optimizer gets them: all in one vector."""

    def __init__(self, file):
        self.file = file
        self.seen = []

    def look(self, optimizer, *_):
        self.seen.append(torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]))

    def on_train_start(self, trainer, module):
        trainer.optimizers[0].register_step_post_hook(self.look)

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            torch.save(self.seen, self.file)


class Batches(pl.Callback):
    """Writes down the positions of each batch's samples, of training and of validation."""

    def __init__(self, file):
        self.file, self.seen = file, {"train": [], "val": []}

    def on_train_batch_start(self, trainer, module, batch, *_):
        self.seen["train"].append(batch["index"])

    def on_validation_batch_start(self, trainer, module, batch, *_):
        self.seen["val"].append(batch["index"])

    def on_train_end(self, trainer, module):
        torch.save(self.seen, self.file)


class Weights(pl.Callback):
    """Writes down the task's weights after each optimizer step."""

    def __init__(self, file):
        self.file = file
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append({name: value.clone() for name, value in module.state_dict().items()})

    def on_train_end(self, trainer, module):
        torch.save(self.seen, self.file)


class Few(Digits):
    """The same digits in every set, as many as asked for."""

    def __init__(self, cfg, size, **params):
        super().__init__(cfg, **params)
        self.size = size

    def read(self):
        digits = super().read()["all"]
        return {name: digits.take(np.arange(self.size)) for name in ("train", "val", "test")}


class Foreign(Digits):
    """Trains from a loader whose sampler does not tell how many samples its batches have."""

    def train_dataloader(self):
        batches = torch.utils.data.BatchSampler(range(len(self.dataset("train"))), self.cfg.data.batch_size, False)
        return torch.utils.data.DataLoader(self.dataset("train"), batch_size=None, sampler=list(batches))


class Dropout(nn.Module):
    """A network that draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))

    def forward(self, images):
        return self.layers(images)


def network(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def optimizer(groups, lr, momentum):
    return torch.optim.RMSprop(groups, lr=lr, momentum=momentum)


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1**epoch)


class Constant(nn.Module):
    """A loss that never changes."""

    def forward(self, logits, labels):
        return 0 * logits.sum() + 1.5


class NoNumber(nn.Module):
    """A loss that is no number while the network is judged."""

    def forward(self, logits, labels):
        loss = nn.functional.cross_entropy(logits, labels)
        return loss if torch.is_grad_enabled() else loss * float("nan")


def half(number):
    """A resolver."""
    return number // 2


def shouted(text):
    """Another."""
    return text.upper()
'''


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `run` the tests that use a fixture which trains, or starts `deeplightning`."""
    for item in items:
        if {"command", "jobs", "fit"} & {*getattr(item, "fixturenames", ())}:  # `train` and `job` use the first two
            item.add_marker(pytest.mark.run)


@pytest.fixture(autouse=True, scope="module")
def log_levels():
    """The levels of the root logger and ours, which a training in this process sets, are as before after a module."""
    loggers = [logging.getLogger(), logging.getLogger("deeplightning")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of the commands; nothing that was not asked for may appear in it."""
    folder = tmp_path_factory.mktemp("work") / "a place"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    before = {*folder.iterdir(), folder / "__pycache__"}
    yield folder
    assert set(folder.iterdir()) <= before


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracking store of all runs: making one costs two seconds."""
    return tmp_path_factory.mktemp("store") / "mlruns"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A config that trains in a fraction of a second."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY.replace("STORE", str(store)))
    return path


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """`command(VERB, …, cwd=…)` runs `deeplightning VERB …` and gives its Outcome."""
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def train(command: Commands, tiny: Path, place: Path) -> Any:
    """`train(override, …)` runs the tiny config; `code` is the exit code that is expected."""

    def run(*overrides: str, code: int = 0, **variables: str) -> Outcome:
        outcome = command("train", tiny, *overrides, cwd=place, **variables)
        assert outcome.code == code, outcome
        return outcome

    return run


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """`jobs(VERB, …, cwd=…, ranks=2)` is `command` with DeepSpeed imported, which takes seconds in each process."""
    commands = Commands(
        tmp_path_factory.mktemp("jobs"), preload=("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
    )
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def job(request: pytest.FixtureRequest, command: Commands, tiny: Path, place: Path) -> Any:
    """`job(override, …)` runs the tiny config with two processes, or as many as `ranks` says; one rank is a plain run.

    `code` is the exit code that is expected of all. Only where an override says so DeepSpeed is there.
    """

    def run(*overrides: str, ranks: int = 2, code: int = 0, **variables: str) -> Outcome:
        deepspeed = any("deepspeed" in override for override in overrides)
        start = request.getfixturevalue("jobs") if deepspeed else command
        outcome = start("train", tiny, f"engine.processes={ranks}", *overrides, cwd=place, ranks=ranks, **variables)
        assert {code} == {each.code for each in outcome.ranks or [outcome]}, outcome
        return outcome

    return run


@pytest.fixture(scope="session")
def tracked(store: Path) -> Any:
    """`tracked(folder)` is the tracker's view of a run."""
    from mlflow.tracking import MlflowClient

    class Tracked:
        def __init__(self, folder: Path):
            self.client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
            self.id = folder.parent.name
            run = self.client.get_run(self.id)
            self.status, self.params, self.tags = run.info.status, run.data.params, run.data.tags
            self.metrics = run.data.metrics

        def series(self) -> dict[str, list[tuple[int, float]]]:
            """Steps and values of each metric, without the machine's load."""
            names = [name for name in self.metrics if not name.startswith("system/")]
            return {
                name: [(p.step, p.value) for p in self.client.get_metric_history(self.id, name)]
                for name in sorted(names)
            }

    return Tracked


@pytest.fixture
def fit(tiny: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`fit(override, …)` trains the tiny config in this process, and gives a Fitted."""
    from fitted import Fitted, Seen

    from deeplightning.callbacks import callback_of
    from deeplightning.callbacks.record import Record
    from deeplightning.checks.examine import load_config
    from deeplightning.run.assemble import init_module, init_trainer

    monkeypatch.chdir(place)
    logger = f"logger={{type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{tmp_path}', name: runs}}}}"
    plain = ["~logger", logger, "logger.pictures=null", "logger.per_rank_files=false", "logger.log_every_n_steps=1"]

    def run(*overrides: str) -> Fitted:
        cfg = load_config(tiny, [*plain, *overrides])
        task, data, trainer, seen = init_module(cfg, "model"), init_module(cfg, "data"), init_trainer(cfg), Seen()
        trainer.callbacks.append(seen)
        trainer.fit(task, data)
        return Fitted(trainer, task, data, seen, callback_of(trainer, Record).folder.path)

    return run


def weights(checkpoint: Path) -> dict[str, Any]:
    """The tensors of a checkpoint, those in pieces put together."""
    import torch

    from deeplightning.engine.checkpoint_io import read_checkpoint

    content = torch.load(checkpoint, weights_only=True)
    return (read_checkpoint(checkpoint) if "pieces" in content else content)["state_dict"]


def digest(checkpoint: Path) -> str:
    """SHA-256 of the weights in a checkpoint file."""
    import torch

    total = hashlib.sha256()
    for name, tensor in weights(checkpoint).items():
        values = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)  # NumPy has no bfloat16
        total.update(name.encode() + values.numpy().tobytes())
    return total.hexdigest()
