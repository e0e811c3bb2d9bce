"""What a run prints: a table at its start, its progress, its results at the end."""

import logging
import platform
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.warnings import PossibleUserWarning
from pytorch_lightning.callbacks import EarlyStopping

from deeplightning.callbacks.checkpoints import Checkpoints
from deeplightning.callbacks.order import OWN
from deeplightning.callbacks.record import Record, Redacting, rank_shown
from deeplightning.callbacks.watch import batch_loss, has_loss, samples_in
from deeplightning.checks.hints import proposals
from deeplightning.config.schema import Config, Target
from deeplightning.engine.compute import matmul_hint
from deeplightning.engine.plan import effective_batch
from deeplightning.faults import count
from deeplightning.process.identity import own_rank
from deeplightning.transfer import Deferred
from deeplightning.version import __version__

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger("deeplightning")
log.addHandler(logging.NullHandler())  # else Python itself prints the warnings of silent ranks

LINE_SECONDS = 30  # between two lines inside one epoch
DRAW_SECONDS = 0.25  # between two drawings of the bar


class _Terminal(logging.Handler):
    """News to stdout; warnings and errors to stderr, with the word, in colour on a terminal.

    Args:
        begin: what each line starts with.
    """

    def __init__(self, begin: str):
        super().__init__()
        self.begin = begin

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).replace("\n", f"\n{self.begin}")
        if record.levelno < logging.WARNING:
            print(f"{self.begin}{text}", flush=True)
            return
        word = record.levelname.lower()
        if sys.stderr.isatty():
            word = f"\x1b[{31 if record.levelno > logging.WARNING else 33}m{word}\x1b[0m"
        print(f"{self.begin}{word}: {text}", file=sys.stderr, flush=True)


def to_terminal(cfg: Config) -> None:
    """Shows what is logged under `deeplightning` on the terminal, on the ranks that `logger.ranks` names."""
    for handler in [h for h in log.handlers if isinstance(h, _Terminal)]:
        log.removeHandler(handler)
    log.setLevel(logging.INFO)
    for chatty in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # Lightning 2.6 under torch 2.15; nothing a user could do about it.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec", category=FutureWarning)
    # Our image data resume within an epoch by themselves.
    warnings.filterwarnings("ignore", message=".*resuming from a checkpoint that ended before the epoch ended")
    # `engine.gpus: null` is a choice.
    warnings.filterwarnings("ignore", message=r"GPU available but not used\.", category=PossibleUserWarning)
    # Ours names the key: `deeplightning.engine.compute.matmul_hint`. Lightning's is news below its level, see above.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication available")
    if own_rank() in cfg.logger.ranks:
        handler = _Terminal(rank_shown(cfg))
        handler.setFormatter(Redacting(cfg, "%(message)s"))
        log.addHandler(handler)


def one_line_warnings() -> None:
    """Shows Python's warnings as one line each, without the place in a library that a user cannot mend."""
    warnings.showwarning = lambda message, *_, **__: log.warning("%s", str(message).strip())


class Console(pl.Callback):
    """Says on rank 0 what is going on; every rank writes its own losses to its log file."""

    after = ("Record",)
    before = (OWN, "EarlyStopping")  # a line is printed before one of them ends the run

    def __init__(self, cfg: Config, record: Record, checkpoints: Checkpoints):
        self.cfg, self.record, self.checkpoints = cfg, record, checkpoints
        how = cfg.logger.progress
        self.bar = how == "bar" or (how == "auto" and sys.stdout.isatty())
        self.lines = how == "lines" or (how == "auto" and not self.bar)
        self._progress: Progress | None = None
        self._started = self._drawn = self._spoken = self._epoch_started = 0.0
        self._told_first = False
        self._samples = 0  # that this process has learned from in the epoch
        self._learning = self._validating = self._validated_at = 0.0  # seconds of the epoch; when a validation began
        self._shown: Deferred | None = None
        self._epoch: int | None = None

    # ---- start

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = self._epoch_started = self._spoken = time.monotonic()
        if trainer.is_global_zero:
            for name, text in self._summary(trainer, pl_module).items():
                log.info("%-10s %s", name, text)
            if (hint := matmul_hint(self.cfg.engine, trainer.strategy.root_device)) is not None:
                log.info("%-10s %s", "hint", hint)
            for notice in proposals(self.cfg, self.cfg.engine):
                log.info("%s", notice.text)
        if self.bar and trainer.is_global_zero:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, auto_refresh=False, transient=True)
            self._progress.start()
            self._bar = self._progress.add_task("", total=trainer.num_training_batches)
        if 0 < trainer.fit_loop.epoch_loop.batch_progress.current.ready < trainer.num_training_batches:
            self._epoch = trainer.current_epoch  # resumed inside an epoch, whose start is not printed again

    def _summary(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, str]:
        cfg, engine = self.cfg, self.cfg.engine
        # ZeRO 3 leaves a parameter empty while it is not used, and notes its size.
        sizes_of = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in module.parameters()]
        total, learning = sum(n for n, _ in sizes_of), sum(n for n, learns in sizes_of if learns)
        frozen = "" if learning == total else f", {learning:,} of them learn"
        network = cfg.model.network
        name = network.type.rpartition(".")[2] if isinstance(network, Target) else type(module).__name__
        sets = {"training": trainer.train_dataloader, "validation": trainer.val_dataloaders}
        sizes = [f"{size:,} {what}" for what, loader in sets.items() if (size := _size(loader))]
        where = "CPU" if engine.gpus is None else f"GPU {engine.gpus}"
        length = [count(cfg.train.num_epochs, "epoch")] if cfg.train.num_epochs is not None else []
        length += [f"at most {count(cfg.train.max_steps, 'step')}"] if cfg.train.max_steps is not None else []
        clip = cfg.train.gradient_clip
        return {
            "versions": f"Deep Lightning {__version__}, torch {torch.__version__}, Lightning {pl.__version__}, "
            f"Python {platform.python_version()}",
            "network": f"{name}: {count(total, 'parameter')} ({total / 1e6:.3f} M){frozen}",
            "data": f"{cfg.data.module.type.rpartition('.')[2]}: {', '.join(sizes)} samples",
            "engine": f"{where}, {engine.backend or 'one process'}, precision {trainer.precision}",
            "batch": effective_batch(cfg),
            "length": ", ".join(length) + f"; {count(trainer.estimated_stepping_batches, 'step')}",
            "clipping": f"{clip.algorithm} at {clip.value}" if clip else "none",
            "run folder": str(self.record.folder.path),
        }

    # ---- progress

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_epoch(trainer)
        self._epoch, self._epoch_started = trainer.current_epoch, time.monotonic()
        self._samples, self._learning, self._validating = 0, 0.0, 0.0
        if self._progress:
            self._progress.reset(self._bar, total=trainer.num_training_batches)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        now = time.monotonic()
        self._samples += samples_in(batch)
        self._learning = now - self._epoch_started - self._validating
        if not self._told_first and has_loss(outputs):
            self._told_first = True
            log.info("first loss %.4f, %.1f s after the start", self._loss(trainer, outputs), now - self._started)
        if self._progress and now - self._drawn > DRAW_SECONDS:
            self._drawn = now
            text = f"epoch {trainer.current_epoch + 1}  train_loss {self._loss(trainer, outputs):.4f}"
            self._progress.update(self._bar, completed=batch_idx + 1, description=text, refresh=True)
        elif self.lines and now - self._spoken > LINE_SECONDS:
            self._spoken = now
            done = f"batch {batch_idx + 1} of {trainer.num_training_batches}"
            log.info("epoch %d, %s: train_loss %.4f", trainer.current_epoch + 1, done, self._loss(trainer, outputs))

    def _loss(self, trainer: pl.Trainer, outputs: object) -> float:
        """The loss to show: of this batch; on a GPU the one of the last time, for which nothing has to wait."""
        now = Deferred(batch_loss(trainer, outputs))
        before, self._shown = self._shown, now
        return (before if before is not None and before.is_late else now).read()[0]

    def _end_epoch(self, trainer: pl.Trainer) -> None:
        """Says what the last epoch brought: at the start of the next, when every hook has logged its values."""
        if self._epoch is None:
            return
        shown = {n: float(v) for n, v in sorted(trainer.callback_metrics.items()) if n.startswith(("train_", "val_"))}
        shown = {n.removesuffix("_epoch"): v for n, v in shown.items() if f"{n}_epoch" not in shown}
        of = f" of {self.cfg.train.num_epochs}" if self.cfg.train.num_epochs else ""
        seconds = time.monotonic() - self._epoch_started
        values = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        speed = self._samples * trainer.world_size / self._learning if self._learning > 0 else 0.0
        rate = f", {speed:,.{0 if speed >= 10 else 2}f} samples/s" if speed > 0 else ""
        log.info("epoch %d%s  %s  (%.1f s%s)", self._epoch + 1, of, values, seconds, rate)
        self._epoch, self._spoken = None, time.monotonic()

    # ---- end

    def on_train_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self._stop_bar()
        self._end_epoch(trainer)
        for callback in trainer.callbacks:
            if isinstance(callback, EarlyStopping) and callback.stopped_epoch:
                log.info(
                    "stopped    early, after epoch %d: %s was no better than %.4f for %s",
                    *(callback.stopped_epoch + 1, callback.monitor, callback.best_score),
                    count(callback.patience, "validation"),
                )
        best = self.checkpoints.best
        if best:
            where = f"after epoch {best['epoch'] + 1} (step {best['step']})"
            log.info("best       %s %.4f %s", best["metric"], best["value"], where)
        log.info("duration   %s", _duration(time.monotonic() - self._started))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._started:  # Lightning does not even begin
            log.info(
                "done       already: %s, %s",
                *(count(trainer.current_epoch, "epoch"), count(trainer.global_step, "step")),
            )

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._say_results(trainer, "test_")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated_at = time.monotonic()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validating += time.monotonic() - self._validated_at
        if trainer.state.fn == "validate":
            self._say_results(trainer, "val_")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop_bar()

    def _say_results(self, trainer: pl.Trainer, prefix: str) -> None:
        found = {n: float(v) for n, v in sorted(trainer.callback_metrics.items()) if n.startswith(prefix)}
        log.info("results    %s", "  ".join(f"{name} {value:.4f}" for name, value in found.items()))

    def _stop_bar(self) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None


def _size(loaders: Any) -> int:
    """Samples behind a loader or several."""
    several = loaders if isinstance(loaders, list | tuple) else [loaders]
    return sum(len(loader.dataset) for loader in several if hasattr(getattr(loader, "dataset", None), "__len__"))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)} min {rest:.0f} s" if minutes else f"{rest:.1f} s"
