"""Adapt a config to a number of workers that differs from the requested one."""

from dataclasses import replace

from deeplightning.callbacks.describe import effective_batch
from deeplightning.config.machine import note_asked
from deeplightning.config.schema import Config
from deeplightning.faults import Notice


def resize_config(cfg: Config, requested: int, local: int, nodes: int) -> Config:
    """Return a config for a number of workers on a number of machines.

    If the number differs from the requested one, gradient accumulation keeps the samples of an optimizer step where the
    numbers divide; a notice describes the change.

    Args:
        requested: the number of workers that the config requests.
        local: workers on each machine.
    """
    engine = replace(cfg.engine, num_nodes=nodes)
    if cfg.engine.gpus:
        engine.gpus = local
    else:
        engine.processes = local
    resized = replace(cfg, engine=engine, notices=list(cfg.notices or []))
    for name in ("num_nodes", "gpus", "processes"):
        if getattr(engine, name) != getattr(cfg.engine, name):
            note_asked(resized, f"engine.{name}", getattr(cfg.engine, name))
    world, factor = local * nodes, cfg.train.accumulator_factor
    if world == requested:
        return resized
    from_start = cfg.train.accumulator_epoch == 0 or factor == 1
    if from_start and (factor * requested) % world == 0:
        accumulates = factor * requested // world
        resized.train = replace(cfg.train, accumulator_factor=accumulates, accumulator_epoch=0)
        note_asked(resized, "train.accumulator_factor", factor)
        why = f"{world} workers of {requested}; the same samples a step"
        key, text = "train.accumulator_factor", f"train.accumulator_factor: {factor} → {accumulates} ({why})"
    else:
        size = cfg.data.batch_size
        was = f"{size * requested * factor} samples a step" if size is not None else f"batches of {requested} workers"
        key, text = "data.batch_size", f"{was} → {effective_batch(resized)} ({world} workers of {requested})"
    resized.notices.append(Notice(text, unasked=True, key=key))
    return resized
