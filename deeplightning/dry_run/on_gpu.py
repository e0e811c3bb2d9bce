"""A process of a dry run computes on a pretended GPU from here to its end: Lightning's strategies place tensors there,
and torch answers the user's own code as on a machine with GPUs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning import strategies
from pytorch_lightning.accelerators import CPUAccelerator

from deeplightning import own_code
from deeplightning.config.schema import Config
from deeplightning.dry_run.isolation import line_now
from deeplightning.dry_run.pretended import CPU, OnTwoDevices, Pretended, forget_marks, mark, mark_of, tensors
from deeplightning.engine.gpus import indexes
from deeplightning.engine.plan import local_size
from deeplightning.private.torch import around_backward

_OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
"""Torch's functions that put what they exchange on the GPU themselves."""
_EMPTY = ("barrier", "monitored_barrier")
"""They exchange nothing."""


def wants_gpu(cfg: Config) -> bool:
    """Whether a config asks for GPUs, be they there or not."""
    return cfg.engine.gpus is not None or (cfg.asked or {}).get("engine.gpus") == "auto"


def compute_on_gpu(cfg: Config, rank: int) -> Pretended:
    """Has this process compute on the GPU that a rank of a config would have; there is no way back.

    The user's own modules are imported anew, since some ask at import whether there is a GPU.
    """
    gpus = indexes(cfg.engine.gpus)
    numbers = gpus if isinstance(gpus, list) else range(max(local_size(cfg.engine), rank + 1))
    index = int(numbers[rank])
    mode = Pretended(torch.device("cuda", index), max(*map(int, numbers), 0) + 1, strict=True)
    around_backward(mode.backward)
    _use_in_strategies(mode.device)
    _answer(mode)
    own_code.forget()
    mode.__enter__()
    return mode


def _use_in_strategies(device: torch.device) -> None:
    for kind in (strategies.SingleDeviceStrategy, strategies.DDPStrategy):
        kind.root_device = property(lambda self: device)  # type: ignore[assignment, method-assign]
    strategies.DDPStrategy.determine_ddp_device_ids = lambda self: None  # type: ignore[method-assign]
    CPUAccelerator.setup_device = lambda self, device: None  # type: ignore[method-assign]


def _answer(mode: Pretended) -> None:
    """What the user's own code and ours ask torch is answered as on a machine with GPUs; libraries get the truth."""
    answers: dict[str, object] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": mode.count,
        "current_device": mode.device.index,
        "get_device_capability": (9, 0),
        "get_device_name": "a pretended GPU",
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
        "mem_get_info": (80 * 2**30, 80 * 2**30),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _for_own_code(lambda *_, answer=answer, **__: answer, getattr(torch.cuda, name)))
    torch.cuda.Event = torch.cuda.Stream = _Queue  # type: ignore[assignment, misc]
    torch.cuda.current_stream = torch.cuda.default_stream = _Queue  # type: ignore[assignment]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment, misc]
    load, from_numpy, autocast = torch.load, torch.from_numpy, torch.autocast.__init__

    def loaded(*args: Any, **options: Any) -> Any:
        """What was saved on a GPU comes back there, so where it is is not known."""
        content = load(*args, **options)
        return forget_marks(content) if options.get("map_location") is None else content

    def began(self: Any, device_type: str, *args: Any, **options: Any) -> None:
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **options)

    torch.load = _for_own_code(loaded, load)
    torch.from_numpy = lambda array: mark(from_numpy(array), CPU, line_now())  # type: ignore[assignment]
    torch.autocast.__init__ = began  # type: ignore[method-assign]
    torch.backends.cudnn.enabled = False


class _Queue:
    """A stream or an event of a device that has always done everything."""

    def __init__(self, *_: object, **__: object):
        """Any arguments."""

    def _nothing(self, *_: object, **__: object) -> None:
        """There is nothing to wait for."""

    record = record_event = synchronize = wait = wait_event = wait_stream = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0


def _for_own_code(theirs: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **options: Any) -> Any:
        file = sys._getframe(1).f_code.co_filename
        return (theirs if own_code.is_theirs(file) or file.startswith(own_code.OURS) else others)(*args, **options)

    return function


def refuse_on_cpu(mode: Pretended, given: Any, what: str) -> None:
    """NCCL, by which GPUs exchange tensors, takes none of the CPU; what libraries exchange by themselves is theirs.

    Raises:
        OnTwoDevices: one is there, and no function of torch is about to move it.
    """
    if what not in _EMPTY and line_now() and any(mark_of(tensor) == CPU for tensor in tensors(given)):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name in _OBJECTS:
                return
            frame = frame.f_back  # type: ignore[assignment]
        made = next((getattr(t.untyped_storage(), "made_at", "") for t in tensors(given) if mark_of(t) == CPU), "")
        made = f", made at {made}" if made else ""
        mode.refuse(
            OnTwoDevices(f"No backend type associated with device type cpu: {what} of a tensor on the CPU{made}")
        )
