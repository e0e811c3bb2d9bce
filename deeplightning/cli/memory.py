"""`deeplightning plan --memory`: what a run takes under each engine, as a table or as JSON."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from deeplightning.config.schema import Config, Target
from deeplightning.dry_run.forecast import USABLE, Plan, Row, Setting, forecast, proposal
from deeplightning.dry_run.held import KINDS
from deeplightning.engine.cards import Card, card_of, known
from deeplightning.engine.plan import local_size
from deeplightning.faults import CheckpointError, count
from deeplightning.runfolder import RunFolder
from deeplightning.tune.batch import bytes_of

GIB = 2**30


class Gpus(NamedTuple):
    """What `--gpus` names: how many on one machine, and of which kind or size."""

    number: int
    memory: int
    card: Card | None


def gpus_of(text: str) -> Gpus:
    """`8x80GB`, `8xH100`, `80GB` or `H100`.

    Raises:
        ValueError: it is none of these, or a card that is not in the table.
    """
    found = re.fullmatch(r"(?:([1-9]\d*)\s*x\s*)?(.+)", text.strip())
    number, kind = (int(found[1] or 1), found[2]) if found else (0, "")
    if found is None or number > 100_000:
        raise ValueError(f"must be a number and a size or a card, such as 8x80GB or 8xH100, not {text!r}")
    if re.match(r"[\d.]", kind):
        return Gpus(number, bytes_of(kind), None)
    if (card := card_of(kind)) is None:
        raise ValueError(f"{kind} is not in the table, which has {known()}; name its memory, such as {number}x80GB")
    return Gpus(number, card.memory, card)


def plan_memory(cfg: Config, gpus: Gpus | None, nodes: int | None) -> tuple[Plan, Setting]:
    """Counts a config for a machine.

    Raises:
        UserError: what the config names cannot be built, or the data are not there.
    """
    import gc

    from deeplightning.dry_run.fake import prepared
    from deeplightning.dry_run.isolation import offline, on_one_cpu, undisturbed
    from deeplightning.faults import error_of

    gc.enable()
    setting = setting_of(cfg, gpus, nodes)
    mine = on_one_cpu(cfg)
    for target in _targets(mine.model.network):  # weights take no other memory than random ones
        for name, value in target.params.items():
            if (name.startswith("weights") or name == "pretrained") and value not in (None, False):
                target.params[name] = False if value is True else None
    with undisturbed(), offline(), tempfile.TemporaryDirectory() as folder:
        attempt = prepared(mine, cfg, Path(folder))
        if attempt.faults:
            raise error_of(attempt.faults)
        return forecast(attempt, cfg, setting), setting


def _targets(section: object) -> list[Target]:
    named = section.values() if isinstance(section, dict) else [section]
    return [target for target in named if isinstance(target, Target)]


def setting_of(cfg: Config, gpus: Gpus | None, nodes: int | None) -> Setting:
    """Where a run is planned for: what `--gpus` names, else what the config has on this machine."""
    from deeplightning.engine import devices
    from deeplightning.engine.gpus import chosen_of

    many, engine = nodes or cfg.engine.num_nodes, cfg.engine
    tf32 = engine.matmul_precision not in (None, "highest")
    if gpus is not None:
        return Setting(gpus.number * many, gpus.number, gpus.card, int(USABLE * gpus.memory), True, tf32)
    local = local_size(engine)
    if engine.gpus is None:
        return Setting(local * many, local, None, _free() // local if _free() else None, False)
    chosen = chosen_of(engine.gpus, devices.machine())
    total = chosen[0].total if chosen else None
    card = card_of(chosen[0].name) if chosen else None
    return Setting(local * many, local, card, None if total is None else int(USABLE * total), True, tf32)


def _free() -> int:
    """Bytes of this machine's memory; 0: not known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


# ---- the answer


def text_of(plan: Plan, setting: Setting, cfg: Config, price: float | None) -> list[str]:
    """The lines of a plan."""
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
    rows = [head, *(_cells(row, plan, unit) for row in plan.rows)]
    if all(row.seconds is None for row in plan.rows):
        rows = [row[:-1] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += [""]
    lines += [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines += ["", *_proposal(plan, setting, cfg, price)]
    return lines


def _cells(row: Row, plan: Plan, unit: int) -> list[str]:
    name = f"{row.words} (1 process)" if row.engine == "null" and row.world == 1 else row.words
    known_kinds = KINDS if plan.partial is None else ("parameters", "gradients", "state")
    kinds = [_gib(row.kinds.get(kind, 0), unit) if kind in known_kinds else "" for kind in KINDS]
    fits = "" if row.fits is None else ("?" if plan.partial else "yes") if row.fits else "no"
    largest = "" if row.largest is None else f"{row.largest:,}"
    return [name, *kinds, _gib(row.peak, unit) + "+" * bool(plan.partial), fits, largest, _speed(row, plan)]


def _speed(row: Row, plan: Plan) -> str:
    if row.seconds is None:
        return ""
    low, high = (row.world * plan.batch / seconds for seconds in reversed(row.seconds))
    return f"{_round(low)} to {_round(high)}"


def _proposal(plan: Plan, setting: Setting, cfg: Config, price: float | None) -> list[str]:
    best = proposal(plan, cfg)
    if setting.limit is None:
        return ["proposal   none: how much memory the device has is not known; name it by --gpus, such as 8x80GB"]
    if best is None:
        least = min(plan.rows, key=lambda row: row.peak)
        smaller = f"; a batch of {least.largest} would" if least.largest else "; no batch would"
        return [
            f"proposal   none fits; {least.words} needs least, {_gib(least.peak)} GiB of {_gib(setting.limit)}{smaller}"
        ]
    keys = [f"engine.backend={best.engine}"]
    keys += [f"'engine.activation_checkpointing=[{','.join(best.recompute)}]'"] if best.recompute else []
    keys += [f"'engine.params.wrap={_wrap(best.wrap)}'"] if best.wrap is not None else []
    more = ""
    base = next((row for row in plan.rows if row.engine == best.engine and not row.recompute), None)
    if best.recompute and base is not None and base.seconds and best.seconds:
        more = f", takes {best.seconds[1] / base.seconds[1] - 1:.0%} more time than without"
    lines = [f"proposal   {best.words}: {_gib(best.peak)} GiB of {_gib(setting.limit)}, fits{more}"]
    lines.append(f"           {' '.join(keys)}")
    lines += _time(best, plan, setting, cfg, price)
    return lines


def _wrap(units: Any) -> str:
    return str(units) if isinstance(units, int | str) else f"[{','.join(units)}]"


def _time(row: Row, plan: Plan, setting: Setting, cfg: Config, price: float | None) -> list[str]:
    if row.seconds is None:
        why = "its kind is not known; name a card, such as 8xH100" if setting.on_gpu else "no table has the CPU's peak"
        if row.engine.endswith("offload"):
            why = "offloading was not measured"
        return [f"time       not planned: {why}"]
    lines = [f"time       {_speed(row, plan)} samples/s, by the share of the peak that was measured on an H100"]
    if cfg.train.max_steps is None:
        return [*lines, "           hours and cost need train.max_steps"] if price is not None else lines
    low, high = (cfg.train.max_steps * seconds / 3600 for seconds in row.seconds)
    lines.append(f"           {cfg.train.max_steps:,} steps in {_round(low)} to {_round(high)} hours")
    if price is not None:
        costs = [hours * row.world * price for hours in (low, high)]
        lines[-1] += f", {_round(costs[0])} to {_round(costs[1])} for {count(row.world, 'GPU')} at {price:g} an hour"
    return lines


def json_of(plan: Plan, setting: Setting, cfg: Config, price: float | None) -> str:
    """The same for programs, in bytes and seconds."""
    best = proposal(plan, cfg) if setting.limit is not None else None
    rows = []
    for row in plan.rows:
        entry: dict[str, Any] = {"engine": row.engine, "processes": row.world, "recompute": row.recompute}
        entry |= {"wrap": row.wrap, "kinds": row.kinds, "held": row.held, "peak": row.peak, "fits": row.fits}
        entry |= {"largest_batch": row.largest, "step_seconds": row.seconds, "proposed": row is best}
        if price is not None and row.seconds and cfg.train.max_steps:
            entry["cost"] = [cfg.train.max_steps * s / 3600 * row.world * price for s in row.seconds]
        rows.append(entry)
    answer = {"parameters": plan.parameters, "batch_size": plan.batch, "limit": plan.limit, "partial": plan.partial}
    return json.dumps({**answer, "engines": rows}, indent=2)


def against(plan: Plan, cfg: Config, folder: RunFolder) -> list[str]:
    """Plan and truth of a run.

    Raises:
        CheckpointError: the run has not noted what it took.
    """
    try:
        found = json.loads(folder.memory.read_text())
        if not isinstance(found, dict):
            raise ValueError("not a mapping")
        for name in ("parameters", "state", "peak", "seconds"):
            if not isinstance(found.get(name, 0), int | float):
                raise ValueError(f"{name} is not a number")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder.memory}: the run has not noted what it took ({type(error).__name__}); a run does so when its "
            "training ends"
        ) from error
    backend, again = cfg.engine.backend or "null", cfg.engine.activation_checkpointing or []
    of_engine = [row for row in plan.rows if row.engine == backend]
    row = next((row for row in of_engine if row.recompute == again), of_engine[0])
    lines = [f"{'':11}{'planned':>12}{'measured':>12}{'apart':>8}"]
    pairs: list[tuple[str, float | None, Any]] = [
        ("parameters", row.held["parameters"], found.get("parameters")),
        ("state", row.held["state"], found.get("state")),
        ("peak", None if plan.partial else row.peak, found.get("peak")),
    ]
    for name, planned, measured in pairs:
        apart = f"{planned / measured - 1:+.1%}" if planned is not None and measured else ""
        cells = [_size(value) for value in (planned, measured)]
        lines.append(f"{name:11}{cells[0]:>12}{cells[1]:>12}{apart:>8}")
    seconds = found.get("seconds")
    if row.seconds is not None or seconds:
        lines.append(f"{'samples/s':11}{_speed(row, plan) or '-':>12}{_pace(row, plan, seconds):>12}")
    if "peak" not in found:
        lines.append("The peak of a run on the CPU is not measured.")
    return lines


def _pace(row: Row, plan: Plan, seconds: Any) -> str:
    return _round(row.world * plan.batch / seconds) if seconds else "-"


def _size(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:,.3f} GiB" if value >= GIB else f"{value / 2**20:,.2f} MiB"


def _gib(value: float, unit: int = GIB) -> str:
    size = value / unit
    if value == 0:
        return "0"
    return f"{size:,.1f}" if size >= 10 else f"{size:.2f}" if size >= 0.1 else f"{size:.4f}"


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
