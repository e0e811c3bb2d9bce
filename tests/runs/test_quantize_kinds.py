"""int8 for texts, tables, arrays, numbers and several labels: accepted if the scores stay within limits, else refused
with the figures or the reason."""

import json

import numpy as np
import pytest
import sklearn.metrics
import torch
from exported import SHOP, SIGNAL, TEXTS, WORDS, exported
from torch import nn

from deeplightning.export import int8 as module
from deeplightning.export.int8 import quantize
from deeplightning.faults import CheckpointError
from deeplightning.kinds import KINDS
from serve.bundle import Bundle

NUMBER = 400


def inputs_of(kind):
    """Return prepared inputs of a kind, as a validation set."""
    random, takes = np.random.default_rng(3), KINDS[kind].takes
    if takes == "image":
        return random.integers(0, 256, (NUMBER, 3, 6, 5), dtype=np.uint8)
    if takes == "text":
        words = " ".join(TEXTS).split()
        texts = [" ".join(random.choice(words, random.integers(1, 15))) for _ in range(NUMBER)]
        return WORDS.stack([WORDS.prepare(text) for text in texts])
    if takes == "table":
        rows = [{"age": 20 + 60 * random.random(), "city": ("Bern", "Rome")[n % 2]} for n in range(NUMBER)]
        return SHOP.stack([SHOP.prepare(row) for row in rows])
    return SIGNAL.scaled(random.normal(size=(NUMBER, *SIGNAL.shape)))


def judged(task, kind):
    """Return inputs that are clear of a decision boundary, their truth, and torch's answers."""
    inputs, gives = inputs_of(kind), KINDS[kind].gives
    with torch.inference_mode():
        answers = task.inference_model()(torch.from_numpy(inputs)).numpy()
    if gives == "regression":
        noise = np.random.default_rng(4).normal(size=answers.shape) * answers.std(0)
        return inputs, (answers + noise).astype(np.float32), answers
    if gives == "multilabel":
        return inputs, (answers > np.median(answers, 0)).astype(np.int64), answers
    ordered = np.sort(answers, 1)
    clear = ordered[:, -1] - ordered[:, -2] > np.quantile(ordered[:, -1] - ordered[:, -2], 0.3)
    return inputs[clear], answers.argmax(1)[clear], answers[clear]


def batches(inputs, truth):
    return lambda: ((inputs[at : at + 64], truth[at : at + 64]) for at in range(0, len(inputs), 64))


QUANTIZED = [kind for kind in KINDS if KINDS[kind].gives not in ("segmentation", "reconstruction")]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_each_kind_gains_a_model_whose_figures_are_right(tmp_path, kind, monkeypatch):
    """The float32 figures equal those of scikit-learn or numpy for torch's answers. The bundle opens, which replays the
    golden samples, answers nearly as float32, and has int8 weights."""
    monkeypatch.setattr(module, "MAX_FALL_POINTS", 5.0)  # untrained networks of a few numbers are coarse
    monkeypatch.setattr(module, "MAX_RISE_PERCENT", 20.0)
    task, folder = exported(tmp_path, kind)
    inputs, truth, answers = judged(task, kind)
    figures = quantize(folder, batches(inputs, truth))
    gives, takes = KINDS[kind].gives, KINDS[kind].takes
    if gives == "classification":
        assert figures["accuracy_fp32"] == 100
    elif gives == "multilabel":
        predicted = (answers >= 0.5).astype(int)
        f1 = sklearn.metrics.f1_score(truth, predicted, average="macro", zero_division=0)
        assert figures["f1_fp32"] == pytest.approx(100 * f1, abs=0.5)
        precision = sklearn.metrics.average_precision_score(truth, answers, average="macro")
        assert figures["map_fp32"] == pytest.approx(100 * precision, abs=0.5)
    else:
        errors = np.sqrt(((answers - truth) ** 2).mean(0))
        assert min(abs(errors - figures["error_fp32"])) < 1e-4 * max(errors)
    assert figures[{"image": "images", "text": "texts", "table": "rows", "array": "arrays"}[takes]] == len(inputs)
    card = json.loads(folder.bundle_card.read_text())
    assert card["int8"] == figures
    ours, theirs = Bundle.open(folder.path), Bundle.open(folder.path, "int8")
    expected, given = ours.predict(inputs), theirs.predict(inputs)
    assert not np.array_equal(expected, given)
    assert np.abs(expected - given).max() < 0.05 * max(1, np.abs(expected).max())


def test_masks_and_pictures_are_refused_with_the_reason(tmp_path):
    _, folder = exported(tmp_path, "image_segmentation")
    before = folder.bundle_card.read_bytes()
    with pytest.raises(CheckpointError, match="is for image_segmentation; the accuracy of int8 is judged by classes"):
        quantize(folder, list)
    assert folder.bundle_card.read_bytes() == before


class Fine(nn.Module):
    """Numbers that int8 rounds away, since a large one shares their range."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 3)
        self.first.weight.data, self.first.bias.data = torch.eye(3, 2), torch.tensor([0.0, 0.0, 1000.0])
        self.last.weight.data, self.last.bias.data = torch.eye(3), torch.zeros(3)

    def forward(self, rows):
        return self.last(torch.relu(self.first(rows)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("table_regression", r"root mean square error of \w+ on 400 validation rows would be .* and the limit"),
        ("table_multilabel", r"(F1 score|precision) on 400 validation rows would be .* instead of .* the limit"),
    ],
)
def test_what_becomes_worse_is_refused(tmp_path, kind, words):
    """The message has both figures and the limit; the bundle stays as it was."""
    model = Fine() if kind == "table_regression" else nn.Sequential(Fine(), nn.Sigmoid())
    task, folder = exported(tmp_path, kind, model)
    inputs, _, answers = judged(task, kind)
    truth = answers + 0.01 if kind == "table_regression" else (answers > np.quantile(answers, 0.7, 0)).astype(int)
    before = folder.bundle_card.read_bytes()
    with pytest.raises(CheckpointError, match=words) as caught:
        quantize(folder, batches(inputs, truth))
    assert str(caught.value).endswith("serve it with serve.precision=fp32.")
    assert folder.bundle_card.read_bytes() == before
