"""Describe the endpoints in OpenAPI 3.0 (https://spec.openapis.org/oas/v3.0.3), for code generators.

The document describes one server: its task, its limits, and whether it requires a key.
"""

import csv
import io
import math
from typing import TYPE_CHECKING, Any

from deeplightning.kinds import KINDS, Kind

if TYPE_CHECKING:
    from deeplightning.table_spec import TableSpec
    from serve.batching import Model
    from serve.limits import Limits

JsonObject = dict[str, Any]

MAX_SHOWN = 200
"""Maximum number of elements of an array that is shown as an example."""

REQUEST_ID = {
    "X-Request-ID": {
        "description": "Names the request in the server's log: the client's own, where it sent one, or a new one.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
    }
}
RETRY_AFTER = {
    "Retry-After": {
        "description": "Seconds after which the same request may find room.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    }
}
CHALLENGE = {
    "WWW-Authenticate": {
        "description": "How to send the key.",
        "required": True,
        "schema": {"type": "string", "pattern": "^Bearer"},
    }
}


SHOW = {
    "name": "show",
    "in": "query",
    "description": "What each prediction has besides: the picture as it reaches the network.",
    "schema": {"type": "string", "enum": ["input"]},
}

_PAGES = {"image": "to drop an image on", "text": "to write a text on", "table": "to fill in a row"}
_SEVERAL = {"image": "images", "text": "texts", "table": "rows", "array": "arrays"}


def describe(model: "Model", limits: "Limits", secured: bool) -> JsonObject:
    """Return the document at `/openapi.json`.

    Args:
        model: the model that answers.
        limits: limits of a request.
        secured: whether clients must send a key.
    """
    kind = KINDS[model.task]
    paths = {
        "/predict": {"post": _predict(model, kind, limits)},
        "/health": {"get": _get("Answers while the server is alive.", _ref("Status"))},
        "/ready": {"get": _ready()},
        "/metrics": {"get": _get("Counts and times for Prometheus.", {"type": "string"}, "text/plain")},
        "/info": {"get": _get("The task, its labels, its input, its limits, and where it comes from.", _ref("Info"))},
        "/samples": {
            "get": _get(
                "Samples that are kept with the run, to try the model with; none where anybody may ask without a key.",
                _ref("Samples"),
            )
        },
        "/openapi.json": {"get": _get("This document.", {"type": "object"})},
        "/docs": {"get": _get("A page that shows this document to people.", {"type": "string"}, "text/html")},
        "/": {
            "get": _get(f"A page {_PAGES.get(kind.takes, 'to paste an array on')}.", {"type": "string"}, "text/html")
        },
    }
    document: JsonObject = {
        "openapi": "3.0.3",
        "info": {
            "title": model.task.replace("_", " ").capitalize(),
            "version": "1",
            "description": _describe(model, kind, limits),
        },
        "paths": paths,
        "components": {"schemas": _schemas(model, kind, limits)},
    }
    if secured:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        for path in ("/predict", "/info", "/samples", "/openapi.json", "/metrics"):
            for operation in paths[path].values():
                operation["security"] = [{"bearer": []}, {"header": []}]
                operation["responses"]["401"] = _error("The API key is missing or wrong.", CHALLENGE)
    return document


def _describe(model: "Model", kind: Kind, limits: "Limits") -> str:
    comes = {
        "classification": f"probabilities of {len(model.labels)} classes come",
        "regression": f"{', '.join(model.labels)} comes" if len(model.labels) == 1 else "numbers come",
        "segmentation": f"masks of the same size come, a class of {len(model.labels)} for each pixel,",
        "multilabel": f"those of {len(model.labels)} labels that fit, and the probabilities of all, come",
    }.get(kind.gives, "pictures of the same size come")
    what = _SEVERAL[kind.takes]
    size = {
        "image": f" of at most {limits.max_pixels:,} pixels each, and {limits.max_side:,} on a side",
        "text": f" of at most {limits.max_text:,} bytes each",
    }
    goes = "pictures" if kind.takes == "image" else what
    return (
        f"{goes.capitalize()} go in, {comes} out. One request carries at most {limits.max_upload_mb} MB and "
        f"{limits.max_images} {what}{size.get(kind.takes, '')}."
    )


def _predict(model: "Model", kind: Kind, limits: "Limits") -> JsonObject:
    what = _SEVERAL[kind.takes]
    one = what.removesuffix("s")
    large = {"text": ", or a text", "image": ", or an image's number of pixels or side"}.get(kind.takes, "")
    comma = "," if large else " or"
    operation: JsonObject = {
        "operationId": "predict",
        "requestBody": {"required": True, "content": _content(model, kind, limits.max_images)},
        "responses": {
            "200": _success(kind),
            "400": _error(f"The {one} is missing, empty or damaged, or the request is malformed."),
            "408": _error("The request came too slowly."),
            "413": _error(f"The request{comma} the number of {what}{large} is too large."),
            "415": _error(f"The body or the {one} is of a kind that is not read."),
            "429": _error("More requests wait than can be answered in time.", RETRY_AFTER),
            **_faults(),
            "504": _error("The request waited too long and was not answered."),
        },
    }
    if kind.takes == "image":
        operation = {"parameters": [SHOW], **operation}
    if kind.gives == "reconstruction":
        return {"summary": "The picture as the model paints it, or each of several.", **operation}
    if kind.gives == "segmentation":
        return {"summary": "The class of each pixel of the picture, or of each of several.", **operation}
    if kind.gives == "regression":
        return {"summary": f"The numbers that the model predicts for the {one}, or for each of several.", **operation}
    if kind.gives == "multilabel":
        return {"summary": f"Which labels does the {one} have, or each of several?", **operation}
    top_k = {
        "name": "top_k",
        "in": "query",
        "description": "How many classes to name, most probable first; at most all of them.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999, "default": 5},
    }
    summary = f"Which class is the {one} of, or each of several?"
    if kind.takes == "image":
        summary = "What is in the picture, or in each of several?"
    return {"summary": summary, **operation, "parameters": [top_k, *operation.get("parameters", [])]}


def _content(model: "Model", kind: Kind, most: int) -> JsonObject:
    """Return the accepted content types with their schemas."""
    spec: Any = getattr(model, "row_spec", None)
    example: Any = getattr(model, "example", None)
    if kind.takes == "table":
        return _row_bodies(spec, most, example)
    if kind.takes == "array":
        return _array_bodies(spec.shape, most, example)
    return (_text_bodies if kind.takes == "text" else _bodies)(most)


def _row_bodies(spec: "TableSpec", most: int, example: JsonObject | None) -> JsonObject:
    gaps = spec.missing == "fill"
    columns: JsonObject = {}
    for column in spec.columns:
        schema: JsonObject = {"type": "number" if column.kind == "number" else "string", "nullable": gaps}
        if column.kind == "category" and spec.unknown == "refuse" and not gaps:
            schema["enum"] = list(column.categories)
        columns[column.name] = schema
    row = _object(**columns)
    bodies: JsonObject = {
        "application/json": {"schema": _one_key(rows=_list(row, 1, most), row=row)},
        "text/csv": {
            "schema": {
                "type": "string",
                "description": "A header that names the columns, and one or more rows. The delimiter is recognised.",
                "pattern": r"^[\r\n]*[^\r\n]+[\r\n][\s\S]*[^\r\n]",
            }
        },
    }
    if example is not None:
        given = {name: example[name] for name in columns}  # others are ignored
        table = io.StringIO()
        values = [
            str(value).replace(".", spec.format.decimal) if isinstance(value, float) else value
            for value in given.values()
        ]
        csv.writer(table, delimiter=spec.format.delimiter, lineterminator="\n").writerows([given, values])
        bodies["application/json"]["example"] = {"rows": [given]}
        bodies["text/csv"]["example"] = table.getvalue()
    return bodies


def _array_bodies(shape: tuple[int, ...], most: int, example: object) -> JsonObject:
    array: JsonObject = {"type": "number"}
    for side in reversed(shape):
        array = _list(array, side, side)
    names = ("arrays", "array", "signals", "signal")
    keys = {name: _list(array, 1, most) if name.endswith("s") else array for name in names}
    binary = {"schema": {"type": "string", "format": "binary"}}
    document: JsonObject = {"schema": _one_key(**keys)}
    if example is not None and math.prod(shape) <= MAX_SHOWN:
        document["example"] = {"arrays": [example]}
    return {"application/json": document, "application/octet-stream": binary, "application/x-npy": binary}


def _list(items: JsonObject, least: int, most: int) -> JsonObject:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _one_key(**properties: JsonObject) -> JsonObject:
    """Return the schema of an object that has exactly one of these properties."""
    return {
        "type": "object",
        "description": "One key, not several.",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": properties,
    }


def _bodies(max_images: int) -> JsonObject:
    """Return the content types with pictures."""
    binary = {"type": "string", "format": "binary"}
    encoded = {"type": "string", "format": "byte", "minLength": 1}
    form = {
        "type": "object",
        "required": ["image"],
        "properties": {"image": {"type": "array", "items": binary, "minItems": 1, "maxItems": max_images}},
    }
    document = {
        "type": "object",
        "description": "Image files as base64. Either key, not both.",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": {
            "images": {"type": "array", "items": encoded, "minItems": 1, "maxItems": max_images},
            "image": encoded,
        },
    }
    return {
        "multipart/form-data": {"schema": form},
        "image/*": {"schema": binary},
        "application/octet-stream": {"schema": binary},
        "application/json": {"schema": document},
    }


def _text_bodies(max_texts: int) -> JsonObject:
    """Return the content types with texts."""
    text = {"type": "string", "minLength": 1}
    document = {
        "type": "object",
        "description": "Either key, not both.",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": {"texts": {"type": "array", "items": text, "minItems": 1, "maxItems": max_texts}, "text": text},
    }
    return {
        "application/json": {"schema": document, "example": {"texts": ["a fine film", "dull"]}},
        "text/plain": {"schema": text, "example": "a fine film"},
    }


def _success(kind: Kind) -> JsonObject:
    one = _SEVERAL[kind.takes].removesuffix("s")
    if kind.gives not in ("reconstruction", "segmentation"):
        return _answer(
            f"One {one} gets a Prediction, several get Predictions in their order.",
            {"oneOf": [_ref("Prediction"), _ref("Predictions")]},
        )
    name = "Picture" if kind.gives == "reconstruction" else "Mask"
    answer = _answer(
        f"One image gets a {name}, or the PNG itself where Accept asks for image/png; several get {name}s in their "
        "order.",
        {"oneOf": [_ref(name), _ref(f"{name}s")]},
    )
    answer["content"]["image/png"] = {"schema": {"type": "string", "format": "binary"}}
    return answer


def _schemas(model: "Model", kind: Kind, limits: "Limits") -> JsonObject:
    text = {"type": "string"}
    schemas = {"classification": _classes, "regression": _numbers, "multilabel": _labels, "segmentation": _masks}
    answers = schemas.get(kind.gives)
    described = _pictures(limits) if answers is None else answers(model.labels, limits)
    if kind.takes == "image":
        one = next(name for name in ("Prediction", "Picture", "Mask") if name in described)
        seen = {"type": "string", "format": "byte", "description": "With show=input: a PNG as base64."}
        described[one]["properties"]["input"] = seen
    sample: JsonObject = {"type": "string"} if kind.takes in ("image", "text") else {}
    return {
        **described,
        "Samples": _object(samples={"type": "array", "description": "As /predict takes them.", "items": sample}),
        "Status": _object(status=text),
        "Info": _object(
            task={"type": "string", "enum": [model.task]},
            labels={"type": "array", "items": text},
            input=_input(kind),
            run={"type": "object"},
            limits=_object(**{name: {"type": "number"} for name in limits.public(model.task)}),
            samples={"type": "integer", "minimum": 0, "description": "How many /samples has."},
        ),
        "Error": {
            **_object(ERROR={"type": "string", "minLength": 1, "description": "What is wrong, and what to do."}),
            "additionalProperties": False,
        },
    }


def _input(kind: Kind) -> JsonObject:
    """Return the schema of `input` in `/info`."""
    text = {"type": "string"}
    numbers = {"type": "array", "items": {"type": "number"}}
    side = {"type": "integer", "minimum": 1}
    if kind.takes == "text":
        return _object(
            tokenizer={"type": "string", "enum": ["words", "hugging_face"]},
            file=text,
            size=side,
            lower={"type": "boolean"},
            max_length={**side, "nullable": True},
            limit={**side, "nullable": True},
        )
    if kind.takes == "table":
        return _object(
            columns={"type": "array", "items": {"type": "object"}, "minItems": 1},
            unknown={"type": "string", "enum": ["other", "refuse"]},
            missing={"type": "string", "enum": ["fill", "refuse"]},
        ) | {"description": "With the key format where the table was not written with commas and decimal points."}
    if kind.takes == "array":
        return _object(shape={"type": "array", "items": side, "minItems": 1}, mean=numbers, std=numbers)
    return _object(
        height=side,
        width=side,
        mode={"type": "string", "enum": ["L", "RGB"]},
        resize={"type": "string", "enum": ["stretch", "crop", "pad"]},
        mean=numbers,
        std=numbers,
    )


def _numbers(names: list[str], limits: "Limits") -> JsonObject:
    number = {"type": "number"}
    prediction = _object(name={"type": "string", "enum": names}, value=number)
    prediction["properties"] |= {"low": number, "high": number}
    return {
        "Prediction": _object(predicted_value=number, predictions=_list(prediction, len(names), len(names))),
        "Predictions": _object(predictions=_several(_ref("Prediction"), limits)),
    }


def _labels(labels: list[str], limits: "Limits") -> JsonObject:
    share = {"type": "number", "minimum": 0, "maximum": 1}
    number = {"type": "integer", "minimum": 0, "maximum": len(labels) - 1}
    each = _object(**{"class": number}, label=_ref("Label"), probability=share, threshold=share)
    return {
        "Prediction": _object(
            labels={
                **_list(_ref("Label"), 0, len(labels)),
                "description": "Those whose probability is at least their threshold, most probable first.",
            },
            predictions={**_list(each, len(labels), len(labels)), "description": "All labels, most probable first."},
        ),
        "Predictions": _object(predictions=_several(_ref("Prediction"), limits)),
        "Label": {"type": "string", "enum": labels},
    }


def _classes(labels: list[str], limits: "Limits") -> JsonObject:
    share = {"type": "number", "minimum": 0, "maximum": 1}
    number = {"type": "integer", "minimum": 0, "maximum": len(labels) - 1}
    return {
        "Prediction": _object(
            predicted_class={"type": "string", "pattern": "^[0-9]+$", "description": "The class's number, from 0."},
            predicted_probability={"type": "string", "pattern": r"^[01]\.[0-9]+$", "description": "0 to 1."},
            label=_ref("Label"),
            predictions={
                "type": "array",
                "description": "The most probable classes, best first.",
                "minItems": 1,
                "maxItems": len(labels),
                "items": _object(**{"class": number}, label=_ref("Label"), probability=share),
            },
        ),
        "Predictions": _object(predictions=_several(_ref("Prediction"), limits)),
        "Label": {"type": "string", "enum": labels},
    }


def _masks(labels: list[str], limits: "Limits") -> JsonObject:
    count = {"type": "integer", "minimum": 0}
    each = _object(
        **{"class": {"type": "integer", "minimum": 0, "maximum": len(labels) - 1}},
        label=_ref("Label"),
        pixels=count,
        share={"type": "number", "minimum": 0, "maximum": 1},
        colour={"type": "string", "pattern": "^#[0-9a-f]{6}$", "description": "That the PNG shows the class in."},
    )
    return {
        "Mask": _object(
            mask={
                "type": "string",
                "format": "byte",
                "description": "A palette PNG as base64; the value of a pixel is the number of its class.",
            },
            height={"type": "integer", "minimum": 1},
            width={"type": "integer", "minimum": 1},
            classes=_list(each, len(labels), len(labels)),
        ),
        "Masks": _object(predictions=_several(_ref("Mask"), limits)),
        "Label": {"type": "string", "enum": labels},
    }


def _pictures(limits: "Limits") -> JsonObject:
    return {
        "Picture": _object(image={"type": "string", "format": "byte", "description": "A PNG as base64."}),
        "Pictures": _object(predictions=_several(_ref("Picture"), limits)),
    }


def _several(schema: JsonObject, limits: "Limits") -> JsonObject:
    return {"type": "array", "minItems": 2, "maxItems": limits.max_images, "items": schema}


def _ready() -> JsonObject:
    operation = _get("Answers 200 while requests are welcome: once the model is loaded and checked.", _ref("Status"))
    operation["responses"]["503"] = _error("Not yet, or not any more: the server starts or stops.")
    return operation


def _get(summary: str, schema: JsonObject, kind: str = "application/json") -> JsonObject:
    return {
        "summary": summary,
        "responses": {"200": _answer(summary, schema, kind), **_faults()},
    }


def _faults() -> JsonObject:
    """Return the errors that every route may answer with."""
    return {
        "421": _error("The server does not answer as the host that the request names."),
        "500": _error("A fault of the server."),
        "501": _error("The request has an unknown method, or a Transfer-Encoding besides chunked."),
    }


def _error(description: str, headers: JsonObject | None = None) -> JsonObject:
    answer = _answer(description, _ref("Error"))
    return {**answer, "headers": {**REQUEST_ID, **(headers or {})}}


def _answer(description: str, schema: JsonObject, kind: str = "application/json") -> JsonObject:
    return {"description": description, "headers": REQUEST_ID, "content": {kind: {"schema": schema}}}


def _object(**properties: JsonObject) -> JsonObject:
    """Return the schema of an object that has all of these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _ref(name: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name}"}
