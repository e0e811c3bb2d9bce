"""Create a run's bundle for serving: ONNX models in float32, int8 and fp16, with golden samples."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from deeplightning.batches import by_name
from deeplightning.callbacks.average import describe_averaging
from deeplightning.engine.checkpoint_reading import read_checkpoint
from deeplightning.faults import CheckpointError
from deeplightning.image_spec import ImageSpec
from deeplightning.kinds import KINDS, has_spec, is_plain
from deeplightning.run.assemble import init_module
from deeplightning.run.load import CPU_OVERRIDES, load_run, trained_task
from deeplightning.run.own_module import pixels, samples_of, servable
from deeplightning.runfolder import RunFolder, whole
from deeplightning.version import __version__

log = logging.getLogger("deeplightning")
SAMPLES = 16  # validation samples in the run folder, to verify an export


def keep_samples(task: Any, data: Any, folder: RunFolder) -> None:
    """Store some validation samples in the run's folder, or training samples if there are none.

    Images are stored as they reach the network, uint8 (N, C, H, W). A data module's `example_inputs` or `example_texts`
    provide rows of a table as JSON objects or texts, (N,), or arrays before they are prepared, (N, …). For a user's
    module its inputs are stored.

    Raises:
        CheckpointError: there are no samples.
        ConfigError: a user's module takes no tensor.
    """
    if not is_plain(task) and hasattr(data, "example_texts"):
        kept: Mapping[str, Any] = {"texts": np.array(data.example_texts(SAMPLES), np.str_)}
    elif not is_plain(task) and hasattr(data, "example_inputs"):
        kept = data.example_inputs(SAMPLES)
    else:
        source = task if data is None else data
        batch = next(itertools.chain(_batches(source.val_dataloader), _batches(source.train_dataloader)), None)
        if is_plain(task) and (batch is not None or task.example_input_array is not None):
            kept = {name: v[:SAMPLES] if v.ndim else v for name, v in samples_of(task, data, batch).items()}
        elif batch is None:
            raise CheckpointError(f"{folder.path}: a bundle is verified on samples, and the data module gives none")
        else:
            kind = KINDS.get(task.kind, KINDS["image_classification"])
            inputs = (by_name(batch, task.batch_names) or {})[INPUT_NAMES[kind.takes]][:SAMPLES].cpu()
            if kind.takes == "image" and inputs.is_floating_point():
                inputs = pixels(inputs, task.image_spec)
            kept = {kind.nouns: inputs.numpy()}
    with whole(folder.samples) as file:
        np.savez_compressed(file, **kept)


def _batches(dataloader: Callable[[], Iterable[object]]) -> Iterator[Any]:
    """Yield the batches of all loaders that a hook of the data module returns; none if it has no such hook."""
    try:
        loaders = dataloader()
    except MisconfigurationException:  # the module has no such hook
        return
    for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
        yield from () if loader is None else loader


def origin_of(folder: RunFolder, checkpoint: Path) -> dict[str, Any]:
    """Return the origin of a model: run, folder, checkpoint, averaging of its weights, time and versions."""
    content = read_checkpoint(checkpoint)
    weights, run = describe_averaging(content), content.get("run") or {}
    return {
        "id": run.get("id"),
        **({"name": run["name"]} if run.get("name") else {}),
        "folder_name": folder.path.name,
        "checkpoint": checkpoint.name,
        **({"weights": weights} if weights else {}),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"deeplightning": __version__},
    }


def is_servable(task: pl.LightningModule) -> bool:
    """Return whether a task can be served: a user's module, or a task with an inference model that defines how inputs
    are prepared."""
    return is_plain(task) or (hasattr(task, "inference_model") and has_spec(task))


def export_run(folder: RunFolder, allow: Sequence[str] = (), verb: str = "export") -> Path:
    """Write a run's bundle: its best weights as ONNX, verified against the checkpoint on real samples; also an MLflow
    model, if the config requests one.

    Args:
        allow, verb: as in `trained_task`.

    Raises:
        CheckpointError: there are no weights or no samples, the exported model answers differently, the task does
            not define how its inputs are prepared, or the run is foreign and its config names something not allowed.
        ConfigError: a user's module takes or returns anything but one tensor.
    """
    from deeplightning.export.bundle import export

    task, cfg, path = trained_task(folder, allow, verb)
    if not is_servable(task):
        raise CheckpointError(
            f"{folder.path}: a server must know how inputs are prepared, and {cfg.model.module.type} does not: the "
            "data module has no `image_spec` or `array_spec`, and its validation batches are not float arrays, or "
            "pictures from 0 to 1, of one shape. Give it one of these; `deeplightning predict RUN` answers for its "
            "test set"
        )
    if not folder.samples.is_file():  # the run ended before it stored some
        data = init_module(cfg, "data")
        if data is not None:
            _set_up(data)
        keep_samples(task, data, folder)
    task = servable(task, folder)
    try:
        with np.load(folder.samples, allow_pickle=False) as file:
            samples = file[KINDS[task.kind].nouns] if task.kind in KINDS else np.empty(0)
    except Exception as error:  # numpy, zipfile and zlib each have their own
        message = f"{folder.samples} cannot be read ({error}); remove it and run `deeplightning export` again"
        raise CheckpointError(message) from error
    origin = origin_of(folder, path)
    bundle = export(task, folder, samples, origin)
    log.info("bundle     %s", bundle)
    if cfg.logger.log_model:
        from deeplightning.tracking.flavour import write_model

        log.info("model      %s", write_model(folder))
    return bundle


INPUT_NAMES = {"image": "image", "text": "tokens", "table": "input", "array": "input"}
"""Names of the inputs in a batch of a data module, by what a task takes."""


def _set_up(data: pl.LightningDataModule) -> None:
    """Make the validation samples available; Lightning's manual teaches modules that know only `fit` and `test`."""
    data.prepare_data()
    data.setup("validate" if hasattr(data, "check_stages") else "fit")


def quantize_run(folder: RunFolder, allow: Sequence[str] = ()) -> str:
    """Add an int8 model to a run's bundle, for `serve.precision: int8`; return a line with the figures.

    Args:
        allow: as in `trained_task`.

    Raises:
        CheckpointError: there is no complete bundle, there are no validation samples with labels, or int8 would be less
            accurate.
        SetupError: the bundle cannot be written.
    """
    from deeplightning.export.bundle import card_of
    from deeplightning.export.int8 import classification_kind, quantize

    kind = classification_kind(folder, card := card_of(folder))
    noun, name = kind.nouns, INPUT_NAMES[kind.takes]
    cfg = load_run(folder, CPU_OVERRIDES, "serve", ("data.module",), allow)
    data = init_module(cfg, "data") or pl.LightningDataModule()  # a task with its own loaders has none
    _set_up(data)
    spec: Any = getattr(data, f"{kind.takes}_spec", None)  # `limit`, of texts, is known only since the export
    is_same = spec is None or (spec.to_dict() | {"limit": card["input"].get("limit")}).items() >= card["input"].items()
    if not is_same or (kind.takes == "text" and spec.content != (folder.bundle / spec.file).read_text("utf-8")):
        raise CheckpointError(f"{folder.path}: the data are prepared differently now from those of the training")
    first = by_name(next(_batches(data.val_dataloader), {}), (name, "label", "weight")) or {}
    if not {name, "label"} <= first.keys():
        raise CheckpointError(
            f"{folder.path}: int8 is judged on validation batches with '{name}' and 'label', and the data module gives "
            f"{', '.join(first) or 'none'}; serve it with serve.precision=fp32"
        )

    def validation() -> Iterator[tuple[Any, Any]]:
        for batch in _batches(data.val_dataloader):
            columns: Mapping[str, Any] = by_name(batch, (name, "label", "weight")) or {}
            counts = columns["index"] >= 0 if "index" in columns else slice(None)  # the rest is padding
            inputs = columns[name][counts]
            if kind.takes == "image" and inputs.is_floating_point():
                inputs = pixels(inputs, ImageSpec.from_dict(card["input"]))
            yield inputs.numpy(), columns["label"][counts].numpy()

    figures = quantize(folder, validation)
    scores = f"accuracy {figures['accuracy']:.2f} %, in float32 {figures['accuracy_fp32']:.2f} %"
    return f"int8: {scores}, on {figures[noun]} validation {noun}; kept as {folder.bundle_int8}"
