"""One launch: run the stages of a resolved config, and return the run's folder.

Errors of libraries become faults of the config or the checkpoint (`run_stage`).
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.callbacks import TRIAL, callback_of, describe
from deeplightning.callbacks.resumption import Resumption
from deeplightning.config.auto_values import unfilled
from deeplightning.config.machine import world_size
from deeplightning.config.own_runs import is_own
from deeplightning.config.schema import Config
from deeplightning.config.target import find
from deeplightning.config.tree import line
from deeplightning.faults import CheckpointError, ConfigError, Fault, SetupError, UserError
from deeplightning.launch import apply_environment
from deeplightning.own_code import is_user_file
from deeplightning.private.lightning import start_afresh
from deeplightning.private.messages import ErrorText, matches
from deeplightning.process import member
from deeplightning.process.identity import identity, own_rank, restarts
from deeplightning.process.terminal import say_path
from deeplightning.run.assemble import init_module, init_trainer
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.store import DATABASE
from deeplightning.words import first_line

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from deeplightning.callbacks.record import Record

log = logging.getLogger("deeplightning")

_KNOWN_ERRORS = (ErrorText.OTHER_NETWORK, ErrorText.OTHER_OPTIMIZER, ErrorText.NO_METRIC)
"""Messages of torch about a checkpoint of another network or optimizer, and of Lightning about a missing metric."""

_PART_KEYS = {
    "torch.nn.modules.loss": "model.loss",
    "torchmetrics.": "model.metrics",
    "torchvision.transforms.": "data.module",
}
"""Config keys of the parts whose errors are faults of the config, by the prefix of their module."""


def launch(cfg: Config, folder: Path | None = None) -> RunFolder:
    """Run the stages of a config in order, and export the trained model.

    Args:
        folder: local folder of the run that is joined, if its tracker keeps no files on this machine.

    Returns:
        The run's folder; its path is the last line on stdout once the run has begun, even if it fails. If there is
        nothing to do, the folder of the checkpoint.
    """
    apply_environment(cfg)  # first, since libraries read it when they are imported
    from deeplightning.callbacks.log_lines import keep_format, one_line_warnings, to_terminal
    from deeplightning.callbacks.provenance import redact_code_secrets
    from deeplightning.callbacks.record import Record

    begins_here = own_rank() == 0 and restarts() == 0
    to_terminal(cfg)
    one_line_warnings()
    if begins_here:
        if cfg.train.fast:
            log.info("%-10s one batch of each stage; no checkpoint and no bundle is written", "fast")
        for notice in cfg.notices or []:
            log.log(logging.WARNING if notice.unasked else logging.INFO, notice.text)
    if cfg.engine.setup_hook is not None:
        find(cfg.engine.setup_hook)()
        keep_format()
    trains = "train" in cfg.stages
    learns = trains and cfg.train.num_epochs != 0
    try:
        # Before the resumption if it resolves `auto`: checkpoints are compared with the resolved numbers.
        data = init_module(cfg, "data") if any(unfilled(cfg)) else None
        resumed = _resumption(cfg) if learns else None
        if resumed is not None and resumed.checkpoint and resumed.complete and cfg.stages == ["train"]:
            log.warning("nothing to do: %s: %s; to continue training, raise that", resumed.checkpoint, resumed.complete)
            return RunFolder(resumed.checkpoint.parent)
        data = init_module(cfg, "data") if data is None else data
        task = init_module(cfg, "model")
    except Exception:
        redact_code_secrets(cfg)
        raise
    trainer = init_trainer(cfg)
    record = callback_of(trainer, Record)
    record.resumption = resumed
    record.fallback = folder or record.fallback
    timeout = cfg.engine.params.get("timeout")
    seconds = timeout if isinstance(timeout, int | float) else None  # else a target, or torch's
    member.prepare(cfg.redact_message, lambda error: _end(record, trainer, error), seconds)
    if world_size(cfg.engine) > 1:
        from deeplightning.process.rendezvous import connect
        from deeplightning.run.resume import agreement

        connect(trainer, agreement(cfg, resumed))
    try:
        if trains:
            record.prepare_autolog(trainer)
            _train(cfg, trainer, task, data, resumed)
        for stage in ("validate", "test", "predict"):
            if stage in cfg.stages:
                path = _weights_for(cfg, record, trains)
                quiet = {} if stage == "predict" else {"verbose": False}
                run_stage(getattr(trainer, stage), task, data, ckpt_path=path, **quiet)
        if learns and cfg.train.export and not cfg.train.fast and trainer.is_global_zero:
            _export(task, data, record)
        member.wait_for_children()
        if trainer.is_global_zero:
            if cfg.logger.pictures is not None and not cfg.train.fast and TRIAL not in os.environ:
                _report(record.folder)
            record.publish()
            if learns and record.folder.bundle_card.is_file() and TRIAL not in os.environ:
                serves = f"next       {describe.serve(record.folder.path)}"
                log.info("%s", serves, extra={"terminal": [serves]})  # in one line, to be pasted
    except BaseException as error:
        _end(record, trainer, error)
        raise
    _end(record, trainer)
    return record.folder


def _resumption(cfg: Config) -> Resumption:
    """Return where training resumes: at the start, unless the config names a checkpoint or this launch restarted."""
    here = identity()
    if cfg.train.resume_ckpt is None and not (here is not None and here.may_resume):
        return Resumption()
    from deeplightning.run.resume import resumption

    return resumption(cfg)


def _report(folder: RunFolder) -> None:
    """Draw the run's figures and write its report."""
    from deeplightning.report.write import write_run

    try:
        write_run(folder)
    except Exception as error:  # a report must not fail the run
        log.warning("report     none: %s", error)


def _end(record: Record, trainer: pl.Trainer, error: BaseException | None = None) -> None:
    """Set the final status of a run, print its folder and close it."""
    if error is not None:
        record.fail(error)
    if record.opened and trainer.is_global_zero and not member.is_supervised():
        say_path(record.folder.path, "Artifact storage path: ")
    record.close()


def _train(cfg: Config, trainer: pl.Trainer, task: Any, data: object, resumed: Resumption | None) -> None:
    from pytorch_lightning.utilities.model_helpers import is_overridden

    hook = "configure_gradient_clipping"
    clip = cfg.train.gradient_clip
    if clip and clip.algorithm == "norm" and clip.norm_type != 2 and not is_overridden(hook, task):
        message = f"Lightning clips the gradients of your module by the 2-norm; remove it, or override `{hook}`"
        raise ConfigError(Fault(message, "train.gradient_clip.norm_type", found=str(clip.norm_type)))
    if cfg.train.num_epochs == 0:
        run_stage(trainer.validate, task, data, verbose=False)
        return
    checkpoint = resumed.checkpoint if resumed else None
    if checkpoint is None:
        start_afresh(trainer)
    run_stage(trainer.fit, task, data, ckpt_path=checkpoint)


def _weights_for(cfg: Config, record: Record, trained: bool) -> Path | None:
    """Return the checkpoint for validate, test and predict; None to use the weights in the task."""
    if trained and (cfg.train.fast or (cfg.train.num_epochs == 0 and cfg.test.ckpt is None)):  # none was saved
        return None
    if trained and cfg.test.ckpt in (None, "best", "last"):
        folder = record.folder
        best = folder.best if cfg.test.ckpt != "last" and folder.best.exists() else folder.last
        if cfg.test.ckpt == "best" and best != folder.best:
            raise CheckpointError(f"{folder.best}: there is none; set train.checkpoint.monitor to a metric")
        return best
    if cfg.test.ckpt is None:
        stages = ", ".join(cfg.stages)
        raise CheckpointError(f"test.ckpt: {stages} without train needs weights: a path, RUN, best or last")
    from deeplightning.run.load import find_checkpoint

    return find_checkpoint(cfg.test.ckpt, cfg)


def evaluate(folder: RunFolder, stage: str, overrides: list[str], allow: Sequence[str] = ()) -> RunFolder:
    """Run `test` or `predict` with a run's config and best weights, in the same run.

    Results of a foreign run go to a new run in the current store: the foreign run's tracker is not used.

    Args:
        allow: modules that the config of a foreign run may name.

    Raises:
        CheckpointError: there are no weights, or the run is foreign and its config names something not allowed.
    """
    from deeplightning.engine.checkpoint_reading import read_checkpoint
    from deeplightning.run.load import checkpoint_of, load_run

    path = checkpoint_of(folder)
    fixed = [f"stages=[{stage}]", f"test.ckpt={line(str(path))}", "engine.launcher=null", "engine.num_nodes=1"]
    needed = ("data.module", *(["model.loss"] if stage == "test" else []))
    cfg = load_run(folder, [*fixed, *overrides], stage, needed, allow)
    run = read_checkpoint(path, whole=False).get("run") or {}
    if (lock := folder.lock()) is not None:
        lock.release()  # otherwise a process trains the run, and sets its status
    is_tracked = lock is not None and cfg.logger.type.endswith(("tracking.MLflowLogger", "loggers.MLFlowLogger"))
    if is_tracked and run.get("id") and is_own(folder):
        cfg.logger.params.setdefault("run_id", run["id"])
        store = folder.path.parents[2] if folder.path.parent.name == run["id"] else None
        if store and (store / DATABASE).is_file() and not any("tracking_uri" in text for text in overrides):
            cfg.logger.params["tracking_uri"] = str(store)  # the config's path may be relative to another directory
    return launch(cfg, folder.path if "run_id" in cfg.logger.params else None)


def _export(task: Any, data: Any, record: Any) -> None:
    """Store some validation samples, then export the best weights if the task supports it."""
    from pytorch_lightning.utilities.model_helpers import is_overridden

    from deeplightning.export.bundle import NotExpressible, card_of
    from deeplightning.kinds import is_plain
    from deeplightning.run.make_bundle import export_run, is_servable, keep_samples

    if not record.has_learned and record.folder.bundle_card.exists():  # a finished run was resumed
        return
    if not is_servable(task):  # a task derived from one of ours without an inference model
        log.info("bundle     none: the task has no inference_model, or its data module does not describe its inputs")
        return
    try:
        if is_overridden("teardown", data):  # it may have closed what its loaders read
            data.setup("fit")
        keep_samples(task, data, record.folder)
        export_run(record.folder)
        record.log_model(card_of(record.folder)["task"])
    except NotExpressible as error:
        log.warning("bundle     none; `deeplightning serve` answers by torch, from the checkpoint: %s", error)
    except Exception as error:  # raised by a user's hook, which may need the trainer
        if not is_plain(task) or isinstance(error, SetupError | OSError):  # a user's module need not be servable
            raise
        log.info("bundle     none: %s", error.faults[0].message if isinstance(error, UserError) else first_line(error))


def run_stage(stage: Any, *args: Any, **kwargs: Any) -> None:
    """Run a stage of Lightning.

    Args:
        stage: `fit`, `validate`, `test` or `predict` of a trainer; the first of `args` is the task.

    Raises:
        ConfigError: a library's exception is about the config.
        CheckpointError: it is about the checkpoint of `ckpt_path`.
    """
    path = kwargs.get("ckpt_path")
    try:
        stage(*args, **kwargs | ({} if path is None else {"ckpt_path": str(path)}))
    except Exception as error:
        if (explained := _explained(error, stage.__self__, args[0], path)) is None:
            raise
        raise explained from error


def _explained(error: Exception, trainer: pl.Trainer, task: pl.LightningModule, path: Path | None) -> UserError | None:
    """Return the fault of the config or the checkpoint that an error of a library is about; None for any other."""
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    from deeplightning.callbacks.checkpoints import Checkpoints
    from deeplightning.engine.checkpoint_reading import raise_for_differences, read_checkpoint, whole_shapes
    from deeplightning.engine.restored import checkpoint_error

    is_misconfigured = isinstance(error, MisconfigurationException)
    if path is not None and trainer.state.fn == "fit" and not is_misconfigured and not matches(error, *_KNOWN_ERRORS):
        refusal = checkpoint_error(error, trainer, callback_of(trainer, Checkpoints).resumed_at)
        if refusal is not None:
            return refusal
    if is_misconfigured and (found := matches(error, ErrorText.NO_DATALOADER)):
        data = {"val": "validation"}.get(found[1], found[1])
        message = f"no {data} data: the data module has none. Leave out the stage, or add a set"
        return ConfigError(Fault(message, "stages"))
    if is_misconfigured and (found := matches(error, ErrorText.ARGUMENT_BY_POSITION)):
        return ConfigError(f"Lightning sets {found[1]} of your loader: pass it by name, {found[1]}=…")
    if is_misconfigured:
        return ConfigError(str(error))
    if isinstance(error, NotImplementedError) and matches(error, ErrorText.HOOK_IS_REMOVED):
        return ConfigError(Fault(" ".join(str(error).split()), "model.module"))
    if not isinstance(error, RuntimeError | ValueError | IndexError | TypeError):
        return None
    if (fault := _part_fault(error, task)) is not None:
        return ConfigError(fault)
    if matches(error, ErrorText.NO_METRIC):
        own = callback_of(trainer, Checkpoints).record.cfg.train.early_stop  # the user's callbacks have no key
        is_own = own is not None and f"`{own.metric}` which" in str(error)
        return ConfigError(Fault(str(error), "train.early_stop.metric" if is_own else None))
    if matches(error, ErrorText.OTHER_NETWORK) and path is not None:
        raise_for_differences(whole_shapes(task), read_checkpoint(path)["state_dict"], path)
    if matches(error, ErrorText.OTHER_OPTIMIZER):
        return CheckpointError(f"{path}: from another optimizer: {error}")
    return None


def _part_fault(error: Exception, task: pl.LightningModule) -> Fault | None:
    """Return a fault if a loss of torch, a metric or a transform of a task with a config rejects its input, or None."""
    if type(error) not in (RuntimeError, ValueError, IndexError, TypeError):  # such as out of memory, or ours
        return None
    if not isinstance(getattr(task, "cfg", None), Config):
        return None
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_user_file(frame.f_code.co_filename):  # a part called the user's code, which raised the error
            return None
        part = type(frame.f_locals.get("self"))
        key = next((key for package, key in _PART_KEYS.items() if part.__module__.startswith(package)), None)
        if key is not None:
            return Fault(f"{part.__name__} does not take its input: {first_line(error)}", key)
    return None
