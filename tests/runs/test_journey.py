"""The whole journey: a config is trained, tracked, tested, exported, served and asked, by the commands of a user."""

import csv
import json
import re
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml
from checks import write_mnist
from commands import real
from conftest import digest
from PIL import Image
from served import Server, encoded
from sklearn.datasets import load_digits
from tiny import SEED

from deeplightning.config.tree import parse, plain

ROOT = Path(__file__).parents[2]
BASE = ROOT / "configs" / "base.yaml"


@pytest.fixture(scope="module")
def base(store, place):
    """`configs/base.yaml` for two epochs, in a fresh process."""
    often = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.2"}
    return real("train", BASE, "train.num_epochs=2", f"logger.params.tracking_uri={store}", cwd=place, **often, code=0)


PICTURES = [
    *("val_confusion_matrix", "val_classes", "val_predictions"),
    *("test_confusion_matrix", "test_classes", "test_reliability"),
]


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_everything_a_run_leaves_lies_in_the_folder_of_the_last_line(base, store):
    """A run leaves its config, weights, log, pictures, results and bundle, and nothing else anywhere."""
    left = {str(path.relative_to(base.folder)) for path in base.folder.rglob("*") if path.is_file()}
    assert base.folder.is_relative_to(store)
    assert left == {
        *("cfg.yaml", "environment.json", "code.zip", "metrics.jsonl", ".metrics.sent"),
        *("last.ckpt", "best.ckpt", "best.json", "logs/rank_0.log", "samples.npz"),
        *("test_results.json", "test_predictions.csv", "test_mistakes.json", "places.json", "report.html"),
        *(f"{name}.{ending}" for name in PICTURES for ending in ("svg", "png")),
        *("bundle/model.onnx", "bundle/weights.safetensors", "bundle/bundle.json"),
    }


def test_the_start_the_epochs_and_the_end_are_told(base):
    """A table of at most fourteen lines, a line per epoch, the best, the duration and the results, without colour."""
    start = next(number for number, line in enumerate(base.out.splitlines()) if line.startswith("first loss"))
    assert 8 <= start <= 14, base
    for text in ("14,538 parameters (0.015 M)", "1,439 training, 179 validation samples"):
        assert text in base.out
    for text in ("epoch 1 of 2  train_acc", "epoch 2 of 2  train_acc", "best       val_acc", "duration", "results"):
        assert text in base.out
    assert len(re.findall(r"^epoch \d of 2  .*  \(\d+\.\d s, [\d,.]+ samples/s\)$", base.out, re.M)) == 2
    assert "32 samples a step" in base.out
    assert "\x1b" not in base.out + base.err
    assert base.err == ""
    said = (base.folder / "logs" / "rank_0.log").read_text()
    assert "epoch 2 of 2" in said
    assert "first loss" in said


def test_predictions_are_in_data_order_and_agree_with_the_results(base):
    """There is a row per test sample, in data order, and their share of right ones is `test_acc`."""
    found = rows(base.folder / "test_predictions.csv")
    assert [int(row["index"]) for row in found] == list(range(179))
    right = sum(row["label"] == row["predicted_class"] for row in found)
    results = json.loads((base.folder / "test_results.json").read_text())
    assert results["test_acc"] == pytest.approx(right / 179, abs=1e-7)
    assert set(results) == {"test_acc", "test_loss"}


def test_the_run_is_tracked_whole(base, tracked):
    """One finished run with the config as parameters, the metrics by name from step 0 on, and where it came from."""
    run = tracked(base.folder)
    assert run.status == "FINISHED"
    assert run.params["model/optimizer/params/lr"] == "0.003"
    assert run.params["train/num_epochs"] == "2"
    series = run.series()
    assert {"train_acc", "val_loss", "train_loss_epoch"} <= set(series)
    for name in ("train_loss", "lr"):
        assert [step for step, _ in series[name]] == list(range(0, 90, 10))
    for name in ("val_acc", "train_acc_epoch"):
        assert [step for step, _ in series[name]] == [44, 89]
    assert series["test_acc"][0][1] == json.loads((base.folder / "test_results.json").read_text())["test_acc"]
    assert not [name for name in series if name.endswith("_step")]
    assert [name for name in run.metrics if name.startswith("system/")]
    assert " train " in run.tags["command"]
    assert "configs/base.yaml" in run.tags["command"]
    environment = json.loads((base.folder / "environment.json").read_text())
    assert run.tags.get("git_commit") == (environment.get("git") or {}).get("commit")
    assert "torch 2" in run.tags["versions"]


def test_a_saved_config_is_the_config(base, command, place):
    """`explain` prints what `cfg.yaml` says, every value set by this file."""
    saved = base.folder / "cfg.yaml"
    explained = command("explain", saved, cwd=place).out
    assert plain(parse(explained, "explained", [])) == plain(parse(saved.read_text(), "saved", []))
    assert explained.count(f"# {saved}:") == len(explained.splitlines()) - explained.count(":\n")
    assert yaml.safe_load(saved.read_text())["engine"]["num_nodes"] == 1


def test_a_saved_config_trains_to_the_same_bits(base, command, place, tracked):
    """The same run again from its `cfg.yaml`: a new run with identical metrics and identical weights."""
    again = command("train", base.folder / "cfg.yaml", cwd=place, code=0)
    assert again.folder != base.folder
    assert tracked(again.folder).series() == tracked(base.folder).series()
    for name in ("last.ckpt", "best.ckpt"):
        assert digest(again.folder / name) == digest(base.folder / name)
    for name in ("bundle/weights.safetensors", "test_predictions.csv"):
        assert (again.folder / name).read_bytes() == (base.folder / name).read_bytes()


CLASSES = ["cross", "disc", "stripes"]


def drawing(kind, generator):
    """A picture of a random size and colour, uint8 (H, W, 3)."""
    height, width = generator.integers(20, 60, 2)
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    shapes = {
        "cross": (abs(x) < 0.2) | (abs(y) < 0.2),
        "disc": x**2 + y**2 < 0.6,
        "stripes": np.sin(12 * x) > 0,
    }
    front, back = generator.integers(0, 256, (2, 3))
    noise = generator.integers(-20, 20, (height, width, 3))
    return np.clip(np.where(shapes[kind][..., None], front, back) + noise, 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Three classes of 60 JPEGs of different sizes each."""
    root, generator = tmp_path_factory.mktemp("own pictures"), np.random.default_rng(0)
    for kind in CLASSES:
        (root / kind).mkdir()
        for number in range(60):
            Image.fromarray(drawing(kind, generator)).save(root / kind / f"{number}.jpg", quality=90)
    return root


FOLDER = [
    "data.module={type: deeplightning.data.image_folder.ImageFolder, params: {image_size: 24, in_memory: false}}",
    "model.network.params={num_classes: 3, num_channels: 3, image_size: 24}",
    "data.module.params.augment=[{type: deeplightning.data.augment.RandomHorizontalFlip}]",
    "~model.optimizer",
    "model.optimizer={type: torch.optim.Adam, params: {lr: 0.003}}",
    "train.num_epochs=3",
]


@pytest.fixture(scope="module")
def own(train, pictures):
    """A training on them from disk, exported."""
    return train(*FOLDER, f"data.root='{pictures}'", "train.export=true")


@contextmanager
def served(folder, place):
    """The real server on a run, at a free port; its address. What it says lies in `place`."""
    server = Server(folder, place / "server")
    try:
        yield server.url
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(own, tmp_path_factory):
    with served(own.folder, tmp_path_factory.mktemp("server")) as address:
        yield address


def ask(address, data, kind="image/jpeg"):
    request = urllib.request.Request(f"{address}/predict", data, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def assert_answers(answers, expected):
    """Answers of the endpoint have the classes and labels of the rows of `predict`, and probabilities to 1e-5."""
    for answer, row in zip(answers, expected, strict=True):
        assert (answer["predicted_class"], answer["label"]) == (row["predicted_class"], row["predicted_label"])
        assert float(answer["predicted_probability"]) == pytest.approx(float(row["predicted_probability"]), abs=1e-5)


@pytest.fixture(scope="module")
def predict(command, place):
    """`predict(run, files)` gives the rows that `deeplightning predict` prints."""

    def run(folder, files):
        predicted = command("predict", folder, *files, cwd=place, code=0)
        return list(csv.DictReader(predicted.out.splitlines()))

    return run


def test_every_picture_is_answered_over_http_as_by_predict(own, server, pictures, predict):
    """180 pictures by themselves, and 130 in one form and in one JSON: class, label and probability of the endpoint and
    of `deeplightning predict` agree to 1e-5."""
    files = sorted(pictures.glob("*/*.jpg"))
    found = predict(own.folder, files)
    assert [row["path"] for row in found] == [str(path) for path in files]
    assert {row["predicted_label"] for row in found} <= set(CLASSES)
    contents = [path.read_bytes() for path in files]
    assert_answers([ask(server, content) for content in contents], found)
    head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'
    form = b"\r\n".join(head + content for content in contents[:130]) + b"\r\n--x--\r\n"
    listed = json.dumps({"images": [encoded(content) for content in contents[:130]]}).encode()
    for body, kind in ((form, "multipart/form-data; boundary=x"), (listed, "application/json")):
        assert_answers(ask(server, body, kind)["predictions"], found[:130])


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    """scikit-learn's digits as MNIST's four files, 28 x 28."""

    digits = load_digits()
    images = np.kron(digits.images * 255 / 16, np.ones((1, 3, 3)))  # (N, 24, 24)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    return write_mnist(tmp_path_factory.mktemp("mnist"), images, digits.target, 1500)


def test_the_seed_configuration_runs_as_it_is(mnist, command, place, store, tracked, tmp_path):
    """The text of the project's beginning trains with `engine.gpus=null`, tracked under the experiment Default."""
    (tmp_path / "seed.yaml").write_text(SEED)
    overrides = ["engine.gpus=null", f"data.root={mnist}", f"logger.params.tracking_uri={store}", "train.num_epochs=4"]
    done = command("train", tmp_path / "seed.yaml", *overrides, cwd=place, code=0)
    assert "SimpleCNN: 28,938 parameters (0.029 M)" in done.out
    assert "warning: engine.backend: deepspeed_stage_3" in done.err
    run = tracked(done.folder)
    assert run.status == "FINISHED"
    assert run.metrics["val_acc"] > 0.5
    assert done.folder.parent.parent == store / "0"
    assert {"train_loss", "train_acc", "val_loss", "val_acc", "lr"} <= set(run.series())


@pytest.mark.slow
def test_the_seed_configuration_runs_over_two_processes(mnist, jobs, place, store, tracked, tmp_path):
    """By DeepSpeed's stage 3 it trains to the loss of one process, resumes, is exported, and answers as `predict`."""
    (tmp_path / "seed.yaml").write_text(SEED)
    settings = ["engine.gpus=null", f"data.root={mnist}", f"logger.params.tracking_uri={store}", "train.export=false"]

    def train(*overrides, ranks=2):
        spread = [f"engine.processes={ranks}", f"data.batch_size={512 // ranks}"]
        return jobs("train", tmp_path / "seed.yaml", *settings, *spread, *overrides, cwd=place, ranks=ranks, code=0)

    first = train("train.num_epochs=1")
    assert "backend: deepspeed_stage_3" in (first.folder / "cfg.yaml").read_text()
    done = train("train.num_epochs=2", f"train.resume_ckpt='{first.folder}'")
    expected = tracked(train("train.num_epochs=2", ranks=1).folder).metrics["val_loss"]
    assert tracked(done.folder).metrics["val_loss"] == pytest.approx(expected, abs=1e-3)

    jobs("export", done.folder, cwd=place, code=0)
    picture = ROOT / "examples" / "digits" / "3.png"
    (predicted,) = csv.DictReader(jobs("predict", done.folder, picture, cwd=place).out.splitlines())
    with served(done.folder, tmp_path) as address:
        assert_answers([ask(address, picture.read_bytes(), "image/png")], [predicted])
