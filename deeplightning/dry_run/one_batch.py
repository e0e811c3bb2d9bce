"""Build the parts of a config, pass one made-up batch through its steps, and check the results: loss, gradients,
weights, logged values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import LightningEnvironment
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from deeplightning import own_code
from deeplightning.batches import class_names_of, structure
from deeplightning.callbacks import random_state, start
from deeplightning.callbacks.steps import LogSteps
from deeplightning.config.auto_values import WEIGHTS, unfilled
from deeplightning.config.schema import Config, targets_of
from deeplightning.config.target import build, needs
from deeplightning.dry_run.diagnosis import NO_GRADIENT_MESSAGE, Attempt, error_in_words, faults_of
from deeplightning.dry_run.isolation import DiscardingLogger, InMemory, wants_network
from deeplightning.engine.trainer_arguments import clip_arguments, trainer_arguments
from deeplightning.faults import ConfigError, Fault
from deeplightning.kinds import KINDS, has_spec
from deeplightning.run.assemble import init_module

SAMPLES = 5
"""Size of the made-up batch: enough for batch norm, few enough for a large network, and odd, so that shapes are rarely
equal by chance."""


ASSUMED_STEPS = 1000  # length of a training, which is unknown without its data


def take_steps(attempt: Attempt) -> None:
    """Try the stages of a config, and collect the faults in `attempt`.

    Raises:
        Exception: any error of a part; `faults_of` converts it to faults.
    """
    attempt.batch = example(attempt)
    for key, params, name in [*unfilled(attempt.cfg)]:
        if name in WEIGHTS:
            del params[name]
            attempt.untried.append(Fault("the weights depend on the data; the loss was tried without them", key))
    if absent := [key for key, _, _ in unfilled(attempt.cfg)]:
        attempt.untried += [Fault("is known only after the data are read, so no step was tried", key) for key in absent]
        return
    try:
        task = attempt.task = init_module(attempt.cfg, "model")
    except Exception as error:
        if wants_network(error):
            raise
        attempt.faults += faults_of(attempt, error, attempt.cfg.model.module)
        return
    for target in attempt.cfg.train.callbacks:
        try:
            attempt.callbacks.append((target, build(target)))
        except Exception as error:
            attempt.faults += faults_of(attempt, error, target)
    if attempt.faults:
        return
    observer = Observer(attempt)
    stages, epochs = attempt.cfg.stages, attempt.cfg.train.num_epochs
    trainer = attempt.trainer = make_trainer(attempt, observer)
    if "train" in stages and epochs != 0:
        trainer.fit(task, datamodule=attempt.data)
        attempt.logged = set(trainer.callback_metrics)
        _check_training(attempt, observer)
    if attempt.batch is None:
        return
    saved = attempt.saved
    for stage in ("validate", "test", "predict"):
        if stage in stages or (stage == "validate" and "train" in stages and epochs == 0):
            attempt.stage = {"validate": "in the validation step"}.get(stage, f"in the {stage} step")
            more: dict[str, Any] = {} if stage == "predict" else {"verbose": False}
            if saved is not None and stage != "predict":
                more["ckpt_path"] = saved
                attempt.stage += " of the checkpoint"
            getattr(trainer, stage)(task, datamodule=attempt.data, **more)
    if saved is not None and attempt.cfg.train.export and not attempt.faults:
        _export(attempt)


def example(attempt: Attempt, longest: bool = False) -> object:
    """Return a batch of the data module, or None if it has none. Its loaders then return only this batch.

    It comes from `example_batch`, or from the training loader of a module that does not override `setup` and the like.

    Args:
        longest: if samples differ in length, use those that need the most memory.
    """
    target, name = attempt.cfg.data.module, ""
    try:
        data = init_module(attempt.cfg, "data", read=False)
    except Exception as error:
        attempt.faults += faults_of(attempt, error, target)
        return None
    if data is None:  # the task has its own loaders, which the loaders of this batch replace
        data, target = pl.LightningDataModule(), attempt.cfg.model.module
    try:
        name = "longest_batch" if longest and hasattr(data, "longest_batch") else "example_batch"
        make = getattr(data, name, None)
        name = name if make is not None else "train_dataloader"
        hooks = ("prepare_data", "setup", "train_dataloader")
        is_simple = [h for h in hooks if is_overridden(h, data, pl.LightningDataModule)] == ["train_dataloader"]
        batch = make(SAMPLES) if make is not None else next(iter(data.train_dataloader()), None) if is_simple else None
    except Exception as error:
        lacks = needs(error)
        reason = f"{target.type}.{name} {lacks or f'fails: {error_in_words(error)}{own_code.user_location(error)}'}"
        code = 3 if lacks else getattr(error, "exit_code", 2)
        attempt.faults.append(Fault(reason, "data.module", exit_code=code))
        batch = None
    attempt.data = data
    if batch is None and not attempt.faults:
        message = f"{target.type} offers no example_batch(size), so no step was tried; "
        message += "`deeplightning train … train.fast=true` runs one batch of its own loaders"
        attempt.untried.append(Fault(message, "data.module"))
    elif getattr(data, "image_spec", None) is not None and not class_names_of(data):
        message = "its classes are known only after the data are read, so the number of outputs was not checked"
        attempt.untried.append(Fault(message, "data.module"))
    batches: Any = [] if batch is None else [batch]
    loader = DataLoader(batches, batch_size=None)
    for hook in ("prepare_data", "setup", "teardown"):
        setattr(data, hook, lambda *_, **__: None)
    for hook in ("train", "val", "test", "predict"):
        setattr(data, f"{hook}_dataloader", lambda: loader)
    return batch


def quiet_arguments(cfg: Config) -> dict[str, Any]:
    """Return the arguments of a Trainer that takes the steps of a config without saving or printing anything."""
    shown = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    more = {"accumulate_grad_batches": cfg.train.accumulator_factor, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    return {**trainer_arguments(cfg), **clip_arguments(cfg), **more, **dict.fromkeys(shown, False)}


def make_trainer(attempt: Attempt, observer: pl.Callback) -> pl.Trainer:
    train = attempt.cfg.train
    assert attempt.cfg.seed is not None, "load_config draws one"
    callbacks: list[pl.Callback] = [random_state.Seeds(attempt.cfg.seed), LogSteps(1)]
    if attempt.cfg.engine.activation_checkpointing:
        callbacks.append(start.Recompute(attempt.cfg.engine.activation_checkpointing))
    skipped = Checkpoint | EarlyStopping  # they write files, or end the run if their metric is missing
    callbacks += [callback for _, callback in attempt.callbacks if not isinstance(callback, skipped)]
    trainer = _Trainer(
        **quiet_arguments(attempt.cfg),
        max_epochs=-1 if train.num_epochs is None else train.num_epochs,
        max_steps=-1 if train.max_steps is None else train.max_steps,
        limit_val_batches=0 if train.limit_batches and train.limit_batches.val == 0 else 1.0,
        callbacks=[*callbacks, observer],
        plugins=[LightningEnvironment(), InMemory()],  # a single process, also under Slurm and torchrun
        logger=DiscardingLogger(attempt.folder),
        default_root_dir=attempt.folder,
    )
    # The length of an epoch is unknown without the data: assume that a scheduler of fixed length fits.
    lengths = [target.params.get("total_steps") for target in targets_of(attempt.cfg.model.scheduler)]
    trainer.length = min([ASSUMED_STEPS, *(n for n in lengths if isinstance(n, int)), train.max_steps or ASSUMED_STEPS])
    return trainer


def _check_training(attempt: Attempt, seen: Observer) -> None:
    """Report faults that only a complete training shows: no loss, parameters without gradients."""
    if attempt.batch is None or not attempt.task.automatic_optimization:
        return
    if not seen.learned:
        message = f"{attempt.cfg.model.module.type}.training_step returned no loss, so there was no optimizer step"
        attempt.faults.append(Fault(message, "model.module"))
    engine = attempt.asked.engine
    waits = engine.backend == "ddp" and not any(map(engine.params.get, ("find_unused_parameters", "static_graph")))
    if waits and seen.unused:
        names = ", ".join(seen.unused[:3]) + (f" and {len(seen.unused) - 3} more" if len(seen.unused) > 3 else "")
        message = f"{names} got no gradient, and ddp waits for one of each parameter; set this to true"
        attempt.faults.append(Fault(message, "engine.params.find_unused_parameters"))


def _export(attempt: Attempt) -> None:
    """Load the checkpoint into a new task and predict one batch on the CPU, as the export of a run does."""
    task, batch = attempt.task, attempt.batch
    kind = KINDS.get(str(getattr(task, "kind", "")))
    key = {"image": "image", "text": "tokens"}.get(kind.takes if kind else "", "input")
    if kind is None or not has_spec(task) or not hasattr(task, "inference_model") or not isinstance(batch, Mapping):
        return
    if not isinstance(batch.get(key), torch.Tensor) or attempt.trainer.global_rank != 0:
        return
    attempt.stage = "in the export"
    checkpoint = attempt.trainer.strategy.checkpoint_io.load_checkpoint("")
    fresh = attempt.task = build(attempt.cfg.model.module, attempt.cfg)
    fresh.on_load_checkpoint(checkpoint)
    fresh.configure_model()
    model = fresh.eval().inference_model()
    with torch.inference_mode():
        model(batch[key].cpu())


class _Trainer(pl.Trainer):
    """Trainer with one batch per epoch that reports an assumed length to schedulers."""

    length = ASSUMED_STEPS

    @property
    def estimated_stepping_batches(self) -> int:
        return self.length


class Observer(pl.Callback):
    """Checks a training step, and ends the training after it."""

    def __init__(self, attempt: Attempt):
        self.attempt = attempt
        self.learned = False
        self.unused: list[str] = []
        self._weights: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        task = self.attempt.cfg.model.module.type
        if not any(optimizer.param_groups for optimizer in trainer.optimizers) and pl_module.automatic_optimization:
            message = f"{task}.configure_optimizers gives no optimizer: nothing would learn"
            raise ConfigError(Fault(message, "model.module"))
        self.attempt.stage = "in the training step"
        for config in trainer.lr_scheduler_configs:
            config.frequency, config.strict = 1, False  # each scheduler steps; a missing metric is reported later
        self._weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self.learned = True
        if loss.numel() != 1 and pl_module.automatic_optimization:
            message = f"the loss is {structure(loss)}, not one number; losses usually have `reduction: mean`"
            raise ConfigError(Fault(message, self.attempt.loss_key))
        if trainer.global_step == 0 and not torch.isfinite(loss).all():
            message = f"the loss of the first training step is {float(loss.detach().sum())}"
            raise ConfigError(Fault(message, self.attempt.loss_key))

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        learning = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        self.unused = [name for name, p in learning.items() if p.grad is None]
        if len(self.unused) == len(learning):
            raise ConfigError(Fault(NO_GRADIENT_MESSAGE, self.attempt.loss_key))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        self.attempt.stage = "in the validation step"
        trainer.should_stop = True
        # Undo the step, whose size depends on the learning rate: later checks use the network as it was built.
        parameters = dict(pl_module.named_parameters())
        with torch.no_grad():
            for name, value in self._weights.items():
                parameters[name].copy_(value)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attempt.stage = "at the end of the epoch"

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        attempt = self.attempt
        if attempt.batch is not None and not attempt.faults:  # as in a run, save while the task is on its device
            attempt.stage, attempt.saved = "while a checkpoint is saved", str(attempt.folder / "last.ckpt")
            trainer.save_checkpoint(attempt.saved)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        save = trainer.strategy.checkpoint_io.save_checkpoint
        save(checkpoint, "")  # Lightning saves on the first rank only
