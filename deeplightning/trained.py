"""What a run has left is found again: its weights, its task, and the bundle made of them."""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deeplightning import __version__
from deeplightning.config.fault import CheckpointError
from deeplightning.config.schema import Config
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.configure import init_module, load_config
from deeplightning.runfolder import RunFolder
from deeplightning.tracking import resolve_run
from deeplightning.tracking.store import locate

log = logging.getLogger("deeplightning")

SAMPLES = 16  # validation images kept in the run folder, to prove an export with
ON_ONE_PROCESS = ["engine.gpus=null", "engine.processes=1", "engine.backend=null", "engine.params={}"]


def find_checkpoint(name: str | None, cfg: Config, to_go_on: bool = False) -> Path | None:
    """The checkpoint file that a config names: a path, RUN, or `last`, `best`, `auto` of the experiment's newest run.

    Of a RUN it is the best, or the last where training is `to_go_on`.

    Raises:
        CheckpointError: there is none; `auto` then gives None instead.
    """
    if name is None:
        return None
    uri = cfg.logger.params.get("tracking_uri", "mlruns")
    if name in ("auto", "last", "best"):
        file = "best.ckpt" if name == "best" else "last.ckpt"
        folder = _newest(cfg, file)
        if folder is not None:
            return folder.path / file
        if name == "auto":
            log.info("resumes    nothing: there is no run of this experiment in %s yet", uri)
            return None
        raise CheckpointError(f"{name}: no run of this experiment in {uri} has a {file}")
    path = Path(name).expanduser()
    if path.is_file() or path.suffix == ".ckpt":
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no such checkpoint")
        return path.absolute()
    folder = RunFolder(resolve_run(name, uri))
    return folder.last if to_go_on and folder.last.exists() else checkpoint_of(folder)


def _newest(cfg: Config, file: str) -> RunFolder | None:
    """The run of the config's experiment and store that began last and has a file of that name."""
    root = locate(cfg.logger.params.get("tracking_uri", "mlruns")).artifact_root
    folders = [RunFolder(path.parent) for path in (root.glob(f"*/*/artifacts/{file}") if root else [])]
    # By the start of the run: a resumed one begins with the checkpoints of its forerunner.
    begun = [(folder.config.stat().st_mtime_ns, folder) for folder in folders if folder.config.is_file()]
    for _, folder in sorted(begun, key=lambda entry: entry[0], reverse=True):
        params = plain(read(folder.config).root)["logger"]["params"]
        if params.get("experiment_name", "Default") == cfg.logger.params.get("experiment_name", "Default"):
            return folder
    return None


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


def keep_samples(data: Any, folder: RunFolder) -> None:
    """Keeps some validation images as they reach the network, uint8 (N, C, H, W), in the run's folder."""
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
        keep_samples(data, folder)
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
