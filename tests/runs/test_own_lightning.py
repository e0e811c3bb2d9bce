"""A LightningModule and a LightningDataModule as in Lightning's manual train unchanged, with the results of
`Trainer.fit`, and gain checkpoints that plain Lightning loads, resume and test."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import digest

from deeplightning.callbacks import random_state
from deeplightning.callbacks.random_state import Generators
from deeplightning.engine.checkpoint_reading import read_checkpoint
from deeplightning.faults import CheckpointError
from deeplightning.tracking.metrics_file import first_differences, read_series

OWN = """\
import os
import signal

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import OptimizerCallable
from pytorch_lightning.loggers import Logger
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import Metric


class Points(pl.LightningDataModule):
    def __init__(self, batch_size: int = 8, noise: float = 0.1):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        x = torch.rand(120, 2)
        y = x.sum(1, keepdim=True) + self.hparams.noise * torch.randn(120, 1)
        self.train, self.val, self.rest = random_split(TensorDataset(x, y), [80, 20, 20])

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.rest, self.hparams.batch_size)


class Lines(Logger):
    name, version = "lines", 0

    def log_metrics(self, metrics, step=None):
        with open("lines.txt", "a") as file:
            file.write(f"{step} {sorted(metrics)}\\n")

    def log_hyperparams(self, params):
        pass


class Told(Lines):
    def after_save_checkpoint(self, checkpoint_callback):
        with open("told.txt", "w") as file:
            file.write(checkpoint_callback.best_model_path)


class Ends(Lines):
    def finalize(self, status):
        with open("ends.txt", "a") as file:
            file.write(f"{status}\\n")


class Line(pl.LightningModule):
    def __init__(self, net: nn.Module, losses: list[nn.Module], optimizer: OptimizerCallable = torch.optim.Adam,
                 dropout: float = 0.0, token: str = ""):
        super().__init__()
        self.save_hyperparameters(ignore=["losses"])
        self.net, self.losses, self.dropout = net, nn.ModuleList(losses), nn.Dropout(dropout)

    def loss(self, batch):
        x, y = batch
        outputs = self.net(self.dropout(x))
        return sum(loss(outputs, y) for loss in self.losses)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters())


class Shares(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("items", default=[], dist_reduce_fx=None)

    def update(self, values):
        self.items += [value[None] for value in values]

    def compute(self):
        return torch.tensor(float(len(self.items)))


class Counts(Line):
    def __init__(self, net: nn.Module, losses: list[nn.Module], dropout: float, token: str):
        super().__init__(net, losses, dropout=dropout, token=token)
        self.shares = Shares()

    def validation_step(self, batch, batch_idx):
        self.shares.update(batch[0])
        self.log("val_items", self.shares)


class Odd(Points):
    def val_dataloader(self):
        return DataLoader([self.val[number] for number in range(19)], self.hparams.batch_size)


class Fails(Line):
    def test_step(self, batch, batch_idx):
        raise RuntimeError("planted")


class Drawn(Points):
    def setup(self, stage):
        super().setup(stage)
        self.generator = torch.Generator().manual_seed(3)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, generator=self.generator)


class Hooked(Line):
    def __init__(self, net: nn.Module, losses: list[nn.Module], optimizer: OptimizerCallable, dropout: float):
        super().__init__(net, losses, optimizer, dropout)
        self.register_buffer("average", torch.zeros(2))

    def on_train_start(self):
        torch.rand(1)

    on_train_epoch_start = on_train_epoch_end = on_train_start

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == int(os.environ.get("DIES_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        return -1 if self.current_epoch == 1 and batch_idx == 4 else None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.lerp_(self.net.weight.detach()[0] + 0.01 * torch.rand(2), 0.5)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), on_step=True)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
        assert self.trainer.estimated_stepping_batches == 15
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [
            {"scheduler": plateau, "monitor": "train_loss", "interval": "step"},
            {"scheduler": schedule, "interval": "step", "frequency": 2},
        ]


class Meshed(Line):
    def configure_model(self):
        if isinstance(self.net, FSDPModule):
            return
        self.net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
        for tensor in self.net.parameters():  # as if read from a file
            nn.init.constant_(tensor, 0.25)
        if self.device_mesh is not None:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class OfConfig(Line):
    def __init__(self, cfg, dropout: float = 0.0):
        from deeplightning.config.target import build

        super().__init__(build(cfg.model.network), [build(cfg.model.loss)], dropout=dropout)
        self.save_hyperparameters()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Scale:
    factor = 2.0


class ScaledPoints(Points):
    scale = None

    def setup(self, stage):
        super().setup(stage)
        self.scale = self.scale or Scale()

    def state_dict(self):
        return {"scale": self.scale, "epochs": self.trainer.current_epoch}

    def load_state_dict(self, state):
        self.scale, self.epochs = state["scale"], state["epochs"]


class Scaled(Line):
    def setup(self, stage):
        self.scale = Scale()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scale.factor

    def on_save_checkpoint(self, checkpoint):
        checkpoint["scale"] = self.scale
        checkpoint["of"] = {"scale": self.scale, "factor": self.scale.factor}

    def on_load_checkpoint(self, checkpoint):
        self.scale = checkpoint["scale"]
        assert checkpoint["of"]["scale"].factor == checkpoint["of"]["factor"]


class Keeps(Line):
    def configure_callbacks(self):
        return [pl.callbacks.ModelCheckpoint(self.trainer.default_root_dir, monitor="val_loss", filename="{epoch}")]

    def on_train_end(self):
        assert type(self.trainer.checkpoint_callback) is pl.callbacks.ModelCheckpoint


class Searches(Line):
    def configure_callbacks(self):
        return [pl.callbacks.LearningRateFinder()]


class Remembers(Line):
    def __init__(self, net: nn.Module, losses: list[nn.Module], optimizer: OptimizerCallable, dropout: float):
        super().__init__(net, losses, optimizer, dropout)
        self.register_buffer("fixed", torch.ones(2), persistent=False)
        self.register_buffer("bank", torch.zeros(4, 1), persistent=False)
        self.losses[0].memory = torch.zeros(3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = self.losses[0].memory[:1] + self.bank[0]
        self.losses[0].memory[batch_idx % 3] = loss.detach()
        self.bank = torch.cat([self.bank[1:], loss.detach().view(1, 1)])
        return loss + self.last.sum() * self.net.weight.sum()


class Saves(Remembers):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["kept"] = [self.bank, self.losses[0].memory]

    def on_load_checkpoint(self, checkpoint):
        self.bank, self.losses[0].memory = checkpoint["kept"]


class DataOfConfig(Points):
    def __init__(self, cfg):
        super().__init__(cfg.data.batch_size)
        self.save_hyperparameters()

    def val_dataloader(self):
        return DataLoader(random_split(self.val, [15, 5])[0], self.hparams.batch_size)


class Dropped(nn.Sequential):
    def __init__(self, inputs: int, outputs: int):
        super().__init__(nn.Flatten(), nn.Linear(inputs, 8), nn.Dropout(0.5), nn.Linear(8, outputs))


class Pictures(pl.LightningModule):
    def __init__(self, cfg):
        super().__init__()
        self.save_hyperparameters()
        self.net = Dropped(64, 10)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch["image"].float() / 255), batch["label"])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch["image"].float() / 255), batch["label"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""

HEAD = """\
seed: 7
stages: [train]
train: {num_epochs: 3, export: false, checkpoint: {monitor: val_loss}}
logger: {pictures: null, params: {tracking_uri: STORE, system_metrics: false}}
"""

PARTS = """\
data: {module: {type: own_line.Points, params: {batch_size: 16}}}
model:
  module:
    type: own_line.Line
    params:
      net: {type: torch.nn.Linear, params: {in_features: 2, out_features: 1}}
      losses: [{type: torch.nn.MSELoss}, {type: torch.nn.HuberLoss, params: {delta: 0.5}}]
      optimizer: {type: torch.optim.SGD, params: {lr: 0.1, momentum: 0.5}}
      dropout: 0.2
      token: ${oc.env:OWN_TOKEN}
"""

TOKEN = "horse-battery-staple-17"

OF_CONFIG = {  # data modules and tasks that take the config
    "pictures": (
        "data={module: {type: deeplightning.data.digits.Digits, params: {limit: 150}}, batch_size: 16}",
        "model={module: {type: own_line.Pictures}, loss: null, optimizer: null}",
    ),
    "lines": (
        "data={module: {type: own_line.DataOfConfig}, batch_size: 20}",
        "model={module: {type: own_line.OfConfig, params: {dropout: 0.1}}, loss: {type: torch.nn.MSELoss}, "
        "network: {type: torch.nn.Linear, params: {in_features: 2, out_features: 1}}, optimizer: null}",
    ),
    "our task": (
        "data={module: {type: own_line.DataOfConfig}, batch_size: 20}",
        "model={module: {type: deeplightning.task.regression.Regression}, loss: {type: torch.nn.MSELoss}, optimizer: "
        "{type: torch.optim.SGD, params: {lr: 0.1}}, network: {type: own_line.Dropped, params: {inputs: 2, "
        "outputs: 1}}}",
    ),
}
PLAIN = """\
import json
import sys
import pytorch_lightning as pl
import torch
from deeplightning import load_config
from deeplightning.config.target import find

torch.set_num_threads(1)
spread = {"strategy": "ddp", "devices": 2} if len(sys.argv) > 3 else {}
found = {}
for name, overrides in json.loads(sys.argv[2]).items():
    cfg = load_config("of_config.yaml", overrides)
    pl.seed_everything(7)
    task, data = (find(module.type)(cfg, **module.params) for module in (cfg.model.module, cfg.data.module))
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False,
                         enable_checkpointing=False, enable_model_summary=False, **spread)
    trainer.fit(task, data)
    found[name] = task.state_dict()
torch.save(found, sys.argv[1])
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with user modules and configs."""
    place = tmp_path_factory.mktemp("own-lightning")
    head = HEAD.replace("STORE", str(place / "mlruns"))
    (place / "own_line.py").write_text(OWN)
    (place / "plain.py").write_text(PLAIN)
    (place / "of_config.yaml").write_text(head)
    (place / "config.yaml").write_text(head.replace("[train]", "[train, test]") + PARTS)
    return place


@pytest.fixture(scope="module")
def run(project, command):
    """`run(override, …)` trains the config; `code` is the expected exit code, `store` another tracking store."""

    def train(*overrides, config="config.yaml", store=None, ranks=1, code=0, **variables):
        arguments = [config, *overrides, *([f"logger.params.tracking_uri={store}"] if store else [])]
        return command("train", *arguments, cwd=project, ranks=ranks, OWN_TOKEN=TOKEN, code=code, **variables)

    return train


@pytest.fixture(scope="module")
def trained(run):
    """A run of three epochs and a test of the best weights."""
    return run()


def content(folder: Path, name: str = "last.ckpt"):
    return torch.load(folder / name, weights_only=True)


def test_the_log_reports_what_the_loaders_give(trained):
    """The table at the start shows batch size, steps and samples of the user's loaders."""
    assert "batch      16 samples a step: 16 per process" in trained.out
    assert "length     3 epochs; 15 steps" in trained.out
    assert "data       Points: 80 training, 20 validation samples" in trained.out


def test_a_metric_that_gathers_items_one_by_one_has_as_many_in_each_process(run):
    """As with `MeanAveragePrecision`: Lightning's sampler repeats one of 19 samples, which a warning reports."""
    settings = ["data.module.type=own_line.Odd", "model.module.type=own_line.Counts", "train.num_epochs=1"]
    settings += ["engine.backend=ddp", "engine.processes=2", "stages=[train]", "~train.checkpoint"]
    settings += ["~model.module.params.optimizer"]
    done = run(*settings, ranks=2)
    assert "19 samples cannot be split for Shares into equally many batches of 16 on each of 2 processes" in done.err
    assert "val_items 20.0000" in done.out


def test_a_new_run_starts_from_scratch_whatever_an_earlier_one_saved_at_its_exception(run, trained, tmp_path):
    """Lightning would resume from a file of `OnExceptionCheckpoint`, which the run would not record."""
    shutil.copy(trained.folder / "last.ckpt", tmp_path / "on_exception.ckpt")
    saves = f"{{type: pytorch_lightning.callbacks.OnExceptionCheckpoint, params: {{dirpath: '{tmp_path}'}}}}"
    done = run(f"train.callbacks=[{saves}]", "stages=[train]")
    assert "epoch 1 of 3" in done.out
    assert "no last checkpoint" not in done.err
    torch.testing.assert_close(content(done.folder)["state_dict"], content(trained.folder)["state_dict"])


@pytest.mark.slow
def test_two_processes_end_with_the_weights_of_plain_lightning(run, project, tmp_path):
    """Each process draws as under `torchrun` and `Trainer(strategy="ddp", devices=2)`, even if the run resumes after an
    epoch or inside one: the checkpoint has the generators of both. The processes have different values of val_loss;
    both save by that of rank 0."""
    lines = [*OF_CONFIG["lines"], "data.batch_size=16"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "plain.py"]
    command += [tmp_path / "plain.pt", json.dumps({"lines": lines}), "two"]
    subprocess.run(command, cwd=project, check=True, timeout=300)
    plain = content(tmp_path, "plain.pt")["lines"]
    settings = [*lines, "engine.processes=2"]
    for steps in (None, 3, 4):  # an epoch has three
        options = {"store": tmp_path / str(steps), "config": "of_config.yaml", "ranks": 2}
        last = run(*settings, f"train.max_steps={steps or 'null'}", **options)
        if steps:
            last = run(*settings, "train.resume_ckpt=auto", **options)
            assert f"(step {steps}, " in last.out
        torch.testing.assert_close(content(last.folder)["state_dict"], plain, rtol=0, atol=0)


def test_a_logger_with_the_methods_that_lightning_asks_for_gets_the_metrics(run, project):
    """A logger needs no `experiment`, `save_dir` or `finalize`."""
    run("logger={type: own_line.Lines, pictures: null}", "train.num_epochs=1")
    lines = (project / "lines.txt").read_text()
    assert "train_loss" in lines
    assert "val_loss" in lines


def test_a_logger_is_finalized_once_per_stage(run, project):
    """Lightning calls `finalize` once for each stage, with "failed" if the stage fails."""
    run("logger={type: own_line.Ends, pictures: null}", "model.module.type=own_line.Fails", code=5)
    assert (project / "ends.txt").read_text().split() == ["success", "failed"]


def test_checkpoints_hold_plain_hyperparameters_that_lightning_loads(trained, project):
    """Checkpoints have the plain hyperparameters of both modules, without secrets; other values are passed to
    `load_from_checkpoint`."""
    checkpoint = content(trained.folder)
    assert checkpoint["datamodule_hyper_parameters"] == {"batch_size": 16, "noise": 0.1}
    assert checkpoint["hyper_parameters"].keys() == {"dropout", "token"}
    assert TOKEN not in str(checkpoint["hyper_parameters"])
    script = f"""\
    import torch
    from own_line import Line, Points
    path = {str(trained.folder / "best.ckpt")!r}
    model = Line.load_from_checkpoint(path, net=torch.nn.Linear(2, 1), losses=[torch.nn.MSELoss()])
    assert model.hparams.dropout == 0.2
    assert torch.equal(model.net.weight, torch.load(path, weights_only=True)["state_dict"]["net.weight"])
    assert Points.load_from_checkpoint(path).hparams.batch_size == 16
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=project, check=True, timeout=300)


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_run_resumes_without_the_objects_that_its_checkpoints_cannot_hold(engine, run, tmp_path):
    """Objects that are no plain values are left out of checkpoints with one warning; on resume, and in a stage that
    takes the best weights, hooks of module and data module find the objects of the new modules."""
    ranks = 1 if engine == "ddp" else 2
    settings = ["data.module.type=own_line.ScaledPoints", "model.module.type=own_line.Scaled"]
    settings += [f"engine={{backend: {engine}, processes: {ranks}}}"]
    uninterrupted = run(*settings, store=tmp_path / "uninterrupted", ranks=ranks)
    half = run(*settings, "train.num_epochs=2", store=tmp_path / "half", ranks=ranks)
    resumed = run(*settings, "train.resume_ckpt=auto", store=tmp_path / "half", ranks=ranks)
    assert digest(resumed.folder / "last.ckpt") == digest(uninterrupted.folder / "last.ckpt")
    warning = "checkpoints of this run leave out ScaledPoints['scale'], scale, of['scale']: only plain values"
    assert [line.count(warning) for line in half.err.splitlines() if "leave out" in line] == [1]


@pytest.mark.slow
def test_a_module_that_shards_itself_by_the_mesh_learns_what_it_learns_under_ddp(run, tmp_path):
    """`configure_model` uses `self.device_mesh` as in Lightning's manual; its `tensor_parallel` has size 1. The run
    keeps the values that the module sets, and resumes."""

    def train(engine, *more):
        settings = ["model.module.type=own_line.Meshed", "stages=[train]", f"engine.backend={engine}"]
        return run(*settings, "engine.processes=2", *more, store=tmp_path / engine, ranks=2)

    train("fsdp", "train.num_epochs=2")
    resumed, expected = train("fsdp", "train.resume_ckpt=auto"), train("ddp")
    found, wanted = (read_checkpoint(outcome.folder / "last.ckpt")["state_dict"] for outcome in (resumed, expected))
    torch.testing.assert_close(found, wanted)


def test_a_killed_run_ends_like_an_uninterrupted_one_with_states_and_draws_in_hooks(run, tmp_path):
    """A run that is killed in the first epoch and in a later one ends with the same weights, points, and average of the
    task's `on_train_batch_end`. Hooks and the loader's generator draw random numbers, a schedule by steps follows a
    metric, the task uses the number of steps, a hook skips the rest of an epoch, each validation batch is logged, and
    numbers have 64 bits."""
    settings = ["data.module.type=own_line.Drawn", "model.module.type=own_line.Hooked", "engine.precision=64"]
    settings += ["~model.module.params.token"]
    first = run(*settings, store=tmp_path / "uninterrupted")
    settings += ["train.checkpoint.every_n_steps=3", "train.resume_ckpt=auto"]
    killed = {"store": tmp_path / "killed", "code": -signal.SIGKILL}
    run(*settings, **killed, DIES_AT="4")
    assert "(step 3, epoch 1)" in run(*settings, **killed, DIES_AT="13").out
    resumed = run(*settings, store=tmp_path / "killed")
    assert "(step 12, epoch 3)" in resumed.out
    assert digest(resumed.folder / "last.ckpt") == digest(first.folder / "last.ckpt")
    series = [read_series(outcome.folder / "metrics.jsonl") for outcome in (first, resumed)]
    assert first_differences(*series) == []
    assert [step for step, _ in series[0]["val_loss_step"]] == [0, 1, 2, 3]


def test_a_checkpoint_callback_of_the_module_is_the_trainers_and_its_last_state_is_saved(run, tmp_path):
    """A ModelCheckpoint of `configure_callbacks` is treated like one of `train.callbacks`."""
    settings = ["model.module.type=own_line.Keeps", "~model.module.params.token", "train.num_epochs=2"]
    done = run(*settings, "stages=[train]", store=tmp_path / "mlruns")
    states = content(done.folder)["callbacks"]
    (own,) = [state for key, state in states.items() if key.startswith("ModelCheckpoint")]
    assert own["best_model_score"].item() == pytest.approx(json.loads((done.folder / "best.json").read_text())["value"])


@pytest.mark.parametrize("name", ["Remembers", "Saves"])
def test_state_outside_the_state_dict_of_a_module_is_reported(run, tmp_path, name):
    """A resumed run warns about non-persistent buffers and tensors that change in place, but not about constants and
    last outputs. If the module saves them, the run ends with the weights of an uninterrupted one."""
    settings = [f"model.module.type=own_line.{name}", "~model.module.params.token"]
    run(*settings, "train.num_epochs=2", store=tmp_path / "mlruns")
    resumed = run(*settings, "train.resume_ckpt=auto", store=tmp_path / "mlruns")
    warnings = [line for line in resumed.err.splitlines() if "will not end bit for bit" in line]
    if name == "Remembers":
        state = "bank, losses.0.memory of the module (not in its state_dict; see `on_save_checkpoint`)"
        assert [line.partition("uninterrupted one: ")[2] for line in warnings] == [state]
    else:
        uninterrupted = run(*settings, store=tmp_path / "uninterrupted")
        assert digest(resumed.folder / "last.ckpt") == digest(uninterrupted.folder / "last.ckpt")
        assert warnings == []


@pytest.fixture(scope="module")
def plain_weights(project, tmp_path_factory):
    """The weights of plain Lightning, by the keys of `OF_CONFIG`."""
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, "plain.py", folder / "plain.pt", json.dumps(OF_CONFIG)]
    subprocess.run(command, cwd=project, check=True, timeout=300)
    return content(folder, "plain.pt")


@pytest.mark.parametrize("name", OF_CONFIG)
def test_modules_that_take_the_config_train_to_the_weights_of_plain_lightning(run, plain_weights, name):
    """A user's module with a user's data module or ours, and our task with a user's data module, give the same weights
    bit for bit, with dropout, shuffled batches, and a random split that `val_dataloader` completes. Checkpoints contain
    the plain hyperparameters of both modules, without `cfg`."""
    done = run(*OF_CONFIG[name], config="of_config.yaml")
    torch.testing.assert_close(content(done.folder)["state_dict"], plain_weights[name], rtol=0, atol=0)
    if name == "lines":
        checkpoint = content(done.folder)
        assert checkpoint["hyper_parameters"] == {"dropout": 0.1, "token": ""}
        assert checkpoint["datamodule_hyper_parameters"] == {"batch_size": 20, "noise": 0.1}


def test_a_run_whose_checkpoints_cannot_be_read_is_not_begun_anew(run, tmp_path):
    """`train.resume_ckpt=auto` exits with code 4 and names each damaged checkpoint; no run is created."""
    store = tmp_path / "store"
    first = run("train.num_epochs=1", store=store)
    for path in first.folder.glob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:1000])
    runs = sorted(store.glob("*/*/artifacts"))
    refused = run("train.resume_ckpt=auto", store=store, code=4)
    assert "no checkpoint of this run can be read" in refused.err
    assert "last.ckpt: damaged" in refused.err
    assert "train.resume_ckpt=null" in refused.err
    assert sorted(store.glob("*/*/artifacts")) == runs


def test_the_states_of_generators_are_plain_and_a_damaged_one_is_refused():
    """A checkpoint stores them among the states of callbacks, as plain numbers that any version reads."""
    callback = Generators()
    state = callback.state_dict()
    assert json.loads(json.dumps(state))["processes"][0]["now"]["torch"] == torch.get_rng_state().tolist()
    callback._trainer = SimpleNamespace(global_rank=0, ckpt_path="a.ckpt")
    for damaged in ({"processes": 3}, {"processes": [{}]}, {"processes": ["x"]}):
        with pytest.raises(CheckpointError, match=r"a\.ckpt: damaged: the states of generators"):
            callback.load_state_dict(damaged)


def test_a_test_alone_logs_no_secret(run, trained, project, tmp_path):
    """Loggers get plain hyperparameters without secrets also in a stage without a training."""
    extra = f"logger.extra=[{{type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{tmp_path}/csv'}}}}]"
    run("stages=[test]", f"test.ckpt='{trained.folder}'", extra, store=tmp_path / "mlruns")
    (file,) = tmp_path.glob("csv/**/hparams.yaml")
    assert "batch_size" in file.read_text()
    assert TOKEN not in file.read_text()


def test_a_norm_that_lightning_does_not_clip_by_is_refused(run):
    """A module without its own clipping hook is clipped by the 2-norm only; other algorithms ignore the norm."""
    refused = run("train.gradient_clip={value: 0.1, norm_type: 1}", "train.num_epochs=1", code=2)
    assert "train.gradient_clip.norm_type: Lightning clips the gradients of your module by the 2-norm" in refused.err
    run("train.gradient_clip={value: 0.1, norm_type: 1, algorithm: value}", "train.num_epochs=1")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_states_of_two_gpus_are_restored_on_a_machine_with_fewer(number, monkeypatch):
    """A run resumes with fewer GPUs than the checkpoint has states of, or without any."""
    restored, states = [], random_state._all_states(None) | {"device": [[0] * 16, [1] * 16]}
    module = SimpleNamespace(set_rng_state_all=restored.extend) if number else None
    monkeypatch.setattr(random_state, "_device_module", lambda: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(_combined_loader=None), val_dataloaders=None, ckpt_path="a.ckpt")
    random_state._restore_states(trainer, states)
    assert len(restored) == number


def test_a_logger_is_told_of_checkpoints(run, project):
    """Lightning's `after_save_checkpoint` gets a callback with the path of the best weights."""
    run("logger={type: own_line.Told, pictures: null}", "train.num_epochs=1")
    assert (project / "told.txt").read_text().endswith(".ckpt")


def test_a_fast_run_saves_nothing_by_a_callback_of_the_module(run, project):
    """A ModelCheckpoint of `configure_callbacks` saves nothing, as under Lightning's `fast_dev_run`."""
    before = {*project.rglob("*.ckpt")}
    run("model.module.type=own_line.Keeps", "train.fast=true", code=5)  # its own assertion finds no callback
    assert {*project.rglob("*.ckpt")} == before


def test_a_search_in_configure_callbacks_is_refused_as_in_the_config(run):
    """The message names the command that finds the value; no run is opened."""
    refused = run("model.module.type=own_line.Searches", code=2)
    assert "deeplightning lr CONFIG" in refused.err
