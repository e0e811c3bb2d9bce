"""Every example learns at reduced size, without data of this machine, and writes the files that its README shows.

`tests/runs/test_configs.py` takes one step with each config of `examples/`. GANs, reconstruction, linear regression,
folds, a custom loop and custom callbacks learn in test_gan, test_img_recon, test_regression, test_seeds, test_own_loop
and test_watch.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from commands import python
from conftest import weights

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Example:
    """An example at reduced size.

    Attributes:
        config: below `examples/`.
        overrides: reduce its size.
        metrics: lower and upper bound of each metric in `test_results.json`.
        files: expected in the run's folder.
        before: a Python script below `examples/` with its arguments, which writes the data to the working directory.
    """

    config: str
    overrides: list[str]
    metrics: dict[str, tuple[float, float]]
    files: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)


EXAMPLES = {
    "cifar10": Example(
        "cifar10/vit.yaml",
        ["data.module.params.train=300", "data.module.params.test=60", "data.batch_size=20", "train.num_epochs=5"],
        {"test_acc": (0.15, 1)},
    ),
    "image_folder": Example(
        "image_folder/image_folder.yaml",
        [
            "train.num_epochs=8",
            "data.batch_size=8",
            "data.module.params.image_size=24",
            "model.network.type=deeplightning.model.cnn.SimpleCNN",
            "model.network.params={num_classes: 3, num_channels: 3, image_size: 24}",
        ],
        {"test_acc": (0.4, 1)},
        ["bundle/model.onnx"],
        ["image_folder/draw.py", "pictures", "40"],
    ),
    "segmentation": Example(
        "segmentation/segmentation.yaml",
        ["data.module.params.count=150", "data.batch_size=8", "train.num_epochs=6"],
        {"test_iou": (0.3, 1), "test_acc": (0.8, 1)},
        ["val_segmentation.png"],
    ),
    "sst2": Example(
        "sst2/sst2.yaml",
        [
            "data.module.params={limit: 3000, max_size: 90}",
            "model.network.params.vocabulary_size=90",
            "model.network.params.dropout=0",
            "data.batch_size=32",
        ],
        {"test_acc": (0.8, 1)},
        ["val_confusion_matrix.png"],
    ),
    "wine": Example(
        "tables/wine.yaml",
        ["train.num_epochs=10"],
        {"test_acc": (0.8, 1)},
        ["bundle/model.onnx"],
        ["tables/write.py", "tables"],
    ),
    "diabetes": Example(
        "tables/diabetes.yaml",
        ["train.num_epochs=10", "train.export=false"],
        {"test_mae": (30, 55), "test_rmse": (35, 70)},  # the standard deviation is 77
        before=["tables/write.py", "tables"],
    ),
}


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_learns_what_it_should(example, command, store, tmp_path):
    """An example ends with code 0, metrics within bounds for its reduced size, and the expected files."""
    if example.before:
        script, *arguments = example.before
        python(ROOT / "examples" / script, *arguments, cwd=tmp_path).check_returncode()
    overrides = [*example.overrides, f"logger.params.tracking_uri={store}"]
    outcome = command("train", ROOT / "examples" / example.config, *overrides, cwd=tmp_path, code=0)
    results = json.loads((outcome.folder / "test_results.json").read_text())
    for metric, (least, most) in example.metrics.items():
        assert least <= results[metric] <= most, results
    assert [file for file in example.files if not (outcome.folder / file).is_file()] == []


def test_transfer_starts_from_pretrained_weights(command, store, tmp_path):
    """The second run loads all but the last layer of the first, freezes them, and beats a run without them."""
    folder = ROOT / "examples" / "transfer"

    def train(config: str, *overrides: str) -> Path:
        overrides += ("train.export=false", "logger.pictures=null", f"logger.params.tracking_uri={store}")
        return command("train", folder / config, *overrides, cwd=tmp_path, code=0).folder

    def loss(run: Path) -> float:
        return json.loads((run / "test_results.json").read_text())["test_loss"]

    first = train("pretrain.yaml", "train.num_epochs=4")
    second, without = (
        train("transfer.yaml", *more, "train.num_epochs=15") for more in ([f"model.init_from='{first}'"], [])
    )
    before, after = weights(first / "best.ckpt"), weights(second / "last.ckpt")
    frozen = [name for name in after if "classifier" not in name]
    assert len(frozen) == 4
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert loss(second) < loss(without)
