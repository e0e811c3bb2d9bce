"""Classifiers of images, texts, rows and arrays are quantized to int8; kinds without classes are refused."""

import json

import numpy as np
import pytest
import torch
from exported import SHOP, SIGNAL, TEXTS, WORDS, exported

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
    """Return inputs that are not close to a decision boundary, and their classes."""
    inputs = inputs_of(kind)
    with torch.inference_mode():
        answers = task.inference_model()(torch.from_numpy(inputs)).numpy()
    ordered = np.sort(answers, 1)
    clear = ordered[:, -1] - ordered[:, -2] > np.quantile(ordered[:, -1] - ordered[:, -2], 0.3)
    return inputs[clear], answers.argmax(1)[clear]


def batches(inputs, truth):
    return lambda: ((inputs[at : at + 64], truth[at : at + 64]) for at in range(0, len(inputs), 64))


QUANTIZED = [kind for kind in KINDS if KINDS[kind].gives == "classification"]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_each_kind_gains_a_model_whose_figures_are_right(tmp_path, kind, monkeypatch):
    """The float32 figures are those of torch's answers. The bundle opens, which replays the golden samples, answers
    nearly as float32, and has int8 weights."""
    monkeypatch.setattr(module, "MAX_FALL_POINTS", 5.0)  # untrained networks of a few numbers are coarse
    task, folder = exported(tmp_path, kind)
    inputs, truth = judged(task, kind)
    figures = quantize(folder, batches(inputs, truth))
    plurals = {"image": "images", "text": "texts", "table": "rows", "array": "arrays"}
    assert (figures["accuracy_fp32"], figures[plurals[KINDS[kind].takes]]) == (100, len(inputs))
    assert json.loads(folder.bundle_card.read_text())["int8"] == figures
    expected, given = (Bundle.open(folder.path, precision).predict(inputs) for precision in ("fp32", "int8"))
    assert not np.array_equal(expected, given)
    assert np.abs(expected - given).max() < 0.05 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("kind", ["image_segmentation", "image_multilabel", "table_regression"])
def test_a_kind_without_classes_is_refused(tmp_path, kind):
    """The error says that int8 is judged by the accuracy of classes; the bundle stays unchanged."""
    _, folder = exported(tmp_path, kind)
    before = folder.bundle_card.read_bytes()
    with pytest.raises(CheckpointError, match=f"is for {kind}, and int8 is judged by the accuracy of classes"):
        quantize(folder, list)
    assert folder.bundle_card.read_bytes() == before
