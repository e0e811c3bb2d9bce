"""Everything but the short path, as a Flask application: each good request gets an answer, each bad one
`{"ERROR": "what, and what to do"}`.

`create_app` touches no network, and answers under any WSGI server. `serve.door` stands in front of it and sends
well-formed predictions straight to the model.
"""

import base64
import hashlib
import io
import re
import threading
from pathlib import Path
from typing import IO, Any

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

from serve.answers import DEFAULT_TOP_K, PROTECTION, answers, top_k_of
from serve.lanes import Job
from serve.limits import FAULT, Limits, Refusal
from serve.log import tell
from serve.openapi import describe
from serve.service import Service
from serve.uploads import KINDS_OF_TEXT, counted, from_json, is_picture, is_text, texts_from_json


def create_app(service: Service) -> Flask:
    """The application that serves `service`. API keys are not its business, but that of the server around it."""
    model, limits = service.model, service.limits
    app = Flask("serve", static_folder=None)
    app.request_class = _Request
    assert isinstance(app.json, DefaultJSONProvider), "Flask's own, unless it is replaced"
    app.json.sort_keys = app.json.ensure_ascii = False
    app.config["MAX_CONTENT_LENGTH"] = limits.max_bytes
    app.config["MAX_FORM_PARTS"] = limits.max_images + 8
    answer = answers(model.task, model.labels)
    page, policy = _page()

    @app.post("/predict")
    def predict() -> Response:
        top_k = top_k_of(request.args.get("top_k", str(DEFAULT_TOP_K)))
        if top_k is None:
            raise BadRequest("top_k must be a whole number of at least 1, as in /predict?top_k=3.")
        pictures = _texts(limits) if model.task == "text_classification" else _pictures(limits)
        done = threading.Event()
        job = Job(lambda: pictures, sum(map(len, pictures)), lambda _: done.set())
        service.lanes.submit(job)
        done.wait()
        if job.error is not None:
            raise job.error
        kind, body = answer(job.rows, top_k, request.headers.get("Accept", ""))
        return Response(body, mimetype=kind)

    @app.get("/health")
    def health() -> Response:
        return jsonify(status="ok")

    @app.get("/ready")
    def ready() -> Response:
        if not service.ready:
            raise Refusal(503, "The server warms up or is about to end; ask again in a second, or another server.")
        return jsonify(status="ready")

    @app.get("/info")
    def info() -> Response:
        return jsonify(
            task=model.task,
            labels=model.labels,
            input=(model.image_spec or model.text_spec).to_dict(),  # type: ignore[attr-defined] # one is there
            precision=model.precision,
            run=model.run,
            limits=limits.told(model.task),
            **service.layout,
        )

    @app.get("/metrics")
    def measured() -> Response:
        return Response(service.metrics.text(), content_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/openapi.json")
    def openapi() -> Response:
        return jsonify(describe(model.task, model.labels, limits, service.secured))

    @app.get("/")
    def index() -> Response:
        response = Response(page, mimetype="text/html")
        response.headers["Content-Security-Policy"] = policy
        return response

    @app.after_request
    def protect(response: Response) -> Response:
        for name, value in PROTECTION.items():
            response.headers.setdefault(name, value)
        return response

    @app.errorhandler(HTTPException)
    def refuse(error: HTTPException) -> Any:
        response = error.get_response()  # it knows the headers that a status needs, such as Allow
        response.set_data(app.json.dumps({"ERROR": _explain(error, app, limits)}))
        response.content_type = "application/json"
        return response

    @app.errorhandler(Refusal)
    def refuse_ours(error: Refusal) -> tuple[Response, int, dict[str, str]]:
        return jsonify(ERROR=error.message), error.status, error.headers

    @app.errorhandler(Exception)
    def fail(error: Exception) -> tuple[Response, int]:
        tell("fault", error, method=request.method, path=request.path)
        return jsonify(ERROR=FAULT), 500

    return app


class _Request(Request):
    """Uploads stay in memory, which the limit on the body bounds: nothing of a client's is written to disk."""

    def _get_file_stream(self, *args: Any, **kwargs: Any) -> IO[bytes]:
        return io.BytesIO()


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


def _pictures(limits: Limits) -> list[bytes]:
    """Every encoded picture of the request."""
    kind = request.mimetype
    if kind == "multipart/form-data":
        return counted(_from_form(), limits)
    if kind == "application/json":
        return counted(from_json(_body()), limits)
    if not is_picture(kind.encode()):
        raise UnsupportedMediaType(
            f"A body of type {kind[:100]} is not read. Send multipart/form-data with the field image (curl -F "
            'image=@FILE), the image itself (curl --data-binary @FILE -H "Content-Type: image/png"), or JSON '
            '{"images": [base64, …]} as application/json.'
        )
    picture = _body()
    if not picture:
        raise BadRequest("The request has no body; send the image as the body, or as the form field image.")
    return [picture]


def _texts(limits: Limits) -> list[bytes]:
    """Every text of the request, in UTF-8."""
    kind = request.mimetype
    if kind == "application/json":
        return counted(texts_from_json(_body()), limits, "texts")
    if not is_text(kind.encode(), (request.content_type or "").encode("latin-1", "replace")):
        said = (request.content_type or "")[:100]
        raise UnsupportedMediaType(
            f"A body of type {said} is not read: this server answers texts. Send {KINDS_OF_TEXT}."
        )
    text = _body()
    if not text:
        raise BadRequest(f"The request has no body; send {KINDS_OF_TEXT}.")
    return [text]


def _body() -> bytes:
    data = request.get_data(cache=False)
    request.stream.read(1)  # raises 413 for a body in chunks, which get_data cuts off at the limit (werkzeug 3.1)
    return data


def _from_form() -> list[bytes]:
    files = request.files.getlist("image")
    if not files:
        found = ", ".join(sorted(name for name in {*request.files, *request.form} if name))[:200]  # one may be None
        raise BadRequest(
            "The form has no file in the field image; send one as curl -F image=@FILE does."
            + (f" Its fields are: {found}." if found else "")
        )
    return [file.read() for file in files]


def _explain(error: HTTPException, app: Flask, limits: Limits) -> str:
    """What went wrong and what to do, where werkzeug's own words are for readers of RFCs."""
    if isinstance(error, NotFound):
        places = sorted(rule.rule for rule in app.url_map.iter_rules())
        return f"There is nothing at this address; there are {', '.join(places)}."
    if isinstance(error, MethodNotAllowed):
        ways = set(error.valid_methods or ()) - {"HEAD", "OPTIONS"}
        return f"{request.method} is not possible here; use {' or '.join(sorted(ways))}."
    if isinstance(error, RequestEntityTooLarge) and error.description == RequestEntityTooLarge.description:
        return limits.too_large().message
    if isinstance(error, BadRequest) and error.description == BadRequest.description:
        return "The request ended early, paused for too long, or is malformed; send it again, whole."
    return str(error.description)
