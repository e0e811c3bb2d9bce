"""`deeplightning plan --memory`: memory and time of a run under each engine, as a table or as JSON."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from deeplightning.config.auto_values import unfilled
from deeplightning.config.machine import local_size
from deeplightning.config.schema import Config
from deeplightning.dry_run.diagnosis import Attempt
from deeplightning.faults import ConfigError, count
from deeplightning_plan.batch_size import bytes_of
from deeplightning_plan.gpu_cards import Card, card_names, card_of
from deeplightning_plan.memory_plan import USABLE_SHARE, Plan, Row, Setting, forecast, proposal
from deeplightning_plan.memory_tracker import KINDS

GIB = 2**30


class Gpus(NamedTuple):
    """The GPUs of one machine, from `--gpus`: their number, and their kind or memory."""

    number: int
    memory: int
    card: Card | None


def gpus_of(text: str) -> Gpus:
    """Read `8x80GB`, `8xH100`, `80GB` or `H100`.

    Raises:
        ConfigError: the text has another form, or names a card that is not in the table.
    """
    found = re.fullmatch(r"(?:([1-9]\d*)\s*x\s*)?(.+)", text.strip())
    number, kind = (int(found[1] or 1), found[2]) if found else (0, "")
    if found is None or number > 100_000:
        raise ConfigError(f"--gpus must be a number and a size or a card, such as 8x80GB or 8xH100, not {text!r}")
    if re.match(r"[\d.]", kind):
        return Gpus(number, bytes_of(kind, "--gpus"), None)
    if (card := card_of(kind)) is None:
        raise ConfigError(
            f"--gpus {kind} is not in the table, which has {card_names()}; name its memory, such as {number}x80GB"
        )
    return Gpus(number, card.memory, card)


def plan_memory(cfg: Config, gpus: Gpus | None, nodes: int | None) -> tuple[Plan, Setting]:
    """Plan the memory of a config on a machine.

    Raises:
        UserError: a target of the config cannot be built, or the data are missing.
    """
    import gc

    from deeplightning.dry_run.isolation import drop_weights, offline, on_one_cpu, silenced
    from deeplightning.dry_run.one_batch import example
    from deeplightning.faults import error_of

    gc.enable()
    setting = setting_of(cfg, gpus, nodes)
    local_cfg = on_one_cpu(cfg)
    drop_weights(local_cfg)  # random ones take the same memory
    with silenced(), offline(), tempfile.TemporaryDirectory() as folder:
        attempt = Attempt(local_cfg, cfg, Path(folder))
        attempt.batch = example(attempt, longest=True)  # also resolves sizes that are `auto`
        for _, params, name in [*unfilled(local_cfg)]:
            params.pop(name, None)
        if attempt.faults:
            raise error_of(attempt.faults)
        return forecast(attempt, cfg, setting), setting


def setting_of(cfg: Config, gpus: Gpus | None, nodes: int | None) -> Setting:
    """Return processes and device to plan for: from `--gpus`, else from the config on this machine."""
    from deeplightning.config import devices

    machines, engine = nodes or cfg.engine.num_nodes, cfg.engine
    tf32 = engine.matmul_precision not in (None, "highest")
    if gpus is not None:
        return Setting(gpus.number * machines, gpus.number, gpus.card, int(USABLE_SHARE * gpus.memory), True, tf32)
    local = local_size(engine)
    if engine.gpus is None:
        return Setting(local * machines, local, None, psutil.virtual_memory().total // local, False)
    first = engine.gpus[0] if isinstance(engine.gpus, list) else 0
    chosen = devices.machine().visible_gpus()[first : first + 1]
    total = chosen[0].total if chosen else None
    card = card_of(chosen[0].name) if chosen else None
    return Setting(local * machines, local, card, None if total is None else int(USABLE_SHARE * total), True, tf32)


# ---- output


def text_of(plan: Plan, setting: Setting, cfg: Config) -> list[str]:
    """Return the lines of a plan."""
    device = setting.card.name if setting.card else "GPU" if setting.on_gpu else "CPU"
    room = f", {_gib(setting.limit)} GiB for tensors" if setting.limit else ""
    lines = [
        f"network    {count(plan.parameters, 'parameter')}, batch {plan.batch} per process, {cfg.engine.precision}",
        f"device     {device}{room}; processes: {setting.world}",
    ]
    if plan.partial:
        lines.append(f"partial    {plan.partial}: no activations, no time, no largest batch")
    unit, word = (GIB, "GiB") if max(row.peak for row in plan.rows) >= GIB / 10 else (2**20, "MiB")
    head = [f"{word} per process", *KINDS, "peak", "fits", "largest batch", "samples/s"]
    rows = [head, *(_cells(row, plan, unit, cfg) for row in plan.rows)]
    if all(row.seconds is None for row in plan.rows):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines.append("")
    for first, *cells in rows:
        right = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]))
    return [*lines, "", *_proposal(plan, setting, cfg)]


def _cells(row: Row, plan: Plan, unit: int, cfg: Config) -> list[str]:
    name = f"{row.label} (1 process)" if row.engine == "null" and row.world == 1 else row.label
    known_kinds = KINDS if plan.partial is None else ("parameters", "gradients", "state")
    kinds = [_gib(row.kinds.get(kind, 0), unit) if kind in known_kinds else "" for kind in KINDS]
    fits = "" if row.fits is None else ("?" if plan.partial else "yes") if row.fits else "no"
    largest = "" if row.largest is None else f"{row.largest:,}"
    return [name, *kinds, _gib(row.peak, unit) + "+" * bool(plan.partial), fits, largest, _speed(row, plan, cfg)]


def _speed(row: Row, plan: Plan, cfg: Config) -> str:
    if row.seconds is None:
        return ""
    low, high = (row.world * plan.batch * cfg.train.accumulator_factor / s for s in reversed(row.seconds))
    return f"{_round(low)} to {_round(high)}"


def _proposal(plan: Plan, setting: Setting, cfg: Config) -> list[str]:
    best = proposal(plan, cfg)
    if setting.limit is None:
        return ["proposal   none: the memory of the device is unknown; name it with --gpus, such as 8x80GB"]
    if best is None:
        least = min(plan.rows, key=lambda row: row.peak)
        smaller = f"; a batch of {least.largest} would fit" if least.largest else "; no batch would fit"
        return [
            f"proposal   none fits; {least.label} needs least: {_gib(least.peak)} of {_gib(setting.limit)} GiB{smaller}"
        ]
    keys = [f"engine.backend={best.engine}"]
    keys += [f"'engine.activation_checkpointing=[{','.join(best.recompute)}]'"] if best.recompute else []
    keys += [f"'engine.params.wrap={_wrap(best.wrap)}'"] if best.wrap is not None else []
    more = ""
    base = next((row for row in plan.rows if row.engine == best.engine and not row.recompute), None)
    if best.recompute and base is not None and base.seconds and best.seconds:
        more = f", takes {best.seconds[1] / base.seconds[1] - 1:.0%} more time than without"
    fits = f"proposal   {best.label}: {_gib(best.peak)} GiB of {_gib(setting.limit)}, fits{more}"
    lines = [fits, f"           {' '.join(keys)}"]
    return lines + _time(best, plan, setting, cfg)


def _wrap(units: Any) -> str:
    return str(units) if isinstance(units, int | str) else f"[{','.join(units)}]"


def _time(row: Row, plan: Plan, setting: Setting, cfg: Config) -> list[str]:
    if row.seconds is None:
        why = "the kind of GPU is unknown; name it, such as 8xH100" if setting.on_gpu else "the CPU's peak is unknown"
        return [f"time       not planned: {'offloading was not measured' if row.engine.endswith('offload') else why}"]
    lines = [f"time       {_speed(row, plan, cfg)} samples/s, from the share of the peak measured on an H100"]
    if cfg.train.max_steps is not None:
        low, high = (cfg.train.max_steps * seconds / 3600 for seconds in row.seconds)
        lines.append(f"           {cfg.train.max_steps:,} steps in {_round(low)} to {_round(high)} hours")
    return lines


def json_of(plan: Plan, setting: Setting, cfg: Config) -> str:
    """Return a plan as JSON, in bytes and seconds."""
    best = proposal(plan, cfg) if setting.limit is not None else None
    rows = []
    for row in plan.rows:
        entry: dict[str, Any] = {"engine": row.engine, "processes": row.world, "recompute": row.recompute}
        entry |= {"wrap": row.wrap, "kinds": row.kinds, "held": row.held, "peak": row.peak, "fits": row.fits}
        entry |= {"largest_batch": row.largest, "step_seconds": row.seconds, "proposed": row is best}
        rows.append(entry)
    summary = {"parameters": plan.parameters, "batch_size": plan.batch, "limit": plan.limit, "partial": plan.partial}
    return json.dumps({**summary, "engines": rows}, indent=2)


def _gib(value: float, unit: int = GIB) -> str:
    size = value / unit
    if value == 0:
        return "0"
    return f"{size:,.1f}" if size >= 10 else f"{size:.2f}" if size >= 0.1 else f"{size:.4f}"


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
