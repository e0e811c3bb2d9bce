"""The lowest and the newest release of MLflow that pyproject.toml allows support all that a run needs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import answer_of, environment, free_port
from tiny import TINY

ROOT = Path(__file__).parents[2]
LOWEST, BELOW = re.search(r'"mlflow(>=[\d.]+),(<\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
DIGIT = ROOT / "examples" / "digits" / "0.png"

REGISTER = """\
import sys
import mlflow

run_id, store, digit = sys.argv[1:]
client = mlflow.MlflowClient(store, store)
client.create_registered_model("digits")
version = client.create_model_version("digits", f"runs:/{run_id}/model", run_id)
mlflow.set_tracking_uri(store)
import pandas

answer = mlflow.pyfunc.load_model(f"models:/digits/{version.version}").predict(
    pandas.DataFrame({"image": [open(digit, "rb").read()]})
)
print(mlflow.__version__, version.version, list(answer.columns))
"""


@pytest.fixture(scope="module", params=[LOWEST.replace(">=", "=="), BELOW], ids=["lowest", "newest"])
def variables(request, tmp_path_factory):
    """The environment of a process that imports this release of MLflow; its dependencies are the installed ones."""
    folder = tmp_path_factory.mktemp("mlflow")
    pip = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--compile-bytecode"]
    subprocess.run([*pip, "--target", folder, f"mlflow{request.param}"], check=True)  # contains mlflow-skinny
    return environment(PYTHONPATH=str(folder))


@pytest.mark.slow
def test_a_release_of_mlflow_does_what_a_run_asks_of_it(variables, tmp_path):
    """Each release can train, resume, list runs, register and load a model, show the data of the MLflow page, and
    delete a run permanently."""
    (tmp_path / "tiny.yaml").write_text(TINY.replace("STORE", "mlruns"))

    def python(*arguments):
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def deeplightning(*arguments):
        return python("-m", "deeplightning", *arguments)

    def train(*arguments):
        return Path(deeplightning("train", "tiny.yaml", *arguments).splitlines()[-1].partition(": ")[2])

    folder = train("train.num_epochs=1")
    assert train("train.resume_ckpt=auto", "train.export=true", "logger.log_model=true") == folder
    other = train("train.num_epochs=1", "seed=8")
    assert other.is_dir()
    run_id, other_id = (path.parent.name for path in (folder, other))
    listed = deeplightning("runs").splitlines()
    assert [line.split()[:2] for line in listed] == [[other_id, "FINISHED"], [run_id, "FINISHED"]]

    uri = f"sqlite:///{tmp_path / 'mlruns' / 'mlflow.db'}"
    version, number, columns = python("-c", REGISTER, run_id, uri, str(DIGIT)).strip().split(" ", 2)
    assert (number, columns) == ("1", "['class', 'label', 'probability']")
    assert Path(variables["PYTHONPATH"], f"mlflow-{version}.dist-info").is_dir()

    port = free_port()
    command = [sys.executable, "-m", "deeplightning", "monitor", "--port", port]
    server = subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE)
    try:
        address = f"http://127.0.0.1:{port}"
        page = answer_of(server, address).decode()
        query = f"run_id={run_id}&metric_key=train_loss&max_results=100"
        history = json.loads(answer_of(server, f"{address}/api/2.0/mlflow/metrics/get-history?{query}"))
    finally:
        server.terminate()
        server.communicate(timeout=30)
    assert page.lower().startswith("<!doctype html>")
    steps = [point["step"] for point in history["metrics"]]
    assert len(steps) == len(set(steps)) > 2

    python("-c", f"import mlflow; mlflow.MlflowClient({uri!r}).delete_run({other_id!r})")
    python("-m", "mlflow", "gc", "--backend-store-uri", uri, "--tracking-uri", uri)
    assert not other.exists()
    assert [line.split()[0] for line in deeplightning("runs").splitlines()] == [run_id]
