"""Write a table of predictions for files, computed from the checkpoint of a run.

Files are read by `deeplightning.run.inputs`; answers are those of the endpoint (`serve.answers`). Letters: N inputs,
C channels, H height, W width.
"""

import base64
import csv
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from deeplightning.faults import CheckpointError, Fault, SetupError
from deeplightning.image_spec import MAX_PIXELS, files_below
from deeplightning.kinds import KINDS, labels_of
from deeplightning.process.terminal import say
from deeplightning.run.inputs import ENDINGS, Place, inputs_of
from deeplightning.run.load import trained_task
from deeplightning.run.own_module import servable
from deeplightning.runfolder import RunFolder
from deeplightning.words import printable
from serve.answers import answered
from serve.outputs import OUTPUTS, Output

MAX_REPORTED = 1000  # unanswered inputs that the error lists
FORMATS = (".csv", ".jsonl")
ToRow = Callable[[Place, dict[str, Any]], dict[str, Any]]  # of an endpoint's answer


def predict_files(folder: RunFolder, files: Sequence[Path], out: Path | None = None, allow: Sequence[str] = ()) -> int:
    """Write a row per input, in order: `path`, `row` from 1 if a file has several inputs, and the endpoint's answer.

    Only one batch of inputs is in memory at a time. Columns of the answer:

    - classes: predicted_class, predicted_label, predicted_probability
    - numbers: predicted_NAME, and low_NAME and high_NAME if the run has intervals
    - several labels: predicted_labels, separated by |, and probability_NAME of each
    - a class for each pixel: mask, a PNG file whose values are classes, and share_NAME of each class
    - images: image, a PNG file

    PNG files are written to a folder next to `out` with the name of `out` without its ending.

    Args:
        files: files with the network's endings in `deeplightning.run.inputs.ENDINGS`, and folders, which are searched
            recursively for such files.
        out: the file to write, completely or not at all: a table, or a JSON object per line, by its ending; None for a
            table on stdout.
        allow: modules that the config of a foreign run may name.

    Returns:
        The number of answered inputs.

    Raises:
        SetupError: `out` cannot be written or is missing for PNG files, a folder has no usable file, or files or inputs
            cannot be used; these are reported after all others have been answered.
        CheckpointError: the run has no usable weights, or its kind does not answer files.
    """
    faults: list[Fault] = []
    number = unanswered = 0

    def refuse(place: Place | Path, error: Exception) -> None:
        nonlocal unanswered
        unanswered += 1
        if unanswered <= MAX_REPORTED:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            faults.append(Fault(str(reason), place=str(place)))

    with _writer(out) as write:
        network = _Network(folder, allow)
        takes = KINDS[network.task].takes
        row_of = _rows(network, out, files)
        paths: Iterable[Path] = _paths(files, takes)
        if out is not None and sys.stderr.isatty():
            paths = track([*paths], "files", console=Console(stderr=True), transient=True)
        inputs = _inputs(paths, takes, network.spec, refuse)
        for place, answer in answered(network, inputs, network.max_pixels, refuse):
            row = {} if place.row is None else {"row": place.row}
            write({"path": str(place.path), **row, **row_of(place, answer)})
            number += 1
        if unanswered > MAX_REPORTED:
            faults.append(Fault(f"{unanswered - MAX_REPORTED} more have no answer"))
        if faults and not number:
            raise SetupError(faults)
    if faults:
        raise SetupError(faults)
    return number


class _Network:
    """The network of a run's checkpoint, with the interface that `serve.answers` expects. Raises CheckpointError as in
    `predict_files`."""

    def __init__(self, folder: RunFolder, allow: Sequence[str]):
        task, cfg, _ = trained_task(folder, allow, "predict")
        task = servable(task, folder)
        kind = getattr(task, "kind", type(task).__name__)
        if kind not in KINDS:
            raise CheckpointError(
                f"{folder.path}: this run is of {kind} and cannot answer files; these can: {', '.join(KINDS)}. "
                "Leave the files out for the run's test set"
            )
        self.task: str = kind
        trained = cfg.data.module.params.get("max_pixels")  # local files may be as large as in training
        self.max_pixels: int = max(cfg.serve.max_pixels, trained if isinstance(trained, int) else MAX_PIXELS)
        self._max_side: int = cfg.serve.max_side
        self._model = task.inference_model()  # must precede the spec of texts
        self.spec: Any = getattr(task, KINDS[kind].spec)
        self.labels = labels_of(task)
        self.output: dict[str, Any] = getattr(task, "answer_details", dict)()

    def prepare(self, path: Path, max_pixels: int) -> np.ndarray:
        """Return the image in a file as the network takes it, uint8 (C, H, W)."""
        return np.asarray(self.spec.decode(path, max_pixels, self._max_side)).transpose(2, 0, 1)

    def predict(self, batch: np.ndarray) -> np.ndarray:
        """Return the network's answers to prepared inputs (N, …), float32 (N, …)."""
        with torch.inference_mode():
            return np.asarray(self._model(torch.from_numpy(np.ascontiguousarray(batch))).numpy())


def _paths(files: Sequence[Path], takes: str) -> Iterator[Path]:
    """Yield files, and those with the network's endings of each folder, or the folder itself if it has none."""
    for path in files:
        try:
            below = [*files_below(path)] if path.is_dir() else []
        except OSError as error:
            raise SetupError(f"{error.filename}: this folder cannot be read: {error.strerror}") from error
        taken = [each for each in below if each.name.lower().endswith(ENDINGS[takes])]
        yield from taken or [path]
        if taken and (others := sorted({*below}.difference(taken))):
            ends = Counter(each.suffix or "no ending" for each in others).most_common(9)
            say(f"Files ignored in {path}, by ending: {', '.join(f'{end} ({n})' for end, n in ends)}", err=True)


def _inputs(
    paths: Iterable[Path], takes: str, spec: Any, refuse: Callable[[Place | Path, Exception], None]
) -> Iterator[tuple[Place, Any]]:
    """Yield the inputs of all files; call `refuse` for each file that cannot be read to its end."""
    for path in paths:
        try:
            yield from inputs_of(path, takes, spec)
        except (ValueError, OSError) as error:
            refuse(path, error)


def _rows(network: _Network, out: Path | None, files: Sequence[Path]) -> ToRow:
    """Return the function that converts the endpoint's answer to a row of the table. Raise SetupError if PNG files are
    to be written, and `out` is None, or their folder has files of another origin."""
    output = OUTPUTS[KINDS[network.task].gives]
    if not output.picture:
        return lambda place, answer: output.row(answer)
    if out is None:
        raise SetupError(
            "this run answers with pictures: --out FILE.csv writes them as PNG files into the folder FILE, next to the "
            "table"
        )
    into = out.with_suffix("").resolve()
    is_near = any(p == into or into in p.parents or p in into.parents for p in map(Path.resolve, files))
    is_empty = out.exists() or (into.is_dir() and not any(into.iterdir()))  # but for the files of an earlier call
    if into.exists() and (is_near or not is_empty):
        raise SetupError(
            f"{into}: PNG files would be written among other files; choose another --out, or remove the folder if "
            "an interrupted call has written it"
        )
    return _pictures(out.with_suffix(""), output)


def _pictures(into: Path, output: Output) -> ToRow:
    """Return a function that writes each answer's PNG to a folder; a name used by several inputs gets a number."""
    used: set[str] = set()

    def write(place: Place, answer: dict[str, Any]) -> dict[str, Any]:
        name, number = place.path.stem, 1
        while (file := into / f"{name}.png").name in used:
            number += 1
            name = f"{place.path.stem}-{number}"
        used.add(file.name)
        try:
            into.mkdir(exist_ok=True)
            file.write_bytes(base64.b64decode(answer[output.picture]))
        except OSError as error:
            raise SetupError(f"{file}: cannot be written: {error.strerror}") from error
        return {output.picture: str(file)} | output.row(answer)

    return write


@contextmanager
def _writer(out: Path | None) -> Iterator[Callable[[dict[str, object]], object]]:
    """Yield the function that writes a row. The file replaces `out` when the block ends without an error."""
    if out is None:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() == "utf-8":  # not in a notebook
            sys.stdout.reconfigure(errors="surrogateescape")  # file names are bytes; other encodings keep escapes
        yield _table(sys.stdout)
        return
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        try:
            file = temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="")
        except OSError as error:
            raise SetupError(f"{out}: cannot be written: {error.strerror}") from error
        with file:
            yield _table(file) if out.suffix.lower() == ".csv" else lambda row: file.write(f"{json.dumps(row)}\n")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _table(out: TextIO) -> Callable[[dict[str, object]], object]:
    """Return a function that writes CSV rows; on a terminal they are escaped."""
    writer, escaped = csv.writer(out), printable if out.isatty() else str
    has_header = False

    def write(row: dict[str, object]) -> None:
        nonlocal has_header
        if not has_header:
            writer.writerow(map(escaped, row))
            has_header = True
        writer.writerow(escaped(str(value)) for value in row.values())

    return write
