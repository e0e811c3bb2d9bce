"""A TCP proxy that does what a file says: passes on, stalls, resets, answers 500, loses answers; and MLflow's server.

Both run in processes that are forked here. `Proxy.mode` is written by whoever has a fault in mind, and holds for open
connections too.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import threading
import time
from pathlib import Path

MODES = ("pass", "refuse", "stall", "reset", "error", "lose", "slow")
"""`lose` hands the request on, and resets the connection instead of the answer."""

_ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)


def free_port() -> int:
    """A port of loopback that nothing listens at."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class Forked:
    """A function in a process of its own, until `end`."""

    def __init__(self, function, *arguments: object):
        if (pid := os.fork()) == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                function(*arguments)
            finally:
                os._exit(1)
        self.pid = pid

    def end(self) -> None:
        """Kills it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def serve_mlflow(folder: Path, port: int) -> None:
    """MLflow's own server on an SQLite store in a folder, until it is killed."""
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
    """Waits until something listens at a port."""
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
    """Listens at a port of its own before another one."""

    def __init__(self, folder: Path, target: int):
        self.port, self._file = free_port(), folder / "mode"
        self.set("pass")
        self._process = Forked(_listen, self.port, target, self._file)
        wait_for(self.port)

    def set(self, mode: str) -> None:
        """What it does from now on, one of `MODES`."""
        beside = self._file.with_suffix(".new")
        beside.write_text(mode)
        beside.rename(self._file)

    def end(self) -> None:
        """Ends it."""
        self._process.end()


def _listen(port: int, target: int, file: Path) -> None:
    listener = None
    while True:
        mode = file.read_text()
        if mode == "refuse" and listener is not None:
            listener.close()
            listener = None
        elif mode != "refuse" and listener is None:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(64)
        if listener is None:
            time.sleep(0.02)
            continue
        ready, _, _ = select.select([listener], [], [], 0.02)
        if ready:
            client, _ = listener.accept()
            threading.Thread(target=_carry, args=(client, target, file), daemon=True).start()


def _carry(client: socket.socket, target: int, file: Path) -> None:
    """Carries bytes both ways, until a mode or a side ends it."""
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
