"""Describe the endpoints in OpenAPI 3.0 (https://spec.openapis.org/oas/v3.0.3), for code generators.

The document describes one server: its task, its limits, and whether it requires a key.
"""

import csv
import io
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deeplightning.kinds import KINDS, Kind

if TYPE_CHECKING:
    from deeplightning.table_spec import TableSpec
    from serve.limits import Limits
    from serve.model import Model

JsonObject = dict[str, Any]

MAX_SHOWN = 200
"""Maximum number of elements of an array that is shown as an example."""

TEXT = {"type": "string"}
NUMBER = {"type": "number"}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
SIDE = {"type": "integer", "minimum": 1}
BINARY = {"type": "string", "format": "binary"}
BASE64 = {"type": "string", "format": "byte"}

_ANSWERS = {"reconstruction": "Picture", "segmentation": "Mask"}
"""Schema of one answer by the kind of output; `Prediction` for other kinds. The plural is the schema of several."""


def _header(name: str, description: str, **schema: object) -> JsonObject:
    return {name: {"description": description, "required": True, "schema": schema}}


REQUEST_ID = _header(
    "X-Request-ID",
    "Identifies the request in the server's log: the client's id if it sent one, else a new one.",
    type="string",
    pattern="^[A-Za-z0-9._-]{1,64}$",
)
RETRY_AFTER = _header("Retry-After", "Seconds to wait before sending the request again.", type="integer", minimum=1)
CHALLENGE = _header("WWW-Authenticate", "How to send the key.", type="string", pattern="^Bearer")


def _parameter(name: str, description: str, **schema: object) -> JsonObject:
    return {"name": name, "in": "query", "description": description, "schema": schema}


SHOW = _parameter("show", "Adds to each prediction the picture as the network sees it.", type="string", enum=["input"])
TOP_K = _parameter(
    "top_k",
    "Number of classes to return, most probable first.",
    type="integer",
    minimum=1,
    maximum=999_999_999,
    default=5,
)


def describe(model: "Model", limits: "Limits", secured: bool) -> JsonObject:
    """Return the document at `/openapi.json`; if `secured`, clients must send a key."""
    kind = KINDS[model.task]
    samples = "Samples of the run, for trying the model; none if anyone may use the server without a key."
    ready = _get("Answers 200 while the server accepts requests: once the model is loaded and checked.", _ref("Status"))
    ready["responses"]["503"] = _error("The server is starting or shutting down.")
    gets = {
        "/health": _get("Answers while the server is alive.", _ref("Status")),
        "/ready": ready,
        "/metrics": _get("Counts and times for Prometheus.", TEXT, "text/plain"),
        "/info": _get("The task, labels, input, limits, and the run that the model comes from.", _ref("Info")),
        "/samples": _get(samples, _ref("Samples")),
        "/openapi.json": _get("This document.", {"type": "object"}),
        "/docs": _get("This document as a page.", TEXT, "text/html"),
        "/": _get("A page for trying the model.", TEXT, "text/html"),
    }
    paths = {"/predict": {"post": _predict(model, kind, limits)}} | {path: {"get": one} for path, one in gets.items()}
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
    size = {
        "image": f" of at most {limits.max_pixels:,} pixels, and {limits.max_side:,} on a side",
        "text": f" of at most {limits.max_text:,} bytes",
    }
    what = f": {', '.join(model.labels)}" if kind.gives == "regression" else ""
    return (
        f"{kind.nouns.capitalize()} go in, {kind.output} come out{what}. One request carries at most "
        f"{limits.max_upload_mb} MB and {limits.max_images} {kind.nouns}{size.get(kind.takes, '')}."
    )


def _predict(model: "Model", kind: Kind, limits: "Limits") -> JsonObject:
    what = kind.nouns
    one = what.removesuffix("s")
    parameters = [TOP_K] * (kind.gives == "classification") + [SHOW] * (kind.takes == "image")
    return {
        "summary": f"The model's answer to each of the {what}.",
        "operationId": "predict",
        **({"parameters": parameters} if parameters else {}),
        "requestBody": {"required": True, "content": _content(model, kind, limits.max_images)},
        "responses": {
            "200": _success(kind),
            "400": _error(f"The {one} is missing, damaged or not what the network takes, or the request is malformed."),
            "408": _error("The request was sent too slowly."),
            "413": _error(f"The request, the number of {what}, or one of them is too large."),
            "415": _error(f"The type of the body or of the {one} is not supported."),
            "429": _error("More requests are waiting than can be answered in time.", RETRY_AFTER),
            **_faults(),
            "504": _error("The request waited too long and was not answered."),
        },
    }


# ---- request bodies


def _content(model: "Model", kind: Kind, most: int) -> JsonObject:
    """Return the accepted content types with their schemas."""
    spec, example = model.spec, model.example
    if kind.takes == "table":
        return _row_bodies(spec, most, example)
    if kind.takes == "array":
        return _array_bodies(spec, most, example)
    if kind.takes == "text":
        text = {"type": "string", "minLength": 1}
        document = _one_key("Either key, not both.", texts=_list(text, 1, most), text=text)
        return {
            "application/json": {"schema": document, "example": {"texts": ["a fine film", "dull"]}},
            "text/plain": {"schema": text, "example": "a fine film"},
        }
    encoded = {**BASE64, "minLength": 1}
    form = {"type": "object", "required": ["image"], "properties": {"image": _list(BINARY, 1, most)}}
    document = _one_key("Image files as base64. Either key, not both.", images=_list(encoded, 1, most), image=encoded)
    return {
        "multipart/form-data": {"schema": form},
        "image/*": {"schema": BINARY},
        "application/octet-stream": {"schema": BINARY},
        "application/json": {"schema": document},
    }


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
        "application/json": {"schema": _one_key("One key, not several.", rows=_list(row, 1, most), row=row)},
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
        values = [
            str(value).replace(".", spec.format.decimal) if isinstance(value, float) else value
            for value in given.values()
        ]
        table = io.StringIO()
        csv.writer(table, delimiter=spec.format.delimiter, lineterminator="\n").writerows([given, values])
        bodies["application/json"]["example"] = {"rows": [given]}
        bodies["text/csv"]["example"] = table.getvalue()
    return bodies


def _array_bodies(spec: Any, most: int, example: object) -> JsonObject:
    array: JsonObject = NUMBER
    for side in reversed(spec.shape):
        array = _list(array, side, side)
        if array["items"] is NUMBER and spec.takes_any_length:
            array = {"type": "array", "items": NUMBER, "minItems": 1}
    names = ("arrays", "array", "signals", "signal")
    keys = {name: _list(array, 1, most) if name.endswith("s") else array for name in names}
    document: JsonObject = {"schema": _one_key("One key, not several.", **keys)}
    if example is not None and math.prod(spec.shape) <= MAX_SHOWN:
        document["example"] = {"arrays": [example]}
    npy = {"schema": BINARY}
    return {"application/json": document, "application/octet-stream": npy, "application/x-npy": npy}


# ---- responses


def _success(kind: Kind) -> JsonObject:
    name = _ANSWERS.get(kind.gives, "Prediction")
    schema = {"oneOf": [_ref(name), _ref(f"{name}s")]}
    if name == "Prediction":
        one = kind.nouns.removesuffix("s")
        return _answer(f"One {one} gets a Prediction, several get Predictions in the same order.", schema)
    rule = f"One image gets a {name}, or the PNG itself if Accept has image/png; several get {name}s"
    answer = _answer(f"{rule} in the same order.", schema)
    answer["content"]["image/png"] = {"schema": BINARY}
    return answer


def _schemas(model: "Model", kind: Kind, limits: "Limits") -> JsonObject:
    name, answer = _ANSWERS.get(kind.gives, "Prediction"), _answer_schema(kind, model.labels)
    if kind.takes == "image":
        answer["properties"]["input"] = {**BASE64, "description": "With show=input: a PNG as base64."}
    has_classes = kind.gives not in ("reconstruction", "regression")
    sample = TEXT if kind.takes in ("image", "text") else {}
    return {
        name: answer,
        f"{name}s": _object(predictions=_list(_ref(name), 2, limits.max_images)),
        **({"Label": {"type": "string", "enum": model.labels}} if has_classes else {}),
        "Samples": _object(samples={"type": "array", "description": "As /predict takes them.", "items": sample}),
        "Status": _object(status=TEXT),
        "Info": _object(
            task={"type": "string", "enum": [model.task]},
            labels={"type": "array", "items": TEXT},
            input={"type": "object", "description": "How an input is prepared."},
            run={"type": "object"},
            limits=_object(**dict.fromkeys(asdict(limits), NUMBER)),
            samples={"type": "integer", "minimum": 0, "description": "Number of items in /samples."},
        ),
        "Error": {
            **_object(ERROR={"type": "string", "minLength": 1, "description": "What is wrong, and what to do."}),
            "additionalProperties": False,
        },
    }


def _answer_schema(kind: Kind, labels: list[str]) -> JsonObject:
    """Return the schema of the answer to one input."""
    if kind.gives == "reconstruction":
        return _object(image={**BASE64, "description": "A PNG as base64."})
    most = len(labels)
    if kind.gives == "regression":
        prediction = _object(name={"type": "string", "enum": labels}, value=NUMBER)
        prediction["properties"] |= {"low": NUMBER, "high": NUMBER}
        return _object(predicted_value=NUMBER, predictions=_list(prediction, most, most))
    one = {"class": {"type": "integer", "minimum": 0, "maximum": most - 1}, "label": _ref("Label")}
    if kind.gives == "multilabel":
        each = _object(**one, probability=SHARE, threshold=SHARE)
        chosen = "Those whose probability is at least their threshold, most probable first."
        return _object(
            labels={**_list(_ref("Label"), 0, most), "description": chosen},
            predictions={**_list(each, most, most), "description": "All labels, most probable first."},
        )
    if kind.gives == "segmentation":
        colour = {"type": "string", "pattern": "^#[0-9a-f]{6}$", "description": "Colour of the class in the PNG."}
        each = _object(**one, pixels={"type": "integer", "minimum": 0}, share=SHARE, colour=colour)
        mask = "A palette PNG as base64; the value of a pixel is the number of its class."
        return _object(mask={**BASE64, "description": mask}, height=SIDE, width=SIDE, classes=_list(each, most, most))
    each = _object(**one, probability=SHARE)
    return _object(
        predicted_class={"type": "string", "pattern": "^[0-9]+$", "description": "The class's number, from 0."},
        predicted_probability={"type": "string", "pattern": r"^[01]\.[0-9]+$", "description": "0 to 1."},
        label=_ref("Label"),
        predictions={**_list(each, 1, most), "description": "The most probable classes, best first."},
    )


# ---- parts of the document


def _get(summary: str, schema: JsonObject, kind: str = "application/json") -> JsonObject:
    return {"summary": summary, "responses": {"200": _answer(summary, schema, kind), **_faults()}}


def _faults() -> JsonObject:
    """Return the errors that every route may answer with."""
    return {
        "421": _error("The server does not accept the host name of the request."),
        "500": _error("Internal server error."),
        "501": _error("The request has an unknown method, or a Transfer-Encoding other than chunked."),
    }


def _error(description: str, headers: JsonObject | None = None) -> JsonObject:
    answer = _answer(description, _ref("Error"))
    return {**answer, "headers": {**REQUEST_ID, **(headers or {})}}


def _answer(description: str, schema: JsonObject, kind: str = "application/json") -> JsonObject:
    return {"description": description, "headers": REQUEST_ID, "content": {kind: {"schema": schema}}}


def _list(items: JsonObject, least: int, most: int) -> JsonObject:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _object(**properties: JsonObject) -> JsonObject:
    """Return the schema of an object that has all of these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _one_key(description: str, **properties: JsonObject) -> JsonObject:
    """Return the schema of an object that has exactly one of these properties."""
    return {
        "type": "object",
        "description": description,
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": properties,
    }


def _ref(name: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name}"}
