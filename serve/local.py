"""Answers without HTTP, in the process that asks: the same that a server gives."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from deeplightning.kinds import KINDS
from serve.answers import DEFAULT_TOP_K, encoder

BATCH = 16
"""Inputs in one forward pass."""

Name = TypeVar("Name")


def answers(model: Any, inputs: Iterable[object], max_pixels: int, top_k: int = DEFAULT_TOP_K) -> list[dict[str, Any]]:
    """One answer for each input.

    Args:
        model: a bundle, or what has the same attributes (`serve.batching.Model`).
        inputs: encoded pictures, texts, rows of a table (mappings) or arrays of numbers, as the model takes them.
        max_pixels: of a picture, width x height.
        top_k: how many classes are named.

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
    """Yields the name and the answer of each input, in order; no more than `BATCH` inputs are held.

    Args:
        model, max_pixels, top_k: as of `answers`.
        inputs: each with a name.
        refuse: called with the name of an input that cannot be used, and why.
    """
    encode = encoder(model.task, model.labels, getattr(model, "output", None) or {})
    spec: Any = getattr(model, "text_spec", None) or getattr(model, "row_spec", None)
    batch: list[tuple[Name, np.ndarray]] = []

    def run() -> Iterator[tuple[Name, dict[str, Any]]]:
        rows = [row for _, row in batch]
        stacked = spec.stack(rows) if KINDS[model.task].takes == "text" else np.stack(rows)  # (N, …)
        for (name, _), row in zip(batch, model.predict(stacked), strict=True):
            yield name, json.loads(encode([row], top_k, "")[1])
        batch.clear()

    for name, one in inputs:
        try:
            batch.append((name, model.prepare(one, max_pixels) if spec is None else spec.prepare(one)))
        except (ValueError, OSError) as error:
            refuse(name, error)
        if len(batch) == BATCH:
            yield from run()
    if batch:
        yield from run()
