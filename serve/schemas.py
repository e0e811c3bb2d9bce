"""Build the parts of OpenAPI schemas."""

from typing import Any

JsonObject = dict[str, Any]

TEXT = {"type": "string"}
NUMBER = {"type": "number"}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
SIDE = {"type": "integer", "minimum": 1}
BINARY = {"type": "string", "format": "binary"}
BASE64 = {"type": "string", "format": "byte"}


def list_of(items: JsonObject, least: int, most: int) -> JsonObject:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def object_of(**properties: JsonObject) -> JsonObject:
    """Return the schema of an object that has all of these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def ref(name: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{name}"}
