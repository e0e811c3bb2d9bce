"""Read encoded pictures, texts, rows or arrays from a request's body: a form, JSON, or the body itself.

A form as clients usually write it is split at its boundaries; any other is parsed by werkzeug, ten times slower.
"""

import base64
import binascii
import io
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from serve.limits import Limits, Refusal

if TYPE_CHECKING:
    import numpy as np

    from deeplightning.table_format import TableFormat

USAGE = 'send {"images": ["<base64 of an image file>", …]}'
FORM_USAGE = "send a file as curl -F image=@FILE does"
TEXT_USAGE = 'send {"texts": ["…", …]}'
KINDS_OF_TEXT = 'JSON {"texts": ["…", …]} as application/json, or one text in UTF-8 as text/plain'
ROWS_USAGE = 'send {"rows": [{"COLUMN": value, …}, …]} as application/json, or a table with a header as text/csv'
ARRAYS_USAGE = 'send {"arrays": [nested lists of numbers, …]} as application/json, or the bytes of a .npy file'

MAX_JSON_MARKS = 1000
"""Maximum number of brackets, braces and commas in a JSON body, which limits depth and memory. base64 has none, so 256
images need less than 600."""

MAX_PARTS = 1000
"""Maximum number of parts of a form; far more than it may have pictures."""

MAX_FIELD_BYTES = 500_000
"""Maximum size of a text field of a form, in bytes (Flask's default)."""

_DATA_URL = re.compile(rb"data:[^,]*,")  # browsers put this before the base64 of a file
_ALPHABET = bytes.maketrans(b"-_", b"+/")
_BLANKS = b" \t\r\n"  # base64 may be broken into lines
_BOUNDARY = re.compile(rb'\Amultipart/form-data; ?boundary="?([0-9A-Za-z\'()+_,./:=?-]{1,70})"?\Z', re.IGNORECASE)

_PART = re.compile(
    rb"\A(?:\r\nContent-(?:Type|Length|Transfer-Encoding): [ -~]{1,100})?"
    rb'\r\nContent-Disposition: form-data; name="image"; filename[^\r\n]{0,1000}'
    rb"(?:\r\nContent-(?:Type|Length): [ -~]{1,100}){0,2}\r\n\r\n",
    re.IGNORECASE,
)
"""Matches the head of a part with a picture, as browsers, curl and Python's clients write it."""

_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"'

_TEXTS = re.compile(
    rb'_\{_"texts?"_:_(?:%b|\[_%b(?:_,_%b){0,1000}+_\])_\}_'.replace(b"_", rb"[ \t\r\n]*+")
    % (_STRING, _STRING, _STRING),
    re.DOTALL,
)
"""Matches a body that may be parsed without counting marks: texts may contain any number of commas and brackets. It
never backtracks."""


class NotWellFormed(Exception):
    """Raised for a form that is not as clients usually write it; werkzeug may be able to read it."""


def from_form(content_type: bytes, body: bytes) -> list[bytes]:
    """Return the pictures of a form that contains only pictures.

    Raises:
        NotWellFormed: the form is not as clients usually write it.
    """
    if (found := _BOUNDARY.match(content_type)) is None:
        raise NotWellFormed
    boundary = b"--" + found[1]
    start = 2 if body.startswith(b"\r\n") else 0  # an empty preamble
    if not body.startswith(boundary, start):
        raise NotWellFormed
    *parts, end = body[start + len(boundary) :].split(b"\r\n" + boundary, MAX_PARTS)
    if end not in (b"--\r\n", b"--") or not parts:
        raise NotWellFormed
    heads = [_PART.match(part) for part in parts]
    if None in heads:
        raise NotWellFormed
    return [part[head.end() :] for part, head in zip(parts, heads, strict=True) if head is not None]


def from_unusual_form(content_type: bytes, body: bytes, limits: Limits) -> list[bytes]:
    """Return the pictures of any form. Nothing is written to disk.

    Raises:
        Refusal: the body is not a form, is cut off, has no file in the field image, too many parts, or too long a text.
    """
    from werkzeug.exceptions import RequestEntityTooLarge  # imported lazily: most servers never need it
    from werkzeug.formparser import FormDataParser
    from werkzeug.http import parse_options_header

    parser = FormDataParser(
        stream_factory=lambda *_, **__: io.BytesIO(),
        max_form_memory_size=MAX_FIELD_BYTES,
        max_form_parts=limits.max_images + 8,
        silent=False,
    )
    options = parse_options_header(content_type.decode("latin-1"))[1]
    try:
        _, _, files = parser.parse(io.BytesIO(body), "multipart/form-data", len(body), options)
    except RequestEntityTooLarge:
        raise Refusal(
            413,
            f"The form has too many parts, or a text of more than {MAX_FIELD_BYTES:,} bytes (a part without a filename "
            f"is one): at most {limits.max_images} images and few other form fields are accepted; {FORM_USAGE}.",
        ) from None
    except ValueError:
        message = "The form is malformed or cut off, or its Content-Type does not name its boundary"
        raise Refusal(400, f"{message}; {FORM_USAGE}.") from None
    if not (pictures := files.getlist("image")):
        message = "The form has no file in the field image (a part without a filename is a text)"
        raise Refusal(400, f"{message}; {FORM_USAGE}.")
    return [picture.read() for picture in pictures]


def from_json(body: bytes) -> list[bytes]:
    """Return the pictures of `{"images": [base64, …]}`, or of `{"image": base64}`.

    Raises:
        Refusal: the body has another form.
    """
    if _marks(body) > MAX_JSON_MARKS:
        raise Refusal(400, f"The JSON has more parts than a list of images needs; {USAGE}.")
    texts = _inputs(body, ("images", "image"), str, "texts", USAGE)
    try:
        return [_from_base64(text.encode("ascii")) for text in texts]
    except (binascii.Error, ValueError) as error:
        raise Refusal(400, f"An image is not base64 ({error}); {USAGE}.") from None


def _from_base64(text: bytes) -> bytes:
    """Decode base64 in the standard or the URL-safe alphabet, padded or not (RFC 4648, section 5). Does not split the
    text at its blanks: the pieces of 16 MB took 405 MB (November 2026)."""
    found = _DATA_URL.match(text)
    digits = text[found.end() if found else 0 :].translate(_ALPHABET, _BLANKS)
    return base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)


def is_text(mimetype: bytes, content_type: bytes) -> bool:
    """Return whether a body of this type is itself a text; `content_type` is the type with its parameters."""
    found = re.search(rb"charset=\"?([\w-]+)", content_type, re.IGNORECASE)
    return mimetype in (b"", b"text/plain") and (found is None or found[1].lower() in (b"utf-8", b"utf8", b"us-ascii"))


def texts_from_json(body: bytes, max_marks: int = MAX_JSON_MARKS) -> list[bytes]:
    """Return the texts of `{"texts": [text, …]}`, or of `{"text": text}`, in UTF-8.

    Raises:
        Refusal: the body has another form.
    """
    if not _TEXTS.fullmatch(body) and _marks(body) > max_marks:
        raise Refusal(
            400, f"The body is not a JSON object with the one key texts, a list of 1,000 texts at most; {TEXT_USAGE}."
        )
    texts = _inputs(body, ("texts", "text"), str, "texts", TEXT_USAGE)
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        raise Refusal(400, f"A text has half a character (a lone surrogate); {TEXT_USAGE}.") from None


def rows_from_json(body: bytes, columns: int, limits: Limits) -> list[dict[str, object]]:
    """Return the rows of `{"rows": [{column: value}, …]}`, or of `{"row": {…}}`.

    Args:
        columns: number of the network's columns; a body with many more values is refused before it is parsed.

    Raises:
        Refusal: the body has another form.
    """
    _check_marks(body, MAX_JSON_MARKS + limits.max_images * 4 * (columns + 1), ROWS_USAGE)
    return _inputs(body, ("rows", "row"), dict, "objects", ROWS_USAGE)


def rows_from_csv(body: bytes, limits: Limits, columns: Sequence[str], form: "TableFormat") -> list[dict[str, str]]:
    """Return the rows of a table whose header names the columns.

    Args:
        columns: columns that the network takes; used to detect the delimiter.
        form: format of the training table.

    Raises:
        Refusal: the body has another form.
    """
    from deeplightning.table_format import TableError, decoded, rows_of_csv  # most servers never need it

    try:
        return rows_of_csv(decoded(body, form.encoding), limits.max_images, form, columns)
    except UnicodeError:
        raise Refusal(400, "The table is not in UTF-8; save it as UTF-8.") from None
    except TableError as error:
        raise Refusal(error.status, str(error)) from error


def arrays_from_json(body: bytes, shape: tuple[int, ...], limits: Limits) -> list[object]:
    """Return the nested lists of `{"arrays": [lists, …]}` or `{"array": lists}`; also under `signals` or `signal`.

    Args:
        shape: shape of an array; a body with many more numbers is refused before it is parsed.

    Raises:
        Refusal: the body has another form.
    """
    _check_marks(body, MAX_JSON_MARKS + limits.max_images * 3 * math.prod(shape), ARRAYS_USAGE)
    arrays = _inputs(body, ("arrays", "array", "signals", "signal"), object, "arrays", ARRAYS_USAGE)
    if b"true" in body or b"false" in body:  # numpy would read them as 1 and 0
        raise Refusal(400, f"An array contains true or false, which are not numbers; {ARRAYS_USAGE}.")
    return arrays


def arrays_from_npy(body: bytes, shape: tuple[int, ...], limits: Limits) -> "list[np.ndarray]":
    """Return the array of a .npy file, or the arrays along its first dimension, at most one above the limit.

    Raises:
        Refusal: the body has another form.
    """
    from deeplightning.array_spec import ArrayError, read_npy  # imported lazily: most servers never need it

    try:
        found = read_npy(body)
    except ArrayError as error:
        raise Refusal(error.status, f"{error} {ARRAYS_USAGE.capitalize()}.") from error
    return list(found[: limits.max_images + 1]) if found.ndim == len(shape) + 1 and len(found) else [found]


def _marks(body: bytes) -> int:
    """Return the number of brackets, braces and commas."""
    return sum(body.count(mark) for mark in b"[]{},")


def _check_marks(body: bytes, most: int, usage: str) -> None:
    if _marks(body) > most:
        raise Refusal(413, f"The JSON has more values than a request may have; {usage}.")


def _inputs(body: bytes, keys: tuple[str, ...], kind: type, nouns: str, usage: str) -> list[Any]:
    """Return the inputs under the only key of a JSON object, which must be in `keys`; under a singular key is a single
    input. `kind` is the type of an input, `nouns` its name in messages."""
    try:
        document = json.loads(body, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"The body is not JSON ({str(error)[:200]}); {usage}.") from None
    if not isinstance(document, dict) or len(document) != 1 or not document.keys() <= set(keys):
        raise Refusal(400, f"The JSON is not an object with the one key {keys[0]}; {usage}.")
    ((key, value),) = document.items()
    found = value if key.endswith("s") else [value]
    if not isinstance(found, list) or not found or not all(isinstance(one, kind) for one in found):
        raise Refusal(400, f"{keys[0]} is not a list of one or more {nouns}; {usage}.")
    return found


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Refuse duplicate keys, which parsers resolve differently (RFC 8259, section 4)."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise Refusal(400, f"An object of the JSON has the key {key[:40]!r} twice; send each key once.")
    return found
