"""Route requests: predictions take the fast path to the model; Flask answers everything else, in a thread.

The fast path saves the overhead of Flask: a complete prediction of a small network takes 0.3 ms of CPU, an empty Flask
handler behind an ASGI server 0.9 to 1.1 ms (one core, November 2026).
"""

import asyncio
import io
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from wsgiref.util import setup_testing_defaults

from deeplightning.words import printable
from serve.admission import is_prediction, request_id
from serve.answers import Answer, refused
from serve.batching import Job
from serve.limits import FAULT, Refusal
from serve.log import Log, log_event
from serve.prediction import Predictions, Service

if TYPE_CHECKING:  # a server that only predicts needs no Flask
    from wsgiref.types import WSGIEnvironment

    from flask import Flask

MAX_BUFFERED_BYTES = 512_000_000
"""Maximum size of all incomplete bodies that a process buffers, in bytes."""

MAX_PATH_CHARACTERS = 200
"""Maximum length of a path in a log line, in characters."""

FLASK_THREADS = 8


@dataclass(slots=True, eq=False)
class Request:
    """A parsed HTTP request.

    Attributes:
        method, path, query, headers, version: of HTTP; the path is decoded, header names are in lower case.
        client, body: address of the client, and the complete body.
        keep: whether the connection stays open for another request.
        begun: time at which the head was complete (`time.perf_counter`).
        host: host of a target in absolute form, which replaces the header (RFC 9112, section 3.2.2); else empty.
        name: request id, the client's own if it is safe to log; set by `Dispatcher.admit`.
    """

    method: str
    path: str
    query: bytes
    headers: dict[bytes, bytes]
    version: str
    client: str
    keep: bool = True
    body: bytes = b""
    begun: float = field(default_factory=time.perf_counter)
    host: bytes = b""
    name: bytes = b"-"


Reply = Callable[[Request, Answer], bool]
"""Write an answer, in the event loop. Return False if the client has disconnected."""


class Dispatcher:
    """Answers requests, and logs them on standard output by default. Every method must be called in the event loop."""

    def __init__(self, service: Service, log: Log | None = None):
        self.service = service
        self._predictions = Predictions(service.model, service.limits)
        self._log = log or Log()
        self._flask: Flask | None = None
        self._threads = ThreadPoolExecutor(FLASK_THREADS, thread_name_prefix="flask")
        self._buffered_bytes = 0

    def admit(self, request: Request) -> None:
        """Assign a request id, and check the request before its body is read.

        Raises:
            Refusal: the request is not admitted.
        """
        headers, service = request.headers, self.service
        request.name = request_id(headers.get(b"x-request-id"))
        service.admission.check(request.method, request.path, headers, service.batcher, request.host)

    def reserve(self, size: int) -> None:
        """Add to the number of buffered body bytes; a negative `size` releases them.

        Raises:
            Refusal: the sum is above `MAX_BUFFERED_BYTES`.
        """
        self._buffered_bytes += size
        if size > 0 and self._buffered_bytes > MAX_BUFFERED_BYTES:
            raise Refusal(429, "Too many uploads are in progress; send this again in 5 s.", {"Retry-After": "5"})

    def answer(self, request: Request, reply: Reply) -> None:
        """Answer a request, possibly before this method returns."""
        try:
            if is_prediction(request.method, request.path):
                self._predict(request, reply)
            else:
                self._submit_to_flask(request, reply)
        except Refusal as refusal:
            # Later, like Flask's answers: the rest of the same read is parsed first.
            asyncio.get_running_loop().call_soon(self._finish, request, reply, refused(refusal))

    def record(self, request: Request, status: int, job: Job | None = None) -> None:
        """Count a request in the metrics, and buffer its log line."""
        took = time.perf_counter() - request.begun
        self.service.count(request.path, status, took, job)
        path = '"/predict"' if request.path == "/predict" else printable(json.dumps(request.path[:MAX_PATH_CHARACTERS]))
        line = (
            f'"id": "{request.name.decode()}", "client": "{request.client}", "method": "{request.method}", '
            f'"path": {path}, "status": {status}, "ms": {1e3 * took:.3f}'
        )
        if job is not None and job.batch_size:
            line += (
                f', "images": {len(job.rows)}, "queue_ms": {1e3 * job.queue_seconds:.3f}, '
                f'"decode_ms": {1e3 * job.decode_seconds:.3f}, "forward_ms": {1e3 * job.forward_seconds:.3f}, '
                f'"batch": {job.batch_size}'
            )
        self._log.add(line, refused=400 <= status < 500)

    def flush(self) -> None:
        """Write the buffered log lines. Call this several times a second."""
        self._log.flush()

    def _finish(self, request: Request, reply: Reply, answer: Answer, job: Job | None = None) -> None:
        self.record(request, answer.status if reply(request, answer) else 499, job)

    def _predict(self, request: Request, reply: Reply) -> None:
        """Submit a prediction to the batcher; raise Refusal if the request is invalid, or the queue is full."""
        loop, loop_thread, headers = asyncio.get_running_loop(), threading.get_ident(), request.headers

        def done(job: Job) -> None:  # in the thread that completed the job
            try:
                answer = self._predictions.answer(job)
            except Exception as error:
                answer = self._fault(request, error)
            if threading.get_ident() == loop_thread:
                self._finish(request, reply, answer, job)
            else:
                loop.call_soon_threadsafe(self._finish, request, reply, answer, job)

        content_type, accept = headers.get(b"content-type", b""), headers.get(b"accept", b"")
        self.service.batcher.submit(self._predictions.job(request.query, content_type, accept, request.body, done))

    def _fault(self, request: Request, error: Exception) -> Answer:
        log_event("fault", error, id=request.name.decode(), path=request.path)
        return refused(Refusal(500, FAULT))

    def _submit_to_flask(self, request: Request, reply: Reply) -> None:
        loop = asyncio.get_running_loop()

        def work() -> None:
            try:
                answer = self._flask_answer(request)
            except Exception as error:
                answer = self._fault(request, error)
            loop.call_soon_threadsafe(self._finish, request, reply, answer)

        self._threads.submit(work)

    def _flask_answer(self, request: Request) -> Answer:
        """Return the Flask application's answer to a request, through WSGI (PEP 3333)."""
        from werkzeug.wrappers import Response

        if self._flask is None:
            from serve.app import application  # imported lazily: a server that only predicts needs no Flask

            self._flask = application(self.service)
        texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers.items()}
        environ: WSGIEnvironment = {
            f"HTTP_{name.upper().replace('-', '_')}": text
            for name, text in texts.items()
            # werkzeug treats a chunked body as endless and reads none of it; this one is complete.
            if name not in ("content-type", "content-length", "transfer-encoding", "connection", "upgrade")
        }
        environ |= {
            "REQUEST_METHOD": "GET" if request.method == "HEAD" else request.method,  # the connection drops the body
            "PATH_INFO": request.path.encode().decode("latin-1"),
            "QUERY_STRING": request.query.decode("latin-1"),
            "CONTENT_TYPE": texts.get("content-type", ""),
            "CONTENT_LENGTH": str(len(request.body)),
            "SERVER_PROTOCOL": f"HTTP/{request.version}",
            "wsgi.input": io.BytesIO(request.body),
        }
        setup_testing_defaults(environ)  # the other keys that PEP 3333 requires
        response = Response.from_app(self._flask, environ, buffered=True)
        headers = {name: value for name, value in response.headers if name not in ("Content-Type", "Content-Length")}
        return Answer(response.status_code, response.headers["Content-Type"], response.get_data(), headers)
