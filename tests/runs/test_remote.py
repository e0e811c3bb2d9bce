"""A run that is tracked by a server on another machine, which keeps the files as well: here a real one, on loopback."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from commands import environment

ROOT = Path(__file__).parents[2]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def server(tmp_path):
    """The address of an MLflow server that takes artifacts over HTTP."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/server.db",
        "--artifacts-destination",
        str(tmp_path / "kept"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", *store],
        env=environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            break
        except OSError:
            assert process.poll() is None
            time.sleep(0.1)
    yield address
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(30)


def test_the_server_has_all_files_of_a_run_and_a_run_is_found_there(command, tiny, server, tmp_path):
    """What lies in the local folder lies on the server when the run has ended; by its id it predicts from there."""
    here = tmp_path / "here"
    here.mkdir()
    asked = ("stages=[train,test]", "train.export=true", f"logger.params.tracking_uri={server}")
    trained = command("train", tiny, *asked, cwd=here)
    assert trained.code == 0, trained
    assert trained.folder.is_relative_to(here / "runs")
    (kept,) = (tmp_path / "kept" / "0").glob("*/artifacts")
    assert files(kept) == files(trained.folder)
    assert "bundle/model.onnx" in files(kept)

    shutil.rmtree(here / "runs")
    run, digit = kept.parent.name, ROOT / "examples" / "digits" / "3.png"
    told = command("predict", run, digit, cwd=here, MLFLOW_TRACKING_URI=server)
    assert told.code == 0, told
    assert told.out.splitlines()[1].startswith(f"{digit},")
