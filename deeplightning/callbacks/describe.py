"""Describe a run: short names, the description in MLflow, and commands to paste."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deeplightning.config.machine import world_size
from deeplightning.config.packages import HOME
from deeplightning.config.schema import Config, Target
from deeplightning.faults import count
from deeplightning.runfolder import RunFolder, start_folder
from deeplightning.tracking.store import locate
from deeplightning.words import printable

PORT = 5001
"""The default port of `deeplightning monitor`."""


def note(cfg: Config, folder: RunFolder, run_id: str | None) -> str:
    """Return the description of a run, in Markdown; `run_id` is the tracker's, or None."""
    is_trained = "train" in cfg.stages
    length = [count(cfg.train.num_epochs, "epoch")] if cfg.train.num_epochs and is_trained else []
    about = "; ".join([*length, _escape_markdown(engine_summary(cfg))])
    here = start_folder()
    run = shlex.quote(run_id if run_id and folder.path.is_relative_to(here / "mlruns") else str(folder.path))
    commands = [f"deeplightning {verb} {run}" for verb in ("test", "reproduce", "serve")]
    lines = [f"**{_escape_markdown(network_name(cfg))}** on **{_escape_markdown(data_name(cfg))}**: {about}.", ""]
    lines += ["Test it, train it again, or serve it over HTTP:", ""]
    return "\n".join([*lines, "```bash", f"cd {shlex.quote(str(here))}", *commands, "```"])


def _escape_markdown(text: str) -> str:
    """Escape a text for Markdown."""
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#" else sign for sign in printable(text))


def num_samples(loaders: Any) -> int:
    """Return the number of samples in the data sets of one or several loaders."""
    from lightning_fabric.utilities.data import sized_len

    several = loaders if isinstance(loaders, list | tuple) else [loaders]
    return sum(sized_len(getattr(loader, "dataset", None)) or 0 for loader in several)


def command(verb: str, script: str, *arguments: str) -> str:
    """Return a command as one shell line, relative to the working directory."""
    file = HOME / script
    start = f"bash {shlex.quote(relative_path(file))}" if file.is_file() else f"deeplightning {verb}"
    return " ".join([start, *map(shlex.quote, arguments)])


def serve(folder: Path) -> str:
    """Return the command that serves a run over HTTP."""
    return command("serve", "deploy.sh", relative_path(folder))


def monitor(tracking_uri: str | os.PathLike | None) -> str | None:
    """Return the command that shows a store in the browser, or None for a server, which has its own pages."""
    store = locate(tracking_uri)
    if store.address is not None and store.address.startswith("http"):
        return None
    if store == locate("mlruns"):
        return command("monitor", "monitor.sh")
    uri = os.fspath(tracking_uri or os.environ["MLFLOW_TRACKING_URI"])
    return command("monitor", "monitor.sh", "--tracking-uri", uri)


def page(loggers: Iterable[Any], tracking_uri: str | os.PathLike | None) -> str | None:
    """Return the address of an open run's page in MLflow, or None if the run is tracked elsewhere."""
    for logger in loggers:
        if type(logger).__name__ in ("MLflowLogger", "MLFlowLogger"):
            store = locate(tracking_uri)
            is_server = store.address is not None and store.address.startswith("http")
            top = store.shown.rstrip("/") if is_server else f"http://127.0.0.1:{PORT}"
            experiment = getattr(logger, "experiment_id", None) or logger.name  # Lightning's logger or ours
            return f"{top}/#/experiments/{experiment}/runs/{logger.run_id}"
    return None


def relative_path(path: Path) -> str:
    """Return a path, relative if it is below the working directory."""
    return str(path.relative_to(here) if path.is_relative_to(here := start_folder()) else path)


def network_name(cfg: Config) -> str:
    """Return the name of a run's network: its class or function, or the model name passed to a library. With several
    networks, or one that the task defines, it is the task's class."""
    network = cfg.model.network
    if not isinstance(network, Target):
        return cfg.model.module.type.rpartition(".")[2]
    name = network.type.rpartition(".")[2]
    if name in ("create_model", "get_model", "from_pretrained", "load"):
        given = (network.params.get(key) for key in ("model_name", "name", "pretrained_model_name_or_path", "model"))
        name = next((Path(text).name for text in given if isinstance(text, str) and text), name)
    return name


def engine_summary(cfg: Config) -> str:
    """Describe the backend, devices and precision of a run, for a table column: `ddp, 2 GPU, bf16`."""
    engine, size = cfg.engine, world_size(cfg.engine)
    device = "CPU" if engine.gpus is None else "GPU"
    precision = f"fp{engine.precision}" if str(engine.precision).isdecimal() else str(engine.precision)
    parts = (engine.backend, device if size == 1 else f"{size} {device}", precision)
    return ", ".join(part for part in parts if part)


def data_name(cfg: Config) -> str:
    """Return the name of a run's data: `data.dataset`, or else the class of the data module."""
    return str(cfg.data.dataset or cfg.data.module.type.rpartition(".")[2])


def effective_batch(cfg: Config, size: int | None = None, samples: int = 0) -> str:
    """Return the number of samples per optimizer step and its factors, as text.

    Args:
        size: the batch size of the user's own loader; None for that of the config.
        samples: the size of the training set; 0 if unknown.
    """
    batch, world, factor = size or cfg.data.batch_size, world_size(cfg.engine), cfg.train.accumulator_factor
    parts = [f"{batch or 'one batch of the data module'} per process"]
    parts += [f"{world} processes"] if world > 1 else []
    parts += [f"{factor} batches accumulated"] if factor > 1 else []
    late = f" from epoch {cfg.train.accumulator_epoch} on" if factor > 1 and cfg.train.accumulator_epoch else ""
    if batch is None:
        return f"{' x '.join(parts)}{late}"
    step = batch * world * factor
    most = f"{samples} samples a step, the whole training set" if 0 < samples < step else f"{step} samples a step"
    return f"{most}: {' x '.join(parts)}{late}"
