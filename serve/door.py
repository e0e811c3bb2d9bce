"""The way in: an ASGI application that reads each body within its limits, sends well-formed predictions straight to the
model, and everything else to Flask in a thread.

A prediction touches no Flask, whose request, form and JSON machinery costs more than a small network. Bodies are read
in the event loop, so a thousand slow clients hold no thread."""

import asyncio
import hmac
import io
import itertools
import json
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serve.answers import DEFAULT_TOP_K, FAULT, JSON, PROTECTION, answers, top_k_of
from serve.lanes import Job
from serve.limits import Refusal
from serve.log import Log, tell
from serve.service import Service
from serve.uploads import NotWellFormed, counted, from_form, from_json, is_picture

OPEN = ("/", "/health", "/ready")
"""What is answered without the API key: the page, which asks for it, and what a load balancer asks."""

MAX_HELD = 512_000_000
"""Bytes of unfinished bodies that are kept at a time."""

LARGE = 65_536
"""Bytes of a body from which on a request is refused before it is read, if it would be afterwards."""

FLASK_THREADS = 8

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_TOP_K = re.compile(rb"top_k=([0-9]{1,9})")
_PROTECTION = [(name.lower().encode(), value.encode()) for name, value in PROTECTION.items()]

Scope = dict[str, Any]
Given = dict[bytes, bytes]
"""A request's headers, names in lower case."""

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Response = tuple[int, list[tuple[bytes, bytes]], bytes]
"""Status, headers, body."""


class ClientLeft(Exception):
    """The connection ended before the request did."""


class Door:
    """The ASGI application.

    Args:
        service: what answers.
        key: what clients must send; None: nothing.
        log: where a line is written for each request; None: standard output.
    """

    def __init__(self, service: Service, key: str | None = None, log: Log | None = None):
        self.service = service
        self._key = key.encode() if key else None
        self._answer = answers(service.model.task, service.model.labels)
        self._log = log or Log()
        self._flask: Any = None
        self._threads = ThreadPoolExecutor(FLASK_THREADS, thread_name_prefix="flask")
        self._held = 0
        self._ids = map("{}-{:x}".format, itertools.repeat(secrets.token_hex(4)), itertools.count(1))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.perf_counter()
        given: Given = dict(scope["headers"])
        name = given.get(b"x-request-id", b"")
        if not _SANE_ID.fullmatch(name):
            name = next(self._ids).encode()
        job: Job | None = None
        try:
            if self._key is not None and scope["path"] not in OPEN:
                self._check_key(given)
            predicts = scope["path"] == "/predict" and scope["method"] == "POST"
            data = await self._body(given, receive, predicts)
            response = None
            if predicts and (work := self._job(scope, given, data)):
                job, done = work
                response = await done
            if response is None:
                response = await self._from_flask(scope, given, data)
        except Refusal as refusal:
            response = _refused(refusal)
        except ClientLeft:
            response = None
        except Exception as error:
            tell("fault", error, id=name.decode(), path=scope["path"])
            response = _refused(Refusal(500, FAULT))
        if response is not None:
            status, headers, body = response
            await send(
                {"type": "http.response.start", "status": status, "headers": [*headers, (b"x-request-id", name)]}
            )
            await send({"type": "http.response.body", "body": body})
        self._tell(name.decode(), scope, response[0] if response else 499, begun, job)

    def tell_unread(self, client: tuple[str, int] | None, status: int) -> None:
        """Counts and logs what was refused before it was a request."""
        scope = {"method": "", "path": "", "client": client}
        self._tell(next(self._ids), scope, status, time.perf_counter(), None)

    def flush(self) -> None:
        """Write the log lines that are kept."""
        self._log.flush()

    def _check_key(self, given: Given) -> None:
        bearer = given.get(b"authorization", b"")
        sent = bearer[7:].strip() if bearer[:7].lower() == b"bearer " else given.get(b"x-api-key", b"")
        if not hmac.compare_digest(sent, self._key or b""):
            raise Refusal(
                401,
                "This server asks for a key; send it as the header Authorization: Bearer KEY, or X-API-Key: KEY.",
                {"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, given: Given, receive: Receive, predicts: bool) -> bytes:
        """The whole body.

        Raises:
            Refusal: it is too large, or too many are being read; what is left of it is not kept.
            ClientLeft: the client left before its end.
        """
        limits = self.service.limits
        declared = given.get(b"content-length")
        if declared is None and b"transfer-encoding" not in given:
            return b""
        if declared is not None and int(declared) > limits.max_bytes:
            raise limits.too_large()
        if predicts and declared is not None and int(declared) > LARGE:
            self.service.lanes.admit()
        parts, size, more = [], 0, True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                part, more = message["body"], message["more_body"]
                parts.append(part)
                size += len(part)
                self._held += len(part)
                if size > limits.max_bytes:
                    raise limits.too_large()
                if self._held > MAX_HELD:
                    raise Refusal(429, "Too much is being uploaded; send this again in 5 s.", {"Retry-After": "5"})
        finally:
            self._held -= size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _job(self, scope: Scope, given: Given, data: bytes) -> "tuple[Job, asyncio.Future[Response | None]] | None":
        """A prediction on its way; None: Flask has to say what is wrong with it. The response is None if Flask has
        to."""
        query = scope["query_string"]
        found = _TOP_K.fullmatch(query)
        top_k = top_k_of(found[1].decode()) if found else DEFAULT_TOP_K
        if top_k is None or (query and not found) or not data:
            return None
        full = given.get(b"content-type", b"")
        kind = full.partition(b";")[0].strip().lower()
        limits = self.service.limits
        if kind == b"multipart/form-data":
            read = lambda: counted(from_form(full, data), limits)  # noqa: E731
        elif kind == b"application/json":
            read = lambda: counted(from_json(data), limits)  # noqa: E731
        elif is_picture(kind):
            read = lambda: [data]  # noqa: E731
        else:
            return None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Response | None] = loop.create_future()
        accept = given.get(b"accept", b"").decode("latin-1")

        def finish(job: Job) -> None:  # in the thread that ended the job
            response, error = None, job.error
            if error is None:
                try:
                    response = _response(200, *self._answer(job.rows, top_k, accept))
                except Exception as fault:
                    error = fault
            if threading.get_ident() == here:
                _settle(done, response, error)
            else:
                loop.call_soon_threadsafe(_settle, done, response, error)

        here = threading.get_ident()
        job = Job(read, len(data), finish)
        self.service.lanes.submit(job)
        return job, done

    async def _from_flask(self, scope: Scope, given: Given, data: bytes) -> Response:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call_flask, scope, given, data)

    def _call_flask(self, scope: Scope, given: Given, data: bytes) -> Response:
        """The same request through WSGI (PEP 3333)."""
        from werkzeug.wrappers import Response as FlaskResponse

        if self._flask is None:
            from serve.app import create_app  # only now: a server that only predicts needs no Flask

            self._flask = create_app(self.service)
        host, port = scope["server"] or ("localhost", 0)
        environ: dict[str, Any] = {
            f"HTTP_{name.decode('latin-1').upper().replace('-', '_')}": text for name, text in _texts(given)
        }
        environ |= {
            "REQUEST_METHOD": scope["method"],
            "SCRIPT_NAME": "",
            "PATH_INFO": scope["path"].encode("utf-8", "replace").decode("latin-1"),
            "QUERY_STRING": scope["query_string"].decode("latin-1"),
            "CONTENT_TYPE": given.get(b"content-type", b"").decode("latin-1"),
            "CONTENT_LENGTH": str(len(data)),
            "SERVER_NAME": host,
            "SERVER_PORT": str(port),
            "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": scope["scheme"],
            "wsgi.input": io.BytesIO(data),
            "wsgi.errors": io.StringIO(),
            "wsgi.multithread": True,
            "wsgi.multiprocess": True,
            "wsgi.run_once": False,
        }
        response = FlaskResponse.from_app(self._flask, environ, buffered=True)
        headers = [(key.lower().encode("latin-1"), value.encode("latin-1")) for key, value in response.headers]
        return response.status_code, headers, response.get_data()

    def _tell(self, name: str, scope: Scope, status: int, begun: float, job: Job | None) -> None:
        """Counts a request, and keeps its line for the log."""
        took = time.perf_counter() - begun
        metrics = self.service.metrics
        metrics.count(status)
        metrics.queue(self.service.lanes.waiting)
        client = scope["client"] or ("", 0)
        path = '"/predict"' if scope["path"] == "/predict" else json.dumps(scope["path"])
        line = (
            f'"id": "{name}", "client": "{client[0]}", "method": "{scope["method"]}", "path": {path}, '
            f'"status": {status}, "ms": {1e3 * took:.3f}'
        )
        if job is not None and job.batch:
            metrics.observe("queue_seconds", job.queued)
            metrics.observe("decode_seconds", job.decoding)
            metrics.observe("forward_seconds", job.forward)
            metrics.observe("http_seconds", took - job.queued - job.decoding - job.forward)
            metrics.observe("batch_size", job.batch)
            line += (
                f', "images": {len(job.rows)}, "queue_ms": {1e3 * job.queued:.3f}, '
                f'"decode_ms": {1e3 * job.decoding:.3f}, "forward_ms": {1e3 * job.forward:.3f}, "batch": {job.batch}'
            )
        if self._log.add(line):
            asyncio.get_running_loop().call_soon(self.flush)


def _settle(done: "asyncio.Future[Response | None]", response: Response | None, error: Exception | None) -> None:
    if done.done():  # cancelled: the server ends
        return
    if error is None or isinstance(error, NotWellFormed):
        done.set_result(response)
    else:
        done.set_exception(error)


def _refused(refusal: Refusal) -> Response:
    status, headers, body = _response(refusal.status, JSON, json.dumps({"ERROR": refusal.message}).encode())
    more = [(name.lower().encode(), value.encode("latin-1")) for name, value in refusal.headers.items()]
    return status, [*headers, *more], body


def _response(status: int, kind: str, body: bytes) -> Response:
    return status, [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body)), *_PROTECTION], body


def _texts(given: Given) -> list[tuple[bytes, str]]:
    return [
        (name, value.decode("latin-1"))
        for name, value in given.items()
        if name not in (b"content-type", b"content-length")
    ]
