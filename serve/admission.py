"""Check the heads of requests: host, API key and announced size. The fast path and the WSGI application share this.

The host is checked against DNS rebinding, which would let a page of another site reach this server."""

import hmac
import ipaddress
import random
import re
from collections.abc import Mapping, Sequence

from serve.batching import Batcher
from serve.limits import Refusal

OPEN_PATHS = ("/", "/docs", "/health", "/ready")
"""Paths that need no API key: the pages, which prompt for the key, and the probes of load balancers."""

LARGE_BODY_BYTES = 65_536
"""Size above which a body is not read if the queue is full."""

MAX_TYPE_BYTES = 1000
"""Maximum size of a Content-Type. Parsing one of 60,000 bytes took 70 ms of CPU (November 2026)."""

MAX_LENGTH_DIGITS = 20
"""Maximum number of digits of a Content-Length, with leading zeros; Python converts at most 4,300."""

ANY_HOST = "*"

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,255})(?::([0-9]{0,5}))?", re.ASCII | re.IGNORECASE)


class Hosts:
    """The host names that the server answers to.

    Args:
        listening: address on which the server listens.
        allowed: further names; `*` allows every name. If it is empty and `listening` is not a loopback address, every
            name is allowed.
    """

    def __init__(self, listening: str = "0.0.0.0", allowed: Sequence[str] = ()):
        self._names = frozenset(name.lower() for name in allowed)
        self._allows_all = ANY_HOST in self._names or not (self._names or is_loopback(listening))
        self.local = is_loopback(listening) and not self._names
        """Whether only programs on this machine are answered, and no proxy with another name."""
        self._accepted: set[bytes] = set()

    def check(self, host: bytes | None) -> None:
        """Check the host that a request names.

        Args:
            host: the `Host` header, or the host of the request's target; None if both are missing (no browser).

        Raises:
            Refusal: the name is malformed or not allowed.
        """
        if self._allows_all or host is None or host in self._accepted:
            return
        match = _AUTHORITY.fullmatch(host.decode("latin-1").strip())
        if match is None or int(match[2] or 0) > 65_535:
            raise Refusal(400, "The Host header is not a host name or an address; send that of the server.")
        name = match[1].strip("[]").lower().removesuffix(".")
        if name not in self._names and not is_loopback(name):
            raise Refusal(
                421,
                f"This server does not accept the host name {name[:100]}; use localhost, or start it with "
                f"serve.allowed_hosts=[{name[:100]}] (--allowed-hosts).",
            )
        if len(self._accepted) < 100:
            self._accepted.add(host)


def is_loopback(name: str) -> bool:
    """Return whether a name or an address always denotes the machine itself (RFC 6761, section 6.3)."""
    try:
        address = ipaddress.ip_address(name)
        return address.is_loopback and getattr(address, "ipv4_mapped", None) is None  # loopback in Python 3.13
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


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
            headers: headers by name in lower case; only those that this module reads are needed.
            batcher: the queue of a prediction.
            host: host of a target in absolute form, which replaces the header (RFC 9112, section 3.2.2); else empty.

        Raises:
            Refusal: the request is not admitted.
        """
        self._hosts.check(host or headers.get(b"host"))
        if self._key is not None and path not in OPEN_PATHS:
            self._check_key(headers)
        if len(headers.get(b"content-type", b"")) > MAX_TYPE_BYTES:
            raise Refusal(400, f"The Content-Type is longer than {MAX_TYPE_BYTES} bytes; send one such as image/png.")
        if (coding := headers.get(b"content-encoding")) and is_prediction(method, path):
            _check_content_coding(coding)
        if size := headers.get(b"content-length"):
            if len(size) > MAX_LENGTH_DIGITS or not size.strip().isdigit():
                fault = f"is not a number of at most {MAX_LENGTH_DIGITS} digits"
                raise Refusal(400, f"The Content-Length {fault}; send the size in bytes.")
            batcher.limits.check_size(int(size))
            if int(size) > LARGE_BODY_BYTES and is_prediction(method, path):
                batcher.admit()

    def _check_key(self, headers: Mapping[bytes, bytes]) -> None:
        bearer = headers.get(b"authorization", b"")
        sent = bearer[7:].strip() if bearer[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(sent, self._key or b""):
            raise Refusal(
                401,
                "This server requires an API key; send it in the header Authorization: Bearer KEY, or X-API-Key: KEY.",
                {"WWW-Authenticate": "Bearer"},
            )


def _check_content_coding(coding: bytes) -> None:
    if any(one.strip().lower() not in (b"", b"identity") for one in coding.split(b",")):
        raise Refusal(
            415,
            f"The Content-Encoding {coding.decode('latin-1')[:100]} is not supported; send the body without one.",
            {"Accept-Encoding": "identity"},  # tells clients that the problem is not the Content-Type (RFC 9110)
        )


def is_prediction(method: str, path: str) -> bool:
    """Return whether a request is a prediction."""
    return path == "/predict" and method == "POST"


def request_id(given: bytes | None) -> bytes:
    """Return the client's request id if it is safe to log, else a new one. It is an identifier, not a secret."""
    return given if given and _SANE_ID.fullmatch(given) else b"%016x" % random.getrandbits(64)
