"""`deeplightning migrate --from`: configs and scripts of six other systems, in the format of their printed examples."""

import sys
from pathlib import Path

import pytest
import yaml

from deeplightning.checks.check import check
from deeplightning.cli import cli
from deeplightning.cli.exit_codes import run_verb
from deeplightning.cli.migrate import text_from
from deeplightning.config.tree import parse, plain

FOREIGN = Path(__file__).parents[1] / "foreign"
EXAMPLES = {
    "stoke": "stoke.py",
    "raysgd": "raysgd.py",
    "bolt": "bolt.py",
    "universal": "universal.yaml",
    "lightning-cli": "lightning_cli.yaml",
    "hydra": "hydra/train.yaml",
}
EXPECTED = {
    "stoke": {
        "data.batch_size": 96,
        "data.loader": {"pin_memory": True},
        "data.num_workers": 4,
        "engine.backend": "ddp",
        "engine.gpus": "auto",
        "engine.sync_batchnorm": True,
        "model.loss": {"type": "torch.nn.CrossEntropyLoss", "params": {"label_smoothing": 0.1}},
        "model.network": {"type": "torchvision.models.resnet18", "params": {"num_classes": 10}},
        "model.optimizer": {"type": "torch.optim.SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "train.accumulator_factor": 4,
        "train.gradient_clip": {"value": 5.0, "norm_type": 2.0},
    },
    "raysgd": {
        "data.batch_size": 64,
        "data.module": {"type": "raysgd.make_data", "params": {}},
        "engine.backend": "ddp",
        "engine.max_restarts": 3,
        "engine.precision": 32,
        "engine.processes": 2,
        "model.loss": {"type": "torch.nn.MSELoss", "params": {}},
        "model.network": {"type": "torch.nn.Linear", "params": {"in_features": 1, "out_features": 3}},
        "model.optimizer": {"type": "torch.optim.SGD", "params": {"lr": 0.02}},
        "model.scheduler.call.interval": "epoch",
        "train.limit_batches.train": 10,
    },
    "bolt": {
        "data.root": "./data",
        "data.batch_size": 128,
        "data.num_workers": 2,
        "engine.gpus": None,
        "logger.progress": "bar",
        "model.network": {"type": "net.LeNet", "params": {}},
        "model.optimizer.params.lr": 0.01,
        "train.num_epochs": 10,
    },
    "universal": {
        "seed": 13,
        "data.module.params.max_length": 128,
        "data.batch_size": 32,
        "engine.backend": "ddp",
        "engine.precision": 16,
        "logger.log_every_n_steps": {"per_epoch": 10},
        "model.optimizer.params.lr": 2e-5,
        "model.scheduler.warmup": 0.1,
        "train.checkpoint.every_n_epochs": 0.5,
        "train.gradient_clip.value": 1.0,
    },
    "lightning-cli": {
        "seed": 7,
        "data.batch_size": 32,
        "data.module": {"type": "deeplightning.data.digits.Digits", "params": {"limit": 200}},
        "engine.precision": "16-mixed",
        "logger.params": {"experiment_name": "digits", "tracking_uri": "sqlite:///mlflow.db"},
        "model.network.params": {"num_classes": 10, "num_channels": 1, "image_size": 8},
        "model.scheduler": {"type": "torch.optim.lr_scheduler.StepLR", "params": {"step_size": 2}},
        "train.accumulator_factor": 2,
        "train.checkpoint": {"monitor": "val_acc", "mode": "max", "save_top_k": 2},
        "train.early_stop": {"metric": "val_loss", "patience": 5},
        "train.gradient_clip.value": 0.5,
    },
    "hydra": {
        "seed": 12345,
        "stages": ["train", "test"],
        "data.batch_size": 128,
        "engine.compile": False,
        "logger.params": {"experiment_name": "train", "tags": {"dev": "true"}},
        "model.module": {"type": "deeplightning.task.img_classif.ImageClassification", "params": {}},
        "model.optimizer.params": {"lr": 0.001, "weight_decay": 0.0},
        "train.early_stop": {"metric": "val_acc", "patience": 3, "mode": "max"},
        "train.num_epochs": 10,
    },
}
"""Keys of the config that is made, at least."""


@pytest.fixture
def answer(monkeypatch, capfd):
    """`answer(words)`: the exit code of `deeplightning WORDS`, its stdout and its stderr."""

    def given(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["deeplightning", *words])
        return run_verb(cli), *capfd.readouterr()

    return given


def at(config: dict, key: str) -> object:
    """The value at a dotted key."""
    for name in key.split("."):
        config = config[name]
    return config


@pytest.mark.parametrize("system", EXAMPLES)
def test_an_example_becomes_a_config(system, tmp_path):
    """`check` passes, or each of its faults is a comment with TODO in the text."""
    path = FOREIGN / EXAMPLES[system]
    text = text_from(path, system)
    config = plain(parse(text, "made.yaml", []))
    assert {key: at(config, key) for key in EXPECTED[system]} == EXPECTED[system]
    made = tmp_path / "made.yaml"
    made.write_text(text)
    todo = " ".join(line for line in text.splitlines() if line.lstrip().startswith("# TODO"))
    for fault in check(made, beside=False).faults:
        assert " ".join(fault.message.split())[:40] in todo, fault


@pytest.mark.parametrize("system", ["lightning-cli", "hydra"])
def test_complete_examples_pass(system, tmp_path):
    """Their parts are in this package, so nothing is missing."""
    made = tmp_path / "made.yaml"
    made.write_text(text_from(FOREIGN / EXAMPLES[system], system))
    assert check(made).faults == []
    assert yaml.safe_load(made.read_text())["version"] == 1


def test_the_new_file_is_beside_the_old_one(answer, tmp_path, monkeypatch):
    """`--write` overwrites nothing; a script is not run; a folder may have a space in its name."""
    folder = tmp_path / "my code"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("s.py").write_text("from stoke import Stoke\nStoke(batch_size_per_device=3)\nraise SystemExit(7)\n")
    code, out, _ = answer("migrate", "--from", "stoke", "s.py", "--write")
    assert (code, out) == (0, "s.deeplightning.yaml\n")
    assert yaml.safe_load(Path("s.deeplightning.yaml").read_text()) == {"version": 1, "data": {"batch_size": 3}}
    code, _, err = answer("migrate", "--from", "stoke", "s.py", "--write")
    assert (code, err.count("\n")) == (3, 1)
    assert "s.deeplightning.yaml: already there and not overwritten" in err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "def (:\n", "a.py:1:1: not Python: "),
        ("a.yaml", "- 1\n", "a.yaml: this file holds no mapping of settings; is this the right file?"),
        ("a.yaml", "defaults: [a]\n", "a.yaml: this file is in its own defaults list; remove it there"),
        ("a.yaml", "defaults: [{data: gone}]\n", "gone.yaml: there is no such config file"),
    ],
)
def test_a_file_that_cannot_be_read(answer, tmp_path, monkeypatch, name, text, message):
    """Exit code 2 and one sentence with its place."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    code, _, err = answer("migrate", "--from", "hydra", name)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_a_system_that_is_not_known(answer):
    """The message lists those that are."""
    code, _, err = answer("migrate", "--from", "keras", "a.py")
    assert code == 2
    assert "'lightning-cli'" in err
