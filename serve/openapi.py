"""What the endpoints take and give, as OpenAPI 3.0 (https://spec.openapis.org/oas/v3.0.3), for code generators."""

from typing import Any

JsonObject = dict[str, Any]


def describe(labels: list[str], max_upload_mb: int, max_pixels: int, max_images: int) -> JsonObject:
    """The document at `/openapi.json`."""
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "Image classification",
            "version": "1",
            "description": (
                f"Pictures go in, probabilities of {len(labels)} classes come out. One request carries at most "
                f"{max_upload_mb} MB and {max_images} images of at most {max_pixels:,} pixels each."
            ),
        },
        "paths": {
            "/predict": {"post": _predict(max_images)},
            "/health": {"get": _get("Answers while the server is alive.", _ref("Status"))},
            "/ready": {"get": _get("Answers once the model is loaded and checked.", _ref("Status"))},
            "/info": {
                "get": _get("The task, its labels, its input, its limits, and the run it comes from.", _ref("Info"))
            },
            "/openapi.json": {"get": _get("This document.", {"type": "object"})},
            "/": {
                "get": {
                    "summary": "A page to drop an image on.",
                    "responses": {
                        "200": {"description": "The page.", "content": {"text/html": {"schema": {"type": "string"}}}}
                    },
                }
            },
        },
        "components": {"schemas": _schemas(labels, max_images)},
    }


def _predict(max_images: int) -> JsonObject:
    binary = {"type": "string", "format": "binary"}
    encoded = {"type": "string", "format": "byte"}
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
        "summary": "What is in the picture, or in each of several?",
        "parameters": [
            {
                "name": "top_k",
                "in": "query",
                "description": "How many classes to name, most probable first; at most all of them.",
                "schema": {"type": "integer", "minimum": 1, "default": 5},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {"schema": form},
                "image/*": {"schema": binary},
                "application/octet-stream": {"schema": binary},
                "application/json": {"schema": document},
            },
        },
        "responses": {
            "200": _answer(
                "One image gets a Prediction, several get Predictions in their order.",
                {"oneOf": [_ref("Prediction"), _ref("Predictions")]},
            ),
            "400": _answer("The image is missing, empty or damaged, or the request is malformed.", _ref("Error")),
            "413": _answer(
                "The request, the number of images, or an image's number of pixels is too large.", _ref("Error")
            ),
            "415": _answer("The body or the image is of a kind that is not read.", _ref("Error")),
            "500": _answer("A fault of the server.", _ref("Error")),
        },
    }


def _schemas(labels: list[str], max_images: int) -> JsonObject:
    label = {"type": "string", "example": labels[0]}
    share = {"type": "number", "minimum": 0, "maximum": 1}
    text = {"type": "string"}
    number = {"type": "number"}
    return {
        "Prediction": _object(
            predicted_class={"type": "string", "description": "The class's number, from 0.", "example": "7"},
            predicted_probability={"type": "string", "description": "0 to 1.", "example": "0.998412"},
            label=label,
            predictions={
                "type": "array",
                "description": "The most probable classes, best first.",
                "items": _object(**{"class": {"type": "integer", "minimum": 0}}, label=label, probability=share),
            },
        ),
        "Predictions": _object(predictions={"type": "array", "maxItems": max_images, "items": _ref("Prediction")}),
        "Status": _object(status=text),
        "Info": _object(
            task=text,
            labels={"type": "array", "items": text},
            input=_object(
                height={"type": "integer"},
                width={"type": "integer"},
                mode={"type": "string", "enum": ["L", "RGB"]},
                resize={"type": "string", "enum": ["stretch", "crop", "pad"]},
                mean={"type": "array", "items": number},
                std={"type": "array", "items": number},
            ),
            run={"type": "object"},
            limits=_object(
                max_upload_mb={"type": "integer"}, max_pixels={"type": "integer"}, max_images={"type": "integer"}
            ),
        ),
        "Error": _object(ERROR={"type": "string", "description": "What is wrong, and what to do."}),
    }


def _get(summary: str, schema: JsonObject) -> JsonObject:
    return {"summary": summary, "responses": {"200": _answer(summary, schema)}}


def _answer(description: str, schema: JsonObject) -> JsonObject:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _object(**properties: JsonObject) -> JsonObject:
    """An object that has all of these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _ref(name: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name}"}
