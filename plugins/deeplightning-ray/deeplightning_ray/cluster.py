"""Connect to a Ray cluster: a named one, the one on this machine, or a new local one."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeplightning.faults import Fault, SetupError

CURRENT = Path("/tmp/ray/ray_current_cluster")
"""File to which `ray start` writes its cluster's address, for processes on the same machine."""

log = logging.getLogger(__name__)

MAX_STARTS = 3  # attempts to start a cluster: Ray allows 30 s, which is short for a busy machine
INIT_SECONDS = 30.0  # minimum time for a cluster that answers to accept a driver
_ADDRESS = "engine.launcher.params.address"


@dataclass(frozen=True)
class Connection:
    """Connection of this process, as a driver, to a cluster.

    Attributes:
        address: the cluster's address, or a description of it.
        is_own: whether this process started the cluster, and ends it.
    """

    address: str
    is_own: bool


@contextlib.contextmanager
def connect(address: str | None = None, timeout_s: float = 10, **own: object) -> Iterator[Connection]:
    """Make this process a driver of a cluster while the context lasts, unless it is a driver already.

    Args:
        address: as for `Ray`.
        timeout_s: time for the cluster to answer.
        own: keyword arguments of `ray.init`, for a local cluster.

    Raises:
        SetupError: Ray is not installed, or there is no such cluster.
    """
    if importlib.util.find_spec("ray") is None:
        raise SetupError(Fault("needs the package ray: pip install 'deeplightning[ray]'", "engine.launcher.type"))
    folder: str | None = None
    with _environment(_quiet_variables()):
        found = _find(address)
        own_token = found is None and "ray" not in sys.modules  # Ray reads it at import
        with _environment(_token_variables() if own_token else {}):
            import ray

            if ray.is_initialized():
                yield Connection("that of this process", False)
                return
            try:
                if found is None:
                    folder = tempfile.mkdtemp(prefix="dl-ray-")  # short: a socket path has at most 107 characters
                    options = {"address": "local", "_temp_dir": folder, "include_dashboard": False, **own}
                else:
                    _require_listener(found, timeout_s)
                    options = {"address": found}
                _init(options, found, max(timeout_s, INIT_SECONDS))
                yield Connection(found or "its own, on this machine", folder is not None)
            finally:
                ray.shutdown()
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that are unset, while the context lasts."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ |= new
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


def _token_variables() -> dict[str, str]:
    """Return variables with a token for drivers of the local cluster; Ray would write one into the user's home."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _quiet_variables() -> dict[str, str]:
    """Return variables that disable Ray's usage reports, and the low priority of its workers."""
    names = ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_worker_niceness")
    return dict.fromkeys(names, "0")


def _find(address: str | None) -> str | None:
    """Return the cluster's address, HOST:PORT or ray://HOST:PORT, or None for a local cluster."""
    if address == "local":
        return None
    if address not in (None, "auto"):
        return address
    if (named := os.environ.get("RAY_ADDRESS")) and named != "auto":
        return None if named == "local" else named
    with contextlib.suppress(OSError, ValueError):
        current = _read_current()
        with contextlib.suppress(SetupError):  # the cluster has ended
            _require_listener(current, 1.0)
            return current
    if address == "auto":
        message = "auto: there is no cluster: RAY_ADDRESS is not set, and `ray start` runs none on this machine"
        raise SetupError(Fault(message, _ADDRESS))
    return None


def _read_current() -> str:
    """Read the address in `CURRENT`, a file in a world-writable folder.

    Raises:
        OSError: it is missing, or a user other than this one and root could have written it.
        ValueError: it is not text.
    """
    # Without O_NONBLOCK a named pipe would block.
    with os.fdopen(os.open(CURRENT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            log.warning("%s could have been written by another user and is ignored; set RAY_ADDRESS instead", CURRENT)
            raise PermissionError
        return file.read(256).strip()


def _require_listener(address: str, timeout_s: float) -> None:
    """Check that something listens at an address, because Ray itself would try for a minute.

    Raises:
        SetupError: nothing listens.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise SetupError(Fault(f"{address!r} is not an address: HOST:PORT, ray://HOST:PORT, auto, or null", _ADDRESS))
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except OSError as error:
        reason = f"in {timeout_s:g} s" if isinstance(error, TimeoutError) else f"({error.strerror or error})"
        raise SetupError(Fault(f"the Ray cluster at {address} does not answer {reason}", _ADDRESS)) from error


def _init(options: dict[str, Any], address: str | None, timeout_s: float) -> None:
    """Call `ray.init` without its output.

    It runs in a thread, because the call does not return if something other than Ray listens. The processes of a local
    cluster end with the thread that started them, so a local cluster is started in this thread.
    """
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    failed: list[Exception] = []

    def init() -> None:
        try:
            ray.init(log_to_driver=False, logging_level=logging.CRITICAL, **options)
        except Exception as error:
            failed.append(error)

    if address is None:
        for _ in range(MAX_STARTS):
            failed.clear()
            init()
            if not failed or "timed out during startup" not in str(failed[0]):
                break
            ray.shutdown()
    else:
        thread = threading.Thread(target=init, daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            message = f"the server did not accept a driver in {timeout_s:g} s; is it a Ray cluster?"
            raise SetupError(Fault(f"{address}: {message}", _ADDRESS))
    if failed:
        reason = " ".join(str(failed[0]).split())[:400]
        what = f"no connection to the Ray cluster at {address}" if address else "no Ray cluster can be started here"
        raise SetupError(Fault(f"{what}: {reason}", _ADDRESS)) from failed[0]
