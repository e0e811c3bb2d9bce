"""A run logged as an MLflow model: it is loaded, served and registered without torch, and answers as the run does."""

import base64
import csv
import json
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from commands import environment
from served import negative_run, picture

from deeplightning.cli.deploy import command as command_of
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.flavour import SOURCES, write_model
from serve.bundle import Bundle

ROOT = Path(__file__).parents[2]
DIGITS = sorted((ROOT / "examples" / "digits").glob("*.png"))

# Loads the model in argv[1], and prints its answers to the pictures behind it as JSON: as base64, then as bytes.
LOAD = """\
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "pytorch_lightning"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
import base64, json, pathlib
import mlflow.pyfunc, pandas

model = mlflow.pyfunc.load_model(sys.argv[1])
images = [pathlib.Path(path).read_bytes() for path in sys.argv[2:]]
texts = [base64.b64encode(image).decode() for image in images]
print(json.dumps([model.predict(pandas.DataFrame({"image": i})).to_dict("records") for i in (texts, images)]))
import deeplightning.image_spec, deeplightning.cli
print(deeplightning.image_spec.__file__)
"""


@pytest.fixture(scope="module")
def run(train):
    """A run that is logged as a model too."""
    return RunFolder(train("train.export=true", "logger.log_model=true").folder)


def loaded(model, *images, **variables):
    """What a process without torch gets from a model, and where that found our code."""
    program = [sys.executable, "-c", LOAD, model, *images]
    done = subprocess.run(program, env=environment(**variables), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers, place = done.stdout.splitlines()
    by_text, by_bytes = json.loads(answers)
    assert by_text == by_bytes
    return by_text, place


def test_a_logged_model_answers_as_the_run_does(run, command, place):
    """Without torch, from base64 and from bytes: class, label and probability of `deeplightning predict`, to 1e-5. Its
    code is its own; the rest of an installed Deep Lightning is found all the same."""
    predicted = command("predict", run.path, *DIGITS, cwd=place)
    answers, found = loaded(run.model, *DIGITS)
    for row, answer in zip(csv.DictReader(predicted.out.splitlines()), answers, strict=True):
        assert list(answer) == ["class", "label", "probability"]
        assert (str(answer["class"]), answer["label"]) == (row["predicted_class"], row["predicted_label"])
        assert answer["probability"] == pytest.approx(float(row["predicted_probability"]), abs=1e-5)
    assert found == str(run.model / "code" / "deeplightning" / "image_spec.py")


def test_a_logged_model_says_what_it_takes(run):
    """A signature, an example, requirements with our floors; no pickle, and of our code only what reads a bundle."""
    card = yaml.safe_load((run.model / "MLmodel").read_text())
    assert json.loads(card["signature"]["inputs"]) == [{"type": "any", "name": "image", "required": True}]
    outputs = [(column["name"], column["type"]) for column in json.loads(card["signature"]["outputs"])]
    assert outputs == [("class", "long"), ("label", "string"), ("probability", "double")]
    (example,) = json.loads((run.model / "input_example.json").read_text())["data"]
    assert example == json.loads(run.bundle_card.read_text())["golden"]["pictures"][:1]
    needed = (run.model / "requirements.txt").read_text().split()
    assert [re.split("[<>=]", line)[0] for line in needed] == ["mlflow", "numpy", "onnxruntime", "pillow"]
    assert set(needed) <= set(requires("deeplightning") or [])
    files = {str(path.relative_to(run.model)) for path in run.model.rglob("*") if path.is_file()}
    assert not [name for name in files if name.endswith((".pkl", ".pickle", ".pyc"))]
    ours = {name.removeprefix("code/") for name in files if name.startswith("code/")}
    assert ours == {*SOURCES, "serve/__init__.py", "deeplightning/__init__.py"}
    for path in run.bundle.iterdir():
        assert (run.model / "artifacts" / "bundle" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_a_logged_model_can_be_registered(run, tracked, store, monkeypatch):
    """`runs:/ID/model` becomes `models:/NAME/1`, which MLflow loads and `deploy.sh` serves, as either."""
    tracker = tracked(run.path)
    tracker.client.create_registered_model("flavour")
    version = tracker.client.create_model_version("flavour", f"runs:/{tracker.id}/model", tracker.id)
    assert version.version == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(store))
    assert command_of("models:/flavour/1")[4] == str(run.bundle)
    assert command_of(f"runs:/{tracker.id}/model")[4] == str(run.model / "artifacts" / "bundle")
    uri = f"sqlite:///{store / 'mlflow.db'}"
    answers, _ = loaded("models:/flavour/1", DIGITS[3], MLFLOW_TRACKING_URI=uri, MLFLOW_REGISTRY_URI=uri)
    assert answers == loaded(run.model, DIGITS[3])[0]


def test_a_model_is_logged_only_on_request(train):
    """Without `logger.log_model` there is none."""
    assert not RunFolder(train("train.export=true").folder).model.exists()


def test_a_model_that_answers_with_pictures_is_logged(tmp_path):
    """Reconstruction: a PNG as base64, whose pixels are those of the bundle; a second time takes the first's place."""
    folder = negative_run(tmp_path / "run")
    write_model(folder)
    (folder.model / "left over").touch()
    write_model(folder)
    assert not (folder.model / "left over").exists()
    (tmp_path / "red.png").write_bytes(picture("red"))
    (answer,), _ = loaded(folder.model, tmp_path / "red.png")
    bundle = Bundle.open(folder.bundle)
    given = bundle.prepare(picture("red"), 64)
    shown = bundle.prepare(base64.b64decode(answer["image"]), 64)
    assert (shown == 255 - given).all()
