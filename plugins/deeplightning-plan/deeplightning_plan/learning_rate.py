"""`deeplightning lr CONFIG`: the learning rate grows from step to step, and the loss shows which rates train.

Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, https://arxiv.org/abs/1506.01186.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytorch_lightning as pl

from deeplightning.batches import batch_loss
from deeplightning.callbacks.describe import effective_batch
from deeplightning.config.examine import load_config
from deeplightning.config.schema import Scheduler
from deeplightning.faults import ConfigError, Fault, RunError, SetupError, count
from deeplightning_plan.short_training import ONE_PROCESS, one_gpu, train_until_stopped

MEAN_DECAY = 0.9  # decay of the running mean of the losses, which is bias-corrected as in Adam
DIVERGED_FACTOR = 4  # the test ends when the running mean is this many times its minimum
WIDTH_STEPS = 2.0  # std of the window that smooths the curve; a mean of the past alone would propose too high a rate
MARGIN = 10  # the proposal is at most the rate with the smallest loss divided by this: beyond it training diverges
MIN_STEPS = 10  # for a proposal


@dataclass(frozen=True)
class Curve:
    """Rates in growing order, each with the loss of its step; floats, (N,)."""

    rates: np.ndarray
    losses: np.ndarray

    @functools.cached_property
    def smoothed(self) -> np.ndarray:
        """Return the losses, (N,), smoothed by a Gaussian; each is capped at twice the first."""
        steps = np.arange(len(self.losses))
        bounded = np.minimum(self.losses, self.losses[0] + abs(self.losses[0]))
        window = np.exp(-((steps[:, None] - steps) ** 2) / (2 * WIDTH_STEPS**2))
        return window @ bounded / window.sum(1)

    @property
    def at_minimum(self) -> float:
        """Return the rate at which the smoothed loss is smallest."""
        return float(self.rates[int(self.smoothed.argmin())])

    @property
    def proposed(self) -> float | None:
        """Return the rate at which the smoothed loss falls fastest per factor of the rate, up to the margin before its
        minimum; None if there are too few steps, or the loss falls no more than the first losses vary."""
        if len(self.rates) <= MIN_STEPS:
            return None
        end, noise = int(self.smoothed.argmin()), float(self.losses[:MIN_STEPS].std())
        before = int((self.rates <= self.at_minimum / MARGIN).sum())
        if before == 0 or self.smoothed[0] - self.smoothed[end] <= 2 * noise:
            return None
        return float(self.rates[int(np.gradient(self.smoothed, np.log(self.rates))[:before].argmin())])


class _RateRamp(pl.Callback):
    """Set the rate of each optimizer step, and record its loss; groups keep their ratios to `params.lr`."""

    def __init__(self, low: float, high: float, steps: int):
        self.planned_rates = [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._means: list[float] = []
        self._parts: list[float] = []  # losses of accumulated batches
        self._ratios: list[float] = []
        self._mean = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        groups, defaults = trainer.optimizers[0].param_groups, trainer.optimizers[0].defaults
        if any(group.get("lr") is None for group in groups):
            raise ConfigError(Fault("this optimizer has no learning rate to search", "model.optimizer"))
        of_params = float(defaults.get("lr", groups[0]["lr"])) or 1.0
        self._ratios = [float(group["lr"]) / of_params or 1.0 for group in groups]

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        for group, ratio in zip(trainer.optimizers[0].param_groups, self._ratios, strict=True):
            group["lr"] = self.planned_rates[len(self.rates)] * ratio

    def on_train_batch_end(self, trainer: pl.Trainer, module: object, outputs: object, *_: object) -> None:
        self._parts.append(float(batch_loss(trainer, outputs)))
        if trainer.global_step == len(self.rates):
            return  # accumulating
        loss = sum(self._parts) / len(self._parts)
        self._parts.clear()
        if math.isfinite(loss):
            self._mean = MEAN_DECAY * self._mean + (1 - MEAN_DECAY) * loss
            self._means.append(self._mean / (1 - MEAN_DECAY ** (len(self._means) + 1)))
            self.rates.append(self.planned_rates[len(self.rates)])
            self.losses.append(loss)
        low = min(self._means, default=0.0)  # it may be negative
        enough = len(self.rates) > MIN_STEPS and self._means[-1] - low > (DIVERGED_FACTOR - 1) * abs(low)
        trainer.should_stop = not math.isfinite(loss) or enough or len(self.rates) == len(self.planned_rates)


def range_test(config: Path, overrides: Sequence[str], low: float, high: float, steps: int, out: Path) -> list[str]:
    """Test rates from `low` to `high`, and write `NAME.lr.csv` and `NAME.lr.png` into `out`.

    Returns:
        Output lines; the last is the override with the proposed rate.

    Raises:
        ConfigError: the config is invalid, or has no optimizer or several.
        RunError: the loss does not fall, or the first one is not finite.
        SetupError: the files cannot be written.
    """
    requested = load_config(config, list(overrides))
    if requested.model.optimizer is None or isinstance(requested.model.optimizer, dict):
        why = "there are several" if requested.model.optimizer else "the task has its own"
        raise ConfigError(Fault(f"the range test changes the rate of one optimizer, and {why}", "model.optimizer"))
    cfg = load_config(config, [*overrides, *ONE_PROCESS, *one_gpu(requested)])

    ramp = _RateRamp(low, high, steps)
    train_until_stopped(cfg, ramp)
    if not ramp.losses:
        raise RunError("the first loss is not finite, whatever the rate; check the data and the loss")
    curve = Curve(np.array(ramp.rates, dtype=float), np.array(ramp.losses, dtype=float))
    table, picture = (out / f"{config.stem}.lr.{ending}" for ending in ("csv", "png"))
    proposed = curve.proposed
    try:
        out.mkdir(parents=True, exist_ok=True)
        columns = np.column_stack([curve.rates, curve.losses, curve.smoothed])
        np.savetxt(table, columns, "%.17g", ",", header="lr,loss,smoothed_loss", comments="")
        _draw(curve, proposed, picture)
    except OSError as error:
        raise SetupError(f"{out}: the curve cannot be written: {error.strerror or error}") from error
    taken = f"{count(len(curve.rates), 'step')}; {effective_batch(cfg)}"
    lines = [f"tested     rates from {low:g} to {curve.rates[-1]:g}, in {taken}", f"curve      {picture}, {table}"]
    if proposed is None:
        raise RunError(
            f"the loss does not fall between the rates {low:g} and {high:g} ({picture}); widen them with --from and "
            "--to, or check with train.overfit whether the network can learn at all"
        )
    lines += [f"proposed   {proposed:.2g}, where the loss falls fastest; it is smallest at {curve.at_minimum:.2g}"]
    keys, schedule = ["model.optimizer.params.lr"], requested.model.scheduler
    if isinstance(schedule, Scheduler) and isinstance(schedule.params.get("max_lr"), int | float):
        keys.append("model.scheduler.params.max_lr")
    return [*lines, " ".join(f"{key}={proposed:.2g}" for key in keys)]


def _draw(curve: Curve, proposed: float | None, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(curve.rates, curve.losses, color="0.75", linewidth=1, label="loss")
    axes.plot(curve.rates, curve.smoothed, color="tab:blue", label="smoothed loss")
    if proposed is not None:
        axes.axvline(proposed, color="tab:red", linestyle="--", label=f"proposed: {proposed:.2g}")
    if len(curve.rates):
        top = max(float(curve.smoothed[0]), float(np.median(curve.smoothed)))
        axes.set_ylim(min(0.0, float(curve.smoothed.min()) * 1.1), top + 0.5 * abs(top))
    axes.set(xscale="log", xlabel="learning rate", ylabel="training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
