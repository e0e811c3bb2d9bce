"""`deeplightning migrate --from lightning-cli|hydra`: the converted config trains bit-identical weights."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

FOREIGN = Path(__file__).with_name("foreign")


class Case(NamedTuple):
    """A project, and the Python code that its own tool would run, written by hand.

    Attributes:
        files: the configs, in `tests/foreign`.
        modules: the model and the data module, as Python.
        trainer: the arguments of Lightning's Trainer, as Python.
        folder: a folder of `tests/foreign` with additional files.
    """

    system: str
    files: list[str]
    seed: int
    modules: str
    trainer: str
    folder: str = ""


CASES = {
    "plain": Case(
        "lightning-cli", ["plain.yaml"], 7, "Plain(6, 0.02, 0.25), Points(12, 96)",
        "max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.5",
    ),
    "subcommands": Case(
        "lightning-cli", ["subcommands.yaml"], 3, "Plain(5), Points(8)",
        "max_epochs=10, max_steps=9, limit_train_batches=4, val_check_interval=0.5",
    ),
    "over": Case(
        "lightning-cli", ["composed.yaml", "over.yaml"], 11,
        "Composed(Encoder(4, 'tanh', 0.1), partial(optim.Adam, lr=0.05), "
        "partial(optim.lr_scheduler.ExponentialLR, gamma=0.5)), Points(4)",
        "max_epochs=1",
    ),
    "several": Case(
        "lightning-cli", ["several.yaml"], 13,
        "Alternating(Encoder(7), torch.nn.Linear(7, 2), partial(optim.SGD, lr=0.2), partial(optim.Adam, lr=0.03), "
        "partial(optim.lr_scheduler.CosineAnnealingLR, T_max=2)), Points(9)",
        "max_epochs=2, callbacks=[Shrink(0.95)]",
    ),
    "optimizer": Case(
        "lightning-cli", ["optimizer.yaml"], 5,
        "given(Plain(6, dropout=0.25), partial(optim.SGD, lr=0.1, momentum=0.9), "
        "partial(optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)), Points(12)",
        "max_epochs=3, callbacks=[Shrink(0.9), pl.callbacks.EarlyStopping('val/loss', 10, 1)]",
    ),
    "script": Case(
        "lightning-cli", ["fit.yaml"], 9,
        "given(Plain(12), partial(optim.Adam, lr=0.05), partial(ReduceLROnPlateau, monitor='train/loss', patience=0)), "
        "Points(12)",
        "max_epochs=3, callbacks=[Shrink(0.5)]", "script",
    ),
    "train": Case(
        "hydra", ["configs/train.yaml"], 12345,
        "PointsTask(Dense(6), partial(optim.Adam, lr=0.01), partial(optim.lr_scheduler.ReduceLROnPlateau, "
        "factor=0.1, patience=10), False), PointsData('data', 12, [64, 20, 16])",
        "max_epochs=3",
    ),
    "wide": Case(
        "hydra", ["configs/wide.yaml"], 5,
        "PointsTask(Dense(16), partial(optim.Adam, lr=0.05), partial(optim.lr_scheduler.ReduceLROnPlateau, "
        "factor=0.1, patience=10), False), PointsData('data', 12, [64, 20, 16])",
        "max_epochs=2",
    ),
}  # fmt: skip
FOLDERS = {"lightning-cli": "cli", "hydra": "hydra"}
REFERENCE = """\
import sys
from functools import partial

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import ReduceLROnPlateau
from torch import optim

from MODULE import *


def given(model, optimizer, schedule):
    optimizer = optimizer(model.parameters())
    schedule = {"scheduler": schedule(optimizer)}
    if hasattr(schedule["scheduler"], "monitor"):
        schedule["monitor"] = schedule["scheduler"].monitor
    model.configure_optimizers = lambda: {"optimizer": optimizer, "lr_scheduler": schedule}
    return model


torch.set_num_threads(1)
pl.seed_everything(SEED, workers=True)
model, data = MODULES
trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
                     enable_checkpointing=False, enable_model_summary=False, TRAINER)
trainer.fit(model, data)
torch.save(model.state_dict(), sys.argv[1])
"""


def weights_of(case: Case, place: Path) -> dict[str, torch.Tensor]:
    """Train with Lightning's Trainer alone; return the weights."""
    module = "points" if case.system == "lightning-cli" else "src.points"
    text = REFERENCE.replace("MODULES", case.modules).replace("MODULE", module)
    (place / "reference.py").write_text(text.replace("SEED", str(case.seed)).replace("TRAINER", case.trainer))
    subprocess.run([sys.executable, "reference.py", "weights.pt"], cwd=place, check=True, timeout=300)
    return torch.load(place / "weights.pt", weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_a_converted_project_trains_the_same(command, tmp_path, name):
    """The weights are bit-identical, and the template's `test: true` runs the test."""
    case = CASES[name]
    place = shutil.copytree(FOREIGN / FOLDERS[case.system], tmp_path / "project")
    if case.folder:
        shutil.copytree(FOREIGN / case.folder, place, dirs_exist_ok=True)
    done = command("migrate", "--from", case.system, *case.files, "--write", cwd=place, PROJECT_ROOT=".", code=0)
    store = f"logger.params.tracking_uri={tmp_path / 'mlruns'}"
    made = done.out.strip()
    done = command("train", made, store, "logger.pictures=null", cwd=place, PROJECT_ROOT=".", code=0)
    ours = torch.load(done.folder / "last.ckpt", weights_only=True)["state_dict"]
    theirs = weights_of(case, place)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    assert (done.folder / "test_results.json").exists() == (case.system == "hydra")
