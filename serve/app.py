"""HTTP in front of a bundle: every good request gets an answer, every bad one `{"ERROR": "what, and what to do"}`.

`create_app` gives a WSGI application (Flask) and touches no network. Every size that a client chooses has a bound in
`Limits`. Letters: N images, C channels, H height, W width, K classes.
"""

import base64
import binascii
import contextlib
import hashlib
import io
import json
import os
import re
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from flask import Flask, Request, Response, jsonify, request
from flask.json.provider import DefaultJSONProvider
from werkzeug.exceptions import (
    BadRequest,
    HTTPException,
    MethodNotAllowed,
    NotFound,
    RequestEntityTooLarge,
    UnsupportedMediaType,
)

from deeplightning.image import ImageError
from serve.bundle import Bundle
from serve.openapi import describe

DEFAULT_TOP_K = 5

DISCARD_BYTES, DISCARD_SECONDS = 256_000_000, 5
"""How much of a refused request is read at most, without being kept, and for how long."""

MAX_JSON_MARKS = 1000
"""Brackets, braces and commas in a JSON body; base64 has none, so 32 images need under 100. Bounds depth and memory."""

_DATA_URL = re.compile(r"\Adata:[^,]*,")  # browsers put this before the base64 that they make of a file


@dataclass(frozen=True)
class Limits:
    """What one request may cost.

    Attributes:
        max_upload_mb: size of a request's body, in units of 1,000,000 bytes.
        max_pixels: size of a picture, width x height; checked on its header, before it is decoded.
        max_images: pictures in one request.
    """

    max_upload_mb: int = 16
    max_pixels: int = 50_000_000
    max_images: int = 32


def create_app(bundle: Bundle, limits: Limits | None = None) -> Flask:
    """The application that serves `bundle`."""
    limits = limits or Limits()
    app = Flask("serve", static_folder=None)
    app.request_class = _Request
    assert isinstance(app.json, DefaultJSONProvider), "Flask's own, unless it is replaced"
    app.json.sort_keys = app.json.ensure_ascii = False
    app.config["MAX_CONTENT_LENGTH"] = limits.max_upload_mb * 1_000_000
    app.config["MAX_FORM_PARTS"] = limits.max_images + 8
    # More pictures at a time than cores would need more memory and be no faster; a picture may take 200 MB to decode.
    slots = threading.BoundedSemaphore(os.cpu_count() or 1)
    page, policy = _page()

    @app.post("/predict")
    def predict() -> Response:
        top_k = _top_k(len(bundle.labels))
        uploads = _uploads(limits)
        with slots:
            images = np.stack([_prepared(bundle, data, limits, place) for place, data in uploads])  # (N, C, H, W)
            rows = bundle.predict(images)  # (N, K)
        answers = [_answer(row, bundle.labels, top_k) for row in rows]
        return jsonify(answers[0] if len(answers) == 1 else {"predictions": answers})

    @app.get("/health")
    def health() -> Response:
        return jsonify(status="ok")

    @app.get("/ready")
    def ready() -> Response:
        return jsonify(status="ready")  # the bundle is loaded and replayed before the app exists

    @app.get("/info")
    def info() -> Response:
        return jsonify(
            task=bundle.task,
            labels=bundle.labels,
            input=bundle.image_spec.to_dict(),
            run=bundle.run,
            limits=asdict(limits),
        )

    @app.get("/openapi.json")
    def openapi() -> Response:
        return jsonify(describe(bundle.task, bundle.labels, limits, secured=False))

    @app.get("/")
    def index() -> Response:
        response = Response(page, mimetype="text/html")
        response.headers["Content-Security-Policy"] = policy
        return response

    @app.after_request
    def read_out(response: Response) -> Response:
        if response.status_code >= 400:
            _discard(request.environ["wsgi.input"])
        return response

    @app.after_request
    def protect(response: Response) -> Response:
        response.headers.setdefault("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-store"
        return response

    @app.errorhandler(HTTPException)
    def refuse(error: HTTPException) -> Any:
        response = error.get_response()  # it knows the headers that a status needs, such as Allow
        response.set_data(app.json.dumps({"ERROR": _explain(error, app, limits)}))
        response.content_type = "application/json"
        return response

    @app.errorhandler(ImageError)
    def refuse_image(error: ImageError) -> tuple[Response, int]:
        return jsonify(ERROR=str(error)), error.status

    @app.errorhandler(Exception)
    def fail(error: Exception) -> tuple[Response, int]:
        app.logger.exception("%s %s failed", request.method, request.path)
        return jsonify(ERROR="The server has a fault; its log tells which. Other requests are not affected."), 500

    return app


class _Request(Request):
    """Uploads stay in memory, which the limit on the body bounds: nothing of a client's is written to disk."""

    def _get_file_stream(self, *args: Any, **kwargs: Any) -> IO[bytes]:
        return io.BytesIO()


def _discard(body: IO[bytes]) -> None:
    """Take what a refused client is still sending: most read the answer only afterwards, and else see a broken pipe."""
    end = time.monotonic() + DISCARD_SECONDS
    with contextlib.suppress(OSError):
        for _ in range(DISCARD_BYTES // 65536):
            if not body.read(65536) or time.monotonic() > end:
                break


def _page() -> tuple[str, str]:
    """The page to drop an image on, and the policy that lets its own script and style run, and no other."""
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    def own(tag: str) -> str:
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return page, (
        f"default-src 'none'; script-src {own('script')}; style-src {own('style')}; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _top_k(num_classes: int) -> int:
    text = request.args.get("top_k", str(DEFAULT_TOP_K))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise BadRequest("top_k must be a whole number of at least 1, as in /predict?top_k=3.")
    return min(int(text), num_classes)


def _uploads(limits: Limits) -> list[tuple[str, bytes]]:
    """Every picture of the request, with the words that name it in a note: nothing where there is one only."""
    kind = request.mimetype
    if kind == "multipart/form-data":
        pictures = _from_form()
    elif kind == "application/json":
        pictures = _from_json(_body())
    elif kind.startswith("image/") or kind in ("", "application/octet-stream"):
        pictures = [_body()]
        if not pictures[0]:
            raise BadRequest("The request has no body; send the image as the body, or as the form field image.")
    else:
        raise UnsupportedMediaType(
            f"A body of type {kind[:100]} is not read. Send multipart/form-data with the field image (curl -F "
            'image=@FILE), the image itself (curl --data-binary @FILE -H "Content-Type: image/png"), or JSON '
            '{"images": [base64, …]} as application/json.'
        )
    if len(pictures) > limits.max_images:
        raise RequestEntityTooLarge(
            f"The request has {len(pictures)} images; at most {limits.max_images} are accepted in one."
        )
    if len(pictures) == 1:
        return [("", pictures[0])]
    return [(f"Image {number} of {len(pictures)}: ", data) for number, data in enumerate(pictures, 1)]


def _body() -> bytes:
    data = request.get_data(cache=False)
    request.stream.read(1)  # raises 413 for a body in chunks, which get_data cuts off at the limit (werkzeug 3.1)
    return data


def _from_form() -> list[bytes]:
    files = request.files.getlist("image")
    if not files:
        found = ", ".join(sorted({*request.files, *request.form}))[:200]
        raise BadRequest(
            "The form has no file in the field image; send one as curl -F image=@FILE does."
            + (f" Its fields are: {found}." if found else "")
        )
    return [file.read() for file in files]


def _from_json(body: bytes) -> list[bytes]:
    usage = 'send {"images": ["<base64 of an image file>", …]}'
    if sum(body.count(mark) for mark in b"[]{},") > MAX_JSON_MARKS:
        raise BadRequest(f"The JSON has more parts than a list of images needs; {usage}.")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON ({str(error)[:200]}); {usage}.") from None
    if not isinstance(document, dict) or len(document) != 1 or not document.keys() <= {"images", "image"}:
        raise BadRequest(f"The JSON is not an object with the one key images; {usage}.")
    texts = document["images"] if "images" in document else [document["image"]]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"images is not a list of one or more texts; {usage}.")
    try:
        return [base64.b64decode("".join(_DATA_URL.sub("", text).split()), validate=True) for text in texts]
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"An image is not base64 ({error}); {usage}.") from None


def _prepared(bundle: Bundle, data: bytes, limits: Limits, place: str) -> np.ndarray:
    """uint8 (C, H, W)"""
    try:
        return bundle.prepare(data, limits.max_pixels)
    except ImageError as error:
        raise ImageError(f"{place}{error}", error.status) from error


def _answer(row: np.ndarray, labels: list[str], top_k: int) -> dict[str, Any]:
    """What is said of one picture, `row` being float32 (K,). Probabilities get the digits that tell float32s apart."""
    best = np.argsort(-row, kind="stable")[:top_k]
    texts = [np.format_float_positional(row[number], trim="0") for number in best]
    return {
        "predicted_class": str(best[0]),
        "predicted_probability": texts[0],
        "label": labels[best[0]],
        "predictions": [
            {"class": int(number), "label": labels[number], "probability": float(text)}
            for number, text in zip(best, texts, strict=True)
        ],
    }


def _explain(error: HTTPException, app: Flask, limits: Limits) -> str:
    """What went wrong and what to do, where werkzeug's own words are for readers of RFCs."""
    if isinstance(error, NotFound):
        places = sorted(rule.rule for rule in app.url_map.iter_rules())
        return f"There is nothing at this address; there are {', '.join(places)}."
    if isinstance(error, MethodNotAllowed):
        ways = set(error.valid_methods or ()) - {"HEAD", "OPTIONS"}
        return f"{request.method} is not possible here; use {' or '.join(sorted(ways))}."
    if isinstance(error, RequestEntityTooLarge) and error.description == RequestEntityTooLarge.description:
        return (
            f"The request is too large: at most {limits.max_upload_mb} MB, {limits.max_images} images and few other "
            "form fields are accepted. Send smaller images, or fewer at a time."
        )
    if isinstance(error, BadRequest) and error.description == BadRequest.description:
        return "The request ended early, paused for too long, or is malformed; send it again, whole."
    return str(error.description)
