"""The statistics of `deeplightning stats` equal those that NumPy computes from all samples at once."""

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from deeplightning.config.examine import load_config
from deeplightning.run.assemble import init_module

DATA = '''
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader


class Refuses(torch.nn.Module):
    def __init__(self):
        raise ValueError("no network")


class Sets(pl.LightningDataModule):
    """Batches of a user's own."""

    def __init__(self, cfg, kind):
        super().__init__()
        self.kind = kind

    def train_dataloader(self):
        random = torch.Generator().manual_seed(0)
        numbers = torch.randn(25, 3, generator=random) * 1e-3 + 1e6  # far from 0: where sums of squares lose digits
        masks = torch.randint(0, 3, (25, 4, 4), generator=random)
        masks[0, 0] = 255
        self.class_names = ["sky", "sea", "land", "air"]
        if self.kind == "pairs":
            return DataLoader(torch.utils.data.TensorDataset(numbers, masks), batch_size=4)
        return DataLoader([{"input": a.double(), "mask": b} for a, b in zip(numbers, masks)], batch_size=4)
'''


@pytest.fixture(scope="module")
def stats(command, tiny, tmp_path_factory):
    """`stats(override, …)` returns the parsed output of `stats`, or stderr if the expected exit `code` is not 0."""
    folder = tmp_path_factory.mktemp("stats")
    (folder / "own_sets.py").write_text(DATA)

    def run(*overrides, code=0):
        outcome = command("stats", tiny, *overrides, cwd=folder, code=code)
        return yaml.safe_load(outcome.out) if code == 0 else outcome.err

    return run


def test_pictures_and_classes_are_those_of_the_whole_set(stats, tiny):
    """Mean and std of pixels (0 to 1), class sizes and balanced class weights cover all training samples, whatever
    drop_last, the sampler and the batch size are."""
    bucketed = "{type: deeplightning.data.samplers.BucketedDistributedSampler, params: {buckets: 2, sort_key: labels}}"
    found = stats("data.loader={drop_last: true}", "data.batch_size=50", f"data.sampler={bucketed}")
    data = init_module(load_config(tiny), "data")
    data.setup("fit")
    train = data.dataset("train")
    pixels, labels = train.images.numpy() / 255.0, train.labels.numpy()
    assert found["samples"] == len(labels) == 134
    assert found["mean"] == pytest.approx([pixels.mean()], rel=1e-7)
    assert found["std"] == pytest.approx([pixels.std()], rel=1e-7)
    counts = {str(digit): int((labels == digit).sum()) for digit in range(10)}
    assert found["classes"] == counts
    assert found["class_weights"] == pytest.approx([134 / (10 * n) for n in counts.values()], rel=1e-7)
    assert found == stats("data.batch_size=7")


def test_channels_are_told_apart_and_can_be_pasted(stats, tmp_path):
    """Each channel has its own mean and std, in the format of the data module's params."""
    random = np.random.default_rng(0)
    pixels = (random.integers(0, 256, (40, 8, 8, 3)) * [1.0, 0.5, 0.1]).astype(np.uint8)
    for number, picture in enumerate(pixels):
        (tmp_path / f"class {number % 2}").mkdir(exist_ok=True)
        Image.fromarray(picture).save(tmp_path / f"class {number % 2}" / f"{number}.png")
    folder = "{type: deeplightning.data.image_folder.ImageFolder, params: {image_size: 8, STATS}}"
    root = f"data.root='{tmp_path}'"
    found = stats(root, f"data.module={folder.replace(', STATS', '')}")
    kept = sum(found["classes"].values())
    assert kept == found["samples"] == 32
    assert len(found["mean"]) == len(found["std"]) == 3
    assert found["mean"] == pytest.approx(pixels.mean((0, 1, 2)) / 255, rel=0.1)
    pasted = folder.replace("STATS", f"mean: {found['mean']}, std: {found['std']}")
    assert stats(root, f"data.module={pasted}") == found


def test_numbers_and_masks(stats):
    """Floats have statistics by column, exact even if the spread is a billionth of the mean; masks have pixel counts of
    each class, including one that does not occur, and of pixels without a class."""
    found = stats("data.module={type: own_sets.Sets, params: {kind: maps}}")
    random = torch.Generator().manual_seed(0)
    numbers = (torch.randn(25, 3, generator=random) * 1e-3 + 1e6).double().numpy()
    assert found["samples"] == 25
    assert found["input"]["mean"] == pytest.approx(numbers.mean(0), rel=1e-7)
    assert found["input"]["std"] == pytest.approx(numbers.std(0), rel=1e-6)
    masks = torch.randint(0, 3, (25, 4, 4), generator=random).numpy()
    masks[0, 0] = 255
    counts = [int((masks == label).sum()) for label in range(4)]
    assert list(found["classes"].values()) == counts
    assert list(found["classes"]) == ["sky", "sea", "land", "air"]
    assert found["without_class"] == 4
    assert found["class_weights"] == pytest.approx([sum(counts) / (3 * n) if n else 0 for n in counts], rel=1e-7)


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["data.module.type=deeplightning.data.digits.Digit"], 2, "Did you mean deeplightning.data.digits.Digits?"),
        (["data.module={type: deeplightning.data.mnist.MNIST}", "data.root=nowhere"], 3, "nowhere"),
        (["data.module={type: own_sets.Sets, params: {kind: pairs}}"], 2, "a list, not a mapping of names to tensors"),
    ],
)
def test_what_is_wrong_has_its_exit_code(overrides, code, words, stats):
    """An error of the config ends with exit code 2, missing data with 3."""
    assert words in stats(*overrides, code=code)


def test_no_network_is_built(stats):
    """`stats` works for a network that cannot be built."""
    assert stats("~model.network", "model.network={type: own_sets.Refuses}")["samples"] == 134
