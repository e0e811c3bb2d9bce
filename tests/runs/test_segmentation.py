"""Image segmentation: masks match their images, metrics cover all scored pixels, and a run works end to end."""

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import weights
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score
from tiny import csv_rows
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import deeplightning as dl
from deeplightning.config.examine import load_config
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.masked import resized
from deeplightning.figures.class_plots import OPACITY, overlay
from deeplightning.image_spec import ImageSpec
from deeplightning.kinds import CLASS_COLOURS, KINDS, MAX_COMPARED_NUMBERS
from deeplightning.model.unet import UNet
from deeplightning.run.assemble import init_module
from deeplightning.run.resolve_auto import class_counts
from deeplightning.task.segmentation import IoU, PixelAccuracy, Segmentation
from serve.app import application
from serve.bundle import Bundle
from serve.prediction import Service

CLASSES = ["ground", "low", "high"]

CONFIG = """\
seed: 7
stages: [train, validate, test, predict]
data:
  root: ROOT
  module:
    type: deeplightning.data.masks.MaskFolder
    params: {class_names: [ground, low, high], image_size: 16, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}
  batch_size: 3
model:
  module: {type: deeplightning.task.segmentation.Segmentation}
  network: {type: deeplightning.model.unet.UNet, params: {num_classes: 3, width: 4, depth: 2}}
  optimizer: {type: torch.optim.Adam, params: {lr: 0.02}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 3, checkpoint: {monitor: val_iou, mode: max}}
logger: {params: {tracking_uri: STORE, system_metrics: false}, log_every_n_steps: 2}
"""


def draw(top: Path, name: str, random: np.random.RandomState, size=(16, 16), ending="png") -> None:
    """Write an image whose brightness encodes the classes, and its mask, which ignores the first row of pixels."""
    classes = np.kron(random.randint(0, 3, (size[0] // 4, size[1] // 4)), np.ones((4, 4))).astype(np.uint8)
    pixels = classes[..., None] * 90 + random.randint(0, 60, (*size, 3))
    classes[0] = 255
    for folder in ("images", "masks"):
        (top / folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(top / "images" / f"{name}.{ending}")
    mask = Image.fromarray(classes)
    if len(name) % 2:
        mask.putpalette([200, 30, 30] * 256)  # mode P: its values are palette indices
    mask.save(top / "masks" / f"{name}.png")


def fill(top: Path, count: int, seed: int = 0, **options: object) -> Path:
    random = np.random.RandomState(seed)
    for number in range(count):
        draw(top, f"{'x' * (number % 2)}{number:02}", random, **options)
    return top


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """20 images with masks."""
    return fill(tmp_path_factory.mktemp("masks"), 20)


@pytest.fixture(scope="module")
def config(tmp_path_factory, root, store):
    path = tmp_path_factory.mktemp("config") / "segmentation.yaml"
    path.write_text(CONFIG.replace("ROOT", str(root)).replace("STORE", str(store)))
    return path


def module(config, *overrides):
    """Return the data module of a config after `setup`."""
    made = init_module(load_config(config, list(overrides)), "data")
    made.setup()
    return made


# ---- files


def test_pictures_and_masks_belong_together(config, root):
    """The seed splits the files 80/10/10. A batch has images, masks with 255 for ignored pixels, and indices; masks may
    have a palette. Batches prepared on demand are equal."""
    data, again = module(config), module(config)
    sets = {split: data.dataset(split) for split in ("train", "val", "test")}
    assert [len(dataset) for dataset in sets.values()] == [16, 2, 2]
    for split, dataset in sets.items():
        assert list(again.dataset(split).samples.items) == list(dataset.samples.items)
    other = module(config, "seed=8").dataset("train")
    assert list(other.samples.items) != list(sets["train"].samples.items)
    forms = {"image": (torch.uint8, 4), "mask": (torch.uint8, 3), "index": (torch.int64, 1)}
    for dataset in sets.values():
        batch = dataset[np.arange(len(dataset))]
        assert {name: (v.dtype, v.ndim) for name, v in batch.items()} == forms
        for path, image, mask in zip(dataset.samples.items, batch["image"], batch["mask"], strict=True):
            np.testing.assert_array_equal(data.image_spec.decode(path).transpose(2, 0, 1), image)
            np.testing.assert_array_equal(np.asarray(Image.open(root / "masks" / f"{Path(path).stem}.png")), mask)
            assert (mask[0] == 255).all()
            assert mask[1:].max() <= 2
    on_demand = module(config, "data.module.params.in_memory=false")
    wanted = sets["train"][np.arange(16)]
    for name, values in on_demand.dataset("train")[np.arange(16)].items():
        assert torch.equal(values, wanted[name])
    pixels = wanted["mask"][wanted["mask"] != 255]
    for made in (data, on_demand):
        assert class_counts(made, 256)[:255].tolist() == torch.bincount(pixels.flatten(), minlength=255).tolist()


def test_train_val_and_test_folders(config, tmp_path):
    """Folders named train, val and test are used as such, with files at any depth; num_splits takes precedence."""
    for number, (split, count) in enumerate((("train", 9), ("val", 3), ("test", 2))):
        fill(tmp_path / split, count, seed=number)
    draw(tmp_path / "train", "deep/er/x", np.random.RandomState(1), ending="jpg")
    where = f"data.root='{tmp_path}'"
    assert [len(module(config, where).dataset(s)) for s in ("train", "val", "test")] == [10, 3, 2]
    assert [len(module(config, where, "data.num_splits=5").dataset(s)) for s in ("train", "val")] == [8, 2]
    limited = module(config, where, "data.module.params.limit=4")
    batch = limited.dataset("train")[np.arange(4)]
    complete = module(config, where).dataset("train")
    for path, mask in zip(limited.dataset("train").samples.items, batch["mask"], strict=True):
        assert torch.equal(mask, complete.large["mask"][complete.samples.items.index(path)])


@pytest.mark.parametrize("resize", ["stretch", "crop", "pad"])
@pytest.mark.parametrize("size", [(20, 40), (40, 20), (8, 8), (16, 16)])
def test_a_mask_is_resized_as_its_picture(resize, size):
    """Class and brightness stay aligned except at edges; mask values are not interpolated, and padding is ignored."""
    classes = np.zeros(size, dtype=np.uint8)
    classes[: size[0] // 2, size[1] // 2 :] = 2
    spec = ImageSpec(16, 16, mode="L", resize=resize)
    picture, mask = spec.from_array(classes * 100)[..., 0], resized(classes, spec)
    assert set(np.unique(mask)) <= {0, 2, 255}
    padded = mask == 255
    assert padded.any() == (resize == "pad" and size[0] != size[1])
    assert (picture[padded] == 0).all()
    sure = ~padded & ((picture < 20) | (picture > 180))
    assert sure.sum() > 0.7 * (~padded).sum()
    np.testing.assert_array_equal(picture[sure] > 100, mask[sure] == 2)


def test_a_mask_matches_a_picture_with_an_exif_rotation(config, tmp_path):
    """The sizes of image and mask are compared after the EXIF rotation."""
    fill(tmp_path, 12)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 12)).save(tmp_path / "images" / "turned.jpg", exif=exif)
    Image.new("L", (12, 20), 1).save(tmp_path / "masks" / "turned.png")
    data = module(config, f"data.root='{tmp_path}'")
    found = [s for s in ("train", "val", "test") for p in data.dataset(s).samples.items if "turned" in p]
    assert len(found) == 1


def other_size(root):
    Image.new("L", (16, 15)).save(root / "masks" / "02.png")


def outside(root):
    mask = np.zeros((16, 16), dtype=np.uint8)
    mask[3, 5] = 3
    Image.fromarray(mask).save(root / "masks" / "02.png")


def red(root):
    Image.new("RGB", (16, 16), "red").save(root / "masks/02.png")


def cut(root):
    path = root / "masks" / "02.png"
    path.write_bytes(path.read_bytes()[:60])


@pytest.mark.parametrize(
    ("break_it", "place", "words"),
    [
        (other_size, "masks/02.png", r"this mask has 16 x 15 pixels, its picture .*images/02.png has 16 x 16"),
        (outside, "masks/02.png", r"value 3 \(row 3, column 5\) is not a class. The classes are \[0, 1, 2, 255\]"),
        (lambda root: (root / "masks" / "02.png").unlink(), "images/02.png", "this picture has no mask; it would be"),
        (red, "masks/02.png", r"value \[255, 0, 0\] \(row 0, column 0\) is not a class. The classes are"),
        (cut, "masks/02.png", "cannot be used as a mask"),
        (lambda root: (root / "masks/02.png").write_bytes(b"no"), "masks/02.png", "a mask must be a PNG file"),
        (lambda root: (root / "images/02.png").write_bytes(b"no"), "images/02.png", "cannot be used as an image"),
        (lambda root: draw(root, "02", np.random.RandomState(0), ending="jpg"), "images/02.png", "another file has th"),
        (lambda root: (root / "masks").rename(root / "Masks"), "", "holds no folder `masks`"),
        (lambda root: [path.unlink() for path in (root / "images").iterdir()], "images", "holds no picture"),
    ],
)
@pytest.mark.parametrize("in_memory", ["true", "false"])
def test_files_that_do_not_fit(break_it, place, words, in_memory, config, tmp_path):
    """A wrong file is reported with its path and exit code 3, at the start or when its batch is prepared."""
    root = fill(tmp_path / "root", 12)
    break_it(root)

    def read_all() -> None:
        data = module(config, f"data.root='{root}'", f"data.module.params.in_memory={in_memory}")
        for split in ("train", "val", "test"):
            dataset = data.dataset(split)
            dataset[np.arange(len(dataset))]

    with pytest.raises(DataError, match=words) as error:
        read_all()
    assert str(root / place) in str(error.value)
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("class_names=road", "class_names must be a list of 1 to 255 different names, starting with class 0"),
        ("class_names=[a,a]", "class_names must be a list"),
        ("ignore=2", "ignore must be null or a value that is not a class, not 2, the value of high"),
        ("ignore=[1,2]", r"params.ignore: a value is a number from 0 to 65535, or a colour"),
        ("values=[0,1]", r"values must be 3 different values, one for each of class_names, not \[0, 1\]"),
        ("values=[0,1,[1,1,256]]", r"params.values: a value is a number from 0 to 65535, or a colour"),
    ],
)
def test_impossible_params(params, words, config):
    """Params that contradict each other are an error of the config."""
    with pytest.raises((DataConfigError, ValueError), match=words):
        init_module(load_config(config, [f"data.module.params.{params}"]), "data")


@pytest.mark.parametrize("in_memory", ["true", "false"])
def test_masks_of_one_class_are_a_fault(config, tmp_path, in_memory):
    """Masks with fewer than two classes, or with ignored pixels only, end a run with exit code 3."""
    fill(tmp_path, 12)
    where = [f"data.root='{tmp_path}'", f"data.module.params.in_memory={in_memory}"]
    for path in (tmp_path / "masks").iterdir():
        Image.fromarray(np.kron([[1, 255], [255, 1]], np.ones((8, 8))).astype(np.uint8)).save(path)
    with pytest.raises(DataError, match=r"\d training masks hold fewer than two classes") as error:
        module(config, *where)
    assert error.value.exit_code == 3
    for path in (tmp_path / "masks").iterdir():
        Image.new("L", (16, 16), 255).save(path)
    with pytest.raises(DataError, match="training masks hold fewer than two classes"):
        module(config, *where)


def test_augmentation_moves_picture_and_mask_alike(config):
    """A flip mirrors both or neither, pixels that a shift adds are ignored, and validation data is not augmented."""
    flip, crop = (f"type: deeplightning.data.augment.Random{name}" for name in ("HorizontalFlip", "Crop"))
    data = module(config, f"data.module.params.augment=[{{{flip}}}, {{{crop}, params: {{padding: 3}}}}]")
    data.trainer = SimpleNamespace(training=True)
    batch = data.dataset("train")[np.arange(16)]
    shown = torch.where(batch["mask"] == 255, 200, batch["mask"])
    batch["image"] = shown[:, None].expand(-1, 3, -1, -1).contiguous()  # the image shows the mask
    torch.manual_seed(0)
    moved = data.on_after_batch_transfer(batch, 0)
    assert moved["mask"].shape == batch["mask"].shape
    assert moved["mask"].dtype == moved["image"].dtype == torch.uint8
    assert sum(not torch.equal(a, b) for a, b in zip(moved["mask"], batch["mask"], strict=True)) > 12
    scored = moved["mask"] != 255
    assert torch.equal(moved["image"][:, 0][scored], moved["mask"][scored])
    assert set(moved["image"][:, 0][~scored].unique().tolist()) == {0, 200}  # 0: added, 200: ignored before as well
    data.trainer.training = False
    assert torch.equal(data.on_after_batch_transfer(batch, 0)["mask"], batch["mask"])


# ---- metrics


def test_metrics_equal_scikit_learns():
    """Mean IoU over the classes that occur, the IoU of one class, and pixel accuracy are exact over unequal batches."""
    random = np.random.RandomState(0)
    metrics = {"iou": IoU(), "one": IoU(of=2), "acc": PixelAccuracy()}
    outputs = torch.from_numpy(random.rand(7, 5, 6, 4))
    outputs[:, 3] = 0  # a class that is never predicted
    truth = torch.from_numpy(random.choice([-100, 0, 1, 2], (7, 6, 4)))  # and classes that never occur
    for part in (slice(0, 3), slice(3, 4), slice(4, 7)):
        of_batch = {name: float(metric(outputs[part], truth[part])) for name, metric in metrics.items()}
        kept = truth[part] >= 0
        expected = accuracy_score(truth[part][kept], outputs[part].argmax(1)[kept])
        assert of_batch["acc"] == pytest.approx(expected)
    kept = truth >= 0
    true, answered = truth[kept].numpy(), outputs.argmax(1)[kept].numpy()
    shares = jaccard_score(true, answered, average=None, labels=np.union1d(true, answered))
    assert float(metrics["iou"].compute()) == pytest.approx(shares.mean())
    assert float(metrics["one"].compute()) == pytest.approx(jaccard_score(true == 2, answered == 2))
    assert float(metrics["acc"].compute()) == pytest.approx(accuracy_score(true, answered))
    with pytest.raises(ValueError, match="of must be a class number"):
        IoU(of=-1)


def test_a_score_of_one_class_is_a_warning(caplog):
    """Where a network that always predicts the only class would score 1, one warning is logged, not one per epoch."""
    truth = torch.full((2, 4, 4), 2)
    outputs = nn.functional.one_hot(truth, 3).permute(0, 3, 1, 2).float()
    for metric in (IoU(), PixelAccuracy()):
        caplog.clear()
        for _ in range(2):
            metric(outputs, truth)
            assert metric.compute() == 1
            metric.reset()
        (message,) = caplog.messages
        assert message.endswith("network that always answers this class scores 1. Check the masks of this set")
        assert f"{type(metric).__name__}: all scored pixels are of class 2" in message
        caplog.clear()
        metric(outputs, truth - 1)
        metric(outputs, truth)
        assert metric.compute() < 1
        assert caplog.records == []


def test_the_pictures_with_most_mistakes_are_kept():
    """The sheet has the images with the lowest pixel accuracy, worst first; images without scored pixels come last."""
    task = Segmentation.__new__(Segmentation)
    task.__dict__["_sheet"] = None
    truth = torch.zeros(12, 4, 4, dtype=torch.int64)
    truth[:, 0] = -100
    outputs = torch.zeros(12, 2, 4, 4)
    for number in range(12):
        outputs[number, 1].view(-1)[4 : 4 + number] = 1  # so many pixels are wrong
    images = torch.arange(12, dtype=torch.uint8).view(12, 1, 1, 1).expand(12, 3, 4, 4)
    for part in (slice(0, 5), slice(5, 5), slice(5, 12)):
        task.remember(images[part], outputs[part], truth[part])
    kept = task.__dict__["_sheet"]
    assert kept["image"][:, 0, 0, 0].tolist() == [11, 10, 9, 8, 7, 6, 5, 4]
    assert (-kept["worth"]).tolist() == pytest.approx([1 - number / 12 for number in range(11, 3, -1)])
    task.__dict__["_sheet"], truth[0] = None, -100
    task.remember(images[:2], outputs[:2], truth[:2])
    assert (-task.__dict__["_sheet"]["worth"]).tolist() == pytest.approx([11 / 12, 1.0])


def test_an_overlay_blends_classes_and_picture():
    """A pixel is half the colour of its class and half the image; an ignored pixel is nearly white."""
    classes = np.array([[[1, -100], [13, 0]]])
    shown = overlay(np.full((1, 2, 2, 1), 100, np.uint8), classes)
    expected = [[OPACITY * part + (1 - OPACITY) * 100 for part in CLASS_COLOURS[n]] for n in (1, 1, 0)]
    assert np.abs(shown[0, [0, 1, 1], [0, 0, 1]] - expected).max() <= 0.5
    assert shown[0, 0, 1].min() > 220


# ---- runs


@pytest.fixture(scope="module")
def run(command, config, tmp_path_factory):
    return command("train", config, cwd=tmp_path_factory.mktemp("run"), code=0)


def results(folder: Path, stage: str) -> dict[str, float]:
    return json.loads((folder / f"{stage}_results.json").read_text())


def test_a_run_learns_and_shows(run):
    """IoU and accuracy rise above chance, and the run writes a sheet of images and a row of predictions per image."""
    found = results(run.folder, "val")
    assert found["val_iou"] > 0.4
    assert found["val_acc"] > 0.6
    with Image.open(run.folder / "val_segmentation.png") as shown:
        assert shown.width > 500
    assert (run.folder / "val_segmentation.svg").read_text().count("<image") == 3 * 2
    rows = csv_rows(run.folder / "test_predictions.csv")
    assert len(rows) == 2
    shares = [sum(float(row[f"share_{name}"]) for name in CLASSES) for row in rows]
    assert shares == pytest.approx([1, 1], abs=1e-5)
    assert np.mean([float(row["acc"]) for row in rows]) == pytest.approx(results(run.folder, "test")["test_acc"])


def test_masks_over_http_are_those_of_the_network(run, root):
    """The server answers with the classes of plain torch, as a PNG or in base64 with the pixel count of each class, and
    so does `predict` in Python. A body that is not an image gets 415."""
    bundle = Bundle.open(run.folder)
    client = application(Service(bundle)).test_client()
    network = UNet(3, width=4, depth=2)
    network.load_state_dict({name.removeprefix("network."): t for name, t in weights(run.folder / "best.ckpt").items()})
    assert client.get("/info").json["labels"] == CLASSES
    for path in sorted((root / "images").iterdir()):
        pixels = torch.from_numpy(bundle.spec.decode(path).copy()).permute(2, 0, 1)[None]
        with torch.no_grad():
            expected = network.eval()((pixels / 255 - 0.5) / 0.5)[0].argmax(0).numpy()
        answer = client.post("/predict", data=path.read_bytes()).json
        mask = Image.open(io.BytesIO(base64.b64decode(answer["mask"])))
        assert (mask.mode, mask.size, answer["width"], answer["height"]) == ("P", (16, 16), 16, 16)
        np.testing.assert_array_equal(np.asarray(mask), expected)
        assert [tuple(mask.getpalette()[3 * n : 3 * n + 3]) for n in range(3)] == [*CLASS_COLOURS[:3]]
        counts = np.bincount(expected.ravel(), minlength=3).tolist()
        assert [(one["label"], one["pixels"], one["share"]) for one in answer["classes"]] == [
            (name, count, count / 256) for name, count in zip(CLASSES, counts, strict=True)
        ]
        alone = client.post("/predict", data=path.read_bytes(), headers={"Accept": "image/png"})
        assert alone.mimetype == "image/png"
        assert alone.data == base64.b64decode(answer["mask"])
    assert dl.load_run(run.folder).predict([path]) == [answer]
    both = {"images": [base64.b64encode(path.read_bytes()).decode()] * 2}
    assert client.post("/predict", json=both).json == {"predictions": [answer, answer]}
    refused = client.post("/predict", data=b"no picture")
    assert (refused.status_code, list(refused.json)) == (415, ["ERROR"])


def test_golden_answers_of_large_masks_are_of_some_pixels():
    """A bundle keeps every s-th pixel of a large answer, to limit its size, and all pixels of a small one."""
    kind = KINDS["image_segmentation"]
    small, large = np.zeros((2, 3, 16, 16)), np.random.default_rng(0).random((1, 21, 512, 480))
    assert kind.compared(small).shape == small.shape
    kept = kind.compared(large)
    assert MAX_COMPARED_NUMBERS / 4 < kept[0].size <= 1.2 * MAX_COMPARED_NUMBERS
    np.testing.assert_array_equal(kept[0, :, 1, 2], large[0, :, 13, 26])
    assert KINDS["image_reconstruction"].compared(large) is large


@pytest.mark.slow
def test_three_processes_judge_as_one(run, command, config, tmp_path):
    """IoU and accuracy are bit-identical for one process and three, two of which have no image at the last step."""
    settings = ["stages=[validate]", f"test.ckpt='{run.folder / 'best.ckpt'}'", "data.num_splits=5", "data.fold=4"]
    found = []
    for ranks in (1, 3):
        words = [*settings, "data.batch_size=1", f"engine.processes={ranks}"]
        outcome = command("train", config, *words, cwd=tmp_path, ranks=ranks, code=0)
        assert (outcome.folder / "val_predictions.csv").read_text().count("\n") == 1 + 4
        found.append({name: results(outcome.folder, "val")[name] for name in ("val_iou", "val_acc")})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.network.params.num_classes=4", "the data has 3 classes, the network 4 outputs per pixel; set model"),
        ("data.module.params.image_size=18", "pictures of 18x18 pixels cannot be halved 2 times"),
        (
            "model.network={type: deeplightning.model.resnet.ResNet18, params: {num_classes: 3}}",
            "ResNet18 gives (1, 3), not (B, K, H, W): a number per class and pixel",
        ),
        (
            "model.network={type: torch.nn.Conv2d, params: {in_channels: 3, out_channels: 3, kernel_size: 3}}",
            "torch.nn.Conv2d gives 14x14 pixels for pictures of 16x16; segmentation needs one for each",
        ),
        ("train.checkpoint.monitor=val_iuo", "no metric `val_iuo` is logged. Did you mean val_iou?"),
    ],
)
def test_what_does_not_fit_is_one_note(override, words, command, config, tmp_path):
    """Each mismatch between data, network and metric ends a training with exit code 2 and one error."""
    outcome = command("train", config, override, cwd=tmp_path, code=2)
    assert words in outcome.err, outcome
    assert outcome.err.count("error: ") == 1


def test_a_config_is_checked_and_tried_without_its_pictures(command, config, tmp_path):
    """`check` and `check --dry-run` need no data: the dry run uses a synthetic batch with masks."""
    for more in ([], ["--dry-run"]):
        command("check", config, "data.root='/nowhere'", *more, cwd=tmp_path, code=0)


def test_a_deterministic_step_on_a_gpu_adds_the_pixels_itself(config, monkeypatch):
    """torch has no deterministic kernel on a GPU for the mean of a loss over pixels."""
    task, seen, original = init_module(load_config(config), "model"), [], nn.functional.cross_entropy

    def spy(*given, **named):
        seen.append(named["reduction"])
        return original(*given, **named)

    monkeypatch.setattr(nn.functional, "cross_entropy", spy)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    task._combines_batches = False
    with FakeTensorMode():
        truth = torch.zeros(2, 4, 4, dtype=torch.long, device="cuda")
        task.train()._weighted(torch.empty(2, 3, 4, 4, device="cuda"), truth)
    assert seen == ["none"]
