"""The MLflow model of each kind answers as its endpoint does, without torch and without an installed Deep Lightning."""

import base64
import io
import json
import subprocess
import sys

import numpy as np
import pytest
import yaml
from commands import environment
from exported import exported

from deeplightning.kinds import KINDS
from deeplightning.tracking.flavour import write_model
from serve.bundle import Bundle
from serve.local import answers

# Loads each model of argv, and prints the answers to its own example, and to all its golden samples, one JSON a line.
LOAD = """\
import sys

sys.path[:] = [place for place in sys.path if place]  # not this folder, where our code may lie

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "pytorch_lightning"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
import json, pathlib
import mlflow.pyfunc, pandas

for place in sys.argv[1:]:
    model = mlflow.pyfunc.load_model(place)
    samples = json.loads(pathlib.Path(place, "samples.json").read_text())
    example = model.input_example
    if example is None:
        example = mlflow.models.Model.load(place).load_input_example(place)
    print(json.dumps([model.predict(given).to_dict("records") for given in (example, pandas.DataFrame(samples))]))
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("deeplightning", "serve")]
strange = [module.__file__ for module in ours if "/model/code/" not in str(module.__file__)]
assert not strange, strange
"""


def samples_of(card):
    """The golden samples of a bundle: as a client sends them, and as rows of the model's input."""
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
    """Of each kind: its folder, the answers of the loaded model to its example and to samples, those of the bundle."""
    made = {}
    for kind in KINDS:
        _, folder = exported(tmp_path_factory.mktemp(kind), kind)
        write_model(folder)
        given, rows = samples_of(json.loads(folder.bundle_card.read_text()))
        (folder.model / "samples.json").write_text(json.dumps(rows))
        made[kind] = folder, answers(Bundle.open(folder.bundle), given, 10_000, top_k=1)
    program = [sys.executable, "-c", LOAD, *(str(folder.model) for folder, _ in made.values())]
    place = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run(program, env=environment(), capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr
    loaded = map(json.loads, done.stdout.splitlines())
    return {
        kind: (folder, *found, wanted) for (kind, (folder, wanted)), found in zip(made.items(), loaded, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_of_each_kind_answers_as_its_endpoint_does(models, kind):
    """Its own example, and all golden samples; the columns are those of its signature."""
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
