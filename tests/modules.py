"""Set up data modules without a run: with the part of a config and of a trainer that they read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any


def data_config(root: str | Path | None = None, seed: int = 42, **data: Any) -> SimpleNamespace:
    """Return the part of a config that data modules read; `data` overrides the defaults."""
    values = {"root": None if root is None else str(root), "dataset": None, "sampler": None, "loader": {}}
    values |= {"batch_size": 64, "num_workers": 0, "num_splits": None, "fold": 0}
    return SimpleNamespace(seed=seed, data=SimpleNamespace(**values | data))


def on_rank(module: Any, rank: int = 0, world: int = 1) -> Any:
    """Call a module's `setup` as at the start of a training on one of several ranks; return the module."""
    count = SimpleNamespace(processed=0, ready=0)
    batches = SimpleNamespace(batch_progress=SimpleNamespace(current=count))
    loop = SimpleNamespace(epoch_progress=SimpleNamespace(current=count), epoch_loop=batches)
    where = {"global_rank": rank, "is_global_zero": rank == 0, "world_size": world}
    module.trainer = SimpleNamespace(**where, training=True, fit_loop=loop, limit_train_batches=1.0)
    module.setup()
    return module
