"""Create the data module, the task and the trainer from a checked config.

cfg = load_config("configs/base.yaml")
data, task = init_module(cfg, "data"), init_module(cfg, "model")
trainer = init_trainer(cfg)
trainer.fit(task, data)
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import UserList
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deeplightning.config.auto_values import unfilled
from deeplightning.config.examine import OWN_LOADERS
from deeplightning.config.schema import Config, LimitBatches
from deeplightning.config.target import build
from deeplightning.engine.trainer_arguments import clip_arguments, trainer_arguments
from deeplightning.launch import apply_environment
from deeplightning.process import garbage

if TYPE_CHECKING:
    import pytorch_lightning as pl

log = logging.getLogger("deeplightning")


def init_module(cfg: Config, section: str, read: bool = True) -> Any:
    """Return the data module (`data`) or the task (`model`) of a config; None for data that the task loads itself.

    The seed determines what a constructor draws. Creating the data module also replaces each `auto` in the params of a
    network, in `cfg` itself.

    Args:
        read: read the data if an `auto` cannot be resolved without it.
    """
    from lightning_fabric import seed_everything

    from deeplightning.callbacks.random_state import draws_as_lightning, seed_all
    from deeplightning.engine.compute import use_channels_last

    assert cfg.seed is not None, "load_config draws one"
    apply_environment(cfg)
    garbage.resume()  # the imports are done: from here on objects are the user's
    if draws_as_lightning(cfg):
        seed_everything(cfg.seed, verbose=False)
    else:
        seed_all(cfg.seed, 0)
    if section == "data" and cfg.data.module.type == OWN_LOADERS:
        return None
    if has_auto := any(unfilled(cfg)):
        from deeplightning.run.resolve_auto import fill, refuse_unfilled

        if section == "model":
            refuse_unfilled(cfg)
    module = build(getattr(cfg, section).module, cfg)
    if section == "data" and has_auto:
        fill(cfg, module, read)
    if cfg.train.overfit is not None and (section == "data" or cfg.data.module.type == OWN_LOADERS):
        # Train and validate on the first batches, read once and kept in memory. Augmentation still applies.
        first = functools.partial(_first_batches, module.train_dataloader, cfg.train.overfit)
        module.train_dataloader = module.val_dataloader = functools.cache(first)
    if section == "model" and cfg.engine.channels_last:
        use_channels_last(module)
    return module


def init_trainer(cfg: Config) -> pl.Trainer:
    """Return a Lightning Trainer for a config. It opens no run and writes nothing until `fit`."""
    from pytorch_lightning.callbacks import ProgressBar

    from deeplightning.callbacks import run_callbacks
    from deeplightning.callbacks.log_lines import to_terminal
    from deeplightning.callbacks.steps import StepCountingTrainer
    from deeplightning.engine import compute
    from deeplightning.engine.checkpoint_io import SafeCheckpointIO
    from deeplightning.engine.process_group import cluster

    apply_environment(cfg)
    to_terminal(cfg)
    compute.prepare(cfg.engine)
    if cfg.engine.compile and "train" in cfg.stages:
        compute.prepare_to_compile(cfg.engine)
    train = cfg.train
    limits = LimitBatches(train=1, val=1, test=1) if train.fast else train.limit_batches
    often = 1 if train.fast else train.val_every_n_epoch
    epochs = -1 if train.num_epochs is None else train.num_epochs
    callbacks, io = run_callbacks(cfg), SafeCheckpointIO()
    trainer = io.trainer = StepCountingTrainer(
        **trainer_arguments(cfg),
        max_epochs=1 if train.fast and epochs != 0 else epochs,
        max_steps=-1 if train.max_steps is None else train.max_steps,
        check_val_every_n_epoch=max(1, int(often)),
        val_check_interval=float(often) if often < 1 else 1.0,
        accumulate_grad_batches=1 if train.accumulator_epoch else train.accumulator_factor,  # a callback sets it later
        **clip_arguments(cfg),
        limit_train_batches=limits.train if limits else 1.0,
        limit_val_batches=limits.val if limits else 1.0,
        limit_test_batches=limits.test if limits else 1.0,
        limit_predict_batches=limits.test if limits else 1.0,
        callbacks=callbacks,
        plugins=[io, cluster()],
        logger=False,  # `Record` adds them when the run opens
        log_every_n_steps=1,  # deeplightning.callbacks.steps.LogSteps selects the steps
        num_sanity_val_steps=0,
        enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
        enable_model_summary=False,
    )
    return trainer


def _first_batches(make: Callable[[], Any], number: int) -> Sequence[object]:
    """Return the first batches of the first epoch from the loader that `make` creates, or from its list of loaders,
    combined as in Lightning."""
    from pytorch_lightning.utilities import CombinedLoader

    made = make()
    loader = made if isinstance(made, CombinedLoader) else CombinedLoader(made, "max_size_cycle")
    for each in loader.flattened:
        sampler: Any = getattr(each, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(0)
            sampler.start = 0  # in a resumed run it is after the completed batches
    kept = [batch for batch, *_ in itertools.islice(loader, number)]
    more = ", which has no more" if len(kept) < number else ""
    log.info("%-10s %d batches of the training set%s, for training and validation", "overfit", len(kept), more)
    return _Batches(kept)


class _Batches(UserList[object]):
    """Batches of which each reading has its own tensors, because hooks may change one in place."""

    def __getitem__(self, number: Any) -> Any:
        from lightning_utilities.core.apply_func import apply_to_collection
        from torch import Tensor

        return apply_to_collection(super().__getitem__(number), Tensor, Tensor.clone)
