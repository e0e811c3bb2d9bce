"""Figures have one style for light and dark, are reproducible, and show names as plain text."""

import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torchmetrics.functional.classification import binary_calibration_error

from deeplightning.figures import class_plots, curves, measures
from deeplightning.figures.style import GRID, INK, PAPER, drawn, label, save, style, to_svg

HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "$\\frac{1}{0}$", "a\x00\x1b[31mb"]
HOSTILE += ["日本語", "\ud800x"]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def matrix(names: list[str], per_class: int = 20, seed: int = 0):
    random = np.random.default_rng(seed)
    number = len(names)
    labels = np.repeat(np.arange(number), per_class)
    predicted = np.where(random.random(len(labels)) < 0.8, labels, (labels + 1) % number)
    return measures.confusion(labels, predicted, number)


def test_a_picture_follows_light_and_dark():
    """The colours of ink, lines and paper are CSS variables with a light and a dark value; drawing again gives the same
    SVG."""
    drawing = class_plots.confusion_matrix(matrix(list("abc")), list("abc"), "test")
    one, other = (to_svg(drawn(drawing), drawing.alt) for _ in range(2))
    assert one == other
    assert "prefers-color-scheme:dark" in one
    head, body = one.split("</style>", 1)
    assert [colour for colour in (INK, GRID, PAPER) if colour not in head] == []
    assert [colour for colour in (INK, GRID, PAPER) if colour in body] == []


def test_names_are_plain_text():
    """No name becomes markup, mathematics or a control character, and the SVG is well-formed."""
    counts = matrix(HOSTILE)
    each = measures.from_counts(np.diag(counts), counts.sum(0), counts.sum(1))
    for drawing in (
        class_plots.confusion_matrix(counts, HOSTILE, "test"),
        class_plots.precision_recall(each, HOSTILE, "test"),
        class_plots.two_classes(np.array([0.1, 0.9]), np.array([False, True]), HOSTILE[0], "test"),
        *map(curves.curve, curves.charts({HOSTILE[0]: [(0, 1.0), (1, 2.0)]})),
    ):
        svg = to_svg(drawn(drawing), drawing.alt)
        tags = {element.tag.partition("}")[2] for element in ET.fromstring(svg).iter()}
        assert {"script", "img"}.isdisjoint(tags)
        assert "\x1b" not in svg
    assert any("frac" in text for text in texts(to_svg(drawn(class_plots.confusion_matrix(counts, HOSTILE, "test")))))


@pytest.mark.parametrize(("number", "cells"), [(10, True), (20, True), (100, False)])
def test_a_confusion_matrix_says_what_it_is(number, cells):
    """The title has accuracy and number of samples, both axes have a name and the classes; with few classes each cell
    has its count."""
    names = [f"class {n}" for n in range(number)]
    counts = matrix(names)
    shown = texts(to_svg(drawn(class_plots.confusion_matrix(counts, names, "test"))))
    accuracy = np.trace(counts) / counts.sum()
    assert f"Accuracy {accuracy:.4g} on {20 * number:,} test samples" in shown
    assert {"true class", "predicted class"} <= set(shown)
    assert [name for name in names if shown.count(name) != 2] == []
    numbers = [text for text in shown if text.isdecimal() and 0 < int(text) <= 20]
    assert len(numbers) == (np.count_nonzero(counts) if cells else 0)


def test_a_matrix_of_many_classes_has_no_names():
    """From 121 classes on, a matrix has no names of classes, and its size does not grow."""
    matrices = [
        class_plots.confusion_matrix(np.eye(number, dtype=int), [str(n) for n in range(number)], "test")
        for number in (121, 1000)
    ]
    many, most = map(drawn, matrices)
    assert tuple(many.get_size_inches()) == tuple(most.get_size_inches())
    assert "120" not in texts(to_svg(many))


def test_a_share_is_at_each_count_of_few_classes():
    """A cell of a matrix of few classes also shows its share of the row, in percent."""
    shown = texts(to_svg(drawn(class_plots.confusion_matrix(np.array([[3, 1], [0, 8]]), ["a", "b"], "test"))))
    assert {"75%", "25%"} <= set(shown)


def test_mistakes_are_framed():
    """Each wrong prediction has a red frame; each sample shows its predicted class and probability."""
    image = np.zeros((8, 8), np.uint8)
    samples = [class_plots.Sample(image, *class_plots.answer("cat", "dog", 0.9), n > 1) for n in range(5)]
    svg = to_svg(drawn(class_plots.sheet(samples, "Samples", "")))
    assert svg.count("stroke: #d64545") == 2
    assert texts(svg).count("predicted dog, 90%") == 5


def test_charts_put_together_what_belongs_together():
    """A chart shows a metric of training and validation; the order is loss, metrics, rates. Metrics of the test and
    series of one point have no chart."""
    points = [(0, 1.0), (1, 0.5)]
    names = ("lr", "val_acc", "train_loss", "train_loss_epoch", "val_loss", "epoch", "test_acc", "train_acc", "own")
    series = {name: [*points, (2, 0.1)] if name == "train_loss" else points for name in names}
    series |= {"once": [(0, 1.0)], "broken": [(0, float("nan")), (1, float("inf")), (2, 1.0)]}
    found = curves.charts(series)
    assert [(chart.name, sorted(chart.curves)) for chart in found] == [
        ("loss", ["train", "val"]),
        ("acc", ["train", "val"]),
        ("lr", [""]),
        ("own", [""]),
    ]
    assert found[0].curves["train"] == points


def test_the_best_validation_is_marked():
    """The mark is at the last validation before the step of the best checkpoint; a series counts steps from 0."""
    series = {"val_acc": [(4, 0.5), (9, 0.9), (14, 0.8)]}
    figure = drawn(curves.curve(curves.charts(series)[0], 10))
    marks = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_label() == "best"]
    assert marks == [9]


def test_pictures_leave_matplotlib_as_it_was(tmp_path):
    """Drawing does not change Matplotlib's settings of the process, even if it fails."""
    before = dict(matplotlib.rcParams)
    (chart,) = curves.charts({"lr": [(0, 1.0), (1, 2.0)]})
    save(curves.curve(chart), tmp_path / "a b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b.png", "a b.svg"]
    with pytest.raises(ZeroDivisionError), style():
        raise ZeroDivisionError
    assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "a b.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_name_keeps_its_ends():
    """A shortened name keeps its start and end, so names that differ at the end stay different."""
    one, other = (label(f"a rather long name of a class, number {n}") for n in range(2))
    assert one != other
    assert len(one) == 24


@pytest.mark.parametrize("classes", [2, 3, 17])
def test_precision_recall_and_f1_are_those_of_scikit_learn(classes):
    """They agree for each class, also for one that is never predicted and one without samples."""
    random = np.random.default_rng(classes)
    labels, predicted = random.integers(0, classes, (2, 200))
    predicted[predicted == 0] = 1
    labels[labels == classes - 1] = 0
    counts = measures.confusion(labels, predicted, classes)
    assert counts.tolist() == confusion_matrix(labels, predicted, labels=range(classes)).tolist()
    expected = precision_recall_fscore_support(labels, predicted, labels=range(classes), zero_division=0)
    found = measures.from_counts(np.diag(counts), counts.sum(0), counts.sum(1))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs)


def test_the_calibration_error_is_that_of_torchmetrics():
    """It has fifteen bins of equal width, and includes probabilities of 0 and 1."""
    random = np.random.default_rng(1)
    probability = np.append(random.random(500), [0.0, 1.0, 1.0])
    is_right = random.random(503) < probability**2
    found = measures.reliability(probability, is_right)
    expected = binary_calibration_error(torch.tensor(probability), torch.tensor(is_right).int(), n_bins=15, norm="l1")
    assert found.error == pytest.approx(float(expected), abs=1e-6)
    assert found.samples.sum() == 503
    assert measures.reliability(np.ones(4), np.ones(4, bool)).error == 0


def test_the_most_confused_classes_come_first():
    """Each pair of true and predicted class has its count."""
    assert measures.most_confused(np.array([0, 0, 1, 0]), np.array([1, 0, 1, 1])) == [(0, 1, 2)]
