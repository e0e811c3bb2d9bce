"""`serve.create_app` returns a WSGI application for gunicorn and waitress, which may fork before or after it."""

import concurrent.futures
import json
import re
import signal
import socket
import threading

import pytest
from commands import python
from prometheus_client.parser import text_string_to_metric_families
from served import GUNICORN, ROOT, WAITRESS, WsgiServer, children, colour_run, gone, picture, wait_until

import serve
from serve.bundle import Bundle, BundleError
from serve.device import Choice, Device, DeviceError, OptionError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return colour_run(tmp_path_factory.mktemp("run")).path


@pytest.fixture(scope="module", params=["gunicorn", "waitress"])
def guarded(request, run, tmp_path_factory):
    """A server of an application with a key, created in the user's module."""
    folder = tmp_path_factory.mktemp(request.param)
    app = f"create_app({str(run)!r}, api_key='s3cret', max_upload_mb=1)"
    (folder / "own.py").write_text(f"from serve import create_app\napp = {app}\n")
    server = WsgiServer(folder, *(GUNICORN if request.param == "gunicorn" else WAITRESS), "own:app")
    yield server
    server.process.kill()
    server.process.wait()


def test_every_route_answers(guarded):
    """Every route answers with the key, and public ones without it, with the headers and request ids of our server."""
    key = {"Authorization": "Bearer s3cret"}
    kinds = {"/": "text/html", "/docs": "text/html", "/metrics": "text/plain"}
    kinds |= dict.fromkeys(("/health", "/ready", "/info", "/openapi.json"), "application/json")
    for path, kind in kinds.items():
        status, headers, body = guarded.ask("GET", path, headers=key)
        assert (status, headers.get_content_type(), bool(body)) == (200, kind, True), path
        assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
        assert re.fullmatch("[0-9a-f]{16}", headers["X-Request-ID"])
        assert guarded.ask("GET", path)[0] == (200 if path in ("/", "/docs", "/health", "/ready") else 401)
    status, headers, body = guarded.ask("POST", "/predict?top_k=1", picture("green"), key | {"X-Request-ID": "mine"})
    assert (status, json.loads(body)["label"], headers["X-Request-ID"]) == (200, "green", "mine")
    described = json.loads(guarded.ask("GET", "/openapi.json", headers=key)[2])
    assert "securitySchemes" in described["components"]
    counts = {
        sample.name: sample.value
        for family in text_string_to_metric_families(guarded.ask("GET", "/metrics", headers=key)[2].decode())
        for sample in family.samples
        if sample.labels.get("status", "401") == "401"
    }
    assert counts["deeplightning_requests_total"] == 3
    assert (counts["deeplightning_forward_seconds_count"], counts["deeplightning_queue_length"]) == (1, 0)


def test_bodies_are_bounded_and_read_in_chunks(guarded):
    """Bodies above the limit get our server's JSON errors, see test_hostile_requests; chunked bodies are accepted."""
    for body, status, words in (
        (b"x" * 1_000_001, 413, "at most 1 MB"),
        (iter([b"x" * 600_000, b"x" * 600_000]), 413, "at most 1 MB"),
        (iter([picture("blue")[:50], picture("blue")[50:]]), 200, "blue"),
    ):
        found, headers, answer = guarded.ask("POST", "/predict", body, {"X-API-Key": "s3cret"})
        assert (found, headers.get_content_type()) == (status, "application/json"), answer
        document = json.loads(answer)
        assert words in document.get("ERROR", document.get("label"))


@pytest.mark.parametrize("preload", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "preload"])
def test_gunicorn_forks_and_ends_cleanly(run, tmp_path, preload):
    """Two workers answer many clients at once; at SIGTERM an accepted request is answered, and all workers end."""
    options = ["--workers", "2", *["--preload"] * preload]
    server = WsgiServer(tmp_path, *GUNICORN, *options, f"serve:create_app({str(run)!r}, max_batch=4)")
    try:
        colours = ["red", "green", "blue"] * 20
        large = {colour: picture(colour, size=(300, 300)) for colour in colours}  # decoded in other threads

        def label(number):
            colour = colours[number]
            body = picture(colour) if number % 2 else large[colour]
            return json.loads(server.ask("POST", "/predict", body)[2]).get("label")

        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            assert list(threads.map(label, range(len(colours)))) == colours
        if preload:  # the workers share the metrics
            text = server.ask("GET", "/metrics")[2].decode()
            assert f"deeplightning_batch_size_count {len(colours):.1f}" in text
        workers = children(server.process.pid)
        assert len(workers) == 2
        body = picture("blue")
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            # Without `close` gunicorn may keep the connection, and its worker, for 30 seconds more.
            head = f"POST /predict HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 100")  # a thread has the request
            server.process.send_signal(signal.SIGTERM)
            client.sendall(body)
            answer = b"".join(iter(lambda: client.recv(65_536), b""))
            assert (b"200 OK" in answer, b'"label": "blue"' in answer) == (True, True)
        assert server.process.wait(timeout=60) == 0
        wait_until(lambda: all(map(gone, workers)), 30)
        assert "Traceback" not in server.output.read_text()
    finally:
        server.process.kill()
        server.process.wait()


FORKED = """
import os, sys
import serve
assert not {"flask", "numpy", "onnxruntime"} & set(sys.modules), "importing the package imports no library"
sys.path.insert(0, "tests")
from served import picture
app = serve.create_app(sys.argv[1])
client, large = app.test_client(), picture("green", size=(400, 400))
def answers():
    assert [client.post("/predict", data=data).json["label"] for data in (large, picture("red"))] == ["green", "red"]
answers()
assert any(name.startswith("pictures") for name in map(lambda t: t.name, __import__("threading").enumerate()))
for _ in range(2):
    child = os.fork()
    if not child:
        answers(); os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
answers()
assert "batch_size_count 8.0" in client.get("/metrics").text
"""


def test_a_process_may_be_forked_after_it_has_answered(run):
    """A forked child has its own threads and metrics, whatever its parent did before; importing `serve` is cheap."""
    done = python("-W", "ignore", "-c", FORKED, run, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_batch": 0}, ValueError, "max_batch is 0; it must be from 1 to 1024"),
        ({"max_bach": 4}, TypeError, "max_bach"),
        ({"precision": "int8", "device": "cuda"}, OptionError, "int8 is for the CPU"),
        (
            {"precision": "int8"},
            BundleError,
            "with serve.precision int8 in the run's config, `deeplightning serve RUN` writes it; --precision fp32 does",
        ),
        ({"api_key": ""}, OptionError, "api_key is empty"),
        ({"precision": "fp8"}, OptionError, "precision fp8"),
        ({"device": "gpu"}, OptionError, "on gpu"),
    ],
    ids=["range", "name", "pair", "model", "key", "precision", "device"],
)
def test_wrong_options_are_explained(run, options, error, words):
    """A wrong option is refused when the application is created."""
    with pytest.raises(error, match=re.escape(words)):
        serve.create_app(run, **options)


def test_a_bundle_is_found_inside_an_mlflow_model(run, tmp_path):
    """`create_app` accepts the folder of an MLflow model, and refuses a folder without a bundle."""
    with pytest.raises(BundleError, match="no bundle in"):
        serve.create_app(tmp_path)
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "bundle").symlink_to(run / "bundle")
    client = serve.create_app(str(tmp_path)).test_client()
    assert client.post("/predict", data=picture("blue")).json["label"] == "blue"


def test_no_request_runs_the_model_for_others(run, monkeypatch):
    """The model runs in threads of its own: a request's thread would answer its client only when nobody else waits."""
    names, predict = [], Bundle.predict

    def noted(self, inputs):
        names.append(threading.current_thread().name)
        return predict(self, inputs)

    client = serve.create_app(run).test_client()
    monkeypatch.setattr(Bundle, "predict", noted)
    assert client.post("/predict", data=picture("red")).json["label"] == "red"
    assert [name.startswith("pictures") for name in names] == [True]


def test_auto_uses_the_cpu_if_a_gpu_cannot_load_the_model(run, monkeypatch):
    """As in our own server; a GPU that is asked for must load it."""
    on_cpu = Bundle.open_on

    def open_on(device, *rest):
        if device.on_gpu:
            raise DeviceError("it is full")
        return on_cpu(device, *rest)

    monkeypatch.setattr(Bundle, "open_on", open_on)
    gpu = Device(0, "H100", 10**9)
    monkeypatch.setattr("serve.app.choose_devices", lambda word, lacks: Choice((gpu,), may_fall_back=word == "auto"))
    assert serve.create_app(run).test_client().get("/info").json["device"] == "cpu"
    with pytest.raises(DeviceError, match="it is full"):
        serve.create_app(run, device="cuda")
