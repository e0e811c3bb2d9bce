"""The OpenAPI document says what the server does: no address, status or key too many or too few."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from exported import exported
from jsonschema import Draft202012Validator
from served import Server, colour_run, encoded, labelled_run, masked_run, negative_run, picture

from serve.admission import Admission
from serve.app import application
from serve.bundle import Bundle
from serve.prediction import Service

CONFIG = """\
[checks.positive_data_acceptance]
enabled = false                      # bytes that are drawn are no picture, whatever the schema says of them
[checks.negative_data_rejection]
expected-statuses = [400, 401, 404, 405, 411, 413, 415]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {
        "image_classification": colour_run(tmp_path_factory.mktemp("colours")).path,
        "image_reconstruction": negative_run(tmp_path_factory.mktemp("negatives")).path,
        "image_multilabel": labelled_run(tmp_path_factory.mktemp("labels")).path,
        "image_segmentation": masked_run(tmp_path_factory.mktemp("masks")).path,
        "text_classification": exported(tmp_path_factory.mktemp("texts"), "text_classification")[1].path,
        "table_classification": exported(tmp_path_factory.mktemp("rows"), "table_classification")[1].path,
    }


IMAGES = ["image_classification", "image_reconstruction", "image_multilabel", "image_segmentation"]


@pytest.mark.parametrize("secured", [False, True], ids=["open", "secured"])
@pytest.mark.parametrize("task", [*IMAGES, "text_classification"])
def test_it_describes_what_is_there(runs, task, secured):
    """Exactly the application's addresses and methods; every reference leads somewhere; answers are as it says."""
    app = application(Service(Bundle.open(runs[task]), admission=Admission("key" if secured else None)))
    client = app.test_client()
    document = client.get("/openapi.json").json
    there = {
        rule.rule: {method.lower() for method in rule.methods - {"HEAD", "OPTIONS"}}
        for rule in app.url_map.iter_rules()
    }
    assert {path: set(methods) for path, methods in document["paths"].items()} == there
    anywhere = [set(one["responses"]) for methods in document["paths"].values() for one in methods.values()]
    assert all({"421", "500", "501"} <= statuses for statuses in anywhere)
    schemas = document["components"]["schemas"]
    assert set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document))) == set(schemas)
    assert ("securitySchemes" in document["components"]) == secured

    def check(path, method, response):
        described = document["paths"][path][method]["responses"][str(response.status_code)]
        schema = described["content"][response.mimetype]["schema"]
        Draft202012Validator(schema | {"components": document["components"]}).validate(response.json)

    one, several, bad = {"data": picture()}, {"images": [encoded(picture()), encoded(picture("blue"))]}, b"no picture"
    if task == "text_classification":
        one, several, bad = {"json": {"texts": ["dull"]}}, {"texts": ["dull", "a fine film"]}, picture()
        operation = document["paths"]["/predict"]["post"]
        assert set(operation["requestBody"]["content"]) == {"application/json", "text/plain"}
        assert "image" not in json.dumps(operation).lower()
    check("/predict", "post", client.post("/predict", **one))
    check("/predict", "post", client.post("/predict", json=several))
    check("/predict", "post", client.post("/predict", data=bad))
    for path in ("/health", "/ready", "/info"):
        check(path, "get", client.get(path))


@pytest.mark.parametrize(
    ("task", "kind", "bodies"),
    [
        ("image_classification", "application/json", [({"image": encoded(picture())}, 200), ({"image": ""}, 400)]),
        (
            "image_classification",
            "application/json",
            [({"images": [encoded(picture())]}, 200), ({"images": [""]}, 400)],
        ),
        ("table_classification", "text/csv", [("age,city\r\n30,Bern\r\n", 200), ("age,city\n\n\n30,Bern", 200)]),
        ("table_classification", "text/csv", [("age,city\r30,Bern", 200), ("age,city", 400)]),
        ("table_classification", "text/csv", [("age,city\r\n\r\n", 400), ("\nage,city\n30,Bern", 200), ("", 400)]),
    ],
)
def test_what_is_refused_as_empty_is_not_described(runs, task, kind, bodies):
    """The schemas of a picture in base64 and of a table admit what is answered, and not what has no content."""
    client = application(Service(Bundle.open(runs[task]))).test_client()
    content = client.get("/openapi.json").json["paths"]["/predict"]["post"]["requestBody"]["content"]
    for body, status in bodies:
        data = body if isinstance(body, str) else json.dumps(body)
        assert client.post("/predict", data=data, content_type=kind).status_code == status, body
        assert Draft202012Validator(content[kind]["schema"]).is_valid(body) == (status == 200), body


def fuzzed(run, folder, examples, key=None):
    """What schemathesis finds when it draws requests from the document, sound ones and others."""
    (folder / "schemathesis.toml").write_text(CONFIG)
    headers = {"X-API-Key": key} if key else {}
    options = (["--api-key-env", "OWN_KEY"], {"OWN_KEY": key}) if key else ([], {})
    server = Server(run, folder / "errors", *options[0], **options[1])
    schema = folder / "openapi.json"
    schema.write_text(json.dumps(server.ask("GET", "/openapi.json", headers=headers)[1]))
    command = [Path(sys.executable).parent / "st", "run", schema, "--url", server.url]
    bounds = ["--phases", "examples,coverage,fuzzing", "--max-examples", str(examples), "--generation-deterministic"]
    if key:  # it may be sent in two ways, and one that is right is enough
        command += ["--header", f"X-API-Key:{key}", "--exclude-checks", "ignored_auth"]
    try:
        done = subprocess.run([*command, *bounds], cwd=folder, capture_output=True, text=True, timeout=600)
        assert server.ask("POST", "/predict", picture(), headers)[0] == 200
        # Of many refusals in a second, the log counts those without a line.
        assert [event for event in server.events() if event != "refused requests without a line"] == []
        return done.returncode, done.stdout
    finally:
        server.stop()


MANY = [*((task, 300, None) for task in IMAGES), ("image_classification", 300, "a-key")]


@pytest.mark.parametrize(
    ("task", "examples", "key"),
    [("image_classification", 10, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY)],
)
def test_drawn_requests_meet_what_it_says(runs, tmp_path, task, examples, key):
    """No 5xx, no status, header, content type or body that is not in the document; nothing ill-formed is accepted."""
    code, said = fuzzed(runs[task], tmp_path, examples, key)
    assert code == 0, said
