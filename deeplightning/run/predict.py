"""Files and a run become a table: what its network answers to each input, computed with the checkpoint itself.

Files are read by `deeplightning.run.inputs`, and answers are those of the endpoint (`serve.local`).
Letters: N inputs, C channels, H height, W width.
"""

import base64
import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from deeplightning.faults import CheckpointError, Fault, SetupError
from deeplightning.image_spec import files_below
from deeplightning.kinds import KINDS
from deeplightning.run.inputs import ENDINGS, Place, inputs_of
from deeplightning.run.load import trained_task
from deeplightning.run.own_module import servable
from deeplightning.runfolder import RunFolder
from deeplightning.words import printable
from serve.local import answered

MANY = 1000  # inputs without an answer that are named
FORMATS = (".csv", ".jsonl")
_NOUNS = {"image": "picture", "text": "file of texts", "table": "table", "array": "array or signal"}


def predict_files(folder: RunFolder, files: Sequence[Path], out: Path | None = None, allow: Sequence[str] = ()) -> int:
    """Writes a row per input, in order: `path`; where a file holds several inputs, `row`, from 1; and the answer, which
    is the endpoint's. Only a batch of inputs is held in memory.

    - classes: predicted_class, predicted_label, predicted_probability
    - numbers: predicted_NAME, and low_NAME and high_NAME where the run has intervals
    - several labels: predicted_labels, divided by |, and probability_NAME of each
    - a class for each pixel: mask, a PNG file whose values are classes, and share_NAME of each class
    - pictures: image, a PNG file

    PNG files go into a folder beside `out`, of its name without the ending.

    Args:
        files: of the kinds that `deeplightning.run.inputs.ENDINGS` has for what the network takes; in folders, at any
            depth, those with these endings are meant.
        out: the file to write, whole or not at all: a table, or a JSON object per line, as its ending of `FORMATS`
            says. None: a table on stdout.
        allow: modules that the config of a foreign run may name.

    Returns:
        How many inputs were answered.

    Raises:
        SetupError: `out` cannot be written or is missing where PNG files are written, a folder holds nothing to answer,
            or files or inputs cannot be used; those are named when all others have been answered.
        CheckpointError: the run has no weights that can be used, or is of a kind that answers no files.
    """
    faults: list[Fault] = []
    number = without = 0

    def refuse(place: Place | Path, error: Exception) -> None:
        nonlocal without
        without += 1
        if without <= MANY:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            faults.append(Fault(str(reason), place=str(place)))

    with _writer(out) as write:
        network = _Network(folder, allow)
        takes = KINDS[network.task].takes
        _check_folders(files, takes)
        row_of = _rows(network, out)
        with _bar(files, takes, out) as paths:
            inputs = _inputs(paths, takes, network.row_spec, refuse)
            for place, answer in answered(network, inputs, network.max_pixels, refuse):
                row = {} if place.row is None else {"row": place.row}
                write({"path": str(place.path), **row, **row_of(place, answer)})
                number += 1
        if without > MANY:
            faults.append(Fault(f"{without - MANY} more have no answer"))
        if faults and not number:
            raise SetupError(faults)
    if faults:
        raise SetupError(faults)
    return number


class _Network:
    """The network of a run's checkpoint with what an answer needs, as `serve.local` wants it.

    Raises:
        CheckpointError: as of `predict_files`.
    """

    def __init__(self, folder: RunFolder, allow: Sequence[str]):
        task, cfg, _ = trained_task(folder, allow, "predict")
        task = servable(task, folder)
        kind = getattr(task, "kind", type(task).__name__)
        if kind not in KINDS:
            raise CheckpointError(
                f"{folder.path}: this run is of {kind}, which answers no files; those that do: {', '.join(KINDS)}. "
                "Leave the files out for the run's test set"
            )
        self.task: str = kind
        self.max_pixels: int = cfg.serve.max_pixels
        self._max_side: int = cfg.serve.max_side
        self._model = task.inference_model()  # before the spec of texts is asked for
        takes = KINDS[kind].takes
        self._image_spec = task.image_spec if takes == "image" else None
        self.text_spec = task.text_spec if takes == "text" else None
        self.row_spec = task.row_spec if takes in ("table", "array") else None
        self.labels = [str(name) for name in task.class_names] if KINDS[kind].has_labels else []
        self.output: dict[str, Any] = getattr(task, "answer_details", dict)()

    def prepare(self, path: Path, max_pixels: int) -> np.ndarray:
        """A picture's file as the network takes it, uint8 (C, H, W)."""
        assert self._image_spec is not None, "it takes pictures"
        decoded: np.ndarray = self._image_spec.decode(path, max_pixels, self._max_side)
        return decoded.transpose(2, 0, 1)

    def predict(self, batch: np.ndarray) -> np.ndarray:
        """What the network answers to prepared inputs (N, …), float32 (N, …)."""
        with torch.inference_mode():
            answers: np.ndarray = self._model(torch.from_numpy(np.ascontiguousarray(batch))).numpy()
        return answers


def _check_folders(files: Sequence[Path], takes: str) -> None:
    empty = [path for path in files if path.is_dir() and next(_paths([path], takes), None) is None]
    if empty:
        message = f"there is no {_NOUNS[takes]} in this folder or below it. Files end in {', '.join(ENDINGS[takes])}"
        raise SetupError([Fault(message, place=str(path)) for path in empty])


def _paths(files: Sequence[Path], takes: str) -> Iterator[Path]:
    for path in files:
        if not path.is_dir():
            yield path
            continue
        try:
            yield from (file for file in files_below(path) if file.name.lower().endswith(ENDINGS[takes]))
        except OSError as error:
            raise SetupError(f"{error.filename}: this folder cannot be read: {error.strerror}") from error


def _inputs(
    paths: Iterator[Path], takes: str, spec: Any, refuse: Callable[[Place | Path, Exception], None]
) -> Iterator[tuple[Place, Any]]:
    """The inputs of all files; `refuse` is called with each file that cannot be read to its end."""
    for path in paths:
        try:
            yield from inputs_of(path, takes, spec)
        except (ValueError, OSError) as error:
            refuse(path, error)


def _rows(network: _Network, out: Path | None) -> Callable[[Place, dict[str, Any]], dict[str, Any]]:
    """What makes the endpoint's answer to an input a row of a table.

    Raises:
        SetupError: PNG files are to be written, and there is no place for them.
    """
    gives = KINDS[network.task].gives
    if gives in ("segmentation", "reconstruction"):
        if out is None:
            raise SetupError(
                "this run answers with pictures: --out FILE.csv writes them as PNG files into the folder FILE, and the "
                "table beside it"
            )
        return _pictures(out.with_suffix(""), "mask" if gives == "segmentation" else "image")
    return {"classification": _classes, "regression": _numbers, "multilabel": _labels}[gives]


def _classes(place: Place, answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "predicted_class": int(answer["predicted_class"]),
        "predicted_label": answer["label"],
        "predicted_probability": float(answer["predicted_probability"]),
    }


def _numbers(place: Place, answer: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{'predicted' if key == 'value' else key}_{one['name']}": one[key]
        for one in answer["predictions"]
        for key in ("value", "low", "high")
        if key in one
    }


def _labels(place: Place, answer: dict[str, Any]) -> dict[str, Any]:
    by_number = sorted(answer["predictions"], key=lambda one: one["class"])
    chosen = [one["label"] for one in by_number if one["label"] in answer["labels"]]
    return {"predicted_labels": "|".join(chosen)} | {
        f"probability_{one['label']}": one["probability"] for one in by_number
    }


def _pictures(into: Path, key: str) -> Callable[[Place, dict[str, Any]], dict[str, Any]]:
    """Writes the PNG of each answer into a folder; a name that several inputs have gets a number."""
    used: set[str] = set()

    def write(place: Place, answer: dict[str, Any]) -> dict[str, Any]:
        name, number = place.path.stem, 1
        while (file := into / f"{name}.png").name in used:
            number += 1
            name = f"{place.path.stem}-{number}"
        used.add(file.name)
        try:
            into.mkdir(exist_ok=True)
            file.write_bytes(base64.b64decode(answer[key]))
        except OSError as error:
            raise SetupError(f"{file}: cannot be written: {error.strerror}") from error
        return {key: str(file)} | {f"share_{one['label']}": one["share"] for one in answer.get("classes", ())}

    return write


@contextmanager
def _writer(out: Path | None) -> Iterator[Callable[[dict[str, object]], object]]:
    """What writes a row. A file takes its place when the block ends without an error."""
    if out is None:
        sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # names of files are bytes
        yield _table(sys.stdout)
        return
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        try:
            file = beside.open("w", encoding="utf-8", errors="surrogateescape", newline="")
        except OSError as error:
            raise SetupError(f"{out}: cannot be written: {error.strerror}") from error
        with file:
            if out.suffix.lower() == ".csv":
                yield _table(file)
            else:
                yield lambda row: file.write(f"{json.dumps(row)}\n")
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)


def _table(out: TextIO) -> Callable[[dict[str, object]], object]:
    """Writes rows as CSV. On stdout nothing can steer a terminal; into a pipe, the paths of files stay as they are."""
    writer = csv.writer(out)
    is_begun, as_it_is = False, "path" if not out.isatty() else None

    def write(row: dict[str, object]) -> None:
        nonlocal is_begun
        if not is_begun:
            writer.writerow(shown("", name) for name in row)
            is_begun = True
        writer.writerow(shown(name, value) for name, value in row.items())

    def shown(name: str, value: object) -> object:
        if out is sys.stdout and isinstance(value, str) and name != as_it_is:
            return printable(value)
        return value

    return write


@contextmanager
def _bar(files: Sequence[Path], takes: str, out: Path | None) -> Iterator[Iterator[Path]]:
    """The files, with a bar on stderr where that is a terminal and the rows do not go to one."""
    if not sys.stderr.isatty() or (out is None and sys.stdout.isatty()):
        yield _paths(files, takes)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield iter(
            progress.track(_paths(files, takes), total=sum(1 for _ in _paths(files, takes)), description="files")
        )
