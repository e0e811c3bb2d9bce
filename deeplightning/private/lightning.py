"""Private names of Lightning 2.6."""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.profilers import Profiler

INHERITED = {
    # They set up the model that DDP wraps. Where a name has moved, `Ddp` fails when a stage begins.
    "pytorch_lightning.strategies.DDPStrategy": ("_ddp_kwargs", "_setup_model"),
    # Lightning chooses the size in its constructor, before the number of processes is known. Where it has moved, FSDP
    # shards nothing and trains as before.
    "pytorch_lightning.strategies.ModelParallelStrategy": ("_data_parallel_size",),
    # Lightning refuses the CPU and adds warnings in the public methods around these. Where one has moved, `DeepSpeed`
    # fails when a stage begins.
    "pytorch_lightning.strategies.DeepSpeedStrategy": (
        "_format_batch_size_and_grad_accum_config",
        "_init_config_if_needed",
        "_init_deepspeed_distributed",
        "_init_optimizers",
        "_initialize_deepspeed_inference",
        "_initialize_deepspeed_train",
    ),
    # It starts this command once per process. Where it has moved, a run of several processes fails at its start.
    "pytorch_lightning.strategies.launchers.subprocess_script._SubprocessScriptLauncher": ("_call_children_scripts",),
}


def forget_train_loader(trainer: "pl.Trainer") -> None:
    """Has Lightning make the training loader again. Where the name has moved, a run that resumes with a schedule of
    `auto` length repeats the first batches of its epoch, without an error."""
    trainer.fit_loop._combined_loader = None


def restart_validation(trainer: "pl.Trainer") -> None:
    """Has a resumed run repeat the validation that was interrupted. Where the name has moved, the run leaves that
    validation out, without an error."""
    validation = trainer.fit_loop.epoch_loop.val_loop
    validation._restart_stage = "restarted_mid_evaluation"
    validation.batch_progress.reset()


def logged_steps(trainer: "pl.Trainer") -> int:
    """The step that Lightning gives the next logged values of a training."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def add_logged_steps(trainer: "pl.Trainer", number: int) -> None:
    """Moves that step on. Where the name has moved, `logged_steps` fails first."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += number


def values_to_log(trainer: "pl.Trainer", now: bool) -> dict[str, Any] | None:
    """What Lightning is about to log in a training; None if it is not due.

    Args:
        now: whether it is due whatever the number of the step says.
    """
    connector = trainer._logger_connector
    return connector.metrics["log"] if now or connector.should_update_logs else None


def logged_means(trainer: "pl.Trainer") -> dict[str, dict[str, Any]]:
    """What Lightning has added up of `self.log(on_epoch=True)` since the epoch began, by its own keys; of values that
    are the same on all processes by `sync_dist` over these. Where the name has moved, it fails when a checkpoint is
    saved inside an epoch."""
    found: dict[str, dict[str, Any]] = {}
    for key, result in sorted(trainer.fit_loop.epoch_loop._results.items()):
        if result.is_tensor and result.meta.on_epoch and not result.has_reset and not result.meta.is_custom_reduction:
            adds = trainer.world_size > 1 and result.meta.sync.should
            how = "max" if result.meta.is_max_reduction else "min" if result.meta.is_min_reduction else "sum"
            found[key] = {
                name: trainer.strategy.reduce(value.clone(), reduce_op=how) if adds else value.clone()
                for name, value in result.metric_state.items()
            }
    return found


def add_to_logged_means(trainer: "pl.Trainer", saved: dict[str, dict[str, Any]]) -> None:
    """Adds what `logged_means` has found to what has been logged since; what is added leaves `saved`."""
    results = trainer.fit_loop.epoch_loop._results
    for key in [key for key in saved if key in results and not results[key].has_reset]:
        result, before = results[key], saved.pop(key)
        for name, value in before.items():
            now, value = getattr(result, name), value.to(result.device)
            extreme = result.meta.is_max_reduction or result.meta.is_min_reduction
            setattr(result, name, result.meta.reduce_fx(value, now) if extreme else value + now)


def keep_signals(trainer: Any) -> None:
    """Keeps Lightning from replacing our signal handlers when a stage begins. Where the name has moved, it fails when
    a stage is set up; where only the method has, SIGTERM leaves no checkpoint, without an error."""
    trainer._signal_connector.register_signal_handlers = lambda: None


def set_launcher(strategy: Any, launcher: object) -> None:
    """Replaces what starts the processes of a strategy, which the trainer's constructor has chosen. Where the name has
    moved, Lightning's own observer ends a run of several processes before it can say why."""
    strategy._launcher = launcher


def subprocess_launcher() -> object:
    """The class that starts the same command once more per process."""
    from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    return _SubprocessScriptLauncher


def share_threads(num_processes: int) -> None:
    """Gives each process of a machine its share of the cores, unless OMP_NUM_THREADS says otherwise."""
    from lightning_fabric.utilities.distributed import _set_num_threads_if_needed

    _set_num_threads_if_needed(num_processes=num_processes)


def resume_run(logger: Any, run_id: str) -> None:
    """Has Lightning's MLFlowLogger continue a run, before its first use: its constructor takes the id too early. Where
    the name has moved, a resumed run begins a new MLflow run, without an error."""
    logger._run_id = run_id


def has_run(logger: object) -> bool:
    """Whether Lightning's MLFlowLogger has begun a run: to ask for its id would begin one. Where the name has moved, a
    run that fails at once leaves an empty MLflow run, without an error."""
    return bool(getattr(logger, "_initialized", True))


@cache
def shorten_steps(quiet: "type[Profiler]") -> None:
    """Leaves out of Lightning's loop what gives the same at each step, in this process: names for profilers where none
    is at work, a division of the loss by one, the comparison of stages by their words, and what does not change between
    batches: where the hooks for batches are, and what the training step takes. What it computes stays the same to the
    bit.

    Each name is replaced where it is found. Where one has moved, Lightning's own is called, and a step takes longer.

    Args:
        quiet: the class of a profiler that profiles nothing. Trainers with another one call as before.
    """
    from pytorch_lightning.loops import training_epoch_loop
    from pytorch_lightning.loops.optimization import automatic
    from pytorch_lightning.trainer import call, states
    from pytorch_lightning.trainer.connectors import data_connector

    for owner, name, shorter in (
        (call, "_call_callback_hooks", lambda longer: _callback_hooks(longer, quiet)),
        (call, "_call_lightning_module_hook", lambda longer: _task_hook(longer, quiet)),
        (call, "_call_strategy_hook", lambda longer: _strategy_hook(longer, quiet)),
        (getattr(automatic, "ClosureResult", None), "from_training_step_output", _loss_of_step),
        (
            *(getattr(automatic, "_AutomaticOptimization", None), "_optimizer_zero_grad"),
            lambda longer: _no_gradients(longer, quiet),
        ),
        (states.RunningStage, "__eq__", _same_stage),
        (getattr(data_connector, "_DataHookSelector", None), "get_instance", _source_of_hook),
        (getattr(training_epoch_loop, "_TrainingEpochLoop", None), "_build_kwargs", _arguments_of_step),
    ):
        if (longer := getattr(owner, name, None)) is not None:
            setattr(owner, name, shorter(longer))


def _is_quiet(trainer: Any, task: Any, quiet: type) -> bool:
    return type(trainer.profiler) is quiet and task is not None and "_current_fx_name" in task.__dict__


def _callback_hooks(longer: Any, quiet: type) -> Any:
    def call(trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any) -> None:
        task = trainer.lightning_module
        if not _is_quiet(trainer, task, quiet) or monitoring_callbacks is not None:
            longer(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
            return
        own = task.__dict__  # past torch's `__setattr__`, which looks for parameters
        before, own["_current_fx_name"] = own["_current_fx_name"], hook_name
        for callback in trainer.callbacks:
            hook = getattr(callback, hook_name)
            if callable(hook):
                hook(trainer, task, *args, **kwargs)
        own["_current_fx_name"] = before

    return call


def _task_hook(longer: Any, quiet: type) -> Any:
    def call(trainer: Any, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
        task = pl_module or trainer.lightning_module
        if not _is_quiet(trainer, task, quiet):
            return longer(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
        return _called(task, getattr(task, hook_name), hook_name, args, kwargs)

    return call


def _strategy_hook(longer: Any, quiet: type) -> Any:
    def call(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        strategy = trainer.strategy
        task = strategy.lightning_module
        if not _is_quiet(trainer, task, quiet):
            return longer(trainer, hook_name, *args, **kwargs)
        return _called(task, getattr(strategy, hook_name), hook_name, args, kwargs)

    return call


def _called(task: Any, hook: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not callable(hook):
        return None
    own = task.__dict__
    before, own["_current_fx_name"] = own["_current_fx_name"], name
    output = hook(*args, **kwargs)
    own["_current_fx_name"] = before
    return output


def _loss_of_step(longer: Any) -> Any:
    from torch import Tensor

    def result(cls: Any, training_step_output: Any, normalize: int = 1) -> Any:
        if normalize == 1 and isinstance(training_step_output, Tensor):
            return cls(training_step_output)
        if normalize == 1 and type(training_step_output) is dict and training_step_output.get("loss") is not None:
            extra = {name: value for name, value in training_step_output.items() if name != "loss"}
            return cls(training_step_output["loss"], extra=extra)
        return longer(training_step_output, normalize)

    return classmethod(result)


def _no_gradients(longer: Any, quiet: type) -> Any:
    from pytorch_lightning import LightningModule
    from torch.optim import Optimizer

    hook, own = LightningModule.optimizer_zero_grad, Optimizer.zero_grad

    def forget(self: Any, batch_idx: int, optimizer: Any) -> None:
        trainer = self.trainer
        task = trainer.lightning_module
        is_plain = type(task).optimizer_zero_grad is hook and type(optimizer).zero_grad is own
        if not is_plain or not _is_quiet(trainer, task, quiet):
            longer(self, batch_idx, optimizer)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return forget


def _same_stage(longer: Any) -> Any:
    def equal(self: Any, other: object) -> Any:
        return self is other if type(self) is type(other) else longer(self, other)

    return equal


def _source_of_hook(longer: Any) -> Any:
    def instance(self: Any, hook_name: str) -> Any:
        found = self.__dict__.setdefault("_found", {})
        task, data, known = found.get(hook_name, (None, None, None))
        if known is None or task is not self.model or data is not self.datamodule:
            known = longer(self, hook_name)
            found[hook_name] = (self.model, self.datamodule, known)
        return known

    return instance


def _arguments_of_step(longer: Any) -> Any:
    takes_index: dict[object, bool] = {}  # by the function of a training step

    def arguments(self: Any, kwargs: dict[str, Any], batch: Any, batch_idx: int) -> dict[str, Any]:
        step = getattr(self.trainer.lightning_module.training_step, "__func__", None)
        if step is None or step not in takes_index:
            kwargs = longer(self, kwargs, batch, batch_idx)
            if step is not None:
                takes_index[step] = "batch_idx" in kwargs
            return kwargs
        kwargs["batch"] = batch
        if takes_index[step]:
            kwargs["batch_idx"] = batch_idx
        return kwargs

    return arguments
