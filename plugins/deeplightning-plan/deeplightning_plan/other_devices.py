"""Repeat a dry run under the conditions of the run: in two processes, on simulated GPUs.

In each process Lightning's strategies place tensors on the simulated GPU, and `torch.cuda` answers the user's code as
on a machine with GPUs.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import strategies
from pytorch_lightning.accelerators import CPUAccelerator

from deeplightning import own_code
from deeplightning.config.machine import local_size, world_size
from deeplightning.config.schema import Config
from deeplightning.dry_run.diagnosis import Attempt, DeviceError
from deeplightning.dry_run.isolation import on_one_cpu
from deeplightning.dry_run.try_config import try_out
from deeplightning.faults import Fault
from deeplightning_plan.compared_ranks import Event, Ranks, Reporter
from deeplightning_plan.fake_gpu import CPU, FakeGpu, forget_marks, mark, mark_of, tensors, user_code_line
from deeplightning_plan.torch_private import around_backward

# Functions of torch that move the exchanged objects to the GPU themselves.
_MOVE_OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
_EMPTY = ("barrier", "monitored_barrier")  # they exchange nothing


@contextlib.contextmanager
def repeated(cfg: Config, on_gpu: bool) -> Iterator[Callable[[Attempt], None]]:
    """Fork the processes that repeat a dry run; yield a function that starts and compares them.

    Args:
        on_gpu: whether the config requests GPUs, available or not.
    """
    number = 2 if world_size(cfg.engine) > 1 else 1
    with Ranks(lambda rank, report: _repeat_on_rank(cfg, on_gpu, rank, report), number) as ranks:

        def compare(attempt: Attempt) -> None:
            if attempt.batch is not None and not attempt.faults:
                difference, certain = ranks.difference()
                notes = attempt.faults if certain else attempt.untried
                notes += [Fault(difference, ranks.key)] if difference else []

        yield compare


def _repeat_on_rank(cfg: Config, on_gpu: bool, rank: int, report: Reporter) -> Event:
    """Repeat the dry run as one of the processes, on a simulated GPU if the config requests GPUs.

    It reports the parameters, and each name logged without `rank_zero_only`. Two processes form a process group.

    Returns:
        The final event, with the first fault, if any.
    """
    log, wrap = pl.LightningModule.log, strategies.DDPStrategy.configure_ddp
    gpu = compute_on_gpu(cfg, rank) if on_gpu else None

    def log_and_report(self: Any, name: str, *values: Any, **options: Any) -> None:
        if not options.get("rank_zero_only"):
            report("log", name)
        if gpu is not None and options.get("sync_dist") and world_size(cfg.engine) > 1:
            refuse_on_cpu(gpu, values[:1] or options.get("value"), f"`self.log('{name}', sync_dist=True)`")
        log(self, name, *values, **options)

    def report_and_wrap(self: strategies.DDPStrategy) -> None:
        report("parameters", _parameters_of(self.model), "")
        wrap(self)

    pl.LightningModule.log = log_and_report  # type: ignore[method-assign]  # this process does nothing else
    strategies.DDPStrategy.configure_ddp = report_and_wrap  # type: ignore[method-assign]
    local_cfg = on_one_cpu(cfg)
    if world_size(cfg.engine) > 1:
        local_cfg.engine.processes, local_cfg.engine.backend = 2, "ddp"
        local_cfg.engine.params = {"process_group_backend": "gloo", "find_unused_parameters": True}
    if gpu is not None:
        report.before_collective = lambda given, name: refuse_on_cpu(gpu, given, name)
    with tempfile.TemporaryDirectory() as folder:
        attempt = try_out(cfg, local_cfg, Path(folder))
    if not attempt.faults:
        return Event("end")
    fault, refused = attempt.faults[0], gpu is not None and bool(gpu.refused)
    where = "on a simulated GPU " if gpu is not None else ""
    return Event("error", f"{where}{fault.message}", key=fault.key or "model.module", is_certain=gpu is None or refused)


def _parameters_of(task: Any) -> str:
    """Return names and shapes of the parameters, one per line, each with the line of the enclosing user class."""
    lines, places = [], dict[str, str]()
    for path, module in task.named_modules():
        code = getattr(type(module).__init__, "__code__", None)
        place = places.get(path.rpartition(".")[0], places.get("", ""))
        if code is not None and own_code.is_user_file(code.co_filename):
            place = f" ({own_code.short(code.co_filename)}:{code.co_firstlineno})"
        places[path] = place
        lines += [f"{path}{path and '.'}{n} {tuple(p.shape)}{place}" for n, p in module.named_parameters(recurse=False)]
    return "\n".join(lines)


def compute_on_gpu(cfg: Config, rank: int) -> FakeGpu:
    """Make this process compute on the GPU that a rank of a config would have; this cannot be undone.

    The user's modules are imported again, because some check for a GPU at import.
    """
    gpus = cfg.engine.gpus
    numbers = gpus if isinstance(gpus, list) else range(max(local_size(cfg.engine), rank + 1))
    index = int(numbers[rank])
    mode = FakeGpu(torch.device("cuda", index), max(*map(int, numbers), 0) + 1, strict=True)
    around_backward(mode.backward)
    _use_in_strategies(mode.device)
    _patch_torch(mode)
    own_code.unload_own_modules()
    mode.__enter__()
    return mode


def _use_in_strategies(device: torch.device) -> None:
    for kind in (strategies.SingleDeviceStrategy, strategies.DDPStrategy):
        kind.root_device = property(lambda self: device)  # type: ignore[assignment, method-assign]
    strategies.DDPStrategy.determine_ddp_device_ids = lambda self: None  # type: ignore[method-assign]
    CPUAccelerator.setup_device = lambda self, device: None  # type: ignore[method-assign]


def _patch_torch(mode: FakeGpu) -> None:
    """Let `torch.cuda` answer the user's code and ours as on a machine with GPUs; libraries get the true state."""
    answers: dict[str, object] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        "device_count": mode.count,
        "current_device": mode.device.index,
        "get_device_capability": (9, 0),
        "get_device_name": "a simulated GPU",
        "mem_get_info": (80 * 2**30, 80 * 2**30),
        "get_per_process_memory_fraction": 1.0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _for_own_code(lambda *_, answer=answer, **__: answer, getattr(torch.cuda, name)))
    torch.cuda.Event = torch.cuda.Stream = _CompletedWork  # type: ignore[assignment, misc]
    torch.cuda.current_stream = torch.cuda.default_stream = _CompletedWork  # type: ignore[assignment]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment, misc]
    load, from_numpy, autocast = torch.load, torch.from_numpy, torch.autocast.__init__

    def load_unmarked(*args: Any, **options: Any) -> Any:
        """Let loaded tensors mix with any device: torch restores a saved GPU tensor to its GPU."""
        content = load(*args, **options)
        return forget_marks(content) if options.get("map_location") is None else content

    def autocast_on_cpu(self: Any, device_type: str, *args: Any, **options: Any) -> None:
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **options)

    torch.load = _for_own_code(load_unmarked, load)
    torch.from_numpy = lambda array: mark(from_numpy(array), CPU, user_code_line())  # type: ignore[assignment]
    torch.autocast.__init__ = autocast_on_cpu  # type: ignore[method-assign]
    torch.backends.cudnn.enabled = False


class _CompletedWork:
    """A stream or an event whose work is always complete."""

    def _do_nothing(self, *_: object, **__: object) -> None:
        """Ignore the call."""

    __init__ = record = record_event = synchronize = wait = wait_event = wait_stream = _do_nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0


def _for_own_code(patched: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **options: Any) -> Any:
        file = sys._getframe(1).f_code.co_filename
        return (patched if own_code.is_user_file(file) or file.startswith(own_code.OURS) else real)(*args, **options)

    return function


def refuse_on_cpu(mode: FakeGpu, given: Any, what: str) -> None:
    """Reject CPU tensors, which NCCL cannot exchange, in the collectives of the user's code.

    Raises:
        DeviceError: a tensor is on the CPU, and no function of torch is about to move it.
    """
    if what not in _EMPTY and user_code_line() and any(mark_of(tensor) == CPU for tensor in tensors(given)):
        if any(frame.f_code.co_name in _MOVE_OBJECTS for frame, _ in traceback.walk_stack(sys._getframe())):
            return
        made = next((getattr(t.untyped_storage(), "made_at", "") for t in tensors(given) if mark_of(t) == CPU), "")
        made = f", created at {made}" if made else ""
        mode.refuse(
            DeviceError(f"No backend type associated with device type cpu: {what} of a tensor on the CPU{made}")
        )
