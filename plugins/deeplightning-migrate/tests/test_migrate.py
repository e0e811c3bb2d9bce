"""`deeplightning migrate --from`: configs and scripts of other systems, in the format of their printed examples."""

from pathlib import Path

import pytest
import yaml
from deeplightning_migrate.lightning import convert as text_of_lightning
from deeplightning_migrate.older_systems import FLAGS, text_from

from deeplightning.config.examine import check
from deeplightning.config.tree import parse, plain
from deeplightning.faults import ConfigError

FOREIGN = Path(__file__).with_name("foreign")
EXAMPLES = {
    "stoke": "stoke.py",
    "raysgd": "raysgd.py",
    "bolt": "bolt.py",
    "universal": "universal.yaml",
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
}
"""Keys of the config that is made, at least."""


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


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("trainer: {overfit_batches: 3}", "c.yaml:4:11: trainer.overfit_batches", "3 has no key here"),
        ("trainer: {min_epochs: 2, callbacks: [{class_path: a.B}]}", "c.yaml:4:11: trainer.min_epochs", "no key here"),
        ("trainer: {val_check_interval: 10}", "c.yaml:4:11: trainer.val_check_interval", "write a share such as 0.5"),
        ("trainer: {max_epochs: -1}", "c.yaml:4:11: trainer.max_epochs", "training needs a limit"),
        ("trainer: {devices: 1}", "c.yaml:4:11: trainer.accelerator", "write cpu or gpu"),
        ("trainer: {accelerator: gpu, devices: many}", "c.yaml:4:29: trainer.devices", "'many' is not a number"),
        ("trainer: {accelerator: tpu}", "c.yaml:4:11: trainer.accelerator", "`tpu` is not supported"),
        ("trainer: {strategy: {class_path: a.B}}", "c.yaml:4:11: trainer.strategy", "engine.backend takes ddp"),
        ("trainer: {deterministic: warn}", "c.yaml:4:11: trainer.deterministic", "`warn` has no counterpart"),
        ("trainer: {max_epoch: 3}", "c.yaml:4:11: trainer.max_epoch", "is not an argument of Lightning's Trainer"),
        ("early: {patience: 3}", "c.yaml:4:1: early", "only your Python code reads it"),
        ("optimizer: {lr: 0.1}", "c.yaml:4:1: optimizer", "names no class"),
        (
            "optimizer: {class_path: Adam, init_args: {lt: 0.1}}",
            "c.yaml:4:1: model.module.params.optimizer",
            "mean lr?",
        ),
        ("model: {hidden: 3}", "c.yaml:4:1: model", "names no class"),
        (
            "data: {class_path: parts.Data, init_args: {size: '${a.b}'}}",
            "c.yaml:4:44: data.size",
            "`${a.b}` has no value",
        ),
        ("data: {class_path: parts.Data, init_args: {sice: 3}}", "c.yaml:4:1: data.module.params.sice", "mean size?"),
        ("test: {data: {class_path: parts.Other}}", "c.yaml:4:8: test.data", "differs from that of `fit`"),
    ],
)
def test_what_cannot_be_converted_is_a_fault_with_its_line(answer, here, text, place, words):
    """Exit code 2, and no file is written; what has no effect on the training is no fault."""
    head = "# comment\nmodel: {class_path: parts.Model}\ndata: {class_path: parts.Data}\n"
    kept = [line for line in head.splitlines() if line.partition(":")[0] != text.partition(":")[0]]
    (here / "c.yaml").write_text("\n".join([*["#"] * (3 - len(kept)), *kept, text]) + "\n")
    code, out, err = answer("migrate", "--from", "lightning-cli", "c.yaml", "--write")
    assert (code, out) == (2, "")
    assert place in err
    assert words in err
    assert not (here / "c.deeplightning.yaml").exists()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with modules of a user."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text(
        "import pytorch_lightning as pl\n\n\n"
        "class Model(pl.LightningModule):\n    def __init__(self, loss=None):\n        super().__init__()\n\n\n"
        "class Data(pl.LightningDataModule):\n    def __init__(self, size=1):\n        super().__init__()\n"
    )
    return tmp_path


def test_values_mean_what_their_tool_reads(here):
    """YAML 1.1's `yes` and `0x10`, a number as a key, an absent seed and an absent length."""
    (here / "c.yaml").write_text(
        "trainer: {enable_progress_bar: no, sync_batchnorm: yes, precision: 16-mixed}\n"
        "model: {class_path: parts.Model, init_args: {loss: {1: 0x10, a: 1e-3, b: 'yes'}}}\n"
        "data: {class_path: parts.Data}\n"
    )
    made = plain(parse(text_of_lightning([here / "c.yaml"], "lightning-cli"), "made.yaml", []))
    assert at(made, "model.module.params.loss") == {1: 16, "a": 0.001, "b": "yes"}
    assert made["engine"] == {"gpus": "auto", "sync_batchnorm": True, "precision": "16-mixed"}
    assert (made["seed"], made["train"], made["logger"]) == (None, {"num_epochs": 1000}, {"progress": "off"})


def test_sections_of_an_optimizer_belong_to_the_model(here):
    """Short names are those of torch; Lightning's own plateau schedule has the metric that it watches."""
    (here / "c.yaml").write_text(
        "trainer: {accelerator: cpu}\nmodel: parts.Model\ndata: {class_path: parts.Data}\noptimizer: Adam\n"
        "lr_scheduler: {class_path: ReduceLROnPlateau, init_args: {monitor: val/loss, patience: 1}}\n"
    )
    made = plain(parse(text_of_lightning([here / "c.yaml"], "lightning-cli"), "made.yaml", []))
    schedule = {"type": "pytorch_lightning.cli.ReduceLROnPlateau", "params": {"monitor": "val/loss", "patience": 1}}
    assert at(made, "model.module.params") == {
        "module": {"type": "parts.Model"},
        "optimizer": {"type": "torch.optim.Adam"},
        "lr_scheduler": schedule,
    }
    (here / "c.yaml").write_text(f"{(here / 'c.yaml').read_text()}".replace("optimizer: Adam\n", ""))
    text = text_of_lightning([here / "c.yaml"], "lightning-cli")
    assert "# lr_scheduler: " in text
    assert "with_optimizer" not in text


SCRIPT = """\
from parts import Data, Model
from pytorch_lightning.cli import LightningCLI


class CLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        {inside}


if __name__ == "__main__":
    CLI(Model, Data{given})
"""


@pytest.mark.parametrize(
    ("inside", "given", "key", "value"),
    [
        ("pass", "", "model.module", {"type": "parts.Model", "params": {"loss": 2}}),
        ("parser.link_arguments('model.loss', 'data.size')", "", "data.module.params.size", 2),
        ("parser.link_arguments('data.size', 'model.loss')", "", "model.module.params.loss", 1),
        ("parser.set_defaults({'data.size': 4, 'model.loss': 5})", "", "data.module.params.size", 4),
        ("parser.set_defaults({'data.size': 4, 'model.loss': 5})", "", "model.module.params.loss", 2),
        ("pass", ", trainer_defaults={'max_epochs': 3}, seed_everything_default=4", "train.num_epochs", 3),
        ("pass", ", trainer_defaults={'max_epochs': 3}, seed_everything_default=4", "seed", 4),
    ],
)
def test_what_the_python_file_gives_to_lightning_cli_is_in_the_config(here, inside, given, key, value):
    """Classes, links, defaults below the config's values; the file is found beside the config and not run."""
    (here / "main.py").write_text(SCRIPT.format(inside=inside, given=given))
    (here / "c.yaml").write_text("trainer: {accelerator: cpu}\nmodel: {loss: 2}\n")
    assert at(plain(parse(text_of_lightning([here / "c.yaml"], "lightning-cli"), "made.yaml", [])), key) == value


@pytest.mark.parametrize(
    ("inside", "given", "words"),
    [
        ("parser.link_arguments('data.size', 'model.loss', compute_fn=len)", "", "7:9: this link is computed"),
        ("parser.link_arguments('data.size', 'model.loss', apply_on='instantiate')", "", "7:9: this link is computed"),
        ("parser.link_arguments('data.no', 'model.loss')", "", "7:9: `data.no` has no value that can be read"),
        ("parser.add_optimizer_args(Adam, link_to='model.loss')", "", "7:49: `link_to` has no key here"),
        ("pass", ", trainer_defaults={'callbacks': [Data()]}", "11:39: these defaults are not plain values"),
        ("pass", ", trainer_class=Other", "11:36: `trainer_class` of LightningCLI has no key here"),
        ("pass\n\n    def before_fit(self):\n        pass", "", "9:5: `before_fit` may change what is trained"),
        ("pass\n\n\nCLI(Model)", "", "10:1 and main.py:14:5 call LightningCLI; add the Python file that trains"),
    ],
)
def test_what_the_python_file_computes_is_a_fault_at_its_line(here, inside, given, words):
    (here / "main.py").write_text(SCRIPT.format(inside=inside, given=given))
    (here / "c.yaml").write_text("trainer: {accelerator: cpu}\n")
    with pytest.raises(ConfigError) as refused:
        text_of_lightning([here / "c.yaml"], "lightning-cli")
    assert f"main.py:{words}" in str(refused.value)


def test_one_of_several_python_files_is_named(here):
    """Then the others do not count."""
    for name in ("main.py", "tune.py"):
        (here / name).write_text(SCRIPT.format(inside=f"parser.set_defaults({{'model.loss': '{name}'}})", given=""))
    (here / "c.yaml").write_text("trainer: {accelerator: cpu}\n")
    with pytest.raises(ConfigError, match=r"main.py:11:5 and tune.py:11:5 call LightningCLI"):
        text_of_lightning([here / "c.yaml"], "lightning-cli")
    assert "loss: tune.py" in text_of_lightning([here / "c.yaml", here / "tune.py"], "lightning-cli")


def test_a_reference_into_another_file_is_refused(here):
    """LightningCLI takes the value of the first file or of the last, as its parser mode says."""
    text = "trainer: {accelerator: cpu}\nmodel: {class_path: parts.Model, init_args: {loss: 1}}\n"
    (here / "c.yaml").write_text(
        f"{text}data: {{class_path: parts.Data, init_args: {{size: '${{model.init_args.loss}}'}}}}\n"
    )
    (here / "over.yaml").write_text("model: {init_args: {loss: 2}}\n")
    assert "size: 1" in text_of_lightning([here / "c.yaml"], "lightning-cli")
    with pytest.raises(ConfigError, match=r"c.yaml:3:44: data.size: refers to a value of another file"):
        text_of_lightning([here / "c.yaml", here / "over.yaml"], "lightning-cli")


def test_a_partial_that_would_be_built_is_refused(here):
    """Optimizers and annotated callables alone stand for callables."""
    (here / "c.yaml").write_text(
        "trainer: {accelerator: cpu}\ndata: {_target_: parts.Data}\nmodel:\n  _target_: parts.Model\n"
        "  loss: {_target_: torch.nn.MSELoss, _partial_: true}\n"
    )
    with pytest.raises(ConfigError, match=r"c.yaml:5:3: model.loss: `_partial_` needs a parameter that is annotated"):
        text_of_lightning([here / "c.yaml"], "hydra")


@pytest.mark.parametrize(
    ("text", "system"),
    [
        ("seed_everything: 1\ntrainer: {max_epochs: 1}\n", "lightning-cli"),
        ("trainer: {max_epochs: 1}\nmodel: {class_path: a.B}\n", "lightning-cli"),
        ("fit: {model: {class_path: a.B}}\n", "lightning-cli"),
        ("defaults: [_self_, {data: a}]\n", "hydra"),
        ("trainer: {_target_: a.B}\nmodel: {_target_: a.B}\n", "hydra"),
    ],
)
def test_a_config_of_another_tool_is_one_note(answer, here, text, system):
    """With the command that converts it, for every verb that takes a CONFIG."""
    (here / "c.yaml").write_text(text)
    for verb in ("check", "train", "explain"):
        code, _, err = answer(verb, "c.yaml", "train.num_epochs=1")
        assert (code, err.count("\n")) == (2, 1)
        assert f"`deeplightning migrate --from {system} c.yaml --write` converts it" in err


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
    assert "s.deeplightning.yaml: already exists and is not overwritten" in err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "def (:\n", "a.py:1:1: not Python: "),
        ("a.yaml", "- 1\n", "a.yaml: this file has no mapping of settings; is this the right file?"),
        ("a.yaml", "defaults: [a]\n", "a.yaml: this file is in its own defaults list; remove it there"),
        ("a.yaml", "defaults: [{data: gone}]\n", "gone.yaml: there is no such config file"),
    ],
)
def test_a_file_that_cannot_be_read(answer, tmp_path, monkeypatch, name, text, message):
    """Exit code 2 and one sentence with its place."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    code, _, err = answer("migrate", "--from", "stoke" if name == "a.py" else "hydra", name)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_a_system_that_is_not_known(answer):
    """The message lists those that are."""
    code, _, err = answer("migrate", "--from", "keras", "a.py")
    assert code == 2
    assert "'lightning-cli'" in err


@pytest.mark.parametrize("flags", [("is_distributed", "use_fairscale_model_sharding"), ("use_fp16", "use_native_fp16")])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_flag_that_is_off_does_not_undo_another_one(flags, is_first, tmp_path):
    """Several flags set one key; their order does not matter, and nothing is left to review."""
    path = tmp_path / "params.yaml"
    values = {flags[0]: is_first, flags[1]: not is_first}
    on = next(name for name, value in values.items() if value)
    key, expected = FLAGS[on][0], FLAGS[on][1][True]
    for order in (flags, flags[::-1]):
        path.write_text("dist-params:\n" + "".join(f"  {name}: {str(values[name]).lower()}\n" for name in order))
        text = text_from(path, "universal")
        assert at(plain(parse(text, "made.yaml", [])), key) == expected
        assert "is already" not in text


@pytest.mark.parametrize("text", [None, "def (:  # CLI\n"])
def test_a_named_python_file_that_cannot_be_read_is_a_fault(here, text):
    """Another file beside it is not read in its place."""
    (here / "main.py").write_text(SCRIPT.format(inside="pass", given=", trainer_defaults={'max_epochs': 3}"))
    (here / "c.yaml").write_text(
        "trainer: {accelerator: cpu}\nmodel: {class_path: parts.Model}\ndata: {class_path: parts.Data}\n"
    )
    if text is not None:
        (here / "mian.py").write_text(text)
    with pytest.raises(ConfigError, match=r"mian\.py.*no Python file of this name"):
        text_of_lightning([here / "mian.py", here / "c.yaml"], "lightning-cli")


def test_a_checkpoint_without_a_monitor_and_a_link_from_nothing(here):
    """Both are legal for LightningCLI."""
    head = "model: {class_path: parts.Model}\n"
    saved = "callbacks: [{class_path: ModelCheckpoint, init_args: {monitor: null, save_last: true}}]"
    (here / "c.yaml").write_text(f"{head}data: {{class_path: parts.Data}}\ntrainer: {{accelerator: cpu, {saved}}}\n")
    assert "checkpoint" in text_of_lightning([here / "c.yaml"], "lightning-cli")
    inside = "parser.link_arguments('data.init_args.size', 'model.init_args.loss')"
    (here / "main.py").write_text(SCRIPT.format(inside=inside, given="").replace("CLI(Model, Data)", "CLI()"))
    (here / "c.yaml").write_text(f"{head}trainer: {{accelerator: cpu}}\n")
    with pytest.raises(ConfigError, match=r"`data\.init_args\.size` has no value that can be read"):
        text_of_lightning([here / "c.yaml"], "lightning-cli")
