"""Adapt a config to a number of workers that differs from the requested one."""

from dataclasses import replace

from deeplightning.callbacks.describe import effective_batch
from deeplightning.config.machine import note_asked
from deeplightning.config.schema import Config
from deeplightning.faults import Notice


def sized(cfg: Config, wanted: int, local: int, nodes: int) -> Config:
    """Return a config for a number of workers on a number of machines.

    If the number differs from the requested one, accumulation keeps the samples of an optimizer step, where the numbers
    divide; a notice describes the change.

    Args:
        wanted: the number of workers that the config requests.
        local: workers on each machine.
    """
    engine = replace(cfg.engine, num_nodes=nodes)
    if cfg.engine.gpus:
        engine.gpus = local
    else:
        engine.processes = local
    made = replace(cfg, engine=engine, notices=list(cfg.notices or []))
    for name in ("num_nodes", "gpus", "processes"):
        if getattr(engine, name) != getattr(cfg.engine, name):
            note_asked(made, f"engine.{name}", getattr(cfg.engine, name))
    world, factor = local * nodes, cfg.train.accumulator_factor
    if world == wanted:
        return made
    from_start = cfg.train.accumulator_epoch == 0 or factor == 1
    if from_start and (factor * wanted) % world == 0:
        accumulates = factor * wanted // world
        made.train = replace(cfg.train, accumulator_factor=accumulates, accumulator_epoch=0)
        note_asked(made, "train.accumulator_factor", factor)
        why = f"{world} workers of {wanted}; the same samples a step"
        key, text = "train.accumulator_factor", f"train.accumulator_factor: {factor} → {accumulates} ({why})"
    else:
        size = cfg.data.batch_size
        was = f"{size * wanted * factor} samples a step" if size is not None else f"batches of {wanted} workers"
        key, text = "data.batch_size", f"{was} → {effective_batch(made)} ({world} workers of {wanted})"
    made.notices.append(Notice(text, unasked=True, key=key))
    return made
