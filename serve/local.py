"""Answer inputs in this process, without HTTP, as a server would."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from deeplightning.kinds import KINDS
from serve.answers import DEFAULT_TOP_K, encoder

BATCH_SIZE = 16
"""Inputs in one forward pass."""

Name = TypeVar("Name")


def answers(model: Any, inputs: Iterable[object], max_pixels: int, top_k: int = DEFAULT_TOP_K) -> list[dict[str, Any]]:
    """Return an answer for each input.

    Args:
        model: a bundle, or an object with the same attributes (`serve.model.Model`).
        inputs: encoded pictures, texts, rows of a table (mappings) or arrays of numbers, as the model takes them.
        max_pixels: maximum size of a picture, width x height.
        top_k: number of classes to return.

    Raises:
        ValueError: an input cannot be used; the message has its index.
    """

    def refuse(index: int, error: Exception) -> None:
        raise ValueError(f"input {index}: {error}") from error

    return [answer for _, answer in answered(model, enumerate(inputs), max_pixels, refuse, top_k)]


def answered(
    model: Any,
    inputs: Iterable[tuple[Name, Any]],
    max_pixels: int,
    refuse: Callable[[Name, Exception], None],
    top_k: int = DEFAULT_TOP_K,
) -> Iterator[tuple[Name, dict[str, Any]]]:
    """Yield the name and the answer of each input, in order. At most `BATCH_SIZE` inputs are in memory.

    Args:
        model, max_pixels, top_k: as in `answers`.
        inputs: pairs of a name and an input.
        refuse: called with the name of an input that cannot be used, and the error.
    """
    encode = encoder(model.task, model.labels, model.output)
    takes = KINDS[model.task].takes
    batch: list[tuple[Name, np.ndarray]] = []

    def run() -> Iterator[tuple[Name, dict[str, Any]]]:
        rows = [row for _, row in batch]
        stacked = model.spec.stack(rows) if takes == "text" else np.stack(rows)  # (N, …)
        for (name, _), row in zip(batch, model.predict(stacked), strict=True):
            yield name, json.loads(encode([row], top_k, "")[1])
        batch.clear()

    for name, one in inputs:
        try:
            batch.append((name, model.prepare(one, max_pixels) if takes == "image" else model.spec.prepare(one)))
        except (ValueError, OSError) as error:
            refuse(name, error)
        if len(batch) == BATCH_SIZE:
            yield from run()
    if batch:
        yield from run()
