"""A device that exists in this process only; it shows where tensors are through a run's life without a GPU.

Tensors of the pretended device are stored and computed on the CPU, so all numbers are real. A mode of torch's functions
keeps on each storage the device that it belongs to, answers `tensor.device` from that, moves tensors in `to`, `cpu` and
factory functions, and refuses what torch refuses on a GPU: operands on two devices. A tensor that autograd makes in C++
belongs to no device, and mixes with both, until an operation in Python uses it.

`main` is `deeplightning` whose strategies compute on the pretended device once the process group is up.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytorch_lightning as pl
import single
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

DEVICE = torch.device("xpu", 0)  # a type that neither torch's CUDA build nor this project has code for

# Reading or copying from one device to the other is what these are for; `set_data` replaces the storage.
MAY_MIX = {
    "copy_",
    "_foreach_copy_",
    "to",
    "type_as",
    "__set__",
    "__get__",
    "__setitem__",
    "set_",
    "view_as",
    "expand_as",
}
MAY_MIX |= {
    "_has_compatible_shallow_copy_type",
    "is_shared",
    "_make_subclass",
    "as_subclass",
    "is_same_size",
    "reshape_as",
}
# An index may be on the CPU.
INDEXED = {"__getitem__", "index", "index_put_"}


def mark_of(tensor: Tensor) -> torch.device | None:
    """The device of a tensor: pretended, the CPU, or None where nobody has said."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if tensor.is_meta:
        return tensor.device
    return getattr(tensor.untyped_storage(), "lies_on", None)


def mark(value: Any, device: torch.device) -> Any:
    for tensor in tensors(value):
        if not tensor.is_meta:
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            tensor.untyped_storage().lies_on = device
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments or results, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


class Mixed(AssertionError):
    """Operands of one operation on two devices."""


class Pretend(TorchFunctionMode):
    """See the module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            return mark_of(args[0]) or args[0].device
        if func == Tensor.is_cpu.__get__:
            return mark_of(args[0]) in (None, torch.device("cpu"))
        name = getattr(func, "__name__", "")
        if name == "_parse_to" or func is torch.device:  # only reads arguments
            return func(*args, **kwargs)
        if name in ("to", "cpu") and args and isinstance(args[0], Tensor):
            return self._move(func, name, args, kwargs)
        found = self._mark_of_all(name, args, kwargs)
        args, asked = _on_cpu(args)
        kwargs, more = _on_cpu(kwargs)
        result = func(*args, **kwargs)
        if asked or more:
            return mark(result, asked or more)
        if _names_cpu(kwargs.get("device")):
            return mark(result, torch.device("cpu"))
        if name in ("copy_", "_foreach_copy_"):  # the target stays where it is
            return result
        if found is None and not any(True for _ in tensors((args, kwargs))):
            found = torch.device("cpu")  # a factory function without a device
        for tensor in tensors(result):
            if mark_of(tensor) is None and found is not None:
                mark(tensor, found)
        return result

    def _move(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        tensor, before = args[0], mark_of(args[0])
        others = [a for a in args[1:] if isinstance(a, Tensor)]
        given, asked = _on_cpu(args)
        kwargs, more = _on_cpu(kwargs)
        target = asked or more
        if target is None and (name == "cpu" or _names_cpu((args[1:], kwargs))):
            target = torch.device("cpu")
        if target is None and others:
            target = mark_of(others[0])
        moved = func(*given, **kwargs)
        if moved.is_meta or target is None:
            return moved if before is None or moved.is_meta else mark(moved, before)
        if (
            target != (before or torch.device("cpu"))
            and moved.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        ):
            moved = moved.clone()
        return mark(moved, target)

    def _mark_of_all(self, name: str, args: Any, kwargs: Any) -> torch.device | None:
        given = list(tensors((args, kwargs)))
        known = [found for t in given if (found := mark_of(t)) is not None and found.type != "meta"]
        if not known:
            return None
        sized = [mark_of(t) for t in given if t.ndim and mark_of(t) is not None and not t.is_meta]
        if name in INDEXED:
            sized = sized[:1]
        if name not in MAY_MIX and not name.startswith("new_") and len(set(sized)) > 1:
            shapes = ", ".join(f"{tuple(t.shape)} on {mark_of(t)}" for t in given)
            raise Mixed(f"Expected all tensors to be on the same device: {name} of {shapes}")
        return DEVICE if DEVICE in (sized or known) else known[0]


def _on_cpu(value: Any) -> tuple[Any, torch.device | None]:
    """Arguments with the pretended device replaced by the CPU, and that device where it was among them."""
    if isinstance(value, dict):
        changed = {name: _on_cpu(item) for name, item in value.items()}
        return {n: c for n, (c, _) in changed.items()}, next((d for _, d in changed.values() if d), None)
    if isinstance(value, tuple):
        parts = [_on_cpu(item) for item in value]
        return tuple(c for c, _ in parts), next((d for _, d in parts if d), None)
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == DEVICE.type)
    if is_device and torch.device(value).type == DEVICE.type:
        return torch.device("cpu"), DEVICE
    return value, None


def _names_cpu(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return any(map(_names_cpu, value))
    return (isinstance(value, torch.device) and value.type == "cpu") or (
        isinstance(value, str) and value.startswith("cpu")
    )


class Places(pl.Callback):
    """Asserts at each hook of a run that what the task holds is on the device that the process computes on.

    Args:
        offloaded: what belongs on the CPU instead: `parameters`, `state` of the optimizer.
    """

    def __init__(self, offloaded: Sequence[str] = ()):
        self.offloaded = set(offloaded)

    def look(self, trainer: Any, task: pl.LightningModule, *_: Any) -> None:
        found = [("parameters", f"parameter {name}", p) for name, p in task.named_parameters() if p.numel()]
        if "parameters" in self.offloaded:  # those that are gathered for a while are on the device
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

    on_train_start = on_train_batch_start = on_train_batch_end = on_train_epoch_end = look
    on_validation_start = on_validation_batch_start = on_validation_batch_end = on_validation_end = look
    on_test_start = on_test_batch_start = on_test_end = look
    on_predict_start = on_predict_batch_start = look
    on_save_checkpoint = look


def pretend() -> None:
    """Has each strategy compute on the pretended device, from the end of its `setup_environment` on."""
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
        DeepSpeed._on_cpu = True
    mode = Pretend()
    active: list[bool] = []
    settling: list[bool] = []
    run_backward = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        """Torch calls it with the mode switched off, and hooks in Python move tensors too."""
        with mode if active else contextlib.nullcontext():
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = backward
    to_onnx = torch.onnx.export

    def export(*args: Any, **kwargs: Any) -> Any:
        """On the CPU, without the mode: torch 2.11 would trace what the mode asks of each tensor."""
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
            if settling:  # a strategy calls the one that it derives from
                set_up(self)
                return
            settling.append(True)
            if active:
                active.clear()
                mode.__exit__(None, None, None)
            set_up(self)
            settling.clear()
            active.append(True)
            mode.__enter__()

        kind.root_device = property(device)
        kind.setup_environment = environment
    strategies.DDPStrategy.determine_ddp_device_ids = lambda self: None  # else its buckets want CUDA's streams
    _pretend_fsdp()


def _pretend_fsdp() -> None:
    """Has fully_shard put parameters on the pretended device, whose streams are the CPU's."""
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
    """Instead of `deeplightning.cli:main`."""
    pretend()
    single.main()
