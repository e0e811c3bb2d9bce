"""Save `last.ckpt` to resume from, `best.ckpt` by a metric, and the next best, only between optimizer steps.

Lightning's ModelCheckpoint also saves inside an accumulation, without its gradients."""

import json
import logging
import math
from pathlib import Path
from typing import Any, cast
from weakref import proxy

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint as LightningCheckpoint
from pytorch_lightning.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging

from deeplightning.callbacks.loop_position import (
    between_steps,
    call_early,
    convert_counters,
    correct_skipped,
    due_plateaus,
    epoch_is_over,
    followed,
    is_validated,
    pending_plateaus,
    resume_early_stopping,
)
from deeplightning.callbacks.random_state import knows_position
from deeplightning.callbacks.record import Record
from deeplightning.callbacks.steps import AccumulateFrom, ends_of_parts
from deeplightning.config.schema import Checkpoint
from deeplightning.engine.checkpoint_io import copy_checkpoint, remove_checkpoint
from deeplightning.faults import CheckpointError, ConfigError, Fault
from deeplightning.private.lightning import forget_train_loader, restart_validation, resume_by_epochs, training_loaders
from deeplightning.process.streams import Interrupted
from deeplightning.runfolder import RunFolder, write_whole
from deeplightning.words import stage_of

log = logging.getLogger("deeplightning")


class Checkpoints(LightningCheckpoint):
    """Save `last.ckpt` every n epochs or steps, at the end and when interrupted, and the best k by a metric.

    The best is `best.ckpt`, with `best.json` beside it (metric, value, epoch, step, file); the others of the best k are
    `epoch=E-step=S.ckpt`. Without a metric, the newest k have such names if k is more than 1. A value that is not
    finite is never best; of equal values the first wins.

    `last.ckpt` is saved only between two optimizer steps: accumulated gradients are not saved.

    Args:
        off: save no checkpoints; a missing metric is still an error.

    Attributes:
        resumed_at: optimizer steps completed before this training; -1 before it starts.
    """

    def __init__(self, settings: Checkpoint, record: Record, off: bool = False):
        self.settings, self.record, self.off, self.save_top_k = settings, record, off, settings.save_top_k
        self.kept: list[dict[str, Any]] = []  # best first: {"value", "epoch", "step", "file"}
        self._loaded_kept: list[dict[str, Any]] | None = None
        self._unchecked: dict[str, object] | None = None  # the checkpoint, until the optimizers are checked against it
        self._plateaus: dict[str, float] = {}
        self._monitored: dict[str, torch.Tensor] = {}
        self._last_is_due = self._validating = False
        self._stop_is_due = False  # a stop waits for the end of an accumulation, whose gradients Lightning would drop
        self._saved_step = self.resumed_at = -1  # optimizer steps
        self._validated = False
        self._part_ends = frozenset[int]()
        name = settings.monitor or ""
        self._is_train_metric = stage_of(name)[0] == "train"
        self._is_step_metric = self._is_train_metric and not name.endswith("_epoch")
        self._previous_value: object = None  # the metric's value before the current batch

    @property
    def best(self) -> dict[str, Any] | None:
        """Value, epoch and step of the best checkpoint so far."""
        return self.kept[0] if self.kept else None

    # ---- the interface of Lightning's ModelCheckpoint that callbacks and tasks use

    @property
    def dirpath(self) -> str | None:
        return str(self.record.folder.path) if self.record.opened else None

    @property
    def last_model_path(self) -> str:
        """The path of `last.ckpt`; "" before it is saved."""
        return str(self.record.folder.last) if self.record.opened and self.record.folder.last.exists() else ""

    @property
    def best_model_path(self) -> str:
        """The path of `best.ckpt`, or of the last one without a metric, as in Lightning; "" before it is saved."""
        if self.settings.monitor is None:
            return self.last_model_path
        return str(self.record.folder.best) if self.kept else ""

    @property
    def best_model_score(self) -> torch.Tensor | None:
        return torch.tensor(self.kept[0]["value"]) if self.kept else None

    # ---- when to save

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move checkpoint callbacks of the module's `configure_callbacks` before ours, like those of the config: their
        states are then saved, and `trainer.checkpoint_callback` is theirs."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        ours = [c for c in callbacks[callbacks.index(self) :] if type(c).__module__.startswith("deeplightning")]
        kept = [c for c in callbacks if c not in ours and not (self.off and isinstance(c, LightningCheckpoint))]
        trainer.callbacks = kept + ours  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop, resumed = trainer.fit_loop, self.record.resumption
        if resumed is not None and loop.max_epochs is not None and loop.max_epochs >= 0:
            # Lightning rejects a checkpoint of more epochs, even with nothing left to train. Not before this hook:
            # StochasticWeightAveraging adds an epoch in its own, which the checkpoint may have counted.
            loop.max_epochs = max(loop.max_epochs, resumed.epochs)
        if self._unchecked is not None:
            from deeplightning.engine.restored import check_optimizers

            check_optimizers(trainer, self._unchecked)
            self._unchecked = None
        # If `configure_optimizers` uses `estimated_stepping_batches`, like a schedule with `auto`, Lightning (2.6.6)
        # creates loader and iterator before the position is restored, and the run would repeat the first epoch's
        # batches. Strategies that shard parameters see the checkpoint only after this hook. A loader that does not
        # know its position keeps the iterator: a second one would draw other numbers.
        resumes = trainer.ckpt_path is not None or trainer.strategy.restore_checkpoint_after_setup
        if resumes and any(map(knows_position, training_loaders(trainer))):
            forget_train_loader(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._adopt_kept(trainer)
        self._find_part_ends(trainer)
        self.resumed_at = trainer.global_step
        loop = trainer.fit_loop
        if loop.restarted_mid_epoch and loop.epoch_loop.batch_progress.current.ready < trainer.num_training_batches:
            # Lightning 2.6 skips this hook when it resumes inside an epoch, and these callbacks depend on it.
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, GradientAccumulationScheduler | StochasticWeightAveraging):
                    callback.on_train_epoch_start(trainer, pl_module)
        trainer.callback_metrics.update(self._monitored)
        plateaus, self._plateaus, self._monitored = self._plateaus, {}, {}
        for number, value in plateaus.items():
            scheduler: Any = trainer.lr_scheduler_configs[int(number)].scheduler
            scheduler.step(value)
        if self._validating:
            self._validating = False
            restart_validation(trainer)

    def _find_part_ends(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Find the batches at which the fractions of an epoch end."""
        share = self.settings.every_n_epochs
        is_part = share is not None and share < 1
        self._part_ends = ends_of_parts(trainer.num_training_batches, cast(float, share)) if is_part else frozenset()

    on_train_epoch_start = _find_part_ends

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Log the monitored training metric at the steps where it is judged, whatever the logging interval."""
        if not self._is_step_metric:
            return
        self._previous_value = trainer.callback_metrics.get(self.settings.monitor)
        if batch_idx + 1 in {*self._part_ends, trainer.num_training_batches} or is_validated(trainer):
            trainer.log_every_n_steps = 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        hook = pl_module.on_train_batch_end
        if callable(hook) and getattr(hook, "__func__", hook) is not LightningModule.on_train_batch_end:
            call_early(pl_module, "on_train_batch_end", outputs, batch, batch_idx)  # it may stop, or change weights
        stops = trainer.should_stop or self._stop_is_due
        trainer.should_stop, self._stop_is_due = stops and between_steps(trainer), stops and not between_steps(trainer)
        every, step = self.settings.every_n_steps, trainer.global_step
        due = every is not None and step % every == 0 and step not in (self.resumed_at, self._saved_step)
        is_last = trainer.should_stop or 0 < trainer.max_steps <= step  # two optimizers may pass it in a batch
        self._last_is_due |= due or batch_idx + 1 in self._part_ends or is_last
        # If a validation follows this batch, save after it: Lightning 2.6 would skip it when resuming from here.
        if self._last_is_due and between_steps(trainer) and not (epoch_is_over(trainer) or is_validated(trainer)):
            value = trainer.callback_metrics.get(self.settings.monitor or "")
            if self._is_step_metric and batch_idx + 1 in self._part_ends and value is not self._previous_value:
                self._keep_if_best(trainer)
            self._save_last(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = trainer.state.fn == "fit"

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = False
        if trainer.state.fn != "fit":
            return
        self._validated = True
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            call_early(pl_module, "on_validation_end")
            if trainer.should_stop and not between_steps(trainer):  # set after the hook of the batch
                trainer.should_stop, self._stop_is_due = False, True
            if self._is_step_metric or not self._is_train_metric:  # the mean over an epoch is known at its end
                self._keep_if_best(trainer)
            if (self._last_is_due or (trainer.should_stop and is_validated(trainer))) and between_steps(trainer):
                self._save_last(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep_if_best(trainer)
        if not epoch_is_over(trainer):
            return  # stopped inside the epoch: a checkpoint would count it as complete
        if trainer.fit_loop.restarting:
            # Lightning 2.6 skips these if it resumed inside the epoch.
            for _, scheduler, value in due_plateaus(trainer, "epoch"):
                scheduler.step(value)
        every = self.settings.every_n_epochs
        if self._last_is_due or (every is not None and (trainer.current_epoch + 1) % max(1, int(every)) == 0):
            self._save_last(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from deeplightning.engine.restored import averages_at_end

        lacks = self._saved_step != trainer.global_step or not self.record.folder.last.exists()
        lacks = lacks or (averages_at_end(trainer) and epoch_is_over(trainer))
        if trainer.strategy.broadcast(lacks):  # other machines may not see rank 0's files, and all save or none
            self._save_last(trainer)
        if self.settings.monitor is not None and not self.kept and not self.off:
            log.warning("there is no best.ckpt: %s never had a value", self.settings.monitor)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._adopt_kept(trainer)  # nothing was left to train

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save, so that an interrupted run can resume where it stopped."""
        polite = isinstance(exception, Interrupted) and not exception.at_once
        if polite and trainer.state.fn == "fit" and self.record.opened and between_steps(trainer):
            self._save_last(trainer)

    # ---- what to save

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        """Save what Lightning 2.6 does not: the pending step of schedulers that follow a metric, the last value of each
        metric that a scheduler or callback follows, and whether a validation is in progress."""
        ours = {"validating": self._validating, "plateaus": pending_plateaus(trainer), "monitored": followed(trainer)}
        checkpoint |= ours
        vars(trainer).setdefault("own_entries", {}).update(ours)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            from deeplightning.callbacks.average import require_averaging_callback
            from deeplightning.engine.restored import check_counters

            require_averaging_callback(trainer.callbacks, checkpoint, trainer.ckpt_path)  # type: ignore[attr-defined]
            check_counters(trainer, checkpoint)
            correct_skipped(checkpoint)
            resume_by_epochs(trainer)
            if not trainer.strategy.restore_checkpoint_after_setup:  # else the states are in the strategy's own format
                self._unchecked = checkpoint
        kinds = AccumulateFrom | GradientAccumulationScheduler
        later: Any = next((each for each in trainer.callbacks if isinstance(each, kinds)), None)  # type: ignore[attr-defined]
        factor = later.get_accumulate_grad_batches(checkpoint["epoch"]) if later else trainer.accumulate_grad_batches
        convert_counters(checkpoint, trainer.world_size, factor)
        self._plateaus, self._validating = checkpoint.get("plateaus", {}), checkpoint.get("validating", False)
        monitored = checkpoint.get("monitored") or {}
        self._monitored = {n: torch.as_tensor(v) for n, v in monitored.items() if isinstance(v, float | torch.Tensor)}
        if trainer.state.fn == "fit":
            resume_early_stopping(trainer, checkpoint)

    def save_now(self, trainer: Trainer) -> None:
        """Save `last.ckpt` at the end of an epoch, unless it is already saved."""
        if self._saved_step != trainer.global_step:
            self._save_last(trainer)

    def _save_last(self, trainer: Trainer) -> None:
        self._saved_step, self._last_is_due = trainer.global_step, False
        if self.off:
            return
        folder = self.record.folder
        self._save(trainer, folder.last)
        if self.settings.monitor is None and self.settings.save_top_k > 1 and trainer.is_global_zero:
            copy_checkpoint(folder.last, folder.checkpoint(trainer.current_epoch, trainer.global_step))
            copies = [path for path in folder.checkpoints() if path not in (folder.last, folder.best)]
            for old in copies[self.settings.save_top_k :]:
                remove_checkpoint(old)

    def _save(self, trainer: Trainer, path: Path) -> None:
        trainer.save_checkpoint(path)
        for logger in trainer.loggers if trainer.is_global_zero else ():  # some upload it
            logger.after_save_checkpoint(proxy(self))

    def _keep_if_best(self, trainer: Trainer) -> None:
        """Keep the weights if the monitored metric has a new value among the best k."""
        name = self.settings.monitor
        has_loaders = trainer.val_dataloaders is not None  # Lightning creates them at the first validation
        validates = trainer.enable_validation and (not has_loaders or any(trainer.num_val_batches))  # type: ignore[attr-defined]
        if name is None or not (self._validated or self._is_train_metric or not validates):
            return
        self._validated = False
        if name not in trainer.callback_metrics:
            names = sorted(trainer.callback_metrics)
            of_loader = next((other for other in names if other.startswith(f"{name}/dataloader_idx_")), "NAME")
            message = f"no metric is called {name!r}; this run has {', '.join(names)}."
            message += f" Set train.checkpoint.monitor={of_loader}"
            raise ConfigError(Fault(message, "train.checkpoint.monitor"))
        if self.off:
            return
        value = float(trainer.strategy.broadcast(float(trainer.callback_metrics[name])))  # rank 0's: all save or none
        if not math.isfinite(value):
            log.warning("%s is %s after epoch %d: not kept as best", name, value, trainer.current_epoch + 1)
            return
        at = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        entry: dict[str, Any] = {"metric": name, "value": value, **at}
        if any(entry.items() <= other.items() for other in self.kept):
            return  # kept before the run was killed
        sign = 1 if self.settings.mode == "min" else -1
        position = sum(sign * other["value"] <= sign * value for other in self.kept)
        if position < self.settings.save_top_k:
            self._keep(trainer, entry, position)
        elif trainer.is_global_zero:  # the run was killed between keeping a better one and removing this
            remove_checkpoint(self.record.folder.checkpoint(entry["epoch"], entry["step"]))

    def _keep(self, trainer: Trainer, entry: dict[str, Any], position: int) -> None:
        folder = self.record.folder
        if position == 0 and self.kept and self.settings.save_top_k > 1:
            former = self.kept[0]
            former["file"] = folder.checkpoint(former["epoch"], former["step"]).name
            if trainer.is_global_zero:
                copy_checkpoint(folder.best, folder.path / former["file"])
        target = folder.best if position == 0 else folder.checkpoint(entry["epoch"], entry["step"])
        self.kept.insert(position, {**entry, "file": target.name})
        surplus = self.kept[self.settings.save_top_k :]
        del self.kept[self.settings.save_top_k :]
        self._save(trainer, target)
        if not trainer.is_global_zero:
            return
        for old in surplus:
            if old["file"] != folder.best.name:
                remove_checkpoint(folder.path / old["file"])
        if position == 0:
            write_whole(folder.best_score, json.dumps(self.kept[0], indent=1))

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [dict(entry) for entry in self.kept]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded_kept = [dict(entry) for entry in state_dict["kept"]]

    def _adopt_kept(self, trainer: Trainer) -> None:
        """Find the best checkpoints that still exist. A new run also copies them and the last one to its folder: it may
        not improve on them, or may end before its first checkpoint."""
        if self._loaded_kept is None or trainer.ckpt_path is None:
            return
        (loaded, self._loaded_kept), source = (self._loaded_kept, None), Path(trainer.ckpt_path).absolute()
        former, folder = RunFolder(source.parent), self.record.folder
        is_same_run = former.path == folder.path
        if trainer.is_global_zero:
            self.kept = self._find_kept(former, loaded, is_same_run)
        self.kept = trainer.strategy.broadcast(self.kept)
        if not trainer.is_global_zero:
            return
        if not is_same_run:
            copy_checkpoint(source, folder.last)
            for entry in self.kept:
                copy_checkpoint(former.path / entry["file"], folder.path / entry["file"])
        elif self.kept:  # the run may have ended between keeping a better one and removing the worst
            names = {entry["file"] for entry in self.kept}
            for path in (folder.checkpoint(entry["epoch"], entry["step"]) for entry in loaded):
                if path.name not in names:
                    remove_checkpoint(path)
        if self.kept:
            write_whole(folder.best_score, json.dumps(self.kept[0], indent=1))

    def _find_kept(self, former: RunFolder, loaded: list[dict[str, Any]], is_same_run: bool) -> list[dict[str, object]]:
        """Return the best k that a checkpoint lists, without those whose files are missing.

        After the checkpoint was saved, later ones may have replaced the best. They count if the same run resumes, which
        reaches them again, but not in a new run. A best checkpoint that cannot be read is renamed, so that a worse one
        does not overwrite it.
        """
        from deeplightning.engine.checkpoint_reading import read_checkpoint

        try:
            best = read_checkpoint(former.best, whole=False)["callbacks"][self.state_key]["kept"][0]
            best = {**best, "file": former.best.name}
        except (CheckpointError, KeyError, IndexError, TypeError) as error:
            if former.best.is_file():
                aside = former.former(former.best) if is_same_run else former.best
                former.best.rename(aside)
                message = "best.ckpt cannot be read: the run chooses a new best checkpoint and keeps %s (%s)"
                log.warning(message, aside, error)
            return []
        if best["metric"] != self.settings.monitor and is_same_run:  # test, export and servers would use it
            copy_checkpoint(former.best, former.checkpoint(best["epoch"], best["step"]))
            remove_checkpoint(former.best)
            former.best_score.unlink(missing_ok=True)
        if best["metric"] != self.settings.monitor or not (is_same_run or best in loaded):
            return []
        others = [e for e in loaded if e["metric"] == self.settings.monitor and e["step"] != best["step"]]
        named = [{**e, "file": former.checkpoint(e["epoch"], e["step"]).name} for e in others]
        existing = [entry for entry in named if (former.path / entry["file"]).is_file()]
        return [best, *existing][: self.settings.save_top_k]
