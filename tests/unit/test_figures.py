"""Pictures: one style for light and dark, the same text each time, names from outside as plain text."""

import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torchmetrics.functional.classification import binary_calibration_error

from deeplightning.figures import class_plots, curves, measures
from deeplightning.figures.style import GRID, INK, PAPER, drawn, label, save, style, to_svg

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "$\\frac{1}{0}$",
    "a\x00\x1b[31mb",
    "日本語",
    "\ud800x",
]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def matrix(names: list[str], per_class: int = 20, seed: int = 0):
    random = np.random.default_rng(seed)
    number = len(names)
    labels = np.repeat(np.arange(number), per_class)
    predicted = np.where(random.random(len(labels)) < 0.8, labels, (labels + 1) % number)
    return measures.confusion(labels, predicted, number)


def test_a_picture_follows_light_and_dark():
    """Ink, lines and paper are variables with two values; a second drawing gives the same text."""
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
        assert "script" not in tags
        assert "img" not in tags
        assert "\x1b" not in svg
    assert any("frac" in text for text in texts(to_svg(drawn(class_plots.confusion_matrix(counts, HOSTILE, "test")))))


@pytest.mark.parametrize(("number", "cells"), [(10, True), (20, True), (100, False)])
def test_a_confusion_matrix_says_what_it_is(number, cells):
    """Metric and samples in the title, both axes named, each class at both of them; of few classes counts too."""
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
    """It is no larger than one of 120 classes, however many there are."""
    many, most = (np.eye(number, dtype=int) for number in (121, 1000))
    sizes = [
        drawn(class_plots.confusion_matrix(each, [str(n) for n in range(len(each))], "test")) for each in (many, most)
    ]
    assert len({tuple(made.get_size_inches()) for made in sizes}) == 1
    assert "120" not in texts(to_svg(sizes[0]))


def test_a_share_is_at_each_count_of_few_classes():
    """Of its row, in percent."""
    shown = texts(to_svg(drawn(class_plots.confusion_matrix(np.array([[3, 1], [0, 8]]), ["a", "b"], "test"))))
    assert {"75%", "25%"} <= set(shown)


def test_mistakes_are_framed():
    """One red frame for each wrong answer, with true and predicted class and its probability."""
    image = np.zeros((8, 8), np.uint8)
    samples = [class_plots.Sample(image, *class_plots.answer("cat", "dog", 0.9), n > 1) for n in range(5)]
    svg = to_svg(drawn(class_plots.sheet(samples, "Samples", "")))
    assert svg.count("stroke: #d64545") == 2
    assert texts(svg).count("predicted dog, 90%") == 5


def test_charts_put_together_what_belongs_together():
    """Training and validation in one chart; loss, metrics, rates in this order; none of one point or of a test."""
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
    """The last one before the steps of the best checkpoint are done: a series counts from 0."""
    series = {"val_acc": [(4, 0.5), (9, 0.9), (14, 0.8)]}
    figure = drawn(curves.curve(curves.charts(series)[0], 10))
    marks = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_label() == "best"]
    assert marks == [9]


def test_pictures_leave_matplotlib_as_it_was(tmp_path):
    """Settings of the process hold afterwards, also when drawing fails."""
    before = dict(matplotlib.rcParams)
    (chart,) = curves.charts({"lr": [(0, 1.0), (1, 2.0)]})
    save(curves.curve(chart), tmp_path / "a b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b.png", "a b.svg"]
    with pytest.raises(ZeroDivisionError), style():
        raise ZeroDivisionError
    assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "a b.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_name_keeps_its_ends():
    """Names that differ at the end stay different."""
    one, other = (label(f"a rather long name of a class, number {n}") for n in range(2))
    assert one != other
    assert len(one) == 24


@pytest.mark.parametrize("classes", [2, 3, 17])
def test_precision_recall_and_f1_are_those_of_scikit_learn(classes):
    """Of each class, with one that is never answered and one that no sample has."""
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
    """Fifteen bins of equal width, probabilities of 0 and 1 among them."""
    random = np.random.default_rng(1)
    probability = np.append(random.random(500), [0.0, 1.0, 1.0])
    is_right = random.random(503) < probability**2
    found = measures.reliability(probability, is_right)
    # torchmetrics turns a binary probability to that of the likelier class only where asked to; here it is as given.
    expected = binary_calibration_error(torch.tensor(probability), torch.tensor(is_right).int(), n_bins=15, norm="l1")
    assert found.error == pytest.approx(float(expected), abs=1e-6)
    assert found.samples.sum() == 503
    perfect = measures.reliability(np.ones(4), np.ones(4, bool))
    assert perfect.error == 0


def test_the_most_confused_classes_come_first():
    """True and answered class, and how often."""
    assert measures.most_confused(np.array([0, 0, 1, 0]), np.array([1, 0, 1, 1])) == [(0, 1, 2)]
