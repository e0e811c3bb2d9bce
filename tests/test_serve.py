"""A bundle answers HTTP: right for every kind of picture, in words for every bad request, and never with torch."""

import base64
import hashlib
import http.client
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from deeplightning.image import ImageSpec
from deeplightning.runfolder import RunFolder
from serve.app import Limits, create_app
from serve.bundle import Bundle

COLOURS = {"red": (200, 30, 10), "green": (20, 180, 40), "blue": (10, 20, 220)}
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """The run of a network that tells red, green and blue by the mean of each channel."""
    import torch  # here, since all else in this file does without

    from deeplightning.export import export

    class MeanColour(torch.nn.Module):
        def forward(self, images):  # uint8 (N, 3, 8, 8)
            return torch.softmax(images.float().mean(dim=(2, 3)) / 32, dim=1)  # (N, 3)

    task = SimpleNamespace(
        kind="image_classification",
        image_spec=ImageSpec(8, 8, "RGB"),
        class_names=list(COLOURS),
        inference_model=lambda: MeanColour().eval(),
    )
    folder = RunFolder(tmp_path_factory.mktemp("a run"))
    samples = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8), dtype=np.uint8)
    export(task, folder, samples, {"id": "abc", "folder_name": folder.path.name, "created": "now", "versions": {}})
    return folder


@pytest.fixture(scope="module")
def client(run_folder):
    return create_app(Bundle.open(run_folder.bundle), Limits(1, 1_000_000, 4)).test_client()


def picture(colour="red", kind="PNG", size=(8, 8), mode="RGB", **options):
    file = io.BytesIO()
    Image.new("RGB", size, COLOURS[colour]).convert(mode).save(file, kind, **options)
    return file.getvalue()


def probabilities(colour):
    """float64 (3,), by another way than the graph's."""
    scores = np.exp(np.array(COLOURS[colour], dtype=np.float64) / 32)
    return scores / scores.sum()


def png_header(width, height):
    """A PNG that promises more pixels than anyone has memory for."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def encoded(data):
    return base64.b64encode(data).decode()


def form(*pictures, field="image"):
    return {"data": {field: [(io.BytesIO(data), "a.png") for data in pictures]}, "content_type": "multipart/form-data"}


# Answers.

ONE_IMAGE = {
    "form": lambda data: form(data),
    "body as image": lambda data: {"data": data, "content_type": "image/png"},
    "body as bytes": lambda data: {"data": data, "content_type": "application/octet-stream"},
    "body without a type": lambda data: {"data": data},
    "JSON list": lambda data: {"json": {"images": [encoded(data)]}},
    "JSON single": lambda data: {"json": {"image": encoded(data)}},
    "JSON data URL": lambda data: {"json": {"image": "data:image/png;base64," + encoded(data)}},
    "JSON in lines": lambda data: {"json": {"image": base64.encodebytes(data).decode()}},
}


@pytest.mark.parametrize("request_of", ONE_IMAGE.values(), ids=ONE_IMAGE)
def test_one_image_gets_one_answer(client, request_of):
    """Each form of request gets the same: two string keys, the label, and the classes by probability."""
    response = client.post("/predict", **request_of(picture("green")))
    assert response.status_code == 200
    answer, expected = response.json, probabilities("green")
    assert list(answer) == ["predicted_class", "predicted_probability", "label", "predictions"]
    assert (answer["predicted_class"], answer["label"]) == ("1", "green")
    assert isinstance(answer["predicted_probability"], str)
    assert float(answer["predicted_probability"]) == pytest.approx(expected[1], abs=1e-6)
    assert [(one["class"], one["label"]) for one in answer["predictions"]] == [(1, "green"), (2, "blue"), (0, "red")]
    for one in answer["predictions"]:
        assert one["probability"] == pytest.approx(expected[one["class"]], abs=1e-6)


@pytest.mark.parametrize(
    "request_of",
    [lambda *data: form(*data), lambda *data: {"json": {"images": [encoded(one) for one in data]}}],
    ids=["form", "JSON"],
)
def test_several_images_are_answered_in_order(client, request_of):
    """One answer per image, each like the answer to it alone."""
    pictures = [picture("blue"), picture("red", "JPEG"), picture("green")]
    response = client.post("/predict", **request_of(*pictures))
    alone = [client.post("/predict", data=data).json for data in pictures]
    assert [one["label"] for one in alone] == ["blue", "red", "green"]
    assert response.json == {"predictions": alone}


def test_probabilities_are_told_to_the_last_digit(client, run_folder):
    """The text of a probability is that float32 and no other."""
    data = picture("blue")
    bundle = Bundle.open(run_folder.path)
    row = bundle.predict(bundle.prepare(data, 100)[None])[0]
    answer = client.post("/predict", data=data).json
    assert np.float32(answer["predicted_probability"]) == row.max()
    assert [np.float32(one["probability"]) for one in answer["predictions"]] == sorted(row, reverse=True)


@pytest.mark.parametrize(("top_k", "number"), [("1", 1), ("2", 2), ("3", 3), ("1000", 3)])
def test_top_k_bounds_the_list(client, top_k, number):
    """As many classes as asked for, at most all."""
    assert len(client.post(f"/predict?top_k={top_k}", data=picture()).json["predictions"]) == number


def turned():
    """Green, but for its EXIF orientation: the left half is blue as stored, the upper half as seen."""
    image = Image.new("RGB", (16, 16), COLOURS["green"])
    image.paste(COLOURS["blue"], (0, 0, 5, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    return file.getvalue()


def animated():
    frames = [Image.new("RGB", (8, 8), COLOURS[colour]) for colour in ("green", "red")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def see_through():
    """Green, nearly opaque."""
    file = io.BytesIO()
    Image.new("RGBA", (8, 8), (*COLOURS["green"], 250)).save(file, "PNG")
    return file.getvalue()


GOOD_IMAGES = {
    "PNG": picture("green"),
    "JPEG": picture("green", "JPEG", quality=95),
    "WebP": picture("green", "WEBP"),
    "BMP": picture("green", "BMP"),
    "large": picture("green", size=(999, 1000)),
    "one pixel": picture("green", size=(1, 1)),
    "palette": picture("green", mode="P"),
    "CMYK": picture("green", "JPEG", mode="CMYK"),
    "alpha": see_through(),
    "EXIF-rotated": turned(),
    "animated GIF": animated(),
}


@pytest.mark.parametrize("data", GOOD_IMAGES.values(), ids=GOOD_IMAGES)
def test_every_kind_of_picture_is_read(client, data):
    """What people have on their disks is answered, and rightly."""
    response = client.post("/predict", data=data)
    assert (response.status_code, response.json["label"]) == (200, "green")


def test_sixteen_bits_of_grey_are_not_white(client):
    """A 16-bit picture is scaled to eight bits: equal channels, equal probabilities."""
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8), 30_000, dtype=np.uint16)).save(file, "PNG")
    response = client.post("/predict", data=file.getvalue())
    assert response.json["predicted_probability"].startswith("0.3333")


# Refusals.


def many_parts():
    return {"data": {f"field {number}": "x" for number in range(20)} | {"image": (io.BytesIO(picture()), "a.png")}}


BAD_REQUESTS = {
    "nothing": ({}, 400, "has no body"),
    "empty form": ({"data": {}, "content_type": "multipart/form-data; boundary=x"}, 400, "no file in the field image"),
    "other field": (form(picture(), field="picture"), 400, "Its fields are: picture"),
    "text field": ({"data": {"image": "a.png"}, "content_type": "multipart/form-data"}, 400, "curl -F image=@FILE"),
    "no boundary": ({"data": b"--x\r\n", "content_type": "multipart/form-data"}, 400, "no file in the field image"),
    "empty file": (form(b""), 400, "empty"),
    "urlencoded": (
        {"data": picture(), "content_type": "application/x-www-form-urlencoded"},
        415,
        'curl --data-binary @FILE -H "Content-Type: image/png"',
    ),
    "text type": ({"data": b"hello", "content_type": "text/plain"}, 415, "text/plain is not read"),
    "text": ({"data": b"hello"}, 415, "not an image in a format that is read"),
    "HTML as PNG": ({"data": b"<html></html>", "content_type": "image/png"}, 415, "not an image in a format"),
    "SVG": ({"data": b"<svg xmlns='http://www.w3.org/2000/svg'/>", "content_type": "image/svg+xml"}, 415, "not an"),
    "truncated PNG": ({"data": picture(size=(300, 300))[:-200]}, 400, "cut off"),
    "truncated JPEG": ({"data": picture("red", "JPEG", (300, 300))[:700]}, 400, "cut off"),
    "flipped PNG": ({"data": picture()[:45] + b"\xff\xff" + picture()[47:]}, 400, "damaged"),
    "bomb": ({"data": png_header(20_000, 20_000)}, 413, "at most"),
    "large bomb": ({"data": png_header(2**31 - 1, 2**31 - 1)}, 413, "at most"),
    "over our pixels": ({"data": picture(size=(1001, 1000))}, 413, "1001 x 1000 = 1,001,000 pixels"),
    "upload": ({"data": b"\0" * 1_000_001}, 413, "at most 1 MB, 4 images"),
    "upload as form": (
        {
            "data": b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
            + b"\0" * 1_000_001
            + b"\r\n--x--\r\n",
            "content_type": "multipart/form-data; boundary=x",
        },
        413,
        "at most 1 MB, 4 images",
    ),
    "many images": (form(*[picture()] * 5), 413, "5 images; at most 4"),
    "many JSON images": ({"json": {"images": [encoded(picture())] * 5}}, 413, "5 images; at most 4"),
    "many parts": (many_parts(), 413, "few other form fields"),
    "second image bad": (form(picture(), b"hello"), 415, "Image 2 of 2: This is not an image"),
    "no JSON": ({"data": b"{", "content_type": "application/json"}, 400, "is not JSON"),
    "empty JSON": ({"data": b"", "content_type": "application/json"}, 400, "is not JSON"),
    "binary JSON": ({"data": b"\xff\xfe\xfd", "content_type": "application/json"}, 400, "is not JSON"),
    "deep JSON": ({"data": b"[" * 900, "content_type": "application/json"}, 400, "is not JSON"),
    "vast JSON": ({"data": b"[" + b"{}," * 300_000, "content_type": "application/json"}, 400, "more parts than"),
    "body in chunks": (
        {"input_stream": io.BytesIO(b"\0" * 1_000_001), "environ_overrides": {"wsgi.input_terminated": True}},
        413,
        "at most 1 MB",
    ),
    "large number": ({"data": b"9" * 100_000, "content_type": "application/json"}, 400, "is not JSON"),
    "JSON list": ({"json": [encoded(picture())]}, 400, "not an object with the one key images"),
    "JSON other key": ({"json": {"picture": "x"}}, 400, "not an object with the one key images"),
    "JSON both keys": ({"json": {"images": [], "image": ""}}, 400, "not an object with the one key images"),
    "JSON no images": ({"json": {"images": []}}, 400, "one or more texts"),
    "JSON number": ({"json": {"images": [1]}}, 400, "one or more texts"),
    "JSON null": ({"json": {"image": None}}, 400, "one or more texts"),
    "no base64": ({"json": {"image": "not base64!"}}, 400, "not base64"),
    "foreign letters": ({"json": {"image": "ä" * 8}}, 400, "not base64"),
    "base64 of text": ({"json": {"image": encoded(b"hello")}}, 415, "not an image in a format"),
}


@pytest.mark.parametrize(("request_", "status", "words"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_told_what_to_do(client, request_, status, words):
    """4xx with one key, ERROR, and the words that help."""
    response = client.post("/predict", **request_)
    assert (response.status_code, list(response.json)) == (status, ["ERROR"])
    assert words in response.json["ERROR"]
    assert response.mimetype == "application/json"


@pytest.mark.parametrize("top_k", ["0", "-1", "x", "1.5", "", "9" * 5000, "٣"])
def test_top_k_is_a_whole_number(client, top_k):
    """What is no count is refused, not guessed."""
    response = client.post("/predict", query_string={"top_k": top_k}, data=picture())
    assert (response.status_code, "whole number" in response.json["ERROR"]) == (400, True)


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/nothing", 404, "/predict"),
        ("GET", "/../bundle.json", 404, "/predict"),
        ("GET", "/predict", 405, "GET is not possible here; use POST."),
        ("POST", "/info", 405, "POST is not possible here; use GET."),
        ("PUT", "/predict", 405, "use POST"),
    ],
)
def test_wrong_addresses_and_methods_are_json_too(client, method, path, status, words):
    """No page of HTML for a program to stumble over."""
    response = client.open(path, method=method)
    assert (response.status_code, list(response.json)) == (status, ["ERROR"])
    assert words in response.json["ERROR"]


def test_a_fault_of_the_server_tells_nothing_of_its_inside(run_folder, caplog):
    """500 in general words; the reason goes to the log."""
    app = create_app(Bundle.open(run_folder.bundle))

    @app.get("/fault")
    def fault():
        raise RuntimeError("secret")

    response = app.test_client().get("/fault")
    assert (response.status_code, list(response.json)) == (500, ["ERROR"])
    assert "secret" not in response.text
    assert "secret" in caplog.text


# The other endpoints.


def test_health_and_ready(client):
    """Both answer 200 with a word."""
    assert (client.get("/health").status_code, client.get("/health").json) == (200, {"status": "ok"})
    assert (client.get("/ready").status_code, client.get("/ready").json) == (200, {"status": "ready"})


def test_info_tells_the_model(client, run_folder):
    """Task, labels, input, run, limits."""
    assert client.get("/info").json == {
        "task": "image_classification",
        "labels": ["red", "green", "blue"],
        "input": ImageSpec(8, 8).to_dict(),
        "run": {"id": "abc", "folder_name": run_folder.path.name, "created": "now", "versions": {}},
        "limits": {"max_upload_mb": 1, "max_pixels": 1_000_000, "max_images": 4},
    }


def test_openapi_describes_what_is_there(client):
    """Exactly the app's addresses and methods; every reference leads somewhere; what is required is answered."""
    document = client.get("/openapi.json").json
    assert document["openapi"] == "3.0.3"
    rules = client.application.url_map.iter_rules()
    there = {rule.rule: {method.lower() for method in rule.methods - {"HEAD", "OPTIONS"}} for rule in rules}
    assert {path: set(methods) for path, methods in document["paths"].items()} == there
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert references == set(schemas)
    answers = {
        "Prediction": client.post("/predict", data=picture()).json,
        "Predictions": client.post("/predict", **form(picture(), picture())).json,
        "Status": client.get("/health").json,
        "Info": client.get("/info").json,
        "Error": client.post("/predict").json,
    }
    assert {name: list(answer) for name, answer in answers.items()} == {
        name: schema["required"] for name, schema in schemas.items()
    }


def test_the_page_needs_nothing_from_outside(client):
    """One document without links to other hosts, whose policy allows just its own script and style."""
    response = client.get("/")
    assert (response.status_code, response.mimetype) == (200, "text/html")
    assert not re.search(r"(src|href)=.?(https?:)?//", response.text)
    policy = response.headers["Content-Security-Policy"]
    for tag in ("script", "style"):
        text = re.search(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)[1]
        assert f"{tag}-src 'sha256-{encoded(hashlib.sha256(text.encode()).digest())}'" in policy


def test_answers_may_not_be_guessed_at_or_framed(client):
    """The cheap headers are on every answer, and no other site is invited."""
    for response in (client.get("/health"), client.get("/nothing"), client.get("/"), client.post("/predict")):
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in response.headers


# The real process.


class Server:
    """`python -m serve` on a free port of this machine, its stderr in a file."""

    def __init__(self, folder, errors, *arguments, flags=()):
        self.errors = errors
        command = [sys.executable, *flags, "-m", "serve", str(folder), "--port", "0", *arguments]
        with errors.open("w") as stderr:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
        self.line = self.process.stdout.readline()
        self.port = int(re.search(r":(\d+)", self.line)[1])

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(self, method, path, body=None, headers=None):
        connection = self.connect()
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        return response.status, answer

    def processes(self):
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [self.process.pid, *map(int, children)]

    def stop(self, sign=signal.SIGTERM):
        self.process.send_signal(sign)
        self.process.wait(timeout=15)
        self.process.stdout.close()
        return self.process.returncode


@pytest.fixture
def start(run_folder, tmp_path):
    servers = []

    def started(*arguments, **options):
        servers.append(Server(run_folder.path, tmp_path / "errors", *arguments, **options))
        return servers[-1]

    yield started
    for server in servers:
        server.stop(signal.SIGKILL)


def gone(pid):
    """A zombie is gone: it holds nothing, and whoever is process 1 here may be slow to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(holds, seconds=10):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_the_process_imports_no_torch_and_leaves_cleanly(start):
    """One line says where; it answers; no library of training is in it; SIGTERM ends it, its child and its port."""
    server = start(flags=["-X", "importtime"])
    assert server.line == f"Serving image_classification (3 classes) on http://127.0.0.1:{server.port}\n"
    status, answer = server.ask("POST", "/predict", picture("blue"))
    assert (status, answer["label"]) == (200, "blue")
    assert server.ask("GET", "/health") == (200, {"status": "ok"})
    processes = server.processes()
    assert len(processes) == 2
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in processes)
    assert "onnxruntime" in maps
    assert "torch" not in maps
    assert server.stop() == 0
    assert all(map(gone, processes))
    with pytest.raises(ConnectionRefusedError):
        server.ask("GET", "/health")
    lines = server.errors.read_text().splitlines()
    assert all(line.startswith("import time:") for line in lines)
    imported = {line.split("|")[-1].strip() for line in lines}
    packages = {name.partition(".")[0] for name in imported}
    assert {"flask", "gunicorn", "numpy", "onnxruntime", "PIL"} <= packages
    assert packages.isdisjoint(
        ["torch", "torchvision", "pytorch_lightning", "lightning", "mlflow", "sklearn", "matplotlib", "onnx", "yaml"]
    )
    ours = {name for name in imported if name.startswith("deeplightning")}
    assert ours == {"deeplightning", "deeplightning.image", "deeplightning.runfolder"}


@pytest.mark.parametrize("module", ["serve.bundle", "deeplightning.export"])
def test_onnxruntime_reports_to_nobody(tmp_path, module):
    """Its telemetry, on by default from 1.29, is off before it can start a thread or write to the user's home."""
    code = f"import os, {module}; print('threads', len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("threads 1\n", "")
    assert list(tmp_path.iterdir()) == []


def test_an_accepted_request_is_finished(start):
    """A body that is still under way at SIGTERM is answered, and the process is gone within ten seconds."""
    server = start()
    data = picture("green")
    connection = server.connect()
    connection.putrequest("POST", "/predict")
    connection.putheader("Content-Length", str(len(data)))
    connection.endheaders()
    connection.send(data[:20])
    time.sleep(0.5)  # accepted by now: nothing outside tells when
    server.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    time.sleep(0.5)
    connection.send(data[20:])
    assert json.loads(connection.getresponse().read())["label"] == "green"
    connection.close()
    assert server.process.wait(timeout=15) == 0
    assert time.monotonic() - began < 10


def test_an_idle_connection_does_not_hold_the_server_up(start):
    """One that was answered costs nothing at the end; one that never asks, as browsers do, under ten seconds."""
    server = start()
    answered, silent = server.connect(), server.connect()
    silent.connect()
    answered.request("GET", "/health")
    answered.getresponse().read()
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 10
    answered.close()
    silent.close()


def test_ctrl_c_ends_it(start):
    """SIGINT is a wish to stop, and no fault."""
    server = start()
    processes = server.processes()
    assert server.stop(signal.SIGINT) == 0
    assert all(map(gone, processes))


def test_nobody_is_left_when_it_is_killed(start):
    """The worker of a parent that is gone ends by itself."""
    server = start()
    processes = server.processes()
    server.stop(signal.SIGKILL)
    wait_until(lambda: all(map(gone, processes)))


def test_a_crashed_worker_is_replaced(start):
    """The next request finds another worker, and the ready line is not repeated."""
    server = start()
    parent, worker = server.processes()
    os.kill(worker, signal.SIGSEGV)
    wait_until(lambda: gone(worker) and len(server.processes()) == 2)
    assert server.ask("POST", "/predict", picture("red"))[1]["label"] == "red"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.stdout.read() == ""
    assert parent == server.process.pid


def test_too_large_a_body_gets_an_answer(start):
    """413 reaches clients that send all before they read, whether they announce the size or send chunks."""
    server = start("--max-upload-mb", "1")
    body = b"\0" * 20_000_000
    assert server.ask("POST", "/predict", body)[0] == 413
    assert server.ask("POST", "/predict", iter([body]))[0] == 413  # http.client makes chunks of it


def test_requests_do_not_wait_for_a_client_that_pauses(start):
    """Others are answered meanwhile, and many at a time rightly."""
    server = start("--threads", "4")
    pausing = server.connect()
    pausing.putrequest("POST", "/predict")
    pausing.putheader("Content-Length", "1000")
    pausing.endheaders()
    answers = {}

    def ask(number):
        colour = list(COLOURS)[number % 3]
        answers[number] = (colour, server.ask("POST", "/predict", picture(colour))[1]["label"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 12
    assert all(asked == answered for asked, answered in answers.values())
    pausing.close()


def serve(*arguments):
    """rc, stdout and stderr of a start that is expected to fail."""
    command = [sys.executable, "-m", "serve", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


def test_a_port_in_use_is_named(run_folder):
    """Exit 3, at once, with the port and the way out."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = serve(run_folder.path, "--port", port)
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert f"Port {port} on 127.0.0.1" in err
    assert "--port" in err


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_a_host_that_is_not_ours_is_named(run_folder, host):
    """Exit 3 and one note."""
    code, out, err = serve(run_folder.path, "--port", 0, "--host", host)
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert host in err


def test_a_bad_bundle_is_named(tmp_path):
    """Exit 4 and one note."""
    code, out, err = serve(tmp_path, "--port", 0)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert str(tmp_path) in err


@pytest.mark.parametrize("arguments", [[], ["x", "--port", "70000"], ["x", "--port", "five"], ["x", "--threads", "0"]])
def test_wrong_arguments_are_explained(arguments):
    """Exit 2 and how it is used."""
    code, out, err = serve(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: python -m serve")


def test_a_public_address_is_called_public(start):
    """Whoever opens the server to others is told."""
    server = start("--host", "0.0.0.0")
    assert "public" in server.line
    assert server.ask("GET", "/health")[0] == 200


# The client.


def predict(url, *arguments, cwd=ROOT):
    environment = {**os.environ, "PREDICT_URL": url, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "serve.predict", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_the_client_prints_one_line_per_image(start, tmp_path):
    """In order, each with its file's name, whatever the name; without arguments the ten sample digits."""
    server = start()
    url = f"http://127.0.0.1:{server.port}/predict"
    paths = [tmp_path / "a red one.png", tmp_path / "grün.png"]
    for path, colour in zip(paths, ("red", "green"), strict=True):
        path.write_bytes(picture(colour))
    code, lines, err = predict(url, *paths)
    assert (code, err) == (0, "")
    assert [(line["image"], line["label"]) for line in lines] == [(str(paths[0]), "red"), (str(paths[1]), "green")]
    code, lines, err = predict(url, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert [Path(line["image"]).name for line in lines] == [f"{digit}.png" for digit in range(10)]

    (tmp_path / "text.png").write_text("no picture")
    code, lines, err = predict(url, paths[0], tmp_path / "text.png", paths[1])
    assert (code, len(lines), err.count("\n")) == (3, 1, 1)
    assert "text.png: the server answers 415: This is not an image" in err
    code, lines, err = predict(f"http://127.0.0.1:{server.port}/", paths[0])
    assert (code, lines) == (3, [])
    assert "405" in err


@pytest.mark.parametrize(
    ("url", "image", "words"),
    [
        ("http://127.0.0.1:9/predict", "examples/digits/1.png", "bash deploy.sh RUN"),
        ("http://127.0.0.1:9/predict", "no.png", "no.png cannot be read: No such file"),
        ("http://127.0.0.1:9/predict", "examples", "examples cannot be read: Is a directory"),
        ("file:///etc/hostname", "examples/digits/1.png", "PREDICT_URL is 'file:///etc/hostname'"),
        ("127.0.0.1:5000", "examples/digits/1.png", "PREDICT_URL is"),
        ("http://127.0.0.1:x/", "examples/digits/1.png", "PREDICT_URL is"),
    ],
)
def test_the_client_says_why_there_is_no_answer(url, image, words):
    """Exit 3 and one note."""
    code, lines, err = predict(url, image)
    assert (code, lines, err.count("\n")) == (3, [], 1)
    assert words in err
