"""Image files and a run become a table: what its network sees in each, computed with the checkpoint itself."""

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from deeplightning.faults import CheckpointError, Fault, SetupError
from deeplightning.image import EXTENSIONS, ImageError, files_below
from deeplightning.run.load import trained_task
from deeplightning.runfolder import RunFolder

BATCH = 32
MANY = 1000  # pictures without an answer that are named
FORMATS = (".csv", ".jsonl")


def predict_files(folder: RunFolder, images: Sequence[Path], out: Path | None = None, allow: Sequence[str] = ()) -> int:
    """Writes a row per picture, in order: path, predicted_class, predicted_label, predicted_probability. Only a batch
    of them is held in memory.

    Args:
        images: image files, and folders, in which the files with the endings `EXTENSIONS` are meant, at any depth.
        out: the file to write, whole or not at all: a table, or a JSON object per line, as its ending of `FORMATS`
            says. None: a table on stdout.
        allow: modules that the config of a foreign run may name.

    Returns:
        How many pictures were answered.

    Raises:
        SetupError: `out` cannot be written, a folder holds no picture, or files are missing or no pictures; those
            are named when all others have been answered.
        CheckpointError: the run has no weights that can be used, or does not say what it sees in pictures.
    """
    empty = [path for path in images if path.is_dir() and next(_pictures([path]), None) is None]
    if empty:
        message = f"there is no picture in this folder or below it. Pictures end in {', '.join(EXTENSIONS)}"
        raise SetupError([Fault(message, place=str(path)) for path in empty])
    faults: list[Fault] = []
    answered = without = 0

    def refuse(path: Path, error: Exception) -> None:
        nonlocal without
        without += 1
        if without <= MANY:
            faults.append(Fault(str(error), place=str(path)))

    with _writer(out) as write:
        task, cfg, _ = trained_task(folder, allow, "predict")
        if (kind := getattr(task, "kind", type(task).__name__)) != "image_classification":
            raise CheckpointError(
                f"{folder.path}: this run is of {kind}, and only image_classification answers to image files with a "
                "table. Leave them out for the run's test set, or serve the run with `bash deploy.sh`"
            )
        with _bar(images, out) as pictures:
            for row in _rows(task, cfg.serve.max_pixels, pictures, refuse):
                write(row)
                answered += 1
        if without > MANY:
            faults.append(Fault(f"{without - MANY} more pictures have no answer"))
        if faults and not answered:
            raise SetupError(faults)
    if faults:
        raise SetupError(faults)
    return answered


def _pictures(images: Sequence[Path]) -> Iterator[Path]:
    for path in images:
        if not path.is_dir():
            yield path
            continue
        try:
            yield from (file for file in files_below(path) if file.name.lower().endswith(EXTENSIONS))
        except OSError as error:
            raise SetupError(f"{error.filename}: this folder cannot be read: {error.strerror}") from error


def _rows(
    task: Any, max_pixels: int, pictures: Iterator[Path], refuse: Callable[[Path, Exception], None]
) -> Iterator[dict[str, object]]:
    """Yields a row for each picture that can be read, and calls `refuse` with each that cannot."""
    spec, names, model = task.image_spec, task.class_names, task.inference_model()

    def answers(batch: list[tuple[Path, Tensor]]) -> Iterator[dict[str, object]]:
        with torch.inference_mode():
            probability, predicted = model(torch.stack([pixels for _, pixels in batch])).max(1)
        for (path, _), number, p in zip(batch, predicted.tolist(), probability.tolist(), strict=True):
            yield {
                "path": str(path),
                "predicted_class": number,
                "predicted_label": names[number],
                "predicted_probability": p,
            }

    batch: list[tuple[Path, Tensor]] = []
    for path in pictures:
        try:
            batch.append((path, torch.from_numpy(spec.decode(path, max_pixels=max_pixels)).permute(2, 0, 1)))
        except (ImageError, OSError) as error:
            refuse(path, error)
        if len(batch) == BATCH:
            yield from answers(batch)
            batch.clear()
    if batch:
        yield from answers(batch)


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
    writer = csv.writer(out)
    is_begun = False

    def write(row: dict[str, object]) -> None:
        nonlocal is_begun
        if not is_begun:
            writer.writerow(row)
            is_begun = True
        writer.writerow(row.values())

    return write


@contextmanager
def _bar(images: Sequence[Path], out: Path | None) -> Iterator[Iterator[Path]]:
    """The pictures, with a bar on stderr where that is a terminal and the rows do not go to one."""
    if not sys.stderr.isatty() or (out is None and sys.stdout.isatty()):
        yield _pictures(images)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield iter(progress.track(_pictures(images), total=sum(1 for _ in _pictures(images)), description="pictures"))
