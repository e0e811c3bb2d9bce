"""Print a table at the start of a run, its progress as a bar or as lines, and its results at the end."""

import logging
import math
import platform
import sys
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping

from deeplightning.batches import batch_loss, has_loss, samples_in
from deeplightning.callbacks import describe
from deeplightning.callbacks.checkpoints import Checkpoints
from deeplightning.callbacks.describe import effective_batch, num_samples
from deeplightning.callbacks.log_lines import LABEL_COLS
from deeplightning.callbacks.record import Record
from deeplightning.config.schema import Config, Target
from deeplightning.faults import count
from deeplightning.own_code import UNIFIED
from deeplightning.private.lightning import logged_steps
from deeplightning.process.terminal import is_interactive
from deeplightning.transfer import Deferred
from deeplightning.version import __version__
from deeplightning.words import stage_of

log = logging.getLogger("deeplightning")

LINE_SECONDS = 30  # between two lines inside one epoch
DRAW_SECONDS = 0.25  # between two drawings of the bar


class Console(Callback):
    """Print progress on rank 0; every rank writes its own losses to its log file."""

    def __init__(self, cfg: Config, record: Record, checkpoints: Checkpoints):
        self.cfg, self.record, self.checkpoints = cfg, record, checkpoints
        how = cfg.logger.progress
        self.bar = how == "bar" or (how == "auto" and is_interactive(sys.stdout))
        self.lines = how == "lines" or (how == "auto" and not self.bar)
        self.monitor = cfg.train.checkpoint.monitor or (cfg.train.early_stop.metric if cfg.train.early_stop else None)
        self._progress: Any = None  # rich's progress bar
        self._monitored_text: list[str] = []  # the monitored metric at the last validation, as text
        self._started = self._drawn_at = self._line_at = self._epoch_started = 0.0
        self._is_first_loss_logged = False
        self._samples = self._batches = 0  # of this process in the current epoch
        self._steps: float = math.inf  # of the training; infinite if unknown
        self._validates = False  # whether this epoch was validated
        self._learning = self._validating = self._validated_at = 0.0  # seconds in the epoch; start of a validation
        self._last_loss: Deferred | None = None
        self._epoch: int | None = None

    # ---- start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = self._epoch_started = self._line_at = time.monotonic()
        if trainer.is_global_zero:
            for name, text in self._summary(trainer, pl_module).items():
                _log_line(name, text)
            self._log_location(trainer)
        if self.bar and 0 in self.cfg.logger.ranks and trainer.is_global_zero and trainer.progress_bar_callback is None:
            self._steps = trainer.estimated_stepping_batches
            self._progress = _bar()
            self._progress.start()
        loop = trainer.fit_loop
        if loop.restarted_mid_epoch and loop.epoch_loop.batch_progress.current.ready < trainer.num_training_batches:
            self._epoch = trainer.current_epoch  # resumed inside an epoch: its start hook is not called again

    def _summary(self, trainer: Trainer, module: LightningModule) -> dict[str, str]:
        cfg, engine = self.cfg, self.cfg.engine
        # ZeRO 3 empties a parameter while it is not in use, and keeps its size in `ds_numel`.
        known = [p for p in module.parameters() if not torch.nn.parameter.is_lazy(p)]
        sizes_of = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in known]
        total, learning = sum(n for n, _ in sizes_of), sum(n for n, learns in sizes_of if learns)
        frozen = "" if learning == total else f", {learning:,} trainable"
        network = cfg.model.network
        name = network.type.rpartition(".")[2] if isinstance(network, Target) else type(module).__name__
        where = "CPU" if engine.gpus is None else f"GPU {engine.gpus}"
        length = [count(cfg.train.num_epochs, "epoch")] if cfg.train.num_epochs is not None else []
        length += [f"at most {count(cfg.train.max_steps, 'step')}"] if cfg.train.max_steps is not None else []
        steps, clip = trainer.estimated_stepping_batches, cfg.train.gradient_clip  # the former creates the loader
        loader = trainer.train_dataloader
        sizes = [getattr(part, "batch_size", None) for part in (loader, getattr(loader, "batch_sampler", None))]
        own_size = next((size for size in sizes if isinstance(size, int)), None)
        sets = {"training": loader, "validation": trainer.val_dataloaders}
        set_sizes = [f"{samples:,} {each}" for each, loaders in sets.items() if (samples := num_samples(loaders))]
        return {
            **({"config": ", ".join(cfg.written)} if cfg.written else {}),
            "versions": f"Deep Lightning {__version__}, torch {torch.__version__}, Lightning {pl.__version__}"
            f"{' (and as `lightning`)' if UNIFIED in sys.modules else ''}, Python {platform.python_version()}",
            "data": cfg.data.module.type.rpartition(".")[2]
            + (f": {', '.join(set_sizes)} samples" if set_sizes else ""),
            "network": f"{name}: {count(total, 'parameter')} ({total / 1e6:.3f} M){frozen}",
            "engine": f"{where}, {engine.backend or 'one process'}, precision {trainer.precision}",
            "batch": effective_batch(cfg, own_size, num_samples(trainer.train_dataloader)),
            "length": f"{', '.join(length)}; {count(int(steps), 'step') if math.isfinite(steps) else 'steps unknown'}",
            **({"clipping": f"{clip.algorithm} at {clip.value}"} if clip else {}),
        }

    def _log_location(self, trainer: Trainer) -> None:
        """Log the run folder, and the address of the run's page."""
        folder, uri = self.record.folder.path, self.cfg.logger.params.get("tracking_uri")
        _log_line("run folder", str(folder), [_labelled("run folder", describe.relative_path(folder))])
        if (address := describe.page(trainer.loggers, uri)) is not None:
            start = self.cfg.redact_message(describe.monitor(uri) or "")  # a terminal shows it as it is
            text = f"{start}, then {address}" if start else address
            _log_line("watch", text, [_labelled("watch", f"{start}, then open"), f"  {address}"] if start else None)

    # ---- progress

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch(trainer)
        self._epoch, self._epoch_started = trainer.current_epoch, time.monotonic()
        self._samples, self._batches, self._learning, self._validating, self._validates = 0, 0, 0.0, 0.0, False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        now = time.monotonic()
        self._samples += samples_in(batch)
        self._batches += 1
        self._learning = now - self._epoch_started - self._validating
        if not self._is_first_loss_logged and has_loss(outputs):
            self._is_first_loss_logged = True
            log.info("first loss %.4f, %.1f s after the start", self._loss(trainer, outputs), now - self._started)
        if self._progress and now - self._drawn_at > DRAW_SECONDS:
            self._drawn_at = now
            self._draw(trainer, self._loss(trainer, outputs))
        elif self.lines and now - self._line_at > LINE_SECONDS:
            self._line_at = now
            done = f"batch {batch_idx + 1} of {trainer.num_training_batches}"
            loss = float(batch_loss(trainer, outputs))  # `self._loss` may give that of the previous line
            log.info("epoch %d, %s: train_loss %.4f", trainer.current_epoch + 1, done, loss)

    def _draw(self, trainer: Trainer, loss: float) -> None:
        shown = [f"loss {loss:.4f}", *self._monitored_text]
        if (speed := self._speed(trainer)) > 0:
            shown.append(f"{_rate(speed)} samples/s")
        if self._learning > 0:
            shown.append(f"{_rate(self._batches / self._learning)} it/s")
        self._show(trainer, "  ".join(shown))

    def _show(self, trainer: Trainer, text: str) -> None:
        """Update the bar with the completed steps and a text."""
        of = f"/{self.cfg.train.num_epochs}" if self.cfg.train.num_epochs else ""
        (task,), epoch = self._progress.task_ids, f"epoch {trainer.current_epoch + 1}{of}"
        total = int(self._steps) if math.isfinite(self._steps) else None
        done = logged_steps(trainer) if trainer.max_steps < 0 else trainer.global_step  # the unit of the total
        self._progress.update(task, total=total, completed=done, description=epoch, text=text, refresh=True)

    def _speed(self, trainer: Trainer) -> float:
        """Return the samples per second of all processes in this epoch; 0 if unknown."""
        return self._samples * trainer.world_size / self._learning if self._learning > 0 else 0.0

    def _loss(self, trainer: Trainer, outputs: object) -> float:
        """Return the loss to show: that of this batch, or on a GPU the previous one, which is read without waiting."""
        now = Deferred(batch_loss(trainer, outputs))
        before, self._last_loss = self._last_loss, now
        return (before if before is not None and before.is_late else now).read()[0]

    def _end_epoch(self, trainer: Trainer) -> None:
        """Log the last epoch, at the start of the next one, after all hooks have logged their values."""
        if self._epoch is None:
            return
        shown = self._values(trainer)
        steps = {n for n in shown if f"{n.removesuffix('_step')}_epoch" in shown}  # shown as the epoch's mean instead
        shown = {n.removesuffix("_epoch"): v for n, v in shown.items() if n not in steps}
        of = f" of {self.cfg.train.num_epochs}" if self.cfg.train.num_epochs else ""
        seconds, speed = time.monotonic() - self._epoch_started, self._speed(trainer)
        best = self.checkpoints.best
        is_best = best is not None and best["epoch"] == self._epoch
        values = "".join(f"  {name} {value:.4f}" for name, value in shown.items()) + "  best" * is_best
        pace = f", {_rate(speed)} samples/s" if speed > 0 else ""
        log.info("epoch %d%s%s  (%.1f s%s)", self._epoch + 1, of, values, seconds, pace)
        self._epoch, self._line_at = None, time.monotonic()

    def _values(self, trainer: Trainer) -> dict[str, float]:
        """Return the metrics of an epoch to show: those named after a stage, the monitored one, and those logged with
        `prog_bar=True`; all if there are none of these. Validation metrics of an earlier epoch are left out."""
        scalars = {name: v for name, v in sorted(trainer.callback_metrics.items()) if torch.as_tensor(v).numel() == 1}
        wanted = {self.monitor, *trainer.progress_bar_metrics}
        shown = [name for name in scalars if stage_of(name)[0] in ("train", "val") or name in wanted] or list(scalars)
        return {name: float(scalars[name]) for name in shown if self._validates or stage_of(name)[0] != "val"}

    # ---- end

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._stop_bar()
        self._end_epoch(trainer)
        for stop in (each for each in trainer.callbacks if isinstance(each, EarlyStopping)):
            reason, value = "", float(trainer.callback_metrics.get(stop.monitor, 0.0))
            if stop.check_finite and not math.isfinite(value):
                reason = f"is {value}"
            elif 0 < stop.wait_count >= stop.patience:
                reason = f"was no better than {stop.best_score:.4f} for {count(stop.patience, 'validation')}"
            if reason:
                log.info("stopped    early, after epoch %d: %s %s", stop.stopped_epoch + 1, stop.monitor, reason)
        if best := self.checkpoints.best:
            where = f"after epoch {best['epoch'] + 1} (step {best['step']})"
            log.info("best       %s %.4f %s", best["metric"], best["value"], where)
        log.info("duration   %s", _duration(time.monotonic() - self._started))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._started:  # nothing is left to train
            done = (count(trainer.current_epoch, "epoch"), count(trainer.global_step, "step"))
            log.info("done       already: %s, %s", *done)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_at = time.monotonic()
        if self._progress:
            self._show(trainer, "validating")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating += time.monotonic() - self._validated_at
        self._validates = True
        if self._progress and (value := trainer.callback_metrics.get(self.monitor or "")) is not None:
            self._monitored_text = [f"{self.monitor} {float(value):.4f}"]
        if trainer.state.fn == "validate":
            self._log_results(trainer)

    def _log_results(self, trainer: Trainer, *_: object, **__: object) -> None:
        results = sorted(trainer.callback_metrics.items())
        found = {name: float(v) for name, v in results if torch.as_tensor(v).numel() == 1}
        log.info("results    %s", "  ".join(f"{name} {value:.4f}" for name, value in found.items()))

    on_test_end = _log_results

    def _stop_bar(self, *_: object, **__: object) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None

    on_exception = _stop_bar


def _log_line(label: str, text: str, terminal: list[str] | None = None) -> None:
    """Log a text with a label; a terminal shows `terminal` instead, if given."""
    log.info("%s", _labelled(label, text), extra={"terminal": terminal})


def _labelled(label: str, text: str) -> str:
    return f"{label.ljust(LABEL_COLS - 1)} {text}"


def _bar() -> Any:
    """Return rich's progress bar with one task, below other output and without automatic refresh."""
    from rich import progress
    from rich.console import Console as Screen
    from rich.table import Column
    from rich.text import Text

    class Numbers(progress.ProgressColumn):
        """The column that is truncated on a narrow terminal."""

        def render(self, task: progress.Task) -> Text:
            return Text(task.fields["text"], no_wrap=True, overflow="ellipsis")

    bar = progress.BarColumn(10, table_column=Column(no_wrap=True))
    steps = progress.MofNCompleteColumn(table_column=Column(no_wrap=True))
    left = progress.TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True))
    columns = (progress.TextColumn("{task.description}"), bar, steps, left, Numbers())
    screen = Screen(file=sys.stdout, highlight=False, markup=False, emoji=False)
    both = getattr(sys.stderr, "isatty", bool)()  # it may be None
    shown = progress.Progress(*columns, console=screen, auto_refresh=False, transient=True, redirect_stderr=both)
    shown.add_task("", total=None, text="")
    return shown


def _rate(value: float) -> str:
    return f"{value:,.{0 if value >= 10 else 2}f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
