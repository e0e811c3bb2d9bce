"""The HTTP API of a bundle, on the fast path and through Flask: each kind of request gets the right answer, and a bad
request a helpful message."""

import asyncio
import base64
import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from served import COLOURS, ROOT, encoded, negative_run, picture, probabilities
from werkzeug.datastructures import FileStorage, MultiDict
from werkzeug.test import Client, encode_multipart

from deeplightning.image_spec import ImageSpec
from serve import __main__ as server_start
from serve import worker
from serve.admission import Admission, Hosts
from serve.answers import HEADERS, refused
from serve.app import application
from serve.bundle import Bundle
from serve.dispatch import Dispatcher, Request
from serve.limits import Limits, Refusal
from serve.log import Log, log_event
from serve.prediction import Service
from serve.uploads import arrays_from_json, arrays_from_npy


@pytest.fixture(scope="module")
def service(run_folder):
    limits = Limits(max_upload_mb=1, max_pixels=1_000_000, max_side=5_000, max_images=4, max_wait=600)
    return Service(Bundle.open(run_folder.bundle), limits)


@pytest.fixture(scope="module", params=["flask", "fast"])
def client(service, request):
    """Return werkzeug's test client for Flask, or for the fast path in front of it."""
    return client_of(service, request.param)


def client_of(service, path="fast"):
    if path == "flask":
        return application(service).test_client()
    return Client(through(Dispatcher(service, log=silent())))


def silent():
    return Log(os.open(os.devnull, os.O_WRONLY))


def through(dispatcher):
    """Wrap a dispatcher as a WSGI application that runs each request in its own event loop."""

    def application(environ, start_response):
        headers = {
            name[5:].lower().replace("_", "-").encode(): value.encode("latin-1")
            for name, value in environ.items()
            if name.startswith("HTTP_")
        }
        headers |= {
            name.lower().replace("_", "-").encode(): environ[name].encode("latin-1")
            for name in ("CONTENT_TYPE", "CONTENT_LENGTH")
            if environ.get(name) and not (name == "CONTENT_LENGTH" and environ.get("wsgi.input_terminated"))
        }
        path = environ["PATH_INFO"].encode("latin-1").decode()
        query = environ["QUERY_STRING"].encode()
        request = Request(environ["REQUEST_METHOD"], path, query, headers, "1.1", "127.0.0.1")

        async def answered():
            done = asyncio.get_running_loop().create_future()
            try:
                dispatcher.admit(request)
                request.body = environ["wsgi.input"].read()
                dispatcher.service.limits.check_size(len(request.body))
            except Refusal as refusal:
                return refused(refusal)
            dispatcher.answer(request, lambda request, response: done.set_result(response) or True)
            return await done

        sent = asyncio.run(answered())
        headers = {"Content-Type": sent.content_type, **HEADERS, **sent.headers, "X-Request-ID": request.name.decode()}
        start_response(f"{sent.status} x", [*headers.items()])
        return [sent.body]

    return application


def form(*pictures, field="image"):
    parts = MultiDict((field, FileStorage(io.BytesIO(data), "a.png")) for data in pictures)
    boundary, body = encode_multipart(parts)
    return {"data": body, "content_type": f"multipart/form-data; boundary={boundary}"}


# Answers.


def url_safe(data):
    """Return a picture in URL-safe base64 that contains padding and both characters specific to this alphabet."""
    text = base64.urlsafe_b64encode(data + b"\0" * (-len(data) % 3) + b"\xfb\xff\xbf\xff").decode()
    assert ("-" in text, "_" in text, text[-1]) == (True, True, "=")
    return text


ONE_IMAGE = {
    "form": lambda data: form(data),
    "body as image": lambda data: {"data": data, "content_type": "image/png"},
    "body as bytes": lambda data: {"data": data, "content_type": "application/octet-stream"},
    "body without a type": lambda data: {"data": data},
    "JSON list": lambda data: {"json": {"images": [encoded(data)]}},
    "JSON single": lambda data: {"json": {"image": encoded(data)}},
    "JSON data URL": lambda data: {"json": {"image": "data:image/png;base64," + encoded(data)}},
    "JSON URL-safe": lambda data: {"json": {"image": url_safe(data)}},
    "JSON without padding": lambda data: {"json": {"image": url_safe(data).rstrip("=")}},
    "JSON in lines": lambda data: {"json": {"image": base64.encodebytes(data).decode()}},
}


@pytest.mark.parametrize("request_of", ONE_IMAGE.values(), ids=ONE_IMAGE)
def test_one_image_gets_one_answer(client, request_of):
    """Each form of request gets the same answer: two string keys, the label, and the classes by probability."""
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
    """Each of several images gets the same answer as on its own; `top_k` bounds the list of classes."""
    pictures = [picture("blue"), picture("red", "JPEG"), picture("green")]
    response = client.post("/predict", **request_of(*pictures))
    alone = [client.post("/predict", data=data).json for data in pictures]
    assert [one["label"] for one in alone] == ["blue", "red", "green"]
    assert response.json == {"predictions": alone}
    for top_k, number in (("1", 1), ("3", 3), ("1000", 3)):
        assert len(client.post(f"/predict?top_k={top_k}", data=picture()).json["predictions"]) == number


def test_probabilities_are_told_to_the_last_digit(client, run_folder):
    """The text of a probability identifies its float32 exactly."""
    data = picture("blue")
    bundle = Bundle.open(run_folder.path)
    row = bundle.predict(bundle.prepare(data, 100)[None])[0]
    answer = client.post("/predict", data=data).json
    assert np.float32(answer["predicted_probability"]) == row.max()
    assert [np.float32(one["probability"]) for one in answer["predictions"]] == sorted(row, reverse=True)


# Refusals.


def parted(filename=b'; filename="a.png"', data=None, end=b"--x--\r\n", kind="multipart/form-data; boundary=x"):
    """Return a form with one part, which may be malformed."""
    head = b'--x\r\nContent-Disposition: form-data; name="image"' + filename
    return {"data": head + b"\r\n\r\n" + (data or picture()) + b"\r\n" + end, "content_type": kind}


def of_json(data):
    return {"data": data, "content_type": "application/json"}


# `hostile/requests.tsv` has more kinds, with their status alone.
BAD_REQUESTS = {
    "nothing": ({}, 400, "has no body"),
    "empty form": ({"data": {}, "content_type": "multipart/form-data; boundary=x"}, 400, "no file in the field image"),
    "other field": (form(picture(), field="picture"), 400, "no file in the field image"),
    "text field": ({"data": {"image": "a.png"}, "content_type": "multipart/form-data"}, 400, "curl -F image=@FILE"),
    "picture without a filename": (parted(b"", picture()), 400, "a part without a filename is a text"),
    "large picture without a filename": (parted(b"", b"\0" * 600_000), 413, "(a part without a filename is one)"),
    "no boundary": (parted(kind="multipart/form-data"), 400, "does not name its boundary"),
    "form without its end": (parted(end=b""), 400, "cut off"),
    "part without a disposition": (
        *({"data": b"--x\r\n\r\n1\r\n--x--\r\n", "content_type": "multipart/form-data; boundary=x"}, 400),
        "The form is malformed",
    ),
    "empty file": (form(b""), 400, "empty"),
    "urlencoded": (
        *({"data": picture(), "content_type": "application/x-www-form-urlencoded"}, 415),
        'curl --data-binary @FILE -H "Content-Type: image/png"',
    ),
    "text type": ({"data": b"hello", "content_type": "text/plain"}, 415, "text/plain is not supported"),
    "text": ({"data": b"hello"}, 415, "not an image in a supported format"),
    "over our pixels": ({"data": picture(size=(1001, 1000))}, 413, "1001 x 1000 = 1,001,000 pixels"),
    "over our side as form": (form(picture(size=(1, 5001))), 413, "a side of at most 5,000"),
    "upload": ({"data": b"\0" * 1_000_001}, 413, "at most 1 MB, 4 inputs"),
    "upload as form": (parted(data=b"\0" * 1_000_001), 413, "at most 1 MB, 4 inputs"),
    "many images": (form(*[picture()] * 5), 413, "5 images; at most 4"),
    "many JSON images": ({"json": {"images": [encoded(picture())] * 5}}, 413, "5 images; at most 4"),
    "many parts": (parted(end=b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 20), 413, "few other"),
    "second image bad": (form(picture(), b"hello"), 415, "Image 2 of 2: This is not an image"),
    "no JSON": (of_json(b"{"), 400, "is not JSON"),
    "vast JSON": (of_json(b"[" + b"{}," * 300_000), 400, "more parts than"),
    "body in chunks": (
        *({"input_stream": b"\0" * 1_000_001, "environ_overrides": {"wsgi.input_terminated": True}}, 413),
        "at most 1 MB",
    ),
    "JSON list": ({"json": [encoded(picture())]}, 400, "not an object with the one key images"),
    "JSON both keys": ({"json": {"images": [], "image": ""}}, 400, "not an object with the one key images"),
    "JSON no images": ({"json": {"images": []}}, 400, "one or more texts"),
    "JSON null": ({"json": {"image": None}}, 400, "one or more texts"),
    "JSON key twice": (of_json(b'{"image": "", "image": ""}'), 400, "the key 'image' twice; send each key once"),
    "no base64": ({"json": {"image": "not base64!"}}, 400, "not base64"),
    "base64 of text": ({"json": {"image": encoded(b"hello")}}, 415, "not an image in a supported format"),
    "no count": ({"path": "/predict?top_k=1.5", "data": picture()}, 400, "top_k must be a whole number"),
    "other address": ({"path": "/../bundle.json"}, 404, "/predict"),
    "other method": ({"path": "/info"}, 405, "POST is not allowed here; use GET."),
}


@pytest.mark.parametrize(("request_", "status", "words"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_told_what_to_do(client, request_, status, words):
    """A bad request gets 4xx with the single key ERROR and a helpful message."""
    stream = {"input_stream": io.BytesIO(request_["input_stream"])} if "input_stream" in request_ else {}
    response = client.post(**{"path": "/predict", **request_, **stream})
    assert (response.status_code, list(response.json)) == (status, ["ERROR"])
    assert words in response.json["ERROR"]
    assert response.mimetype == "application/json"


@pytest.mark.parametrize("body", [b'{"array": [true, 1]}', b'{"arrays": [[0, 1], [false, false]]}'])
def test_true_and_false_are_no_numbers_of_an_array(body):
    """true and false in an array are refused, although numpy would read them as 1 and 0."""
    with pytest.raises(Refusal, match="true or false, which are not numbers"):
        arrays_from_json(body, (2,), Limits())


@pytest.mark.parametrize("shape", [(10**9, 0, 3), (10**6, 1, 1)])
def test_a_npy_file_of_many_arrays_is_not_split_beyond_the_limit(shape):
    """A header without data can declare any number of arrays; the server makes one more than it accepts."""
    file = io.BytesIO()
    np.save(file, np.zeros(shape, np.int8))
    assert len(arrays_from_npy(file.getvalue(), (2, 3), Limits())) == Limits().max_images + 1


def test_an_internal_error_reveals_no_details(run_folder, capfd):
    """An internal error gets 500 with a general message; the log has the reason as JSON. Other requests succeed."""

    class Broken(Bundle):
        def predict(self, images):
            if (images[:, 0] > 199).any():
                raise RuntimeError("secret")
            return super().predict(images)

    service = Service(Broken(**vars(Bundle.open(run_folder.bundle))))
    for client in (client_of(service, "flask"), client_of(service)):
        response = client.post("/predict", data=picture("red"))
        assert (response.status_code, list(response.json)) == (500, ["ERROR"])
        assert "secret" not in response.text
        assert client.post("/predict", data=picture("blue")).json["label"] == "blue"
        assert "RuntimeError: secret" in json.loads(capfd.readouterr().err)["error"]


# The other endpoints.


def test_health_and_ready(client, service):
    """Both answer 200 with a status; /ready only while the server is ready."""
    service.ready = False
    assert (client.get("/ready").status_code, list(client.get("/ready").json)) == (503, ["ERROR"])
    assert client.get("/health").status_code == 200
    service.ready = True
    assert (client.get("/health").status_code, client.get("/health").json) == (200, {"status": "ok"})
    assert (client.get("/ready").status_code, client.get("/ready").json) == (200, {"status": "ready"})


def test_info_tells_the_model(client, run_folder):
    """/info describes task, labels, input, precision, run and limits."""
    assert client.get("/info").json == {
        "task": "image_classification",
        "labels": ["red", "green", "blue"],
        "input": ImageSpec(8, 8).to_dict(),
        "precision": "fp32",
        "run": {"id": "abc", "folder_name": "a run", "created": "now", "versions": {}},
        "limits": {
            "max_upload_mb": 1,
            "max_pixels": 1_000_000,
            "max_side": 5_000,
            "max_images": 4,
            "max_batch": 16,
            "max_queue": 256,
            "max_wait": 600,
            "max_text": 100_000,
        },
        "samples": 0,
    }


@pytest.mark.parametrize(
    ("admission", "offered"),
    [
        (Admission(), 0),
        (Admission("key"), 4),
        (Admission(None, Hosts("127.0.0.1")), 4),
        (Admission(None, Hosts("127.0.0.1", ["predict.example.org"])), 0),
        (Admission(None, Hosts("10.0.0.1")), 0),
    ],
    ids=["anybody", "key", "this machine", "a proxy on this machine", "a network"],
)
def test_samples_need_a_local_client_or_the_key(run_folder, admission, offered):
    """Golden samples are data of the run: only local clients and those with the key get them. /predict accepts each."""
    client = client_of(Service(Bundle.open(run_folder.bundle), admission=admission), "flask")
    samples = client.get("/samples").json["samples"]
    assert (len(samples), client.get("/info").json["samples"]) == (offered, offered)
    if samples:
        assert len(client.post("/predict", json={"images": samples}).json["predictions"]) == offered


def test_an_answer_shows_what_the_network_gets(client):
    """show=input adds the prepared picture to each prediction and changes nothing else; any other value is refused."""
    wide = picture("blue", size=(40, 20))
    plain, shown = (client.post(f"/predict{query}", data=wide).json for query in ("", "?show=input"))
    png = Image.open(io.BytesIO(base64.b64decode(shown.pop("input"))))
    assert shown == plain
    assert (png.size, png.mode, png.getpixel((0, 0))) == ((8, 8), "RGB", COLOURS["blue"])
    several = client.post("/predict?top_k=1&show=input", **form(wide, picture("red"))).json["predictions"]
    keys = {"input", "label", "predicted_class", "predicted_probability", "predictions"}
    assert [set(one) for one in several] == [keys, keys]
    refused = client.post("/predict?show=output", data=wide)
    assert (refused.status_code, "show must be input" in refused.json["ERROR"]) == (400, True)


def test_answers_may_not_be_guessed_at_or_framed(client):
    """No answer may be sniffed, framed or requested from another origin."""
    for response in (client.get("/health"), client.get("/nothing"), client.get("/"), client.post("/predict")):
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in response.headers


# Reconstruction.


@pytest.fixture(scope="module")
def negatives(tmp_path_factory):
    return Service(Bundle.open(negative_run(tmp_path_factory.mktemp("negatives")).bundle))


@pytest.mark.parametrize("path", ["flask", "fast"])
def test_a_reconstruction_answers_with_pictures(negatives, path):
    """The client gets a PNG if it accepts one, else base64 in JSON; several pictures in order."""
    client = client_of(negatives, path)
    response = client.post("/predict", data=picture("red"), headers={"Accept": "image/png"})
    assert (response.status_code, response.mimetype) == (200, "image/png")
    assert np.asarray(Image.open(io.BytesIO(response.data)))[0, 0].tolist() == [255 - part for part in COLOURS["red"]]
    alone = client.post("/predict", data=picture("red")).json
    assert alone == {"image": encoded(response.data)}
    several = client.post("/predict", **form(picture("blue"), picture("red")), headers={"Accept": "image/png"}).json
    assert [list(one) for one in several["predictions"]] == [["image"], ["image"]]
    assert several["predictions"][1] == alone


# The API key, request ids and metrics.


WRONG = [{}, {"X-API-Key": "wrong"}, {"X-API-Key": ""}, {"Authorization": "Bearer s3cre"}]
WRONG += [{"Authorization": "Basic s3cret"}]


@pytest.mark.parametrize("path", ["/predict", "/info", "/samples", "/metrics", "/openapi.json"])
def test_without_the_key_there_is_no_answer(run_folder, path):
    """Without the key in one of two headers the answer is 401 and explains how to send it. The page, which has a field
    for the key, and the probes of load balancers need no key."""
    guarded = client_of(Service(Bundle.open(run_folder.bundle), admission=Admission("s3cret")))
    options = {"path": path, "method": "POST" if path == "/predict" else "GET", "data": picture("blue")}
    for headers in WRONG:
        response = guarded.open(**options, headers=headers)
        assert (response.status_code, list(response.json)) == (401, ["ERROR"])
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert "Authorization: Bearer KEY" in response.json["ERROR"]
    for headers in ({"X-API-Key": "s3cret"}, {"Authorization": "bearer  s3cret"}):
        assert guarded.open(**options, headers=headers).status_code == 200
    assert [guarded.get(free).status_code for free in ("/", "/health", "/ready")] == [200] * 3


def test_requests_are_counted_and_logged(run_folder, tmp_path):
    """Requests are counted by status, and the time of predictions by its parts. The log has one line of JSON per
    request, whatever its path contains, with the client's id if that is safe to log."""
    service = Service(Bundle.open(run_folder.bundle))
    file = tmp_path / "log"
    dispatcher = Dispatcher(service, log=Log(os.open(file, os.O_WRONLY | os.O_CREAT)))
    client = Client(through(dispatcher))
    client.post("/predict", **form(picture(), picture()), headers={"X-Request-ID": "two"})
    client.post("/predict", data=b"hello", headers={"X-Request-ID": "text"})
    client.get('/"ä', headers={"X-Request-ID": "lost"})
    metrics = client.get("/metrics")
    unsafe = ('"', "a b", "x" * 65)
    ours = {client.get("/health", headers={"X-Request-ID": name}).headers["X-Request-ID"] for name in unsafe}
    assert (len(ours), ours.isdisjoint(unsafe)) == (3, True)
    dispatcher.flush()
    assert metrics.mimetype == "text/plain"
    families = {family.name: family for family in text_string_to_metric_families(metrics.text)}
    samples = [sample for family in families.values() for sample in family.samples]
    requests = [sample for sample in samples if sample.name == "deeplightning_requests_total" and sample.value]
    assert {one.labels["status"]: one.value for one in requests} == {"200": 1, "404": 1, "415": 1}
    numbers = {sample.name: sample.value for sample in samples if not sample.labels}
    for name in ("queue_seconds", "decode_seconds", "forward_seconds", "http_seconds", "batch_size"):
        assert numbers[f"deeplightning_{name}_count"] == 1
        assert numbers[f"deeplightning_{name}_sum"] > 0
    assert numbers["deeplightning_queue_length"] == 0
    duration = families["deeplightning_http_request_duration_seconds"]
    cells = {tuple(one.labels.values()): one.value for one in duration.samples if one.name.endswith("_count")}
    assert cells == {("/predict", "200"): 1, ("/predict", "415"): 1, ("other", "404"): 1}
    (info,) = families["deeplightning_model_info"].samples
    assert (info.labels, info.value) == ({"run": "abc", "task": "image_classification", "precision": "fp32"}, 1)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["id"], line["method"], line["path"], line["status"]) for line in lines[:3]] == [
        ("two", "POST", "/predict", 200),
        ("text", "POST", "/predict", 415),
        ("lost", "GET", '/"ä', 404),
    ]
    assert (lines[0]["images"], lines[0]["client"]) == (2, "127.0.0.1")
    assert {"queue_ms", "decode_ms", "forward_ms", "batch", "ms", "time"} <= set(lines[0])


@pytest.mark.parametrize(
    "written",
    [
        '--{b}\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n',
        '--{b}\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n',
        '--{b}\r\ncontent-disposition: form-data; name="image"; filename="a"\r\ncontent-type: image/png\r\n\r\n',
        '--{b}\r\nContent-Type: image/png\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n',
        '\r\n--{b}\r\nContent-Disposition: form-data; filename="a.png"; name=image\r\n\r\n',
        'preamble\r\n--{b}\r\nX-Own: 1\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n',
        '--{b}\r\nContent-Disposition: form-data; name="other"\r\n\r\ntext\r\n'
        '--{b}\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n',
    ],
    ids=["usual", "no type", "lower case", "type first", "unquoted", "preamble", "other field"],
)
@pytest.mark.parametrize(
    "kind", ["multipart/form-data; boundary=x", 'MULTIPART/FORM-DATA; charset=utf-8; Boundary="a b"']
)
def test_forms_are_read_as_clients_write_them(client, written, kind):
    """Both parsers accept the forms of common clients, and ignore the case of the content type (RFC 9110, 8.3.1)."""
    name = kind.partition("oundary=")[2].strip('"')
    body = written.format(b=name).encode() + picture("green") + f"\r\n--{name}--\r\n".encode()
    response = client.post("/predict", data=body, content_type=kind)
    assert (response.status_code, response.json.get("label")) == (200, "green")


def test_an_event_is_one_write(monkeypatch):
    """An event is one write: a separate newline could follow the line of another process on standard error."""
    written = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    log_event("full", number=3)
    (line,) = written
    assert (line[-1], json.loads(line)["event"]) == ("\n", "full")


def test_a_key_may_end_its_line(monkeypatch):
    """A secret that was written with `echo` ends with a newline."""
    monkeypatch.setenv("KEY", "s3cret\n")
    assert server_start._api_key("KEY") == "s3cret"


def test_files_that_cannot_be_read_for_a_moment_end_no_server():
    """The supervisor keeps the model that answers while the files of a new one cannot be read."""

    def files():
        raise PermissionError(13, "Permission denied")

    assert server_start._files_signature(files) is None


def test_a_worker_takes_as_many_files_as_macos_allows(monkeypatch):
    """There the hard limit is unlimited, and an unlimited soft limit is refused."""
    taken = []

    def setrlimit(kind, both):
        if both[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        taken.append(both)

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert worker._max_connections() == 10_240 - worker.SPARE_DESCRIPTORS
    assert taken == [(10_240, resource.RLIM_INFINITY)]


@pytest.mark.parametrize(("platform", "sockets"), [("darwin", 1), ("linux", 3)])
def test_outside_linux_all_workers_share_a_socket(platform, sockets, monkeypatch):
    """Only Linux distributes connections over several sockets of one address."""
    found = []

    class Kept:
        def __init__(self, setup, *_):
            found.extend(setup.listeners)

        def run(self):
            return 0

    monkeypatch.setattr(server_start, "Supervisor", Kept)
    monkeypatch.setattr(server_start, "usable_cores", lambda: 3)
    monkeypatch.setattr(server_start, "sys", SimpleNamespace(platform=platform, stderr=sys.stderr))
    options = server_start.options_parser().parse_args(["--port", "0", "--device", "cpu"])
    assert server_start.serve(None, options, list, Path()) == 0
    assert (len(found), len({os.fstat(each.fileno()).st_ino for each in found})) == (3, sockets)
    for each in found:
        each.close()


@pytest.mark.parametrize("path", ["flask", "fast"])
@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/json, image/png;q=0.9", "application/json"),
        ("application/json, image/png;q=0", "application/json"),
        ("image/png;q=0", "application/json"),
        ("application/json;q=0.5, Image/PNG", "image/png"),
        ("image/png, */*", "image/png"),
        ("image/*, application/json;q=0.5", "image/png"),
        ("text/html,image/webp,*/*;q=0.8", "application/json"),
    ],
)
def test_the_weights_of_accept_count(negatives, path, accept, kind):
    """A client that prefers JSON gets JSON although it names image/png (RFC 9110, section 12.4.2)."""
    answer = client_of(negatives, path).post("/predict", data=picture("red"), headers={"Accept": accept})
    assert answer.mimetype == kind


def test_an_event_waits_for_no_reader():
    """If nobody reads standard error, an event is lost, and nobody waits."""
    program = (
        "import contextlib, os\nfrom serve.log import log_event\n"
        "os.dup2(os.pipe()[1], 2)\nos.set_blocking(2, False)\n"
        "with contextlib.suppress(BlockingIOError):\n    while True:\n        os.write(2, b'x' * 4096)\n"
        "os.set_blocking(2, True)\nlog_event('lost')\nprint('done')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "done\n"
