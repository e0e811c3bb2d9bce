"""Simulate a GPU in this process, on a machine without one: reject what a GPU would reject.

Tensors are stored and computed on the CPU, so all values are real. A `TorchFunctionMode` marks each storage with its
device, returns it as `tensor.device`, moves tensors in `to`, `cpu`, `cuda` and factory functions, and raises where
torch would: for operands on two devices, a CPU table with indices on the GPU, a NumPy array of a GPU tensor. Tensors
cannot report `cuda` to C++: autograd would ask the driver for their stream, and without a driver torch 2.15 aborts
the process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deeplightning.dry_run.diagnosis import DeviceError
from deeplightning.faults import count
from deeplightning.own_code import is_user_file, short
from deeplightning.private.torch import storage_id
from deeplightning_plan.torch_private import local_part

CPU = torch.device("cpu")
ANYWHERE = torch.device("meta")  # mark of tensors that mix with both devices

# These read or copy between devices; setting `data` replaces the storage.
_MAY_MIX = {
    *("copy_", "_foreach_copy_", "to", "type_as", "__set__", "__get__", "__setitem__", "set_", "view_as", "expand_as"),
    *("_has_compatible_shallow_copy_type", "is_shared", "_make_subclass", "as_subclass", "is_same_size", "reshape_as"),
    *("ctc_loss", "tensor_split", "tensor", "as_tensor", "is_set_to"),
}
# An index on the CPU is allowed for a tensor on a GPU, but not the reverse.
_INDEXED = {"__getitem__", "index", "index_put_", "index_put"}
# Unlike binary operators, these reject a scalar tensor on the CPU.
_JOINS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "block_diag"}
# Torch requires the lengths of sequences, int64, on the CPU.
_LENGTHS_ON_CPU = {"_pack_padded_sequence", "pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru"}
_LENGTHS_ON_CPU |= {"rnn_tanh", "rnn_relu"}
_READ_BY_NUMPY = {"numpy", "__array__"}
_DRY_RUN = ("deeplightning.dry_run.one_batch", "multiprocessing.process")  # the search for user code ends here
_HINT = "pass `device=` where it is created, or register it as a parameter or buffer"


class NotOnCPU(DeviceError, TypeError):
    """Raised if NumPy reads a tensor on a GPU."""


def user_code_line() -> str:
    """Return `file:line` of the innermost frame of the user's code in a dry run, or "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in _DRY_RUN:
        if is_user_file(frame.f_code.co_filename):
            return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in arguments or results, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


def mark_of(tensor: Tensor) -> torch.device | None:
    """Return the device of a tensor: simulated, the CPU, `meta`, or None if it has no mark."""
    tensor = local_part(tensor)
    if tensor.is_meta:
        return tensor.device
    try:
        return getattr(tensor.untyped_storage(), "marked_device", None)
    except (NotImplementedError, RuntimeError):  # sparse, or inside `torch.func`: no storage
        return None


def mark(value: Any, device: torch.device, place: str = "") -> Any:
    """Mark all tensors in a value with their device and the place where they were created."""
    for tensor in tensors(value):
        if not tensor.is_meta:
            try:
                storage: Any = local_part(tensor).untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            storage.marked_device, storage.made_at = device, place or getattr(storage, "made_at", "")
    return value


def forget_marks(value: Any) -> Any:
    """Let the tensors of a value mix with any device."""
    for tensor in tensors(value):
        local_part(tensor).untyped_storage().marked_device = ANYWHERE  # type: ignore[attr-defined]
    return value


class FakeGpu(TorchFunctionMode):
    """The mode that simulates a GPU; see the module.

    Args:
        device: the device of this process, such as `cuda:1`.
        count: GPUs of this machine; larger indices are rejected. None: any index.
        strict: treat an unmarked tensor as on the CPU, such as one created at import. Otherwise it mixes with both
            devices, as engines need whose C++ code creates tensors.

    Attributes:
        refused: the errors raised so far.
        in_backward: number of running backward passes; during one, unmarked tensors are on the device.
    """

    def __init__(self, device: torch.device, count: int | None = None, strict: bool = False):
        super().__init__()
        self.device, self.count, self.strict = device, count, strict
        self.refused: list[DeviceError] = []
        self.in_backward = 0

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Keep the mode active during a backward pass, where torch disables it."""
        self.in_backward += 1
        try:
            with self:
                yield
        finally:
            self.in_backward -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            device = mark_of(args[0])
            return args[0].device if device in (None, ANYWHERE) else device
        if func == Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return mark_of(args[0]) in (None, CPU, ANYWHERE)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return getattr(mark_of(args[0]), "type", None) == "cuda"
        if func == Tensor.grad.__get__:  # type: ignore[union-attr]
            return self._gradient(func(*args), mark_of(args[0]))
        name = getattr(func, "__name__", "")
        if name == "_parse_to" or func is torch.device or "." in name:
            # These only read arguments, or are overloads that torch calls from C++ (`index_put.default`).
            return func(*args, **kwargs)
        if name == "get_device" and isinstance(args[0], Tensor):
            device = mark_of(args[0])
            return -1 if device is None or device.index is None else device.index
        if name in ("to", "cpu", "cuda", "type_as") and args and isinstance(args[0], Tensor):
            return self._move(func, name, args, kwargs)
        if name in ("pin_memory", "is_pinned") and self.device.type == "cuda":  # there is no driver
            return False if name == "is_pinned" else args[0].clone()
        return self._call(func, name, args, kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function that does not itself move tensors."""
        found = self._result_device(name, args, kwargs)
        args, from_args = self._replace_device(args)
        kwargs, from_kwargs = self._replace_device(kwargs)
        target = from_args or from_kwargs or (CPU if names_cpu(kwargs.get("device")) else None)
        generator, device = kwargs.get("generator"), target or found
        if isinstance(generator, torch.Generator) and device is not None and device.type != "cpu":
            message = f"Expected a '{device.type}' device type for generator but found '{generator.device.type}'"
            self.refuse(DeviceError(f"{message}: {name}"))
        result = func(*args, **kwargs)
        given = list(tensors((args, kwargs)))
        if target is not None:
            return mark(_copy_if_shared(result, given, target), target, user_code_line())
        if name in ("copy_", "_foreach_copy_"):  # the target keeps its device
            return result
        place = ""
        of_list = name in ("tensor", "as_tensor") and bool(args) and not isinstance(args[0], Tensor)
        if of_list or (found is None and not given):
            found, place = CPU, user_code_line()  # a factory function without a device
        for tensor in tensors(result):
            if mark_of(tensor) is None and found is not None:
                mark(tensor, found, place)
        if name in ("_pack_padded_sequence", "_pad_packed_sequence"):
            mark(result[1], CPU, user_code_line())
        return result

    def _gradient(self, gradient: Tensor | None, device: torch.device | None) -> Tensor | None:
        """Mark a gradient, which autograd creates in C++, with the device of its parameter."""
        if gradient is not None and device is not None and mark_of(gradient) is None:
            mark(gradient, device)
        return gradient

    def _move(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        tensor, before = args[0], mark_of(args[0])
        others = [a for a in args[1:] if isinstance(a, Tensor)]
        from_args: torch.device | None
        if name == "cuda":
            index = args[1] if len(args) > 1 else kwargs.pop("device", None)
            from_args = self.device if index is None else self._resolve_device(index)
            return self._moved(tensor.clone() if before != from_args else tensor, tensor, before, from_args)
        given, from_args = self._replace_device(args)
        kwargs, from_kwargs = self._replace_device(kwargs)
        target = from_args or from_kwargs or (CPU if name == "cpu" or names_cpu((args[1:], kwargs)) else None)
        if target is None and others:
            target = mark_of(others[0]) or self._default_device(others[0])
        return self._moved(func(*given, **kwargs), tensor, before, target)

    def _moved(self, moved: Tensor, tensor: Tensor, before: torch.device | None, target: torch.device | None) -> Tensor:
        if moved.is_meta or target is None:
            return moved if before is None or moved.is_meta else mark(moved, before)
        if target == (before or CPU):
            return mark(moved, target)
        return mark(_copy_if_shared(moved, [tensor], target), target, user_code_line())

    def _default_device(self, tensor: Tensor) -> torch.device | None:
        """Return the device of a tensor without a mark."""
        if not self.strict or tensor.is_meta or tensor.is_sparse or type(tensor) not in (Tensor, torch.nn.Parameter):
            return None
        return self.device if self.in_backward else CPU

    def _result_device(self, name: str, args: Any, kwargs: Any) -> torch.device | None:
        """Return the device of the result; reject operands that torch would not combine."""
        given = [(t, mark_of(t) or self._default_device(t)) for t in tensors((args, kwargs))]
        marked = [(t, device) for t, device in given if device is not None and device.type != "meta"]
        if not marked:
            return ANYWHERE if any(device == ANYWHERE and not t.is_meta for t, device in given) else None
        if name in _READ_BY_NUMPY and marked[0][1].type != "cpu":
            message = f"can't convert {marked[0][1]} device type tensor to numpy. Use Tensor.cpu() to copy the tensor"
            self.refuse(NotOnCPU(message + " to host memory first."))
        first = marked[0][1] if args and isinstance(args[0], Tensor) and args[0] is marked[0][0] else None
        if name in _LENGTHS_ON_CPU:
            marked = [(t, d) for t, d in marked if d.type != "cpu" or t.dtype != torch.int64] or marked
        elif name in _INDEXED:
            if first == CPU and any(device.type != "cpu" for _, device in marked[1:]) and marked[0][0].ndim:
                message = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
                self.refuse(DeviceError(f"{message}: {_describe_operands(marked)}"))
            marked = marked[:1]
        elif name not in _MAY_MIX and not name.startswith("new_"):
            self._check_same_device(name, marked)
        if first is not None and (name in _MAY_MIX or name.startswith("new_") or name.endswith("_like")):
            return first
        return next((device for _, device in marked if device.type != "cpu"), marked[0][1])

    def _check_same_device(self, name: str, marked: list[tuple[Tensor, torch.device]]) -> None:
        on_gpu = {device for _, device in marked if device.type != "cpu"}
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        wrong = [
            tensor
            for n, (tensor, device) in enumerate(marked)
            if device.type == "cpu" and (tensor.ndim or name in _JOINS or (in_place and n == 0 and self.strict))
        ]
        if len(on_gpu) > 1 or (on_gpu and wrong):
            devices = " and ".join(sorted(map(str, {device for _, device in marked})))
            message = f"Expected all tensors to be on the same device, but found at least two devices, {devices}"
            self.refuse(DeviceError(f"{message}: {name.strip('_') or name} of {_describe_operands(marked)}; {_HINT}"))

    def refuse(self, error: DeviceError) -> None:
        self.refused.append(error)
        raise error

    # ---- devices in arguments

    def _resolve_device(self, value: Any) -> torch.device:
        """Resolve a name, an index or a device of this type."""
        device = torch.device(self.device.type, value) if isinstance(value, int) else torch.device(value)
        index = self.device.index if device.index is None else device.index
        if self.count is not None and index is not None and index >= self.count:
            limit = f"the run has {count(self.count, 'GPU')} on this machine"
            self.refuse(DeviceError(f"CUDA error: invalid device ordinal: {device}; {limit}"))
        return torch.device(device.type, index or 0)

    def _replace_device(self, value: Any) -> tuple[Any, torch.device | None]:
        """Return arguments with the simulated device replaced by the CPU, and that device if it was among them."""
        if isinstance(value, dict):
            changed = {name: self._replace_device(item) for name, item in value.items()}
            if isinstance(number := value.get("device"), int) and not isinstance(number, bool):
                changed["device"] = CPU, self._resolve_device(number)
            return {n: c for n, (c, _) in changed.items()}, next((d for _, d in changed.values() if d), None)
        if type(value) is tuple:
            parts = [self._replace_device(item) for item in value]
            return tuple(c for c, _ in parts), next((d for _, d in parts if d), None)
        is_name = isinstance(value, str) and value.partition(":")[0] == self.device.type
        if is_name or (isinstance(value, torch.device) and value.type == self.device.type):
            return CPU, self._resolve_device(value)
        return value, None


def names_cpu(value: Any) -> bool:
    """Return whether an argument names the CPU."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return any(map(names_cpu, value))
    return isinstance(value, torch.device | str) and str(value).startswith("cpu")


def _copy_if_shared(result: Any, given: list[Tensor], target: torch.device) -> Any:
    """Copy a result that shares its storage with an argument on another device."""
    if not isinstance(result, Tensor) or result.is_meta:
        return result
    try:
        shared = {storage_id(t) for t in given if not t.is_meta and mark_of(t) != target}
        return result.clone() if storage_id(result) in shared else result
    except (NotImplementedError, RuntimeError):
        return result


def _describe_operands(marked: list[tuple[Tensor, torch.device]]) -> str:
    """Describe the shapes and devices of operands, and where those on the CPU were created."""
    operands = []
    for tensor, device in marked:
        place = getattr(tensor.untyped_storage(), "made_at", "") if device.type == "cpu" else ""
        operands.append(f"{tuple(tensor.shape)} on {device}{place and f' (created at {place})'}")
    return ", ".join(dict.fromkeys(operands))
