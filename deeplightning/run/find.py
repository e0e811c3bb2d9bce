"""Find runs and checkpoints: those of an experiment, and the one named in a config or on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from deeplightning.config.schema import Config
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.config.trust import run_config
from deeplightning.faults import CheckpointError, ConfigError
from deeplightning.runfolder import RunFolder, from_start, start_folder
from deeplightning.tracking import resolve_run
from deeplightning.tracking.build import experiment_of
from deeplightning.tracking.claims import find_run
from deeplightning.tracking.store import Store, locate


def find_checkpoint(name: str, cfg: Config, to_resume: bool = False) -> Path:
    """Return the checkpoint file for a name: a path, a RUN, or `last` or `best` of the experiment's latest run.

    For a RUN it is the best checkpoint, or the last one if training is to resume.

    Raises:
        CheckpointError: there is none.
    """
    if name in ("auto", "last", "best"):
        file = "best.ckpt" if name == "best" else "last.ckpt"
        for folder in runs_of(cfg):
            if (folder.path / file).is_file():
                return folder.path / file
        raise CheckpointError(f"{name}: no run of this experiment in {store_of(cfg).shown} has a {file}")
    path = from_start(name)
    if path.is_file() or path.suffix == ".ckpt":
        if not path.exists():
            raise CheckpointError(f"{path}: there is no such checkpoint")
        return path
    folder = RunFolder(resolve_run(name, cfg.logger.params.get("tracking_uri")))
    return folder.last if to_resume and folder.last.exists() else checkpoint_of(folder)


def runs_of(cfg: Config, wanted: Callable[[Path], bool] = lambda folder: True) -> Iterator[RunFolder]:
    """Yield the runs of the config's experiment and store that have a config, the latest first.

    Runs that were deleted in MLflow are left out.

    Args:
        wanted: filters by the run's folder, before the run's experiment is looked up.

    Raises:
        SetupError: the store cannot be read.
    """
    store = store_of(cfg)
    root = store.artifact_root
    # With a tracking server, run folders are below the start folder.
    paths = root.glob("*/*/artifacts/cfg.yaml") if root else (start_folder() / "runs").glob("*/cfg.yaml")
    # By start time: a resumed run starts with the checkpoints of the earlier one.
    started = sorted(((path.stat().st_mtime_ns, path) for path in paths), reverse=True)
    ours = experiment_of(cfg.logger.type, cfg.logger.params)
    for _, path in started:
        if wanted(path.parent) and _experiment(store, path) == ours:
            yield RunFolder(path.parent)


def store_of(cfg: Config) -> Store:
    return locate(cfg.logger.params.get("tracking_uri"))


def _experiment(store: Store, config: Path) -> str | None:
    """Return the current name of a run's experiment; None if the run was deleted, or the name is unknown."""
    run = find_run(store, config.parts[-3]) if store.database is not None else None
    if run is not None:
        return run.experiment if run.is_active else None
    try:
        logger = plain(read(run_config(RunFolder(config.parent))).root)["logger"]
        return experiment_of(logger["type"], logger["params"])
    except (ConfigError, CheckpointError, KeyError, TypeError):  # from another tool, damaged, or foreign and not plain
        return None


def checkpoint_of(folder: RunFolder) -> Path:
    """Return the best checkpoint of a run, else the last; raise a CheckpointError if there is neither."""
    for path in (folder.best, folder.last):
        if path.exists():
            return path
    others = ", ".join(sorted(path.name for path in folder.path.glob("*.ckpt"))) or "no checkpoint"
    raise CheckpointError(
        f"{folder.path}: there is neither {folder.best.name} nor {folder.last.name} in this folder; it holds {others}"
    )
