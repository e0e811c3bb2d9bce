"""A client's connection: HTTP/1.1, parsed by httptools (the parser of Node.js), with limits on how slow a client may be
and how much it may send. Every answer is one write, and every refusal is JSON.

This is an asyncio protocol instead of an existing server for two reasons. A small network takes less time than a
server's overhead: an empty application took 0.034 ms of CPU a request in uvicorn, 0.024 to 0.044 in granian, 0.007 in a
bare protocol (one core, 32 clients, November 2026). And none of them both limits the time for the head and shuts down
without losing a request.
"""

import asyncio
import contextlib
import functools
import http
import re
import time
from collections import deque
from dataclasses import dataclass
from email.utils import formatdate
from typing import Literal
from urllib.parse import unquote_to_bytes

import httptools

from serve.answers import HEADERS, Answer, refused
from serve.dispatch import Dispatcher, Request
from serve.limits import FAULT, Refusal
from serve.log import log_event

HEAD_SECONDS = 10
"""Time limit from the connection, or from the first byte of a later request, to the end of the headers."""

PAUSE_SECONDS = 10
"""Maximum pause within a body."""

BODY_SECONDS = 60
"""Time limit for a complete body, and for a client to read its answer."""

REST_SECONDS = 5
REST_BYTES = 64_000_000
"""Time and size limits for reading and dropping the rest of a body whose request has been answered: most clients read
the answer only after sending everything."""

HEAD_BYTES = 65_536
"""Maximum size of request line and headers together, and of the chunk sizes and trailers between two pieces of a body
or after the last one."""

IDLE_SECONDS = 130
"""Time that an idle connection stays open for another request; proxies give it up earlier (nginx 60 s, Caddy 120)."""

LINGER_SECONDS = 1.0
"""Time that an idle connection stays open during shutdown: a request may be in transit."""

MAX_PIPELINED = 16
"""Maximum number of requests of one connection that wait for an answer."""

_ABSOLUTE_TARGET = re.compile(rb"https?://([^/?#]+)([^#]*)", re.IGNORECASE)
"""Matches a target with scheme and host, as for a proxy (RFC 9112, section 3.2.2)."""

_START_LINE = re.compile(rb"(?:\r\n)*[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:\Z| (?:[^\r\n]*\Z|[^\r\n]+ HTTP/[0-9]\.[0-9]\r\n))")
"""Matches a request line, possibly incomplete, that is well-formed so far (RFC 9112, section 3)."""

_METHOD_ERRORS = ("Invalid method", "Expected space after method")
_VERSION_ERRORS = ("Invalid HTTP version", "Pause on PRI/Upgrade")
"""Prefixes of the parser's errors (llhttp 9, November 2026). If they change, the status becomes 400."""

_MALFORMED = (400, "This is not a well-formed HTTP/1.1 request; correct it, and send it again.")
_UNKNOWN_METHOD = (501, "The server does not support this method; use GET or POST, in capital letters.")
_UNKNOWN_VERSION = (505, "The server supports HTTP/1.1 and HTTP/1.0; send the request in one of them.")

_COMBINED_HEADERS = (b"host", b"transfer-encoding", b"content-encoding", b"accept")
"""Headers that are joined by a comma if they are repeated; of other headers, the last one counts."""

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}

_CONNECTION = {True: b"connection: keep-alive\r\n", False: b"connection: close\r\n"}
"""Connection header for keep-alive or not; HTTP/1.1 needs none for keep-alive."""

_ReadState = Literal["new", "idle", "head", "body", "rest", "over"]
"""State of reading. `rest`: the rest of a body whose request has been answered; `over`: no more requests, further bytes
are dropped."""


class _StopParsing(Exception):
    """Raised in a callback to stop the parser: no later request is answered."""


@dataclass(eq=False)
class Connections:
    """The connections of a process.

    Attributes:
        dispatcher: answers requests.
        max_connections: maximum number of open connections.
        ending: whether the process is shutting down; then every answer closes its connection.
    """

    dispatcher: Dispatcher
    max_connections: int
    ending: bool = False

    def __post_init__(self) -> None:
        self.open: set[Connection] = set()
        self._second, self._date = 0, b""

    def date(self) -> bytes:
        """Return the Date header line, cached for a second."""
        second = int(time.time())
        if second != self._second:
            self._second, self._date = second, f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._date

    def check(self) -> None:
        """Close connections whose clients are too slow. Call this about once a second."""
        for connection in list(self.open):
            connection.check()


class Connection(asyncio.Protocol):
    """Reads requests, passes them to the dispatcher one by one, and writes the answers in order."""

    def __init__(self, connections: Connections, loop: asyncio.AbstractEventLoop):
        self._connections, self._dispatcher, self._loop = connections, connections.dispatcher, loop
        self._parser = httptools.HttpRequestParser(self)
        self._state: _ReadState = "new"
        self._state_since = self._last_read = loop.time()
        self._head_bytes = 0
        self._body: bytes | bytearray = b""
        self._body_bytes = 0  # bytes of the body so far
        self._dropped_bytes = 0
        self._pending: deque[Request] = deque()
        self._request: Request | None = None  # whose body is being read
        self._answering: Request | None = None
        self._writes_paused = False
        self._at_eof = False  # the client sends no more
        self._final_answer_written = False  # the last answer has been written

    # callbacks of asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # sockets only
        self._transport = transport
        self._client = (transport.get_extra_info("peername") or ("",))[0]
        self._connections.open.add(self)
        if len(self._connections.open) > self._connections.max_connections:
            message = "The server has reached its maximum number of connections; send this again in 1 s."
            self._refuse(Refusal(503, message, {"Retry-After": "1"}))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.open.discard(self)
        self._dispatcher.reserve(-self._body_bytes)
        self._body = b""  # the parser refers to this object, which thus waits for the garbage collector
        if self._state == "body" and self._request is not None:
            self._dispatcher.record(self._request, 499)
        self._pending.clear()

    def data_received(self, data: bytes) -> None:
        self._last_read = self._loop.time()
        if self._state == "over":
            self._drop(len(data))
            return
        self._head_bytes += len(data)
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._upgrades():
                    self._parse_as_plain_http(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, _StopParsing):
                return
            log_event("fault", error)
            self._refuse(Refusal(500, FAULT))
        except httptools.HttpParserError as error:
            # If this read begins within an earlier request, its first line is not the request line.
            self._refuse(_parse_refusal(str(error), data if self._head_bytes >= len(data) else b""))
        if self._head_bytes > HEAD_BYTES:
            self._refuse(_head_too_long())

    def eof_received(self) -> bool:
        """Keep the connection open if answers are pending: the client sends no more but may still read."""
        self._at_eof = self._answering is not None or bool(self._pending)
        return self._at_eof

    def pause_writing(self) -> None:
        self._writes_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._writes_paused = False
        self._transport.resume_reading()
        self._answer_next()

    # callbacks of the parser

    def on_message_begin(self) -> None:
        self._set_state("head")
        self._url, self._header_bytes = b"", 0
        self._headers: dict[bytes, bytes] = {}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        name = name.lower()
        if name in self._headers and name in _COMBINED_HEADERS:
            value = self._headers[name] + b"," + value  # one field in several lines (RFC 9110, section 5.2)
        if self._state == "head":  # a trailer changes no header (RFC 9112, section 7.1.2)
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        if self._upgrades():
            return
        self._set_state("body")
        version = self._parser.get_http_version()
        url, host = self._url, b""
        if not url.startswith(b"/") and (absolute := _ABSOLUTE_TARGET.match(url)):
            host, url = absolute[1], absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
        path, _, query = url.partition(b"?")
        request = self._request = Request(
            method=self._parser.get_method().decode("latin-1"),
            path=(unquote_to_bytes(path) if b"%" in path else path).decode("utf-8", "replace"),
            query=query,
            headers=self._headers,
            version=version,
            client=self._client,
            keep=self._parser.should_keep_alive(),
            host=host,
        )
        try:
            if self._head_bytes > HEAD_BYTES and len(self._url) + self._header_bytes > HEAD_BYTES:
                # The read may also contain part of a body.
                raise _head_too_long()
            if version == "1.1":
                if b"host" not in self._headers:
                    raise Refusal(400, "The request has no Host header, which HTTP/1.1 requires; send it.")
            elif version != "1.0":
                request.keep = False
                raise Refusal(*(_MALFORMED if version == "0.9" else _UNKNOWN_VERSION))  # 0.9: it may be missing
            if coding := self._headers.get(b"transfer-encoding"):
                _check_transfer_coding(coding, request)
            self._dispatcher.admit(request)
        except Refusal as refusal:
            self._answer_early(refusal)
            return
        if version == "1.1" and self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if self._state == "rest":
            self._drop(len(body))
            return
        if not self._body:
            self._body = body
        elif isinstance(self._body, bytes):
            self._body = bytearray().join((self._body, body))
        else:
            self._body += body  # a list would take 40 bytes for each piece, and a piece may be a single byte
        self._body_bytes += len(body)
        try:
            self._dispatcher.reserve(len(body))
            self._dispatcher.service.limits.check_size(self._body_bytes)
        except Refusal as refusal:
            self._answer_early(refusal)

    def on_message_complete(self) -> None:
        if self._upgrades():
            return
        request, answered = self._request, self._state == "rest"
        self._head_bytes = 0
        self._set_state("idle")
        self._dispatcher.reserve(-self._body_bytes)
        if request is not None:
            request.body = bytes(self._body)
        self._request, self._body, self._body_bytes = None, b"", 0
        if answered or request is None:
            if self._final_answer_written:
                self._transport.close()
            return
        if len(self._pending) >= MAX_PIPELINED:
            self._dispatcher.record(request, 429)
            self._end_after_pending()
            raise _StopParsing
        self._pending.append(request)
        self._answer_next()

    def _upgrades(self) -> bool:
        """Return whether the request being read offers another protocol; the parser then stops before the body."""
        return b"upgrade" in self._headers and self._parser.should_upgrade()

    def _parse_as_plain_http(self, rest: bytes) -> None:
        """Parse a request that offers another protocol again as plain HTTP/1.1; Java's client sends such requests."""
        lines = [b"%b: %b\r\n" % one for one in self._headers.items() if one[0] not in (b"upgrade", b"connection")]
        version = self._parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (self._parser.get_method(), self._url, version, b"".join(lines))
        self._parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(httptools.HttpParserUpgrade):  # CONNECT, which is refused like any unknown method
            self._parser.feed_data(head + rest)

    def check(self) -> None:
        """Close the connection if the client is too slow, or if it is idle during shutdown."""
        now = self._loop.time()
        waited = now - self._state_since
        if self._transport.is_closing() or self._transport.get_write_buffer_size():
            if now - max(self._last_read, self._state_since) > BODY_SECONDS:
                self._transport.abort()
        elif self._state == "head" and waited > HEAD_SECONDS:
            self._refuse(Refusal(408, f"The headers did not arrive within {HEAD_SECONDS} s; send the request again."))
        elif self._state == "body" and (waited > BODY_SECONDS or now - self._last_read > PAUSE_SECONDS):
            message = f"The body paused for {PAUSE_SECONDS} s or took longer than {BODY_SECONDS} s; send it faster."
            self._refuse(Refusal(408, message))
        elif self._answering is None and waited > self._timeout_seconds():
            self._transport.close()

    def _timeout_seconds(self) -> float:
        if self._connections.ending and self._state in ("new", "idle"):
            return LINGER_SECONDS
        rest = REST_SECONDS if self._loop.time() - self._last_read > REST_SECONDS else BODY_SECONDS
        return {"new": HEAD_SECONDS, "idle": IDLE_SECONDS, "rest": rest, "over": rest}.get(self._state, BODY_SECONDS)

    def end(self) -> None:
        """Begin the shutdown: answer pending requests, and one that may be in transit."""
        if self._state in ("new", "idle"):
            self._state_since = self._loop.time()

    def _set_state(self, state: _ReadState) -> None:
        self._state = state
        self._state_since = self._loop.time()

    def _answer_next(self) -> None:
        """Answer the oldest pending request, unless another one is being answered or the client does not read."""
        while self._pending and self._answering is None and not self._writes_paused:
            request = self._answering = self._pending.popleft()
            self._dispatcher.answer(request, self._reply)

    def _answer_early(self, refusal: Refusal) -> None:
        """Refuse a request before its body is complete; the rest of the body is dropped."""
        request = self._request
        assert request is not None
        request.keep = request.keep and b"expect" not in request.headers  # its client may never send the body
        self._dispatcher.reserve(-self._body_bytes)
        self._body, self._body_bytes, self._dropped_bytes = b"", 0, 0
        self._dispatcher.record(request, refusal.status)
        if self._end_after_pending():
            raise _StopParsing
        self._set_state("rest")
        self._answering = request
        self._reply(request, refused(refusal))

    def _end_after_pending(self) -> bool:
        """Return whether earlier requests are pending. If so, close after them; this request gets no answer."""
        due = [*filter(None, [self._answering]), *self._pending]
        if due:
            due[-1].keep = False
            self._request, self._body, self._dropped_bytes = None, b"", 0
            self._set_state("over")
        return bool(due)

    def _drop(self, size: int) -> None:
        """Count dropped bytes; abort the connection above the limit."""
        self._dropped_bytes += size
        if self._dropped_bytes > REST_BYTES:
            self._transport.abort()

    def _reply(self, request: Request, answer: Answer) -> bool:
        """Write an answer. Return False if the client has disconnected."""
        self._answering = None
        if self._transport.is_closing():
            return False
        keep = request.keep and (bool(self._pending) or not (self._connections.ending or self._at_eof))
        self._transport.write(
            b"%b%b%bcontent-length: %d\r\nx-request-id: %b\r\n%b\r\n%b"
            % (
                _STATUS_LINES[answer.status],
                self._connections.date(),
                _header_lines(answer.content_type, *answer.headers.items()),
                len(answer.body),
                request.name,
                b"" if keep and request.version == "1.1" else _CONNECTION[keep],
                b"" if request.method == "HEAD" else answer.body,
            )
        )
        if self._state == "idle":
            self._state_since = self._loop.time()
        self._final_answer_written = not keep
        if self._final_answer_written and self._state == "over":
            # Closing with unread bytes would reset the connection, and the client could lose the answer.
            self._transport.write_eof()
            self._state_since = self._loop.time()
        elif self._final_answer_written and self._state != "rest":
            self._transport.close()
        elif self._pending:
            self._loop.call_soon(self._answer_next)
        return True

    def _refuse(self, refusal: Refusal) -> None:
        """Refuse an incomplete or malformed request, and close."""
        if self._transport.is_closing() or self._state == "over":
            return
        if self._state == "rest":  # the request has been answered
            self._transport.close()
            return
        request = self._request or Request("", "", b"", {}, "1.1", self._client, keep=False)
        request.keep = False
        self._dispatcher.record(request, refusal.status)
        if self._end_after_pending():
            return
        self._state = "idle"
        self._reply(request, refused(refusal))


@functools.lru_cache(64)  # few heads differ: by content type, and by the seconds of Retry-After
def _header_lines(content_type: str, *headers: tuple[str, str]) -> bytes:
    lines = {"content-type": content_type, **HEADERS, **dict(headers)}
    return "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")


def _check_transfer_coding(coding: bytes, request: Request) -> None:
    """Check that the only transfer coding is chunked (RFC 9112, 6.1 and 6.3); else raise Refusal, and close."""
    codings = [one.strip().lower() for one in coding.split(b",") if one.strip()]
    if codings == [b"chunked"] and request.version == "1.1":
        return
    request.keep = False
    if request.version != "1.1" or codings[-1:] != [b"chunked"] or b"chunked" in codings[:-1]:
        raise Refusal(400, "The Transfer-Encoding does not delimit the body; send chunked, or a Content-Length.")
    raise Refusal(501, "The only supported Transfer-Encoding is chunked; send the body without any other.")


def _parse_refusal(error: str, data: bytes) -> Refusal:
    """Return the refusal of a request that cannot be parsed; `data`: it, from its first byte; empty if unknown."""
    if error.startswith(_VERSION_ERRORS):
        return Refusal(*_UNKNOWN_VERSION)
    return Refusal(*(_UNKNOWN_METHOD if error.startswith(_METHOD_ERRORS) and _START_LINE.match(data) else _MALFORMED))


def _head_too_long() -> Refusal:
    return Refusal(431, f"The request line and headers are longer than {HEAD_BYTES} bytes; send fewer headers.")
