"""A task becomes a bundle: complete, equal to the task for every batch size, or not written at all."""

import base64
import hashlib
import json
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from deeplightning.config.fault import CheckpointError, SetupError
from deeplightning.export import export
from deeplightning.image import ImageSpec
from deeplightning.runfolder import RunFolder

RUN = {"id": "abc", "folder_name": "run-1", "created": "2026-11-20T16:00:00+00:00", "versions": {"torch": "2.15.0"}}


class Inference(nn.Module):
    """What a task's inference model is: scaling, a network, softmax."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):  # uint8 (N, C, H, W)
        return torch.softmax(self.network(images.float() / 255), dim=1)  # (N, K)


class DependsOnValues(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class KnowsTheBatchSize(nn.Module):
    def forward(self, x):
        return x.reshape(2, -1)


class AnswersOtherwiseWhenExported(nn.Module):
    def forward(self, x):
        return x * 1.1 if torch.compiler.is_exporting() else x


class Tied(nn.Module):
    """Two layers with one weight, as language models have them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))[:, :3]


def small_network(*middle):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        *middle,
        nn.Dropout(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def task_of(network, mode="RGB", classes=3):
    model = Inference(network).eval()
    return SimpleNamespace(
        kind="image_classification",
        image_spec=ImageSpec(6, 5, mode),
        class_names=[f"class {number}" for number in range(classes)],
        inference_model=lambda: model,
    )


def pixels(number, channels=3):
    return np.random.default_rng(number).integers(0, 256, (number, channels, 6, 5), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small task and the folder of its bundle, for those who only look."""
    task, folder = task_of(small_network()), RunFolder(tmp_path_factory.mktemp("run"))
    assert export(task, folder, pixels(20), RUN) == folder.bundle
    return task, folder


def test_a_bundle_is_complete(small):
    """Three files, the card's digests are theirs, and the card says what the task is."""
    _, folder = small
    assert sorted(file.name for file in folder.bundle.iterdir()) == [
        "bundle.json",
        "model.onnx",
        "weights.safetensors",
    ]
    card = json.loads(folder.bundle_card.read_text())
    assert list(card) == ["format", "task", "input", "labels", "files", "run", "golden"]
    assert (card["format"], card["task"], card["run"]) == (1, "image_classification", RUN)
    assert card["labels"] == ["class 0", "class 1", "class 2"]
    assert ImageSpec.from_dict(card["input"]) == ImageSpec(6, 5)
    for file in (folder.bundle_model, folder.bundle_weights):
        assert card["files"][file.name] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert [path.name for path in folder.path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_golden_samples_are_the_samples(folder, mode):
    """The first 16 samples decode to exactly the model's input, and carry the model's probabilities."""
    channels = {"RGB": 3, "L": 1}[mode]
    network = nn.Sequential(nn.Flatten(), nn.Linear(channels * 30, 3))
    task, samples = task_of(network, mode), pixels(20, channels)  # more than the 16 that are kept
    export(task, folder, samples, RUN)
    golden = json.loads(folder.bundle_card.read_text())["golden"]
    assert len(golden) == 16
    for sample, wanted in zip(golden, samples, strict=False):
        decoded = task.image_spec.decode(base64.b64decode(sample["png"]))
        np.testing.assert_array_equal(decoded.transpose(2, 0, 1), wanted)
        expected = task.inference_model()(torch.from_numpy(wanted[None]))[0].tolist()
        assert sample["probabilities"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("size", [1, 3, 16, 64])
def test_any_batch_size_is_taken(small, size):
    """ONNX Runtime answers like torch, whatever the number of images."""
    task, folder = small
    session = onnxruntime.InferenceSession(folder.bundle_model)
    images = pixels(size)
    with torch.inference_mode():
        expected = task.inference_model()(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(session.run(None, {"images": images})[0], expected, atol=1e-6)
    assert session.get_inputs()[0].shape == ["batch", 3, 6, 5]


def test_plain_weights_are_the_models(small):
    """weights.safetensors holds every parameter and buffer by its name."""
    task, folder = small
    weights, expected = load_file(folder.bundle_weights), task.inference_model().state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_tied_weights_are_stored_once(folder):
    """A weight that two layers share does not hinder an export."""
    network = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), Tied())
    export(task_of(network, "L"), folder, pixels(2, 1), RUN)
    assert list(load_file(folder.bundle_weights)) == ["network.2.first.weight"]


def test_nothing_of_this_machine_is_in_a_bundle(small):
    """The exporter's notes on source lines, with their paths, are removed."""
    _, folder = small
    assert b".py" not in folder.bundle_model.read_bytes()


def test_files_of_a_bundle_are_as_readable_as_any(small, tmp_path):
    """Who may read the model may read the weights: the safetensors library would keep them private."""
    _, folder = small
    new = tmp_path / "new"
    new.touch()
    assert {file.stat().st_mode for file in folder.bundle.iterdir()} == {new.stat().st_mode}


def test_an_export_replaces_the_last_one(folder):
    """The second bundle takes the first one's place, and nothing else is left."""
    export(task_of(small_network()), folder, pixels(2), RUN)
    first = folder.bundle_model.read_bytes()
    export(task_of(small_network(nn.Conv2d(4, 4, 1))), folder, pixels(1), RUN)
    assert folder.bundle_model.read_bytes() != first
    assert [path.name for path in folder.path.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (small_network(nn.Sequential(DependsOnValues())), "(in layer network.3.0): Could not guard on data-dependent"),
        (nn.Sequential(nn.Flatten(), KnowsTheBatchSize(), nn.Linear(90, 3)), "it takes one number of images only"),
        (small_network(AnswersOtherwiseWhenExported()), "probabilities differ by up to"),
        (
            small_network(nn.Conv2d(4, 4, 1).requires_grad_(False).apply(lambda it: it.weight.fill_(torch.nan))),
            "finite",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(90, 4)), "The network gives 4 probabilities, and the data has 3 class"),
    ],
    ids=["values", "batch", "otherwise", "nan", "classes"],
)
def test_a_network_that_cannot_be_exported_leaves_the_old_bundle(folder, capfd, network, words):
    """One note with the reason and exit code 4, no chatter, and the bundle of before, byte for byte."""
    export(task_of(small_network()), folder, pixels(2), RUN)
    before = {file.name: file.read_bytes() for file in folder.bundle.iterdir()}
    capfd.readouterr()
    with pytest.raises(CheckpointError) as caught:
        export(task_of(network), folder, pixels(2), RUN)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    assert capfd.readouterr() == ("", "")
    assert {file.name: file.read_bytes() for file in folder.bundle.iterdir()} == before
    assert [path.name for path in folder.path.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    "samples",
    [pixels(2)[:0], pixels(2).astype(np.float32), pixels(2, 1), pixels(2).transpose(0, 2, 3, 1)],
    ids=["none", "float", "grey", "channels last"],
)
def test_samples_of_another_kind_are_refused(folder, samples):
    """Without real samples of the model's input there is no proof, hence no bundle."""
    with pytest.raises(CheckpointError, match=r"uint8 \(N, 3, 6, 5\)"):
        export(task_of(small_network()), folder, samples, RUN)
    assert not folder.bundle.exists()


def test_another_task_is_refused(folder):
    """A bundle says what it is for; a task that no server knows is not written."""
    task = task_of(small_network())
    task.kind = "poetry"
    with pytest.raises(CheckpointError, match="poetry"):
        export(task, folder, pixels(2), RUN)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    """The folder's fault is the machine's: exit code 3."""
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="file/bundle cannot be written"):
        export(task_of(small_network()), RunFolder(tmp_path / "file"), pixels(2), RUN)
