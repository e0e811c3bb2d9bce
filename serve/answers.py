"""Encode the model's output as the body of a response; `answers` answers inputs in this process, without HTTP, as a
server would. Letters: C channels, H height, W width, K classes, T targets."""

import base64
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from deeplightning.kinds import CLASS_COLOURS, KINDS
from serve.limits import Refusal

DEFAULT_TOP_K = 5

BATCH_SIZE = 16
"""Inputs in one forward pass."""

JSON, PNG = "application/json", "image/png"

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of every response."""

_WHOLE_SHARES = {0.0: "0.0", 1.0: "1.0"}

Name = TypeVar("Name")

Encoder = Callable[[list[np.ndarray], int, str], tuple[str, bytes]]
"""Return the content type and the body for a request's rows of the model's output, top_k and the Accept header."""


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


def encoder(task: str, labels: list[str], output: Mapping[str, Any] = MappingProxyType({})) -> Encoder:
    """Return the encoder of a task's answers.

    Args:
        task: a name in `deeplightning.kinds.KINDS`.
        labels: names of the classes or targets.
        output: `output` of the bundle's card: half widths or thresholds.
    """
    gives = KINDS[task].gives
    if gives == "regression":
        return _numbers(labels, output.get("half_widths"))
    if gives == "multilabel":
        return _labels(labels, output["thresholds"])
    if gives == "segmentation":
        return _masks(labels)
    return _pictures if gives == "reconstruction" else _classes(labels)


def _classes(labels: list[str]) -> Encoder:
    """Return an encoder of rows float32 (K,). It builds the JSON text itself: a JSON encoder takes six times as long,
    and only the labels need escaping."""
    heads = [f'{{"class": {n}, "label": {json.dumps(label)}, "probability": ' for n, label in enumerate(labels)]
    names = [json.dumps(label) for label in labels]

    def one(row: np.ndarray, top_k: int) -> str:
        best = (-row).argsort(kind="stable")[:top_k].tolist()
        # Nine digits distinguish float32s.
        shares = [_WHOLE_SHARES.get(share) or f"{share:.9g}" for share in row[best].tolist()]
        predictions = ", ".join([f"{heads[n]}{share}}}" for n, share in zip(best, shares, strict=True)])
        return (
            f'{{"predicted_class": "{best[0]}", "predicted_probability": "{shares[0]}", '
            f'"label": {names[best[0]]}, "predictions": [{predictions}]}}'
        )

    return lambda rows, top_k, accept: (JSON, _one_or_list([one(row, top_k) for row in rows]))


def _numbers(names: list[str], half_widths: list[float] | None) -> Encoder:
    """Return an encoder of rows float32 (T,), with intervals if there are half widths, (T,)."""

    def one(row: np.ndarray) -> str:
        values = [float(f"{value:.9g}") for value in row.tolist()]
        predictions: list[dict[str, Any]] = [
            {"name": name, "value": value} for name, value in zip(names, values, strict=True)
        ]
        for prediction, width in zip(predictions, half_widths or (), strict=False):
            prediction |= {"low": prediction["value"] - width, "high": prediction["value"] + width}
        return json.dumps({"predicted_value": values[0], "predictions": predictions}, ensure_ascii=False)

    return lambda rows, top_k, accept: (JSON, _one_or_list([one(row) for row in rows]))


def _labels(names: list[str], thresholds: list[float]) -> Encoder:
    """Return an encoder of rows float32 (K,). It returns the labels whose probability reaches their threshold, and
    all probabilities in descending order."""

    def one(row: np.ndarray) -> str:
        predictions = [
            {"class": n, "label": names[n], "probability": float(f"{row[n]:.9g}"), "threshold": thresholds[n]}
            for n in (-row).argsort(kind="stable").tolist()
        ]
        chosen = [one["label"] for one in predictions if float(row[one["class"]]) >= thresholds[one["class"]]]
        return json.dumps({"labels": chosen, "predictions": predictions}, ensure_ascii=False)

    return lambda rows, top_k, accept: (JSON, _one_or_list([one(row) for row in rows]))


def _masks(names: list[str]) -> Encoder:
    """Return an encoder of rows float32 (K, H, W). It returns a mask, a palette PNG whose values are the classes of the
    pixels, and the number of pixels of each class; or only the PNG if the client accepts it for a single picture."""
    palette = [CLASS_COLOURS[n % len(CLASS_COLOURS)] for n in range(len(names))]
    colours = ["#{:02x}{:02x}{:02x}".format(*colour) for colour in palette]

    def one(mask: np.ndarray, png: bytes) -> str:
        counts = np.bincount(mask.ravel(), minlength=len(names)).tolist()
        classes = [
            {"class": n, "label": name, "pixels": counts[n], "share": counts[n] / mask.size, "colour": colours[n]}
            for n, name in enumerate(names)
        ]
        described = {"mask": base64.b64encode(png).decode(), "height": mask.shape[0], "width": mask.shape[1]}
        return json.dumps({**described, "classes": classes}, ensure_ascii=False)

    def answer(rows: list[np.ndarray], top_k: int, accept: str) -> tuple[str, bytes]:
        masks = [row.argmax(0).astype(np.uint8) for row in rows]  # (H, W) each
        pngs = [_png(mask[None], [value for colour in palette for value in colour]) for mask in masks]
        if len(pngs) == 1 and PNG in accept:
            return PNG, pngs[0]
        return JSON, _one_or_list([one(mask, png) for mask, png in zip(masks, pngs, strict=True)])

    return answer


def _pictures(rows: list[np.ndarray], top_k: int, accept: str) -> tuple[str, bytes]:
    """Encode rows float32 (C, H, W), 0 to 1: a PNG if the client accepts it for a single picture, else base64."""
    pictures = [_png(np.rint(row.clip(0, 1) * 255).astype(np.uint8)) for row in rows]
    if len(pictures) == 1 and PNG in accept:
        return PNG, pictures[0]
    return JSON, _one_or_list([f'{{"image": "{base64.b64encode(png).decode()}"}}' for png in pictures])


def with_inputs(body: bytes, inputs: Sequence[np.ndarray]) -> bytes:
    """Add to a JSON answer the network's inputs, uint8 (C, H, W), each as `input`, a PNG in base64."""
    document = json.loads(body)
    for one, pixels in zip(document["predictions"] if len(inputs) > 1 else [document], inputs, strict=True):
        one["input"] = base64.b64encode(_png(pixels)).decode()
    return json.dumps(document, ensure_ascii=False).encode()


def _png(pixels: np.ndarray, palette: list[int] | None = None) -> bytes:
    """Return a picture, uint8 (C, H, W), as a PNG; palette indices have C = 1."""
    file = io.BytesIO()
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    if palette is not None:
        image.putpalette(palette)
    image.save(file, "PNG")
    return file.getvalue()


def _one_or_list(texts: list[str]) -> bytes:
    return (texts[0] if len(texts) == 1 else f'{{"predictions": [{", ".join(texts)}]}}').encode()


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
    encode = encoder(model.task, model.labels, model.output)
    takes = KINDS[model.task].takes
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
            batch.append((name, model.prepare(one, max_pixels) if takes == "image" else model.spec.prepare(one)))
        except (ValueError, OSError) as error:
            refuse(name, error)
        if len(batch) == BATCH_SIZE:
            yield from run()
    if batch:
        yield from run()
