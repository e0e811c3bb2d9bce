"""Save in checkpoints what Lightning 2.6 drops when it resumes inside an epoch: the metrics of the epoch so far, and
gradients that no step has used."""

import logging
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric, MetricCollection

from deeplightning.private.lightning import add_to_logged_means, logged_means, validated_batches

log = logging.getLogger("deeplightning")

GRADIENTS = "gradients"
"""Checkpoint key of the gradients that no optimizer step has used yet, by parameter name."""


class Gathered(Callback):
    """Save metric states: in each checkpoint the number of validation batches, at which Lightning logs
    `self.log(on_step=True)`; inside an epoch also the states of the task's torchmetrics objects over all processes, and
    the running means of `self.log(on_epoch=True)`.

    States that a validation updates are left out: a resumed run repeats an interrupted validation.
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._counts: dict[str, int] = {}  # updates of each metric at the start of the current validation
        self._validation_metrics: set[str] = set()  # metrics that a validation updates
        self._saved: dict[str, Any] = {}
        self._restored: set[str] = set()  # metrics with states of the checkpoint, which torchmetrics has not counted
        self._restored_means: dict[str, Any] = {}  # from the checkpoint, until the task logs them again
        self._validated: dict[int, int] = {}  # validation batches by loader, before the next validation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._counts = {name: metric.update_count for name, metric in _metrics(pl_module).items()}
        if trainer.state.fn == "fit":
            validated_batches(trainer).update(self._validated)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, metric in _metrics(pl_module).items():
            if self._counts.get(name, metric.update_count) != metric.update_count:
                self._validation_metrics.add(name)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._counts = {}
        self._validated = dict(validated_batches(trainer))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return {"validated": batches by loader, "metrics": states by module name, "logged": values of `self.log`};
        between epochs only the first."""
        epoch: Any = self._trainer and self._trainer.fit_loop.epoch_progress.current
        if self._trainer is None or epoch.processed == epoch.ready:
            return {"validated": self._validated}
        metrics = _metrics(self._trainer.lightning_module)
        begun = {n: m for n, m in metrics.items() if m.update_called or n in self._restored}
        found = {n: m for n, m in begun.items() if n not in self._validation_metrics}
        own = {n for n, m in found.items() if self._counts.get(n, m.update_count) == m.update_count}
        decide = self._trainer.strategy.reduce_boolean_decision  # all processes gather a state, or none does
        lists = {n: any(isinstance(v, list) for v in m.metric_state.values()) for n, m in metrics.items()}
        found = {n: m for n, m in metrics.items() if decide(n in own, all=lists[n])}  # an empty list cannot be gathered
        logged = self._restored_means | logged_means(self._trainer)  # the run may end before the task logs again
        states = {name: _state_of(metric) for name, metric in found.items()}
        return {"validated": self._validated, "metrics": states, "logged": logged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict if self._trainer is not None and self._trainer.state.fn == "fit" else {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved, self._saved = self._saved, {}
        self._validated = dict(saved.get("validated", {}))
        states = saved.get("metrics", {})
        self._restored = {*states}
        for name, metric in _metrics(pl_module).items():
            _restore(metric, states.get(name, {}), trainer.is_global_zero)
        self._restored_means = dict(saved.get("logged", {})) if trainer.is_global_zero else {}

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if self._restored_means:
            add_to_logged_means(trainer, self._restored_means)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restored, self._restored_means = set(), {}


class PendingGradients(Callback):
    """Save the gradients that no optimizer step has used yet, for a task with manual optimization.

    If an optimizer steps at every second batch, a run that resumes in between would lose the first batch's gradients.
    Engines that shard parameters do not save them; the run then logs a warning.
    """

    def __init__(self) -> None:
        self._pending: set[torch.Tensor] = set()
        self._tracked: set[torch.Tensor] = set()
        self._hooks: list[RemovableHandle] = []
        self._saved: dict[str, torch.Tensor] = {}
        self._has_warned = False

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(GRADIENTS, {}) if trainer.state.fn == "fit" else {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved, self._saved = self._saved, {}
        for name, parameter in pl_module.named_parameters():
            if name in saved:
                parameter.grad = saved[name].to(parameter)
                self._pending.add(parameter)
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Track which trainable parameters receive a gradient; some become trainable after an epoch."""
        if pl_module.automatic_optimization:
            return
        for parameter in pl_module.parameters():
            if parameter.requires_grad and parameter not in self._tracked:
                self._tracked.add(parameter)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._pending.add))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._pending:
            self._pending.difference_update(*(group["params"] for group in optimizer.param_groups))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._pending:
            return
        named = {name: p.grad for name, p in pl_module.named_parameters() if p in self._pending and p.grad is not None}
        if not hasattr(trainer.strategy, "shares_parameters"):
            checkpoint[GRADIENTS] = named
        elif named and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the gradients of %s are not used yet, and the strategy %s does not save gradients: a run that "
                "resumes from here lacks them; step each optimizer in the batch of its gradients, or use ddp",
                *(next(iter(named)), type(trainer.strategy).__name__),
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._tracked, self._pending = [], set(), set()


def _metrics(task: LightningModule) -> dict[str, Metric]:
    """Return the torchmetrics objects of a task by name."""
    modules = dict(task.named_modules())
    for module in modules.values():
        if isinstance(module, MetricCollection):
            module.items()  # side effect: copies shared states to each metric
    return {name: module for name, module in modules.items() if isinstance(module, Metric)}


def _state_of(metric: Metric) -> dict[str, object]:
    """Return the state of a metric over all processes, or {} if it cannot be continued; call it on every rank."""
    own: dict[str, Any] = metric.metric_state
    with metric.sync_context(should_sync=torch.distributed.is_available() and torch.distributed.is_initialized()):
        found: dict[str, Any] = {n: [*v] if isinstance(v, list) else v.clone() for n, v in metric.metric_state.items()}
    # States without a reduction, such as Pearson's, are now stacked by process, which no process can continue.
    return {} if any(isinstance(v, torch.Tensor) and found[n].ndim > v.ndim for n, v in own.items()) else found


def _restore(metric: Metric, state: dict[str, Any], is_first: bool) -> None:
    """Restore the state of all processes on the first; lists of the others get no rows, but the form to be gathered."""
    for name, now in metric.metric_state.items():
        if name in state and (is_first or isinstance(now, list)):
            saved = state[name] if isinstance(state[name], list) else [state[name]]
            saved = [(value if is_first else torch.atleast_1d(value)[:0]).to(metric.device) for value in saved]
            setattr(metric, name, saved if isinstance(now, list) else saved[0])
