"""Start servers for a measurement, send them requests, and measure their processes.

Models with ten samples each; sample i is of class i, by a last layer that is fitted to random features. Ours is a run
folder with a bundle of the project's own export, the peers load the same weights. A server is known by its command line
alone. What is asked is known by a model's name and, behind a hyphen, by what is special: `resnet18-12mp`, `small-tls`.
Letters: N pictures, C channels, H height, W width.
"""

import base64
import contextlib
import functools
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from PIL import Image

from deeplightning.image_spec import ImageSpec
from deeplightning.runfolder import RunFolder
from deeplightning.table_spec import Column, TableSpec
from deeplightning.text_spec import TextSpec, vocabulary

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PICTURES = 10
LOGIT = 8.0  # of a picture's own class; the others have 0
START_SECONDS = 120

sys.path.append(str(HERE / "peers"))  # serve_parts imports torch: where a run is made, and not before


# ---- what is asked


def model_of(name: str) -> str:
    """Return the model that is asked."""
    return name.partition("-")[0]


LARGE = {"1mp": (1155, 866), "12mp": (4000, 3000)}  # width and height


@functools.cache
def pictures(name: str) -> list[bytes]:
    """Ten encoded pictures: for resnet18 JPEG files of 256x256 and some 18 KB, for the small network PNG files of 28x28
    and some 0.7 KB. Waves in each channel with noise on them, the same each time. With 1 and 12 million pixels they are
    the same waves, enlarged, with a camera's noise."""
    rng = np.random.default_rng(18)
    size = LARGE.get(name.partition("-")[2])
    if size is not None:
        found = []
        for data in pictures(model_of(name)):
            large = np.asarray(Image.open(io.BytesIO(data)).resize(size, Image.Resampling.BICUBIC))
            noisy = (large + rng.integers(-4, 5, large.shape, np.int8).astype(np.int16)).clip(0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(file := io.BytesIO(), "JPEG", quality=90)
            found.append(file.getvalue())
        return found
    side, channels, noise = (256, 3, 6.0) if model_of(name) == "resnet18" else (28, 1, 2.5)
    down, right = np.mgrid[0:side, 0:side] / side
    files = []
    for _ in range(PICTURES):
        waves = rng.uniform(-4, 4, (channels, 4, 2)) * 2 * np.pi
        angles = waves[..., 0, None, None] * down + waves[..., 1, None, None] * right  # (C, 4, H, W)
        light = 127 + 45 * np.sin(angles + rng.uniform(0, 6, (channels, 4, 1, 1))).sum(axis=1)
        pixels = (light + rng.normal(0, noise, light.shape)).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
        file = io.BytesIO()
        if channels == 3:
            Image.fromarray(pixels).save(file, "JPEG", quality=90)
        else:
            Image.fromarray(pixels[..., 0]).save(file, "PNG")
        files.append(file.getvalue())
    return files


@functools.cache
def contents(name: str) -> list[dict[str, Any]]:
    """Return ten texts of 12 to 40 words, or rows of 20 numbers, in the form of JSON."""
    rng = np.random.default_rng(18)
    if name == "tables":
        numbers = rng.normal(size=(PICTURES, 20)).round(3).tolist()
        return [{"rows": [{f"c{n}": number for n, number in enumerate(row)}]} for row in numbers]
    lengths = rng.integers(12, 41, PICTURES)
    return [{"text": " ".join(f"word{n}" for n in rng.integers(0, 500, length))} for length in lengths]


def form(picture: bytes, field: str = "image") -> tuple[str, bytes]:
    """Return a picture as a browser uploads it: content type and body."""
    boundary = "----------a7f3c0d25b9e4186"
    kind, suffix = ("image/png", "png") if picture.startswith(b"\x89PNG") else ("image/jpeg", "jpg")
    head = f'Content-Disposition: form-data; name="{field}"; filename="picture.{suffix}"\r\nContent-Type: {kind}'
    body = f"--{boundary}\r\n{head}\r\n\r\n".encode() + picture + f"\r\n--{boundary}--\r\n".encode()
    return f"multipart/form-data; boundary={boundary}", body


def column(picture: bytes) -> tuple[str, bytes]:
    """Return a picture as a row of a data frame, which `mlflow models serve` takes: content type and body."""
    text = base64.b64encode(picture).decode()
    return "application/json", f'{{"dataframe_split": {{"columns": ["image"], "data": [["{text}"]]}}}}'.encode()


def post(path: str, content_type: str, body: bytes, closes: bool = False) -> bytes:
    """Return the bytes of a request; `closes`: the only one on its connection."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}"
    head += "\r\nConnection: close" if closes else ""
    return f"{head}\r\n\r\n".encode() + body


def requests_of(name: str, path: str, body: Callable[[bytes], tuple[str, bytes]]) -> list[bytes]:
    """Return a request for each sample, in the form that a server takes at a path."""
    if name in ("texts", "tables"):
        sent = [("application/json", json.dumps(content).encode()) for content in contents(name)]
    else:
        sent = [body(picture) for picture in pictures(name)]
    return [post(path, *parts, closes=name.endswith("-close")) for parts in sent]


# ---- what answers


def make_run(name: str, place: Path, turned: bool = False) -> Path:
    """Create a run folder with a bundle, and the weights for the peers beside it as `NAME.pt`.

    Turned: sample i is of class 9 - i instead.

    Raises:
        RuntimeError: a sample is not recognized with a clear margin.
    """
    import serve_parts
    import torch

    from deeplightning.export.bundle import export

    torch.set_num_threads(1)
    torch.manual_seed(5)
    known, inputs, samples, around = _parts(name)
    network = serve_parts.network(model_of(name))
    _fit(network, inputs, turned)
    model = around(network).eval()
    with torch.inference_mode():
        told = network(inputs).softmax(1)
    wanted = list(range(PICTURES))[:: -1 if turned else 1]
    if told.argmax(1).tolist() != wanted or told.max(1).values.min() < 0.9:
        raise RuntimeError(f"{name} does not tell its samples apart: {told.max(1)}")
    folder = RunFolder(place / (f"{name}-turned" if turned else name))
    folder.path.mkdir()
    labels = [str(number) for number in range(PICTURES)]
    task = SimpleNamespace(class_names=labels, inference_model=lambda: model, **known)
    export(task, folder, samples, {"id": name, "folder_name": folder.path.name, "created": "now", "versions": {}})
    torch.save(network.state_dict(), folder.path.with_suffix(".pt"))
    if name == "texts":
        folder.path.with_suffix(".json").write_text(json.dumps(known["text_spec"].content.splitlines()))
    return folder.path


def _parts(name: str) -> tuple[dict[str, Any], Any, np.ndarray, Callable[[Any], Any]]:
    """What a task knows of its inputs, these as its network takes them and as a run keeps them, and what makes the
    network's logits probabilities."""
    import serve_parts
    import torch

    if name == "tables":
        spec = TableSpec(tuple(Column(column, "number") for column in serve_parts.COLUMNS))
        rows = [content["rows"][0] for content in contents(name)]
        numbers = torch.tensor([list(row.values()) for row in rows], dtype=torch.float32)
        kept = np.array([json.dumps(row) for row in rows])
        known: dict[str, Any] = {"kind": "table_classification", "row_spec": spec}
        return known, numbers, kept, lambda network: torch.nn.Sequential(network, torch.nn.Softmax(1))
    if name == "texts":
        from deeplightning.task.networks import Probabilities

        texts = [content["text"] for content in contents(name)]
        words = TextSpec("words", vocabulary(texts), limit=serve_parts.TOKENS)
        tokens = torch.from_numpy(words.stack(words.encode(texts)))
        return {"kind": "text_classification", "text_spec": words}, tokens, np.array(texts), Probabilities
    from deeplightning.task.networks import Probabilities
    from deeplightning.task.pixel_input import Normalise

    model = model_of(name)
    size, mode = serve_parts.SIZES[model], serve_parts.MODES[model]
    image = ImageSpec(size, size, mode, mean=serve_parts.MEANS[model], std=serve_parts.STDS[model])
    prepared = np.stack([image.decode(data).transpose(2, 0, 1) for data in pictures(name)])  # uint8 (N, C, H, W)
    normalise = Normalise(image.mean, image.std)
    known = {"kind": "image_classification", "image_spec": image}
    return known, normalise(torch.from_numpy(prepared)), prepared, lambda network: Probabilities(network, normalise)


def make_int8_run(run: Path, name: str) -> Path:
    """Copy a run folder, and add an int8 model to its bundle that is checked on 50 noisy copies of each picture."""
    from deeplightning.export.int8 import quantize

    folder = RunFolder(run.with_name(f"{run.name}-int8"))
    shutil.copytree(run, folder.path)
    spec = ImageSpec.from_dict(json.loads(folder.bundle_card.read_text())["input"])
    clear = np.stack([spec.decode(data).transpose(2, 0, 1) for data in pictures(name)])

    def validation() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(9)
        for _ in range(50):
            noisy = (clear + rng.normal(0, 6, clear.shape)).clip(0, 255).astype(np.uint8)
            yield noisy, np.arange(PICTURES)

    quantize(folder, validation)
    return folder.path


def make_fp16_model(run: Path) -> None:
    """Add a model in fp16 to a run's bundle."""
    from deeplightning.export.fp16 import halve

    halve(RunFolder(run))


def _fit(model: Any, inputs: Any, turned: bool) -> None:
    """Set the weights of a network's last layer so that input i has the logit of its class, and 0 for the others."""
    import torch

    *_, last = (layer for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    features: list[torch.Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, given: features.append(given[0]))
    with torch.no_grad():
        for _ in range(40):  # so that batch normalisation adapts to these inputs
            model.train()(inputs)
        model.eval()(inputs)
        hook.remove()
        known = torch.cat([features[-1], torch.ones(PICTURES, 1)], 1).double()  # with a column for the bias
        targets = LOGIT * torch.eye(PICTURES, dtype=torch.double)
        found = torch.linalg.lstsq(known, targets.flip(1) if turned else targets, driver="gelsd").solution.float()
        last.weight.copy_(found[:-1].T)
        last.bias.copy_(found[-1])


# ---- processes


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@dataclass
class Tree:
    """A process and all that come from it."""

    pid: int

    def processes(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu(self) -> float:
        """Return CPU seconds, user and system, with those of processes that have ended and were waited for."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def memory(self) -> float:
        """Return the proportional set size in MiB: shared pages count once."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total / 2**20

    def anonymous(self) -> float:
        """Return the part of `memory` that is not mapped from files: a leak adds to it.

        Files, such as libraries, are shared with other programs on this machine, so that their part varies with these.
        """
        total = 0
        for process in self.processes():
            with contextlib.suppress(OSError):  # it has ended
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB$", text, re.MULTILINE)))
        return total / 2**10


class Server(Tree):
    """A server that was started by a command line, on a port of this machine alone.

    Attributes:
        log: the file that holds what it said.
    """

    def __init__(self, command: list[str], port: int, log: Path, env: dict[str, str] | None = None):
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        # One thread for each operation, for all: two that spin beside busy neighbours cost up to 30 times the CPU.
        plain |= {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONWARNINGS": "ignore"} | (env or {})
        self.port, self.log = port, log
        with log.open("wb") as said:
            self.child = subprocess.Popen(
                command, cwd=ROOT, env=plain, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
            )
        super().__init__(self.child.pid)

    def ask(self, request: bytes, seconds: float = 60) -> tuple[int, str]:
        """Send a request on a separate connection; return status and text of the answer.

        Raises:
            OSError, http.client.HTTPException: there is none.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            connection.sendall(request)
            response = http.client.HTTPResponse(connection, method="POST")
            response.begin()
            return response.status, response.read().decode(errors="replace")

    def wait(self, request: bytes, pattern: str, wanted: str) -> None:
        """Wait until the server gives the right answer.

        Raises:
            RuntimeError: it ends, answers something else, or nothing in `START_SECONDS`.
        """
        end, said = time.monotonic() + START_SECONDS, "nothing"
        while time.monotonic() < end and self.child.poll() is None:
            try:
                status, text = self.ask(request)
                found = re.search(pattern, text)
                if status == 200 and found and found[1] == wanted:
                    return
                said = f"{status} {text[:200]}"
                if status != 503:  # which says: not yet
                    break
            except (OSError, http.client.HTTPException) as error:
                said = repr(error)
            time.sleep(0.02)
        raise RuntimeError(f"no right answer, but {said}; its last words: {self.last_words()}")

    def last_words(self) -> str:
        return " ".join(self.log.read_text(errors="replace").split())[-300:]

    def stop(self) -> None:
        """Send SIGTERM, and 8 seconds later SIGKILL to processes that remain."""
        processes = self.processes()
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        for process in psutil.wait_procs(processes, timeout=8)[1]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.child.wait()


@contextlib.contextmanager
def started(command: list[str], port: int, log: Path, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Start a server that is stopped when the block ends."""
    server = Server(command, port, log, env)
    try:
        yield server
    finally:
        server.stop()


NGINX = """\
daemon off; worker_processes 1; pid PLACE/pid; error_log PLACE/errors;
events { worker_connections 512; }
http {
    access_log off; client_body_temp_path PLACE/bodies; proxy_temp_path PLACE/answers;
    fastcgi_temp_path PLACE/f; uwsgi_temp_path PLACE/u; scgi_temp_path PLACE/s;
    upstream server { server 127.0.0.1:SERVER; keepalive 32; }
    server {
        listen 127.0.0.1:PORT ssl; ssl_certificate PLACE/certificate; ssl_certificate_key PLACE/key;
        client_max_body_size 17m;
        location / {
            proxy_pass http://server; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_set_header Host $host;
        }
    }
}
"""


@contextlib.contextmanager
def tls_in_front(port: int, place: Path) -> Iterator[int]:
    """Start an nginx that speaks TLS for a server on another port, as deploy/nginx.conf does; yield its port.

    Raises:
        RuntimeError: nginx or openssl is not installed, or does not start.
    """
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None or shutil.which("openssl") is None:
        raise RuntimeError("nginx and openssl, which are needed for TLS, are not installed")
    own = free_port()
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    made += ["-keyout", str(place / "key"), "-out", str(place / "certificate")]
    subprocess.run(made, check=True, capture_output=True)
    text = NGINX.replace("PLACE", str(place)).replace("SERVER", str(port)).replace("PORT", str(own))
    (place / "nginx.conf").write_text(text)
    child = subprocess.Popen([program, "-p", str(place), "-c", str(place / "nginx.conf")], stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 10
        while time.monotonic() < end and child.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", own), timeout=1):
                break
            time.sleep(0.05)
        else:
            raise RuntimeError("nginx does not start")
        yield own
    finally:
        child.terminate()
        child.wait()


@contextlib.contextmanager
def busy_neighbours(number: int) -> Iterator[None]:
    """Run so many processes that compute all the time."""
    children = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()
