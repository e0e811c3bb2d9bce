"""Check the heads of requests: host, API key and announced size. The fast path and the WSGI application share this."""

import hmac
import random
import re
from collections.abc import Mapping

from serve.batching import Batcher
from serve.hosts import Hosts
from serve.limits import Refusal

OPEN_PATHS = ("/", "/docs", "/health", "/ready")
"""Paths that need no API key: the pages, which ask for the key, and the probes of load balancers."""

LARGE_BODY_BYTES = 65_536
"""Size above which a body is not read if the queue is full."""

MAX_TYPE_BYTES = 1000
"""Maximum size of a Content-Type. Parsing one of 60,000 bytes took 70 ms of CPU (November 2026)."""

MAX_LENGTH_DIGITS = 20
"""Maximum number of digits of a Content-Length, with leading zeros; Python converts at most 4,300."""

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Admission:
    """Checks the heads of requests.

    Args:
        key: API key that clients must send, if any.
        hosts: host names that the server answers to; None: every name.
    """

    def __init__(self, key: str | None = None, hosts: Hosts | None = None):
        self._key = key.encode() if key else None
        self._hosts = hosts or Hosts()

    @property
    def secured(self) -> bool:
        """Whether clients must send a key."""
        return self._key is not None

    @property
    def private(self) -> bool:
        """Whether only users of this machine, or clients with the key, are answered."""
        return self.secured or self._hosts.local

    def check(
        self, method: str, path: str, headers: Mapping[bytes, bytes], batcher: Batcher, host: bytes = b""
    ) -> None:
        """Check a request before its body is read.

        Args:
            headers: headers by name in lower case; those that this module names suffice.
            batcher: the queue of a prediction.
            host: host of a target in absolute form, which replaces the header (RFC 9112, section 3.2.2); else empty.

        Raises:
            Refusal: the request is not admitted.
        """
        self._hosts.check(host or headers.get(b"host"))
        if self._key is not None and path not in OPEN_PATHS:
            self._check_key(headers)
        if len(headers.get(b"content-type", b"")) > MAX_TYPE_BYTES:
            raise Refusal(400, f"The Content-Type is longer than {MAX_TYPE_BYTES} bytes; name a kind of picture.")
        if (coding := headers.get(b"content-encoding")) and predicts(method, path):
            _check_coding(coding)
        if size := headers.get(b"content-length"):
            if len(size) > MAX_LENGTH_DIGITS or not size.strip().isdigit():
                words = f"is not a number of at most {MAX_LENGTH_DIGITS} digits"
                raise Refusal(400, f"The Content-Length {words}; send the size in bytes.")
            batcher.limits.check_size(int(size))
            if int(size) > LARGE_BODY_BYTES and predicts(method, path):
                batcher.admit()

    def _check_key(self, headers: Mapping[bytes, bytes]) -> None:
        bearer = headers.get(b"authorization", b"")
        sent = bearer[7:].strip() if bearer[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(sent, self._key or b""):
            raise Refusal(
                401,
                "This server asks for a key; send it as the header Authorization: Bearer KEY, or X-API-Key: KEY.",
                {"WWW-Authenticate": "Bearer"},
            )


def _check_coding(coding: bytes) -> None:
    if any(one.strip().lower() not in (b"", b"identity") for one in coding.split(b",")):
        shown = coding.decode("latin-1")[:100]
        raise Refusal(
            415,
            f"A body with the Content-Encoding {shown} is not read; send it without a coding.",
            {"Accept-Encoding": "identity"},  # tells clients that the problem is not the Content-Type (RFC 9110)
        )


def predicts(method: str, path: str) -> bool:
    """Return whether a request is a prediction."""
    return path == "/predict" and method == "POST"


def request_id(given: bytes | None) -> bytes:
    """Return the client's request id if it is safe to log, else a new one. It is an identifier, not a secret."""
    return given if given and _SANE_ID.fullmatch(given) else b"%016x" % random.getrandbits(64)
