"""Define what each kind of answer looks like: as JSON, in OpenAPI, in the table of `predict` and in an MLflow model.

A new kind of answer is a class here, with its row in `OUTPUTS`, and a row in `deeplightning.kinds`. Letters:
C channels, H height, W width, K classes, T targets.
"""

import base64
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from deeplightning.kinds import CLASS_COLOURS
from serve.schemas import BASE64, NUMBER, SHARE, SIDE, JsonObject, list_of, object_of, ref

JSON, PNG = "application/json", "image/png"

_WHOLE_SHARES = {0.0: "0.0", 1.0: "1.0"}

Encoder = Callable[[list[np.ndarray], int, str], tuple[str, bytes]]
"""Return the content type and the body for a request's rows of the model's output, top_k and the Accept header."""


class Output(ABC):
    """A kind of answer.

    Attributes:
        columns: columns of an MLflow model's predictions, with MLflow's types; None: a list.
        name: name of the schema of one answer; its plural is the schema of several.
        picture: key of the PNG in an answer, for answers that are pictures.
    """

    columns: ClassVar[Sequence[tuple[str, str | None]]]
    name: ClassVar[str] = "Prediction"
    picture: ClassVar[str] = ""

    @abstractmethod
    def encoder(self, labels: list[str], details: Mapping[str, Any]) -> Encoder:
        """Return the encoder of answers.

        Args:
            labels: names of the classes or targets.
            details: `output` of the bundle's card: half widths or thresholds.
        """

    @abstractmethod
    def schema(self, labels: list[str]) -> JsonObject:
        """Return the OpenAPI schema of one answer."""

    @abstractmethod
    def row(self, answer: JsonObject) -> JsonObject:
        """Return an answer's columns in the table of `predict`, without the picture."""

    def record(self, answer: JsonObject) -> JsonObject:
        """Return a value for each of `columns`."""
        return answer


class Classification(Output):
    """The most probable classes, from rows float32 (K,)."""

    columns = (("class", "long"), ("label", "string"), ("probability", "double"))

    def encoder(self, labels: list[str], details: Mapping[str, Any]) -> Encoder:
        """Build the JSON text itself: a JSON encoder takes six times as long, and only the labels need escaping."""
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

    def schema(self, labels: list[str]) -> JsonObject:
        each = object_of(**_of_class(labels), probability=SHARE)
        return object_of(
            predicted_class={"type": "string", "pattern": "^[0-9]+$", "description": "The class's number, from 0."},
            predicted_probability={"type": "string", "pattern": r"^[01]\.[0-9]+$", "description": "0 to 1."},
            label=ref("Label"),
            predictions={**list_of(each, 1, len(labels)), "description": "The most probable classes, best first."},
        )

    def row(self, answer: JsonObject) -> JsonObject:
        return {f"predicted_{key}": value for key, value in self.record(answer).items()}

    def record(self, answer: JsonObject) -> JsonObject:
        number, probability = int(answer["predicted_class"]), float(answer["predicted_probability"])
        return {"class": number, "label": answer["label"], "probability": probability}


class Regression(Output):
    """Numbers, from rows float32 (T,), with intervals if there are half widths, (T,)."""

    columns = (("predicted_value", "double"), ("predictions", None))

    def encoder(self, labels: list[str], details: Mapping[str, Any]) -> Encoder:
        half_widths = details.get("half_widths") or ()

        def one(row: np.ndarray) -> str:
            values = [float(f"{value:.9g}") for value in row.tolist()]
            predictions: list[JsonObject] = [{"name": name, "value": v} for name, v in zip(labels, values, strict=True)]
            for prediction, width in zip(predictions, half_widths, strict=False):
                prediction |= {"low": prediction["value"] - width, "high": prediction["value"] + width}
            return json.dumps({"predicted_value": values[0], "predictions": predictions}, ensure_ascii=False)

        return lambda rows, top_k, accept: (JSON, _one_or_list([one(row) for row in rows]))

    def schema(self, labels: list[str]) -> JsonObject:
        each = object_of(name={"type": "string", "enum": labels}, value=NUMBER)
        each["properties"] |= {"low": NUMBER, "high": NUMBER}
        return object_of(predicted_value=NUMBER, predictions=list_of(each, len(labels), len(labels)))

    def row(self, answer: JsonObject) -> JsonObject:
        return {
            f"{'predicted' if key == 'value' else key}_{one['name']}": one[key]
            for one in answer["predictions"]
            for key in ("value", "low", "high")
            if key in one
        }


class Multilabel(Output):
    """Labels, from rows float32 (K,): those whose probability reaches their threshold, and all in descending order."""

    columns = (("labels", None), ("predictions", None))

    def encoder(self, labels: list[str], details: Mapping[str, Any]) -> Encoder:
        thresholds: list[float] = details["thresholds"]

        def one(row: np.ndarray) -> str:
            predictions = [
                {"class": n, "label": labels[n], "probability": float(f"{row[n]:.9g}"), "threshold": thresholds[n]}
                for n in (-row).argsort(kind="stable").tolist()
            ]
            chosen = [one["label"] for one in predictions if float(row[one["class"]]) >= thresholds[one["class"]]]
            return json.dumps({"labels": chosen, "predictions": predictions}, ensure_ascii=False)

        return lambda rows, top_k, accept: (JSON, _one_or_list([one(row) for row in rows]))

    def schema(self, labels: list[str]) -> JsonObject:
        each = object_of(**_of_class(labels), probability=SHARE, threshold=SHARE)
        chosen = "Those whose probability is at least their threshold, most probable first."
        return object_of(
            labels={**list_of(ref("Label"), 0, len(labels)), "description": chosen},
            predictions={**list_of(each, len(labels), len(labels)), "description": "All labels, most probable first."},
        )

    def row(self, answer: JsonObject) -> JsonObject:
        by_number = sorted(answer["predictions"], key=lambda one: one["class"])
        chosen = [one["label"] for one in by_number if one["label"] in answer["labels"]]
        probabilities = {f"probability_{one['label']}": one["probability"] for one in by_number}
        return {"predicted_labels": "|".join(chosen)} | probabilities


class Segmentation(Output):
    """A mask, from rows float32 (K, H, W), and the number of pixels of each class.

    The mask is a palette PNG whose values are the classes of the pixels. A client that accepts PNG gets only the PNG
    for a single picture.
    """

    columns = (("mask", "string"), ("height", "long"), ("width", "long"), ("classes", None))
    name = "Mask"
    picture = "mask"

    def encoder(self, labels: list[str], details: Mapping[str, Any]) -> Encoder:
        palette = [CLASS_COLOURS[n % len(CLASS_COLOURS)] for n in range(len(labels))]
        colours = ["#{:02x}{:02x}{:02x}".format(*colour) for colour in palette]

        def one(mask: np.ndarray, png: bytes) -> str:
            counts = np.bincount(mask.ravel(), minlength=len(labels)).tolist()
            classes = [
                {"class": n, "label": name, "pixels": counts[n], "share": counts[n] / mask.size, "colour": colours[n]}
                for n, name in enumerate(labels)
            ]
            described = {"mask": base64.b64encode(png).decode(), "height": mask.shape[0], "width": mask.shape[1]}
            return json.dumps({**described, "classes": classes}, ensure_ascii=False)

        def answer(rows: list[np.ndarray], top_k: int, accept: str) -> tuple[str, bytes]:
            masks = [row.argmax(0).astype(np.uint8) for row in rows]  # (H, W) each
            pngs = [png_of(mask[None], [value for colour in palette for value in colour]) for mask in masks]
            if len(pngs) == 1 and _prefers_png(accept):
                return PNG, pngs[0]
            return JSON, _one_or_list([one(mask, png) for mask, png in zip(masks, pngs, strict=True)])

        return answer

    def schema(self, labels: list[str]) -> JsonObject:
        colour = {"type": "string", "pattern": "^#[0-9a-f]{6}$", "description": "Colour of the class in the PNG."}
        pixels = {"type": "integer", "minimum": 0}
        each = object_of(**_of_class(labels), pixels=pixels, share=SHARE, colour=colour)
        mask = "A palette PNG as base64; the value of a pixel is the number of its class."
        classes = list_of(each, len(labels), len(labels))
        return object_of(mask={**BASE64, "description": mask}, height=SIDE, width=SIDE, classes=classes)

    def row(self, answer: JsonObject) -> JsonObject:
        return {f"share_{one['label']}": one["share"] for one in answer["classes"]}


class Reconstruction(Output):
    """A PNG, from rows float32 (C, H, W), 0 to 1; in base64 unless a client accepts PNG for a single picture."""

    columns = (("image", "string"),)
    name = "Picture"
    picture = "image"

    def encoder(self, labels: list[str], details: Mapping[str, Any]) -> Encoder:
        def answer(rows: list[np.ndarray], top_k: int, accept: str) -> tuple[str, bytes]:
            pictures = [png_of(np.rint(row.clip(0, 1) * 255).astype(np.uint8)) for row in rows]
            if len(pictures) == 1 and _prefers_png(accept):
                return PNG, pictures[0]
            return JSON, _one_or_list([f'{{"image": "{base64.b64encode(png).decode()}"}}' for png in pictures])

        return answer

    def schema(self, labels: list[str]) -> JsonObject:
        return object_of(image={**BASE64, "description": "A PNG as base64."})

    def row(self, answer: JsonObject) -> JsonObject:
        return {}


OUTPUTS: dict[str, Output] = {
    "classification": Classification(),
    "reconstruction": Reconstruction(),
    "regression": Regression(),
    "multilabel": Multilabel(),
    "segmentation": Segmentation(),
}
"""Kinds of answer by their names in `deeplightning.kinds.OUTPUTS`."""


def png_of(pixels: np.ndarray, palette: list[int] | None = None) -> bytes:
    """Return a picture, uint8 (C, H, W), as a PNG; palette indices have C = 1."""
    file = io.BytesIO()
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    if palette is not None:
        image.putpalette(palette)
    image.save(file, "PNG")
    return file.getvalue()


def _prefers_png(accept: str) -> bool:
    """Return whether an Accept header prefers image/png to JSON (RFC 9110, section 12.5.1)."""
    if "image/" not in accept.lower():
        return False
    from werkzeug.datastructures import MIMEAccept  # an MLflow model has no Accept header
    from werkzeug.http import parse_accept_header

    return parse_accept_header(accept, MIMEAccept).best_match([JSON, PNG]) == PNG


def _one_or_list(texts: list[str]) -> bytes:
    return (texts[0] if len(texts) == 1 else f'{{"predictions": [{", ".join(texts)}]}}').encode()


def _of_class(labels: list[str]) -> JsonObject:
    return {"class": {"type": "integer", "minimum": 0, "maximum": len(labels) - 1}, "label": ref("Label")}
