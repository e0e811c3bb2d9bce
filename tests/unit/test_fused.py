"""`engine.fused` decides which optimizers use a fused kernel. Without a GPU, torch's `FakeTensorMode` provides its
parameters."""

from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deeplightning.config.schema import Optimizer
from deeplightning.task.networks import MisfitError
from deeplightning.task.optimize import optimizers

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.8.") and not torch.cuda.is_available(),
    reason="torch 2.8 has tensors of a fake GPU only on a machine with a GPU",
)


def trainer(scaler=None, strategy=None):
    return SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler), strategy=strategy)


def made(kind="torch.optim.SGD", params=None, device="cuda", fused="auto", network=None, on=None, groups=()):
    """Return the default `fused` of an optimizer that is built for a network on a device."""
    target = Optimizer(type=kind, params={"lr": 0.1, **(params or {})}, groups=list(groups))
    model = SimpleNamespace(optimizer=target, scheduler=None)
    with FakeTensorMode():
        with torch.device(device):
            built = network() if network else nn.Linear(2, 2)
        return optimizers(built, model, on or trainer(), fused).defaults.get("fused")


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_on_a_gpu_a_step_is_one_kernel(kind):
    """On a GPU the fused kernel is used if torch has one; on a CPU, or with `fused: false`, torch's default applies."""
    assert made(f"torch.optim.{kind}") is True
    assert made(f"torch.optim.{kind}", device="cpu") in (None, False)
    assert made(f"torch.optim.{kind}", fused=False) in (None, False)


@pytest.mark.parametrize("params", [{"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_params_of_the_optimizer_take_precedence(params):
    """Params that choose another implementation override `engine.fused`."""
    assert made(params=params) in (None, False)
    assert made(params=params, fused=True) in (None, False)


def test_auto_skips_what_has_no_fused_kernel():
    """`auto` does not fuse an optimizer without such a kernel, or with sparse gradients, complex parameters, a gradient
    scaler or DeepSpeed."""
    assert made("torch.optim.Rprop") is None
    assert made(network=lambda: nn.Embedding(3, 2, sparse=True)) in (None, False)
    assert made(network=lambda: nn.ParameterList([torch.zeros(2, dtype=torch.complex64)])) in (None, False)
    assert made(on=trainer(scaler=object())) in (None, False)
    deepspeed = pl.strategies.DeepSpeedStrategy.__new__(pl.strategies.DeepSpeedStrategy)
    assert made(on=trainer(strategy=deepspeed)) in (None, False)


def test_true_is_for_a_cpu_too_and_refused_where_there_is_no_kernel():
    """`fused: true` also fuses on a CPU; if that is impossible, the error names both keys."""
    assert made(fused=True, device="cpu") is True
    both = r"engine.fused is true, and model.optimizer is .*Rprop: it has no fused kernel"
    with pytest.raises(MisfitError, match=both):
        made("torch.optim.Rprop", fused=True)
    with pytest.raises(MisfitError, match="it has sparse gradients or complex parameters"):
        made(fused=True, network=lambda: nn.Embedding(3, 2, sparse=True))


def test_a_checkpoint_does_not_bring_the_kernel_of_another_device():
    """A run that resumes a checkpoint of another device keeps its own choice of the kernel."""
    target = Optimizer(type="torch.optim.Adam", params={"lr": 0.1})
    model, network = SimpleNamespace(optimizer=target, scheduler=None), nn.Linear(2, 2)
    states = {}
    for fused in (True, False):
        optimizer = optimizers(network, model, trainer(), fused)
        network(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        states[fused] = optimizer.state_dict()
    for mine, saved in ((True, False), (False, True)):
        optimizer = optimizers(network, model, trainer(), mine)
        optimizer.load_state_dict(states[saved])
        assert bool(optimizer.param_groups[0]["fused"]) is mine
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.step()


def test_a_fused_optimizer_by_its_params_is_refused_with_a_gradient_scaler():
    """Its gradients are still scaled when they are clipped."""
    with pytest.raises(MisfitError, match="would clip scaled gradients"):
        made(params={"fused": True}, on=trainer(scaler=object()))
    assert made(params={"fused": True}) is True


def test_a_kernel_for_the_cpu_only_is_not_used_on_a_gpu(monkeypatch):
    """Older releases of torch have one for Adagrad."""
    monkeypatch.setattr(torch.optim.Adagrad, "__doc__", "whether the fused implementation (CPU only) is used")
    assert made("torch.optim.Adagrad") in (None, False)
