"""Answers without HTTP, in the process that asks: the same that a server gives."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from deeplightning.kinds import KINDS
from serve.answers import DEFAULT_TOP_K, encoder

BATCH = 16
"""Inputs in one forward pass."""


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
    encode = encoder(model.task, model.labels, getattr(model, "output", None) or {})
    spec: Any = getattr(model, "text_spec", None) or getattr(model, "row_spec", None)
    found: list[dict[str, object]] = []
    prepared: list[np.ndarray] = []

    def run() -> None:
        batch = spec.stack(prepared) if KINDS[model.task].takes == "text" else np.stack(prepared)  # (N, …)
        found.extend(json.loads(encode([row], top_k, "")[1]) for row in model.predict(batch))
        prepared.clear()

    for index, one in enumerate(inputs):
        try:
            prepared.append(model.prepare(one, max_pixels) if spec is None else spec.prepare(one))
        except ValueError as error:
            raise ValueError(f"input {index}: {error}") from error
        if len(prepared) == BATCH:
            run()
    if prepared:
        run()
    return found
