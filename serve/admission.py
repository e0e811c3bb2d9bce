"""Which requests are let in, decided on their heads: by host, API key and announced size. The fast path and the WSGI
application share it."""

import hmac
import random
import re
from collections.abc import Mapping

from serve.batching import Batcher
from serve.hosts import Hosts
from serve.limits import Refusal

OPEN = ("/", "/docs", "/health", "/ready")
"""Paths that need no API key: the pages, which ask for it, and the probes of load balancers."""

LARGE = 65_536
"""Bytes of a body from which on a prediction is refused before it is read, if it would be afterwards."""

LONGEST_KIND = 1000
"""Bytes of a Content-Type. Parsing one of 60,000 took 70 ms of CPU (November 2026)."""

LONGEST_NUMBER = 20
"""Digits of a Content-Length, with leading zeros; more are refused, since Python converts no more than 4,300."""

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Admission:
    """Checks heads.

    Args:
        key: the API key that clients must send; None: none.
        hosts: the names of the server that are answered; None: every one.
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
        """Whether nobody but users of this machine, or clients with the key, are answered."""
        return self.secured or self._hosts.local

    def check(
        self, method: str, path: str, headers: Mapping[bytes, bytes], batcher: Batcher, host: bytes = b""
    ) -> None:
        """Checks a request before its body is read.

        Args:
            headers: by name in lower case; of the others only those that this module names.
            batcher: where a prediction would wait.
            host: that of a target in absolute form, which replaces the header (RFC 9112, section 3.2.2); empty: none.

        Raises:
            Refusal: it is not let in.
        """
        self._hosts.check(host or headers.get(b"host"))
        if self._key is not None and path not in OPEN:
            self._check_key(headers)
        if len(headers.get(b"content-type", b"")) > LONGEST_KIND:
            raise Refusal(400, f"The Content-Type is longer than {LONGEST_KIND} bytes; name a kind of picture.")
        if (coding := headers.get(b"content-encoding")) and predicts(method, path):
            _check_coding(coding)
        if size := headers.get(b"content-length"):
            if len(size) > LONGEST_NUMBER or not size.strip().isdigit():
                words = f"is not a number of at most {LONGEST_NUMBER} digits"
                raise Refusal(400, f"The Content-Length {words}; send the size in bytes.")
            batcher.limits.check_size(int(size))
            if int(size) > LARGE and predicts(method, path):
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
            {"Accept-Encoding": "identity"},  # so that a client knows that the Content-Type is not meant (RFC 9110)
        )


def predicts(method: str, path: str) -> bool:
    """Whether a request asks the model."""
    return path == "/predict" and method == "POST"


def request_id(given: bytes | None) -> bytes:
    """The id of a request: the client's own if it is harmless, else a new one, which tells requests apart and is no
    secret."""
    return given if given and _SANE_ID.fullmatch(given) else b"%016x" % random.getrandbits(64)
