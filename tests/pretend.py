"""Pretend that a CPU is a GPU under every engine, to check the device of tensors during a run.

A tensor that C++ code creates has no device, and is accepted as either, until a Python operation uses it.

`main` runs `deeplightning` with strategies that compute on the pretended device once the process group is set up.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
import single
import torch
from deeplightning_plan.fake_gpu import FakeGpu, mark_of, tensors
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

DEVICE = torch.device("xpu", 0)  # a type without code in torch's CUDA build and this project


class DeviceChecks(pl.Callback):
    """Assert at each hook of a run that the task's tensors are on the device that the process computes on.

    Args:
        offloaded: what must be on the CPU instead: `parameters`, `state` (of the optimizer).
    """

    def __init__(self, offloaded: Sequence[str] = ()):
        self.offloaded = set(offloaded)

    def check_devices(self, trainer: Any, task: pl.LightningModule, *_: Any) -> None:
        found = [("parameters", f"parameter {name}", p) for name, p in task.named_parameters() if p.numel()]
        if "parameters" in self.offloaded:  # temporarily gathered parameters are on the device
            found = [row for row in found if isinstance(row[2], DTensor)]
        found += [("buffers", f"buffer {name}", buffer) for name, buffer in task.named_buffers()]
        for name, metric in task.named_modules():
            if isinstance(metric, Metric):
                found += [("metrics", f"metric {name}", t) for t in tensors(list(metric.metric_state.values()))]
        for optimizer in trainer.optimizers if trainer.training else ():
            state = list(dict(getattr(optimizer, "state", {})).values())
            found += [("state", "the optimizer's state", t) for t in tensors(state) if t.ndim]
        wrong = []
        for kind, name, tensor in found:
            home = torch.device("cpu") if kind in self.offloaded else DEVICE
            if mark_of(tensor) not in (None, home):
                wrong.append(f"{name} on {mark_of(tensor)}")
        assert not wrong, f"{trainer.state.fn}: not on {DEVICE}: {', '.join(wrong[:5])}"

    on_train_start = on_train_batch_start = on_train_batch_end = on_train_epoch_end = check_devices
    on_validation_start = on_validation_batch_start = on_validation_batch_end = on_validation_end = check_devices
    on_test_start = on_test_batch_start = on_test_end = check_devices
    on_predict_start = on_predict_batch_start = check_devices
    on_save_checkpoint = check_devices


def pretend() -> None:
    """Let each strategy compute on the pretended device, from the end of its `setup_environment`."""
    from pytorch_lightning import strategies

    from deeplightning.engine.fsdp import Fsdp

    classes: list[Any] = [strategies.SingleDeviceStrategy, strategies.DDPStrategy, Fsdp]
    if "deepspeed" in os.environ.get("PRETEND", ""):
        from deepspeed.accelerator import get_accelerator

        from deeplightning.engine.zero import DeepSpeed

        classes.append(DeepSpeed)
        accelerator = get_accelerator()
        accelerator.device_name = lambda index=None: str(DEVICE)
        accelerator.current_device_name = lambda: str(DEVICE)
        accelerator.on_accelerator = lambda tensor: tensor.device == DEVICE
    mode = FakeGpu(DEVICE)
    active: list[bool] = []
    in_setup: list[bool] = []
    run_backward = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        """Run the backward pass in the mode: torch switches it off, and hooks in Python move tensors too."""
        with mode if active else contextlib.nullcontext():
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = backward
    to_onnx = torch.onnx.export

    def export(*args: Any, **kwargs: Any) -> Any:
        """Export on the CPU, without the mode: torch 2.11 would trace the mode's checks of each tensor."""
        if not active:
            return to_onnx(*args, **kwargs)
        mode.__exit__(None, None, None)
        try:
            return to_onnx(*args, **kwargs)
        finally:
            mode.__enter__()

    torch.onnx.export = export
    for kind in classes:
        real_device, set_up = kind.root_device, kind.setup_environment

        def device(self: Any, real: Any = real_device) -> torch.device:
            return DEVICE if active else real.fget(self)

        def environment(self: Any, set_up: Any = set_up) -> None:
            if in_setup:  # the call of the base class
                set_up(self)
                return
            in_setup.append(True)
            if active:
                active.clear()
                mode.__exit__(None, None, None)
            set_up(self)
            in_setup.clear()
            active.append(True)
            mode.__enter__()

        kind.root_device = property(device)
        kind.setup_environment = environment
    strategies.DDPStrategy.determine_ddp_device_ids = lambda self: None  # otherwise its buckets need CUDA streams
    for name in ("all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter_tensor"):
        setattr(torch.distributed, name, _between_devices(getattr(torch.distributed, name), active))
    _pretend_fsdp()


def _between_devices(function: Callable[..., Any], active: list[bool]) -> Callable[..., Any]:
    """Wrap a collective so that, like NCCL, it rejects CPU tensors in the main group."""

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if active and not kwargs.get("group"):
            assert {*map(mark_of, tensors((args, kwargs)))} <= {DEVICE}, (
                f"{function.__name__} of a tensor of another device"
            )
        return function(*args, **kwargs)

    return collective


def _pretend_fsdp() -> None:
    """Let fully_shard put parameters on the pretended device, with the streams of the CPU."""
    from torch.distributed.fsdp import _fully_shard as package

    for name in ("_fully_shard", "_fsdp_collectives", "_fsdp_param_group", "_fsdp_state", "_fsdp_init"):
        module = getattr(package, name)
        if hasattr(module, "_get_device_handle"):
            module._get_device_handle = lambda kind: torch.cpu
        if hasattr(module, "_get_device_from_mesh"):
            module._get_device_from_mesh = lambda mesh: DEVICE
        if hasattr(module, "record_grad_output_stream"):
            module.record_grad_output_stream = lambda *_: None


def main() -> None:
    """Run the command on the pretended device, instead of `deeplightning.cli:main`."""
    pretend()
    single.main()
