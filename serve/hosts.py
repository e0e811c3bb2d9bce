"""Check the Host of requests against DNS rebinding, by which another site's page could reach this server."""

import ipaddress
import re
from collections.abc import Sequence

from serve.limits import Refusal

ALL = "*"

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,255})(?::([0-9]{0,5}))?", re.ASCII | re.IGNORECASE)


class Hosts:
    """The host names that the server answers to.

    Args:
        listening: address on which the server listens.
        allowed: further names; `*` allows every name. If it is empty and `listening` is no loopback address, every name
            is allowed.
    """

    def __init__(self, listening: str = "0.0.0.0", allowed: Sequence[str] = ()):
        self._names = frozenset(name.lower() for name in allowed)
        self._all = ALL in self._names or not (self._names or is_loopback(listening))
        self.local = is_loopback(listening) and not self._names
        """Whether only programs on this machine are answered, and no proxy with another name."""
        self._seen: set[bytes] = set()

    def check(self, host: bytes | None) -> None:
        """Check the host that a request names.

        Args:
            host: the header, or the host of the request's target; None: there is none, which no browser sends.

        Raises:
            Refusal: the name is malformed or not allowed.
        """
        if self._all or host is None or host in self._seen:
            return
        text = host.decode("latin-1").strip()
        found = _AUTHORITY.fullmatch(text)
        if found is None or int(found[2] or 0) > 65_535:
            raise Refusal(400, "The Host of the request is no name or address; send that of the server.")
        name = found[1].strip("[]").lower().removesuffix(".")
        if name not in self._names and not is_loopback(name):
            raise Refusal(
                421,
                f"This server does not answer as {name[:100]}; ask it as localhost, or start it with "
                f"serve.allowed_hosts=[{name[:100]}] (--allowed-hosts).",
            )
        if len(self._seen) < 100:
            self._seen.add(host)


def is_loopback(name: str) -> bool:
    """Return whether a name or an address always denotes the machine itself (RFC 6761, section 6.3)."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
