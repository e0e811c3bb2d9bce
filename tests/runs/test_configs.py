"""Every shipped config loads without changes, and trains one step on small files of the kind that it reads.

The files are generated: MNIST from scikit-learn's digits, CIFAR-10 and the image folder from random pixels.
"""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checks import load, write_mnist
from PIL import Image
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*/*.yaml")])
NAMES = [str(path.relative_to(ROOT)) for path in CONFIGS]
SLOW = ("examples/", "configs/cifar10_vit", "configs/mnist")
STEP = ["train.max_steps=1", "train.limit_batches={train: 1, val: 1, test: 1}", "train.export=false"]

# torchvision reads CIFAR-10's files only if they have the published MD5 sums; this replaces the sums by those of the
# files in the folder `cifar`.
MADE_UP = """
import hashlib
from pathlib import Path

from torchvision.datasets import CIFAR10 as Source

from deeplightning.data.cifar import CIFAR10


def digest(name):
    return hashlib.md5(Path("cifar", Source.base_folder, name).read_bytes()).hexdigest()


Source.train_list = [(name, digest(name)) for name, _ in Source.train_list]
Source.test_list = [(name, digest(name)) for name, _ in Source.test_list]
Source.meta = {**Source.meta, "md5": digest(Source.meta["filename"])}
"""


def mnist(folder: Path) -> list[str]:
    digits = load_digits()
    images = np.kron(digits.images[:500] * (255 / 16), np.ones((3, 3))).astype(np.uint8)  # (500, 24, 24)
    images = np.pad(images, [(0, 0), (2, 2), (2, 2)])  # (500, 28, 28)
    write_mnist(folder / "mnist", images, digits.target[:500].astype(np.uint8))
    return ["data.root=mnist"]


def cifar(folder: Path) -> list[str]:
    random = np.random.default_rng(0)
    files = folder / "cifar" / "cifar-10-batches-py"
    files.mkdir(parents=True)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        pixels = random.integers(256, size=(40, 3072), dtype=np.uint8)
        (files / name).write_bytes(pickle.dumps({"data": pixels, "labels": [n % 10 for n in range(40)]}))
    (files / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(n) for n in range(10)]}))
    (folder / "made_up.py").write_text(MADE_UP)
    return ["data.root=cifar", "data.module.type=made_up.CIFAR10", "data.batch_size=16"]  # 128 take a minute


def pictures(folder: Path) -> list[str]:
    random = np.random.default_rng(0)
    for name in ("cat", "dog", "owl"):
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(12):
            height, width = random.integers(30, 90, size=2)
            pixels = random.integers(256, size=(height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{number}.jpg")
    return ["data.root=pictures", "model.network.params.num_classes=3"]


def tables(folder: Path) -> list[str]:
    script = ROOT / "examples" / "tables" / "write.py"
    subprocess.run([sys.executable, script, folder / "tables"], check=True, timeout=60)
    return []


FILES = {"MNIST": mnist, "CIFAR10": cifar, "ImageFolder": pictures, "TableData": tables}


def loaded(path):
    """Return a shipped config; skip the test if the plug-in that it needs is not installed."""
    text = (ROOT / path).read_text()
    for plugin, sign in (("ray", "type: Ray"), ("tune", "\ntune:")):
        if sign in text:
            pytest.importorskip(f"deeplightning_{plugin}")
    return load(path)


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_a_shipped_config_opens_with_its_command_and_loads(path, monkeypatch):
    """The first line of a shipped config is the command that runs it from the repository, and the config is valid."""
    name = str(path.relative_to(ROOT))
    command = re.match(r"# bash train\.sh(?: (\S+\.yaml))?", path.read_text())
    assert command, f"{name} does not open with its command"
    assert (command[1] or "configs/base.yaml") == name
    monkeypatch.chdir(ROOT)
    assert loaded(name).model.optimizer is not None


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name, marks=[pytest.mark.slow] * name.startswith(SLOW))
        for path, name in zip(CONFIGS, NAMES, strict=True)
    ],
)
def test_a_shipped_config_trains(path, command, store, tmp_path):
    """A shipped config trains one step, validates and tests, without a download."""
    config = loaded(path)
    kind = config.data.module.type.rpartition(".")[2]
    data = FILES[kind](tmp_path) if kind in FILES else []
    overrides = [*STEP, *data, f"logger.params.tracking_uri={store}"]
    if config.engine.launcher is not None:  # launchers have tests of their own
        config.engine.processes = 1
        overrides += ["engine.launcher=null", "engine.processes=1", "engine.max_restarts=0", "data.batch_size=4"]
    outcome = command("train", path, *overrides, cwd=tmp_path, ranks=config.engine.processes, code=0)
    assert (outcome.folder / "last.ckpt").is_file()
    results = json.loads((outcome.folder / "test_results.json").read_text())
    assert sum(value for metric, value in results.items() if metric.startswith("test_loss")) > 0  # a GAN has two
