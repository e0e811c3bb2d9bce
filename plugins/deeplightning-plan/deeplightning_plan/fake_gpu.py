"""Pretend a GPU in this process: refuse what a GPU would refuse, on a machine without one.

Its tensors are stored and computed on the CPU, so all numbers are real. A mode of torch's functions keeps on each
storage the device that it belongs to, answers `tensor.device` from that, moves tensors in `to`, `cpu`, `cuda` and
factory functions, and refuses what torch refuses: operands on two devices, a CPU table with indices on the GPU, a
NumPy array of what is on the GPU. Tensors that report `cuda` to C++ are not possible: autograd asks the driver for
their stream, and without a driver torch 2.15 aborts the process.
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
from deeplightning.own_code import is_theirs, short
from deeplightning.private.torch import storage_id
from deeplightning_plan.torch_private import local_part

CPU = torch.device("cpu")
ANYWHERE = torch.device("meta")  # the mark of what mixes with both

# Reading or copying from one device to the other is what these are for; `set_data` replaces the storage.
_MAY_MIX = {
    *("copy_", "_foreach_copy_", "to", "type_as", "__set__", "__get__", "__setitem__", "set_", "view_as", "expand_as"),
    *("_has_compatible_shallow_copy_type", "is_shared", "_make_subclass", "as_subclass", "is_same_size", "reshape_as"),
    *("ctc_loss", "tensor_split", "tensor", "as_tensor", "is_set_to"),
}
# Of a tensor on a GPU an index may be on the CPU; the other way round it may not.
_INDEXED = {"__getitem__", "index", "index_put_", "index_put"}
# They take no number from the CPU, which operators of two operands do.
_JOINED = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "block_diag"}
# Torch wants the lengths of sequences, int64, on the CPU.
_LENGTHS_ON_CPU = {"_pack_padded_sequence", "pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru"}
_LENGTHS_ON_CPU |= {"rnn_tanh", "rnn_relu"}
_READ_BY_NUMPY = {"numpy", "__array__"}
_DRY_RUN = ("deeplightning.dry_run.one_batch", "multiprocessing.process")  # what called these is not looked at
_NEXT = "give `device=` where it is made, or register a parameter or buffer"


class NotOnCPU(DeviceError, TypeError):
    """NumPy reads what is on a GPU."""


def line_now() -> str:
    """Return `file:line` of the innermost line of the user's own code that runs now in a dry run; empty: none runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in _DRY_RUN:
        if is_theirs(frame.f_code.co_filename):
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
    """Return the device of a tensor: pretended, the CPU, `meta`, or None if it has no mark."""
    tensor = local_part(tensor)
    if tensor.is_meta:
        return tensor.device
    try:
        return getattr(tensor.untyped_storage(), "lies_on", None)
    except (NotImplementedError, RuntimeError):  # sparse, or inside `torch.func`: there is no storage
        return None


def mark(value: Any, device: torch.device, place: str = "") -> Any:
    """Mark all tensors in a value with their device and the place at which they were made."""
    for tensor in tensors(value):
        if not tensor.is_meta:
            try:
                storage: Any = local_part(tensor).untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            storage.lies_on, storage.made_at = device, place or getattr(storage, "made_at", "")
    return value


def forget_marks(value: Any) -> Any:
    """Mark the tensors of a value as mixing with any device."""
    for tensor in tensors(value):
        local_part(tensor).untyped_storage().lies_on = ANYWHERE  # type: ignore[attr-defined]
    return value


class FakeGpu(TorchFunctionMode):
    """See the module.

    Args:
        device: what the process computes on, such as `cuda:1`.
        count: GPUs of this machine; a larger index is refused. None: any.
        strict: a tensor that nobody has marked is on the CPU, as one that was made at import is. Else it mixes with
            both, which the engines need whose C++ code makes tensors.

    Attributes:
        refused: what was refused so far.
        goes_backward: gradients are computed now, so what nobody has marked is on the device.
    """

    def __init__(self, device: torch.device, count: int | None = None, strict: bool = False):
        super().__init__()
        self.device, self.count, self.strict = device, count, strict
        self.refused: list[DeviceError] = []
        self.goes_backward = 0

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Keep the mode on while gradients are computed, for which torch switches it off."""
        self.goes_backward += 1
        try:
            with self:
                yield
        finally:
            self.goes_backward -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            lies_on = mark_of(args[0])
            return args[0].device if lies_on in (None, ANYWHERE) else lies_on
        if func == Tensor.is_cpu.__get__:  # type: ignore[attr-defined]
            return mark_of(args[0]) in (None, CPU, ANYWHERE)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return getattr(mark_of(args[0]), "type", None) == "cuda"
        if func == Tensor.grad.__get__:  # type: ignore[union-attr]
            return self._gradient(func(*args), mark_of(args[0]))
        name = getattr(func, "__name__", "")
        if name == "_parse_to" or func is torch.device or "." in name:
            # They only read arguments, or are overloads of an operator that torch calls in C++ (`index_put.default`).
            return func(*args, **kwargs)
        if name == "get_device" and isinstance(args[0], Tensor):
            lies_on = mark_of(args[0])
            return -1 if lies_on is None or lies_on.index is None else lies_on.index
        if name in ("to", "cpu", "cuda", "type_as") and args and isinstance(args[0], Tensor):
            return self._move(func, name, args, kwargs)
        if name in ("pin_memory", "is_pinned") and self.device.type == "cuda":  # there is no driver to ask
            return False if name == "is_pinned" else args[0].clone()
        return self._call(func, name, args, kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function that is not about devices itself."""
        found = self._agreed(name, args, kwargs)
        args, asked = self._on_cpu(args)
        kwargs, more = self._on_cpu(kwargs)
        target = asked or more or (CPU if names_cpu(kwargs.get("device")) else None)
        generator, there = kwargs.get("generator"), target or found
        if isinstance(generator, torch.Generator) and there is not None and there.type != "cpu":
            words = f"Expected a '{there.type}' device type for generator but found '{generator.device.type}'"
            self.refuse(DeviceError(f"{words}: {name}"))
        result = func(*args, **kwargs)
        given = list(tensors((args, kwargs)))
        if target is not None:
            return mark(_apart(result, given, target), target, line_now())
        if name in ("copy_", "_foreach_copy_"):  # the target stays where it is
            return result
        place = ""
        of_list = name in ("tensor", "as_tensor") and bool(args) and not isinstance(args[0], Tensor)
        if of_list or (found is None and not given):
            found, place = CPU, line_now()  # a factory function without a device
        for tensor in tensors(result):
            if mark_of(tensor) is None and found is not None:
                mark(tensor, found, place)
        if name in ("_pack_padded_sequence", "_pad_packed_sequence"):
            mark(result[1], CPU, line_now())
        return result

    def _gradient(self, gradient: Tensor | None, lies_on: torch.device | None) -> Tensor | None:
        """Mark a gradient, which autograd makes in C++, with the device of its parameter."""
        if gradient is not None and lies_on is not None and mark_of(gradient) is None:
            mark(gradient, lies_on)
        return gradient

    def _move(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        tensor, before = args[0], mark_of(args[0])
        others = [a for a in args[1:] if isinstance(a, Tensor)]
        asked: torch.device | None
        if name == "cuda":
            index = args[1] if len(args) > 1 else kwargs.pop("device", None)
            asked = self.device if index is None else self._device(index)
            return self._moved(tensor.clone() if before != asked else tensor, tensor, before, asked)
        given, asked = self._on_cpu(args)
        kwargs, more = self._on_cpu(kwargs)
        target = asked or more or (CPU if name == "cpu" or names_cpu((args[1:], kwargs)) else None)
        if target is None and others:
            target = mark_of(others[0]) or self._unmarked(others[0])
        return self._moved(func(*given, **kwargs), tensor, before, target)

    def _moved(self, moved: Tensor, tensor: Tensor, before: torch.device | None, target: torch.device | None) -> Tensor:
        if moved.is_meta or target is None:
            return moved if before is None or moved.is_meta else mark(moved, before)
        if target == (before or CPU):
            return mark(moved, target)
        return mark(_apart(moved, [tensor], target), target, line_now())

    def _unmarked(self, tensor: Tensor) -> torch.device | None:
        """Return the device of a tensor without a mark."""
        if not self.strict or tensor.is_meta or tensor.is_sparse or type(tensor) not in (Tensor, torch.nn.Parameter):
            return None
        return self.device if self.goes_backward else CPU

    def _agreed(self, name: str, args: Any, kwargs: Any) -> torch.device | None:
        """Return the device of the result; refuse operands that a GPU would not take together."""
        given = [(t, mark_of(t) or self._unmarked(t)) for t in tensors((args, kwargs))]
        known = [(t, device) for t, device in given if device is not None and device.type != "meta"]
        if not known:
            return ANYWHERE if any(device == ANYWHERE and not t.is_meta for t, device in given) else None
        if name in _READ_BY_NUMPY and known[0][1].type != "cpu":
            words = f"can't convert {known[0][1]} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            self.refuse(NotOnCPU(words + "host memory first."))
        first = known[0][1] if args and isinstance(args[0], Tensor) and args[0] is known[0][0] else None
        if name in _LENGTHS_ON_CPU:
            known = [(t, d) for t, d in known if d.type != "cpu" or t.dtype != torch.int64] or known
        elif name in _INDEXED:
            if first == CPU and any(device.type != "cpu" for _, device in known[1:]) and known[0][0].ndim:
                words = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
                self.refuse(DeviceError(f"{words}: {_described(known)}"))
            known = known[:1]
        elif name not in _MAY_MIX and not name.startswith("new_"):
            self._check(name, known)
        if first is not None and (name in _MAY_MIX or name.startswith("new_") or name.endswith("_like")):
            return first
        return next((device for _, device in known if device.type != "cpu"), known[0][1])

    def _check(self, name: str, known: list[tuple[Tensor, torch.device]]) -> None:
        there = {device for _, device in known if device.type != "cpu"}
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        wrong = [
            tensor
            for n, (tensor, device) in enumerate(known)
            if device.type == "cpu" and (tensor.ndim or name in _JOINED or (in_place and n == 0 and self.strict))
        ]
        if len(there) > 1 or (there and wrong):
            devices = " and ".join(sorted(map(str, {device for _, device in known})))
            words = f"Expected all tensors to be on the same device, but found at least two devices, {devices}"
            self.refuse(DeviceError(f"{words}: {name.strip('_') or name} of {_described(known)}; {_NEXT}"))

    def refuse(self, error: DeviceError) -> None:
        self.refused.append(error)
        raise error

    # ---- devices in arguments

    def _device(self, value: Any) -> torch.device:
        """Return the device that a word, a number or a device of this type means."""
        device = torch.device(self.device.type, value) if isinstance(value, int) else torch.device(value)
        index = self.device.index if device.index is None else device.index
        if self.count is not None and index is not None and index >= self.count:
            there = f"where this machine has {count(self.count, 'GPU')} in the run"
            self.refuse(DeviceError(f"CUDA error: invalid device ordinal: {device}, {there}"))
        return torch.device(device.type, index or 0)

    def _on_cpu(self, value: Any) -> tuple[Any, torch.device | None]:
        """Return arguments with the pretended device replaced by the CPU, and that device if it was among them."""
        if isinstance(value, dict):
            changed = {name: self._on_cpu(item) for name, item in value.items()}
            if isinstance(number := value.get("device"), int) and not isinstance(number, bool):
                changed["device"] = CPU, self._device(number)
            return {n: c for n, (c, _) in changed.items()}, next((d for _, d in changed.values() if d), None)
        if type(value) is tuple:
            parts = [self._on_cpu(item) for item in value]
            return tuple(c for c, _ in parts), next((d for _, d in parts if d), None)
        is_word = isinstance(value, str) and value.partition(":")[0] == self.device.type
        if is_word or (isinstance(value, torch.device) and value.type == self.device.type):
            return CPU, self._device(value)
        return value, None


def names_cpu(value: Any) -> bool:
    """Return whether one of several arguments is the CPU."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return any(map(names_cpu, value))
    return isinstance(value, torch.device | str) and str(value).startswith("cpu")


def _apart(result: Any, given: list[Tensor], target: torch.device) -> Any:
    """Copy a result that shares its storage with an argument on another device."""
    if not isinstance(result, Tensor) or result.is_meta:
        return result
    try:
        shared = {storage_id(t) for t in given if not t.is_meta and mark_of(t) != target}
        return result.clone() if storage_id(result) in shared else result
    except (NotImplementedError, RuntimeError):
        return result


def _described(known: list[tuple[Tensor, torch.device]]) -> str:
    """Describe the shapes and devices of operands, and where those on the CPU were made."""
    words = []
    for tensor, device in known:
        place = getattr(tensor.untyped_storage(), "made_at", "") if device.type == "cpu" else ""
        words.append(f"{tuple(tensor.shape)} on {device}{place and f' (made at {place})'}")
    return ", ".join(dict.fromkeys(words))
