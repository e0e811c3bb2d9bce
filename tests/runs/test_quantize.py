"""A bundle gets an int8 model whose scores stay within limits, or stays unchanged; the figures are reported."""

import base64
import functools
import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import pytorch_lightning as pl
import torch
from exported import exported
from onnx import numpy_helper
from torch import nn

from deeplightning.export import int8 as module
from deeplightning.export.int8 import quantize
from deeplightning.faults import CheckpointError, SetupError
from deeplightning.image_spec import ImageSpec
from deeplightning.run.make_bundle import export_run, quantize_run
from deeplightning.runfolder import RunFolder, card_digest, golden_digest
from serve.bundle import Bundle, BundleError

NUMBER = 500


class Classifier(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images):  # uint8 (N, 3, 6, 5)
        return torch.softmax(self.layers(images.float() / 255), dim=1)  # (N, 3)


def brightest_channel(*, outlier=0.0):
    """Return a network that finds the brightest of three channels. An `outlier` shares its range with the relevant
    values, and int8 has 256 steps for both."""
    mixes = [[1.0, 0.1, 0.0], [0.0, 1.0, 0.1], [0.1, 0.0, 1.0]]
    first, second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 1)
    first.weight.data, first.bias.data = torch.tensor(mixes)[:, :, None, None], torch.zeros(3)
    second.weight.data = torch.eye(4, 3)[:, :, None, None] * 4
    second.bias.data = torch.tensor([0.0, 0.0, 0.0, outlier])
    last = nn.Linear(4, 3, bias=False)
    last.weight.data = torch.eye(3, 4)
    return Classifier(first, nn.ReLU(), second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last).eval()


def pictures(number, seed=0):
    """Return pictures, uint8 (N, 3, 6, 5), in which one channel is slightly brighter, and its index."""
    random = np.random.default_rng(seed)
    classes = np.arange(number) % 3
    images = random.integers(60, 160, (number, 3, 6, 5))
    images[np.arange(number), classes] += 40
    return images.astype(np.uint8), classes


@functools.cache
def bundle(outlier):
    """Return the files of a bundle of `brightest_channel`; an export takes a second, so tests copy it."""
    with tempfile.TemporaryDirectory() as name:
        return contents(exported(Path(name), "image_classification", brightest_channel(outlier=outlier))[1])


def classifier(path, outlier=0.0):
    """Return a run folder with a copy of that bundle."""
    folder = RunFolder(path)
    folder.bundle.mkdir(parents=True)
    for name, content in bundle(outlier).items():
        (folder.bundle / name).write_bytes(content)
    return folder


def validation(number=NUMBER, batch=64):
    images, classes = pictures(number, seed=1)
    return lambda: ((images[at : at + batch], classes[at : at + batch]) for at in range(0, number, batch))


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.bundle.iterdir()}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A run with both models, the previous content of its bundle, and the figures."""
    folder = classifier(tmp_path_factory.mktemp("run"))
    before = contents(folder)
    return SimpleNamespace(folder=folder, before=before, figures=quantize(folder, validation()))


def test_the_bundle_gains_a_model_and_its_accuracy(quantized):
    """Other files stay the same; the card gets the file's digest, the figures, and a new digest."""
    after = contents(quantized.folder)
    card, former = json.loads(after["bundle.json"]), json.loads(quantized.before["bundle.json"])
    assert after.keys() == quantized.before.keys() | {"model.int8.onnx"}
    for name in ("model.onnx", "weights.safetensors"):
        assert after[name] == quantized.before[name]
    assert [path.name for path in quantized.folder.path.iterdir()] == ["bundle"]
    assert card["digest"] == card_digest(card)
    assert card["files"] == {**former["files"], "model.int8.onnx": hashlib.sha256(after["model.int8.onnx"]).hexdigest()}
    assert card["int8"] == quantized.figures
    assert (card["int8"]["images"], card["int8"]["calibration_images"]) == (NUMBER, 256)
    assert card["golden"]["digest"] == golden_digest(card)
    new = {"int8", "digest"}  # the digest covers the answers of the new model too
    unchanged = [{k: v for k, v in content["golden"].items() if k not in new} for content in (card, former)]
    assert unchanged[0] == unchanged[1]
    for key in ("format", "task", "input", "labels", "run"):
        assert card[key] == former[key]


def test_weights_take_seven_bits_and_the_ends_stay_float(quantized):
    """Weights are int8 from -64 to 64 per output channel; scaling of pixels and softmax stay float."""
    graph = onnx.load(quantized.folder.bundle_int8).graph
    weights = [numpy_helper.to_array(one) for one in graph.initializer if one.data_type == onnx.TensorProto.INT8]
    weights = [one for one in weights if one.ndim > 1]
    assert len(weights) == 3
    assert all(abs(one.astype(int)).max() == 64 for one in weights)
    order = [node.op_type for node in graph.node]
    assert order.index("QuantizeLinear") > order.index("Cast")
    assert order[-2:] == ["Gemm", "Softmax"]


def test_the_same_again_gives_the_same_bytes(quantized, tmp_path, capfd):
    """Quantization is deterministic; a second one replaces the first. It prints nothing and leaves the root logger as
    it was, although ONNX Runtime's tools log to it."""
    folder = classifier(tmp_path)
    capfd.readouterr()
    handlers = list(logging.getLogger().handlers)
    quantize(folder, validation(120))
    assert (capfd.readouterr(), logging.getLogger().handlers) == (("", ""), handlers)
    assert quantize(folder, validation()) == quantized.figures
    assert folder.bundle_int8.read_bytes() == quantized.folder.bundle_int8.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def assert_refused(folder, validation, words):
    before = contents(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        quantize(folder, validation)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    assert contents(folder) == before
    assert [path.name for path in folder.path.iterdir()] == ["bundle"]
    return str(caught.value)


def test_a_model_that_int8_makes_worse_is_refused(tmp_path):
    """The message has both figures, the limit and the next step; the bundle stays as it was."""
    folder = classifier(tmp_path, 3000.0)
    note = assert_refused(folder, validation(), "would be [0-9.]+ instead of 100, and the limit is 99.8")
    assert "on 500 validation images" in note
    assert note.endswith("serve it with serve.precision=fp32.")


@pytest.mark.parametrize(("wrong", "taken"), [(0, True), (1, True), (2, False)])
def test_the_fall_is_counted_exactly(tmp_path, wrong, taken):
    """0.2 points of 500 images are one image: a second one that only int8 gets wrong is too many."""
    folder = classifier(tmp_path, 300.0)
    images = pictures(20_000, seed=3)[0]
    with torch.inference_mode():
        ours = brightest_channel(outlier=300.0)(torch.from_numpy(images)).argmax(1).numpy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_FALL_POINTS", 100.0)
        quantize(folder, lambda: [(images[:256], ours[:256])])  # for the answers of the int8 model
    theirs = Bundle.open(folder.bundle, "int8").predict(images).argmax(1)
    same, other = np.flatnonzero(ours == theirs), np.flatnonzero(ours != theirs)
    assert len(other) >= 2
    chosen = np.concatenate([other[:wrong], same[: NUMBER - wrong]])
    judged = [(images[chosen], ours[chosen])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_write_int8", lambda _, __, file, ___: shutil.copy(folder.bundle_int8, file))
        if taken:
            assert quantize(folder, lambda: judged)["accuracy"] == pytest.approx(100 - wrong / 5)
        else:
            with pytest.raises(CheckpointError, match=r"would be 99.6 instead of 100, and the limit is 99.8"):
                quantize(folder, lambda: judged)


def test_what_cannot_be_quantized_says_so(tmp_path):
    """A network without weights, and an empty validation set, end with exit code 4 and the next step."""

    class MeanColour(nn.Module):
        def forward(self, images):
            return torch.softmax(images.float().mean(dim=(2, 3)), dim=1)

    _, weightless = exported(tmp_path / "a", "image_classification", MeanColour().eval())
    assert_refused(weightless, validation(32), "has no layer that int8 would make faster")
    assert_refused(classifier(tmp_path / "b"), list, "There are no validation images to judge")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder, card: folder.bundle_card.write_text(json.dumps({**card, "format": 1})),
        lambda folder, card: folder.bundle_card.write_text(json.dumps({**card, "labels": ["a", "b", "c"]})),
        lambda folder, card: folder.bundle_model.write_bytes(folder.bundle_model.read_bytes()[:-1]),
        lambda folder, card: folder.bundle_card.write_text("[]"),
        lambda folder, card: folder.bundle_card.unlink(),
    ],
    ids=["format", "labels", "model", "JSON", "missing"],
)
def test_a_damaged_bundle_gets_no_int8_model(tmp_path, damage):
    """An edited bundle, or one of an older format, gets no new digest."""
    folder = classifier(tmp_path)
    damage(folder, json.loads(folder.bundle_card.read_text()))
    assert_refused(folder, validation(32), "write it again with `deeplightning export RUN`")


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """A full disk is an environment error with exit code 3; the bundle stays unchanged."""
    folder = classifier(tmp_path)
    before = contents(folder)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(SetupError, match=r"bundle cannot be written: .*No space left"):
        quantize(folder, validation(32))
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_calibration_images_come_from_all_over_the_set():
    """Each image is sampled with the same probability, even if the set is sorted by class."""
    batches = [(np.arange(start, start + 100).reshape(100, 1, 1, 1), None) for start in range(0, 10_000, 100)]
    kept = np.sort(np.array(module._sample(lambda: batches, 10_000)).ravel())
    assert len(np.unique(kept)) == module.CALIBRATION_SAMPLES == 256
    spread = np.abs(kept - np.linspace(0, 10_000, 256)).max()  # of Kolmogorov and Smirnov; 5 % of samples exceed 850
    assert spread < 850


# ---- the server


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda card: card["golden"].pop("int8"), "golden answers"),
        (lambda card: card.update(int8={"accuracy": "os.system"}), "than its golden answers were given with"),
        (lambda card: card.update(int8=[]), "than its golden answers were given with"),
        (
            lambda card: card["golden"].update(int8=base64.b64encode(np.zeros(15, "<f4").tobytes()).decode()),
            "the limit is 0.05",
        ),
    ],
    ids=["no answers", "figures", "no figures", "other answers"],
)
def test_int8_is_checked_like_float32(tmp_path, quantized, change, words):
    """The figures, golden answers and bytes of int8 are checked at start; float32 does not need the file."""
    copy = RunFolder(shutil.copytree(quantized.folder.path, tmp_path / "run"))
    data = bytearray(copy.bundle_int8.read_bytes())
    data[len(data) // 2] ^= 1
    copy.bundle_int8.write_bytes(data)
    with pytest.raises(BundleError, match=r"model.int8.onnx is not the file that was exported"):
        Bundle.open(copy.path, "int8")
    assert Bundle.open(copy.path).precision == "fp32"
    shutil.copy(quantized.folder.bundle_int8, copy.bundle_int8)
    card = json.loads(copy.bundle_card.read_text())
    change(card)
    copy.bundle_card.write_text(json.dumps({**card, "digest": card_digest(card)}))
    with pytest.raises(BundleError, match=words):
        Bundle.open(copy.path, "int8")


# ---- a trained run


@pytest.fixture(scope="module")
def run(train):
    """A run on digits, accurate enough that one changed answer is not decisive."""
    folder = RunFolder(train("train.num_epochs=6", "data.module.params.limit=400", "stages=[train,validate]").folder)
    export_run(folder)
    return folder


def test_a_run_is_quantized_on_its_own_validation_images(run):
    """Each validation image of the run's data module is used once; the output has both figures."""
    output = quantize_run(run)
    figures = json.loads(run.bundle_card.read_text())["int8"]
    number = len(run.stage_predictions("validate").read_text().splitlines()) - 1
    assert (figures["images"], figures["calibration_images"]) == (number, number)
    accuracy = json.loads(run.results("validate").read_text())["val_acc"]
    assert figures["accuracy_fp32"] == pytest.approx(100 * accuracy)
    assert f"in float32 {100 * accuracy:.2f} %, on {number} validation images; kept as {run.bundle_int8}" in output
    assert Bundle.open(run.path, "int8").precision == "int8"


def test_rows_that_fill_up_a_batch_do_not_count(run, monkeypatch):
    """Padding rows, with index -1, are not counted. Without images, or without their classes, int8 is refused."""
    batch = {"image": torch.zeros(3, 1, 8, 8, dtype=torch.uint8), "label": torch.arange(3)}
    data = pl.LightningDataModule()
    data.val_dataloader = lambda: [[{**batch, "index": torch.tensor([0, 1, -1])}, batch]]  # another module has no index
    monkeypatch.setattr("deeplightning.run.make_bundle.init_module", lambda *_: data)
    quantize_run(run)
    assert json.loads(run.bundle_card.read_text())["int8"]["images"] == 5
    data.val_dataloader = lambda: [[{"image": batch["image"]}]]
    with pytest.raises(CheckpointError, match="'image' and 'label'"):
        quantize_run(run)
    monkeypatch.setattr("deeplightning.run.make_bundle.init_module", lambda *_: pl.LightningDataModule())
    with pytest.raises(CheckpointError, match="the data module gives none; serve it with serve"):
        quantize_run(run)


@pytest.mark.parametrize("given", ["pixels", "normalised floats", "floats with weights"])
def test_pictures_are_judged_in_each_form_of_a_batch(run, monkeypatch, given):
    """Normalised pictures are judged as the 8-bit ones they were made of; a batch may have weights."""
    monkeypatch.setattr(module, "MAX_FALL_POINTS", 100)
    pixels, labels = torch.arange(40 * 64).reshape(40, 1, 8, 8) % 256, torch.arange(40) % 10
    spec = ImageSpec.from_dict(json.loads(run.bundle_card.read_text())["input"])
    images = pixels.to(torch.uint8) if given == "pixels" else (pixels / 255 - spec.mean[0]) / spec.std[0]
    batch = (images, labels, torch.ones(40))[: 3 if "weights" in given else 2]
    seen = []
    data = pl.LightningDataModule()
    data.val_dataloader = lambda: [[batch]]
    monkeypatch.setattr("deeplightning.run.make_bundle.init_module", lambda *_: data)
    monkeypatch.setattr(
        "deeplightning.export.int8.quantize", lambda _, validation: seen.extend(validation()) or FIGURES
    )
    quantize_run(run)
    ((inputs, found),) = seen
    assert inputs.dtype == np.uint8
    np.testing.assert_array_equal(inputs, pixels.numpy())
    np.testing.assert_array_equal(found, labels.numpy())


def test_a_run_without_a_data_module_is_not_quantized(run, monkeypatch):
    """A task with its own loaders has no data module; the message names the precision to serve with."""
    monkeypatch.setattr("deeplightning.run.make_bundle.init_module", lambda *_: None)
    with pytest.raises(CheckpointError, match="the data module gives none; serve it with serve"):
        quantize_run(run)


FIGURES = {"accuracy": 1.0, "accuracy_fp32": 1.0, "images": 40}


def test_data_that_are_prepared_differently_now_are_refused(run, monkeypatch):
    """The figures would be those of other inputs than the server's."""
    data = pl.LightningDataModule()
    data.image_spec = ImageSpec(8, 8, "L", mean=(0.123,))
    data.val_dataloader = lambda: [[{"image": torch.zeros(3, 1, 8, 8, dtype=torch.uint8), "label": torch.arange(3)}]]
    monkeypatch.setattr("deeplightning.run.make_bundle.init_module", lambda *_: data)
    with pytest.raises(CheckpointError, match="prepared differently"):
        quantize_run(run)
