"""The prediction API of a bundle as a WSGI application, for servers such as gunicorn and waitress:

    gunicorn "serve:create_app('RUN')"

It needs neither our event loop nor our processes. The WSGI server provides sockets, workers, timeouts and access logs.
"""

import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike

from flask import Flask, Response, request

from serve.admission import Admission, Hosts, request_id
from serve.app import application
from serve.batching import Batcher
from serve.bundle import Bundle
from serve.device import OptionError, choose_devices, device_for_precision, onnxruntime_lacks
from serve.limits import Limits, Refusal
from serve.metrics import MAX_PROCESSES
from serve.prediction import JOB, Service
from serve.worker_count import choose_layout, gpu_layout, largest_batch


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
    chosen = choose_devices(device, onnxruntime_lacks).devices[0]
    model = Bundle.open_on(chosen, run, precision)
    if chosen.on_gpu:
        bounds = replace(bounds, max_batch=largest_batch(model, bounds.max_batch))
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
