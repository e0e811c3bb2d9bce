"""Private names of Lightning 2.6."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytorch_lightning as pl

INHERITED = {
    # They set up the model that DDP wraps. If a name moves, `Ddp` fails when a stage starts.
    "pytorch_lightning.strategies.DDPStrategy": ("_ddp_kwargs", "_setup_model"),
    # Lightning sets the size in its constructor, before the number of processes is known. If it moves, FSDP trains
    # without sharding.
    "pytorch_lightning.strategies.ModelParallelStrategy": ("_data_parallel_size",),
    # The public methods around these refuse the CPU and add warnings. If one moves, `DeepSpeed` fails when a stage
    # starts.
    "pytorch_lightning.strategies.DeepSpeedStrategy": (
        "_format_batch_size_and_grad_accum_config",
        "_init_config_if_needed",
        "_init_deepspeed_distributed",
        "_init_optimizers",
        "_initialize_deepspeed_inference",
        "_initialize_deepspeed_train",
    ),
    # It starts this command again for each further process. If it moves, a run of several processes fails at start.
    "pytorch_lightning.strategies.launchers.subprocess_script._SubprocessScriptLauncher": ("_call_children_scripts",),
}


def forget_train_loader(trainer: "pl.Trainer") -> None:
    """Make Lightning create the training loader again. If the name moves, a run that resumes with a schedule of length
    `auto` repeats the first batches of its epoch, without an error."""
    trainer.fit_loop._combined_loader = None


def read_ahead(trainer: "pl.Trainer") -> bool:
    """Make Lightning find the end of the training data by reading one batch ahead, as for data without a length. Call
    this before the first batch. Return False if the task reads its batches itself. If a name moves, training on a
    stream with a length fails at start."""
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


def start_afresh(trainer: "pl.Trainer") -> None:
    """Keep Lightning from resuming the next training by itself, from a file of `OnExceptionCheckpoint` or of its Slurm
    support, which our run would not record. If a name moves, it does resume."""
    own = vars(trainer._checkpoint_connector)
    own["_select_ckpt_path"] = lambda *_, **__: own.pop("_select_ckpt_path") and None  # for one training


def resume_by_epochs(trainer: "pl.Trainer") -> None:
    """Make a run with `max_steps` resume like one without: Lightning 2.6 would repeat a completed epoch, without any
    batch. Call this before counters are restored. If the name moves, that epoch is counted twice."""
    loop: Any = trainer.fit_loop
    loop._iteration_based_training = lambda: False


def before_sanity_check(trainer: "pl.Trainer", do: Callable[[], None]) -> None:
    """Call a function before Lightning's sanity check, after all hooks `on_fit_start`, without affecting the random
    numbers of the training. If the name moves, it is not called."""
    found: Any = trainer

    def run_sanity_check() -> None:
        do()
        type(found)._run_sanity_check(found)

    found._run_sanity_check = run_sanity_check


def before_batches(
    trainer: "pl.Trainer", on_epoch: Callable[[Any], None], on_validation: Callable[[Any], None] = lambda _: None
) -> None:
    """Call a function in each training epoch after all hooks of its start, before Lightning iterates the training data,
    and another one before each validation. If a name moves, a resumed run draws other random numbers.

    Lightning creates the iterator of the first epoch, and of a resumed one, earlier: recreate it here at the latest.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    validation = loop.val_loop

    def on_run_start(fetcher: Any) -> None:
        on_epoch(trainer)
        type(loop).on_run_start(loop, fetcher)

    def run() -> Any:
        on_validation(trainer)
        return type(validation).run(validation)

    loop.on_run_start, validation.run = on_run_start, run


def before_cycles(trainer: "pl.Trainer", on_restart: Callable[[int, int], None]) -> None:
    """Call a function before a loader restarts within this training epoch, with the numbers of the loader and the
    batch. If a name moves, a run that resumes within an epoch draws other random numbers."""
    combined: Any = trainer.fit_loop._combined_loader

    class Loaders(list[Any]):
        """Lightning reads an item by its number only to iterate over it again."""

        def __getitem__(self, number: Any) -> Any:
            on_restart(number, combined._iterator._idx)
            return super().__getitem__(number)

    combined._flattened = combined._iterator.iterables = Loaders(combined.flattened)


def restart_epoch(trainer: "pl.Trainer", skip: Iterable[object], new_iterator: bool) -> None:
    """Skip batches of the training data before the first one is read. If a name moves, a run that resumes with the
    user's own loaders fails when training starts.

    Args:
        skip: yields one item before each batch that is read and dropped.
        new_iterator: replace the iterator that Lightning created.
    """
    from lightning_fabric.utilities.data import _set_sampler_epoch

    fetcher: Any = trainer.fit_loop._data_fetcher
    if new_iterator:
        for loader in training_loaders(trainer):
            _set_sampler_epoch(loader, trainer.current_epoch)  # Lightning does so after `on_train_start`
        iter(fetcher)
    # If the task takes `dataloader_iter`, the fetcher reads nothing itself.
    source = fetcher if getattr(fetcher, "batches", None) else fetcher.iterator
    for _ in skip:
        next(source, None)
    if fetcher.length is not None:
        fetcher.fetched, fetcher.done = 0, False  # Lightning adds the finished batches


def training_loaders(trainer: "pl.Trainer") -> list[Any]:
    """Return the training loaders as a list, also if they are in a collection."""
    loader: Any = trainer.fit_loop._combined_loader
    return list(loader.flattened) if loader is not None else []


def batches_ahead(trainer: "pl.Trainer") -> list[Any] | None:
    """Return the training batches that were read ahead, or None if the data have a length or the task reads batches
    itself. If a name moves, a run of several processes fails when training starts."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return getattr(fetcher, "batches", None) if fetcher.length is None else None


def restart_validation(trainer: "pl.Trainer") -> None:
    """Make a resumed run repeat the interrupted validation. If the name moves, the run silently skips it."""
    validation = trainer.fit_loop.epoch_loop.val_loop
    validation._restart_stage = "restarted_mid_evaluation"
    validation.batch_progress.reset()


def validated_batches(trainer: "pl.Trainer") -> dict[int, int]:
    """Return the number of batches that the validations of a training run have read, by loader; Lightning logs their
    values at these steps. If the name moves, the first validation fails."""
    return trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader


def logged_steps(trainer: "pl.Trainer") -> int:
    """Return the step at which Lightning logs the next training values."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def add_logged_steps(trainer: "pl.Trainer", number: int) -> None:
    """Advance the step of `logged_steps`. If the name moves, `logged_steps` fails first."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += number


def values_to_log(trainer: "pl.Trainer", now: bool) -> dict[str, Any] | None:
    """Return the values that Lightning is about to log in training, or None if logging is not due.

    Args:
        now: whether logging is due regardless of the step.
    """
    connector = trainer._logger_connector
    return connector.metrics["log"] if now or connector.should_update_logs else None


def logged_means(trainer: "pl.Trainer") -> dict[str, dict[str, Any]]:
    """Return the state of Lightning's means of `self.log(on_epoch=True)` since the epoch started, by its keys; values
    with `sync_dist` are reduced over the processes. If the name moves, saving a checkpoint within an epoch fails."""
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
    """Merge a saved result of `logged_means` into the values logged since; remove the merged keys from `saved`."""
    results = trainer.fit_loop.epoch_loop._results
    for key in [key for key in saved if key in results and not results[key].has_reset]:
        result, before = results[key], saved.pop(key)
        for name, value in before.items():
            now, value = getattr(result, name), value.to(result.device)
            extreme = result.meta.is_max_reduction or result.meta.is_min_reduction
            setattr(result, name, result.meta.reduce_fx(value, now) if extreme else value + now)


def set_logged_hyperparameters(module: Any, values: dict[str, Any]) -> None:
    """Replace the hyperparameters that Lightning logs for `save_hyperparameters`. If the name moves, loggers get the
    `str` of each object, without an error."""
    module._hparams_initial = values


def keep_signals(trainer: Any) -> None:
    """Keep Lightning from replacing our signal handlers when a stage starts, and from telling other processes before
    each batch that it received none, which waits for the GPU. If a name moves, setting up a stage fails; if only a
    method moves, SIGTERM saves no checkpoint or each batch waits, without an error."""
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def set_launcher(strategy: Any, launcher: object) -> None:
    """Replace the launcher of a strategy, which the trainer's constructor chose. If the name moves, Lightning's own
    observer ends a run of several processes before the failure is reported."""
    strategy._launcher = launcher


def subprocess_launcher() -> object:
    """Return Lightning's launcher that starts the same command again for each further process."""
    from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    return _SubprocessScriptLauncher


def share_threads(num_processes: int) -> None:
    """Give each process of a machine its share of the cores, unless OMP_NUM_THREADS is set."""
    from lightning_fabric.utilities.distributed import _set_num_threads_if_needed

    _set_num_threads_if_needed(num_processes=num_processes)


def has_run(logger: object) -> bool:
    """Return whether Lightning's MLFlowLogger has created a run; reading its id would create one. If the name moves, a
    run that fails at once leaves an empty MLflow run, without an error."""
    return bool(getattr(logger, "_initialized", True))
