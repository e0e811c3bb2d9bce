"""A LightningModule and a LightningDataModule written as in Lightning's manual: `check` and `build` read their params,
from the source and from the imported class."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deeplightning.config.examine import examine
from deeplightning.config.schema import Config
from deeplightning.config.source import read
from deeplightning.config.target import build
from deeplightning.config.tree import dump
from deeplightning.config.trust import RunConfig
from deeplightning.faults import CheckpointError
from deeplightning.sweep.multirun import Grid

OWN = """\
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn

if TYPE_CHECKING:
    from deeplightning.config.schema import Config


class Plain(pl.LightningModule):
    def __init__(self, width: int, lr: float = 0.1, names: list[str] | None = None):
        super().__init__()
        self.given = (width, lr, names)


class Bare(pl.LightningModule):
    def __init__(self, width, lr=0.1, **more):
        super().__init__()
        self.given = (width, lr, more)


class HandsOn(Plain):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Nested(pl.LightningModule):
    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable | None = None,
        losses: list[nn.Module] = (),
        norm: Callable[..., nn.Module] = nn.Identity,
        act: Callable[[torch.Tensor], torch.Tensor] = torch.relu,
        best: torch.optim.Optimizer | None = None,
        per_layer: list[OptimizerCallable] | None = None,
    ):
        super().__init__()
        self.given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}


class Builds(pl.LightningModule):
    def __init__(
        self,
        part=None,
        parts: list | None = None,
        by_name: dict | None = None,
        net: nn.Module | None = None,
        nets: dict[str, nn.Module] | None = None,
        optimizer: torch.optim.Optimizer = None,
        scheduler: torch.optim.lr_scheduler = None,
    ):
        super().__init__()
        self.given = (part, parts, by_name)


class Named(pl.LightningModule):
    def __init__(self, cfg, width: int = 1):
        super().__init__()
        self.given = (cfg, width)


class ByName(Named):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class Annotated(pl.LightningModule):
    def __init__(self, settings: Config, width: int = 1):
        super().__init__()
        self.given = (settings, width)


class OnlyPosition(pl.LightningModule):
    def __init__(self, cfg, /, width: int = 1):
        super().__init__()
        self.given = (cfg, width)


class Second(pl.LightningModule):
    def __init__(self, width, cfg):
        super().__init__()


class Net(nn.Module):
    def __init__(self, width: int = 1):
        super().__init__()


class Numbers(pl.LightningDataModule):
    def __init__(self, batch_size: int = 32, data_dir: str = "here"):
        super().__init__()


def scaled(value: torch.Tensor, by: float) -> torch.Tensor:
    return value * by
"""

PLAIN = """\
data: {module: {type: own_module.Numbers}}
model: {module: {type: own_module.Plain, params: {width: 3}}}
train: {num_epochs: 1}
"""


@pytest.fixture(autouse=True)
def here(here):
    """A working directory with the user's modules."""
    Path("own_module.py").write_text(OWN)
    return here


def faults(*overrides: str, text: str = PLAIN) -> list[str]:
    """Return the errors of a config, which are the same without imports and with them."""
    Path("c.yaml").write_text(text)
    static, live = examine("c.yaml", list(overrides)), examine("c.yaml", list(overrides), importing=True)
    assert static.faults == live.faults
    assert static.unchecked == []
    return [str(fault).removeprefix(f"override {(*overrides, '')[0]}: ") for fault in live.faults]


def config(*overrides: str) -> Config:
    Path("c.yaml").write_text(PLAIN)
    return examine("c.yaml", list(overrides), importing=True).checked()


@pytest.mark.parametrize(
    ("name", "params", "given"),
    [
        ("Plain", "{width: 3, names: [a]}", (3, 0.1, ["a"])),
        ("Bare", "{width: 3}", (3, 0.1, {})),
        ("HandsOn", "{width: 3, lr: 0.5}", (3, 0.5, None)),
        ("Named", "{width: 3}", ("cfg", 3)),
        ("ByName", "{width: 3}", ("cfg", 3)),
        ("Annotated", "{width: 3}", ("cfg", 3)),
        ("OnlyPosition", "{width: 3}", ("cfg", 3)),
    ],
)
def test_only_a_first_parameter_named_cfg_or_annotated_gets_the_config(name, params, given):
    """The first parameter gets the config if it is named `cfg` or annotated as Config; all others come from params."""
    override = f"model.module={{type: own_module.{name}, params: {params}}}"
    needs = ["model.optimizer=null"] if given[0] == "cfg" else []
    assert faults(override, *needs) == []
    cfg = config(override, *needs)
    assert build(cfg.model.module, cfg).given == tuple(cfg if value == "cfg" else value for value in given)


TAKES_ANYTHING = """\
import pytorch_lightning as pl
from own_module import Named, Plain


class Passing:
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Meta(type(pl.LightningModule)):
    def __call__(cls, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def decorated(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def registered(found):
    return found


class Keywords(pl.LightningModule):
    def __init__(self, **kwargs):
        super().__init__()
        self.given = (kwargs,)


class Mixed(Passing, Keywords): ...


class Made(Plain, metaclass=Meta): ...


class Decorated(pl.LightningModule):
    @decorated
    def __init__(self, width):
        super().__init__()
        self.given = (width,)


class NamedToo(pl.LightningModule):
    def __init__(self, cfg, **kwargs):
        super().__init__()
        self.given = (cfg, kwargs)


class MixedNamed(Passing, NamedToo): ...


class MadeNamed(Named, metaclass=Meta): ...


@registered
class RegisteredNamed(Passing, Named): ...


class Data(pl.LightningDataModule):
    def __init__(self, **kwargs):
        super().__init__()
        self.given = (kwargs,)


class MixedData(Passing, Data): ...
"""


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("Mixed", ({"width": 3},)),
        ("Made", (3, 0.1, None)),
        ("Decorated", (3,)),
        ("MixedData", ({"width": 3},)),
        ("MixedNamed", ("cfg", {"width": 3})),
        ("MadeNamed", ("cfg", 3)),
        ("RegisteredNamed", ("cfg", 3)),
    ],
)
def test_a_constructor_that_takes_anything_gets_the_config_only_if_it_passes_it_to_cfg(name, given):
    """Mixins, metaclasses and decorators have `*args, **kwargs`; params are still passed as keyword arguments."""
    Path("takes_anything.py").write_text(TAKES_ANYTHING)
    section = "data" if name == "MixedData" else "model"
    override = f"{section}.module={{type: takes_anything.{name}, params: {{width: 3}}}}"
    needs = ["model.optimizer=null"] if given[0] == "cfg" else []
    Path("c.yaml").write_text(PLAIN)
    assert examine("c.yaml", [override, *needs]).faults == []
    cfg = config(override, *needs)
    assert build(getattr(cfg, section).module, cfg).given == tuple(cfg if value == "cfg" else value for value in given)


ERRORS = {
    "model.module={type: own_module.Plain, params: {widht: 3}}": (
        "own_module.Plain has no param `widht`. Did you mean width?"
    ),
    "model.module={type: own_module.Plain}": "model.module.params: own_module.Plain needs width",
    "model.module={type: own_module.Plain, params: {width: wide}}": "takes a whole number here, not the text 'wide'",
    "model.module={type: own_module.Bare, params: {width: 3, lr: 0.1x}}": "takes a number here, not the text '0.1x'",
    "model.module={type: own_module.Nested, params: {net: {type: own_module.Net}, optimizer: {type: "
    "torch.optim.SGD, params: {lrr: 1}}}}": (
        "model.module.params.optimizer.params.lrr: torch.optim.SGD has no param `lrr`. Did you mean lr?"
    ),
    "model.module={type: own_module.Nested, params: {net: {type: own_module.Net}, scheduler: {type: "
    "torch.optim.lr_scheduler.ExponentialLR}}}": "torch.optim.lr_scheduler.ExponentialLR needs gamma",
    "model.module={type: own_module.Nested, params: {net: {type: own_module.Net}, best: {type: torch.optim.SGD, "
    "params: {params: [1]}}}}": "torch.optim.SGD: `params` is set by Deep Lightning",
    "model.module={type: own_module.Second, params: {width: 3}}": (
        "own_module.Second needs cfg. The config is passed to the first parameter alone, if that is named `cfg`"
    ),
    "model.module={type: own_module.Net}": (
        "own_module.Net is not a LightningModule; a network (torch.nn.Module) belongs to model.network"
    ),
    "model.module.type=own_modul.Plain": "model.module.type: there is no module own_modul to import",
    "data.module.type=deeplightning.data.digits.Digitz": "data.digits has no `Digitz`. Did you mean",
    "model.module={typ: own_module.Plain}": "model.module.typ: unknown key. Did you mean type?",
    "model={modul: {type: own_module.Plain}}": "model.modul: unknown key. Did you mean module?",
    "data.module=3": "data.module: must be a target",
}


@pytest.mark.parametrize("override", ERRORS)
def test_a_wrong_param_or_target_is_one_error(override):
    """A misspelled, missing or mistyped param at any depth, or a target that does not exist, is one error. A misspelled
    module adds no error about a missing optimizer or batch size."""
    (error,) = faults(override)
    assert ERRORS[override] in error


def test_nested_targets_become_objects_and_callables():
    """For a parameter that takes a factory, such as an optimizer, a target becomes a callable with its params bound.
    For one that takes a function, such as an activation, a class is instantiated once."""
    nested = (
        "{type: own_module.Nested, params: {net: {type: own_module.Net}, "
        "optimizer: {type: torch.optim.SGD, params: {lr: 0.5}}, "
        "scheduler: {type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.5}}, "
        "losses: [{type: torch.nn.MSELoss}, {type: torch.nn.HuberLoss, params: {delta: 2.0}}], "
        "norm: {type: torch.nn.GELU, params: {approximate: tanh}}, "
        "act: {type: own_module.scaled, params: {by: 2.0}}, "
        "best: {type: torch.optim.AdamW, params: {lr: 0.5}}, "
        "per_layer: [{type: torch.optim.AdamW}]}}"
    )
    assert faults(f"model.module={nested}") == []
    cfg = config(f"model.module={nested}")
    given = build(cfg.model.module, cfg).given
    optimizer = given["optimizer"]([torch.nn.Parameter(torch.zeros(1))])
    assert optimizer.defaults["lr"] == 0.5
    assert given["scheduler"](optimizer).gamma == 0.5
    assert [type(loss) for loss in given["losses"]] == [torch.nn.MSELoss, torch.nn.HuberLoss]
    assert given["norm"]().approximate == "tanh"
    assert given["act"](torch.ones(1)) == 2
    assert isinstance(given["best"], functools.partial)
    assert [maker.func for maker in given["per_layer"]] == [torch.optim.AdamW]
    cfg = config(f"model.module={nested.replace('own_module.scaled, params: {by: 2.0}', 'torch.nn.GELU')}")
    assert type(build(cfg.model.module, cfg).given["act"]) is torch.nn.GELU


@pytest.mark.parametrize(
    ("param", "value", "is_fault"),
    [
        ("part", "{_target_: torch.nn.ReLU}", False),
        ("part", "{inner: {class_path: torch.nn.ReLU}}", False),
        ("parts", "[{_target_: torch.nn.ReLU}]", False),
        ("by_name", "{class_path: torch.nn.ReLU}", False),
        ("net", "{_target_: torch.nn.ReLU}", True),
        ("nets", "{one: {class_path: torch.nn.ReLU}}", True),
        ("optimizer", "{_target_: torch.optim.SGD, lr: 0.1}", True),
        ("scheduler", "{_target_: torch.optim.lr_scheduler.StepLR, step_size: 1}", True),
        ("nothing", "{_target_: torch.nn.ReLU}", True),
    ],
)
def test_a_mapping_that_a_module_may_build_by_itself_is_passed_as_it_is(param, value, is_fault):
    """A module may call `hydra.utils.instantiate`. A param annotated with an object needs `type` and `params`."""
    override = f"model.module={{type: own_module.Builds, params: {{{param}: {value}}}}}"
    errors = faults(override)
    notices = [notice.text for notice in examine("c.yaml", [override]).notices]
    assert any("unknown key. Here it is called" in error for error in errors) == bool(errors) == is_fault
    assert sum("the mapping is passed as it is" in text for text in notices) == (not is_fault)
    if not is_fault:
        cfg = config(override)
        params = cfg.model.module.params
        assert build(cfg.model.module, cfg).given == tuple(params.get(name) for name in ("part", "parts", "by_name"))


# ---- sections that a module does not read


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("data.batch_size", "64", "own_module.Numbers, which does not take the config; set what it takes under data."),
        ("model.optimizer", "{type: SGD, params: {lr: 0.5}}", "under model.module.params: width, lr, names"),
    ],
)
def test_a_value_that_nothing_reads_is_a_fault_that_names_the_params(key, value, words):
    """It would have no effect, so the error has the params that would."""
    (found,) = faults(f"{key}={value}")
    assert found.startswith(f"{key}: is not read by ")
    assert words in found


def test_defaults_of_a_base_are_left_out_of_the_config():
    """The run's config does not contain defaults that the module does not read, and a notice lists each."""
    Path("base.yaml").write_text(
        "data: {batch_size: 16, num_workers: 3}\n"
        "model:\n"
        "  {network: {type: own_module.Net}, optimizer: {type: SGD, params: {lr: 0.7}}, loss: {type: own_module.Net}}\n"
    )
    assert faults(text=f"_base_: base.yaml\n{PLAIN}") == []
    cfg = examine("c.yaml").config
    assert [cfg.data.batch_size, cfg.data.num_workers] == [None, 0]
    assert [cfg.model.network, cfg.model.optimizer, cfg.model.loss] == [None] * 3
    removed = {notice.key for notice in cfg.notices if "is left out" in notice.text}
    assert removed == {"data.batch_size", "data.num_workers", "model.network", "model.optimizer", "model.loss"}


def test_a_value_that_a_param_refers_to_is_read():
    """`${data.root}` in the params of a module counts as reading the key."""
    text = PLAIN.replace("Numbers}}", "Numbers, params: {data_dir: '${data.root}/x'}}, root: there}")
    assert faults(text=text) == []
    assert examine("c.yaml").config.data.root == "there"


def test_a_module_that_takes_the_config_needs_what_it_reads():
    """Settings that affect learning have no silent default."""
    assert [error.partition("; for")[0] for error in faults("model.module.type=own_module.Named")] == [
        "c.yaml:2:1: model.optimizer: missing: the optimizer, or one per network"
    ]
    cfg = config("model.module={type: own_module.Named, params: {width: 1}}", "model.optimizer=null")
    assert cfg.model.optimizer is None


# ---- other users' runs


def test_nested_targets_of_a_foreign_run_are_admitted_as_others_are():
    """Inside the params of a trusted module, an optimizer and a network are admitted; functions and other packages are
    refused."""
    text = PLAIN.replace(
        "own_module.Plain, params: {width: 3}",
        "own_module.Nested, params: {net: {type: torch.nn.Linear, params: {in_features: 1, out_features: 1}}, "
        "optimizer: {type: torch.optim.SGD}, scheduler: {type: torch.optim.lr_scheduler.StepLR}}",
    )

    def admit(text: str, *allow: str) -> None:
        run = RunConfig(Path("c.yaml").resolve(), text, is_trusted=False, allow=allow)
        run.admit(read(run))

    admit(text, "own_module")
    for config_text, allow, key in (
        (text, (), "model.module.type"),
        (text.replace("torch.optim.SGD", "torch.hub.load"), ("own_module",), "model.module.params.optimizer.type"),
        (text.replace("torch.nn.Linear", "os.system"), ("own_module",), "model.module.params.net.type"),
        (
            text.replace("{type: torch.nn.Linear", "{_target_: os.system, type: torch.nn.Linear"),
            *(("own_module",), "model.module.params.net._target_"),
        ),
    ):
        with pytest.raises(CheckpointError) as refused:
            admit(config_text, *allow)
        assert key in [fault.key for fault in refused.value.faults]


@pytest.mark.parametrize(
    "text",
    [
        "${data.root}",
        "${...root}",
        "${....data.root}",
        "${oc.select:data.root,x}",
        "${data[root]}",
        "${[data][root]}",
        "${...[root]}",
    ],
)
def test_every_form_of_reference_reads_a_key(text):
    """A module that does not take the config may get a value of its section by any reference."""
    assert faults(text=PLAIN.replace("Numbers}}", f"Numbers, params: {{data_dir: '{text}'}}}}, root: there}}")) == []
    assert examine("c.yaml").config.data.root == "there"


def test_a_reference_to_another_value_reads_no_key():
    """A text that has the key's name, but no reference to it, does not read the key of the section."""
    text = PLAIN.replace("Numbers}}", "Numbers, params: {data_dir: 'x: root'}}, root: there}")
    assert "is not read" in " ".join(map(str, faults(text=text)))


def test_what_is_left_out_stays_out_of_saved_configs_and_of_points(monkeypatch):
    """A run's config and the config of a point are valid, also if a variable sets what is left out."""
    monkeypatch.setenv("SOME_ROOT", "there")
    Path("base.yaml").write_text("data: {batch_size: 16, root: '${oc.env:SOME_ROOT}'}\n")
    assert faults(text=f"_base_: base.yaml\n{PLAIN}") == []
    cfg = examine("c.yaml").config
    Path("again.yaml").write_text(dump(cfg.public()))
    assert examine("again.yaml").faults == []
    grid = SimpleNamespace(path=Path("c.yaml"), keys=["seed"], home=Path(), cfg=cfg)
    Path("point.yaml").write_text(Grid._point(grid, ["seed=1"]).config)
    assert examine("point.yaml").faults == []
