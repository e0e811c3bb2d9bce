"""A target must be of the kind that its section needs. It is checked before it is called, and the error has its key."""

import os
import sys
from pathlib import Path

import pytest
from checks import GOOD

from deeplightning.config import strategy
from deeplightning.config.examine import examine, load_config
from deeplightning.faults import ConfigError
from deeplightning.run.assemble import init_module

OWN = """\
import functools

import torch
from torch import nn


def loss(weighted: bool = False) -> nn.NLLLoss | nn.CrossEntropyLoss:
    return nn.NLLLoss() if weighted else nn.CrossEntropyLoss()


def hidden(make: object = int):
    return make()


class Loss(nn.Module):
    @classmethod
    def made(cls) -> "Loss":
        return cls()

    def forward(self, outputs, truth):
        return nn.functional.cross_entropy(outputs, truth)


partial = functools.partial(Loss)
"""


@pytest.fixture
def own(here):
    """A working directory with own code and a config."""
    Path("own_kinds.py").write_text(OWN)
    Path("c.yaml").write_text(GOOD)
    return here


# target: its section, and the error of `check` and `train`
WRONG = {
    "os.system": ("loss", "`os.system` is in Python's `os`, which does not provide a loss (torch.nn.Module)"),
    "torch.os.system": ("loss", "`posix.system` is in Python's `posix`, which does not provide a loss"),
    "builtins.eval": ("loss", "`builtins.eval` is in Python's `builtins`, which does not provide a loss"),
    "builtins.dict": ("network", "`builtins.dict` is in Python's `builtins`, which does not provide a network"),
    "subprocess.Popen": ("network", "`subprocess.Popen` is in Python's `subprocess`, which does not provide"),
    "shutil.rmtree": ("optimizer", "`shutil.rmtree` is in Python's `shutil`, which does not provide an optimizer"),
    "sys.exit": ("module", "`sys.exit` is in Python's `sys`, which does not provide a LightningModule"),
    "torch.nn.NLLLoss": ("network", "torch.nn.NLLLoss is a loss, not a network (torch.nn.Module)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_target_of_the_wrong_kind_is_refused_before_it_is_called(own, name):
    """A class is judged by its base classes. No section accepts a target from the standard library."""
    section, words = WRONG[name]
    for importing in (False, True):
        report = examine("c.yaml", [f"model.{section}.type={name}"], importing=importing)
        (fault,) = [f for f in report.faults if f.key == f"model.{section}.type"]
        assert words in fault.message
        assert (fault.exit_code, fault.place) == (2, f"override model.{section}.type={name}")


def test_a_command_inside_params_is_not_called(own):
    """Inside params, only the modules of the standard library that make plain values are allowed."""
    command = "{type: os.system, params: {command: touch called}}"
    (fault,) = examine("c.yaml", [f"model.network.params.num_classes={command}"]).faults
    assert "`os.system` is in Python's `os`, which does not provide a part of a run" in fault.message
    timer = (
        "{type: pytorch_lightning.callbacks.Timer, params: {duration: {type: datetime.timedelta, params: {hours: 1}}}}"
    )
    assert examine("c.yaml", [f"train.callbacks=[{timer}]"]).faults == []
    cfg = load_config("c.yaml")
    cfg.model.loss.type, cfg.model.loss.params = "os.system", {"command": "touch called"}  # past `check`
    with pytest.raises(ConfigError, match=r"c\.yaml:8:10: model.loss: `os.system` is in Python's `os`"):
        init_module(cfg, "model")
    assert not Path("called").exists()


@pytest.mark.parametrize("name", ["own_kinds.loss", "own_kinds.hidden", "own_kinds.Loss", "own_kinds.Loss.made"])
def test_what_may_make_a_loss_passes(own, name):
    """A class of the right kind passes, and so does any function: its result is judged when it is called."""
    for importing in (False, True):
        report = examine("c.yaml", [f"model.loss.type={name}"], importing=importing)
        assert (report.faults, report.unchecked) == ([], [])


def test_what_cannot_be_read_is_called_unchecked(own):
    """`check` lists a target whose kind cannot be read from the source as unchecked, not as an error."""
    report = examine("c.yaml", ["model.loss.type=own_kinds.partial"])
    assert report.faults == []
    assert [(f.key, "own_kinds" in f.message) for f in report.unchecked] == [("model.loss.type", True)]


def test_what_comes_back_is_judged_at_its_own_key(own):
    """A function that returns the wrong kind is an error of the loss, at its line, and not of the task."""
    with pytest.raises(ConfigError) as caught:
        init_module(load_config("c.yaml", ["model.loss.type=own_kinds.hidden"]), "model")
    assert str(caught.value) == (
        "override model.loss.type=own_kinds.hidden: model.loss: own_kinds.hidden returns `int`, which is not a loss "
        "(torch.nn.Module)"
    )


def test_a_file_of_the_users_is_not_taken_for_the_standard_library(own, monkeypatch):
    """A user's file with the name of a standard module, such as `this`, may provide a loss."""
    Path("this.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.syspath_prepend(os.fspath(own))
    assert examine("c.yaml", ["model.loss.type=this.loss"]).faults == []


def test_a_process_group_backend_is_one_of_those_of_torch(own):
    """`check` refuses a backend that torch does not have, so that the run does not fail with a traceback."""
    from torch.distributed import Backend

    assert set(strategy.GROUPS) == set(Backend.backend_list) - {"undefined", "fake"}
    report = examine("c.yaml", ["engine.processes=2", "engine.params={process_group_backend: glooo}"])
    (fault,) = report.faults
    assert (fault.key, fault.exit_code) == ("engine.params.process_group_backend", 2)
    assert "must be one of gloo, nccl, mpi, ucc, xccl, not 'glooo'. Did you mean gloo?" in fault.message
    pair = "engine.params={process_group_backend: 'cpu:gloo,cuda:nccl'}"
    assert examine("c.yaml", ["engine.backend=ddp", "engine.processes=2", pair]).faults == []
