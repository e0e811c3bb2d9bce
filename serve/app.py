"""The prediction API as a Flask application. A refused request gets `{"ERROR": "what, and what to do"}`.

`create_app` makes it a public WSGI application. In our own server, `serve.dispatch` answers predictions without Flask,
with the same parser, limits and encoder (`serve.prediction`).
"""

import base64
import hashlib
import itertools
import os
import re
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path

from flask import Flask, Response, jsonify, request
from flask.json.provider import DefaultJSONProvider
from werkzeug import Response as WerkzeugResponse
from werkzeug.exceptions import BadRequest, HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge

from serve.admission import Admission, Hosts, request_id
from serve.answers import HEADERS, Answer, refused
from serve.batching import Batcher
from serve.bundle import Bundle, BundleError
from serve.device import CPU, DeviceError, OptionError, choose_devices, device_for_precision, onnxruntime_lacks
from serve.limits import FAULT, Limits, Refusal
from serve.log import log_event
from serve.metrics import MAX_PROCESSES
from serve.openapi import describe
from serve.outputs import JSON
from serve.prediction import JOB, Predictions, Service
from serve.worker_count import choose_layout, gpu_layout, largest_batch


def application(service: Service) -> Flask:
    """Return the application that serves `service`. The server around it must check heads (`serve.admission`) and
    count requests."""
    model, limits = service.model, service.limits
    app = Flask("serve", static_folder=None)
    assert isinstance(app.json, DefaultJSONProvider), "Flask's own, unless it is replaced"
    app.json.sort_keys = app.json.ensure_ascii = False
    app.config["MAX_CONTENT_LENGTH"] = limits.max_bytes
    predictions = Predictions(model, limits)
    # Samples are training data of the run, so they are not public.
    model = model if service.admission.private else replace(model, examples=())
    pages = {"/": _page("page.html"), "/docs": _page("docs.html")}

    @app.post("/predict")
    def predict() -> Response:
        kind, accept = (request.environ.get(name, "").encode("latin-1") for name in ("CONTENT_TYPE", "HTTP_ACCEPT"))
        done = threading.Event()
        job = predictions.job(request.query_string, kind, accept, _body(), lambda _: done.set())
        service.batcher.submit(job)
        done.wait()
        request.environ[JOB] = job
        return _response(predictions.answer(job))

    @app.get("/health")
    def health() -> Response:
        return jsonify(status="ok")

    @app.get("/ready")
    def ready() -> Response:
        if not service.ready:
            message = "The server is starting or shutting down; retry in a second, or use another server."
            raise Refusal(503, message, {"Retry-After": "1"})
        return jsonify(status="ready")

    @app.get("/info")
    def info() -> Response:
        return jsonify(
            task=model.task,
            labels=model.labels,
            input=model.spec.to_dict(),
            precision=model.precision,
            run=model.run,
            limits=asdict(limits),
            samples=len(model.examples),
            **service.layout,
            **({} if model.example is None else {"example": model.example}),
        )

    @app.get("/samples")
    def get_samples() -> Response:
        return jsonify(samples=model.examples)

    @app.get("/metrics")
    def get_metrics() -> Response:
        run = str(model.run.get("id") or model.run.get("name") or model.run.get("folder_name") or "unknown")
        labels = {"run": run, "task": model.task, "precision": model.precision}
        return Response(service.metrics.text(labels), content_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/openapi.json")
    def openapi() -> Response:
        servers = [{"url": request.script_root or "/"}]  # it may be mounted below a path
        return jsonify(describe(model, limits, service.admission.secured) | {"servers": servers})

    @app.get("/")
    @app.get("/docs")
    def index() -> Response:
        page, policy = pages[request.path]
        response = Response(page, mimetype="text/html")
        response.headers["Content-Security-Policy"] = policy
        return response

    @app.after_request
    def protect(response: Response) -> Response:
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    @app.errorhandler(HTTPException)
    def handle_http_error(error: HTTPException) -> WerkzeugResponse:
        response = error.get_response()  # it has the headers that a status needs, such as Allow
        response.set_data(app.json.dumps({"ERROR": _explain(error, app, limits)}))
        response.content_type = JSON
        return response

    @app.errorhandler(Refusal)
    def handle_refusal(error: Refusal) -> Response:
        return _response(refused(error))

    @app.errorhandler(Exception)
    def handle_fault(error: Exception) -> Response:
        log_event("fault", error, method=request.method, path=request.path)
        return _response(refused(Refusal(500, FAULT)))

    return app


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, answer.headers, content_type=answer.content_type)


def _page(name: str) -> tuple[str, str]:
    """Return a page and the Content-Security-Policy that allows only its own script and style."""
    page = (Path(__file__).parent / name).read_text(encoding="utf-8")

    def own(tag: str) -> str:
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return page, (
        f"default-src 'none'; script-src {own('script')}; style-src {own('style')}; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _body() -> bytes:
    data = request.get_data(cache=False)
    request.stream.read(1)  # raises 413 for a chunked body, which get_data truncates at the limit (werkzeug 3.1)
    return data


def _explain(error: HTTPException, app: Flask, limits: Limits) -> str:
    """Return what is wrong and what to do, in plainer words than werkzeug's."""
    if isinstance(error, NotFound):
        paths = sorted(rule.rule for rule in app.url_map.iter_rules())
        return f"There is no such path; the paths are {', '.join(paths)}."
    if isinstance(error, MethodNotAllowed):
        methods = set(error.valid_methods or ()) - {"HEAD", "OPTIONS"}
        return f"{request.method} is not allowed here; use {' or '.join(sorted(methods))}."
    if isinstance(error, RequestEntityTooLarge) and error.description == RequestEntityTooLarge.description:
        return limits.too_large().message
    if isinstance(error, BadRequest) and error.description == BadRequest.description:
        return "The request ended early, paused for too long, or is malformed; send all of it again."
    return str(error.description)


def create_app(
    run: str | PathLike[str],
    *,
    precision: str = "fp32",
    device: str = "auto",
    api_key: str | None = None,
    allowed_hosts: Sequence[str] = (),
    **limits: float,
) -> Flask:
    """Return a WSGI application that serves a bundle, with all routes of our own server.

    The model is loaded and checked once, here. Threads start with the first request that needs them, so a server may
    fork the process first, and its workers share the model's memory; but not on a GPU, since CUDA does not survive a
    fork.

    Args:
        run: a bundle, or a run folder or MLflow model that contains one.
        precision: which of the bundle's models answers: fp32, int8 or fp16.
        device: device of the model, as in `serve.device`; of several GPUs the first.
        api_key: key that clients must send as `Authorization: Bearer KEY` or `X-API-Key: KEY`; None: no key.
        allowed_hosts: host names that the server answers to, besides localhost; empty: every name.
        limits: fields of `serve.limits.Limits` that differ from their defaults, such as `max_batch=32`.

    Raises:
        BundleError: the bundle is missing, damaged or unknown.
        DeviceError: the device cannot be used.
        OptionError, ValueError, TypeError: two options contradict each other, or a limit is out of range or unknown.
    """
    if api_key is not None and not (api_key := api_key.strip()):
        raise OptionError("api_key is empty; give the key that clients must send, or None.")
    bounds = Limits.of(**limits)
    device = device_for_precision(precision, device)
    choice = choose_devices(device, onnxruntime_lacks)
    chosen = choice.devices[0]
    try:
        model = Bundle.open_on(chosen, run, precision)
        if chosen.on_gpu:
            bounds = replace(bounds, max_batch=largest_batch(model, bounds.max_batch))
    except (DeviceError, BundleError, MemoryError) as error:
        if not choice.may_fall_back:
            raise
        log_event("serving on the CPU", reason=str(error))
        chosen = CPU
        model = Bundle.open_on(chosen, run, precision)
    layout = gpu_layout((chosen,)) if chosen.on_gpu else choose_layout(model)
    service = Service(
        model,
        bounds,
        Batcher(model, bounds, layout.lanes),  # its threads run the model: no request waits for those of others
        layout={"processes": 1, "lanes": layout.lanes, "device": str(chosen)},
        admission=Admission(api_key, Hosts("0.0.0.0", allowed_hosts)),
    )
    _renew_after_forks(service)
    opened = os.getpid()
    app = application(service)

    @app.before_request
    def admit() -> None:
        environ = request.environ
        environ["serve.begun"] = time.perf_counter()
        headers = {name.lower().encode("latin-1"): value.encode("latin-1") for name, value in request.headers}
        environ["serve.id"] = request_id(headers.get(b"x-request-id")).decode()
        service.admission.check(request.method, request.path, headers, service.batcher)
        if chosen.on_gpu and os.getpid() != opened:
            raise Refusal(503, "CUDA does not survive a fork; start the WSGI server without preloading (--preload).")

    @app.after_request
    def count(response: Response) -> Response:
        environ = request.environ
        response.headers["X-Request-ID"] = environ["serve.id"]
        with service.count_lock:
            took = time.perf_counter() - environ["serve.begun"]
            service.count(request.path, response.status_code, took, environ.get(JOB))
        return response

    return app


def _renew_after_forks(service: Service) -> None:
    """Give each forked child its own threads, lock and row of the metrics; threads and locks do not survive a fork."""
    forks, row, kept = itertools.count(1), 0, weakref.ref(service)

    def before() -> None:
        nonlocal row
        row = next(forks) % MAX_PROCESSES

    def in_child() -> None:
        if (service := kept()) is not None:
            service.batcher = Batcher(service.model, service.limits, service.batcher.lanes)
            service.count_lock = threading.Lock()
            service.metrics.row = row

    os.register_at_fork(before=before, after_in_child=in_child)
