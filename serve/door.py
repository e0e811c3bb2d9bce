"""The way in: what a request may have, whether it may come in now, and who answers it. Well-formed predictions go
straight to the model, everything else to Flask in a thread.

A prediction touches no Flask, whose request, form and JSON machinery costs more than a small network.
"""

import asyncio
import hmac
import io
import itertools
import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve.answers import DEFAULT_TOP_K, JSON, PROTECTION, answers, top_k_of
from serve.hosts import Hosts
from serve.lanes import Job
from serve.limits import FAULT, Refusal
from serve.log import Log, tell
from serve.service import Service
from serve.uploads import NotWellFormed, counted, from_form, from_json, is_picture, is_text, texts_from_json

OPEN = ("/", "/health", "/ready")
"""What is answered without the API key: the page, which asks for it, and what a load balancer asks."""

MAX_HELD = 512_000_000
"""Bytes of unfinished bodies that a process keeps at a time."""

LARGE = 65_536
"""Bytes of a body from which on a request is refused before it is read, if it would be afterwards."""

LONGEST_KIND = 1000
"""Bytes of a Content-Type. Parsing one of 60,000 took 70 ms of CPU (November 2026)."""

LONGEST_NUMBER = 20
"""Digits of a Content-Length, with zeros before it; more are refused, since Python converts no more than 4,300."""

LONGEST_PATH = 200
"""Letters of a path that a log line has."""

FLASK_THREADS = 8

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_TOP_K = re.compile(rb"top_k=([0-9]{1,9})")
_PROTECTION = "".join(f"{name.lower()}: {value}\r\n" for name, value in PROTECTION.items())


@dataclass(slots=True, eq=False)
class Request:
    """One request, as it came.

    Attributes:
        method, path, query, headers, version: of HTTP; the path is decoded, header names are in lower case.
        client: its address.
        keep: the connection stays open for another.
        body: all of it.
        begun: when its head was there (`time.perf_counter`).
        host: that of a target in absolute form, which replaces the header (RFC 9112, section 3.2.2); empty: none.
        name: its id, the client's own if that is harmless; set by `Door.admit`.
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

    @property
    def predicts(self) -> bool:
        """Whether it asks the model."""
        return self.path == "/predict" and self.method == "POST"


class Response(NamedTuple):
    """Status, header lines without those that every answer has, and body."""

    status: int
    head: bytes
    body: bytes


Reply = Callable[[Request, Response], bool]
"""Writes an answer, in the event loop; False: the client has left."""


class Door:
    """Answers requests; every method is called in the event loop.

    Args:
        service: what answers.
        key: what clients must send; None: nothing.
        log: where a line is written for each request; None: standard output.
        hosts: the names of the server that are answered; None: every one.
    """

    def __init__(self, service: Service, key: str | None = None, log: Log | None = None, hosts: Hosts | None = None):
        self.service = service
        self._hosts = hosts or Hosts()
        self._key = key.encode() if key else None
        self._answer = answers(service.model.task, service.model.labels)
        self._reader = _text_reader if service.model.task == "text_classification" else _reader
        self._heads: dict[str, bytes] = {}
        self._log = log or Log()
        self._flask: Any = None
        self._threads = ThreadPoolExecutor(FLASK_THREADS, thread_name_prefix="flask")
        self._held = 0
        self._names = map("{}-{:x}".format, itertools.repeat(secrets.token_hex(4)), itertools.count(1))

    def admit(self, request: Request) -> None:
        """Looks at a request before its body is read, and names it.

        Raises:
            Refusal: it is not let in.
        """
        given = request.headers
        name = given.get(b"x-request-id")
        request.name = name if name and _SANE_ID.fullmatch(name) else next(self._names).encode()
        self._hosts.check(request.host or given.get(b"host"))
        if self._key is not None and request.path not in OPEN:
            self._check_key(given)
        if len(given.get(b"content-type", b"")) > LONGEST_KIND:
            raise Refusal(400, f"The Content-Type is longer than {LONGEST_KIND} bytes; name a kind of picture.")
        if size := given.get(b"content-length"):
            if len(size) > LONGEST_NUMBER:
                raise Refusal(400, f"The Content-Length has more than {LONGEST_NUMBER} digits; send the size in bytes.")
            self.check_size(int(size))
            if request.predicts and int(size) > LARGE:
                self.service.lanes.admit()

    def check_size(self, size: int) -> None:
        """Of a body, as it is announced and as it comes, in bytes.

        Raises:
            Refusal: it is too large.
        """
        if size > self.service.limits.max_bytes:
            raise self.service.limits.too_large()

    def hold(self, size: int) -> None:
        """So many more bytes of unfinished bodies are kept.

        Raises:
            Refusal: there are too many.
        """
        self._held += size
        if size > 0 and self._held > MAX_HELD:
            raise Refusal(429, "Too much is being uploaded; send this again in 5 s.", {"Retry-After": "5"})

    def answer(self, request: Request, reply: Reply) -> None:
        """Has a request answered, perhaps before this returns."""
        try:
            if not (request.predicts and self._predict(request, reply)):
                self._ask_flask(request, reply)
        except Refusal as refusal:
            self._finish(request, reply, refused(refusal))

    def tell(self, request: Request, status: int, job: Job | None = None) -> None:
        """Counts a request, and keeps its line for the log."""
        took = time.perf_counter() - request.begun
        metrics = self.service.metrics
        metrics.count(status)
        metrics.queue(self.service.lanes.waiting)
        path = '"/predict"' if request.path == "/predict" else json.dumps(request.path[:LONGEST_PATH])
        line = (
            f'"id": "{request.name.decode()}", "client": "{request.client}", "method": "{request.method}", '
            f'"path": {path}, "status": {status}, "ms": {1e3 * took:.3f}'
        )
        if job is not None and job.batch:
            beside = took - job.queued - job.decoding - job.forward
            metrics.observe((job.queued, job.decoding, job.forward, beside, job.batch))
            line += (
                f', "images": {len(job.rows)}, "queue_ms": {1e3 * job.queued:.3f}, '
                f'"decode_ms": {1e3 * job.decoding:.3f}, "forward_ms": {1e3 * job.forward:.3f}, "batch": {job.batch}'
            )
        self._log.add(line, refused=400 <= status < 500)

    def flush(self) -> None:
        """Write the log lines that are kept; to be called several times a second."""
        self._log.flush()

    def _check_key(self, given: dict[bytes, bytes]) -> None:
        bearer = given.get(b"authorization", b"")
        sent = bearer[7:].strip() if bearer[:7].lower() == b"bearer " else given.get(b"x-api-key", b"")
        if not hmac.compare_digest(sent, self._key or b""):
            raise Refusal(
                401,
                "This server asks for a key; send it as the header Authorization: Bearer KEY, or X-API-Key: KEY.",
                {"WWW-Authenticate": "Bearer"},
            )

    def _finish(self, request: Request, reply: Reply, response: Response, job: Job | None = None) -> None:
        written = reply(request, response)
        self.tell(request, response.status if written else 499, job)

    def _predict(self, request: Request, reply: Reply) -> bool:
        """Hands a prediction to the model. False: Flask has to say what is wrong with it.

        Raises:
            Refusal: the model has too much to do.
        """
        found = _TOP_K.fullmatch(request.query)
        top_k = top_k_of(found[1].decode()) if found else DEFAULT_TOP_K
        read = self._reader(request, self.service.limits)
        if top_k is None or (request.query and not found) or read is None:
            return False
        loop, here = asyncio.get_running_loop(), threading.get_ident()
        accept = request.headers.get(b"accept", b"").decode("latin-1")

        def done(job: Job) -> None:  # in the thread that ended the job
            if job.error is None:
                try:
                    kind, body = self._answer(job.rows, top_k, accept)
                    response: Response | Exception = Response(200, self._head(kind), body)
                except Exception as error:
                    response = error
            else:
                response = job.error
            if threading.get_ident() == here:
                self._predicted(request, reply, job, response)
            else:
                loop.call_soon_threadsafe(self._predicted, request, reply, job, response)

        self.service.lanes.submit(Job(read, len(request.body), done))
        return True

    def _predicted(self, request: Request, reply: Reply, job: Job, response: Response | Exception) -> None:
        if isinstance(response, NotWellFormed):
            self._ask_flask(request, reply)
        elif isinstance(response, Refusal):
            self._finish(request, reply, refused(response), job)
        elif isinstance(response, Exception):
            self._finish(request, reply, self._fault(request, response), job)
        else:
            self._finish(request, reply, response, job)

    def _head(self, kind: str) -> bytes:
        if kind not in self._heads:
            self._heads[kind] = f"content-type: {kind}\r\n{_PROTECTION}".encode()
        return self._heads[kind]

    def _fault(self, request: Request, error: Exception) -> Response:
        tell("fault", error, id=request.name.decode(), path=request.path)
        return refused(Refusal(500, FAULT))

    def _ask_flask(self, request: Request, reply: Reply) -> None:
        loop = asyncio.get_running_loop()

        def ask() -> None:
            try:
                response = self._from_flask(request)
            except Exception as error:
                response = self._fault(request, error)
            loop.call_soon_threadsafe(self._finish, request, reply, response)

        self._threads.submit(ask)

    def _from_flask(self, request: Request) -> Response:
        """The same request through WSGI (PEP 3333)."""
        from werkzeug.wrappers import Response as FlaskResponse

        if self._flask is None:
            from serve.app import create_app  # only now: a server that only predicts needs no Flask

            self._flask = create_app(self.service)
        texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers.items()}
        environ: dict[str, Any] = {
            f"HTTP_{name.upper().replace('-', '_')}": text
            for name, text in texts.items()
            # werkzeug takes a body in chunks for one that has no end, and reads none of it; this one is whole.
            if name not in ("content-type", "content-length", "transfer-encoding", "connection", "upgrade")
        }
        environ |= {
            "REQUEST_METHOD": "GET" if request.method == "HEAD" else request.method,  # the connection drops the body
            "SCRIPT_NAME": "",
            "PATH_INFO": request.path.encode().decode("latin-1"),
            "QUERY_STRING": request.query.decode("latin-1"),
            "CONTENT_TYPE": texts.get("content-type", ""),
            "CONTENT_LENGTH": str(len(request.body)),
            "SERVER_NAME": "localhost",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": f"HTTP/{request.version}",
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(request.body),
            "wsgi.errors": io.StringIO(),
            "wsgi.multithread": True,
            "wsgi.multiprocess": True,
            "wsgi.run_once": False,
        }
        response = FlaskResponse.from_app(self._flask, environ, buffered=True)
        lines = [f"{name}: {value}\r\n" for name, value in response.headers if name.lower() != "content-length"]
        return Response(response.status_code, "".join(lines).encode("latin-1"), response.get_data())


def refused(refusal: Refusal) -> Response:
    """The answer that says so."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in refusal.headers.items())
    head = f"content-type: {JSON}\r\n{_PROTECTION}{lines}"
    return Response(refusal.status, head.encode("latin-1"), json.dumps({"ERROR": refusal.message}).encode())


def _reader(request: Request, limits: Any) -> Callable[[], list[bytes]] | None:
    """How the pictures of a prediction are taken out of it; None: Flask has to look."""
    data = request.body
    full = request.headers.get(b"content-type", b"")
    kind = full.partition(b";")[0].strip().lower()
    if not data:
        return None
    if kind == b"multipart/form-data":
        return lambda: counted(from_form(full, data), limits)
    if kind == b"application/json":
        return lambda: counted(from_json(data), limits)
    return (lambda: [data]) if is_picture(kind) else None


def _text_reader(request: Request, limits: Any) -> Callable[[], list[bytes]] | None:
    """How the texts of a prediction are taken out of it; None: Flask has to look."""
    data = request.body
    full = request.headers.get(b"content-type", b"")
    kind = full.partition(b";")[0].strip().lower()
    if not data:
        return None
    if kind == b"application/json":
        return lambda: counted(texts_from_json(data), limits, "texts")
    return (lambda: [data]) if is_text(kind, full) else None
