"""Train, and use finished runs, from Python: in a script or in a notebook.

import deeplightning as dl

run = dl.train("config.yaml", ["train.num_epochs=3"])
run.metrics["val_loss"].plot()
run.predict(["a.png", "b.png"])

Training runs in the same child processes that the command starts: several processes, launchers and GPUs work as they do
there, and neither an error nor an interruption harms this process.
"""

from __future__ import annotations

import contextlib
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
from deeplightning.config.source import GIVEN, Given, compose, is_file, read
from deeplightning.config.tree import dump, plain
from deeplightning.faults import RunError
from deeplightning.kinds import KINDS
from deeplightning.own_code import ROOTS, added_roots
from deeplightning.process.child import watch
from deeplightning.reproduce.past import PastRun, past_run
from deeplightning.words import printable

if TYPE_CHECKING:
    import pandas as pd
    from omegaconf import DictConfig
    from torch import nn

    from serve.model import Model

RUN_FOLDER = "Artifact storage path: "
"""Start of the last line that a training prints to stdout."""

MAX_PIXELS = 178_956_970
"""Largest width x height of a picture: what Pillow decodes without a warning. The caller is trusted."""


def train(config: str | Path | Given | Config, overrides: Sequence[str] = ()) -> Run:
    """Train a config as `deeplightning train` does, and show the progress.

    Ctrl-C, and the stop button of a notebook, end the run as they end the command: it saves a checkpoint first. A
    second one ends it at once.

    Args:
        config: a file, a `pkg://` address, a dict, an OmegaConf object, or what `deeplightning.load_config` returned.
        overrides: as for the command: `key=value`, `~key`, `+list=[x]`.

    Returns:
        The run.

    Raises:
        ConfigError: the config is wrong.
        SetupError: this machine, the data or the tracker do not meet the needs of the config.
        CheckpointError: the checkpoint to resume from cannot be used.
        RunError: the training failed.
        KeyboardInterrupt: it was interrupted.
    """
    if (calls := sys.modules.get("deeplightning.tracking.user_calls")) is not None:
        calls.UserCalls().take_over()  # the run of a trainer in this process, which the command would join
    with _command_arguments(config, overrides) as (words, environment):
        command = [sys.executable, "-P", "-m", "deeplightning", "train", *words]
        temporary = None if words[0] == str(config) else words[0]
        folder = watch(command, environment, RUN_FOLDER, temporary, GIVEN)
    if folder is None:
        raise RunError("the command printed no run folder; its output above shows why")
    return load_run(folder)


def load_run(run: str | Path = "last", allow: Sequence[str] = ()) -> Run:
    """Return a run, finished or not.

    Args:
        run: its folder, an MLflow run id, runs:/ID, models:/NAME/VERSION, or `last`, the newest in the store.
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
        past: the content of its folder and its tracker.
        allow: as for `load_run`.
    """

    def __init__(self, past: PastRun, allow: Sequence[str] = ()):
        self._past, self._allow = past, tuple(allow)

    @property
    def folder(self) -> Path:
        """Folder of its artifacts: config, checkpoints, bundle, results."""
        return self._past.folder.path

    @property
    def id(self) -> str | None:
        """MLflow run id, or None if the store of the folder is unknown."""
        return self._past.run_id

    @property
    def status(self) -> str | None:
        """FINISHED, FAILED, KILLED or RUNNING, or None if the store of the folder is unknown."""
        return self._past.status

    @cached_property
    def config(self) -> DictConfig:
        """Complete config as an OmegaConf object, which `train` accepts too, changed or not.

        Values that came from the environment are references, such as `${oc.env:NAME}`.
        """
        from omegaconf import OmegaConf

        return OmegaConf.create(plain(read(self._past.source).root, written=True))

    @property
    def metrics(self) -> pd.DataFrame:
        """Metrics by optimizer step, one column each; NaN where a metric has no value.

        Durations and the load of the machine are in the tracker only. Each access reads the metrics again.
        """
        import pandas as pd

        self._past.__dict__.pop("series", None)
        columns = {name: pd.Series(dict(points), dtype="float64") for name, points in (self._past.series or {}).items()}
        return pd.DataFrame(columns).sort_index().rename_axis("step")

    @property
    def results(self) -> dict[str, Any]:
        """Best value of the monitored metric, and the metrics of each evaluation."""
        self._past.__dict__.pop("results", None)
        return self._past.results

    def network(self) -> nn.Module:
        """Return the network with the best weights, or the last ones if no metric is monitored, on the CPU and in eval
        mode.

        If the task has no single attribute `network`, the task itself is returned.

        Raises:
            CheckpointError: there are no weights, or the run was not made here and its config names foreign code.
            ConfigError: a part of the config can no longer be built.
        """
        with warnings.catch_warnings():
            # Lightning imports tqdm, which asks for ipywidgets in a notebook; no progress bar is shown here.
            warnings.filterwarnings("ignore", "IProgress not found")
            from torch import nn

            from deeplightning.run.load import trained_task

            task, _, _ = trained_task(self._past.folder, self._allow, "use")
        network = getattr(task, "network", None)
        return network if isinstance(network, nn.Module) else task

    def export(self) -> Path:
        """Write the bundle that a server answers from, and return its folder.

        Raises:
            CheckpointError: there are no weights, or the network cannot be exported.
        """
        from deeplightning.run.make_bundle import export_run

        self.__dict__.pop("_model", None)
        return export_run(self._past.folder, self._allow)

    @property
    def bundle(self) -> Path:
        """Folder of the bundle. If there is no bundle, it is exported first.

        Raises:
            CheckpointError: as for `export`.
        """
        return self._past.folder.bundle if self._past.folder.bundle_card.is_file() else self.export()

    @cached_property
    def _model(self) -> Model:
        """Model that a server would use: the bundle, or torch if ONNX cannot express the network."""
        from deeplightning.export.bundle import NotExpressible
        from serve.bundle import Bundle

        try:
            return Bundle.open(self.bundle)
        except NotExpressible:
            from deeplightning.torch_server import Checkpoint

            return Checkpoint.open(self._past.folder, self._allow)

    def predict(self, inputs: Iterable[object], top_k: int = 5) -> list[dict[str, Any]]:
        """Return the answers that the endpoint gives, one for each input, computed in this process.

        Args:
            inputs: a list of inputs of the network: pictures (paths, bytes of a file, Pillow images, or uint8 arrays
                (H, W) or (H, W, C)); texts; rows of a table (mappings, or a DataFrame); arrays of numbers.
            top_k: number of classes to name, the most probable first.

        Raises:
            ValueError: an input cannot be used; the message has its index.
            CheckpointError: there are no weights, or the network cannot be exported.
        """
        from serve.answers import answers

        if isinstance(inputs, str | bytes | Path | Mapping):
            raise TypeError(f"inputs is a {type(inputs).__name__}; give a list of inputs")
        if hasattr(inputs, "to_dict") and hasattr(inputs, "columns"):  # not a Series
            inputs = inputs.to_dict("records")
        if KINDS[self._model.task].takes == "image":
            inputs = (_image_bytes(index, picture) for index, picture in enumerate(inputs))
        return answers(self._model, inputs, MAX_PIXELS, top_k)

    def __repr__(self) -> str:
        return f"Run({self.id or str(self.folder)!r}, {printable(self.status or 'status unknown')})"


def _image_bytes(index: int, picture: object) -> bytes:
    """Return a picture as the image file that a client would send. Raise ValueError, with its index, if it cannot be a
    picture, OSError if its file cannot be read."""
    if isinstance(picture, bytes | bytearray | memoryview):
        return bytes(picture)
    if isinstance(picture, str | os.PathLike):
        return Path(picture).expanduser().read_bytes()
    from PIL import Image

    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.shape[2:] not in ((), (1,), (3,), (4,)):
            raise ValueError(
                f"input {index}: an array of a picture is uint8 (H, W) or (H, W, C) with 1, 3 or 4 channels, not "
                f"{picture.dtype} {picture.shape}"
            )
        picture = Image.fromarray(picture[:, :, 0] if picture.shape[2:] == (1,) else picture)
    if not isinstance(picture, Image.Image):
        raise ValueError(
            f"input {index}: a picture is a path, bytes, a Pillow image or an array, not {type(picture).__name__}"
        )
    file = io.BytesIO()
    if picture.mode in ("CMYK", "HSV", "YCbCr"):  # PNG has none of them; `ImageSpec` converts them in the same way
        picture = picture.convert("RGB")
    picture.save(file, "TIFF" if picture.mode in ("I", "F", "LAB") else "PNG")  # PNG has none of the three
    return file.getvalue()


@contextlib.contextmanager
def _command_arguments(
    config: str | Path | Given | Config, overrides: Sequence[str]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the arguments that pass a config to the command, and the environment variables that it needs."""
    if isinstance(config, str | Path):
        yield [str(config), *overrides], {}
        return
    secrets: Mapping[str, str] = {}
    folders: Sequence[str | Path]
    if isinstance(config, Config):
        content, folders = config.public(), config.roots or ()
        secrets = config.secrets.variables() if config.secrets else {}
    else:
        groups = compose(config, [word for word in overrides if not is_file(word)]).groups
        choices = [word for word in overrides if word.partition("=")[0] in groups]
        source = compose(config, choices)  # the files that it builds on are relative to this directory
        overrides = [word for word in overrides if word not in choices]  # the merged file has no groups
        content, folders = plain(source.root, written=True), source.folders
    roots = dict.fromkeys([*map(str, folders), *added_roots()])  # the order of `load_config`
    with tempfile.TemporaryDirectory(prefix="deeplightning-") as folder:  # only its owner can enter it
        file = Path(folder) / "config.yaml"
        file.write_text(dump(content), encoding="utf-8")
        yield [str(file), *overrides], {**secrets, ROOTS: json.dumps([*roots])}
