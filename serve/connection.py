"""One client's connection: uvicorn's HTTP/1.1 (httptools), with limits on how slow a client may be and how much it may
send besides, and with answers in JSON where uvicorn has plain text.
"""

import json
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_SECONDS = 10
"""How long a client may take from its connection, or from the first byte of a later request, to the end of the
headers."""

PAUSE_SECONDS = 10
"""How long a client may pause in the middle of a body."""

BODY_SECONDS = 60
"""How long a body may take altogether, and how long a client may take to fetch its answer."""

REST_SECONDS = 5
REST_BYTES = 64_000_000
"""How much is still taken of a body whose request has been answered (most clients read the answer only when they have
sent all), and for how long. It is not kept."""

HEAD_BYTES = 65_536
"""The longest request line and headers together."""

IDLE_SECONDS = 30
"""How long a connection stays open for a further request."""

LINGER_SECONDS = 1.0
"""How long an idle connection stays open when the process is about to end: a request may be on its way."""


class Connection(HttpToolsProtocol):
    """A connection that knows what it waits for; `overdue` is asked every second. Leans on uvicorn 0.54's protocol
    class, which the `http` setting lets one replace: its callbacks, `cycle`, `transport` and `send_400_response`."""

    ending = False
    """Of the whole process: every further answer closes its connection."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._state: Literal["new", "idle", "head", "body", "answer", "rest"] = "new"
        self._since = self._heard = self.loop.time()
        self._head_bytes = self._rest_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        self._head_bytes = self._head_bytes + len(data) if self._state == "head" else len(data)
        super().data_received(data)
        if self._state == "head" and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"The request line and headers are longer than {HEAD_BYTES} bytes; send fewer.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._enter("head")

    def on_headers_complete(self) -> None:
        self._enter("body")
        super().on_headers_complete()
        if self.ending:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._state == "rest":
            self._rest_bytes += len(body)
            if self._rest_bytes > REST_BYTES:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._enter("idle" if self._state == "rest" else "answer")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._enter("rest" if self._state == "body" else "idle")
        self._rest_bytes = 0
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "This is not an HTTP/1.1 request as it should be; send it again, well-formed.")

    def shutdown(self) -> None:
        """The process is about to end: the request in hand is answered, and one that may be on its way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        else:
            self._since = self.loop.time()

    def check(self, now: float) -> None:
        """Ends the connection if the client is too slow, or if it idles while the process ends."""
        waited = now - self._since
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            if now - self._heard > BODY_SECONDS:
                self.transport.abort()
        elif self._state == "head" and waited > HEAD_SECONDS:
            self._refuse(408, f"The headers did not come within {HEAD_SECONDS} s; send the request again.")
        elif self._state == "body" and (waited > BODY_SECONDS or now - self._heard > PAUSE_SECONDS):
            self._refuse(
                408,
                f"The body paused for {PAUSE_SECONDS} s or took longer than {BODY_SECONDS} s; send it in one go.",
            )
        elif self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            pass
        elif (
            (self._state == "new" and waited > HEAD_SECONDS)
            or (self._state == "rest" and waited > REST_SECONDS)
            or (self._state in ("new", "idle") and waited > (LINGER_SECONDS if self.ending else IDLE_SECONDS))
        ):
            self.transport.close()

    def _enter(self, state: Literal["idle", "head", "body", "answer", "rest"]) -> None:
        self._state = state
        self._since = self.loop.time()

    def _refuse(self, status: int, message: str) -> None:
        """Answers what is no request yet, or never becomes one, and closes."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = json.dumps({"ERROR": message}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
        self.config.loaded_app.tell_unread(self.client, status)
