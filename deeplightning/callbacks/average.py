"""Exponential moving average of the weights, up to date at each validation. Lightning's WeightAveraging (2.6) updates
it after the validation of an epoch, and validates the initial weights until then.

Enabled by `EMA` in `train.callbacks`. Validation uses the averages, and every checkpoint has them as its
`state_dict`, so that `best.ckpt`, `test`, `predict`, `export` and the server use them too. The training weights are
stored in the checkpoint under `averaging`, and training resumes from them.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from deeplightning.callbacks.steps import SameBuffers
from deeplightning.engine.checkpoint_reading import described, raise_for_differences
from deeplightning.faults import CheckpointError

log = logging.getLogger("deeplightning")

KEY = "averaging"
"""Checkpoint key of {"settings", "steps", "updates", "weights"}; `weights` are the training weights, {} before the
first average."""


class EMA(Callback):
    """Exponential moving average of the weights: `decay · average + (1 - decay) · weights` after each step.

    It starts from the weights after the first step, is swapped with the weights during each validation, and is saved
    with them in checkpoints. All parameters and buffers of the task's `state_dict` are averaged; of those that are not
    floating point or contain infinities, such as counters and masks, the latest values are used.

    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.

    Args:
        decay: from 0 to below 1; the average covers about the last 1 / (1 - decay) updates.
        every_n_steps: optimizer steps between two updates, at least 1.

    Attributes:
        updates: the number of updates so far.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay: must be from 0 to below 1, not {decay}")
        if not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(f"every_n_steps: must be a whole number, at least 1, not {every_n_steps}")
        self.settings: dict[str, Any] = {"decay": decay, "every_n_steps": every_n_steps}
        self.updates = 0
        self._update_averages: Any = get_ema_multi_avg_fn(decay)
        self._steps = 0  # batches that ended with an optimizer step
        self._global_step = -1  # at the last of these batches
        self._task_weights: dict[str, Tensor] = {}  # the task's tensors
        self._averaged: list[str] = []  # names of those that have an average; a mask with infinities has none
        self._shadow: dict[str, Tensor] = {}  # the averages, or the training weights while swapped
        self._is_swapped = False  # whether the task contains the averages
        self._saved_settings: dict[str, object] | None = None  # from the checkpoint

    # ---- training hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._task_weights, self._averaged = _weights(pl_module), []
        if self._is_swapped:  # left swapped by an earlier training
            self._swap()
        if self._saved_settings not in (None, self.settings):
            log.warning(
                "This run will not end bit for bit like an uninterrupted one: EMA was %s and is %s",
                *(_format_settings(self._saved_settings or {}), _format_settings(self.settings)),
            )
        self._shadow = {name: values.to(self._task_weights[name].device) for name, values in self._shadow.items()}
        self._global_step = trainer.global_step
        log.info("%-10s %s: validation, checkpoints, test and export use the averaged weights", "averaging", self.label)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._steps += 1
        if self._steps % self.settings["every_n_steps"] == 0:
            self._update()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and self._shadow and not self._is_swapped:
            self._swap()
            SameBuffers().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and self._is_swapped:
            self._swap()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._shadow:
            self._swap()
        elif trainer.is_global_zero:
            log.warning("%s: training ended before the first average; the weights are kept as they are", self.label)

    # ---- weights and checkpoints

    @torch.no_grad()
    def _update(self) -> None:
        own = self._task_weights
        if not self._averaged:  # not earlier: lazy layers have no values before the first batch
            self._averaged = [n for n, w in own.items() if w.is_floating_point() and bool(w.isfinite().all())]
        if not self.updates:
            self._shadow = {name: weights.detach().clone() for name, weights in own.items()}
        else:
            names = self._averaged
            self._update_averages([self._shadow[n] for n in names], [own[n].detach() for n in names], self.updates)
            for name in own.keys() - set(names):
                self._shadow[name].copy_(own[name])
        self.updates += 1

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap averages and weights in place: compiled networks and CUDA graphs refer to their addresses."""
        for name, weights in self._task_weights.items():
            former = weights.detach().clone()
            weights.copy_(self._shadow[name])
            self._shadow[name].copy_(former)
        self._is_swapped = not self._is_swapped

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        own = {name: weights.detach() for name, weights in _weights(pl_module).items()}
        averages, learning = (own, self._shadow) if self._is_swapped else (self._shadow, own)
        checkpoint[KEY] = {
            "settings": self.settings,
            "steps": self._steps,
            "updates": self.updates,
            "weights": learning if self._shadow else {},
        }
        if self._shadow:
            names = {id(weights): name for name, weights in _weights(pl_module).items()}
            every = pl_module.state_dict(keep_vars=True)
            of = {name: averages[names[id(value)]] for name, value in every.items() if id(value) in names}
            checkpoint["state_dict"] = {**checkpoint["state_dict"], **of}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the training weights: Lightning has loaded the averages into the task.

        Raises:
            CheckpointError: the checkpoint's averaging state is damaged.
        """
        if trainer.state.fn != "fit":
            return
        if (saved := _read_saved(checkpoint, trainer.ckpt_path)) is None:
            log.info("%-10s the checkpoint has no averages; averaging starts here", "averaging")
            return
        own = _weights(pl_module)
        if saved["weights"]:
            raise_for_differences(own, saved["weights"], str(trainer.ckpt_path))
            with torch.no_grad():
                for name, weights in own.items():
                    weights.copy_(saved["weights"][name])
        self._steps, self.updates, self._saved_settings = saved["steps"], saved["updates"], saved["settings"]
        self._shadow = {name: checkpoint["state_dict"][name].clone() for name in saved["weights"]}

    @property
    def label(self) -> str:
        """The kind of average and its settings, in one line."""
        return f"EMA ({_format_settings(self.settings)})"


def describe_averaging(checkpoint: Mapping[str, object]) -> str | None:
    """Return how the weights of a checkpoint were averaged, in one line, or None if they were not."""
    if (saved := _read_saved(checkpoint, None)) is None or not saved["updates"]:
        return None
    return f"averaged by EMA ({_format_settings(saved['settings'])}), {saved['updates']} updates"


def require_averaging_callback(callbacks: list[object], checkpoint: Mapping[str, object], path: object) -> None:
    """Refuse to resume if only the averages would be restored.

    Raises:
        CheckpointError: a checkpoint contains averages, and the run has no callback that restores the training weights.
    """
    if _read_saved(checkpoint, path) is None or any(isinstance(callback, EMA) for callback in callbacks):
        return
    raise CheckpointError(
        f"{path}: its weights are averages of EMA; keep the callback in train.callbacks, or start a new run "
        f"from the averages: model.init_from='{path}'"
    )


def _read_saved(checkpoint: Mapping[str, Any], path: object) -> dict[str, Any] | None:
    if (saved := checkpoint.get(KEY)) is None:
        return None
    for name, wanted in {"settings": dict, "steps": int, "updates": int, "weights": dict}.items():
        value = saved.get(name) if isinstance(saved, dict) else None
        if not isinstance(value, wanted):
            raise CheckpointError(
                f"{path or 'the checkpoint'}: damaged: `{KEY}.{name}` is {described(value)}; take another checkpoint"
            )
    return dict(saved)


def _weights(module: LightningModule) -> dict[str, Tensor]:
    """Return the parameters and buffers of the task's `state_dict`, shared ones only under their first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def _format_settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
