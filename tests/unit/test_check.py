"""`check` reports all errors of a config at once, each with its position: `deeplightning.config.examine`."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from checks import GOOD, load
from commands import real

from deeplightning import faults
from deeplightning.config import strategy
from deeplightning.config.examine import examine

BY_SOURCE, BY_IMPORTING = (False,), (True,)


@pytest.fixture(autouse=True)
def here(here: Path) -> Path:
    """A working directory with a valid config, `c.yaml`."""
    Path("c.yaml").write_text(GOOD)
    return here


def notes(*overrides: str, text: str = GOOD, ways: tuple[bool, ...] = (*BY_SOURCE, *BY_IMPORTING)) -> list[str]:
    """Return the errors of a config, `position: key: message` each. By default they must be the same whether the
    targets are read as source or imported."""
    Path("c.yaml").write_text(text)
    reports = [examine("c.yaml", list(overrides), importing=importing) for importing in ways]
    if len(ways) == 2:
        assert reports[0].unchecked == []
        assert reports[0].faults == reports[1].faults
    return [str(fault) for fault in reports[0].faults]


def note(*overrides: str, **how: Any) -> str:
    """Return the only error, without its position."""
    (one,) = notes(*overrides, **how)
    return one.removeprefix(f"override {overrides[-1]}: ") if overrides else one


# ---- keys and values


@pytest.mark.parametrize(
    ("override", "words"),
    [
        # unknown, at any depth, with the nearest word
        ("train.num_epoch=2", "train.num_epoch: unknown key. Did you mean num_epochs? Known here: num_epochs, max_"),
        ("model.loss={a: {type: torch.nn.MSELoss, wieght: 2}}", "model.loss.a.wieght: unknown key. Did you mean"),
        ("train.callbacks=[{type: pytorch_lightning.callbacks.Timer, parms: 1}]", "train.callbacks.0.parms: unknown"),
        ("zzz=1", "zzz: unknown key. Known here: version, seed, stages"),
        # words of older configs
        ("data.total_batch_size=8", "Here it is called data.batch_size (it counts per process)."),
        # of another type
        ("seed='5'", "seed: must be a whole number or null, not the text '5'"),
        ("seed=true", "seed: must be a whole number or null, not true"),
        ("train.export=off", "train.export: must be true or false, not the text 'off'"),
        ("data.root=5", "data.root: must be a text or null, not the number 5"),
        ("stages=train", "stages: must be a list, not the text 'train'"),
        ("engine.env={A: 1}", "engine.env.A: must be a text, not the number 1"),
        ("train=5", "train: must be a mapping of num_epochs, max_steps,"),
        ("model.network.params=5", "model.network.params: must be a mapping, not the number 5"),
        # not one of the choices
        ("engine.backend=deepspeed_stage_4", "not the text 'deepspeed_stage_4'. Did you mean deepspeed_stage_3?"),
        ("model.scheduler={type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 1}, call: {interval: batch}}",
         "model.scheduler.call.interval: must be one of epoch, step, not the text 'batch'. Did you mean step?"),
        ("engine.gpus=all", "engine.gpus: must be a whole number or a list or one of auto or null, not the text"),
        # out of range
        ("serve.port=70000", "serve.port: must be at most 65535, not 70000"),
        ("engine.gpus=-1", "engine.gpus: must be at least 0, not -1"),
        ("engine.gpus=GPU-1", "must be a whole number or a list or one of auto or null, not the text 'GPU-1'"),
        ("engine.gpus=[cuda:0]", "engine.gpus.0: must be a whole number, not the text 'cuda:0'. Did you mean [0]?"),
        ("engine.gpus=['0']", "engine.gpus.0: must be a whole number, not the text '0'"),
        ("engine.gpus=[0, GPU-1]", "engine.gpus.1: must be a whole number, not the text 'GPU-1'"),
        ("train.gradient_clip={value: .nan}", "train.gradient_clip.value: must be at least 0, not nan"),
        ("train.limit_batches={train: 1.5}", "whole number of batches, or a fraction between 0 and 1, not 1.5"),
        ("train.val_every_n_epoch=1.5", "must be a whole number of epochs, or a fraction between 0 and 1, not 1.5"),
        ("train.checkpoint.every_n_epochs=.inf", "whole number of epochs, or a fraction between 0 and 1, not inf"),
        ("data.num_splits=1", "data.num_splits: must be at least 2, not 1"),
        ("stages=[]", "stages: nothing to do: give at least one of train, validate, test, predict"),
        # machines that nothing starts
        ("engine.num_nodes=2", "engine.num_nodes: 2 machines must be started: by torchrun, Slurm, "),
        # missing
        ("~train.num_epochs", "train.num_epochs: missing: how long to train, for example `num_epochs: 10`"),
        ("~data.batch_size", "data.batch_size: missing: samples per step and process; for example `batch_size: 64`"),
        ("~data.module", "data.module: missing: a LightningDataModule; a first parameter named `cfg` gets the whole"),
        ("~model.optimizer.params", "model.optimizer.params: missing: "),
        ("train.early_stop={mode: max}", "train.early_stop.metric: missing: name of a metric; for example `metric:"),
        ("data=null", "data.module: missing"),
    ],
)  # fmt: skip
def test_one_wrong_value_is_one_note(override, words):
    """A key that is unknown, missing, of another type or out of range gets one message with the value and what is
    allowed."""
    found = notes(override, ways=BY_SOURCE)  # with such an error nothing is imported
    assert words in found[0]
    assert len(found) == 1


def test_an_error_in_a_list_item_has_its_line():
    """An error in a list item has the item's line, not the line of the list."""
    items = "{type: deeplightning.data.digits.Digits, params: {augment: [\n    {type: torch.nn.Dropout},\n    7]}}"
    (found,) = notes(text=GOOD.replace("{type: deeplightning.data.digits.Digits}", items))
    assert found.startswith("c.yaml:4:5: data.module.params.augment.1: deeplightning.data.digits.Digits takes a target")


def test_errors_have_line_and_column():
    """The position of an error is that of the key; for a missing key, that of its section."""
    text = GOOD.replace("batch_size: 32", "batch_size: many").replace(
        "train: {num_epochs: 1}", "train: {}\nloger: {}\n"
    )
    assert [n.split(": ")[:2] for n in notes(text=text)] == [
        ["c.yaml:3:3", "data.batch_size"],
        ["c.yaml:9:1", "train.num_epochs"],
        ["c.yaml:10:1", "loger"],
    ]


def test_thousands_of_unknown_keys_are_one_note():
    """A file that is not a config at all gets one message, not one per line."""
    (one,) = notes(text="\n".join(f"k{n}: 1" for n in range(5000)))
    assert one.startswith(
        "c.yaml:1:1: 5000 unknown keys, such as k0; is this a config? Known here: version, seed, stages"
    )
    many = "{" + ", ".join(f"k{n}: 1" for n in range(60)) + "}"
    assert len(notes(f"data.module={many}")) == 1
    (one,) = notes(f"train={many}")
    assert "train: 60 unknown keys, such as k0; is this a config? Known here: num_epochs" in one


def test_a_package_that_is_missing_is_one_note(monkeypatch):
    """The message has the install command and each key that needs the package."""
    monkeypatch.setitem(faults._PACKAGES, "gone", "gone-project")
    needed = {"model.optimizer.type": "gone.Lamb", "model.loss.type": "gone.loss.Smooth"}
    found = note(*(f"{key}={value}" for key, value in needed.items()), ways=BY_IMPORTING)
    assert all(words in found for words in (*needed, "(for `gone.", "pip install gone-project."))


# ---- targets


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.optimizer.type=torch.optim.SDG", "model.optimizer.type: torch.optim has no `SDG`. Did you mean"),
        ("model.optimizer.type=troch.optim.SGD", "there is no module troch to import (for `troch.optim.SGD`). Did you"),
        ("data.module.type=Digits", "data.module.type: `Digits` is not a MODULE.NAME such as torch.optim.SGD."),
        ("model.optimizer.params.params=[1]", "torch.optim.SGD: `params` is set by Deep Lightning; remove it"),
        ("data.module={type: deeplightning.data.image_folder.ImageFolder, params: {resize: crp}}",
         "ImageFolder takes 'crop' or 'stretch' or 'pad' here, not the text 'crp'. Did you mean crop?"),
        # not what the key expects
        ("model.network={type: torch.nn.CrossEntropyLoss}", "torch.nn.CrossEntropyLoss is a loss, not a network"),
        ("model.network={type: torch.optim.SGD}", "torch.optim.SGD is not a network (torch.nn.Module)"),
        ("model.loss={type: torchmetrics.MeanMetric}", "torchmetrics.MeanMetric is a metric, not a loss"),
        ("data.module={type: torch.nn.Linear}", "torch.nn.Linear is not a LightningDataModule"),
        ("model.scheduler={type: torch.optim.SGD}", "torch.optim.SGD is not a scheduler (torch.optim.lr_scheduler."
         "LRScheduler); an optimizer (torch.optim.Optimizer) belongs to model.optimizer"),
        ("model.scheduler={type: torch.utils.data.Dataset}",
         "LRScheduler); a task of your own can use it, in `configure_optimizers` and `lr_scheduler_step`"),
        ("model.metrics={acc: {type: torch.nn.Linear}}", "model.metrics.acc.type: torch.nn.Linear is not a metric"),
        ("train.callbacks=[{type: torch.nn.Linear}]", "train.callbacks.0.type: torch.nn.Linear is not a Lightning"),
        ("logger={type: torch.nn.Linear}", "logger.type: torch.nn.Linear is not a Lightning logger"),
        ("model.optimizer=[{type: torch.optim.SGD}]", "model.optimizer: must be a target {type: MODULE.CLASS,"),
        ("model.loss=5", "or a mapping of names or null, not the number 5"),
        ("model.network=torch.nn.Linear", "model.network: must be a target {type: MODULE.CLASS, params: {…}} or"),
        # inside params
        ("train.callbacks=[{type: Timer}, {type: ModelCheckpoint, params: {train_time_interval: '00:01:00'}}]",
         "callbacks.ModelCheckpoint takes a target {type: MODULE.CLASS, params: {…}} here, not the text '00:01:00'"),
        ("data.module.params.augment=[{type: torch.nn.Dropout}, {typ: torch.nn.Dropout}]",
         "augment.1: deeplightning.data.digits.Digits takes a target {type: MODULE.CLASS, params: {…}} here, not a"),
        ("model.optimizer={type: torch.optim.Adam, params: {lr: 0.1}, groups: [{match: bias, betas: [0.9, high]}]}",
         "model.optimizer.groups.0.betas.1: torch.optim.Adam takes a number here, not the text 'high'"),
        ("model.network.params.num_classes={type: json.dumbs}", "model.network.params.num_classes.type: json has no"),
        ("data.module.params.augment=[{type: torch.nn.ModuleDict, params: {modules: {a: [{ref: json.dumbs}]}}}]",
         "augment.0.params.modules.a.0.ref: json has no `dumbs`. Did you"),
    ],
)  # fmt: skip
def test_one_wrong_target_is_one_note(override, words):
    """An unknown module or class, a wrong param or an object of the wrong kind gets one message with a suggestion, also
    inside params."""
    found = notes(override)
    assert len(found) == 1
    assert words in found[0]
    assert found[0].startswith(f"override {override}: ")


@pytest.mark.parametrize(
    ("backend", "params", "words"),
    [
        ("ddp", "fnd_unused_parameters: true", "torch.nn.parallel.DistributedDataParallel has no param `fnd_unused_p"),
        ("ddp", "module: 1", "torch.nn.parallel.DistributedDataParallel: `module` is set by Deep Lightning; remove it"),
        ("ddp", "find_unused_parameters: true, process_group_backend: gloo, bucket_cap_mb: 25", None),
        ("deepspeed_stage_3", "offload_optimizer: true, allgather_bucket_size: 200_000_000", None),
        ("ddp", "accelerator: cpu", "engine.params.accelerator: is set by engine.gpus; remove it"),
        ("deepspeed_stage_2", "stage: 3", "engine.params.stage: is set by engine.backend; remove it"),
        ("deepspeed_stage_2", "precision_plugin: {type: torch.amp.GradScaler}", "is set by engine.precision; remove"),
        ("ddp", "timeout: 30 min", "engine.params.timeout: must be a number of seconds, more than 0, not '30 min'"),
        ("ddp", "timeout: 0.5", None),
        ("fsdp", "param_dtype: bfloat", "engine.params.param_dtype: must be one of float32, bfloat16, float16, not "
         "'bfloat'. Did you mean bfloat16?"),
        ("fsdp", "wrap: {a: 1}", "engine.params.wrap: deeplightning.engine.fsdp.Fsdp takes a whole number or a list"),
        ("fsdp", "sharding_strategy: FULL_SHARD", "engine.fsdp.Fsdp has no param `sharding_strategy`. It takes: wrap,"),
        ("fsdp", "reshard_after_forward: false, reduce_dtype: float32, cpu_offload: true, wrap: [Linear, conv1]", None),
        ("ddp", "ddp_comm_hook: {ref: json.dumbs}", "engine.params.ddp_comm_hook.ref: json has no `dumbs`."),
        ("deepspeed_stage_1", "config: {progressive_layer_drop: {}}", "progressive_layer_drop: unknown to DeepSpeed."),
        ("deepspeed_stage_2", "config: {optimizer: {}}", "config.optimizer: is set by model.optimizer; remove it"),
        ("deepspeed_stage_2", "config: {flop_profiler: {}}", "config.flop_profiler: unknown to DeepSpeed. "
         "Did you mean flops_profiler? It knows activation_checkpointing,"),
        ("deepspeed_stage_2", "config: {zero_optimization: false}", "zero_optimization: must be a mapping, such"),
        # keys of DeepSpeed and Horovod
        ("deepspeed_stage_3", "stage3_gather_fp16_weights_on_model_save: true", "No equivalent here: checkpoints are"),
        ("deepspeed_stage_3", "compression: fp16", "Here it is called engine.params.ddp_comm_hook."),
        ("deepspeed_stage_3", "op: Adasum", "No equivalent here: gradients are averaged."),
        ("deepspeed_stage_2", "initial_scale_power: 8, loss_scale_window: 100, hysteresis: 1, min_loss_scale: 2", None),
        ("deepspeed_stage_3", "block_size: 1, queue_depth: 4, thread_count: 2, partition_activations: true", None),
        ("deepspeed_stage_2_offload", "config: {flops_profiler: {}, zero_optimization: {sub_group_size: 9}}", None),
    ],
)  # fmt: skip
def test_params_of_the_engine_are_compared_with_the_strategys(backend, params, words):
    """`engine.params` is checked against the strategy's params and, for ddp, those of torch's class that gets them."""
    overrides = [f"engine.backend={backend}", f"engine.params={{{params}}}"]
    assert notes(*overrides) == [] if words is None else words in note(*overrides)


def test_the_known_keys_of_deepspeeds_json_are_those_that_it_reads():
    """The known keys are those that the installed DeepSpeed reads, without those that it has removed or deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        config = pytest.importorskip("deepspeed.runtime.config")
    read = set()

    class Json(dict):
        def __contains__(self, word):
            read.add(word)
            return super().__contains__(word)

        def get(self, word, default=None):
            read.add(word)
            return super().get(word, default)

        def keys(self):
            return self  # so that `word in config.keys()` is recorded as well

    config.DeepSpeedConfig(Json(train_batch_size=1))
    removed = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS, "bfloat16"}  # the latter is another name of bf16
    known = {*strategy._JSON_KEYS, *strategy._JSON_SET_ELSEWHERE}
    assert read - known == removed
    assert known - read == {"sequence_parallel_size"}  # which DeepSpeed reads from a network


@pytest.mark.parametrize(
    "override",
    [
        "model.network={type: torchvision.models.resnet18, params: {num_classes: 10}}",
        "model.scheduler={type: torch.optim.lr_scheduler.ReduceLROnPlateau, call: {monitor: val_loss}}",
        "model.scheduler={type: torch.optim.lr_scheduler.OneCycleLR, params: {max_lr: 1.0, total_steps: auto}}",
        "model.loss={a: {type: torch.nn.MSELoss}, b: {type: torch.nn.L1Loss, weight: 0.5}}",
        "model.metrics={acc: {type: torchmetrics.classification.MulticlassAccuracy, params: {num_classes: 10}}}",
        "data.module.params.augment=[{type: torch.nn.Dropout, params: {p: 0.1}}]",
        "logger={type: pytorch_lightning.loggers.MLFlowLogger, params: {tracking_uri: mlruns}}",
        "train.callbacks=[{type: pytorch_lightning.callbacks.Timer}]",
    ],
)
def test_right_targets_pass(override):
    """Functions as networks, several losses, schedulers with `auto` lengths and targets inside params are valid."""
    assert notes(override) == []


def test_a_users_own_module_is_checked_like_ours(here):
    """A class of a package in the working directory gets the same checks and suggestions."""
    (here / "losses").mkdir()
    own = "import torch\n\n\nclass Mine(torch.nn.Module):\n    def __init__(self, factor: float = 1.0): ...\n"
    (here / "losses" / "custom.py").write_text(own)
    assert notes("model.loss={type: losses.custom.Mine, params: {factor: 2}}") == []
    assert "losses.custom has no `Mien`. Did you mean losses.custom.Mine?" in note("model.loss.type=losses.custom.Mien")
    assert "losses has no `costum`. Did you mean losses.custom?" in note("model.loss.type=losses.costum.Mine")
    assert "has no param `fator`. Did you mean factor?" in note(
        "model.loss={type: losses.custom.Mine, params: {fator: 2}}"
    )


def test_a_module_beside_the_config_is_found_from_elsewhere(here, monkeypatch):
    """The folder of the config file is an import root, whatever the working directory is."""
    (here / "project").mkdir()
    (here / "project" / "beside_config.py").write_text("import torch\n\n\nclass Net(torch.nn.Module): ...\n")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(here)])
    (here / "project" / "c.yaml").write_text(GOOD)
    assert load("project/c.yaml", ["model.network={type: beside_config.Net}"]).model.network.type == "beside_config.Net"


def test_a_class_of_the_other_lightning_is_refused_in_words(here, monkeypatch):
    """A class derived from `lightning.pytorch` instead of `pytorch_lightning` is an error that says what to do."""
    package = here / "lightning" / "pytorch"
    package.mkdir(parents=True)
    (here / "lightning" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("class LightningModule: ...\nclass Callback: ...\n")
    (here / "other_task.py").write_text("import lightning.pytorch as pl\n\n\nclass Task(pl.LightningModule): ...\n")
    for name in [n for n in sys.modules if n.split(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)
    assert note("model.module={type: other_task.Task}") == (
        "model.module.type: other_task.Task derives from `lightning.pytorch`; "
        "derive it from the same class of `pytorch_lightning`"
    )


def test_a_variable_that_is_no_number_is_not_shown(monkeypatch):
    """An error about a value from the environment has the variable's name, not its value, also if its default applies;
    for a number it names `oc.decode`."""
    monkeypatch.setenv("SOME_TOKEN", "hunter2")
    assert note("data.batch_size=${oc.env:SOME_TOKEN}") == (
        "data.batch_size: must be a whole number or null, not the value of ${oc.env:SOME_TOKEN}"
    )
    for text in ("${oc.env:SOME_TOKEN}", "${oc.env:IT_IS_NOT_SET,0.1}"):
        assert note(f"model.optimizer.params.lr={text}") == (
            f"model.optimizer.params.lr: torch.optim.SGD takes a number here, not the text of {text}; "
            f"write `${{oc.decode:{text}}}`"
        )


WRAPPED = """
import functools
from torch import nn

def open_to_more(given):
    @functools.wraps(given)
    def init(self, *args, **more):
        given(self, *args, **{k: v for k, v in more.items() if k == "sides"})

    return init

class Base(nn.Module):
    def __init_subclass__(cls):
        cls.__init__ = open_to_more(cls.__init__)

class Open(Base):
    def __init__(self, sides: int = 1):
        super().__init__()

class Decorated(nn.Module):
    @open_to_more
    def __init__(self, sides: int = 1):
        super().__init__()
"""


def test_a_constructor_that_a_wrapper_opens_to_any_keyword_is_unchecked():
    """A wrapper may accept more keywords than its signature shows: an unknown param is unchecked, never an error."""
    Path("own_wrapped.py").write_text(WRAPPED)
    for importing in (False, True):
        for name in ("Open", "Decorated"):
            target = f"model.network={{type: own_wrapped.{name}, params: {{more: 3}}}}"
            report = examine("c.yaml", [target], importing=importing)
            assert report.faults == []
            assert any(f"own_wrapped.{name}" in fault.message for fault in report.unchecked)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.optimizer.groups=[{match: bias, wieght_decay: 0}]",
         "groups.0.wieght_decay: torch.optim.SGD has no param `wieght_decay`. Did you mean weight_decay?"),
        ("model.optimizer.groups=[{weight_decay: 0}]", "model.optimizer.groups.0.match: missing: which parameters"),
        ("model.optimizer.groups=[{mach: bias}]", "model.optimizer.groups.0.mach: unknown key. Did you mean match?"),
        ("model.optimizer.groups=[{match: 'bias)'}]", "groups.0.match: must be a regular expression, not 'bias)': "),
        ("model.trainable=[]", "model.trainable: names no parameter, so nothing would learn; `all` trains"),
        ("data.loader={pin_memry: true}", "DataLoader has no param `pin_memry`. Did you mean pin_memory?"),
        ("data.loader={collate_fn: {ref: collections.OrderedDic}}",
         "data.loader.collate_fn.ref: collections has no `OrderedDic`. Did you mean collections.OrderedDict?"),
        ("data.loader={batch_size: 3}", "DataLoader gets `batch_size` from data.batch_size; remove it"),
        ("logger.params={experiment: x}", "MLflowLogger has no param `experiment`. Did you mean"),
    ],
)  # fmt: skip
def test_forwarded_params_are_checked_against_their_receiver(override, words):
    """Optimizer groups are checked against the optimizer, `data.loader` against torch's class, `logger.params` against
    the default logger."""
    assert words in note(override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("batch_size=4", "unknown key. Did you mean data.batch_size?"),
        ("lr=0.1", "unknown key. Here it is called model.optimizer.params.lr."),
        ("task=img", "unknown key. Here it is called model.module.type."),
        ("total_batch_size=3", "unknown key. Here it is called data.batch_size (it counts per process)."),
        ("model.~metrics=null", "model.~metrics: there is no such key to remove: nothing below this file sets"),
        ("engine.gpus=[96, 96]", "engine.gpus: must be different indexes, not [96, 96]"),
        ("model.scheduler={type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: auto}}",
         "model.scheduler.params.gamma: `auto` works for total_steps, steps_per_epoch, epochs, T_max; give `gamma`"),
        ("model.scheduler={type: torch.optim.lr_scheduler.OneCycleLR, params: {max_lr: 1.0, tota_steps: auto}}",
         "torch.optim.lr_scheduler.OneCycleLR has no param `tota_steps`. Did you mean total_steps?"),
        ("model.loss={type: torch.nn.functional.cross_entropy}",
         "needs input, target; a function is called once, to make a loss (torch.nn.Module)"),
    ],
)  # fmt: skip
def test_keys_of_other_frameworks_get_a_suggestion(override, words):
    """A key without its section, a key of another framework or a function in place of a class gets a suggestion."""
    assert any(words in found for found in notes(override))


def test_groups_of_an_optimizer_without_a_type_are_no_second_fault():
    """Without an optimizer class there is nothing to check the groups against."""
    text = GOOD.replace(
        "{type: torch.optim.SGD, params: {lr: 0.1}}", "{tipe: torch.optim.SGD, groups: [{match: a, x: 1}]}"
    )
    (first,) = [found for found in notes(text=text) if "params: missing" not in found]
    assert "model.optimizer.tipe: unknown key. Did you mean type?" in first


def test_a_misspelt_base_is_one_note():
    """Keys that the base sets are not reported as missing."""
    Path("base.yaml").write_text(GOOD)
    (only,) = notes(text="_bsae_: base.yaml\ndata: {batch_size: 3}\n")
    assert only.startswith("c.yaml:1:1: _bsae_: unknown key. Did you mean _base_? Known here: version, seed,")


# ---- all at once

TEN = """\
seed: 42
stages: [train, tset]
data:
  module: {type: deeplightning.data.digits.Digits}
  batch_size: 0
  num_splitz: 10
  root: ${no.such.key}
model:
  module: {type: torch.nn.CrossEntropyLoss}
  network:
    type: deeplightning.model.cnn.SimpleCNN
    params: {num_channels: 1}
  optimizer:
    type: torch.optim.SGD
    params:
      lrr: 0.1
      momentum: fast
  loss: {type: torch.nn.CrossEntropyLos}
train:
  num_epochs: 1
  max_steps: 1.5
  num_epochs: 2
engine:
  backend: ddq
"""


def test_ten_faults_of_ten_kinds_are_ten_notes_each_at_its_line(here):
    """`train` exits with code 2, reports each error in the order of the file, and creates nothing."""
    Path("c.yaml").write_text(TEN)
    done = real("train", "c.yaml", cwd=here, code=2)
    assert done.out == ""
    expected = {
        (2, "stages.1"): "not the text 'tset'. Did you mean test?",  # not one of the choices
        (5, "data.batch_size"): "must be at least 1, not 0",  # out of range
        (6, "data.num_splitz"): "unknown key. Did you mean num_splits?",  # unknown key
        (7, "data.root"): "`${no.such.key}` refers to a key that does not exist",  # reference
        (9, "model.module.type"): "torch.nn.CrossEntropyLoss is not a LightningModule",  # wrong kind
        (12, "model.network.params"): "deeplightning.model.cnn.SimpleCNN needs num_classes",  # missing param
        (16, "model.optimizer.params.lrr"): "has no param `lrr`. Did you mean lr?",  # unknown param
        (17, "model.optimizer.params.momentum"): "takes a number here, not the text 'fast'",  # param's type
        (18, "model.loss.type"): "torch.nn has no `CrossEntropyLos`. Did you mean torch.nn.CrossEntropyLoss?",  # target
        (21, "train.max_steps"): "must be a whole number or null, not the number 1.5",  # type
        (22, "train.num_epochs"): "this key occurs twice, first in line 20; remove one",  # twice
        (24, "engine.backend"): "not the text 'ddq'. Did you mean ddp?",
    }
    lines = done.err.splitlines()
    found = {(int(line.split(":")[2]), line.split(": ")[2]): line for line in lines}
    assert list(found) == list(expected)
    assert [words for key, words in expected.items() if words not in found[key]] == []
    assert all(line.startswith("error: c.yaml:") for line in lines)
    assert [p.name for p in Path().iterdir()] == ["c.yaml"]


# ---- the command


def test_a_report_for_programs(command, here):
    """`--format json` gives position, key, value, allowed values and suggestion of each error; for a valid config, the
    effective config and the warnings."""
    found = command("check", "c.yaml", "data.batchsize=3", "seed=-1", "--format", "json", cwd=here)
    answer = json.loads(found.out)
    assert (found.code, found.err, answer["valid"], answer["config"]) == (2, "", False, None)
    assert answer["faults"][0] == dict.fromkeys(["file", "line", "column"]) | {
        "override": "data.batchsize=3",
        "key": "data.batchsize",
        "message": answer["faults"][0]["message"],
        "found": "batchsize",
        "allowed": "module, batch_size, root, dataset, num_workers, num_splits, fold, sampler, loader",
        "suggestion": "batch_size",
    }
    assert [answer["faults"][1][name] for name in ("key", "found", "allowed")] == ["seed", "-1", "at least 0"]
    Path("c.yaml").write_text(GOOD.replace("32", "many"))
    (fault,) = json.loads(command("check", "c.yaml", "--format=json", cwd=here).out)["faults"]
    assert [fault[name] for name in ("file", "line", "column", "override")] == ["c.yaml", 3, 3, None]
    assert [fault[name] for name in ("found", "allowed")] == ["the text 'many'", "a whole number or null"]
    Path("c.yaml").write_text(GOOD)
    found = command("check", "c.yaml", "engine.backend=horovod", "--format", "json", cwd=here)
    answer = json.loads(found.out)
    assert (found.code, answer["valid"], answer["faults"]) == (0, True, [])
    assert answer["config"]["engine"]["backend"] is None
    assert [warning["key"] for warning in answer["warnings"]] == ["engine.backend", "engine.backend"]


def test_what_a_module_prints_does_not_stand_in_the_report(command, here):
    """stdout is one JSON object, even if a module prints while it is imported, by Python or by a child process."""
    Path("own_loud.py").write_text(
        "import os\nprint('loud')\nos.system('echo louder')\nfrom torch.nn import NLLLoss as Loss\n"
    )
    found = command("check", "c.yaml", "model.loss.type=own_loud.Loss", "--import", "--format", "json", cwd=here)
    assert json.loads(found.out)["valid"] is True
    assert {"loud", "louder"} <= set(found.err.split())


def test_a_misspelt_option_is_no_override(command, here):
    """The error about `--dryrun` says where options are listed."""
    found = command("check", "c.yaml", "--dryrun", cwd=here, code=2)
    assert "override --dryrun: unknown option, see --help; an override is key=value" in found.err
    before = command("check", "--dryrun", "c.yaml", cwd=here)
    assert (before.code, "No such option" in before.err, "--dryrun" in before.err) == (2, True, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_is_a_note():
    """If stdout is a file on a full disk, `check` exits with code 3 and one message."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "deeplightning", "check", "c.yaml"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )  # fmt: skip
    assert (done.returncode, "Exception ignored" in done.stderr) == (3, False)
    assert done.stderr.startswith("error: the disk is full: [Errno 28] No space left on device.")


def test_what_only_an_import_shows_is_reported_as_unchecked(command, here):
    """`check` reports a function written in C as unchecked; `--import` checks it."""
    Path("own_parts.py").write_text("from math import hypot as loss\n")
    changed = ["model.loss={type: own_parts.loss, params: {factor: 2}}"]
    found = command("check", "c.yaml", *changed, cwd=here, code=0)
    assert found.err.startswith(f"unchecked: override {changed[0]}: model.loss.")
    assert "; `--import` checks it\n" in found.err
    assert "--import" not in command("check", "c.yaml", *changed, "--import", cwd=here).err
    Path("c.yaml").write_text(GOOD.replace("torch.nn.CrossEntropyLoss", "own_parts.losss"))
    assert "Did you mean own_parts.loss?" in command("check", "c.yaml", cwd=here).err


def test_an_abstract_class_is_found_by_importing():
    """The error names the method that is not implemented."""
    Path("own_classes.py").write_text(
        "import abc\nfrom torch import nn\n"
        "class Abstract(nn.Module, abc.ABC):\n    @abc.abstractmethod\n    def forward(self, logits, labels): ...\n"
    )
    found = note("model.loss={type: own_classes.Abstract}", ways=BY_IMPORTING)
    assert "own_classes.Abstract is abstract: it does not implement forward" in found


def test_check_says_what_only_a_dry_run_tries(command, here):
    """For a valid config, `check` prints one line that names further commands. The JSON report lists constructors and
    batches as unchecked, unless `--dry-run` tries them."""
    plain = command("check", "c.yaml", cwd=here)
    more = "--dry-run builds everything and passes a batch; "
    assert (plain.out, plain.err) == (f"no faults; {more}explain prints the config\n", "")
    report = json.loads(command("check", "c.yaml", "--format", "json", cwd=here).out)
    assert [fault["message"][:32] for fault in report["unchecked"]] == ["errors of constructors and batch"]
    assert yaml.safe_load(command("explain", "c.yaml", cwd=here).out) == report["config"]
    assert "errors of constructors" not in command("check", "c.yaml", "--dry-run", "--format", "json", cwd=here).out
    tried = command("check", "c.yaml", "--dry-run", cwd=here)
    assert (tried.code, tried.out) == (0, "no faults; explain prints the config\n"), tried


# ---- names of metrics

OWN_TASKS = """\
import pytorch_lightning as pl

from deeplightning.task.img_classif import ImageClassification

class Plain(pl.LightningModule):
    def __init__(self, cfg):
        super().__init__()

    def training_step(self, batch, batch_idx):
        self.log("train_loss", 0.0)

    def validation_step(self, batch, batch_idx):
        self.log_dict({"val_loss": 0.0, "val_f1": 1.0})

class Prefixed(Plain):
    def log(self, name, value, **more):
        super().log(f"mine/{name}", value, **more)

class More(ImageClassification):
    def on_validation_epoch_end(self):
        self.log("val_extra", 1.0)

class Computed(ImageClassification):
    def on_validation_epoch_end(self):
        self.log(self.hparams.name, 1.0)

class Watch(pl.Callback):
    def on_validation_end(self, trainer, pl_module):
        pl_module.log("val_watched", 1.0)
"""
METRIC = "{type: torchmetrics.classification.MulticlassF1Score, params: {num_classes: 10}}"
TWO_LOSSES = "model.loss={a: {type: torch.nn.CrossEntropyLoss}, b: {type: torch.nn.NLLLoss}}"
PLATEAU = "model.scheduler={type: torch.optim.lr_scheduler.ReduceLROnPlateau, call: {monitor: val_los}}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.checkpoint.monitor=val_acuracy"], "no metric `val_acuracy` is logged. Did you mean val_acc?"),
        (["train.early_stop={metric: test_loss}"], "no metric `test_loss` is logged. Did you mean"),
        (["train.callbacks=[{type: pytorch_lightning.callbacks.EarlyStopping, params: {monitor: val_los}}]"],
         "train.callbacks.0.params.monitor: no metric `val_los` is logged. Did you mean val_loss?"),
        ([PLATEAU], "model.scheduler.call.monitor: no metric `val_los` is logged. Did you mean val_loss?"),
        ([f"model.metrics={{f1: {METRIC}}}", "train.checkpoint.monitor=val_acc"], "no metric `val_acc` is logged."),
        (["model.module.type=own_tasks.Plain", "train.checkpoint.monitor=val_acc"], "Did you mean val_f1?"),
        (["model.module.type=own_tasks.More", "train.checkpoint.monitor=val_extr"], "Did you mean val_extra?"),
        # valid: what a task, a subclass or a callback logs
        (["train.checkpoint.monitor=val_acc", "train.early_stop={metric: train_loss_epoch}"], None),
        ([f"model.metrics={{f1: {METRIC}}}", "train.checkpoint.monitor=val_f1"], None),
        ([TWO_LOSSES, "train.checkpoint.monitor=val_b"], None),
        (["model.module.type=own_tasks.Plain", "train.checkpoint.monitor=val_f1"], None),
        (["model.module.type=own_tasks.Prefixed", "train.checkpoint={monitor: mine/train_loss, mode: min}"], None),
        (["model.module.type=own_tasks.More", "train.checkpoint={monitor: val_extra, mode: min}"], None),
        (["train.callbacks=[{type: own_tasks.Watch}]", "train.checkpoint={monitor: val_watched, mode: min}"], None),
        (["stages=[test]", "test.ckpt=last", "train.checkpoint.monitor=nothing"], None),
        (["train.callbacks=[{type: pytorch_lightning.callbacks.ModelCheckpoint, params: {monitor: step, mode: max}}]"],
         None),
        (["train.callbacks=[{type: pytorch_lightning.callbacks.EarlyStopping, params: {monitor: step, mode: max}}]"],
         "no metric `step` is logged"),
    ],
)  # fmt: skip
def test_a_metric_that_nothing_logs_is_reported(overrides, words):
    """Names of logged metrics come from the source of task, metrics, losses and callbacks; the nearest is suggested."""
    Path("own_tasks.py").write_text(OWN_TASKS)
    assert notes(*overrides) == [] if words is None else words in note(*overrides)


@pytest.mark.parametrize(("task", "metric"), [("Computed", "val_x"), ("Prefixed", "mine/val_f1")])
def test_a_metric_whose_name_is_computed_is_left_to_the_dry_run(task, metric):
    """If the task computes names of metrics, whether a metric is logged is reported as unchecked."""
    Path("own_tasks.py").write_text(OWN_TASKS)
    monitor = f"train.checkpoint={{monitor: {metric}, mode: min}}"
    report = examine("c.yaml", [f"model.module.type=own_tasks.{task}", monitor])
    assert report.faults == []
    (unchecked,) = report.unchecked
    assert unchecked.message == f"whether `{metric}` is logged: own_tasks.{task} computes names; `--dry-run` checks it"


@pytest.mark.parametrize(
    ("module", "override", "wrong"),
    [
        ("Graded", "train.export=true", "Graded"),
        ("Derived", "train.export=true", "Derived"),
        ("Graded", "train.export=false", None),
        ("Known", "train.export=true", None),
        ("Theirs", "train.export=true", None),
        ("Late", "train.export=true", None),
        ("Computed", "train.export=true", None),
    ],
)
def test_a_kind_that_no_server_supports_is_reported(module, override, wrong):
    """An unknown `kind` is an error if the task derives from one of the package's tasks and is exported."""
    Path("own_tasks.py").write_text("""\
import pytorch_lightning as pl
from deeplightning.task.img_classif import ImageClassification
from deeplightning.task.pixel_input import ImageTask

class Graded(ImageClassification):
    kind = "image_grades"

class Derived(Graded):
    pass

class Known(Graded):
    kind = "image_multilabel"

class Late(ImageTask):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.kind = "image_regression"

    def inference_model(self):
        return self

class Computed(Graded):
    @property
    def kind(self):
        return "image_regression"

class Theirs(pl.LightningModule):
    kind = "grades"

    def inference_model(self):
        return self
""")
    found = [one for one in notes(f"model.module.type=own_tasks.{module}", override) if "kind" in one]
    text = f"own_tasks.{wrong} has the kind 'image_grades', which no server supports; use one of image_classification, "
    assert [text in one for one in found] == [True] * (wrong is not None), found


@pytest.mark.parametrize("importing", [False, True])
def test_a_class_that_makes_another_object_is_like_a_function(here, importing):
    """What its `__new__` returns is judged when it is built."""
    (here / "own_small.py").write_text(
        "from torch import nn\nclass Small:\n    def __new__(cls, width: int):\n        return nn.Linear(64, width)\n"
    )
    target = "model.network={type: own_small.Small, params: {width: 10}}"
    assert examine("c.yaml", [target], importing=importing).faults == []
