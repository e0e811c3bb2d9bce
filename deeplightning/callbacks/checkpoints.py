"""Save `last.ckpt` to resume from, `best.ckpt` by a metric, and the next best, between optimizer steps alone.

From inside an accumulation, Lightning's ModelCheckpoint saves no gradients."""

import json
import logging
import math
from pathlib import Path
from typing import Any, cast

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint as LightningCheckpoint
from pytorch_lightning.callbacks import EarlyStopping, GradientAccumulationScheduler, StochasticWeightAveraging

from deeplightning.callbacks.random_state import knows_position
from deeplightning.callbacks.record import Record, between_steps, epoch_is_over
from deeplightning.callbacks.steps import ends_of_parts
from deeplightning.config.schema import Checkpoint
from deeplightning.engine.checkpoint_io import copy_checkpoint, remove_checkpoint
from deeplightning.faults import CheckpointError, ConfigError, Fault
from deeplightning.private.lightning import forget_train_loader, restart_validation, resume_by_epochs, training_loaders
from deeplightning.process.streams import Interrupted
from deeplightning.runfolder import RunFolder, write_whole
from deeplightning.words import stage_of

log = logging.getLogger("deeplightning")

PAST_THE_LAST = 2**31  # more batches than an epoch has


class Checkpoints(LightningCheckpoint):
    """Save `last.ckpt` every n epochs or steps, at the end and when interrupted, and the best k by a metric.

    The best is `best.ckpt`, with `best.json` beside it (metric, value, epoch, step, file); the others of the best k are
    `epoch=E-step=S.ckpt`. Without a metric the newest k have such names, where k is more than 1. A value that is not a
    number is never best; of equal values the first stays.

    `last.ckpt` is saved between two optimizer steps only: gradients that wait for theirs are in no checkpoint.

    Args:
        off: save none; a metric that is not there is still an error.

    Attributes:
        resumed_at: the optimizer steps that were done when this training began; -1: it has not begun.
    """

    def __init__(self, settings: Checkpoint, record: Record, off: bool = False):
        self.settings, self.record, self.off = settings, record, off
        self.kept: list[dict[str, Any]] = []  # the best first: {"value", "epoch", "step", "file"}
        self._loaded: list[dict[str, Any]] | None = None
        self._arriving: dict[str, object] | None = None  # until the optimizers are there that it is compared with
        self._plateaus: dict[str, float] = {}
        self._monitored: dict[str, torch.Tensor] = {}
        self._due = self._validating = False
        self._saved_step = self.resumed_at = -1  # optimizer steps
        self._validated = False
        self._marks = frozenset[int]()
        name = settings.monitor or ""
        self._of_training = stage_of(name)[0] == "train"  # the metric
        self._of_steps = self._of_training and not name.endswith("_epoch")
        self._former: object = None  # its value before the batch that is under way

    @property
    def best(self) -> dict[str, Any] | None:
        """Value, epoch and step of the best so far."""
        return self.kept[0] if self.kept else None

    # ---- what callbacks and tasks ask Lightning's ModelCheckpoint for

    @property
    def dirpath(self) -> str | None:
        return str(self.record.folder.path) if self.record.opened else None

    @property
    def last_model_path(self) -> str:
        """Return the path of `last.ckpt`; "" before it is saved."""
        return str(self.record.folder.last) if self.record.opened and self.record.folder.last.exists() else ""

    @property
    def best_model_path(self) -> str:
        """Return the path of `best.ckpt`, and without a metric that of the last, as Lightning does; "" before that."""
        if self.settings.monitor is None:
            return self.last_model_path
        return str(self.record.folder.best) if self.kept else ""

    @property
    def best_model_score(self) -> torch.Tensor | None:
        return torch.tensor(self.kept[0]["value"]) if self.kept else None

    # ---- when

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the module's own checkpoint callbacks, of `configure_callbacks`, in front of ours, as those of the config
        are: a checkpoint holds their states, and `trainer.checkpoint_callback` is theirs."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        ours = [
            each for each in callbacks[callbacks.index(self) :] if type(each).__module__.startswith("deeplightning")
        ]
        trainer.callbacks = [each for each in callbacks if each not in ours] + ours  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._arriving is not None:
            from deeplightning.engine.restored import check_optimizers

            check_optimizers(trainer, self._arriving)
            self._arriving = None
        # Whoever asks for `estimated_stepping_batches` in `configure_optimizers`, as a schedule with `auto` does, has
        # Lightning (2.6.6) make loader and iterator before the position is restored: the run would repeat the first
        # epoch's batches. Strategies that shard parameters learn only after this hook that there is a checkpoint. A
        # loader that does not know its position keeps the iterator: a second one would draw other numbers.
        resumes = trainer.ckpt_path is not None or trainer.strategy.restore_checkpoint_after_setup
        if resumes and any(map(knows_position, training_loaders(trainer))):
            forget_train_loader(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_over(trainer)
        self._find_marks(trainer)
        self.resumed_at = trainer.global_step
        if 0 < trainer.fit_loop.epoch_loop.batch_progress.current.ready < trainer.num_training_batches:
            # Lightning 2.6 does not call this hook where it resumes in an epoch, and these would train otherwise.
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

    def _find_marks(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Find the batches after which a fraction of an epoch is over."""
        share = self.settings.every_n_epochs
        is_part = share is not None and share < 1
        self._marks = ends_of_parts(trainer.num_training_batches, cast(float, share)) if is_part else frozenset()

    on_train_epoch_start = _find_marks

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Log a metric of training steps at the step that it judges, whichever others are logged."""
        if not self._of_steps:
            return
        self._former = trainer.callback_metrics.get(self.settings.monitor)
        if batch_idx + 1 in {*self._marks, trainer.num_training_batches} or _is_validated(trainer):
            trainer.log_every_n_steps = 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        every, step = self.settings.every_n_steps, trainer.global_step
        due = every is not None and step % every == 0 and step not in (self.resumed_at, self._saved_step)
        is_last = 0 < trainer.max_steps <= step  # two optimizers may take more than one step in a batch
        if due or batch_idx + 1 in self._marks or is_last:
            self._due = True
        # Behind a batch that is validated, after that: Lightning 2.6 would not do it after resuming from here.
        if self._due and between_steps(trainer) and not (epoch_is_over(trainer) or _is_validated(trainer)):
            _call_early(pl_module, "on_train_batch_end", outputs, batch, batch_idx)
            known = trainer.callback_metrics.get(self.settings.monitor or "")
            if self._of_steps and batch_idx + 1 in self._marks and known is not self._former:
                self._judge(trainer)
            self._save_last(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = trainer.state.fn == "fit"

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = False
        if trainer.state.fn != "fit":
            return
        self._validated = True
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            _call_early(pl_module, "on_validation_end")
            self._judge(trainer)
            if self._due and between_steps(trainer):
                self._save_last(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._judge(trainer)
        if not epoch_is_over(trainer):
            return  # stopped inside the epoch: a checkpoint from here would count it as whole
        if trainer.fit_loop.restarting:
            # Lightning 2.6 leaves it out where it resumed in the epoch
            for _, scheduler, value in _by_metrics(trainer, "epoch"):
                scheduler.step(value)
        every = self.settings.every_n_epochs
        if self._due or (every is not None and (trainer.current_epoch + 1) % max(1, int(every)) == 0):
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
        self._take_over(trainer)  # nothing was left to train

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save, so that an interrupted run can resume where it stopped."""
        polite = isinstance(exception, Interrupted) and not exception.at_once
        if polite and trainer.state.fn == "fit" and self.record.opened and between_steps(trainer):
            self._save_last(trainer)

    # ---- what

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        """Note what Lightning 2.6 forgets when it resumes: a step of schedulers that follow a metric, which is to come
        after this, the metrics of those by steps, and a validation that was not finished. That a run was stopped early
        its callback's state says."""
        epoch: Any = trainer.fit_loop.epoch_progress.current
        batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        ends_epoch = epoch.completed < epoch.processed == epoch.ready
        if (ends_epoch and not trainer.fit_loop.restarting) or batch.completed < batch.processed == batch.ready:
            due = _by_metrics(trainer, "epoch" if ends_epoch else "step")
            checkpoint["plateaus"] = {str(number): value for number, _, value in due}
        checkpoint["validating"] = self._validating
        steps = {c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "step"}
        known = trainer.callback_metrics
        checkpoint["monitored"] = {name: float(known[name]) for name in steps if name in known}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            from deeplightning.callbacks.average import refuse_without
            from deeplightning.engine.restored import check_counters

            refuse_without(trainer.callbacks, checkpoint, trainer.ckpt_path)  # type: ignore[attr-defined]
            check_counters(trainer, checkpoint)
            _count_skipped(checkpoint)
            resume_by_epochs(trainer)
            if not trainer.strategy.restore_checkpoint_after_setup:  # else states are in a form of the strategy's own
                self._arriving = checkpoint
        _count_for(checkpoint, trainer.world_size)
        self._plateaus, self._validating = checkpoint.get("plateaus", {}), checkpoint.get("validating", False)
        monitored = checkpoint.get("monitored") or {}
        self._monitored = {name: torch.tensor(value) for name, value in monitored.items() if isinstance(value, float)}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            state = checkpoint.get("callbacks", {}).get(callback.state_key)
            if isinstance(callback, EarlyStopping) and state and trainer.state.fn == "fit":
                by_patience = state["wait_count"] >= state["patience"]
                state["patience"] = callback.patience  # the config's, which may have changed
                by_more = state["stopped_epoch"] > 0 and not by_patience
                trainer.should_stop |= by_more or state["wait_count"] >= callback.patience

    def save_now(self, trainer: Trainer) -> None:
        """Save `last.ckpt` at the end of an epoch, unless that has been done."""
        if self._saved_step != trainer.global_step:
            self._save_last(trainer)

    def _save_last(self, trainer: Trainer) -> None:
        self._saved_step, self._due = trainer.global_step, False
        if self.off:
            return
        trainer.save_checkpoint(self.record.folder.last)
        if self.settings.monitor is None and self.settings.save_top_k > 1 and trainer.is_global_zero:
            self._keep_newest(self.record.folder.checkpoint(trainer.current_epoch, trainer.global_step))

    def _keep_newest(self, named: Path) -> None:
        """Give `last.ckpt` a name of its own beside, and remove what is older than the newest k of such names."""
        folder = self.record.folder
        copy_checkpoint(folder.last, named)
        there = [path for path in folder.checkpoints() if path not in (folder.last, folder.best)]
        for old in there[self.settings.save_top_k :]:
            remove_checkpoint(old)

    def _judge(self, trainer: Trainer) -> None:
        """Keep the weights if the monitored metric has a new value among the best k."""
        name = self.settings.monitor
        is_known = trainer.val_dataloaders is not None  # Lightning asks for them when it first validates
        validates = trainer.enable_validation and (not is_known or any(trainer.num_val_batches))  # type: ignore[attr-defined]
        if name is None or not (self._validated or self._of_training or not validates):
            return
        self._validated = False
        if name not in trainer.callback_metrics:
            known = sorted(trainer.callback_metrics)
            of_loader = next((other for other in known if other.startswith(f"{name}/dataloader_idx_")), "NAME")
            message = f"no metric is called {name!r}; this run has {', '.join(known)}."
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
        if any(entry.items() <= known.items() for known in self.kept):
            return  # it was kept before the run was killed
        sign = 1 if self.settings.mode == "min" else -1
        place = sum(sign * known["value"] <= sign * value for known in self.kept)
        if place < self.settings.save_top_k:
            self._keep(trainer, entry, place)
        elif trainer.is_global_zero:  # killed between keeping a better one and removing this
            remove_checkpoint(self.record.folder.checkpoint(entry["epoch"], entry["step"]))

    def _keep(self, trainer: Trainer, entry: dict[str, Any], place: int) -> None:
        folder = self.record.folder
        if place == 0 and self.kept and self.settings.save_top_k > 1:
            former = self.kept[0]
            former["file"] = folder.checkpoint(former["epoch"], former["step"]).name
            if trainer.is_global_zero:
                copy_checkpoint(folder.best, folder.path / former["file"])
        target = folder.best if place == 0 else folder.checkpoint(entry["epoch"], entry["step"])
        self.kept.insert(place, {**entry, "file": target.name})
        surplus = self.kept[self.settings.save_top_k :]
        del self.kept[self.settings.save_top_k :]
        trainer.save_checkpoint(target)
        if not trainer.is_global_zero:
            return
        for old in surplus:
            if old["file"] != folder.best.name:
                remove_checkpoint(folder.path / old["file"])
        if place == 0:
            write_whole(folder.best_score, json.dumps(self.kept[0], indent=1))

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [dict(entry) for entry in self.kept]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = [dict(entry) for entry in state_dict["kept"]]

    def _take_over(self, trainer: Trainer) -> None:
        """Find out which of the best are there, and put them and the last into this run's folder if they are not:
        what the run may not surpass, and what it has if it ends before its first own."""
        if self._loaded is None or trainer.ckpt_path is None:
            return
        (loaded, self._loaded), source = (self._loaded, None), Path(trainer.ckpt_path).absolute()
        former, folder = RunFolder(source.parent), self.record.folder
        goes_on = former.path == folder.path
        if trainer.is_global_zero:
            self.kept = self._still_there(former, loaded, goes_on)
        self.kept = trainer.strategy.broadcast(self.kept)
        if not trainer.is_global_zero:
            return
        if not goes_on:
            copy_checkpoint(source, folder.last)
            for entry in self.kept:
                copy_checkpoint(former.path / entry["file"], folder.path / entry["file"])
        elif self.kept:  # the process may have ended between keeping a better one and removing the worst
            names = {entry["file"] for entry in self.kept}
            for path in (folder.checkpoint(entry["epoch"], entry["step"]) for entry in loaded):
                if path.name not in names:
                    remove_checkpoint(path)
        if self.kept:
            write_whole(folder.best_score, json.dumps(self.kept[0], indent=1))

    def _still_there(self, former: RunFolder, loaded: list[dict[str, Any]], goes_on: bool) -> list[dict[str, object]]:
        """Return the best k that a checkpoint knew, as far as their files are there.

        Between the checkpoint and the end of the process later ones may have replaced the best. Where the run resumes,
        they are its own: it will come to them again. Elsewhere they are of another course of things. A best that cannot
        be read is put aside, so that a worse one does not take its place.
        """
        from deeplightning.engine.checkpoint_reading import read_checkpoint

        try:
            best = read_checkpoint(former.best)["callbacks"][self.state_key]["kept"][0]
            best = {**best, "file": former.best.name}
        except (CheckpointError, KeyError, IndexError, TypeError) as error:
            if former.best.is_file():
                aside = former.former(former.best) if goes_on else former.best
                former.best.rename(aside)
                message = "best.ckpt cannot be read: the run chooses a new best checkpoint and keeps %s (%s)"
                log.warning(message, aside, error)
            return []
        if best["metric"] != self.settings.monitor or not (goes_on or best in loaded):
            return []
        others = [
            {**entry, "file": former.checkpoint(entry["epoch"], entry["step"]).name}
            for entry in loaded
            if entry["metric"] == self.settings.monitor and entry["step"] != best["step"]
        ]
        there = [entry for entry in others if (former.path / entry["file"]).is_file()]
        return [best, *there][: self.settings.save_top_k]


def _count_for(checkpoint: dict[str, Any], world: int) -> None:
    """Count the batches of an epoch, in place, as another number of processes does: so many samples are done, and an
    epoch that was over is over. A global batch is made of the same samples whoever computes it (see
    `deeplightning.data.samplers`)."""
    engine = checkpoint.get("engine") or {}
    was = engine.get("processes", world)
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if was == world or progress is None:
        return
    counts, before = progress["current"], progress["current"]["ready"]
    ready = PAST_THE_LAST if progress["is_last_batch"] else counts["ready"] * was // world
    for name, count in counts.items():  # the batch under way may not be completed yet
        counts[name] = ready - (before - count)


def _count_skipped(checkpoint: dict[str, Any]) -> None:
    """Count batches, in place, as if no hook had skipped the rest of an epoch: Lightning 2.6 would repeat the batch of
    the checkpoint. A checkpoint has at most one skipped batch for each epoch; other differences are faults."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if progress is None:
        return
    counts, total = progress["current"], progress["total"]
    skipped = total["ready"] - total["completed"] - (counts["ready"] - counts["completed"])
    if counts["ready"] <= total["ready"] and 0 < skipped <= checkpoint.get("epoch", 0) + 1:
        total |= {name: total["ready"] - counts["ready"] + count for name, count in counts.items()}


def _call_early(task: LightningModule, hook: str, *arguments: object) -> None:
    """Call a hook of the task now, instead of behind the callbacks' hooks: a checkpoint that is saved here has what the
    hook changes, such as an average of the weights."""
    getattr(task, hook)(*arguments)
    own = vars(task).get(hook)

    def skip(*_: object) -> None:
        delattr(task, hook) if own is None else setattr(task, hook, own)

    setattr(task, hook, skip)


def _is_validated(trainer: Trainer) -> bool:
    """Return whether a validation follows the batch that is under way."""
    epochs, batches = cast(int, trainer.check_val_every_n_epoch), cast(float, trainer.val_check_batch)
    in_epoch = sum(trainer.num_val_batches) > 0 and (trainer.current_epoch + 1) % epochs == 0
    return in_epoch and trainer.fit_loop.epoch_loop.batch_progress.current.ready % batches == 0


def _by_metrics(trainer: Trainer, interval: str) -> list[tuple[int, Any, float]]:
    """Return the schedulers that follow a metric by epochs or steps and are due after this one: number, scheduler,
    value."""
    if not trainer.lightning_module.automatic_optimization:
        return []
    done = (
        trainer.current_epoch + 1 if interval == "epoch" else trainer.fit_loop.epoch_loop.batch_progress.current.ready
    )
    return [
        (number, config.scheduler, float(trainer.callback_metrics[config.monitor]))
        for number, config in enumerate(trainer.lr_scheduler_configs)
        if config.reduce_on_plateau
        and config.interval == interval
        and done % config.frequency == 0
        and config.monitor in trainer.callback_metrics
    ]
