"""`deeplightning migrate --from` converts configs and scripts of other systems, like those in their documentation."""

from pathlib import Path

import pytest
import yaml
from deeplightning_migrate.lightning import convert as text_of_lightning
from deeplightning_migrate.older_systems import FLAGS, text_from

from deeplightning.config.examine import check
from deeplightning.config.tree import parse, plain
from deeplightning.faults import ConfigError

FOREIGN = Path(__file__).with_name("foreign")
EXAMPLES = {"stoke": "stoke.py", "raysgd": "raysgd.py", "bolt": "bolt.py", "universal": "universal.yaml"}
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
"""Keys that the converted config must have, among others."""


def at(text: str, key: str) -> object:
    """Return the value at a dotted key of a converted config."""
    config = plain(parse(text, "made.yaml", []))
    for name in key.split("."):
        config = config[name]
    return config


@pytest.mark.parametrize("system", EXAMPLES)
def test_an_example_becomes_a_config(system, tmp_path):
    """`check` reports only errors that the text marks with a TODO comment."""
    path = FOREIGN / EXAMPLES[system]
    text = text_from(path, system)
    assert {key: at(text, key) for key in EXPECTED[system]} == EXPECTED[system]
    made = tmp_path / "made.yaml"
    made.write_text(text)
    todo = " ".join(line for line in text.splitlines() if line.lstrip().startswith("# TODO"))
    for fault in check(made, beside=False).faults:
        assert " ".join(fault.message.split())[:40] in todo, fault


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("trainer: {overfit_batches: 3}", "11: trainer.overfit_batches", "3 has no key here"),
        ("trainer: {min_epochs: 2, callbacks: [{class_path: a.B}]}", "11: trainer.min_epochs", "no key here"),
        ("trainer: {val_check_interval: 10}", "11: trainer.val_check_interval", "write a share such as 0.5"),
        ("trainer: {max_epochs: -1}", "11: trainer.max_epochs", "training needs a limit"),
        ("trainer: {devices: 1}", "11: trainer.accelerator", "write cpu or gpu"),
        ("trainer: {accelerator: gpu, devices: many}", "29: trainer.devices", "'many' is not a number"),
        ("trainer: {accelerator: tpu}", "11: trainer.accelerator", "`tpu` is not supported"),
        ("trainer: {strategy: {class_path: a.B}}", "11: trainer.strategy", "engine.backend takes ddp"),
        ("trainer: {deterministic: warn}", "11: trainer.deterministic", "`warn` has no counterpart"),
        ("trainer: {max_epoch: 3}", "11: trainer.max_epoch", "is not an argument of Lightning's Trainer"),
        ("early: {patience: 3}", "1: early", "only your Python code reads it"),
        ("optimizer: {lr: 0.1}", "1: optimizer", "names no class"),
        ("optimizer: {class_path: Adam, init_args: {lt: 0.1}}", "1: model.module.params.optimizer", "mean lr?"),
        ("model: {hidden: 3}", "1: model", "names no class"),
        ("data: {class_path: parts.Data, init_args: {size: '${a.b}'}}", "44: data.size", "`${a.b}` has no value"),
        ("data: {class_path: parts.Data, init_args: {sice: 3}}", "1: data.module.params.sice", "mean size?"),
        ("test: {data: {class_path: parts.Other}}", "8: test.data", "differs from that of `fit`"),
    ],
)
def test_what_cannot_be_converted_is_a_fault_with_its_line(answer, here, text, place, words):
    """The exit code is 2, the error has file, line, column and key, and no file is written."""
    head = "# comment\nmodel: {class_path: parts.Model}\ndata: {class_path: parts.Data}\n"
    kept = [line for line in head.splitlines() if line.partition(":")[0] != text.partition(":")[0]]
    (here / "c.yaml").write_text("\n".join([*["#"] * (3 - len(kept)), *kept, text]) + "\n")
    code, out, err = answer("migrate", "--from", "lightning-cli", "c.yaml", "--write")
    assert (code, out) == (2, "")
    assert f"c.yaml:4:{place}" in err
    assert words in err
    assert not (here / "c.deeplightning.yaml").exists()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Working directory with user modules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text(
        "import pytorch_lightning as pl\n\n\n"
        "class Model(pl.LightningModule):\n    def __init__(self, loss=None):\n        super().__init__()\n\n\n"
        "class Data(pl.LightningDataModule):\n    def __init__(self, size=1):\n        super().__init__()\n"
    )
    return tmp_path


def convert(text, *others, system="lightning-cli"):
    """Convert c.yaml with this text, and other files, in the working directory."""
    Path("c.yaml").write_text(text)
    return text_of_lightning([Path.cwd() / name for name in ("c.yaml", *others)], system)


def test_values_mean_what_their_tool_reads(here):
    """YAML 1.1's `yes` and `0x10`, a number as a key, and Lightning's default seed and length are converted."""
    made = convert(
        "trainer: {enable_progress_bar: no, sync_batchnorm: yes, precision: 16-mixed}\n"
        "model: {class_path: parts.Model, init_args: {loss: {1: 0x10, a: 1e-3, b: 'yes'}}}\n"
        "data: {class_path: parts.Data}\n"
    )
    assert at(made, "model.module.params.loss") == {1: 16, "a": 0.001, "b": "yes"}
    assert at(made, "engine") == {"gpus": "auto", "sync_batchnorm": True, "precision": "16-mixed"}
    assert [at(made, key) for key in ("seed", "train", "logger")] == [None, {"num_epochs": 1000}, {"progress": "off"}]


def test_sections_of_an_optimizer_belong_to_the_model(here):
    """Short names are classes of torch; Lightning's plateau schedule keeps its `monitor`."""
    text = (
        "trainer: {accelerator: cpu}\nmodel: parts.Model\ndata: {class_path: parts.Data}\noptimizer: Adam\n"
        "lr_scheduler: {class_path: ReduceLROnPlateau, init_args: {monitor: val/loss, patience: 1}}\n"
    )
    schedule = {"type": "pytorch_lightning.cli.ReduceLROnPlateau", "params": {"monitor": "val/loss", "patience": 1}}
    expected = {"module": {"type": "parts.Model"}, "optimizer": {"type": "torch.optim.Adam"}, "lr_scheduler": schedule}
    assert at(convert(text), "model.module.params") == expected
    text = convert(text.replace("optimizer: Adam\n", ""))
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
    ("inside", "given", "expected"),
    [
        ("pass", "", {"model.module": {"type": "parts.Model", "params": {"loss": 2}}}),
        ("parser.link_arguments('model.loss', 'data.size')", "", {"data.module.params.size": 2}),
        ("parser.link_arguments('data.size', 'model.loss')", "", {"model.module.params.loss": 1}),
        ("parser.set_defaults({'data.size': 4, 'model.loss': 5})", "",
         {"data.module.params.size": 4, "model.module.params.loss": 2}),
        ("pass", ", trainer_defaults={'max_epochs': 3}, seed_everything_default=4", {"train.num_epochs": 3, "seed": 4}),
    ],
)  # fmt: skip
def test_what_the_python_file_gives_to_lightning_cli_is_in_the_config(here, inside, given, expected):
    """Classes, links, and defaults that the config overrides are read from the file beside it without running it."""
    (here / "main.py").write_text(SCRIPT.format(inside=inside, given=given))
    text = convert("trainer: {accelerator: cpu}\nmodel: {loss: 2}\n")
    assert {key: at(text, key) for key in expected} == expected


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
    """Values that only running the file would give are not guessed."""
    (here / "main.py").write_text(SCRIPT.format(inside=inside, given=given))
    with pytest.raises(ConfigError) as refused:
        convert("trainer: {accelerator: cpu}\n")
    assert f"main.py:{words}" in str(refused.value)


def test_one_of_several_python_files_is_named(here):
    """The error names all Python files that call LightningCLI; if one is given, only that one is read."""
    for name in ("main.py", "tune.py"):
        (here / name).write_text(SCRIPT.format(inside=f"parser.set_defaults({{'model.loss': '{name}'}})", given=""))
    with pytest.raises(ConfigError, match=r"main.py:11:5 and tune.py:11:5 call LightningCLI"):
        convert("trainer: {accelerator: cpu}\n")
    assert "loss: tune.py" in convert("trainer: {accelerator: cpu}\n", "tune.py")


def test_a_reference_into_another_file_is_refused(here):
    """LightningCLI's parser mode decides whether the value of the first file or of the last is used."""
    text = "trainer: {accelerator: cpu}\nmodel: {class_path: parts.Model, init_args: {loss: 1}}\n"
    text += "data: {class_path: parts.Data, init_args: {size: '${model.init_args.loss}'}}\n"
    (here / "over.yaml").write_text("model: {init_args: {loss: 2}}\n")
    assert "size: 1" in convert(text)
    with pytest.raises(ConfigError, match=r"c.yaml:3:44: data.size: refers to a value of another file"):
        convert(text, "over.yaml")


def test_a_partial_that_would_be_built_is_refused(here):
    """Only optimizers and parameters annotated as callables stay partial."""
    text = "trainer: {accelerator: cpu}\ndata: {_target_: parts.Data}\nmodel:\n  _target_: parts.Model\n"
    with pytest.raises(ConfigError, match=r"c.yaml:5:3: model.loss: `_partial_` needs a parameter that is annotated"):
        convert(f"{text}  loss: {{_target_: torch.nn.MSELoss, _partial_: true}}\n", system="hydra")


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
    """`check`, `train` and `explain` report the command that converts it."""
    (here / "c.yaml").write_text(text)
    for verb in ("check", "train", "explain"):
        code, _, err = answer(verb, "c.yaml", "train.num_epochs=1")
        assert (code, err.count("\n")) == (2, 1)
        assert f"`deeplightning migrate --from {system} c.yaml --write` converts it" in err


def test_the_new_file_is_beside_the_old_one(answer, tmp_path, monkeypatch):
    """`--write` overwrites no file, scripts are not run, and the folder's name may contain a space."""
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
    """The exit code is 2, and one line names the place."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    code, _, err = answer("migrate", "--from", "stoke" if name == "a.py" else "hydra", name)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_a_system_that_is_not_known(answer):
    """An unknown system is rejected with the known ones."""
    code, _, err = answer("migrate", "--from", "keras", "a.py")
    assert code == 2
    assert "'lightning-cli'" in err


@pytest.mark.parametrize("flags", [("is_distributed", "use_fairscale_model_sharding"), ("use_fp16", "use_native_fp16")])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_flag_that_is_off_does_not_undo_another_one(flags, is_first, tmp_path):
    """If several flags set one key, their order does not matter, and no TODO remains."""
    path = tmp_path / "params.yaml"
    values = {flags[0]: is_first, flags[1]: not is_first}
    on = next(name for name, value in values.items() if value)
    key, expected = FLAGS[on][0], FLAGS[on][1][True]
    for order in (flags, flags[::-1]):
        path.write_text("dist-params:\n" + "".join(f"  {name}: {str(values[name]).lower()}\n" for name in order))
        text = text_from(path, "universal")
        assert at(text, key) == expected
        assert "is already" not in text


@pytest.mark.parametrize("text", [None, "def (:  # CLI\n"])
def test_a_named_python_file_that_cannot_be_read_is_a_fault(here, text):
    """Another file beside it is not used instead."""
    (here / "main.py").write_text(SCRIPT.format(inside="pass", given=", trainer_defaults={'max_epochs': 3}"))
    if text is not None:
        (here / "mian.py").write_text(text)
    with pytest.raises(ConfigError, match=r"mian\.py.*no Python file of this name"):
        convert(
            "trainer: {accelerator: cpu}\nmodel: {class_path: parts.Model}\ndata: {class_path: parts.Data}\n", "mian.py"
        )


def test_a_checkpoint_without_a_monitor_and_a_link_from_nothing(here):
    """A checkpoint without a monitor is converted, and a link from a value that does not exist is an error."""
    head = "model: {class_path: parts.Model}\n"
    saved = "callbacks: [{class_path: ModelCheckpoint, init_args: {monitor: null, save_last: true}}]"
    text = f"{head}data: {{class_path: parts.Data}}\ntrainer: {{accelerator: cpu, {saved}}}\n"
    assert "checkpoint" in convert(text)
    inside = "parser.link_arguments('data.init_args.size', 'model.init_args.loss')"
    (here / "main.py").write_text(SCRIPT.format(inside=inside, given="").replace("CLI(Model, Data)", "CLI()"))
    with pytest.raises(ConfigError, match=r"`data\.init_args\.size` has no value that can be read"):
        convert(f"{head}trainer: {{accelerator: cpu}}\n")


def test_callbacks_of_hydra_may_be_a_list(here):
    """None of them is lost, and an entry without a class is left out, as the template does."""
    head = "trainer: {accelerator: cpu}\nmodel: {_target_: parts.Model}\ndata: {_target_: parts.Data}\n"
    timer = '{_target_: lightning.pytorch.callbacks.Timer, duration: "00:01:00:00"}'
    expected = [{"type": "pytorch_lightning.callbacks.Timer", "params": {"duration": "00:01:00:00"}}]
    for callbacks in (f"[{timer}]", f"{{timer: {timer}}}"):
        made = convert(f"{head}callbacks: {callbacks}\nlogger: {{wandb: {{group: mnist}}}}\n", system="hydra")
        assert at(made, "train.callbacks") == expected


def test_an_experiment_of_hydra_that_is_a_file_of_its_own_chooses_options(here):
    """Its overrides apply to the defaults lists of the files before it."""
    files = {
        "data/a": "_target_: parts.Data\nsize: 1\n",
        "data/b": "_target_: parts.Data\nsize: 2\n",
        "experiment/e": "# @package _global_\ndefaults:\n  - override /data: b\nseed: 3\n",
    }
    for name, text in files.items():
        path = Path(f"{name}.yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    text = "defaults: [{data: a}]\ntrainer: {accelerator: cpu}\nmodel: {_target_: parts.Model}\n"
    made = convert(text, "experiment/e.yaml", system="hydra")
    assert (at(made, "data.module.params.size"), at(made, "seed")) == (2, 3)


def test_a_section_train_of_hydra_is_no_flag(here):
    """It is refused like any section that only Python code reads."""
    text = "trainer: {accelerator: cpu}\nmodel: {_target_: parts.Model}\ndata: {_target_: parts.Data}\n"
    with pytest.raises(ConfigError, match="train: is not a section of Lightning"):
        convert(f"{text}train: {{init_from: a.pt}}\n", system="hydra")
    assert at(convert(f"{text}train: false\ntest: true\n", system="hydra"), "stages") == ["test"]


def test_an_override_of_hydra_may_list_several_options(here):
    """Each of them is composed, as in Hydra."""
    Path("data").mkdir()
    Path("data/a.yaml").write_text("_target_: parts.Data\n")
    Path("data/b.yaml").write_text("size: 2\n")
    base = "defaults: [{data: null}]\ntrainer: {accelerator: cpu}\nmodel: {_target_: parts.Model}\n"
    Path("base.yaml").write_text(base)
    made = convert("defaults: [base, {override /data: [a, b]}]\n", system="hydra")
    assert at(made, "data.module") == {"type": "parts.Data", "params": {"size": 2}}


def test_an_empty_option_file_of_hydra_has_no_settings(here):
    """An option such as `callbacks/none.yaml` may be an empty file."""
    Path("callbacks").mkdir()
    Path("callbacks/none.yaml").touch()
    parts = "trainer: {accelerator: cpu}\nmodel: {_target_: parts.Model}\ndata: {_target_: parts.Data}\n"
    made = convert(f"defaults: [{{callbacks: none}}, _self_]\n{parts}", system="hydra")
    assert at(made, "model.module.type") == "parts.Model"
    assert "callbacks" not in made


def test_the_default_behind_a_link_is_read_from_the_folder_of_the_project(here):
    """The class of a linked argument is found beside its config, wherever the command runs."""
    inside = "parser.add_lightning_class_args(apart.Freezing, 'freezing')\n        "
    inside += "parser.link_arguments('freezing.size', 'model.loss')"
    script = "import apart\n" + SCRIPT.format(inside=inside, given="")
    project = here / "apart"
    project.mkdir()
    (project / "main.py").write_text(script)
    head = "from pytorch_lightning import Callback\n\n\nclass Freezing(Callback):\n"
    (project / "apart.py").write_text(f"{head}    def __init__(self, size: int = 7):\n        self.size = size\n")
    (project / "c.yaml").write_text("trainer: {accelerator: cpu}\nfreezing: {}\n")
    made = text_of_lightning([project / "c.yaml", project / "main.py"], "lightning-cli")
    assert at(made, "model.module.params.loss") == 7
