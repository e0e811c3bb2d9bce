"""`deeplightning push` publishes a run to a folder, to Hugging Face or to MLflow's registry, without pickled data,
secrets and local paths."""

import base64
import hashlib
import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import onnxruntime
import pytest
import yaml
from commands import real
from deeplightning_hub.push import SAFE_EXTENSIONS, write
from mlflow.tracking import MlflowClient
from test_escapes import FORGED, is_clean
from test_trust import BEYOND_PLAIN, BY_ALL, IMPORTED, _by_kind

import deeplightning as dl
from deeplightning.export.bundle import added_file, card_of, card_text
from deeplightning.faults import SetupError
from deeplightning.runfolder import RunFolder
from deeplightning.text_spec import FILES
from deeplightning.tracking.metrics_file import points_line
from serve.bundle import Bundle

model_card = pytest.importorskip("deeplightning_hub.model_card").model_card

TOKEN = "hf_" + "Zq8Rw2Lk7Tn4Vx9Bc1Md" * 2


@pytest.fixture(scope="module")
def run(train):
    """Folder of a run with a pickled model file, and with a secret and a local path in its config."""
    secret = "data.module={type: own.Guarded, params: {token: '${oc.env:PASSWORD}'}}"
    outcome = train(
        secret, "train.num_epochs=1", "stages=[train, test]", "train.export=true", "serve.api_key_env=KEY",
        "train.resume_ckpt=null", "data.root=/home/ada/pictures", PASSWORD="s3cr3t-Tq8Rw2Lk7",
    )  # fmt: skip
    folder = RunFolder(outcome.folder)
    with added_file(folder, card_of(folder), "model.pt2") as file:
        file.write_bytes(b"pickle")
    return outcome.folder


@pytest.fixture(scope="module")
def written(run, command, place, tmp_path_factory):
    """Folder that the run was pushed to."""
    folder = tmp_path_factory.mktemp("pushed") / "model"
    outcome = command("push", run, "hf://ada/digits", "--to", folder, cwd=place, code=0)
    assert "left out: model.pt2, which contains pickled data" in outcome.err
    assert outcome.out.strip() == str(folder)
    return folder


def test_the_folder_has_a_card_and_the_bundle(run, written):
    """The card's front matter has licence, tags and metrics that Hugging Face can parse; its text has metrics, usage,
    and sections to fill in."""
    assert {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()} == {
        ".push.json", "README.md", "bundle/bundle.json", "bundle/model.onnx", "bundle/weights.safetensors", "cfg.yaml",
    }  # fmt: skip
    _, head, text = (written / "README.md").read_text().split("---\n", 2)
    front = yaml.safe_load(head)
    assert (front["license"], front["pipeline_tag"]) == ("unknown", "image-classification")
    assert {"deeplightning", "onnx"} <= set(front["tags"])
    results = json.loads((run / "test_results.json").read_text())
    found = {each["name"]: each["value"] for each in front["model-index"][0]["results"][0]["metrics"]}
    assert found.items() >= results.items()
    assert found.keys() == {"val_acc", "val_loss", "test_acc", "test_loss"}
    for words in ("## Limits", "onnxruntime", "deeplightning serve DIR", f"`test_acc` | {results['test_acc']:.6g} |"):
        assert words in text
    from huggingface_hub import ModelCard  # it comes with transformers

    ModelCard(f"---\n{head}---\n{text}").data.to_dict()


def test_no_secret_and_no_path_leaves_the_machine(run, written, store, place):
    """No pushed file contains a secret or a local path; of `data.root` only the last part is kept."""
    texts = [path.read_bytes() for path in written.rglob("*") if path.is_file()]
    for words in ("s3cr3t", "/home/ada", str(store), str(place), str(run.parent.parent), "PK\x03\x04"):
        assert not any(words.encode() in text for text in texts), words
    cfg = yaml.safe_load((written / "cfg.yaml").read_text())
    assert (cfg["data"]["root"], cfg["data"]["module"]["params"]["token"]) == ("pictures", "***")
    assert "tracking_uri" not in cfg["logger"]["params"]


def test_what_was_pushed_answers_as_the_run_does(run, written, tmp_path, monkeypatch):
    """A copy in another folder works with the server, with `load_run`, and with the onnxruntime code of the card."""
    copy = shutil.copytree(written, tmp_path / "copy")
    pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 8)).astype(np.uint8)
    assert Bundle.open(copy).task == "image_classification"
    assert dl.load_run(copy).predict(list(pictures)) == dl.load_run(run).predict(list(pictures))
    monkeypatch.chdir(copy)
    code = (copy / "README.md").read_text().rpartition("```python\n")[2].partition("```")[0]
    names: dict = {}
    exec(code, names)
    assert isinstance(names["session"], onnxruntime.InferenceSession)
    np.testing.assert_allclose(names["answers"].sum(1), 1, atol=1e-5)


def test_a_folder_is_written_again_and_others_are_left_alone(run, written, command, place, tmp_path):
    """A push replaces an earlier one but keeps an edited card, with the new one in README.new.md; a folder with other
    files is rejected with exit code 3."""
    folder = shutil.copytree(written, tmp_path / "model")
    for _ in range(2):
        (folder / "README.md").write_text("My own words.")
        assert command("push", run, "hf://ada/digits", "--to", folder, cwd=place).code == 0
        assert (folder / "README.md").read_text() == "My own words."
        assert (folder / "README.new.md").read_text() == (written / "README.md").read_text()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    refused = command("push", run, "hf://ada/digits", "--to", tmp_path / "other", cwd=place)
    assert (refused.code, "is not empty and contains no previous push" in refused.err) == (3, True), refused
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("kind", ["other content", "link", "path"])
def test_files_that_the_card_does_not_describe_are_not_published(kind, run, command, place, tmp_path):
    """A foreign run folder cannot make `push` publish other files of this machine as parts of its bundle."""
    precious, copy = tmp_path / "precious.json", shutil.copytree(run, tmp_path / "run")
    precious.write_text("precious")
    weights = copy / "bundle" / "weights.safetensors"
    if kind == "path":
        card = json.loads((copy / "bundle" / "bundle.json").read_text())
        card["files"]["../../precious.json"] = hashlib.sha256(b"precious").hexdigest()
        (copy / "bundle" / "bundle.json").write_text(card_text(card))
    else:
        weights.unlink()
        weights.symlink_to(precious) if kind == "link" else weights.write_text("precious")
    outcome = command("push", copy, "hf://ada/digits", "--to", tmp_path / "pushed", cwd=place, code=4)
    assert "is not the file that bundle.json describes" in outcome.err
    assert not (tmp_path / "pushed").exists()


def test_a_card_holds_no_characters_that_steer_a_terminal(run, command, place, tmp_path):
    """The model card and the output of `push` are clean, whatever names and values a foreign run has."""
    folder = RunFolder(shutil.copytree(run, tmp_path / "run"))
    settings = yaml.safe_load(folder.config.read_text())
    settings["data"]["module"]["params"]["token"] = "plain"
    settings["logger"]["params"]["experiment_name"], settings["serve"]["allowed_hosts"] = FORGED, [FORGED]
    folder.config.write_text(yaml.safe_dump(settings, sort_keys=False))
    for path, more in {
        folder.environment: {"host": FORGED, "os": FORGED, "packages": {"a": FORGED, "torch": FORGED}},
        folder.results("test"): {f"test_{FORGED}": 1.0},
        folder.data: {"root": None, "folders": [], "files": {f"{FORGED}.csv": [3, "00"]}, "incomplete": None},
    }.items():
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | more))
    with folder.metrics.open("a") as file:
        file.write(json.dumps(points_line(1, 0, {f"val_{FORGED}": 1.0})) + "\n")
    card = json.loads(folder.bundle_card.read_text())
    folder.bundle_card.write_text(card_text(card | {"labels": [FORGED, *card["labels"][1:]]}))
    outcome = command("push", folder.path, "hf://me/model", "--to", tmp_path / "card", cwd=place, code=0)
    text = (tmp_path / "card" / "README.md").read_text()
    assert "TITLE" in text
    assert is_clean(text)
    assert is_clean(outcome.out + outcome.err)
    refused = command("push", folder.path, "mlflow://model", cwd=place)
    assert (refused.code, is_clean(refused.out + refused.err)) == (3, True)
    assert is_clean(command("push", FORGED, "hf://me/model", cwd=place).err)


@pytest.mark.parametrize(
    ("network", "data", "words"),
    [
        (None, None, "`own.Task`. "),
        ({"a": {"type": "own.A"}, "b": {"type": "own.B"}}, {"type": "own.Data"}, "`own.A`, `own.B` on `own.Data`. "),
    ],
)
def test_a_config_may_have_no_network_or_several(network, data, words, run, tmp_path):
    """The card names all networks and the data, or the task if the config has no network."""
    folder = RunFolder(shutil.copytree(run, tmp_path / "run"))
    settings = yaml.safe_load(folder.config.read_text())
    settings["model"] = {"module": {"type": "own.Task"}, "network": network}
    settings["data"]["module"] = data
    folder.config.write_text(yaml.safe_dump(settings, sort_keys=False))
    assert words in model_card(folder, card_of(folder), "me/model", [])


@pytest.mark.parametrize("name", BY_ALL)
def test_a_foreign_config_is_plain_or_refused(name, run, command, tmp_path):
    """A config with non-plain YAML ends with exit code 4 and the file's name; nothing is imported, started, fetched or
    written, and no environment variable is read."""
    work, file = tmp_path / "work", tmp_path / "watched.json"
    work.mkdir()
    (work / "pwned.py").write_text("open('PWNED', 'w')\n")
    copies = [tmp_path / "with", tmp_path / "without"]
    for copy, left_out in zip(copies, ((), ("bundle",)), strict=True):
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns(*left_out))
        (copy / "cfg.yaml").write_text(BEYOND_PLAIN[name]((run / "cfg.yaml").read_text()))
    words = [["push", str(copy), "hf://a/b", "--to", str(tmp_path / "to")] for copy in copies]
    variables = {"WATCHED": str(file), "WORDS": json.dumps(words), "MY_VALUE": "s3cr3t", "HOME": str(work)}
    command("", cwd=work, main="watched:each", **variables)
    with_bundle, without = json.loads(file.read_text())
    assert (with_bundle["code"], without["code"]) == (4, 4), with_bundle
    assert "not made here by you, and its config has " in with_bundle["err"]
    assert "cfg.yaml:" in with_bundle["err"]
    for one in (with_bundle, without):
        seen = _by_kind(one["seen"])
        assert "s3cr3t" not in one["err"]
        assert "MY_VALUE" not in seen["variables"]
        assert seen["starts"] == seen["connects"] == []
        assert [path for path in seen["writes"] if path != os.devnull] == []
        tops = {module.partition(".")[0] for module in seen["imports"]}
        assert tops <= {*IMPORTED, "deeplightning_hub"}
    assert [path.name for path in work.iterdir()] == ["pwned.py"]


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_card_is_not_published(text, run, command, place, tmp_path):
    """The error names the bundle and the command that exports it again."""
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "bundle" / "bundle.json").write_text(text)
    outcome = command("push", copy, "hf://ada/digits", "--to", tmp_path / "pushed", cwd=place, code=4)
    assert "bundle cannot be read" in outcome.err
    assert "deeplightning export RUN" in outcome.err
    assert not (tmp_path / "pushed").exists()


@pytest.mark.parametrize(
    ("address", "code", "words"),
    [
        ("hf://digits", 2, "is not an address to push to. Write hf://USER/NAME or mlflow://NAME"),
        ("hf://a/../b", 2, "is not an address to push to"),
        ("mlflow://a/b", 2, "is not an address to push to"),
        ("s3://ada/digits", 2, "is not an address to push to"),
        ("hf://ada/digits", 3, "HF_TOKEN is not set. Set it to a token"),
    ],
)
def test_a_wrong_address_or_a_missing_token_is_reported(address, code, words, run, command, place):
    """The error gives the next step; the exit code is 2 for an address, 3 for a token."""
    refused = command("push", run, address, cwd=place, HF_TOKEN="")
    assert (refused.code, words in refused.err) == (code, True), refused


class Hub(BaseHTTPRequestHandler):
    """Fake API of Hugging Face for small files; `server.seen` records the requests."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        if self.server.refuses:
            return self.answer({"error": f"no rights for {TOKEN}"}, 403)
        if self.path.endswith("/preupload/main"):
            files = [{"path": of["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                     for of in json.loads(body)["files"]]  # fmt: skip
            return self.answer({"files": files})
        url = f"http://127.0.0.1:{self.server.server_port}/ada/digits"
        commit = {"success": True, "commitOid": "0" * 40, "commitUrl": f"{url}/commit/{'0' * 40}"}
        return self.answer({"url": url, "name": "ada/digits", "errors": [], "warnings": [], **commit})

    def answer(self, content, code=200):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(
            {
                "id": "ada/digits",
                "_id": "1",
                "sha": "0" * 40,
                "private": True,
                "siblings": self.server.siblings,
                "tags": [],
            }
        )

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    """Local server with the fake API."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.refuses, server.siblings = [], False, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_files_are_uploaded_by_the_hubs_own_client(run, written, hub, place):
    """A new repository is private and gets one commit with the files of the folder. A rejected upload ends with exit
    code 3, and the error does not contain the token."""
    variables = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    outcome = real("push", run, "hf://ada/digits", cwd=place, **variables, code=0)
    assert outcome.out.strip().endswith("/ada/digits")
    assert {authorization for _, authorization, _ in hub.seen} == {f"Bearer {TOKEN}"}
    created = next(json.loads(body) for path, _, body in hub.seen if path == "/api/repos/create")
    assert (created["name"], created["organization"]) == ("digits", "ada")
    assert created.get("visibility") == "private" or created.get("private") is True  # huggingface_hub 1.0; older
    commit = next(body for path, _, body in hub.seen if path.endswith("/commit/main")).decode()
    sent = [line["value"] for line in map(json.loads, commit.splitlines()) if line["key"] == "file"]
    files = {of["path"]: base64.b64decode(of["content"]) for of in sent}
    names = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()} - {".push.json"}
    assert files == {name: (written / name).read_bytes() for name in names}
    hub.refuses = True
    refused = real("push", run, "hf://ada/digits", cwd=place, **variables)
    assert (refused.code, "Upload to ada/digits failed" in refused.err) == (3, True), refused
    assert TOKEN not in refused.err + refused.out


def test_the_model_is_registered_in_the_store_of_the_run(run, command, place, store, tmp_path, monkeypatch):
    """`mlflow://NAME` registers version 1, then 2, which `load_run` finds by name; the model is built from the bundle
    if the run has none."""
    assert not (run / "model").exists()
    for version in (1, 2):
        outcome = command("push", run, "mlflow://pushed digits", cwd=place)
        assert (outcome.code, outcome.out.strip()) == (0, f"models:/pushed digits/{version}"), outcome
    found = MlflowClient(f"sqlite:///{store / 'mlflow.db'}").get_model_version("pushed digits", "1")
    assert found.run_id == run.parent.name
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(store))
    assert dl.load_run("models:/pushed digits/1").folder == run
    copy = shutil.copytree(run, tmp_path / "copied run")
    refused = command("push", copy, "mlflow://digits", cwd=place)
    assert (refused.code, "no known tracking store has this run" in refused.err) == (3, True), refused


def test_a_card_that_nobody_edited_is_always_that_of_the_last_push(run, command, place, tmp_path):
    """Each push replaces an unedited card, and writes a deleted one again."""
    folder = tmp_path / "model"
    for name in ("one", "two", "three", "four"):
        assert command("push", run, f"hf://ada/{name}", "--to", folder, cwd=place).code == 0
        assert f"# {name}\n" in (folder / "README.md").read_text()
        assert not (folder / "README.new.md").exists()
        if name == "three":
            (folder / "README.md").unlink()  # deleted is not edited


def test_the_tokens_of_texts_are_published():
    """Without its vocabulary or tokenizer, a bundle of texts cannot be served."""
    assert all(name.endswith(SAFE_EXTENSIONS) for name in FILES.values())


def test_a_card_has_the_validation_metrics_of_the_best_weights(run, tmp_path):
    """They are logged at the step before that of best.json."""
    folder = RunFolder(shutil.copytree(run, tmp_path / "run"))
    points = [(44, {"val_acc": 0.75, "val_loss": 0.5}), (89, {"val_acc": 0.5, "val_loss": 2.0})]
    folder.metrics.write_text("".join(json.dumps(points_line(0, *point)) + "\n" for point in points))
    best = {"metric": "val_acc", "value": 0.75, "epoch": 0, "step": 45, "file": "best.ckpt"}
    folder.best_score.write_text(json.dumps(best))
    text = model_card(folder, card_of(folder), "me/model", [])
    assert "| `val_acc` | 0.75 |" in text
    assert "| `val_loss` | 0.5 |" in text


def test_a_push_that_failed_half_way_edits_no_card(run, tmp_path, monkeypatch):
    """The next push replaces the card."""
    folder, to = RunFolder(run), tmp_path / "model"
    write(folder, "one", to)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(SetupError):
            write(folder, "two", to)
    write(folder, "three", to)
    assert "# three\n" in (to / "README.md").read_text()
    assert not (to / "README.new.md").exists()


def test_a_card_on_the_hub_stays(run, hub, place):
    """The user may have filled in its licence there."""
    hub.siblings = [{"rfilename": "README.md"}]
    variables = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    real("push", run, "hf://ada/digits", cwd=place, **variables, code=0)
    commit = next(body for path, _, body in hub.seen if path.endswith("/commit/main")).decode()
    sent = {one["value"]["path"] for one in map(json.loads, commit.splitlines()) if one["key"] == "file"}
    assert "README.new.md" in sent
    assert "README.md" not in sent
