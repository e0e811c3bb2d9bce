"""Several labels per sample: thresholds match an exhaustive search, metrics match scikit-learn, and an unusable label
file is one error with its line."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from modules import data_config
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score
from torchmetrics.classification import MulticlassAUROC

from deeplightning.callbacks.on_request import worst_rows
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.labelled_images import LabelledImages
from deeplightning.task.classes import Classification
from deeplightning.task.multilabel import F1, MeanAveragePrecision, Multilabel, best_thresholds
from deeplightning.task.supervised import Supervised
from serve.outputs import OUTPUTS


def scores_and_truth(seed=0, samples=200, labels=5):
    """Return probabilities, some of them equal, and labels that correlate with them."""
    random = np.random.default_rng(seed)
    scores = np.round(random.random((samples, labels)), 2).astype(np.float32)
    return scores, (scores + random.normal(0, 0.3, scores.shape) > 0.7).astype(np.int64)


def test_thresholds_have_the_best_f1_of_all():
    """For each label, no other threshold has a higher F1; the threshold is between two probabilities, and 0.5 for a
    label without samples."""
    scores, truth = scores_and_truth()
    truth[:, 3] = 0
    truth[:, 4] = 1
    found = best_thresholds(scores, truth)
    assert found[3] == 0.5
    for label in (0, 1, 2, 4):
        ours = f1_score(truth[:, label], scores[:, label] >= found[label])
        tried = [f1_score(truth[:, label], scores[:, label] >= at) for at in np.unique(scores[:, label])]
        assert ours == max(tried)
        assert label == 4 or np.abs(scores[:, label] - found[label]).min() > 0.004
    assert best_thresholds(np.array([[0.9], [0.1]]), np.array([[1], [0]])) == [0.5]


def test_one_sample_of_one_label_is_enough_for_a_threshold(monkeypatch):
    """torchmetrics returns a single probability without its dimensions."""
    found = []
    monkeypatch.setattr(Supervised, "on_validation_epoch_end", lambda task: found.append(task.thresholds))
    model = SimpleNamespace(network="one", optimizer=None, scheduler=None, loss={}, metrics={})
    task = Multilabel(SimpleNamespace(model=model))
    task._trainer = SimpleNamespace(sanity_checking=False)
    task.remember(None, torch.tensor([[2.0]]), torch.tensor([[1.0]]))
    task.on_validation_epoch_end()
    assert found == [[pytest.approx(0.44, abs=0.01)]]


def test_metrics_are_those_of_scikit_learn():
    """Batches may have any size. Mean average precision excludes labels that no sample has."""
    scores, truth = scores_and_truth(1)
    truth[:, 2] = 0
    precision, f1 = MeanAveragePrecision(), F1()
    f1.thresholds = [0.2, 0.4, 0.6, 0.8, 0.5]
    for part in np.split(np.arange(200), [3, 50, 51]):
        for metric in (precision, f1):
            metric.update(torch.from_numpy(scores[part]), torch.from_numpy(truth[part]))
    occurring = [0, 1, 3, 4]
    assert precision.compute().item() == pytest.approx(
        average_precision_score(truth[:, occurring], scores[:, occurring])
    )
    answered = scores >= np.array(f1.thresholds)
    assert f1.compute().item() == pytest.approx(f1_score(truth, answered, average="macro", zero_division=0))
    assert MeanAveragePrecision()(torch.ones(2, 3), torch.zeros(2, 3)).isnan()


def test_an_answer_has_the_labels_above_their_thresholds():
    """Labels are sorted by probability, and `predictions` has all of them; without a match the list is empty."""
    encode = OUTPUTS["multilabel"].encoder(["a", 'b"', "c"], {"thresholds": [0.5, 0.9, 0.25]})
    kind, body = encode([np.array([0.5, 0.6, 0.7], np.float32)], 5, "")
    answer = json.loads(body)
    assert (kind, answer["labels"]) == ("application/json", ["c", "a"])
    assert [(one["class"], one["label"], one["threshold"]) for one in answer["predictions"]] == [
        (2, "c", 0.25),
        (1, 'b"', 0.9),
        (0, "a", 0.5),
    ]
    assert np.float32(answer["predictions"][1]["probability"]) == np.float32(0.6)
    several = json.loads(encode([np.zeros(3, np.float32)] * 2, 5, "")[1])["predictions"]
    assert [one["labels"] for one in several] == [[], []]


# ---- files of labels


@pytest.fixture
def root(tmp_path):
    """A folder of forty pictures without labels."""
    for number in range(40):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    return tmp_path


def sets(root, **params):
    data = LabelledImages(data_config(root, seed=7), image_size=8, cache=False, **params)
    data.setup()
    return data, {name: data.dataset(name) for name in ("train", "val", "test")}


def test_labels_become_columns_of_0_and_1(root):
    """CSV and JSON lines, whose unused keys may be null, as pandas writes them, give the same batches; each split gets
    samples of a rare label."""
    own = {n: ["even"] * (n % 2 == 0) + ["fifth"] * (n % 10 == 5) for n in range(40)}
    lines = [f"{n}.png,{' | '.join(labels)}" for n, labels in own.items()]
    (root / "labels.csv").write_text("\n".join(["file,labels", *lines, ""]))
    rows = [{"file": f"{n}.png", "labels": own[n], "author": None} for n in own]
    (root / "more.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    data, found = sets(root)
    assert data.class_names == ["even", "fifth"]
    assert [len(dataset) for dataset in found.values()] == [32, 4, 4]
    for name, other in sets(root, labels="more.jsonl")[1].items():
        batch, same = (dataset[np.arange(len(dataset))] for dataset in (found[name], other))
        assert {key: (value.dtype, value.ndim) for key, value in batch.items()} == {
            "image": (torch.uint8, 4),
            "label": (torch.float32, 2),
            "index": (torch.int64, 1),
        }
        assert all(torch.equal(batch[key], same[key]) for key in batch)
        numbers = batch["image"][:, 0, 0, 0].tolist()
        assert batch["label"].tolist() == [[float(n % 2 == 0), float(n % 10 == 5)] for n in numbers]
    assert [dataset.labels[:, 0].sum().item() for dataset in found.values()] == [16, 2, 2]
    assert sets(root, class_names=["fifth", "even", "odd"])[1]["train"].labels.sum(0)[1:].tolist() == [16, 0]


def test_a_column_names_the_sets(root):
    """The config may name the columns, the separator, the folder of pictures and the split column."""
    (root / "pictures").mkdir()
    for path in root.glob("*.png"):
        path.rename(root / "pictures" / path.name)
    lines = [f"{n}.png,{'valid' if n < 4 else 'test' if n < 10 else 'train'},a b" for n in range(40)]
    (root / "tags.csv").write_text("\n".join(["picture,split,tags", *lines]))
    names = {"file_column": "picture", "labels_column": "tags", "separator": " ", "images": "pictures"}
    data, found = sets(root, labels="tags.csv", **names)
    assert [len(dataset) for dataset in found.values()] == [30, 4, 6]
    assert data.class_names == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("labels.jsonl", '{"file": "1.png", "labels": null}\n', "line 1: labels must be a list of names, not None"),
        ("labels.csv", None, r"labels.csv is missing. Set data.root"),
        ("labels.csv", "files,labels\n1.png,a\n", r"line 2: there is no 'file'. Do you mean files\?"),
        ("labels.csv", "file,labels\n1.png,a\n2.png\n", "line 3: a line must have a JSON object, or as many values"),
        ("labels.csv", 'file,labels\n1.png,"a\n', "at line 0 or the next, cannot be read"),
        ("labels.csv", "file,labels\n1.png,a\n1.png,b\n", "line 3: 1.png is in line 2 already"),
        ("labels.csv", "file,labels\n1.png,a\nx.png,b\ny.png,b\n", r"line 3: the picture .*x.png is missing"),
        ("labels.csv", "file,labels\n1.png,\n", "names no label at all"),
        ("labels.csv", "file,labels\n,a\n", "line 2: file must name a picture, not ''"),
        ("labels.csv", "file,labels,split\n1.png,a,dev\n", "line 2: the split must be train, val or test in each l"),
        ("labels.jsonl", '{"file": "1.png", "labels": ["a"]}\nx\n', "line 2 or the next, cannot be read"),
        ("labels.jsonl", '[1]\n', "line 1: a line must have a JSON object"),
        ("labels.jsonl", '{"file": "1.png", "labels": [1]}\n', "line 1: labels must be a list of names, not"),
        ("labels.jsonl", b'{"file": "\xff"}\n', "is not in UTF-8 .'utf-8' codec"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_note(root, name, text, words):
    """The error has the file, the line and the remedy."""
    if text is not None:
        (root / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError, match=words) as caught:
        sets(root, labels=name)
    assert str(root / name) in str(caught.value)


def test_a_label_that_is_none_of_the_classes(root):
    """The error has its line and the nearest class."""
    (root / "labels.csv").write_text("file,labels\n1.png,dgo\n")
    words = r"line 2: 'dgo' is not in .*class_names. Do you mean dog\? There are: cat, dog"
    with pytest.raises(DataError, match=words):
        sets(root, class_names=["cat", "dog"])


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"labels": "labels.txt"}, "labels must be a file"),
        ({"separator": ""}, "separator must be"),
        ({"class_names": ["a", "a"]}, "class_names must be a list of different names"),
        ({"class_names": "ab"}, "class_names must be a list"),
    ],
)
def test_impossible_params(root, params, words):
    """An impossible param is a config error."""
    with pytest.raises(DataConfigError, match=words):
        LabelledImages(data_config(root, seed=7), **params)


def test_the_worst_predictions_have_the_most_wrong_labels():
    """Each missing and each extra label counts once; a sample without labels has no missing ones."""
    pairs = {1: ("", "a"), 2: ("a|b", "a|c"), 3: ("a|b", "a|b"), 4: ("a|b|c", "")}
    rows = [{"index": n, "labels": true, "predicted_labels": found} for n, (true, found) in pairs.items()]
    assert [row["index"] for row in worst_rows(rows, ["a", "b", "c"])] == [4, 2, 1]


def test_a_mask_without_pixels_that_count_is_no_mistake():
    """Its accuracy is NaN, which cannot be sorted."""
    rows = [{"index": n, "iou": a, "acc": a} for n, a in enumerate([0.9, float("nan"), 0.1, 0.5])]
    assert [row["index"] for row in worst_rows(rows, [])] == [2, 3, 0]


def test_a_logged_step_copies_no_earlier_batch():
    """The value is that of the batch, and earlier batches stay the same tensors."""
    scores, truth = map(torch.from_numpy, scores_and_truth(2))
    metric = F1()
    metric(scores[:50], truth[:50])
    first, value = metric.outputs[0], metric(scores[50:], truth[50:])
    assert metric.outputs[0] is first
    assert value == F1()(scores[50:], truth[50:])
    assert len(metric.outputs) == metric.update_count == 2
    assert metric.compute() == F1()(scores, truth)


def test_a_prediction_that_is_no_number_is_the_worst():
    """It comes first, and the others stay sorted by their error."""
    rows = [{"index": n, "prediction": p, "target": 0.0} for n, p in enumerate([86.0, 23.0, float("nan"), 71.0])]
    assert [row["index"] for row in worst_rows(rows, [])] == [2, 0, 3, 1]


def test_logits_between_0_and_1_are_not_taken_for_probabilities():
    """torchmetrics decides for each batch; here each has one row, as the last batch of a set may have."""
    model = SimpleNamespace(network="one", optimizer=None, scheduler=None, loss={}, metrics={})
    task, metric = Classification(SimpleNamespace(model=model)), MulticlassAUROC(2)
    for row, label in (([0.0, 0.9], 0), ([-1.0, 0.5], 1), ([2.0, -2.0], 0)):
        metric.update(task.measured(torch.tensor([row])), torch.tensor([label]))
    assert metric.compute() == 1
