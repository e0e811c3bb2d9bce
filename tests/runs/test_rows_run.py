"""What the checklist asks of whole runs with code of a user's own, where the modules' own tests stop."""

import json
import re

import pytest
import torch
from conftest import weights

from deeplightning.engine.checkpoint_io import read_checkpoint

OWN = '''\
"""A user's own code."""

import json
import pathlib

import pytorch_lightning as pl
from torch import nn

from deeplightning.task.img_classif import ImageClassification


class Task(ImageClassification):
    """Counts what it has learned from, and keeps the count in checkpoints."""

    samples = 0

    def training_step(self, batch, batch_idx):
        self.samples += len(batch["label"])
        self.log("counted", float(len(batch["label"])), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        checkpoint["samples"] = self.samples

    def on_load_checkpoint(self, checkpoint):
        super().on_load_checkpoint(checkpoint)
        self.samples = checkpoint["samples"]


class ByHand(ImageClassification):
    """Steps its optimizer itself, and writes down the first gradient as `manual_backward` left it."""

    def __init__(self, cfg, file):
        super().__init__(cfg)
        self.automatic_optimization, self.file = False, pathlib.Path(file)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if self.global_step == 0 and self.global_rank == 0:
            self.file.write_text(str(float(next(self.network.parameters()).grad.norm())))
        optimizer.step()


class Loose(ImageClassification):
    """Goes on from checkpoints that lack some of its tensors."""

    strict_loading = False


class Notes(pl.Callback):
    """Writes down what is so at the start of each epoch, and counts epochs over the launches of a run."""

    def __init__(self, file):
        self.file = pathlib.Path(file)
        self.epochs = 0

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]

    def on_train_epoch_start(self, trainer, task):
        note = {
            "config": (trainer.logger.artifact_folder / "cfg.yaml").is_file(),
            "epochs": self.epochs,
            "samples": task.samples,
            "place": [task.global_rank, task.local_rank, trainer.world_size],
            "step": trainer.global_step,
        }
        self.epochs += 1
        with self.file.open("a") as file:
            file.write(json.dumps(note) + "\\n")


class Network(nn.Module):
    """Two layers; with `spare`, a third one that is not used."""

    def __init__(self, spare=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        if spare:
            self.spare = nn.Linear(16, 10)

    def forward(self, images):
        return self.layers(images)
'''

CUSTOM = '''\
from torch import nn


class MyLoss(nn.CrossEntropyLoss):
    """Half of cross-entropy."""

    def forward(self, logits, labels):
        return 0.5 * super().forward(logits, labels)


def make(factor):
    """A function that makes a loss."""
    return nn.CrossEntropyLoss(label_smoothing=factor)
'''

NETWORK = "model.network={type: own_rows.Network}"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A working directory with the code above."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "own_rows.py").write_text(OWN)
    (folder / "losses" / "of_mine").mkdir(parents=True)
    (folder / "losses" / "of_mine" / "custom.py").write_text(CUSTOM)
    return folder


@pytest.fixture(scope="module")
def trained(command, tiny, own):
    """`trained(override, …)` is a run in that directory, over as many processes as `ranks` says."""

    def run(*overrides, ranks=1, code=0):
        spread = [f"engine.processes={ranks}"] if ranks > 1 else []
        return command("train", tiny, NETWORK, *spread, *overrides, cwd=own, ranks=ranks, code=code)

    return run


# ---- one run of own code: an epoch, then another one


@pytest.fixture(scope="module")
def gone_on(trained, tmp_path_factory):
    """The run, the notes of its epochs, and the folder with checkpoints of its own naming."""
    folder = tmp_path_factory.mktemp("notes")
    name = "{epoch}-{step}-{val_loss:.2f}"
    kept = f"{{type: pytorch_lightning.callbacks.ModelCheckpoint, params: {{dirpath: '{folder / 'kept'}', filename: "
    kept += f"'{name}', save_top_k: -1}}}}"
    notes = f"{{type: own_rows.Notes, params: {{file: '{folder / 'notes'}'}}}}"
    settings = ["model.module.type=own_rows.Task", f"train.callbacks=[{notes}, {kept}]"]
    first = trained(*settings, "train.num_epochs=1")
    second = trained(*settings, f"train.resume_ckpt='{first.folder}'")
    assert second.folder == first.folder
    return second, [json.loads(line) for line in (folder / "notes").read_text().splitlines()], folder / "kept"


def test_own_code_finds_its_config_its_place_and_what_it_saved(gone_on):
    """`cfg.yaml` is in the run's folder when training begins. `self.global_rank` and `self.trainer.world_size` are
    right without any launcher. A resumed run restores the state of a user's task and of a user's callback."""
    _, notes, _ = gone_on
    begins = {"config": True, "place": [0, 0, 1]}
    assert notes == [begins | {"epochs": 0, "samples": 0, "step": 0}, begins | {"epochs": 1, "samples": 134, "step": 9}]


def test_further_checkpoints_have_names_of_ones_own(gone_on):
    """Lightning's ModelCheckpoint under `train.callbacks` follows its pattern, and holds what `last.ckpt` does."""
    run, _, kept = gone_on
    names = sorted(path.name for path in kept.iterdir())
    assert [re.sub(r"\d\.\d\d", "N", name) for name in names] == [
        "epoch=0-step=9-val_loss=N.ckpt",
        "epoch=1-step=18-val_loss=N.ckpt",
    ]
    ours, last = read_checkpoint(kept / names[1]), read_checkpoint(run.folder / "last.ckpt")
    assert {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "config", "samples"} <= set(ours)
    assert ours["global_step"] == last["global_step"] == 18
    assert all(torch.equal(tensor, last["state_dict"][name]) for name, tensor in ours["state_dict"].items())


def test_a_value_that_is_logged_as_a_sum_is_one(gone_on, tracked):
    """`reduce_fx="sum"` of an own task: the samples of an epoch."""
    run, _, _ = gone_on
    series = tracked(run.folder).series()
    assert [value for _, value in series["counted"]] == [134, 134]


# ---- own modules in other processes


def test_losses_of_a_nested_package_train_over_two_processes(trained, tracked):
    """A class, and a function that makes one, of a folder below the working directory; both are logged."""
    custom = "losses.of_mine.custom"
    losses = f"{{mine: {{type: {custom}.MyLoss}}, smooth: {{type: {custom}.make, params: {{factor: 0.1}}}}}}"
    run = trained("~model.loss", f"model.loss={losses}", "train.num_epochs=1", ranks=2)
    assert {"val_mine", "val_smooth"} <= set(tracked(run.folder).metrics)


@pytest.mark.parametrize(("find", "code"), [("true", 0), ("false", 1)])
def test_a_layer_that_is_not_used_is_found_only_if_ddp_looks_for_it(find, code, trained):
    """With `find_unused_parameters: false` ddp says what to set; with true the network learns."""
    settings = [
        "model.network.params.spare=true",
        f"engine={{backend: ddp, processes: 2, params: {{find_unused_parameters: {find}}}}}",
    ]
    outcome = trained(*settings, "train.num_epochs=1", ranks=2, code=code)
    assert ("find_unused_parameters" in "".join(rank.err for rank in outcome.ranks)) == (code != 0)


# ---- what is told of several processes


@pytest.mark.parametrize("engine", [pytest.param("fsdp", marks=pytest.mark.slow), "deepspeed_stage_3"])
def test_parameters_that_are_shared_out_are_counted_whole(engine, jobs, tiny, place):
    """The table at the start tells the number of the whole network."""
    settings = [f"engine={{backend: {engine}, processes: 2}}", "train.num_epochs=1", "train.limit_batches={train: 1}"]
    done = jobs("train", tiny, *settings, cwd=place, ranks=2, code=0)
    assert "SimpleCNN: 14,538 parameters (0.015 M)" in done.out


SCALED = (
    "{backend: ddp, processes: 2, params: {precision_plugin: {type: "
    "pytorch_lightning.plugins.precision.MixedPrecision, params: {precision: 16-mixed, device: cpu, "
    "scaler: {type: torch.amp.GradScaler, params: {device: cpu, init_scale: SCALE}}}}}}"
)


@pytest.mark.slow
def test_a_loop_of_ones_own_scales_its_loss_in_half_precision(trained, tmp_path, tracked):
    """`manual_backward` multiplies by the scale of the scaler that is named, and the optimizer divides by it: gradients
    are twice as large under twice the scale, and the network learns the same."""
    gradients, losses = [], []
    for scale in (256.0, 512.0):
        task = f"model.module={{type: own_rows.ByHand, params: {{file: '{tmp_path / 'gradient'}'}}}}"
        engine = f"engine={SCALED.replace('SCALE', str(scale))}"
        run = trained("~model.module", task, engine, "train.num_epochs=1", ranks=2)
        gradients.append(float((tmp_path / "gradient").read_text()))
        losses.append(tracked(run.folder).metrics["val_loss"])
    assert gradients[1] == pytest.approx(2 * gradients[0], rel=1e-3)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


# ---- checkpoints under other settings


def test_a_run_in_16_bits_goes_on_in_32(trained):
    """With the weights of the checkpoint, as numbers of the new run: without a learning rate they stay so."""
    half = trained("engine.precision=bf16-true", "model.optimizer.params.lr=0.0", "train.num_epochs=1")
    before = weights(half.folder / "last.ckpt")
    whole = trained("engine.precision=32", f"train.resume_ckpt='{half.folder / 'last.ckpt'}'")
    after = weights(whole.folder / "last.ckpt")
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert all(torch.equal(after[name], tensor.float()) for name, tensor in before.items())


def test_a_task_may_go_on_without_some_tensors(trained):
    """One that sets `strict_loading` to false takes those that are there; another one is told what is missing."""
    learns = "model.trainable=[layers]"
    first = trained(learns, "train.num_epochs=1")
    more = [learns, "model.network.params.spare=true", f"train.resume_ckpt='{first.folder}'"]
    assert "network.spare.weight is missing" in trained(*more, code=4).err
    loose = trained("model.module.type=own_rows.Loose", *more)
    assert read_checkpoint(loose.folder / "last.ckpt")["global_step"] == 18
