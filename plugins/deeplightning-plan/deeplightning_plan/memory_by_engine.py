"""Compute the memory of one process for a network under each engine.

Parameters, gradients, optimizer state and communication buffers follow from the shapes and the documented sharding of
each engine.

Sources: `torch.distributed.fsdp.fully_shard` shards each parameter's rows as `torch.chunk` does; ZeRO's stages shard as
described in https://arxiv.org/abs/1910.02054, with the paddings of DeepSpeed 0.19.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deeplightning.engine.fsdp import units_of
from deeplightning.engine.zero import sizes
from deeplightning_plan.memory_tracker import MemoryTracker, state_of
from deeplightning_plan.torch_private import fake_tensors


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes in the first process, which has the most."""

    parameters: int  # in the precision of computation or of storage
    gradients: int  # when the optimizer steps
    state: int  # of the optimizer, with DeepSpeed's copy of the weights in 32 bits
    communication: dict[str, int]  # phase of a step → send and gather buffers
    stepping: int  # the optimizer's temporary tensors
    keeps_gradients: bool = True  # whether gradients still exist in the next forward pass


@dataclass(frozen=True)
class Engine:
    """Engine, processes and device of a run."""

    backend: str | None  # a value of `engine.backend`, or None without an engine
    world: int  # processes
    params: dict[str, Any]  # `engine.params`
    on_gpu: bool
    is_half: bool  # whether it computes in 16 bits


def process_memory(task: nn.Module, optimizers: Sequence[Any], engine: Engine) -> ProcessMemory:
    """Return the memory of the first process.

    Args:
        task: has fake or real parameters.
        optimizers: have the state of one step.
    """
    backend = engine.backend or ""
    if backend == "fsdp":
        return _fsdp(task, optimizers, engine)
    if backend.startswith("deepspeed_stage_3"):
        return _zero3(task, optimizers, engine)
    if backend.startswith("deepspeed"):
        return _zero(task, optimizers, engine)
    parameters, trainable = list(task.parameters()), _trainable(optimizers)
    gradients = _bytes(trainable)
    state, stepping = _optimizer_bytes(optimizers, {id(p): list(p.shape) for p in trainable})
    bucket = 0 if backend != "ddp" or engine.params.get("gradient_as_bucket_view") else gradients
    communication = dict.fromkeys(("forward", "backward", "optimizer"), bucket)
    return ProcessMemory(_bytes(parameters), gradients, state, communication, stepping)


def _fsdp(task: nn.Module, optimizers: Sequence[Any], engine: Engine) -> ProcessMemory:
    shapes = {id(p): [*(-(-n // engine.world) for n in p.shape[:1]), *p.shape[1:]] for p in task.parameters()}

    def shares(parameters: Iterable[Tensor]) -> int:
        return sum(math.prod(shapes[id(p)]) * p.element_size() for p in parameters)

    trainable = _trainable(optimizers)
    state, stepping = _optimizer_bytes(optimizers, shapes)
    if engine.on_gpu:
        stepping = max(stepping, shares(trainable))  # `foreach`: all tensors at once
    units = [_bytes(unit) for unit in units_of(task, engine.params.get("wrap", 1_000_000))]
    largest_unit = max(units, default=0)
    keeps = engine.params.get("reshard_after_forward") is False
    # One unit and the next, or all units; the backward pass adds a unit's gradient and its copy to be scattered.
    gathered = max(2 * largest_unit, sum(units) if keeps else 0)
    # Over gloo three more copies of the network remain, measured on two processes: benchmarks/planned.md.
    stays = 0 if engine.on_gpu else 3 * sum(units)
    reduced = 2 * largest_unit if engine.on_gpu else 0
    communication = {"forward": stays + gathered, "backward": stays + gathered + reduced, "optimizer": stays}
    offloads = bool(engine.params.get("cpu_offload")) and engine.on_gpu
    own = (0, 0, 0) if offloads else (shares(task.parameters()), shares(trainable), state)
    return ProcessMemory(*own, communication, 0 if offloads else stepping)


def _zero(task: nn.Module, optimizers: Sequence[Any], engine: Engine) -> ProcessMemory:
    """Return the memory under stages 1 and 2: a parameter group is one flat tensor, and each process steps a shard."""
    stage = int((engine.backend or "").removeprefix("deepspeed_stage_")[:1])
    number = 2 if engine.is_half else 4
    flat = [sum(p.numel() for p in group) for group in _groups(optimizers)]
    align = 2 * engine.world
    parts = [-(-count // align) * align // engine.world for count in flat]
    state, stepping = _flat_optimizer_bytes(optimizers, [[part] for part in parts])
    trainable, every = sum(flat), sum(p.numel() for p in task.parameters())
    padded = every - trainable + engine.world * sum(parts)
    bucket = {**sizes(every, trainable, stage), **_zero_settings(engine)}.get("reduce_bucket_size", 0)
    buckets = int(min(bucket, trainable) * number)
    own = 4 * sum(parts)
    gradients = number * (trainable if stage == 1 else sum(parts))
    # One bucket is sent while another is filled; stage 2 has a third, because it reduces during the backward pass.
    several = 0 if engine.world == 1 else buckets
    communication = {"forward": several, "backward": several + stage * buckets, "optimizer": several}
    if "offload" in (engine.backend or ""):
        return ProcessMemory(number * padded, 0, 0, communication, 0, keeps_gradients=False)
    return ProcessMemory(number * padded, gradients, state + own, communication, own + stepping, keeps_gradients=False)


def _zero3(task: nn.Module, optimizers: Sequence[Any], engine: Engine) -> ProcessMemory:
    """Return the memory under stage 3: each parameter is flattened and split into equal shards."""
    number, world = 2 if engine.is_half else 4, engine.world
    settings = _zero_settings(engine)
    every, trainable = list(task.parameters()), _trainable(optimizers)
    total, trained = sum(p.numel() for p in every), sum(p.numel() for p in trainable)
    limits = {**sizes(total, trained, 3), **settings}
    groups = [_subgroups([-(-p.numel() // world) for p in group], limits) for group in _groups(optimizers)]
    parts = sum(-(-p.numel() // world) for p in every)
    own = sum(sum(group) for group in groups)
    state, stepping = _flat_optimizer_bytes(optimizers, groups)
    threshold = settings.get("stage3_param_persistence_threshold", 100_000)
    small = sum(p.numel() for p in every if p.numel() <= threshold) if world > 1 else 0
    live = min(total - small, limits["stage3_max_live_parameters"] + limits["stage3_prefetch_bucket_size"])
    gathered = number * (live + small) if world > 1 else 0
    buckets = number * min(limits["reduce_bucket_size"], trained)
    gathers = {"forward": gathered + buckets, "backward": gathered + 2 * buckets, "optimizer": buckets}
    if "offload" in (engine.backend or ""):
        return ProcessMemory(0, 0, 0, gathers, 0, keeps_gradients=False)
    largest = max((max(group, default=0) for group in groups), default=0)
    return ProcessMemory(number * parts, number * own, state + 4 * own, gathers, 4 * largest + stepping)


def _subgroups(parts: list[int], limits: dict[str, int]) -> list[int]:
    """Return the number of elements of each flat tensor; stage 3 steps them one after the other."""
    limit = limits.get("sub_group_size", 1_000_000_000)
    groups, size = list[int](), 0
    for part in parts:
        size += part
        if size >= limit:
            groups.append(size)
            size = 0
    return [*groups, size] if size else groups


def _zero_settings(engine: Engine) -> dict[str, Any]:
    """Return the user's settings of bucket sizes and limits."""
    config = engine.params.get("config") or {}
    return {**engine.params, **(config.get("zero_optimization") or {})}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _groups(optimizers: Sequence[Any]) -> list[list[Tensor]]:
    return [[p for p in group["params"] if p.requires_grad] for o in optimizers for group in o.param_groups]


def _trainable(optimizers: Sequence[Any]) -> list[Tensor]:
    by_id: dict[int, Tensor] = {id(p): p for group in _groups(optimizers) for p in group}
    return list(by_id.values())


def _optimizer_bytes(optimizers: Sequence[Any], shapes: dict[int, list[int]]) -> tuple[int, int]:
    """Return the bytes of the optimizers' state and temporary tensors. `shapes`: parameter id → shape."""
    found = [
        _step_bytes(o, tuple(tuple((tuple(shapes[id(p)]), p.dtype) for p in group) for group in _groups([o])))
        for o in optimizers
    ]
    return sum(state for state, _ in found), max((more for _, more in found), default=0)


def _flat_optimizer_bytes(optimizers: Sequence[Any], groups: list[list[int]]) -> tuple[int, int]:
    """Return the same bytes for flat 32-bit tensors. `groups`: their sizes, for each parameter group in turn."""
    remaining, found = iter(groups), list[tuple[int, int]]()
    for optimizer in optimizers:
        shapes = tuple(tuple(((size,), torch.float32) for size in next(remaining, [])) for _ in optimizer.param_groups)
        found.append(_step_bytes(optimizer, shapes))
    return sum(state for state, _ in found), max((more for _, more in found), default=0)


@functools.lru_cache(maxsize=32)
def _step_bytes(optimizer: Any, shapes: tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...]) -> tuple[int, int]:
    """Return the same bytes, counted in one step of a copy of an optimizer over fake parameters of these shapes."""
    from deeplightning_plan.counted_step import PlaceholderValues

    tracker = MemoryTracker()
    tracker.phase = "optimizer"
    with fake_tensors(), tracker, PlaceholderValues(tracker):
        groups = []
        for group, sizes_of in zip(optimizer.param_groups, shapes, strict=True):
            made = [nn.Parameter(torch.empty(size, dtype=dtype)) for size, dtype in sizes_of]
            for parameter in made:
                parameter.grad = torch.empty_like(parameter)
            groups.append({**group, "params": made})
        accepted = inspect.signature(type(optimizer)).parameters  # torch's AdamW has more defaults than arguments
        own_optimizer = type(optimizer)(groups, **{n: v for n, v in optimizer.defaults.items() if n in accepted})
        tracker.add("parameters", [p for group in groups for p in group["params"]])
        tracker.add("gradients", [p.grad for group in groups for p in group["params"]])
        before = tracker.total
        tracker.reset()
        own_optimizer.step()
        state = tracker.add("state", state_of(own_optimizer))
    return state, max(0, sum(tracker.peaks["optimizer"].values()) - before - state)
