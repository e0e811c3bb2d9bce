"""The numbers of pictures and reports are those of scikit-learn and torchmetrics."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torchmetrics.functional.classification import binary_calibration_error

from deeplightning.figures import measures


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
