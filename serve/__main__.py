"""`python -m serve FOLDER`: check the address and the bundle, then answer HTTP until SIGTERM or Ctrl-C.

Exit codes: 0 stopped, 2 wrong arguments, 3 the address cannot be used, 4 the bundle cannot.
"""

import argparse
import contextlib
import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flask import Flask
from gunicorn.app.base import BaseApplication

from serve.app import Limits, create_app
from serve.bundle import Bundle, BundleError

READ_SECONDS = 10
"""How long a client may pause in the middle of a request before its thread is given to others."""

GRACE_SECONDS = 8
"""How long accepted requests may take to finish after SIGTERM; the process is gone within 10 seconds."""


class AddressError(Exception):
    """Host or port cannot be listened on; the message says why and what to do."""

    exit_code = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop. Returns the exit code; gunicorn leaves with 0 by SystemExit."""
    options = _parse(arguments)
    try:
        listener = _listen(options.host, options.port)
        bundle = Bundle.open(options.folder)
    except (AddressError, BundleError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    application = create_app(bundle, Limits(options.max_upload_mb, options.max_pixels))
    note = f"Serving {bundle.task} ({len(bundle.labels)} classes) on {_url(listener)}"
    _return_memory()
    _Server(application, listener, options.threads, note).run()
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve",
        description="Answer HTTP from a bundle.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="a bundle, or a run folder that holds one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one of this machine"
    )
    parser.add_argument("--port", type=_within(0, 65535), default=5000, help="0: any that is free")
    parser.add_argument(
        "--max-upload-mb", type=_within(1, 10_000), default=16, help="largest request, in units of 1,000,000 bytes"
    )
    parser.add_argument(
        "--max-pixels", type=_within(1, 178_956_970), default=50_000_000, help="largest image, width x height"
    )
    parser.add_argument("--threads", type=_within(1, 256), default=8, help="requests answered at a time")
    return parser.parse_args(arguments)


def _within(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return int(text)

    return number  # argparse says "invalid number value: 'x'" of what int() refuses


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket: taken here, since gunicorn would retry a port in use for five seconds and exit with 1.

    Raises:
        AddressError: the host is not one of this machine's, or the port is taken or not allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=256)  # type: ignore[arg-type]
    except socket.gaierror as error:
        raise AddressError(f"The host {host!r} is not known here ({error.strerror}); use --host 127.0.0.1.") from error
    except OSError as error:
        reason = (error.strerror or str(error)).split(" (")[0]
        raise AddressError(
            f"Port {port} on {host} cannot be listened on: {reason}. Stop what uses it, or choose another with --port."
        ) from error
    # Linux hands this on to accepted connections; Python's own time-outs would be reset by gunicorn.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", READ_SECONDS, 0))
    return listener


def _return_memory() -> None:
    """Have glibc give the memory of a large picture back at once, and not keep it for each thread: after seven pictures
    of 49 megapixels together a process had 1.9 GB; so its peak is 0.8 GB (glibc 2.36, 2 cores, 2026)."""
    with contextlib.suppress(AttributeError, OSError):  # other systems, other allocators
        ctypes.CDLL(None).mallopt(-3, 4_000_000)  # M_MMAP_THRESHOLD, in bytes; setting it also keeps it from growing


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    public = "" if ipaddress.ip_address(host).is_loopback else " (public: whoever reaches this machine may use it)"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{public}"


class _Server(BaseApplication):
    """gunicorn, told everything here: no configuration file and no environment variable of its own is read.

    A worker that crashes is replaced by its parent, where the model stays loaded; a worker whose parent is gone ends.
    """

    def __init__(self, application: Flask, listener: socket.socket, threads: int, note: str):
        self.application = application
        self.note = note
        self.settings = {
            "bind": f"fd://{listener.detach()}",
            "workers": 1,
            "worker_class": "gthread",
            "threads": threads,
            "keepalive": 0,  # at SIGTERM gunicorn 26 would wait for idle connections as long as for busy ones
            "graceful_timeout": GRACE_SECONDS,
            "loglevel": "warning",
            "proc_name": "deeplightning serve",
            "post_worker_init": self._ready,
            "control_socket_disable": True,  # since gunicorn 25; it would lie in the user's home
        }
        super().__init__()

    def load_config(self) -> None:
        for name, value in self.settings.items():
            if name in self.cfg.settings:
                self.cfg.set(name, value)

    def load(self) -> Flask:
        return self.application

    def _ready(self, worker: Any) -> None:
        if worker.age == 1:  # not again for a replacement
            print(self.note, flush=True)


if __name__ == "__main__":
    sys.exit(main())
