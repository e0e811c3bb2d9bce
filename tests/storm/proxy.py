"""Run MLflow's server behind a TCP proxy that injects faults: stalls, resets, errors 500, lost answers.

Both run in forked processes. A file holds the mode of the proxy, which also applies to open connections.
"""

import contextlib
import multiprocessing
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path

from commands import free_port

MODES = ("pass", "refuse", "stall", "reset", "error", "lose", "slow")
"""`lose` forwards the request, and resets the connection instead of answering."""

_ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)


@contextlib.contextmanager
def forked(function: Callable[..., None], *arguments: object) -> Iterator[ForkProcess]:
    """Call a function in a forked process, which is killed at the end of the block."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def serve_mlflow(folder: Path, port: int) -> None:
    """Run MLflow's server on an SQLite store in a folder until it is killed."""
    os.environ |= {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder / 'server.db'}",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "kept"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    from mlflow.server import app
    from werkzeug.serving import run_simple

    run_simple("127.0.0.1", port, app, threaded=True)


def wait_for(port: int, seconds: float = 60) -> None:
    """Wait until a process listens on a port."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class Proxy:
    """Proxy with a separate port in front of `target`, while `listen` runs."""

    def __init__(self, folder: Path, target: int):
        self.port, self._target, self._file = int(free_port()), target, folder / "mode"
        self.set("pass")

    def set(self, mode: str) -> None:
        """Set the mode, one of `MODES`."""
        beside = self._file.with_suffix(".new")
        beside.write_text(mode)
        beside.rename(self._file)

    def listen(self) -> None:
        """Accept connections, except in mode `refuse`."""
        listener = None
        while True:
            if self._file.read_text() == "refuse":
                if listener is not None:
                    listener.close()
                listener = None
                time.sleep(0.02)
                continue
            if listener is None:
                listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
            ready, _, _ = select.select([listener], [], [], 0.02)
            if ready:
                client, _ = listener.accept()
                threading.Thread(target=_carry, args=(client, self._target, self._file), daemon=True).start()


def _carry(client: socket.socket, target: int, file: Path) -> None:
    """Forward bytes both ways, until a mode or a side closes the connection."""
    with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", target)) as server:
        while True:
            ready, _, _ = select.select([client, server], [], [], 0.05)
            mode = file.read_text()
            if mode in ("reset", "refuse"):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                return
            if mode == "stall":
                time.sleep(0.02)
                continue
            for side in ready:
                if not (part := side.recv(65536)):
                    return
                if mode == "error" and side is client:
                    client.sendall(_ERROR)
                    return
                if mode == "lose" and side is server:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    return
                if mode == "slow":
                    time.sleep(0.1)
                (server if side is client else client).sendall(part)
