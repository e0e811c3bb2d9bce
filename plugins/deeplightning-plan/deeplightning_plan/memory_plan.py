"""Plan the memory and time of a config under each engine: rows of a table and a proposal.

`counted_step` counts a step and `memory_by_engine` the shards of an engine; this file adds them up, scales them to
larger batches, and compares the result with the memory of a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from deeplightning.config.machine import batch_size
from deeplightning.config.schema import Config
from deeplightning.dry_run.diagnosis import Attempt
from deeplightning.engine.fsdp import roots_of
from deeplightning_plan.counted_step import Count, count_step
from deeplightning_plan.gpu_cards import NETWORK_BYTES_PER_SECOND, WORKSPACE_BYTES, Card
from deeplightning_plan.memory_by_engine import Engine, ProcessMemory, process_memory
from deeplightning_plan.memory_tracker import KINDS

USABLE_SHARE = 0.92
"""Share of a GPU's memory that tensors may use; the rest is used by CUDA or lost to fragmentation."""

PEAK_SHARES = {
    "null": (0.26, 0.31),
    "ddp": (0.25, 0.30),
    "fsdp": (0.14, 0.18),
    "deepspeed_stage_1": (0.15, 0.17),
    "deepspeed_stage_2": (0.12, 0.18),
    "deepspeed_stage_3": (0.04, 0.06),
}
"""Share of a GPU's peak that each engine reaches, at worst and at best: benchmarks/engines.md and gpu.md, with a ViT-L
on an H100, 23.7 TFLOP for 64 samples. Larger products reach more. Offloading was not measured."""

LAUNCH_SECONDS = (20e-6, 60e-6)
"""CPU seconds per operator of a forward or backward pass in eager mode, at best and at worst. They dominate with small
batches: 35 to 60 µs for ResNet-18 and a small CNN, in benchmarks/gpu.md and on an H200."""

LOOP_SECONDS = 0.6e-3
"""CPU seconds that the loop adds to a step: benchmarks/RESULTS.md."""

TRAFFIC = {"ddp": 2.0, "fsdp": 3.0, "deepspeed_stage_1": 2.0, "deepspeed_stage_2": 2.0, "deepspeed_stage_3": 3.0}
"""Traffic of an engine per step in network sizes, times (N - 1) / N: https://arxiv.org/abs/1910.02054."""


@dataclass
class Row:
    """Memory and time of one process under an engine."""

    engine: str  # a value of `engine.backend`, or `null`
    world: int  # processes
    recompute: list[str] = field(default_factory=list)  # modules whose activations are recomputed
    wrap: Any = None  # the units of fsdp
    kinds: dict[str, int] = field(default_factory=dict)  # kind → bytes at the peak of a step
    peak: int = 0  # the sum of `kinds`
    held: dict[str, int] = field(default_factory=dict)  # kind → bytes when the optimizer steps
    fits: bool | None = None  # whether the device has room; None: unknown
    largest: int | None = None  # the largest batch of one process that fits; None: unknown
    seconds: tuple[float, float] | None = None  # of a step, at best and at worst; None: unknown

    @property
    def label(self) -> str:
        more = f" + recompute {', '.join(self.recompute)}" if self.recompute else ""
        return f"{self.engine}{more}"


@dataclass
class Plan:
    """The rows of all engines, and their common values."""

    rows: list[Row]
    batch: int  # samples per step and process
    parameters: int  # numbers in the network
    block: str | None  # the class of the network's repeated blocks, if it has any
    limit: int | None  # bytes that tensors may use on the device; None: unknown
    partial: str | None  # why only parameters, gradients and state are known


@dataclass(frozen=True)
class Setting:
    """Processes and device that a run is planned for."""

    world: int  # processes of the run
    local: int  # processes on one machine
    card: Card | None  # the GPU; None: the CPU, or a GPU of another kind
    limit: int | None  # bytes that tensors of one process may use; None: unknown
    on_gpu: bool
    tf32: bool = False  # whether products of float32 may use TF32

    @property
    def workspaces(self) -> int:
        """Bytes of cuBLAS workspaces: one for the thread of the forward pass, one for that of the backward pass."""
        return 2 * (self.card.workspace if self.card else WORKSPACE_BYTES) if self.on_gpu else 0


def forecast(attempt: Attempt, cfg: Config, setting: Setting) -> Plan:
    """Plan a config.

    Args:
        attempt: has an example batch.
        cfg: as the user wrote it.

    Raises:
        ConfigError: the network cannot be sharded as requested.
    """
    batch, requested = batch_size(cfg), cfg.engine.activation_checkpointing or []
    is_half = str(cfg.engine.precision).startswith(("16", "bf16"))
    steps = {"plain": _steps(attempt, batch, setting.on_gpu)}
    plain = steps["plain"][0]
    block = block_of(plain.task)
    recomputed = requested or ([block] if block else [])
    if plain.partial is None:
        if recomputed:
            steps["recomputed"] = _steps(attempt, batch, setting.on_gpu, recompute=recomputed)
        if is_half:
            steps["half"] = _steps(attempt, batch, setting.on_gpu, in_half=True)
    roots = set(roots_of(plain.task))  # units of fsdp in any case; `wrap` names modules inside them
    inner = {type(module).__name__ for root in roots for module in root.modules() if module not in roots}
    unit = block if block in inner else None
    rows = [*_empty_rows(cfg, setting, recomputed if plain.partial is None else [], unit)]
    for row in rows:
        mode = "recomputed" if row.recompute else "half" if row.engine.startswith("deepspeed") else "plain"
        counts = steps.get(mode, steps["plain"])
        params = cfg.engine.params if row.engine == cfg.engine.backend else {}
        params = {**params, "wrap": row.wrap} if row.wrap is not None else params
        engine = Engine(None if row.engine == "null" else row.engine, row.world, params, setting.on_gpu, is_half)
        memory = process_memory(plain.task, plain.optimizers, engine)
        _fill(row, memory, counts, batch, setting)
        row.seconds = _seconds(row, counts[0], cfg, setting)
    number = sum(p.numel() for p in plain.task.parameters())
    return Plan(rows, batch, number, block, setting.limit, plain.partial)


def block_of(task: nn.Module) -> str | None:
    """Return the name of the repeated module class with the most parameters, the outermost one, or None."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for module in task.modules():
        own = type(module)
        has_parts = next(module.children(), None) is not None
        if has_parts and own.forward is not nn.Module.forward and own is not nn.Sequential:
            sizes[own.__name__].append(sum(p.numel() for p in module.parameters()))
    found = [(sum(of), max(of), name) for name, of in sizes.items() if len(of) > 1 and max(of) > 0]
    return max(found)[2] if found else None


def _empty_rows(cfg: Config, setting: Setting, recomputed: list[str], block: str | None) -> Iterator[Row]:
    wrap = cfg.engine.params.get("wrap") if cfg.engine.backend == "fsdp" else None
    wrap = wrap if wrap is not None else [block] if block else None
    for name in ("null", "ddp", "fsdp"):
        row = Row(name, 1 if name == "null" else setting.world, wrap=wrap if name == "fsdp" else None)
        for modules in ([], recomputed) if recomputed else ([],):
            yield replace(row, recompute=modules, kinds={}, held={})
    for name in ("stage_1", "stage_2", "stage_3", "stage_2_offload", "stage_3_offload"):
        yield Row(f"deepspeed_{name}", setting.world)


_FAR_FACTOR = 256
"""The second step has this many times the batch. Peak memory is convex in the batch size, because it is a maximum over
several moments, so a straight line between the two steps is never too low."""


def _steps(attempt: Attempt, batch: int, on_gpu: bool, **options: Any) -> list[Count]:
    """Count a step, and one with a far larger batch. `options`: see `count_step`."""
    one = count_step(attempt, batch, on_gpu, **options)
    return [one] if one.partial is not None else [one, count_step(attempt, _FAR_FACTOR * batch, on_gpu, **options)]


def _fill(row: Row, memory: ProcessMemory, steps: list[Count], batch: int, setting: Setting) -> None:
    """Fill in the bytes of a row, whether they fit, and the largest batch that does."""
    row.held = {"parameters": memory.parameters, "gradients": memory.gradients, "state": memory.state}
    row.kinds = max(
        (_phase_bytes(phase, row, memory, steps[0], setting) for phase in _phases(steps[0])),
        key=lambda kinds: sum(kinds.values()),
    )
    row.peak = sum(row.kinds.values())
    if setting.limit is None:
        return
    row.fits = row.peak <= setting.limit
    if len(steps) == 1:
        return
    near, far = (
        {phase: sum(_phase_bytes(phase, row, memory, step, setting).values()) for phase in _phases(step)}
        for step in steps
    )
    largest = []
    for phase in ("forward", "backward"):
        if (slope := (far[phase] - near[phase]) / (_FAR_FACTOR - 1) / batch) > 0:
            largest.append(max(0, int(batch + (setting.limit - near[phase]) / slope)))
    if largest:
        row.largest = 0 if near["optimizer"] > setting.limit else min(largest)


def _phases(step: Count) -> tuple[str, ...]:
    return ("forward", "backward", "optimizer") if step.partial is None else ("optimizer",)


def _phase_bytes(phase: str, row: Row, memory: ProcessMemory, step: Count, setting: Setting) -> dict[str, int]:
    """Return bytes by kind at the peak of a phase."""
    trainable = max(1, sum(p.numel() * p.element_size() for p in step.task.parameters() if p.requires_grad))
    step_peak = step.peaks.get(phase, {})
    kinds = dict.fromkeys(KINDS, 0) | row.held | {"communication": memory.communication[phase]}
    if phase == "forward" and not memory.keeps_gradients:
        kinds["gradients"] = 0
    if phase == "backward":
        share = min(1.0, step_peak.get("gradients", 0) / trainable)
        total = row.held["parameters"] if row.engine.startswith("deepspeed_stage_2") else memory.gradients
        kinds["gradients"] = memory.gradients if "stage_3" in row.engine else int(total * share)
    kinds["activations"] = step_peak.get("activations", step.buffers)
    kinds["temporary"] = memory.stepping if phase == "optimizer" else step_peak.get("temporary", 0)
    kinds["temporary"] += setting.workspaces
    return kinds


def _seconds(row: Row, count: Count, cfg: Config, setting: Setting) -> tuple[float, float] | None:
    """Return the seconds of a step, at best and at worst.

    The longest of three counts: the operations at the measured share of the peak, the bytes at the memory's bandwidth,
    or the CPU's launches. Communication is added at worst, and fully overlapped at best.
    """
    if setting.card is None or not count.flops or row.engine not in PEAK_SHARES:
        return None
    best = setting.card.peak(str(cfg.engine.precision), setting.tf32)
    if best is None or setting.card.bandwidth is None:
        return None
    low, high = PEAK_SHARES[row.engine]
    by_bytes = count.moved / setting.card.bandwidth
    link = NETWORK_BYTES_PER_SECOND if setting.world > setting.local else setting.card.link or NETWORK_BYTES_PER_SECOND
    size = sum(p.numel() * p.element_size() for p in count.task.parameters())
    sent = TRAFFIC.get(row.engine, 0.0) * size * (row.world - 1) / row.world / link
    factor = cfg.train.accumulator_factor
    quick, slow = (0.0 if cfg.engine.compile else LOOP_SECONDS + count.launches * each for each in LAUNCH_SECONDS)
    return tuple(  # type: ignore[return-value]
        factor * seconds
        for seconds in (
            max(count.flops / (best * high), 0.5 * by_bytes, quick),
            max(count.flops / (best * low), by_bytes, slow) + sent,
        )
    )


def proposal(plan: Plan, cfg: Config) -> Row | None:
    """Return the fastest row that fits and uses all processes, the first if no time is known, None if none fits."""
    world = max(row.world for row in plan.rows)
    fitting = [row for row in plan.rows if row.fits and row.world == world and (world == 1 or row.engine != "null")]
    if world == 1:
        fitting = [row for row in fitting if row.engine != "ddp"] or fitting
    timed = [row for row in fitting if row.seconds is not None]
    return min(timed, key=lambda row: sum(row.seconds or (0, 0))) if timed else next(iter(fitting), None)
