"""Encode the model's output as the body of a response; `answers` answers inputs in this process, without HTTP, as a
server would. Letters: C channels, H height, W width, K classes, T targets."""

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from deeplightning.kinds import KINDS
from serve.limits import Refusal
from serve.outputs import JSON, OUTPUTS, png_of

DEFAULT_TOP_K = 5

BATCH_SIZE = 16
"""Inputs in one forward pass."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of every response."""

Name = TypeVar("Name")


class Answer(NamedTuple):
    """An HTTP answer: status, content type, body, and the headers specific to this status."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = MappingProxyType({})


def refused(refusal: Refusal) -> Answer:
    """Return the answer for a refusal."""
    body = json.dumps({"ERROR": refusal.message}, ensure_ascii=False).encode("utf-8", "replace")
    return Answer(refusal.status, JSON, body, refusal.headers)


def with_inputs(body: bytes, inputs: Sequence[np.ndarray]) -> bytes:
    """Add to a JSON answer the network's inputs, uint8 (C, H, W), each as `input`, a PNG in base64."""
    document = json.loads(body)
    for one, pixels in zip(document["predictions"] if len(inputs) > 1 else [document], inputs, strict=True):
        one["input"] = base64.b64encode(png_of(pixels)).decode()
    return json.dumps(document, ensure_ascii=False).encode()


def rows_of(model: Any, inputs: list[np.ndarray]) -> list[np.ndarray | Exception]:
    """Return a row of the model's output, or an exception, for each prepared input. If a batch fails, each input is
    run alone: only the bad one fails, and inputs that do not fit into memory together still get answers."""
    stack = model.spec.stack if KINDS[model.task].takes == "text" else np.stack  # texts are padded to the same length
    try:
        rows = model.predict(stack(inputs) if len(inputs) > 1 else inputs[0][None])
        if not math.isfinite(rows.sum()):
            raise ValueError("the model's output is not finite")
        return list(rows)
    except Exception as error:
        return [error] if len(inputs) == 1 else [row for one in inputs for row in rows_of(model, [one])]


# ---- answers without HTTP


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
    kind = KINDS[model.task]
    encode = OUTPUTS[kind.gives].encoder(model.labels, model.output)
    batch: list[tuple[Name, np.ndarray]] = []

    def run() -> Iterator[tuple[Name, dict[str, Any]]]:
        for (name, _), row in zip(batch, rows_of(model, [one for _, one in batch]), strict=True):
            if isinstance(row, Exception):
                refuse(name, row)
            else:
                yield name, json.loads(encode([row], top_k, "")[1])
        batch.clear()

    for name, one in inputs:
        try:
            batch.append((name, model.prepare(one, max_pixels) if kind.takes == "image" else model.spec.prepare(one)))
        except (ValueError, OSError) as error:
            refuse(name, error)
        if len(batch) == BATCH_SIZE:
            yield from run()
    if batch:
        yield from run()
