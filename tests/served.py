"""Provide runs whose networks classify colours, image files, and server processes, for the tests of the server."""

import base64
import contextlib
import functools
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from commands import environment, free_port, wait_for
from PIL import Image

from deeplightning.image_spec import ImageSpec
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.flavour import write_model

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {"red": (200, 30, 10), "green": (20, 180, 40), "blue": (10, 20, 220)}
THRESHOLDS = {"red": 0.5, "green": 0.0, "blue": 0.5}


def run_of(kind: str, path: Path, labels: Sequence[str] = tuple(COLOURS)) -> RunFolder:
    """Create a run whose network classifies a picture by the mean of each channel, with labels from red to blue.

    A reconstruction returns the negative, a segmentation the largest channel of each pixel; a multi-label run predicts
    `green` for every picture.
    """
    folder = RunFolder(path)
    folder.bundle.mkdir(parents=True, exist_ok=True)
    for name, content in _exported(kind, tuple(labels)).items():
        (folder.bundle / name).write_bytes(content)
    return folder


colour_run = functools.partial(run_of, "image_classification")
negative_run = functools.partial(run_of, "image_reconstruction", labels=())
labelled_run = functools.partial(run_of, "image_multilabel")
masked_run = functools.partial(run_of, "image_segmentation")


@functools.cache
def _exported(kind: str, labels: tuple[str, ...]) -> dict[str, bytes]:
    """Return the files of a bundle, cached: an export takes seconds, and a dozen test files need the same one."""
    import torch  # lazily: nothing else here needs it

    from deeplightning.export.bundle import export

    class MeanColour(torch.nn.Module):
        def forward(self, images):  # uint8 (N, 3, 8, 8)
            return torch.softmax(images.float().mean(dim=(2, 3)) / 32, dim=1)  # (N, 3)

    class Negative(torch.nn.Module):
        def forward(self, images):  # uint8 (N, 3, 8, 8)
            return 1 - images.float() / 255  # (N, 3, 8, 8)

    class Largest(torch.nn.Module):
        def forward(self, images):  # uint8 (N, 3, 8, 8)
            return torch.softmax(images.float() / 32, dim=1)  # (N, 3, 8, 8)

    models = {"image_reconstruction": Negative, "image_segmentation": Largest}
    model = models.get(kind, MeanColour)().eval()
    spec = ImageSpec(8, 8, "RGB")
    task: Any = SimpleNamespace(kind=kind, image_spec=spec, class_names=[*labels], inference_model=lambda: model)
    if kind == "image_multilabel":
        task.answer_details = lambda: {"thresholds": [THRESHOLDS[label] for label in labels]}
    samples = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8), dtype=np.uint8)
    run = {"id": "abc", "folder_name": "a run", "created": "now", "versions": {}}
    with tempfile.TemporaryDirectory() as name:
        bundle = export(task, RunFolder(Path(name)), samples, run)
        return {path.name: path.read_bytes() for path in bundle.iterdir()}


def picture(
    colour: str = "red", kind: str = "PNG", size: tuple[int, int] = (8, 8), mode: str = "RGB", **options: Any
) -> bytes:
    """Return an image file of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, COLOURS[colour]).convert(mode).save(file, kind, **options)
    return file.getvalue()


def probabilities(colour: str) -> np.ndarray:
    """Compute the expected probabilities, float64 (3,), without the exported graph."""
    scores = np.exp(np.array(COLOURS[colour], dtype=np.float64) / 32)
    return scores / scores.sum()


def encoded(data: bytes) -> str:
    """Encode bytes as base64 text."""
    return base64.b64encode(data).decode()


class Server:
    """`python -m serve` on a free port of this machine.

    Attributes:
        line: the first line that it printed.
        port, url: address.
        errors, log: files with its stderr and stdout.
    """

    program = (sys.executable, "-m", "serve")

    def __init__(self, folder: Path, errors: Path, *arguments: str, flags: tuple[str, ...] = (), **variables: str):
        self.errors, self.log = errors, errors.with_suffix(".log")
        # On the CPU by default: `auto` reports on stderr that it found no GPU.
        program = [*self.program[:1], *flags, *self.program[1:]]
        command = [*program, str(folder), "--port", "0", "--device", "cpu", *arguments]
        with errors.open("w") as stderr, self.log.open("w") as stdout:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=stdout, stderr=stderr, env={**os.environ, **variables}
            )
        while not (found := re.search(r"(.*http://\S*?:(\d+)\b.*)\n", self.log.read_text())):
            assert self.process.poll() is None, errors.read_text()
            time.sleep(0.02)
        self.line, self.port = found[1], int(found[2])
        self.url = f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        """Return an unopened connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Send one request; return status and JSON document."""
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def requests(self) -> list[dict[str, Any]]:
        """Return the entries of its log, which follow the first line."""
        return [json.loads(line) for line in self.log.read_text().splitlines()[1:]]

    def events(self) -> list[str]:
        """Return its messages on stderr."""
        return [json.loads(line)["event"] for line in self.errors.read_text().splitlines()]

    def processes(self) -> list[int]:
        """Return the process ids of the parent, its pools and their workers."""
        pools = children(self.process.pid)
        return [self.process.pid, *pools, *(worker for pool in pools for worker in children(pool))]

    def workers(self) -> list[int]:
        """Return the process ids of the workers that answer."""
        return [worker for pool in children(self.process.pid) for worker in children(pool)]

    def stop(self, sign: int = signal.SIGTERM) -> int:
        """Stop the server; return its exit code."""
        self.process.send_signal(sign)
        return self.process.wait(timeout=15)


WITHOUT_TORCH = """\
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "pytorch_lightning"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
import base64, json, pathlib
import mlflow.pyfunc, pandas
"""
"""Start of a program that loads MLflow models."""

LOGGED = f"""{WITHOUT_TORCH}
rows = pandas.DataFrame(json.load(sys.stdin))
print(mlflow.pyfunc.load_model(sys.argv[1]).predict(rows).to_json(orient="records", double_precision=15))
"""


def logged_answers(folder: RunFolder, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predict rows with a bundle's MLflow model, in a process that cannot import torch."""
    write_model(folder)
    done = subprocess.run(
        [sys.executable, "-c", LOGGED, folder.model],
        input=json.dumps(rows), env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


GUNICORN = ("-m", "gunicorn", "--worker-class", "gthread", "--threads", "4", "--bind", "127.0.0.1:{port}")
WAITRESS = ("-m", "waitress", "--listen", "127.0.0.1:{port}")


class WsgiServer:
    """WSGI server in a child process.

    Attributes:
        process, port: of the server.
        output: file with its stdout and stderr.
    """

    def __init__(self, folder: Path, *arguments: str):
        self.port = int(free_port())
        self.output = folder / "output"
        command = [sys.executable, *(text.replace("{port}", str(self.port)) for text in arguments)]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
        wait_until(self._answers, 60)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.output.read_text()
        try:
            return self.ask("GET", "/health")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, bytes]:
        """Send one request; return status, headers and body. A server may reject a body before it has read it."""
        connection = self.connect()
        try:
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


def children(process: int) -> list[int]:
    """Return the child processes of a process; [] if it has ended."""
    try:
        return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return []


def gone(process: int) -> bool:
    """Return whether a process has ended. A zombie counts: process 1 may be slow to collect it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(holds: Callable[[], bool], seconds: float = 10) -> None:
    """Poll `holds()` until it is true; fail after `seconds`."""
    wait_for(holds, "a condition", seconds)
