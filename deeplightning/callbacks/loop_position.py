"""Where training is in its loops: what is due at this batch, and what a checkpoint keeps of it."""

import time
from typing import Any, cast

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping

from deeplightning.private.lightning import logged_steps, values_to_log

PAST_LAST_BATCH = 2**31  # more batches than an epoch has


def between_steps(trainer: Trainer) -> bool:
    """Return whether no accumulated gradients are pending, at or after the end of a batch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return epoch_is_over(trainer) or progress.current.ready % trainer.accumulate_grad_batches == 0


def epoch_is_over(trainer: Trainer) -> bool:
    """Return whether the current or latest batch is the last of its epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch or progress.current.ready >= trainer.num_training_batches)


def pending_points(trainer: Any) -> list[tuple[str, float, int, int]]:
    """Return the points that Lightning 2.6 is about to log: it does so only after the hooks that save checkpoints.

    To be called on every rank: means over an epoch are reduced over all ranks.
    """
    if trainer.state.fn != "fit" or trainer.validating:
        return []
    loop, step = trainer.fit_loop, logged_steps(trainer)
    epoch, batch = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
    ends_epoch = epoch.processed > epoch.completed
    if not ends_epoch and (batch.processed == batch.completed or not between_steps(trainer)):
        return []
    if (values := values_to_log(trainer, now=ends_epoch)) is None:
        return []
    step -= ends_epoch
    metrics = {"epoch": float(trainer.current_epoch)} | {name: float(value) for name, value in values.items()}
    now, step = time.time_ns() // 1_000_000, int(metrics.pop("step", step))
    return [(name, value, now, step) for name, value in metrics.items()] if len(metrics) > 1 else []


def convert_counters(checkpoint: dict[str, Any], world: int, factor: int) -> None:
    """Convert the batch counters of a checkpoint, in place, to another number of processes: the number of processed
    samples stays, rounded down to steps of `factor` batches, and a complete epoch stays complete. A global batch
    contains the same samples in both cases (see `deeplightning.data.samplers`)."""
    was = (checkpoint.get("engine") or {}).get("processes", world)
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if was == world or progress is None:
        return
    counts, before = progress["current"], progress["current"]["ready"]
    ready = PAST_LAST_BATCH if progress["is_last_batch"] else counts["ready"] * was // world // factor * factor
    for name, count in counts.items():  # the current batch may not be completed yet
        counts[name] = ready - (before - count)


def correct_skipped(checkpoint: dict[str, Any]) -> None:
    """Correct the batch counters of a checkpoint, in place, if a hook skipped the rest of an epoch: Lightning 2.6 would
    repeat the batch of the checkpoint. There is at most one skipped batch per epoch; other differences are errors."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if progress is None:
        return
    counts, total = progress["current"], progress["total"]
    skipped = total["ready"] - total["completed"] - (counts["ready"] - counts["completed"])
    if counts["ready"] <= total["ready"] and 0 < skipped <= checkpoint.get("epoch", 0) + 1:
        total |= {name: total["ready"] - counts["ready"] + count for name, count in counts.items()}


def is_validated(trainer: Trainer) -> bool:
    """Return whether a validation follows the current batch."""
    epochs, batches = cast(int, trainer.check_val_every_n_epoch), cast(float, trainer.val_check_batch)
    in_epoch = sum(trainer.num_val_batches) > 0 and (trainer.current_epoch + 1) % epochs == 0
    return in_epoch and trainer.fit_loop.epoch_loop.batch_progress.current.ready % batches == 0


def due_plateaus(trainer: Trainer, interval: str) -> list[tuple[int, Any, float]]:
    """Return the schedulers that follow a metric and are due after this epoch or step: number, scheduler, value."""
    if not trainer.lightning_module.automatic_optimization:
        return []
    batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    done = trainer.current_epoch + 1 if interval == "epoch" else batches
    configs, values = enumerate(trainer.lr_scheduler_configs), trainer.callback_metrics
    due = [(n, c) for n, c in configs if c.reduce_on_plateau and c.interval == interval and done % c.frequency == 0]
    return [(n, c.scheduler, float(values[c.monitor])) for n, c in due if c.monitor in values]


def call_early(task: LightningModule, hook: str, *arguments: object) -> None:
    """Call a hook of the task now instead of after the callbacks' hooks, so that a checkpoint saved here contains what
    the hook changes, such as an average of the weights."""
    getattr(task, hook)(*arguments)
    own = vars(task).get(hook)

    def skip(*_: object) -> None:
        delattr(task, hook) if own is None else setattr(task, hook, own)

    setattr(task, hook, skip)


def pending_plateaus(trainer: Trainer) -> dict[str, float]:
    """Return the metric of each scheduler that follows one and is about to step, by the scheduler's number."""
    epoch: Any = trainer.fit_loop.epoch_progress.current
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    ends_epoch = epoch.completed < epoch.processed == epoch.ready
    if not (ends_epoch and not trainer.fit_loop.restarting) and not batch.completed < batch.processed == batch.ready:
        return {}
    return {str(number): value for number, _, value in due_plateaus(trainer, "epoch" if ends_epoch else "step")}


def followed(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the last value of each metric that a scheduler or callback follows."""
    followers: list[Any] = [*trainer.callbacks, *trainer.lr_scheduler_configs]  # type: ignore[attr-defined]
    # A validation in each epoch logs its metrics again before they are read, except by schedules of steps.
    is_rare = trainer.check_val_every_n_epoch != 1
    found = [(str(getattr(each, "monitor", "")), getattr(each, "interval", "")) for each in followers]
    names = [name for name, interval in found if interval == "step" or is_rare or name[:3] != "val"]
    metrics = trainer.callback_metrics
    return {n: torch.as_tensor(metrics[n]).detach().cpu() for n in names if n in metrics}


def resume_early_stopping(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Apply the config's patience to the state of early stopping, in place, and stop if it is used up."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        state = checkpoint.get("callbacks", {}).get(callback.state_key)
        if isinstance(callback, EarlyStopping) and state:
            by_patience = state["wait_count"] >= max(1, state["patience"])
            state["patience"] = callback.patience  # the config's, which may have changed
            reason = state.get("stopping_reason", int(state["stopped_epoch"] > 0))  # it stays 3, for patience
            by_more = reason not in (0, 3) and not by_patience
            trainer.should_stop |= by_more or state["wait_count"] >= max(1, callback.patience)
