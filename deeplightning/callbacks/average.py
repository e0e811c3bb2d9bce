"""Average weights before the validation that judges them: Lightning's WeightAveraging (2.6) averages the ends of epochs
after their validation, and validates the initial weights until its first average.

`train.callbacks` names `EMA`. Validation uses the averages, and every checkpoint holds them as its
`state_dict`, so that `best.ckpt`, `test`, `predict`, `export` and the server use them too. The weights that learn are
beside them in the checkpoint, under `averaging`, and training resumes from those.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from deeplightning.callbacks.steps import SameBuffers
from deeplightning.engine.checkpoint_reading import described, raise_for_misfits
from deeplightning.faults import CheckpointError

log = logging.getLogger("deeplightning")

KEY = "averaging"
"""Of a checkpoint: {"settings", "steps", "updates", "weights"}; `weights` are those that learn, {} before the
first average."""


class EMA(Callback):
    """The exponential moving average of the weights: after each step `decay · average + (1 - decay) · weights`. It
    begins with the weights after the first step, changes places with the weights for each validation, and is saved
    with them in checkpoints.

    All parameters and buffers of the task's `state_dict` are averaged; of those that are no floating-point numbers,
    such as the counters of batch norm, the newest values are kept.

    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.

    Args:
        decay: from 0 to below 1; the average is of about the last 1 / (1 - decay) averaged weights.
        every_n_steps: optimizer steps from one averaged weight to the next, at least 1.

    Attributes:
        updates: how many weights the averages are of.

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
        self._average: Any = get_ema_multi_avg_fn(decay)
        self._steps = 0  # batches after which optimizers had stepped
        self._global_step = -1  # of the last of these
        self._own: dict[str, Tensor] = {}  # of the task that learns
        self._held: dict[str, Tensor] = {}  # the averages; the weights that learn, while averages are in the task
        self._shown = False  # averages are in the task
        self._saved_settings: dict[str, object] | None = None  # of the checkpoint

    # ---- when

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._own = _weights(pl_module)
        if self._shown:  # of a training before this one
            self._swap()
        if self._saved_settings not in (None, self.settings):
            log.warning(
                "This run will not end bit for bit like an uninterrupted one: EMA was %s and is %s",
                *(_line(self._saved_settings or {}), _line(self.settings)),
            )
        self._held = {name: values.to(self._own[name].device) for name, values in self._held.items()}
        self._global_step = trainer.global_step
        log.info("%-10s %s: validation, checkpoints, test and export use the averaged weights", "averaging", self.words)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._steps += 1
        if self._steps % self.settings["every_n_steps"] == 0:
            self._update()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and self._held and not self._shown:
            self._swap()
            SameBuffers().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and self._shown:
            self._swap()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._held:
            self._swap()
        elif trainer.is_global_zero:
            log.warning("%s: training ended before the first average; the weights are kept as they are", self.words)

    # ---- what

    @torch.no_grad()
    def _update(self) -> None:
        own = self._own
        if not self.updates:
            self._held = {name: weights.detach().clone() for name, weights in own.items()}
        else:
            numbers = [name for name, weights in own.items() if weights.is_floating_point()]
            self._average([self._held[n] for n in numbers], [own[n].detach() for n in numbers], self.updates)
            for name in own.keys() - set(numbers):
                self._held[name].copy_(own[name])
        self.updates += 1

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange averages and weights in place: compiled and recorded networks hold their addresses."""
        for name, weights in self._own.items():
            former = weights.detach().clone()
            weights.copy_(self._held[name])
            self._held[name].copy_(former)
        self._shown = not self._shown

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        own = {name: weights.detach() for name, weights in _weights(pl_module).items()}
        averages, learning = (own, self._held) if self._shown else (self._held, own)
        checkpoint[KEY] = {
            "settings": self.settings,
            "steps": self._steps,
            "updates": self.updates,
            "weights": learning if self._held else {},
        }
        if self._held:
            names = {id(weights): name for name, weights in _weights(pl_module).items()}
            every = pl_module.state_dict(keep_vars=True)
            of = {name: averages[names[id(value)]] for name, value in every.items() if id(value) in names}
            checkpoint["state_dict"] = {**checkpoint["state_dict"], **of}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the weights that learn: Lightning has loaded the averages into the task.

        Raises:
            CheckpointError: what the checkpoint has of averages is damaged.
        """
        if trainer.state.fn != "fit":
            return
        if (saved := _saved(checkpoint, trainer.ckpt_path)) is None:
            log.info("%-10s the checkpoint holds no averages; they begin here", "averaging")
            return
        own = _weights(pl_module)
        if saved["weights"]:
            raise_for_misfits(own, saved["weights"], str(trainer.ckpt_path))
            with torch.no_grad():
                for name, weights in own.items():
                    weights.copy_(saved["weights"][name])
        self._steps, self.updates, self._saved_settings = saved["steps"], saved["updates"], saved["settings"]
        self._held = {name: checkpoint["state_dict"][name].clone() for name in saved["weights"]}

    @property
    def words(self) -> str:
        """Return the average with its settings, in one line."""
        return f"EMA ({_line(self.settings)})"


def averaged(checkpoint: Mapping[str, object]) -> str | None:
    """Return how the weights of a checkpoint were averaged, in one line; None: they were not."""
    saved = _saved(checkpoint, None)
    if saved is None or not saved["updates"]:
        return None
    return f"averaged by EMA ({_line(saved['settings'])}), {saved['updates']} updates"


def refuse_without(callbacks: list[object], checkpoint: Mapping[str, object], path: object) -> None:
    """Refuse to resume from averages alone.

    Raises:
        CheckpointError: a checkpoint holds averages, and no callback of the run would restore the weights that learn.
    """
    saved = _saved(checkpoint, path)
    if saved is None or any(isinstance(callback, EMA) for callback in callbacks):
        return
    raise CheckpointError(
        f"{path}: its weights are averages of EMA; keep the callback in train.callbacks, or start again "
        f"from the averages: model.init_from='{path}'"
    )


def _saved(checkpoint: Mapping[str, Any], path: object) -> dict[str, Any] | None:
    if (saved := checkpoint.get(KEY)) is None:
        return None
    types = {"settings": dict, "steps": int, "updates": int, "weights": dict}
    for name, wanted in types.items():
        value = saved.get(name) if isinstance(saved, dict) else None
        if not isinstance(value, wanted):
            raise CheckpointError(
                f"{path or 'the checkpoint'}: damaged: `{KEY}.{name}` is {described(value)}; take another checkpoint"
            )
    return dict(saved)


def _weights(module: LightningModule) -> dict[str, Tensor]:
    """Return parameters and buffers of the task's state, each once, under their first names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def _line(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
