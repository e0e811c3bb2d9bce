"""`deeplightning monitor`: MLflow's own UI on the store that a config names. Two processes, no more.

Imports neither torch nor Lightning. A port that is taken or a store that cannot be opened: one note, exit code 3.
"""

import errno
import os
import socket
import sys
import webbrowser
from contextlib import suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from deeplightning.faults import SetupError
from deeplightning.process.terminal import say
from deeplightning.tracking.mlflow_store import open_client, uri_of
from deeplightning.tracking.store import Store, explain, locate
from deeplightning.tracking.unsent import settle_quietly

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PORT = 5001
"""Where `deeplightning monitor` listens by default."""
OPENS = "DEEPLIGHTNING_OPENS"
"""The environment variable by which the server learns the address that it is to open in a browser."""
APPLICATION = "deeplightning"
"""MLflow's name for `deeplightning.tracking.pages`, an entry point of the group `mlflow.app`."""
EVERYWHERE = ("0.0.0.0", "::")
"""Addresses that mean all of this machine's."""


def monitor(tracking_uri: str | None, host: str, port: int, opens: bool | None = None) -> None:
    """Replace this process by the UI; return only if there is nothing to start.

    Args:
        opens: whether to open the page in a browser; None opens it for a person at this machine.

    Raises:
        SetupError: the port is taken, or the store cannot be opened.
    """
    store = locate(tracking_uri)
    command = server_command(tracking_uri, host, port)
    for line in settle_quietly(store):
        say(line, err=True)
    opens = has_browser() if opens is None else opens
    if command is None:
        address = _with_newest(store, store.shown.rstrip("/"))
        say(f"The store is a server with its own pages: {address}")
        if opens:
            webbrowser.open(address)
        return
    address = f"http://{'127.0.0.1' if host in EVERYWHERE else f'[{host}]' if ':' in host else host}:{port}"
    if APPLICATION not in command:
        address = _with_newest(store, address)
    say(f"MLflow shows {store.shown} at {address}")
    say("Ctrl-C ends it.")
    if opens:
        os.environ[OPENS] = address
    os.execv(command[0], command)


def runs_page(experiment_id: str) -> str:
    """Return the address, from `#` on, at which MLflow's page shows the runs of an experiment with charts."""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning&compareRunsMode=CHART"


def newest_runs(client: "MlflowClient", number: int) -> "list[Run]":
    """Return the latest runs of a store, newest first."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments(max_results=1000)]
    return list(client.search_runs(experiments, max_results=number, order_by=["attributes.start_time DESC"]))


def _with_newest(store: Store, address: str) -> str:
    """Return the address at which MLflow's own page shows the experiment of the newest run, or else the page's
    address."""
    with suppress(Exception):  # of the network, or MLflow's
        return f"{address}/{runs_page(newest_runs(open_client(store), 1)[0].info.experiment_id)}"
    return address


def has_browser() -> bool:
    """Return whether a person at this machine reads the output and has a graphical browser."""
    shows = sys.platform in ("darwin", "win32") or any(os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY"))
    return sys.stdout.isatty() and shows and not os.environ.get("SSH_CONNECTION")


def server_command(tracking_uri: str | None, host: str, port: int) -> list[str] | None:
    """Return the command that serves a store, which is created if missing; None for a store that is a server.

    Raises:
        SetupError: the port is taken, or the store cannot be opened.
    """
    store = locate(tracking_uri)
    if store.address is not None and store.address.startswith("http"):
        return None
    _check_free(host, port)
    try:
        # Opened here first: under our lock, and a damaged one gives a note instead of a server's traceback.
        open_client(store).search_experiments(max_results=1)
    except Exception as error:  # MLflow and SQLAlchemy each have their own
        raise explain(error, store) from error
    # Without this MLflow starts ten processes with 1.9 GB (3.17, 2026).
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # the server tells what its own libraries deprecate
    # Not an argument, which every user of the machine could read.
    os.environ["MLFLOW_BACKEND_STORE_URI"] = uri_of(store)
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port)]
    if store.artifact_root is not None:
        command += ["--default-artifact-root", store.artifact_root.as_uri(), "--no-serve-artifacts"]
    if entry_points(group="mlflow.app", name=APPLICATION):  # else its page opens as MLflow ships it
        command += ["--app-name", APPLICATION]
    return [*command, "--workers", "1", "--uvicorn-opts", "--log-level=warning"]


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that a server has just left is free
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SetupError(
                f"Port {port} on {host} is in use. Choose another: deeplightning monitor --port {port + 1}"
            ) from None
        raise SetupError(f"Cannot listen on {host}:{port}: {error}. Choose another --host or --port.") from None
