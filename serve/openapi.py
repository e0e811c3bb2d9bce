"""Describe the endpoints in OpenAPI 3.0 (https://spec.openapis.org/oas/v3.0.3), for code generators.

The document describes one server: its task, its limits, and whether it requires a key.
"""

import csv
import io
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deeplightning.kinds import KINDS, Kind
from serve.outputs import OUTPUTS
from serve.schemas import BASE64, BINARY, NUMBER, TEXT, JsonObject, list_of, object_of, ref

if TYPE_CHECKING:
    from deeplightning.table_spec import TableSpec
    from serve.limits import Limits
    from serve.model import Model

MAX_SHOWN = 200
"""Maximum number of elements of an array that is shown as an example."""


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
    ready = _get("Answers 200 while the server accepts requests: once the model is loaded and checked.", ref("Status"))
    ready["responses"]["503"] = _error("The server is starting or shutting down.", RETRY_AFTER)
    gets = {
        "/health": _get("Answers while the server is alive.", ref("Status")),
        "/ready": ready,
        "/metrics": _get("Counts and times for Prometheus.", TEXT, "text/plain"),
        "/info": _get("The task, labels, input, limits, and the run that the model comes from.", ref("Info")),
        "/samples": _get(samples, ref("Samples")),
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
    what = f": {', '.join(model.labels)}" if kind.labelled and not kind.has_choices else ""
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
            "503": _error("There is too little memory, or there are too many connections.", RETRY_AFTER),
            "504": _error("The request waited too long and was not answered.", RETRY_AFTER),
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
        document = _one_key("Either key, not both.", texts=list_of(text, 1, most), text=text)
        return {
            "application/json": {"schema": document, "example": {"texts": ["a fine film", "dull"]}},
            "text/plain": {"schema": text, "example": "a fine film"},
        }
    encoded = {**BASE64, "minLength": 1}
    form = {"type": "object", "required": ["image"], "properties": {"image": list_of(BINARY, 1, most)}}
    document = _one_key("Image files as base64. Either key, not both.", images=list_of(encoded, 1, most), image=encoded)
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
    row = object_of(**columns)
    bodies: JsonObject = {
        "application/json": {"schema": _one_key("One key, not several.", rows=list_of(row, 1, most), row=row)},
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
        values = [str(v).replace(".", spec.format.decimal) if isinstance(v, float) else v for v in given.values()]
        table = io.StringIO()
        csv.writer(table, delimiter=spec.format.delimiter, lineterminator="\n").writerows([given, values])
        bodies["application/json"]["example"] = {"rows": [given]}
        bodies["text/csv"]["example"] = table.getvalue()
    return bodies


def _array_bodies(spec: Any, most: int, example: object) -> JsonObject:
    array: JsonObject = NUMBER
    for side in reversed(spec.shape):
        array = list_of(array, side, side)
        if array["items"] is NUMBER and spec.takes_any_length:
            array = {"type": "array", "items": NUMBER, "minItems": 1}
    names = ("arrays", "array", "signals", "signal")
    keys = {name: list_of(array, 1, most) if name.endswith("s") else array for name in names}
    document: JsonObject = {"schema": _one_key("One key, not several.", **keys)}
    if example is not None and math.prod(spec.shape) <= MAX_SHOWN:
        document["example"] = {"arrays": [example]}
    npy = {"schema": BINARY}
    return {"application/json": document, "application/octet-stream": npy, "application/x-npy": npy}


# ---- responses


def _success(kind: Kind) -> JsonObject:
    output = OUTPUTS[kind.gives]
    name = output.name
    schema = {"oneOf": [ref(name), ref(f"{name}s")]}
    if not output.picture:
        one = kind.nouns.removesuffix("s")
        return _answer(f"One {one} gets a {name}, several get {name}s in the same order.", schema)
    rule = f"One image gets a {name}, or the PNG itself if Accept prefers image/png to JSON; several get {name}s"
    answer = _answer(f"{rule} in the same order.", schema)
    answer["content"]["image/png"] = {"schema": BINARY}
    return answer


def _schemas(model: "Model", kind: Kind, limits: "Limits") -> JsonObject:
    output = OUTPUTS[kind.gives]
    name, answer = output.name, output.schema(model.labels)
    if kind.takes == "image":
        answer["properties"]["input"] = {**BASE64, "description": "With show=input: a PNG as base64."}
    sample = TEXT if kind.takes in ("image", "text") else {}
    return {
        name: answer,
        f"{name}s": object_of(predictions=list_of(ref(name), 2, limits.max_images)),
        **({"Label": {"type": "string", "enum": model.labels}} if kind.has_choices else {}),
        "Samples": object_of(samples={"type": "array", "description": "As /predict takes them.", "items": sample}),
        "Status": object_of(status=TEXT),
        "Info": object_of(
            task={"type": "string", "enum": [model.task]},
            labels={"type": "array", "items": TEXT},
            input={"type": "object", "description": "How an input is prepared."},
            run={"type": "object"},
            limits=object_of(**dict.fromkeys(asdict(limits), NUMBER)),
            samples={"type": "integer", "minimum": 0, "description": "Number of items in /samples."},
        ),
        "Error": {
            **object_of(ERROR={"type": "string", "minLength": 1, "description": "What is wrong, and what to do."}),
            "additionalProperties": False,
        },
    }


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
    answer = _answer(description, ref("Error"))
    return {**answer, "headers": {**REQUEST_ID, **(headers or {})}}


def _answer(description: str, schema: JsonObject, kind: str = "application/json") -> JsonObject:
    return {"description": description, "headers": REQUEST_ID, "content": {kind: {"schema": schema}}}


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
