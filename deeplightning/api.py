"""Training and finished runs from Python, in a script as in a notebook.

import deeplightning as dl

run = dl.train("config.yaml", ["train.num_epochs=3"])
run.metrics["val_loss"].plot()
run.predict(["a.png", "b.png"])

Training and serving happen in processes of their own, the same that the command starts: several processes, launchers
and GPUs work as they do there, and neither an error nor an interruption harms this process.
"""

from __future__ import annotations

import base64
import contextlib
import html
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deeplightning.cli.listing import newest
from deeplightning.config.schema import Config
from deeplightning.config.source import GIVEN, Given, compose, read
from deeplightning.config.tree import as_written, dump
from deeplightning.faults import RunError
from deeplightning.kinds import KINDS
from deeplightning.own_code import ROOTS, added_roots
from deeplightning.process.child import Child
from deeplightning.reproduce.past import PastRun, past_run
from deeplightning.words import printable

if TYPE_CHECKING:
    import pandas as pd
    from omegaconf import DictConfig
    from torch import nn

    from serve.batching import Model

RUN_FOLDER = "Artifact storage path: "
"""Begins the last line that a training prints on stdout."""

SERVING = "Serving "
"""Begins the line that a server prints when it answers."""

MAX_PIXELS = 178_956_970
"""Of a picture, width x height: what Pillow decodes without a warning. The file is the caller's own."""


def train(config: str | Path | Given | Config, overrides: Sequence[str] = ()) -> Run:
    """Trains a config as `deeplightning train` does, and shows how the training goes.

    Ctrl-C, and the stop button of a notebook, end the run as they end the command: it saves a checkpoint first. A
    second one ends it at once.

    Args:
        config: a file, an address (`pkg://`, `https://` and others), a dict, an OmegaConf object, or what
            `deeplightning.load_config` returned.
        overrides: as of the command: `key=value`, `~key`, `+list=[x]`.

    Returns:
        The run.

    Raises:
        ConfigError: the config is wrong.
        SetupError: this machine, the data or the tracker lack something.
        CheckpointError: the checkpoint that training resumes from cannot be used.
        RunError: the training failed.
        KeyboardInterrupt: it was interrupted.
    """
    with _as_file(config, overrides) as (words, environment):
        command = [sys.executable, "-P", "-m", "deeplightning", "train", *words]
        temporary = None if words[0] == str(config) else words[0]
        with Child(command, environment, temporary, GIVEN) as child:
            folder = child.watch(RUN_FOLDER)
    if folder is None:
        raise RunError("the command has printed no run folder; its lines above say why")
    return load_run(folder)


def load_run(run: str | Path = "last", allow: Sequence[str] = ()) -> Run:
    """A run, finished or not.

    Args:
        run: its folder, an MLflow run id, runs:/ID, models:/NAME/VERSION, or `last`, the newest of the store.
        allow: further modules that may be imported for a run that was not made on this machine.

    Raises:
        CheckpointError: there is no such run.
        SetupError: the store cannot be opened.
    """
    name = os.fspath(run)
    return Run(past_run(newest(None) if name == "last" else name, allow=allow), allow)


class Run:
    """A run, finished or not, read from its folder.

    Args:
        past: what its folder and its tracker hold.
        allow: as of `load_run`.
    """

    def __init__(self, past: PastRun, allow: Sequence[str] = ()):
        self._past, self._allow = past, tuple(allow)

    @property
    def folder(self) -> Path:
        """The folder of its artifacts: config, checkpoints, bundle, results."""
        return self._past.folder.path

    @property
    def id(self) -> str | None:
        """Its MLflow run id; None: the store of the folder is not known."""
        return self._past.run_id

    @property
    def status(self) -> str | None:
        """FINISHED, FAILED, KILLED or RUNNING; None: the store of the folder is not known."""
        return self._past.status

    @cached_property
    def config(self) -> DictConfig:
        """The complete config as an OmegaConf object, which `train` takes as well, changed or not. What came from the
        environment is a reference, such as `${oc.env:NAME}`."""
        from omegaconf import OmegaConf

        return OmegaConf.create(as_written(read(self._past.source).root))

    @property
    def metrics(self) -> pd.DataFrame:
        """The metrics, a column each, by optimizer step; NaN where a metric has no value. Times and the load of the
        machine are in the tracker only. Each access reads them again."""
        import pandas as pd

        self._past.__dict__.pop("series", None)
        series = self._past.series or {}
        columns = {name: pd.Series(dict(points), dtype="float64") for name, points in series.items()}
        return pd.DataFrame(columns).sort_index().rename_axis("step")

    @property
    def results(self) -> dict[str, Any]:
        """The best value of the monitored metric, and the metrics of each evaluation."""
        self._past.__dict__.pop("results", None)
        return self._past.results

    def network(self) -> nn.Module:
        """The network with the best weights, or the last where no metric is monitored; on the CPU, in eval mode.

        Of a task with several networks or one that is not called `network`: the task.

        Raises:
            CheckpointError: there are no weights, or the run was not made here and its config names foreign code.
            ConfigError: a part of the config cannot be built any more.
        """
        with warnings.catch_warnings():
            # Lightning imports tqdm, which wants ipywidgets in a notebook; nothing here shows such a bar.
            warnings.filterwarnings("ignore", "IProgress not found")
            from torch import nn

            from deeplightning.run.load import trained_task

            task, _, _ = trained_task(self._past.folder, self._allow, "use")
        network = getattr(task, "network", None)
        return network if isinstance(network, nn.Module) else task

    def export(self) -> Path:
        """Writes the bundle that a server answers from; returns its folder.

        Raises:
            CheckpointError: there are no weights, or the network cannot be exported.
        """
        from deeplightning.run.make_bundle import export_run

        self.__dict__.pop("_model", None)
        return export_run(self._past.folder, self._allow)

    @property
    def bundle(self) -> Path:
        """The folder of the bundle. If there is no bundle, it is exported first.

        Raises:
            CheckpointError: as of `export`.
        """
        return self._past.folder.bundle if self._past.folder.bundle_card.is_file() else self.export()

    @cached_property
    def _model(self) -> Model:
        """What answers, as the server has it: the bundle, or torch where ONNX cannot express the network."""
        from deeplightning.export.bundle import NotExpressible
        from serve.bundle import Bundle

        try:
            return Bundle.open(self.bundle)
        except NotExpressible:
            from deeplightning.torch_server import Checkpoint

            return Checkpoint.open(self._past.folder, self._allow)

    def predict(self, inputs: Iterable[object], top_k: int = 5) -> list[dict[str, Any]]:
        """The answers that the endpoint gives, one for each input, computed in this process.

        Args:
            inputs: several, whatever the network takes: pictures (paths, bytes of a file, Pillow images, or uint8
                arrays (H, W) or (H, W, C)); texts; rows of a table (mappings, or a DataFrame); arrays of numbers.
            top_k: how many classes are named, the most probable first.

        Raises:
            ValueError: an input cannot be used; the message has its index.
            CheckpointError: there are no weights, or the network cannot be exported.
        """
        from serve.local import answers

        if isinstance(inputs, str | bytes | Path | Mapping):
            raise TypeError(f"inputs is a {type(inputs).__name__}; give a list of inputs")
        if hasattr(inputs, "to_dict"):
            inputs = inputs.to_dict("records")
        if KINDS[self._model.task].takes == "image":
            inputs = _encoded(inputs)
        return answers(self._model, inputs, MAX_PIXELS, top_k)

    def serve(self, port: int = 0, overrides: Sequence[str] = ()) -> Server:
        """Starts a server that answers HTTP from this run; it stops when its `with` block ends, or by `stop`.

        Args:
            port: 0: any that is free.
            overrides: keys of the config's section `serve`, such as `serve.max_batch=32`.

        Raises:
            ConfigError: an override is wrong.
            CheckpointError: there are no weights, or the network cannot be exported.
            SetupError: the server does not start.
        """
        from deeplightning.cli.deploy import command

        given = [f"serve.port={port}", *overrides]
        return Server(command(str(self.folder), given, self._allow))

    def __repr__(self) -> str:
        return f"Run({self.id or str(self.folder)!r}, {printable(self.status or 'status unknown')})"

    def _repr_html_(self) -> str:
        """In a notebook: status, results and the curves of the losses."""
        rows = [("status", self.status), ("folder", self.folder)]
        rows += [(name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in self.results.items()]
        cells = "".join(
            f'<tr><th style="text-align: left">{html.escape(printable(str(name)))}</th>'
            f'<td style="text-align: left">{html.escape(printable(str(value)))}</td></tr>'
            for name, value in rows
            if value is not None
        )
        return f"<table>{cells}</table>{_chart(self.metrics)}"


class Server:
    """A server in a process of its own. It is used as a context manager; `url` is its address.

    Args:
        command: starts it; a port of 0 becomes one that is free.

    Raises:
        SetupError: it does not start.
    """

    def __init__(self, command: list[str]):
        self._child = Child(command, {})
        try:
            line = self._child.first_line(SERVING)
        except BaseException:
            self.stop()
            raise
        self.url = next(word for word in line.split() if word.startswith("http://")).rstrip(":")

    def stop(self) -> None:
        """Ends the server: requests that it has accepted are answered first. Again: does nothing."""
        self._child.stop()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Server({self.url!r})"


def _encoded(pictures: Iterable[object]) -> Iterator[bytes]:
    """Pictures as a client sends them.

    Raises:
        ValueError: one is nothing that a picture can be; the message has its index.
        OSError: a file cannot be read.
    """
    for index, picture in enumerate(pictures):
        try:
            file = _file_of(picture)
        except ValueError as error:
            raise ValueError(f"input {index}: {error}") from error
        yield file


def _file_of(picture: object) -> bytes:
    """A picture as an image file.

    Raises:
        ValueError: it is nothing that a picture can be.
        OSError: its file cannot be read.
    """
    if isinstance(picture, bytes | bytearray | memoryview):
        return bytes(picture)
    if isinstance(picture, str | os.PathLike):
        return Path(picture).expanduser().read_bytes()
    from PIL import Image

    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8:
            raise ValueError(f"an array of a picture is uint8, not {picture.dtype}")
        if picture.ndim not in (2, 3) or picture.shape[2:] not in ((), (1,), (3,), (4,)):
            raise ValueError(f"an array of a picture is (H, W) or (H, W, C) with 1, 3 or 4 channels: {picture.shape}")
        picture = Image.fromarray(picture[:, :, 0] if picture.shape[2:] == (1,) else picture)
    if not isinstance(picture, Image.Image):
        raise ValueError(f"a picture is a path, bytes, a Pillow image or an array, not {type(picture).__name__}")
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _chart(metrics: pd.DataFrame) -> str:
    """The losses of training and validation by step, as an image in HTML; nothing where there are none."""
    names = [name for name in ("train_loss", "val_loss") if name in metrics]
    if not names:
        return ""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3), layout="constrained")
    axes = figure.subplots()
    for name, colour in zip(names, ("tab:blue", "tab:orange"), strict=False):
        points = metrics[name].dropna()
        axes.plot(points.index, points, color=colour, label=name, marker="." if len(points) < 30 else None)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    text = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{" and ".join(names)} by optimizer step" src="data:image/png;base64,{text}">'


@contextlib.contextmanager
def _as_file(
    config: str | Path | Given | Config, overrides: Sequence[str]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The words that name a config to the command, and the variables that it needs."""
    if isinstance(config, str | Path):
        yield [str(config), *overrides], {}
        return
    secrets: Mapping[str, str] = {}
    folders: Sequence[str | Path]
    if isinstance(config, Config):
        content, folders = config.public(), config.roots or ()
        secrets = config.secrets.variables() if config.secrets else {}
    else:
        source = compose(config)  # the files that it builds on are relative to this directory
        content, folders = as_written(source.root), source.folders
    roots = dict.fromkeys([*added_roots(), *map(str, folders)])
    with tempfile.TemporaryDirectory(prefix="deeplightning-") as folder:  # only its owner can enter it
        file = Path(folder) / "config.yaml"
        file.write_text(dump(content), encoding="utf-8")
        yield [str(file), *overrides], {**secrets, ROOTS: json.dumps([*roots])}
