"""One launch: a settled config goes through its stages, and the run folder is left behind."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning import __version__
from deeplightning.config.fault import CheckpointError, ConfigError, Fault
from deeplightning.config.schema import Config
from deeplightning.config.tree import dump
from deeplightning.configure import init_module, init_trainer, load_config
from deeplightning.engine.plan import own_rank
from deeplightning.runfolder import RunFolder
from deeplightning.tracking import resolve_run
from deeplightning.tracking.store import locate

if TYPE_CHECKING:
    import pytorch_lightning as pl

log = logging.getLogger("deeplightning")

SAMPLES = 16  # validation images kept in the run folder, to prove an export with
ON_ONE_PROCESS = ["engine.gpus=null", "engine.processes=1", "engine.backend=null", "engine.params={}"]


def launch(cfg: Config) -> RunFolder:
    """Runs the stages of a config in their order, and exports what was trained.

    Returns:
        The run's folder; its path is also the last line on stdout, whatever happens once the run has begun.
    """
    from deeplightning.callbacks import callback_of
    from deeplightning.callbacks.console import to_terminal
    from deeplightning.callbacks.record import Record

    to_terminal(cfg)
    if own_rank() == 0:
        show(cfg)
    for notice in cfg.notices or []:
        log.log(logging.WARNING if notice.unasked else logging.INFO, notice.text)
    weights = find_checkpoint(cfg.train.resume_ckpt, cfg, to_go_on=True) if "train" in cfg.stages else None
    data, task = init_module(cfg, "data"), init_module(cfg, "model")
    trainer = init_trainer(cfg)
    record = callback_of(trainer, Record)
    try:
        if "train" in cfg.stages:
            _train(cfg, trainer, task, data, weights)
        for stage in ("validate", "test", "predict"):
            if stage in cfg.stages:
                path = _weights_for(cfg, record, trained="train" in cfg.stages)
                quiet = {} if stage == "predict" else {"verbose": False}
                _explained(getattr(trainer, stage), task, data, ckpt_path=path, **quiet)
        if "train" in cfg.stages and cfg.train.export and trainer.is_global_zero and cfg.train.num_epochs != 0:
            _export_at_the_end(cfg, task, data, record)
        if trainer.is_global_zero:
            record.publish()
    except BaseException as error:
        record.fail(error)
        raise
    finally:
        if record.opened and trainer.is_global_zero:
            print(f"Artifact storage path: {record.folder.path}", flush=True)
    return record.folder


def show(cfg: Config) -> None:
    """Prints the whole config, in colour on a terminal."""
    import sys

    text = dump(cfg.public())
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(text, "yaml", background_color="default"))
    else:
        print(text, flush=True)


# ---- stages


def _train(cfg: Config, trainer: pl.Trainer, task: Any, data: Any, weights: Path | None) -> None:
    if cfg.train.num_epochs == 0:
        _explained(trainer.validate, task, data, verbose=False)
        return
    if weights:
        log.info("resumes    %s", weights)
    _explained(trainer.fit, task, data, ckpt_path=weights)


def _explained(stage: Any, *args: Any, **kwargs: Any) -> None:
    """Runs a stage of Lightning's; what it says of a config in its own exceptions becomes a fault of the config."""
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    try:
        if kwargs.get("ckpt_path") is not None:
            kwargs["ckpt_path"] = str(kwargs["ckpt_path"])
        stage(*args, **kwargs)
    except MisconfigurationException as error:
        raise ConfigError(str(error)) from error
    except RuntimeError as error:
        if "conditioned on metric" in str(error):  # Lightning's EarlyStopping
            raise ConfigError(Fault(str(error), "train.early_stop.metric")) from error
        if "Error(s) in loading state_dict" in str(error):
            reason = "; ".join(line.strip() for line in str(error).splitlines()[1:4])
            raise CheckpointError(f"{kwargs.get('ckpt_path')}: of another network: {reason}") from error
        raise
    except ValueError as error:
        if "loaded state dict" in str(error):  # torch's optimizers
            raise CheckpointError(f"{kwargs.get('ckpt_path')}: of another optimizer: {error}") from error
        raise


def _weights_for(cfg: Config, record: Any, trained: bool) -> Path:
    """The checkpoint that validate, test and predict use."""
    if trained and cfg.test.ckpt in (None, "best", "last"):
        folder = record.folder
        best = folder.best if cfg.test.ckpt != "last" and folder.best.exists() else folder.last
        if cfg.test.ckpt == "best" and best != folder.best:
            raise CheckpointError(f"{folder.best}: there is none; set train.checkpoint.monitor to a metric")
        return best
    if cfg.test.ckpt is None:
        stages = ", ".join(cfg.stages)
        raise CheckpointError(f"test.ckpt: {stages} without train needs weights: a path, RUN, best or last")
    found = find_checkpoint(cfg.test.ckpt, cfg)
    assert found is not None
    return found


# ---- checkpoints and runs


def find_checkpoint(name: str | None, cfg: Config, to_go_on: bool = False) -> Path | None:
    """The checkpoint file that a config names: a path, RUN, or `last`, `best`, `auto` of the newest run.

    Of a RUN it is the best, or the last where training is `to_go_on`.

    Raises:
        CheckpointError: there is none; `auto` then gives None instead.
    """
    if name is None:
        return None
    uri = cfg.logger.params.get("tracking_uri", "mlruns")
    if name in ("auto", "last", "best"):
        file = "best.ckpt" if name == "best" else "last.ckpt"
        root = locate(uri).artifact_root
        # By the start of the run: a resumed one begins with the checkpoints of its forerunner.
        found = [(RunFolder(path.parent).config, path) for path in (root.glob(f"*/*/artifacts/{file}") if root else [])]
        begun = [(config.stat().st_mtime_ns, path) for config, path in found if config.is_file()]
        if begun:
            return max(begun)[1]
        if name == "auto":
            log.info("resumes    nothing: there is no run in %s yet", uri)
            return None
        raise CheckpointError(f"{name}: no run in {uri} has a {file}")
    path = Path(name).expanduser()
    if path.is_file() or path.suffix == ".ckpt":
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no such checkpoint")
        return path.absolute()
    folder = RunFolder(resolve_run(name, uri))
    return folder.last if to_go_on and folder.last.exists() else checkpoint_of(folder)


def checkpoint_of(folder: RunFolder) -> Path:
    """The best checkpoint of a run, else the last."""
    for path in (folder.best, folder.last):
        if path.exists():
            return path
    raise CheckpointError(f"{folder.path}: there is neither {folder.best.name} nor {folder.last.name} in this folder")


def trained_task(folder: RunFolder) -> tuple[Any, Config, Path]:
    """The task of a run with its best weights, on the CPU, its config, and the checkpoint's path."""
    from deeplightning.engine.checkpoint_io import load_weights, read_checkpoint

    if not folder.config.is_file():
        raise CheckpointError(f"{folder.path}: this is no run folder, there is no {folder.config.name} in it")
    path = checkpoint_of(folder)
    checkpoint = read_checkpoint(path)
    cfg = load_config(folder.config, ON_ONE_PROCESS)
    task = init_module(cfg, "model")
    task.on_load_checkpoint(checkpoint)
    task.configure_model()
    load_weights(task, checkpoint, path)
    return task.eval(), cfg, path


def evaluate(folder: RunFolder, stage: str, overrides: list[str]) -> RunFolder:
    """Runs `test` or `predict` with a run's config and best weights, into the same run."""
    from deeplightning.engine.checkpoint_io import read_checkpoint

    path = checkpoint_of(folder)
    run = read_checkpoint(path).get("run") or {}
    fixed = [f"stages=[{stage}]", f"test.ckpt={_quoted(path)}"]
    cfg = load_config(folder.config, [*fixed, *overrides])
    if run.get("id") and cfg.logger.type.endswith(("tracking.MLflowLogger", "loggers.MLFlowLogger")):
        cfg.logger.params.setdefault("run_id", run["id"])
    return launch(cfg)


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


# ---- export


def _export_at_the_end(cfg: Config, task: Any, data: Any, record: Any) -> None:
    """Keeps some validation images, then exports the best weights, where the task knows how."""
    if not hasattr(task, "inference_model") or getattr(task, "image_spec", None) is None:
        log.info("bundle     none: the task offers no inference_model, or its data no image_spec")
        return
    _keep_samples(data, record.folder)
    export_run(record.folder)


def _keep_samples(data: Any, folder: RunFolder) -> None:
    import numpy as np
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    try:
        loader = data.val_dataloader()
    except MisconfigurationException:  # Lightning's word for: the module has none
        loader = data.train_dataloader()
    batch = next(iter(loader))
    np.savez_compressed(folder.samples, images=batch["image"][:SAMPLES].numpy())


def export_run(folder: RunFolder) -> Path:
    """Writes the bundle of a run: its best weights as ONNX, compared with the checkpoint on real samples.

    Raises:
        CheckpointError: there are no weights or no samples, or the exported model answers differently.
    """
    import numpy as np

    from deeplightning.engine.checkpoint_io import read_checkpoint
    from deeplightning.export import export

    task, cfg, path = trained_task(folder)
    if not folder.samples.is_file():  # the run ended before it could keep some
        data = init_module(cfg, "data")
        data.prepare_data()
        data.setup("validate")
        _keep_samples(data, folder)
    with np.load(folder.samples, allow_pickle=False) as file:
        images = file["images"]
    run = {
        "id": (read_checkpoint(path).get("run") or {}).get("id"),
        "folder_name": folder.path.name,
        "checkpoint": path.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"deeplightning": __version__},
    }
    bundle = export(task, folder, images, run)
    log.info("bundle     %s", bundle)
    return bundle
