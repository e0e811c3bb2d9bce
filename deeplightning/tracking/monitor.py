"""`deeplightning monitor`: MLflow's own UI for the store of a config, in only two processes.

Imports neither torch nor Lightning. If the port is in use or the store cannot be opened: one message, exit code 3.
"""

import os
import socket
import sys
from contextlib import suppress

from deeplightning.faults import SetupError
from deeplightning.process.terminal import say
from deeplightning.tracking.mlflow_store import open_client, uri_of
from deeplightning.tracking.store import Store, explained, locate
from deeplightning.tracking.unsent import send_leftovers_quietly

WILDCARD_HOSTS = ("0.0.0.0", "::")
"""Addresses that stand for all addresses of this machine."""


def monitor(tracking_uri: str | None, host: str, port: int) -> None:
    """Replace this process with the UI; return only if there is nothing to start.

    Raises:
        SetupError: the port is in use, or the store cannot be opened.
    """
    store = locate(tracking_uri)
    is_server = store.address is not None and store.address.startswith("http")
    if not is_server:
        _check_free(host, port)
        with explained(store):  # open it under our lock; report a damaged one without a server's traceback
            open_client(store).search_experiments(max_results=1)
    for line in send_leftovers_quietly(store):
        say(line, err=True)
    if is_server:
        say(f"The store is a server with its own UI: {store.shown.rstrip('/')}{_newest_fragment(store)}")
        return
    server = f"http://{'127.0.0.1' if host in WILDCARD_HOSTS else f'[{host}]' if ':' in host else host}:{port}"
    say(f"MLflow shows {store.shown} at {server}{_newest_fragment(store)}")
    say("Ctrl-C ends it.")
    # Without this MLflow starts ten processes with 1.9 GB (3.17, 2026).
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # the server prints deprecations of its libraries
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # and each connection pool
    # Not as an argument, which every user of the machine could read.
    os.environ["MLFLOW_BACKEND_STORE_URI"] = uri_of(store)
    os.environ["PYTHONSAFEPATH"] = "1"  # no file of the working directory is a module of MLflow or its server
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port)]
    if store.artifact_root is not None:
        command += ["--default-artifact-root", store.artifact_root.as_uri(), "--no-serve-artifacts"]
    os.execv(command[0], [*command, "--workers", "1", "--uvicorn-opts", "--log-level=warning --app-dir=/"])


def runs_page(experiment_id: str) -> str:
    """Return the URL fragment of MLflow's page with the runs of an experiment as charts. By default, MLflow 3.17 opens
    its view for language models."""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning&compareRunsMode=CHART"


def _newest_fragment(store: Store) -> str:
    """Return the URL fragment for the experiment of the newest run, or "" if there is no run."""
    with suppress(Exception):  # network errors, or MLflow's
        client = open_client(store)
        experiments = [experiment.experiment_id for experiment in client.search_experiments(max_results=1000)]
        (run,) = client.search_runs(experiments, max_results=1, order_by=["attributes.start_time DESC"])
        return f"/{runs_page(run.info.experiment_id)}"
    return ""


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just released is free
            probe.bind(address)
    except OSError as error:
        raise SetupError(f"Cannot listen on {host}:{port}: {error.strerror}. Set another --host or --port.") from None
