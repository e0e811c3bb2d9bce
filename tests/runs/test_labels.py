"""Multi-label tasks, from files to HTTP answers: pictures, and table rows whose target columns hold 0 and 1."""

import csv
import io
import json
import re
import shutil

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from PIL import Image
from safetensors.torch import load_file
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from tiny import csv_rows

from deeplightning.model.cnn import SimpleCNN
from deeplightning.runfolder import card_digest, golden_digest
from serve.app import application
from serve.bundle import Bundle, BundleError
from serve.prediction import Service

CONFIG = """\
seed: 3
stages: [train, test, predict]
data:
  root: .
  module: {{type: deeplightning.data.{data}}}
  batch_size: 20
model:
  module: {{type: deeplightning.task.multilabel.{task}}}
  network: {{type: deeplightning.model.{network}}}
  optimizer: {{type: torch.optim.AdamW, params: {{lr: 0.01}}}}
  loss: {{type: torch.nn.BCEWithLogitsLoss}}
train: {{num_epochs: 4, checkpoint: {{monitor: val_map}}}}
logger:
  type: deeplightning.tracking.MLflowLogger
  params: {{experiment_name: labels, tracking_uri: '{store}', system_metrics: false}}
"""
COLOURS = ["blue", "green", "red"]  # the labels, sorted
PICTURES = [
    "data.module.params={image_size: 8, cache: false}",
    "model.network.params={num_classes: auto, num_channels: 3, image_size: 8}",
]


@pytest.fixture(scope="module")
def gallery(store, tmp_path_factory):
    """A folder of pictures, each with any of three colours, and a config."""
    place, random = tmp_path_factory.mktemp("many colours"), np.random.default_rng(0)
    lines = []
    for number in range(160):
        has = random.random(3) < [0.2, 0.5, 0.5]
        pixels = random.integers(0, 60, (8, 8, 3))
        pixels[..., ::-1] += has * random.integers(60, 190, (8, 8, 3))  # blue is the last channel
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
        lines.append(f"{number}.png,{'|'.join(c for c, h in zip(COLOURS, has, strict=True) if h)}")
    (place / "labels.csv").write_text("\n".join(["file,labels", *lines]))
    parts = {"data": "labelled_images.LabelledImages", "task": "ImageMultilabel", "network": "cnn.SimpleCNN"}
    (place / "labels.yaml").write_text(CONFIG.format(store=store, **parts))
    return place


@pytest.fixture(scope="module")
def pictures(command, gallery):
    """A run that learns which colours a picture contains."""
    return command("train", "labels.yaml", *PICTURES, cwd=gallery, code=0)


@pytest.fixture(scope="module")
def orders(store, tmp_path_factory):
    """A folder with a table that has two columns of 0 and 1, and a config."""
    place, random = tmp_path_factory.mktemp("rows"), np.random.default_rng(1)
    with (place / "orders.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "items", "gift", "late"])
        for _ in range(300):
            age, items = random.normal(40, 12), random.integers(1, 9)
            writer.writerow([f"{age:.3f}", items, int(age > 45), int(items + random.normal() > 6)])
    parts = {"data": "table.TableData", "task": "Multilabel", "network": "table_net.TableNet"}
    (place / "labels.yaml").write_text(CONFIG.format(store=store, **parts))
    return place


@pytest.fixture(scope="module")
def rows(command, orders):
    """A run that learns both columns."""
    sizes = "model.network.params={num_numbers: auto, cardinalities: auto, num_outputs: auto, width: 16, depth: 1}"
    area = "{type: torchmetrics.classification.MultilabelAUROC, params: {num_labels: 2}}"
    own = "{type: deeplightning.task.multilabel.MeanAveragePrecision}, f1: {type: deeplightning.task.multilabel.F1}"
    columns = "data.module.params={train: orders.csv, target: [gift, late]}"
    metrics = f"model.metrics={{area: {area}, map: {own}}}"
    return command("train", "labels.yaml", columns, sizes, metrics, cwd=orders, code=0)


def card_of(run):
    return json.loads((run.folder / "bundle" / "bundle.json").read_text())


@pytest.mark.parametrize(
    ("name", "labels"), [("pictures", COLOURS), pytest.param("rows", ["gift", "late"], marks=pytest.mark.slow)]
)
def test_a_run_has_metrics_and_thresholds_of_its_labels(name, labels, request):
    """The test metrics, one of them from torchmetrics, equal those that scikit-learn computes from the predictions
    file, with the thresholds that the best checkpoint and the bundle contain."""
    run = request.getfixturevalue(name)
    card = card_of(run)
    thresholds = card["output"]["thresholds"]
    assert (card["labels"], len(thresholds)) == (labels, len(labels))
    saved = torch.load(run.folder / "best.ckpt", weights_only=True)
    key = "image_multilabel" if name == "pictures" else "multilabel"
    assert saved[key]["thresholds"] == thresholds
    predictions = csv_rows(run.folder / "predictions.csv")
    scores = np.array([[float(row[f"probability_{label}"]) for label in labels] for row in predictions])
    truth, predicted = (
        np.array([[label in row[column].split("|") for label in labels] for row in predictions])
        for column in ("labels", "predicted_labels")
    )
    np.testing.assert_array_equal(predicted, scores >= thresholds)
    results = re.search(r"results .*test_f1 (\S+) +test_loss \S+ +test_map (\S+)", run.out)
    assert results is not None, run.out
    if name == "rows":
        area = float(re.search(r"results +test_area (\S+)", run.out)[1])
        assert area == pytest.approx(roc_auc_score(truth, scores), abs=1e-4)
    assert float(results[1]) == pytest.approx(f1_score(truth, predicted, average="macro"), abs=1e-4)
    assert float(results[2]) == pytest.approx(average_precision_score(truth, scores), abs=1e-4)
    assert float(results[1]) > 0.8
    assert re.search(r"epoch 4 of 4 .*train_f1 .*train_map .*val_f1 .*val_map", run.out)


def test_answers_to_pictures_are_those_of_the_network(pictures):
    """Pictures get the probabilities of plain torch and the labels above thresholds, as `/openapi.json` describes."""
    bundle = Bundle.open(pictures.folder)
    client = application(Service(bundle)).test_client()
    random, card = np.random.default_rng(5), card_of(pictures)
    pixels = random.integers(0, 256, (200, 8, 8, 3)).astype(np.uint8)
    network = SimpleCNN(num_classes=3, num_channels=3, image_size=8)
    saved = load_file(pictures.folder / "bundle" / "weights.safetensors")
    network.load_state_dict({n.removeprefix("network."): v for n, v in saved.items() if n.startswith("network.")})
    mean, std = (torch.tensor(card["input"][name]).view(-1, 1, 1) for name in ("mean", "std"))
    given = (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std
    expected = network.eval()(given).sigmoid().detach().numpy()
    for array, probabilities in zip(pixels, expected, strict=True):
        file = io.BytesIO()
        Image.fromarray(array).save(file, "PNG")
        answer = client.post("/predict", data=file.getvalue()).json
        by_class = {one["class"]: one["probability"] for one in answer["predictions"]}
        np.testing.assert_allclose([by_class[n] for n in range(3)], probabilities, atol=1e-5)
        wanted = {c for c, p, t in zip(COLOURS, probabilities, card["output"]["thresholds"], strict=True) if p >= t}
        assert set(answer["labels"]) == wanted
    document = client.get("/openapi.json").json
    schema = document["paths"]["/predict"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    Draft202012Validator(schema | {"components": document["components"]}).validate(answer)
    info = client.get("/info").json
    assert (info["task"], info["labels"]) == ("image_multilabel", COLOURS)


@pytest.mark.slow
def test_several_processes_choose_the_same_thresholds(command, gallery, pictures):
    """Two processes with half the batch each choose the thresholds of one process: they use the samples of both."""
    halves = ["engine.processes=2", "data.batch_size=10", "model.network.params.num_classes=3"]
    outcome = command("train", "labels.yaml", *PICTURES, *halves, cwd=gallery, ranks=2, code=0)
    ours, expected = (card_of(run)["output"]["thresholds"] for run in (outcome, pictures))
    assert ours == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("output", [{}, {"thresholds": [0.5, 0.5]}, {"thresholds": [0.5, "1", 0.5]}, {"interval": 0.9}])
def test_a_bundle_without_sound_thresholds_is_refused(pictures, tmp_path, output):
    """A bundle must have one threshold, a number, for each label."""
    shutil.copytree(pictures.folder / "bundle", tmp_path / "bundle")
    path = tmp_path / "bundle" / "bundle.json"
    card = json.loads(path.read_text()) | {"output": output}
    card["golden"]["digest"] = golden_digest(card)
    path.write_text(json.dumps(card | {"digest": card_digest(card)}))
    with pytest.raises(BundleError, match="describes its answers wrongly"):
        Bundle.open(tmp_path / "bundle")


@pytest.mark.parametrize(
    ("place", "overrides", "code", "message"),
    [
        ("gallery", ["model.network.params.num_classes=5"], 2, "the data has 3 labels, the network 5 outputs"),
        ("gallery", ["data.module.params.labels=lables.csv"], 3, "lables.csv is missing. Set data.root"),
        ("gallery", ["data.module.params.class_names=[red, green]"], 0, ""),
        ("orders", ["data.module.params={train: orders.csv, target: [items, late]}"], 3, "the data hold .* for the"),
        ("orders", ["data.module={type: deeplightning.data.digits.Digits}"], 0, "data are read, so no step was tried"),
    ],
)
def test_a_dry_run_reports_labels_that_do_not_fit_as_one_error(command, request, place, overrides, code, message):
    """Labels that are neither 0 nor 1, or a network with another number of outputs, are one error of the dry run."""
    sizes = ["model.network.params={num_numbers: auto, cardinalities: auto, num_outputs: auto}"]
    overrides = [*(PICTURES if place == "gallery" else sizes), *overrides]
    outcome = command("check", "labels.yaml", "--dry-run", *overrides, cwd=request.getfixturevalue(place))
    assert (outcome.code, outcome.err.count("error: ")) == (code, int(code > 0)), outcome
    assert re.search(message, outcome.err)
