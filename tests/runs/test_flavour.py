"""A run logged as an MLflow model is loaded, served and registered without torch, and answers like the run and the
endpoint of its kind."""

import base64
import csv
import io
import json
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import environment
from exported import exported
from served import WITHOUT_TORCH

from deeplightning.cli.deploy import command as command_of
from deeplightning.kinds import KINDS
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.flavour import SOURCES, write_model
from serve.answers import answers as answered
from serve.bundle import Bundle

ROOT = Path(__file__).parents[2]
DIGITS = sorted((ROOT / "examples" / "digits").glob("*.png"))

# Loads the model in argv[1], and prints its answers to the pictures in the other arguments as JSON: base64, then bytes.
LOAD = f"""{WITHOUT_TORCH}
model = mlflow.pyfunc.load_model(sys.argv[1])
images = [pathlib.Path(path).read_bytes() for path in sys.argv[2:]]
texts = [base64.b64encode(image).decode() for image in images]
print(json.dumps([model.predict(pandas.DataFrame({{"image": i}})).to_dict("records") for i in (texts, images)]))
import deeplightning.image_spec, deeplightning.cli
print(deeplightning.image_spec.__file__)
"""


@pytest.fixture(scope="module")
def run(train):
    """A run that is also logged as a model."""
    return RunFolder(train("train.export=true", "logger.log_model=true").folder)


def loaded(model, *images, **variables):
    """Return a model's answers in a process without torch, and the path from which it imported our code."""
    program = [sys.executable, "-c", LOAD, model, *images]
    done = subprocess.run(program, env=environment(**variables), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers, origin = done.stdout.splitlines()
    by_text, by_bytes = json.loads(answers)
    assert by_text == by_bytes
    return by_text, origin


def test_a_logged_model_answers_as_the_run_does(run, command, place):
    """Without torch, from base64 and from bytes, a model gives class, label and probability of `deeplightning predict`
    to 1e-5. It imports the code packed with it, and the rest from an installed Deep Lightning."""
    predicted = command("predict", run.path, *DIGITS, cwd=place)
    answers, origin = loaded(run.model, *DIGITS)
    for row, answer in zip(csv.DictReader(predicted.out.splitlines()), answers, strict=True):
        assert list(answer) == ["class", "label", "probability"]
        assert (str(answer["class"]), answer["label"]) == (row["predicted_class"], row["predicted_label"])
        assert answer["probability"] == pytest.approx(float(row["predicted_probability"]), abs=1e-5)
    assert origin == str(run.model / "code" / "deeplightning" / "image_spec.py")


def test_a_logged_model_says_what_it_takes(run):
    """A model has a signature, an example, requirements with our minimum versions, no pickle, and only the code that
    reads a bundle. Logging it again replaces it."""
    (run.model / "left over").touch()
    write_model(run)
    assert not (run.model / "left over").exists()
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
    """`runs:/ID/model` is registered as `models:/NAME/1`; MLflow loads and `deploy.sh` serves both."""
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


# Loads each model in argv, and prints its answers to its input example and to all its golden samples, a JSON line each.
LOAD_EACH = f"""{WITHOUT_TORCH}
sys.path[:] = [place for place in sys.path if place]  # not this folder, which may contain our code
for place in sys.argv[1:]:
    model = mlflow.pyfunc.load_model(place)
    samples = json.loads(pathlib.Path(place, "samples.json").read_text())
    example = model.input_example
    if example is None:
        example = mlflow.models.Model.load(place).load_input_example(place)
    print(json.dumps([model.predict(given).to_dict("records") for given in (example, pandas.DataFrame(samples))]))
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("deeplightning", "serve")]
foreign = [module.__file__ for module in ours if "/model/code/" not in str(module.__file__)]
assert not foreign, foreign
"""


def samples_of(card):
    """Return the golden samples of a bundle as a client sends them, and as rows of the model's input."""
    golden = card["golden"]
    if "rows" in golden:
        return golden["rows"], golden["rows"]
    if "arrays" in golden:
        given = [np.load(io.BytesIO(base64.b64decode(one))).tolist() for one in golden["arrays"]]
        return given, [{"array": one} for one in given]
    if "texts" in golden:
        return golden["texts"], [{"text": one} for one in golden["texts"]]
    return [base64.b64decode(one) for one in golden["pictures"]], [{"image": one} for one in golden["pictures"]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By kind: the run folder, the loaded model's answers to its example and to samples, and the bundle's answers."""
    runs = {}
    for kind in KINDS:
        _, folder = exported(tmp_path_factory.mktemp(kind), kind)
        write_model(folder)
        given, rows = samples_of(json.loads(folder.bundle_card.read_text()))
        (folder.model / "samples.json").write_text(json.dumps(rows))
        runs[kind] = folder, answered(Bundle.open(folder.bundle), given, 10_000, top_k=1)
    program = [sys.executable, "-c", LOAD_EACH, *(str(folder.model) for folder, _ in runs.values())]
    place = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run(program, env=environment(), capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr
    loaded = map(json.loads, done.stdout.splitlines())
    return {
        kind: (folder, *found, wanted) for (kind, (folder, wanted)), found in zip(runs.items(), loaded, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_of_each_kind_answers_as_its_endpoint_does(models, kind):
    """The model and the endpoint answer all golden samples alike; the columns are those of the model's signature."""
    folder, example, found, wanted = models[kind]
    if KINDS[kind].gives == "classification":
        wanted = [one["predictions"][0] for one in wanted]
    assert len(found) == len(wanted) > 1
    assert example == found[:1]
    assert found == wanted
    card = yaml.safe_load((folder.model / "MLmodel").read_text())
    columns = [column["name"] for column in json.loads(card["signature"]["outputs"])]
    assert columns == [*found[0]]
    inputs = [column["name"] for column in json.loads(card["signature"]["inputs"])]
    takes = KINDS[kind].takes
    assert inputs == (["age", "city"] if takes == "table" else [takes])
    needed = (folder.model / "requirements.txt").read_text()
    assert ("tokenizers" in needed) == (takes == "text")
    assert "torch" not in needed
