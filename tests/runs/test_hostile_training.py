"""Checkpoints with a tampered training state. Each line of `tests/hostile/training.jsonl` has a change and its effect:
`refused` with one message (exit code 4); `told`, reported as a config fault or a loss that is not a number; `equal` to
the result of the valid checkpoint; or `taken`, a value that could be valid, such as a changed weight.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import digest
from test_hostile_files import at, corpus, value_of

from deeplightning.callbacks import callback_of
from deeplightning.callbacks.record import Record
from deeplightning.config.examine import load_config
from deeplightning.faults import CheckpointError, ConfigError, RunError
from deeplightning.run.assemble import init_module, init_trainer
from deeplightning.run.train import run_stage

TRAINING = corpus("training.jsonl")
SETTINGS = [
    "model.optimizer={type: torch.optim.Adam, params: {lr: 0.005}}",
    "model.scheduler={type: torch.optim.lr_scheduler.StepLR, params: {step_size: 5}, call: {interval: step}}",
    "train.early_stop={metric: val_loss, patience: 5}",
    "train.checkpoint.monitor=val_loss",
]


@pytest.fixture(scope="module")
def resume(tiny, place, tmp_path_factory):
    """`resume(checkpoint, override, …)` trains in this process from a checkpoint, and returns the run's folder."""
    logs = tmp_path_factory.mktemp("logs")
    logger = f"logger={{type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{logs}', name: runs}}}}"
    plain = ["~logger", logger, "logger.pictures=null", "logger.per_rank_files=false", *SETTINGS]

    def run(checkpoint: Path | None, *overrides: str) -> Path:
        cfg = load_config(tiny, [*plain, *overrides])
        task, data, trainer = init_module(cfg, "model"), init_module(cfg, "data"), init_trainer(cfg)
        run_stage(trainer.fit, task, data, ckpt_path=checkpoint)
        return callback_of(trainer, Record).folder.path

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        yield run


@pytest.fixture(scope="module")
def right(resume):
    """The contents and the folder of a checkpoint inside the second of two epochs."""
    folder = resume(None, "train.max_steps=13")
    return torch.load(folder / "last.ckpt", weights_only=True), folder


@pytest.fixture(scope="module")
def expected(resume, right):
    """The outcome of a run that resumes from it."""
    return outcome(resume(right[1] / "last.ckpt"))


def outcome(folder: Path) -> tuple[Any, ...]:
    files = {path.name: path.read_text() for path in folder.glob("best.json")}
    metrics = folder / "metrics.csv"  # missing if no batch remains
    rows = [row.split(",") for row in metrics.read_text().splitlines()] if metrics.exists() else []
    return digest(folder / "last.ckpt"), digest(folder / "best.ckpt"), files, rows


def tampered(right: tuple[Any, Path], folder: Path, recipe: list[Any]) -> Path:
    """Copy a run, and apply a recipe to its last checkpoint."""
    content = copy.deepcopy(right[0])
    shutil.copytree(right[1], folder)
    for action, path, *values in recipe:
        place, key = at(content, path)
        if action == "set":
            place[key] = value_of(values[0])
        else:
            assert action == "delete", action
            del place[key]
    torch.save(content, folder / "last.ckpt")
    return folder / "last.ckpt"


@pytest.mark.parametrize(
    ("recipe", "answer"),
    [
        pytest.param(*case.values, id=case.id, marks=[pytest.mark.slow] * (number % 48 > 0))
        for number, case in enumerate(TRAINING)
    ],
)
def test_a_training_state_that_was_tampered_with(resume, right, expected, tmp_path, recipe, answer):
    """A tampered state is refused in one line, or has no effect; only a plausible value is accepted."""
    path = tampered(right, tmp_path / "copy", recipe)
    if answer in ("equal", "taken"):
        assert (outcome(resume(path)) == expected) == (answer == "equal")
        return
    with pytest.raises(CheckpointError if answer == "refused" else (ConfigError, RunError)) as caught:
        resume(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000 + 3 * len(str(path))
    assert str(path) in message or answer == "told"


def test_each_change_is_listed_once_and_few_are_accepted():
    assert len({kind.id for kind in TRAINING}) == len(TRAINING) >= 300
    assert sum(kind.values[1] == "taken" for kind in TRAINING) <= 20


def test_an_error_of_the_users_own_code_is_not_blamed_on_the_checkpoint(resume, right, place):
    """If a user's callback refuses the state, the run ends with the callback's exception."""
    own = place / "picky.py"
    own.write_text(PICKY)
    try:
        with pytest.raises(KeyError, match="what this callback wants"):
            resume(right[1] / "last.ckpt", "train.callbacks=[{type: picky.Picky}]")
    finally:
        own.unlink()


@pytest.mark.parametrize(
    ("name", "hook", "call", "text"),
    [
        ("wide", "on_train_batch_end", 'module.log("pair", torch.zeros(2))', "must have a single element"),
        ("bare", "on_fit_start", "torch.optim.Adam([])", "empty parameter list"),
    ],
)
def test_a_call_of_the_users_code_is_not_blamed_on_the_checkpoint(resume, right, place, name, hook, call, text):
    """A library's exception about a call of the user's code is theirs, also in the first step after a resume."""
    own = place / f"{name}.py"
    own.write_text(
        "import pytorch_lightning as pl\nimport torch\n\n\n"
        f"class Own(pl.Callback):\n    def {hook}(self, trainer, module, *rest):\n        {call}\n"
    )
    try:
        with pytest.raises(ValueError, match=text) as caught:
            resume(right[1] / "last.ckpt", f"train.callbacks=[{{type: {name}.Own}}]")
        assert not isinstance(caught.value, CheckpointError)
    finally:
        own.unlink()


PICKY = """\
import pytorch_lightning as pl


class Picky(pl.Callback):
    def on_load_checkpoint(self, trainer, module, checkpoint):
        raise KeyError("what this callback wants")
"""


def test_the_command_ends_with_one_note(train, tmp_path):
    """A tampered checkpoint is exit code 4 with one message and no traceback."""
    folder = train(*SETTINGS, "train.max_steps=13").folder
    content = torch.load(folder / "last.ckpt", weights_only=True)
    for recipe in ([["set", "optimizer_states.0.state.#0.exp_avg", {"tensor": "zeros(3)"}]], [["delete", "loops"]]):
        path = tampered((content, folder), tmp_path / str(len(list(tmp_path.iterdir()))), recipe)
        ended = train(*SETTINGS, f"train.resume_ckpt='{path}'", code=4)
        assert "Traceback" not in ended.err
        assert ended.err.count("error: ") == 1, ended.err
