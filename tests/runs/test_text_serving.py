"""A text run is exported to a bundle whose answers equal the network's, and the bundle is served."""

import base64
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from commands import python
from exported import LABELS, RUN, TEXTS, task_of
from exported import WORDS as SPEC
from served import ROOT, logged_answers, picture
from test_serve import silent, through
from werkzeug.test import Client

import deeplightning as dl
from deeplightning.export.bundle import card_text, digest_of, export
from deeplightning.faults import CheckpointError
from deeplightning.model.transformer import TextTransformer
from deeplightning.runfolder import RunFolder
from deeplightning.task.networks import Probabilities
from serve.answers import answers
from serve.app import application
from serve.bundle import Bundle, BundleError
from serve.dispatch import Dispatcher
from serve.limits import Limits
from serve.prediction import Service


def run_of(path, model=None, labels=LABELS, texts=TEXTS):
    """Export a text network, the one of `exported` by default; return the run."""
    task, _ = task_of("text_classification", model)
    task.class_names = labels
    path.mkdir(exist_ok=True)
    export(task, RunFolder(path), np.array(texts), RUN)
    return RunFolder(path)


NETWORK = task_of("text_classification")[0].inference_model()


@torch.no_grad()
def expected(text):
    """Compute the probabilities of a single text, float32 (K,), with torch."""
    return NETWORK(torch.tensor(SPEC.encode([text])))[0].numpy()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def service(run):
    return Service(Bundle.open(run.bundle), Limits(max_images=4, max_upload_mb=1, max_text=200))


@pytest.fixture(scope="module", params=["flask", "fast"])
def client(service, request):
    """Werkzeug's test client for the Flask application, or for the dispatcher in front of it."""
    app = application(service)
    return app.test_client() if request.param == "flask" else Client(through(Dispatcher(service, log=silent())))


# ---- the bundle


def test_a_bundle_holds_all_that_a_text_needs(run):
    """The card has the tokenizer's settings, the vocabulary file with its digest, and golden texts with answers."""
    card = json.loads(run.bundle_card.read_text())
    assert (card["task"], card["labels"], card["golden"]["texts"]) == ("text_classification", LABELS, TEXTS)
    words = {"tokenizer": "words", "file": "vocabulary.txt", "size": SPEC.size, "lower": True}
    assert card["input"] == {**words, "max_length": None, "limit": 24, "column": "review"}
    assert (run.bundle / "vocabulary.txt").read_text() == SPEC.content
    assert card["files"]["vocabulary.txt"] == digest_of(run.bundle / "vocabulary.txt")
    answers = np.frombuffer(base64.b64decode(card["golden"]["fp32"]), "<f4").reshape(4, 3)
    assert answers == pytest.approx(np.stack([expected(text) for text in TEXTS]), abs=1e-5)


def test_any_number_of_texts_of_any_length_is_taken(run):
    """Batches of one to seven texts, from one token to the network's maximum, are answered; padding has no effect."""
    bundle = Bundle.open(run.path)
    for number, length in ((1, 1), (1, 24), (7, 3), (2, 24)):
        tokens = torch.randint(1, SPEC.size, (number, length), generator=torch.Generator().manual_seed(length))
        padded = torch.nn.functional.pad(tokens, (0, 24 - length))
        with torch.no_grad():
            expected = NETWORK(tokens).numpy()
        for given in (tokens, padded):
            assert bundle.predict(given.numpy()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pooling", [pytest.param("mean", marks=pytest.mark.slow), "end"])
def test_one_text_of_one_word_is_enough_to_prove_an_export(tmp_path, pooling):
    """No dimension becomes a constant in the exported graph, however small the samples are."""
    network = TextTransformer(3, SPEC.size, width=8, num_layers=2, num_heads=2, max_length=24, pooling=pooling)
    folder = run_of(tmp_path, Probabilities(network), texts=["dull"])
    assert Bundle.open(folder.path).predict(np.array([[3, 4, 5, 2]])).shape == (1, 3)


class SeesPadding(torch.nn.Module):
    """A network that averages over padding as well."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(SPEC.size, 3)

    def forward(self, tokens):
        return self.embedding(tokens).mean(1).softmax(1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": SeesPadding()}, "a network of texts must not see the padding"),
        ({"labels": LABELS[:2]}, "gives 3 probabilities, and the data has 2 classes"),
        ({"texts": [""]}, "cannot be used to verify the export: The text is empty"),
        ({"texts": []}, "there are none"),
    ],
)
def test_what_cannot_be_proved_is_no_bundle(tmp_path, options, words):
    """An export that cannot be verified raises one sentence and writes no bundle."""
    with pytest.raises(CheckpointError, match=words):
        run_of(tmp_path / "run", **options)
    assert not RunFolder(tmp_path / "run").bundle.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder, card: (folder / "vocabulary.txt").write_text("x"), "vocabulary.txt is not the file that was"),
        (lambda folder, card: (folder / "vocabulary.txt").unlink(), "no readable vocabulary.txt"),
        (lambda folder, card: {"input": card["input"] | {"file": "model.onnx"}}, "does not say which of its files"),
        (lambda folder, card: {"input": card["input"] | {"size": 3}}, "describes its input wrongly: size is"),
        (lambda folder, card: {"golden": card["golden"] | {"texts": []}}, "has no golden samples"),
        (lambda folder, card: {"golden": card["golden"] | {"texts": TEXTS[::-1]}}, "answers golden sample"),
        (lambda folder, card: {"task": "image_classification"}, "describes its input wrongly"),
    ],
)
def test_a_damaged_bundle_is_refused_in_one_sentence(run, tmp_path, change, words):
    """A changed file or card is refused, with or without a new seal."""
    folder = shutil.copytree(run.bundle, tmp_path / "bundle")
    card = json.loads((folder / "bundle.json").read_text())
    values = change(folder, card)
    if isinstance(values, dict):
        (folder / "bundle.json").write_text(card_text({**card, **values}))
    with pytest.raises(BundleError, match=words):
        Bundle.open(folder)


def test_a_package_that_a_tokenizer_needs_is_named(run, tmp_path, monkeypatch):
    """Without the package of its tokenizer a bundle is refused with the command that installs it."""
    folder = shutil.copytree(run.bundle, tmp_path / "bundle")
    (folder / "tokenizer.json").write_text("{}")
    card = json.loads((folder / "bundle.json").read_text())
    values = {"tokenizer": "hugging_face", "file": "tokenizer.json"}
    files = card["files"] | {"tokenizer.json": digest_of(folder / "tokenizer.json")}
    (folder / "bundle.json").write_text(card_text({**card, "input": card["input"] | values, "files": files}))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(BundleError, match=r"not installed here .*: pip install tokenizers"):
        Bundle.open(folder)


# ---- the endpoint


@pytest.mark.parametrize(
    "request_of",
    [
        lambda text: {"json": {"texts": [text]}},
        lambda text: {"json": {"text": text}},
        lambda text: {"data": text.encode(), "content_type": "text/plain"},
        lambda text: {"data": text.encode(), "content_type": 'text/plain; charset="UTF-8"'},
        lambda text: {"data": text.encode()},
    ],
    ids=["JSON list", "JSON single", "plain", "UTF-8", "without a type"],
)
def test_one_text_gets_one_answer(client, request_of):
    """Each form of request gets the same keys as an image: two strings, the label, and the classes. Several texts with
    any characters are answered in order; `top_k` applies to each."""
    for text in TEXTS:
        response = client.post("/predict", **request_of(text))
        assert response.status_code == 200, response.text
        answer, probabilities = response.json, expected(text)
        best = int(probabilities.argmax())
        assert list(answer) == ["predicted_class", "predicted_probability", "label", "predictions"]
        assert (answer["predicted_class"], answer["label"]) == (str(best), LABELS[best])
        assert float(answer["predicted_probability"]) == pytest.approx(probabilities[best], abs=1e-5)
        for one in answer["predictions"]:
            assert one["probability"] == pytest.approx(probabilities[one["class"]], abs=1e-5)
    texts = ["dull", TEXTS[2], 'a "fine" film, [not] {dull}\n']
    answers = client.post("/predict?top_k=1", json={"texts": texts}).json["predictions"]
    for text, answer in zip(texts, answers, strict=True):
        assert [one["class"] for one in answer["predictions"]] == [int(expected(text).argmax())]
        assert float(answer["predicted_probability"]) == pytest.approx(expected(text).max(), abs=1e-5)


def plain(data, kind="text/plain"):
    return {"data": data, "content_type": kind}


@pytest.mark.parametrize(
    ("request_of", "status", "words"),
    [
        (plain(picture(), "image/png"), 415, 'this server takes texts. Send JSON {"texts": ["…", …]} as application'),
        (plain(picture()), 415, "The text is not UTF-8"),
        (plain(b"x", "text/plain; charset=latin-1"), 415, "one text in UTF-8 as text/plain"),
        (plain(b""), 400, "The request has no body"),
        (plain(b" \n"), 400, "The text is empty"),
        (plain(b"a" * 201), 413, "The text has 201 bytes; at most 200 are accepted"),
        (plain(b"a " * 30), 413, "The text has 31 tokens, and the network takes at most 24"),
        ({"json": {"texts": ["a"] * 5}}, 413, "The request has 5 texts; at most 4 are accepted in one"),
        ({"json": {"texts": ["a", " "]}}, 400, "Text 2 of 2: The text is empty"),
        ({"json": {"texts": []}}, 400, "texts is not a list of one or more texts"),
        ({"json": {"texts": [1]}}, 400, 'send {"texts": ["…", …]}'),
        ({"json": {"images": ["aGk="]}}, 400, 'not an object with the one key texts; send {"texts": ["…", …]}'),
        (plain(b'{"texts": ["\\ud800"]}', "application/json"), 400, "half a character"),
        (plain(b'{"texts": "', "application/json"), 400, "The body is not JSON"),
        (plain(b"[" * 100_000, "application/json"), 400, "a list of 1,000 texts at most"),
        (plain(b'{"texts": [%s"a"]}' % (b'"a", ' * 2000), "application/json"), 400, "a list of 1,000 texts at most"),
        (plain(b'"' * 1_000_001), 413, "The request is too large"),
    ],
)
def test_a_bad_request_gets_one_sentence(client, request_of, status, words):
    """An image, an empty body, too much text or another document gets one sentence with the error and what to send."""
    response = client.post("/predict", **request_of)
    assert (response.status_code, list(response.json)) == (status, ["ERROR"])
    assert words in response.json["ERROR"]


def test_a_run_of_texts_deploys_and_answers_json(command, store, serving, tmp_path):
    """Training the example writes a bundle that the server, Python and the MLflow model answer with alike. The client
    prints one line per text; the server imports neither torch nor Lightning."""
    few = ["data.module.params.limit=1000", "data.module.params.max_size=90", "model.network.params.vocabulary_size=90"]
    settings = ["train.num_epochs=1", "data.batch_size=32", "stages=[train]", "logger.pictures=null"]
    tracked = f"logger.params={{experiment_name: texts, tracking_uri: '{store}', system_metrics: false}}"
    config = ROOT / "examples" / "sst2" / "sst2.yaml"
    folder = command("train", config, *few, *settings, "logger.log_model=true", tracked, cwd=tmp_path, code=0).folder
    server = serving(folder, flags=("-X", "importtime"))
    texts = ["the film is wise .", "the plot is not wise ."]
    status, reply = server.ask("POST", "/predict", json.dumps({"texts": texts}), {"Content-Type": "application/json"})
    assert status == 200
    assert dl.load_run(folder).predict(texts) == reply["predictions"]
    assert (folder / "model" / "MLmodel").is_file()
    logged = logged_answers(RunFolder(folder), [{"text": text} for text in texts])
    for one, other in zip(reply["predictions"], logged, strict=True):
        assert one["label"] == other["label"]
        assert float(one["predicted_probability"]) == pytest.approx(other["probability"], abs=1e-6)
    labels = [one["label"] for one in reply["predictions"]]
    assert {*labels} <= {"negative", "positive"}
    info = server.ask("GET", "/info")[1]
    assert (info["task"], info["labels"]) == ("text_classification", ["negative", "positive"])
    assert info["run"]["folder_name"] == folder.name
    done = python("-m", "serve.predict", "--text", *texts, PREDICT_URL=f"{server.url}/predict")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["text"], line["label"]) for line in lines] == list(zip(texts, labels, strict=True))
    assert server.stop() == 0
    imported = {line.rpartition("|")[2].strip() for line in server.errors.read_text().splitlines()}
    assert "deeplightning.text_spec" in imported
    assert imported.isdisjoint({"torch", "pytorch_lightning", "mlflow", "tokenizers", "transformers"})


@pytest.mark.parametrize("wrong", [None, float("nan"), 5])
def test_what_is_no_text_is_named(run, wrong):
    """The error has the index of a value that is no text, such as pandas' missing value."""
    with pytest.raises(ValueError, match=r"^input 1: This is not a text"):
        answers(Bundle.open(run.path), ["a fine film", wrong], 1)


def test_a_byte_order_mark_is_no_word(client):
    """A text that Windows' editor has saved gets the answer of the same text without its mark."""
    mark = b"\xef\xbb\xbf"
    bare, marked = (client.post("/predict", **plain(start + b"a fine film", "text/plain")) for start in (b"", mark))
    assert marked.json == bare.json
    assert client.post("/predict", **plain(mark, "text/plain")).status_code == 400
