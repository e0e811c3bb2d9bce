"""Private names of Lightning 2.6."""

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytorch_lightning as pl

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


def read_ahead(trainer: "pl.Trainer") -> bool:
    """Has Lightning find the end of the training data by reading one batch ahead, as it does where they have no length;
    to be called before the first batch. False: a task that reads its batches itself. Where a name has moved, it fails
    when training starts on a stream that has a length."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    if not hasattr(fetcher, "batches"):
        return False
    reset = fetcher.reset

    def without_length() -> None:
        reset()
        fetcher.length, fetcher.done = None, False

    fetcher.reset, fetcher.length, fetcher.done = without_length, None, False
    fetcher.batches += [batch for batch in [next(fetcher.iterator, None)] if batch is not None]
    return True


def restart_epoch(trainer: "pl.Trainer", skip: int, new_iterator: bool) -> None:
    """Skip batches of the training data before the first one is read. Where a name has moved, a run that resumes with
    loaders of the user's fails when training starts.

    Args:
        skip: the number of batches to read and drop.
        new_iterator: replace the iterator that Lightning has made.
    """
    fetcher: Any = trainer.fit_loop._data_fetcher
    if new_iterator:
        iter(fetcher)
    for _ in range(skip):
        next(fetcher, None)
    if fetcher.length is not None:
        fetcher.fetched, fetcher.done = 0, False  # Lightning adds what is done


def training_loaders(trainer: "pl.Trainer") -> list[Any]:
    """Return the loaders that training reads, of a collection each."""
    loader: Any = trainer.fit_loop._combined_loader
    return loader.flattened if loader is not None else []


def batches_ahead(trainer: "pl.Trainer") -> list[Any] | None:
    """Return the training batches that were read ahead; None: the data have a length, or the task reads them. Where a
    name has moved, a run of several processes fails when training starts."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return getattr(fetcher, "batches", None) if fetcher.length is None else None


def batches_left(trainer: "pl.Trainer", most: int) -> int:
    """Read at most so many batches of the rest of an epoch; return how many there are, with those read ahead."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    rest = (next(fetcher.iterator, None) for _ in range(most))  # `iter` would begin the epoch again
    return len(fetcher.batches) + sum(1 for _ in itertools.takewhile(lambda batch: batch is not None, rest))


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


def set_logged_hyperparameters(module: Any, values: dict[str, Any]) -> None:
    """Replace what Lightning logs of `save_hyperparameters`. Where the name has moved, loggers get the text of each
    object, without an error."""
    module._hparams_initial = values


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
