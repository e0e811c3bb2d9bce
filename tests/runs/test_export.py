"""An exported bundle is complete and equal to the task at every batch size, or it is not written."""

import base64
import hashlib
import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from exported import RUN
from safetensors.torch import load_file
from torch import nn

from deeplightning.export import bundle
from deeplightning.export.bundle import export
from deeplightning.faults import CheckpointError, SetupError
from deeplightning.image_spec import ImageSpec
from deeplightning.runfolder import RunFolder
from serve.bundle import Bundle, BundleError


class Inference(nn.Module):
    """A task's inference model: scaling, a network, softmax."""

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


class TakesTheLength(nn.Module):
    def forward(self, x):
        return x.reshape(len(x), -1)[:, :3]


class InDoublePrecision(nn.Module):
    """ONNX Runtime has no convolution of float64."""

    def forward(self, x):
        return nn.functional.conv2d(x.double(), torch.ones(4, 4, 1, 1, dtype=torch.float64)).float()


class AnswersOtherwiseWhenExported(nn.Module):
    def forward(self, x):
        return x * 1.1 if torch.compiler.is_exporting() else x


class Negative(nn.Module):
    """A task's inference model that answers with pictures."""

    def forward(self, images):  # uint8 (N, C, H, W)
        return 1 - images.float() / 255  # (N, C, H, W)


class MeanOfRows(nn.Module):
    def forward(self, x):  # (N, 3, H, W)
        return x.mean(dim=(2, 3))  # (N, 3)


class Tied(nn.Module):
    """Two layers share a weight, as in language models."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))[:, :3]


def small_network(*middle):
    torch.manual_seed(0)
    first = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    last = (nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return nn.Sequential(*first, *middle, *last)


def task_of(network, mode="RGB"):
    model = Inference(network).eval()
    return SimpleNamespace(
        kind="image_classification",
        image_spec=ImageSpec(6, 5, mode),
        class_names=["class 0", "class 1", "class 2"],
        inference_model=lambda: model,
    )


def pixels(number, channels=3):
    return np.random.default_rng(number).integers(0, 256, (number, channels, 6, 5), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small task and the folder of its bundle, for tests that only read."""
    task, folder = task_of(small_network()), RunFolder(tmp_path_factory.mktemp("run"))
    assert export(task, folder, pixels(20), RUN) == folder.bundle
    return task, folder


def test_a_bundle_is_complete(small):
    """A bundle has three files with the digests on the card, nothing of this machine, and the card describes the task.
    The digest of the card is the SHA-256 of canonical JSON of everything else, computed independently here."""
    _, folder = small
    assert sorted(file.name for file in folder.bundle.iterdir()) == ["bundle.json", "model.onnx", "weights.safetensors"]
    card = json.loads(folder.bundle_card.read_text())
    assert list(card) == ["format", "task", "input", "labels", "files", "run", "golden", "digest"]
    assert (card["format"], card["task"], card["run"]) == (2, "image_classification", RUN)
    assert card["labels"] == ["class 0", "class 1", "class 2"]
    assert ImageSpec.from_dict(card["input"]) == ImageSpec(6, 5)
    for file in (folder.bundle_model, folder.bundle_weights):
        assert card["files"][file.name] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert [path.name for path in folder.path.iterdir()] == ["bundle"]
    assert b".py" not in folder.bundle_model.read_bytes()  # the exporter records source lines with local paths
    digest = card.pop("digest")
    canonical = json.dumps(card, sort_keys=True, separators=(",", ":"))
    assert digest == hashlib.sha256(canonical.encode()).hexdigest()


def test_large_weights_are_beside_the_graph(folder, monkeypatch):
    """Large weights are in a file beside the graph, without a copy; the card has its digest, and damage is refused.
    ONNX Runtime maps the file, so there is no second copy of the weights in memory during verification."""
    monkeypatch.setattr(bundle, "LARGE_WEIGHTS_BYTES", 0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(90, 2048), nn.ReLU(), nn.Linear(2048, 8192), nn.Linear(8192, 3))
    export(task_of(network), folder, pixels(20), RUN)
    before = anonymous_memory()
    session = bundle.session_of(folder.bundle_model)
    assert bundle.answers_of(session, pixels(20)).shape == (20, 3)
    assert anonymous_memory() - before < 20  # the weights are 64
    data = folder.bundle / "model.onnx.data"
    card = json.loads(folder.bundle_card.read_text())
    assert card["files"][data.name] == hashlib.sha256(data.read_bytes()).hexdigest()
    Bundle.open(folder.bundle)  # verifies the answers to its golden samples
    content = bytearray(data.read_bytes())
    content[7] ^= 1
    data.write_bytes(content)
    with pytest.raises(BundleError):
        Bundle.open(folder.bundle)


def anonymous_memory() -> float:
    """Return the resident memory of this process without mapped files, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_golden_samples_are_the_samples(folder, mode):
    """The first 16 samples decode to exactly the model's input, with the probabilities of the model."""
    channels = {"RGB": 3, "L": 1}[mode]
    network = nn.Sequential(nn.Flatten(), nn.Linear(channels * 30, 3))
    task, samples = task_of(network, mode), pixels(20, channels)  # more than the 16 that a card contains
    export(task, folder, samples, RUN)
    golden = json.loads(folder.bundle_card.read_text())["golden"]
    for png, wanted in zip(golden["pictures"], samples[:16], strict=True):
        decoded = task.image_spec.decode(base64.b64decode(png))
        np.testing.assert_array_equal(decoded.transpose(2, 0, 1), wanted)
    expected = task.inference_model()(torch.from_numpy(samples[:16])).detach().numpy()
    answers = np.frombuffer(base64.b64decode(golden["fp32"]), "<f4").reshape(16, 3)
    np.testing.assert_allclose(answers, expected, atol=1e-6)


def test_samples_that_are_large_are_few(folder):
    """A card stays small: it has samples and answers of up to 2 MB together, or a single larger sample."""
    samples = np.random.default_rng(0).integers(0, 256, (4, 3, 400, 500), dtype=np.uint8)
    for task, kept in ((reconstruction(Negative()), 1), (task_of(MeanOfRows()), 3)):
        task.image_spec = ImageSpec(400, 500)  # noise: 0.6 MB as a PNG, 2.4 MB as a picture in the answer
        export(task, folder, samples, RUN)
        assert len(json.loads(folder.bundle_card.read_text())["golden"]["pictures"]) == kept


def reconstruction(model, mode="RGB"):
    model.eval()
    return SimpleNamespace(kind="image_reconstruction", image_spec=ImageSpec(6, 5, mode), inference_model=lambda: model)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_task_that_gives_pictures_is_exported(folder, mode):
    """The graph gives pictures of the input's size at every batch size; the card has answers but no labels."""
    channels = {"RGB": 3, "L": 1}[mode]
    samples = pixels(5, channels)
    export(reconstruction(Negative(), mode), folder, samples, RUN)
    card = json.loads(folder.bundle_card.read_text())
    assert (card["task"], card["labels"]) == ("image_reconstruction", [])
    answers = np.frombuffer(base64.b64decode(card["golden"]["fp32"]), "<f4").reshape(samples.shape)
    np.testing.assert_allclose(answers, 1 - samples / 255, atol=1e-6)
    session = onnxruntime.InferenceSession(folder.bundle_model)
    assert [node.name for node in session.get_outputs()] == ["pictures"]
    for size in (1, 3, 16):
        images = pixels(size, channels)
        np.testing.assert_allclose(session.run(None, {"images": images})[0], 1 - images / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(Negative(), nn.Flatten()), r"maps pictures of \(2, 3, 6, 5\) to \(2, 90\)"),
        (nn.Sequential(Negative(), nn.MaxPool2d(2)), r"to \(2, 3, 3, 2\)"),
        (nn.Sequential(Negative(), nn.Softmax2d(), nn.LeakyReLU(), nn.Hardtanh(-2, -1)), "range from -1 to -1, not"),
        (nn.Sequential(Negative(), AnswersOtherwiseWhenExported(), nn.Hardsigmoid()), "pictures differ by up to"),
    ],
    ids=["flat", "smaller", "range", "otherwise"],
)
def test_pictures_of_another_kind_are_refused(folder, model, message):
    """Answers with another size, outside 0 to 1, or different in ONNX Runtime are refused."""
    with pytest.raises(CheckpointError, match=message):
        export(reconstruction(model), folder, pixels(2), RUN)
    assert not folder.bundle.exists()


def test_any_batch_size_is_taken(small):
    """ONNX Runtime answers like torch for any number of images."""
    task, folder = small
    session = onnxruntime.InferenceSession(folder.bundle_model)
    for images in map(pixels, (1, 3, 16, 64)):
        with torch.inference_mode():
            expected = task.inference_model()(torch.from_numpy(images)).numpy()
        np.testing.assert_allclose(session.run(None, {"images": images})[0], expected, atol=1e-6)
    assert session.get_inputs()[0].shape == ["batch", 3, 6, 5]


def test_the_length_of_a_batch_leaves_its_size_free(folder):
    """`len(x)` in a forward pass fixes the batch size in the exporter's first attempt only. Duplicate class names get
    numbers, so that a server can distinguish the classes."""
    task = task_of(TakesTheLength())
    task.class_names = ["crane", "heron", "crane"]
    export(task, folder, pixels(3), RUN)
    served = Bundle.open(folder.bundle)
    assert served.labels == ["crane (0)", "heron", "crane (2)"]
    expected = task.inference_model()(torch.from_numpy(pixels(5))).numpy()
    np.testing.assert_allclose(served.predict(pixels(5)), expected, atol=1e-6)


def test_plain_weights_are_the_models(small, tmp_path):
    """weights.safetensors contains every parameter and buffer by its name; one that two layers share is stored once."""
    task, folder = small
    weights, expected = load_file(folder.bundle_weights), task.inference_model().state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    network = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), Tied())
    export(task_of(network, "L"), RunFolder(tmp_path), pixels(2, 1), RUN)
    assert list(load_file(RunFolder(tmp_path).bundle_weights)) == ["network.2.first.weight"]


def test_files_of_a_bundle_are_equally_readable(tmp_path):
    """The safetensors library would make the weights private. A second bundle replaces the first, and no other file is
    left."""
    copy, models = RunFolder(tmp_path / "run"), set()
    copy.path.mkdir()
    for network in (small_network(), small_network(nn.Conv2d(4, 4, 1))):
        export(task_of(network), copy, pixels(2), RUN)
        assert len({file.stat().st_mode for file in copy.bundle.iterdir()}) == 1
        assert [path.name for path in copy.path.iterdir()] == ["bundle"]
        models.add(copy.bundle_model.read_bytes())
    assert len(models) == 2


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (small_network(nn.Sequential(DependsOnValues())), "(in layer network.3.0): Could not guard on data-dependent"),
        (nn.Sequential(nn.Flatten(), KnowsTheBatchSize(), nn.Linear(90, 3)), "it works for one batch size only"),
        (small_network(InDoublePrecision()), "ONNX Runtime rejects the exported network: "),
        (small_network(AnswersOtherwiseWhenExported()), "probabilities differ by up to"),
        (
            small_network(nn.Conv2d(4, 4, 1).requires_grad_(False).apply(lambda it: it.weight.fill_(torch.nan))),
            "finite",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(90, 4)), "The network gives 4 probabilities, and the data has 3 class"),
    ],
    ids=["values", "batch", "double", "otherwise", "nan", "classes"],
)
def test_a_network_that_cannot_be_exported_leaves_the_old_bundle(small, folder, capfd, network, message):
    """A network that cannot be exported gives one message and exit code 4; the old bundle is unchanged."""
    shutil.copytree(small[1].bundle, folder.bundle)
    before = {file.name: file.read_bytes() for file in folder.bundle.iterdir()}
    capfd.readouterr()
    with pytest.raises(CheckpointError) as caught:
        export(task_of(network), folder, pixels(2), RUN)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    assert capfd.readouterr() == ("", "")
    assert {file.name: file.read_bytes() for file in folder.bundle.iterdir()} == before
    assert [path.name for path in folder.path.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    ("kind", "samples", "message"),
    [
        ("image_classification", pixels(2)[:0], r"uint8 \(N, 3, 6, 5\)"),
        ("image_classification", pixels(2).astype(np.float32), r"uint8 \(N, 3, 6, 5\)"),
        ("image_classification", pixels(2, 1), r"uint8 \(N, 3, 6, 5\)"),
        ("image_classification", pixels(2).transpose(0, 2, 3, 1), r"uint8 \(N, 3, 6, 5\)"),
        ("poetry", pixels(2), "poetry"),
    ],
    ids=["none", "float", "grey", "channels last", "kind"],
)
def test_samples_and_kinds_that_cannot_be_verified_are_refused(folder, kind, samples, message):
    """Samples that do not fit the model's input cannot verify it; a task of an unknown kind is refused."""
    task = task_of(small_network())
    task.kind = kind
    with pytest.raises(CheckpointError, match=message):
        export(task, folder, samples, RUN)
    assert not folder.bundle.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    """An unwritable folder is an environment error: exit code 3."""
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="file/bundle cannot be written"):
        export(task_of(small_network()), RunFolder(tmp_path / "file"), pixels(2), RUN)


def test_exports_of_one_run_at_the_same_time_all_succeed(tmp_path):
    """Each replaces the bundle of another, at any moment; the last one stays, and nothing else."""
    target, errors = tmp_path / "bundle", []

    def export_often(number):
        try:
            for _ in range(100):
                with bundle.replacement_for(target) as new:
                    (new / "file").write_text(str(number))
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=export_often, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert (target / "file").read_text() in "0123"
