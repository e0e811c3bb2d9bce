"""Each kind of answer is defined in one place, for the server, the table of `predict` and MLflow's models."""

import json

import numpy as np
import pytest
from exported import RUN, task_of
from jsonschema import Draft202012Validator

from deeplightning import kinds
from deeplightning.export.bundle import export
from deeplightning.kinds import KINDS
from deeplightning.runfolder import RunFolder
from serve import outputs
from serve.app import application
from serve.bundle import Bundle
from serve.outputs import OUTPUTS, Regression
from serve.prediction import Service
from serve.schemas import list_of

LABELS = ["left", "right", 'a "third"']
DETAILS = {"half_widths": [0.5, 1.0, 2.0], "thresholds": [0.5, 0.25, 0.75]}


def test_each_kind_of_the_graph_has_its_answer():
    """The rows of both tables are the same."""
    assert list(OUTPUTS) == list(kinds.OUTPUTS)


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_answer_is_what_its_kind_describes(name):
    """The JSON of an answer fits its schema and MLflow's columns; its row in a table has numbers and texts."""
    row = np.random.default_rng(0).random((3, 4, 5) if OUTPUTS[name].picture else 3, np.float32)
    kind, body = OUTPUTS[name].encoder(LABELS, DETAILS)([row], 5, "")
    assert kind == "application/json"
    answer = json.loads(body)
    label = {"components": {"schemas": {"Label": {"enum": LABELS}}}}
    Draft202012Validator(OUTPUTS[name].schema(LABELS) | label).validate(answer)
    assert list(OUTPUTS[name].record(answer)) == [column for column, _ in OUTPUTS[name].columns]
    assert all(isinstance(value, str | int | float) for value in OUTPUTS[name].row(answer).values())
    assert not OUTPUTS[name].picture or isinstance(answer[OUTPUTS[name].picture], str)


class Points(Regression):
    """Points along a line, as a list of numbers."""

    columns = (("points", None),)

    def encoder(self, labels, details):
        return lambda rows, top_k, accept: ("application/json", json.dumps({"points": rows[0].tolist()}).encode())

    def schema(self, labels):
        return {"type": "object", "properties": {"points": list_of({"type": "number"}, len(labels), len(labels))}}

    def row(self, answer):
        return {f"point_{number}": value for number, value in enumerate(answer["points"])}


def test_a_new_kind_of_answer_is_a_row_in_both_tables(tmp_path, monkeypatch):
    """A new kind is exported, served, described and written as a table with nothing else than its two rows."""
    monkeypatch.setitem(kinds.OUTPUTS, "points", ("numbers", "targets"))
    monkeypatch.setitem(KINDS, "array_points", kinds.Kind("array", "points"))
    monkeypatch.setitem(outputs.OUTPUTS, "points", Points())
    task, samples = task_of("array_regression")
    task.kind = "array_points"
    bundle = Bundle.open(export(task, RunFolder(tmp_path), samples, RUN))
    client = application(Service(bundle)).test_client()
    answer = client.post("/predict", json={"array": samples[0].tolist()}).json
    assert len(answer["points"]) == 3
    document = client.get("/openapi.json").json
    Draft202012Validator(document["components"]["schemas"]["Prediction"]).validate(answer)
    assert "arrays go in, numbers come out: low, middle, high" in document["info"]["description"].lower()
