"""Choose the sampler of training batches, and the position at which a resumed run continues it."""

from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from deeplightning.config.part_config import PartConfig, Target
from deeplightning.config.target import build
from deeplightning.data.data_errors import DataConfigError
from deeplightning.data.samplers import BalancedBatches, BatchIndices, SampledBatches, sort_values, type_name


def train_sampler(cfg: PartConfig, dataset: Any, trainer: object = None, *, drop_last: bool = False) -> BatchIndices:
    """Return the sampler of training batches: shuffled `BatchIndices`, or `data.sampler`. In a resumed run it starts at
    the next batch.

    `data.sampler` is called with the set, and by name with batch_size, num_replicas, rank and seed of the run; it
    returns a torch sampler.

    Args:
        cfg: the whole config; `seed`, `data.batch_size` and `data.sampler` are read.
        dataset: the training set; its `[positions]` is a batch.
        trainer: Lightning's; None: one process, from the start.
        drop_last: leave out a last batch that is not full.

    Raises:
        DataConfigError: `data.sampler` is not a sampler, or sets an argument that the run supplies. It is a ValueError.
        ConfigError: it rejects its arguments.
    """
    world, rank = replicas(trainer)
    shared: dict[str, Any] = {"num_replicas": world, "rank": rank, "seed": cfg.seed}
    target = getattr(cfg.data, "sampler", None)
    if target is not None and (isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")):
        raise DataConfigError(
            f"data.sampler needs a training set with a length, not {type(dataset).__name__}, which can only be read in "
            "its own order; remove data.sampler."
        )
    if target is None:
        sampler = BatchIndices(dataset, cfg.data.batch_size, shuffle=True, drop_last=drop_last, **shared)
    elif target == "balanced":
        sampler = BalancedBatches(_labels(dataset), cfg.data.batch_size, drop_last=drop_last, **shared)
    else:
        made = _build_sampler(target, dataset, {"batch_size": cfg.data.batch_size, **shared})
        sampler = SampledBatches(made, cfg.data.batch_size, drop_last=drop_last, **shared)
    sampler.made_for = world, rank
    if trainer:
        resume_sampler(sampler, trainer)
    return sampler


def replicas(trainer: Any) -> tuple[int, int]:
    """Return R and the rank; without a trainer, those of a single process."""
    return (trainer.world_size, trainer.global_rank) if trainer else (1, 0)


def resume_sampler(sampler: BatchIndices, trainer: Any) -> None:
    """Set a sampler to the epoch and the next batch of a resumed run.

    After a complete epoch, the batch counter still has its last value. Lightning sets the epoch too, but only after it
    has made the first iterator.
    """
    loop, limit = trainer.fit_loop, trainer.limit_train_batches
    length = min(len(sampler), limit) if isinstance(limit, int) else int(len(sampler) * limit)
    epoch, done = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current.ready
    is_complete = done >= length and epoch.processed < epoch.ready  # saved after the last batch, not counted yet
    sampler.set_epoch(epoch.processed + is_complete)
    sampler.start = done if done < length else 0


def _labels(dataset: Any) -> np.ndarray:
    """Return the class of each sample, int64 (N,): the attribute `labels` of the set, or `label` of its samples; raise
    DataConfigError if the samples have no classes."""
    hint = "remove data.sampler, or name a sampler of your own"
    refusal = f"data.sampler=balanced: the training set ({type_name(dataset)}) has no class for each sample; {hint}"
    column: Any = getattr(dataset, "labels", None)
    if not hasattr(column, "__len__") or len(column) != len(dataset):
        try:
            column = sort_values(dataset, "label", batched=True)
        except DataConfigError as error:
            raise DataConfigError(f"{refusal}: {error}") from None
    found = np.asarray(column)
    if found.ndim != 1 or found.dtype.kind not in "iub" or not len(found):
        raise DataConfigError(f"{refusal}: its labels are {found.dtype} {found.shape}.")
    return found.astype(np.int64)


def _build_sampler(target: Target, dataset: object, run: dict[str, Any]) -> object:
    for name, instead in (("batch_size", "data.batch_size"), ("num_replicas", "engine"), ("rank", "engine")):
        if name in target.params:
            raise DataConfigError(f"data.sampler.params.{name} cannot be set: it comes from {instead}.")
    given = run | ({"seed": target.params["seed"]} if "seed" in target.params else {})
    if target.params.get("sort_key") is not None:
        # Built separately, so that a reference becomes its function.
        key = build({"type": "builtins.dict", "params": {"key": target.params["sort_key"]}})["key"]
        try:
            values = sort_values(dataset, key, batched=True)
        except DataConfigError as error:
            raise DataConfigError(f"data.sampler.params.{error}") from None
        given |= {"sort_key": None, "sorted_idx": np.argsort(values, kind="stable")}
    made = build(target, dataset, **given)
    if not hasattr(made, "__iter__") or not hasattr(made, "__len__"):
        raise DataConfigError(f"data.sampler: {target.type} returns a {type(made).__name__}, not a torch sampler.")
    return made
