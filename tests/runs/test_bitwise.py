"""A run learns the same weights, bit for bit, as a script that a user would write by hand.

The script, `by_hand` below, needs only torch: it decodes, scales and normalises images one by one, batches them with
torch's DataLoader, and trains in a plain loop. Its order of samples is that of a run, which follows from the seed.
"""

import numpy as np
import pytest
import torch
from conftest import OWN, weights
from PIL import Image
from torch import nn

from deeplightning.callbacks.random_state import seed_all
from deeplightning.data.samplers import BatchIndices
from deeplightning.data.splits import assign_folds
from deeplightning.model.cnn import SimpleCNN

SIZE, BATCH, EPOCHS, PICTURES = 12, 16, 2, 200

CONFIG = """\
seed: SEED
data: {module: {type: deeplightning.data.image_folder.ImageFolder, params: PARAMS}, root: 'ROOT', batch_size: 16}
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 4, num_channels: CHANNELS, image_size: 12}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05, momentum: 0.9, weight_decay: 0.001}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 2, export: false}
logger: {params: {tracking_uri: 'STORE'}, log_every_n_steps: 3, pictures: null}
"""
MEAN, STD = {"L": [0.1307], "RGB": [0.485, 0.456, 0.406]}, {"L": [0.3081], "RGB": [0.229, 0.224, 0.225]}
BARE = ["~logger", "logger={type: pytorch_lightning.loggers.CSVLogger, params: {save_dir: csv}}"]
BARE += ["logger.pictures=null", "logger.progress=off", "logger.per_rank_files=false"]
FULL = ["logger.progress=bar", "train.checkpoint.every_n_steps=4"]
FULL += ["train.checkpoint.monitor=val_loss", "train.early_stop={metric: val_loss, patience: 9}"]
FULL += ["train.callbacks=[{type: own.Gradients, params: {file: gradients.pt}}]"]
DRAWN = [*FULL, "logger.pictures={every_n_epochs: 1}", "logger.histograms=1"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """For each mode, L and RGB: a folder with PNG files of four classes in `train`, its sorted files, and their labels.
    The brightness of an image depends weakly on its class."""
    made = {}
    for mode, channels in (("L", 1), ("RGB", 3)):
        root, rng = tmp_path_factory.mktemp("pictures") / mode, np.random.RandomState(3)
        files, labels = [], np.sort(rng.randint(4, size=PICTURES))
        for number, label in enumerate(labels):
            pixels = rng.normal(60 + 40 * label, 50, (SIZE, SIZE, channels)).clip(0, 255).astype(np.uint8)
            file = root / "train" / f"class-{label}" / f"{number:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels if channels == 3 else pixels[..., 0]).save(file)
            files.append(file)
        made[mode] = root, files, labels
    return made


class Decoded(torch.utils.data.Dataset):
    """Images one at a time, scaled and normalised as by torchvision's ToTensor and Normalize in float32."""

    def __init__(self, files, labels, mode):
        self.files, self.labels = files, labels
        self.mean, self.std = (torch.tensor(of[mode]).view(-1, 1, 1) for of in (MEAN, STD))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, position):
        pixels = np.array(Image.open(self.files[position]))
        image = torch.from_numpy(pixels.reshape(SIZE, SIZE, -1)).permute(2, 0, 1).contiguous().float()
        return image.div(255).sub(self.mean).div(self.std), int(self.labels[position])


def by_hand(files, labels, mode, seed):
    """Return the script's final weights."""
    chosen = np.flatnonzero(assign_folds(labels, 10, seed, 2) != 0)
    data = Decoded([files[position] for position in chosen], labels[chosen], mode)
    order = BatchIndices(data, BATCH, shuffle=True, seed=seed)
    loader = torch.utils.data.DataLoader(data, batch_sampler=order)
    seed_all(seed, 0)
    network = SimpleCNN(4, len(MEAN[mode]), SIZE)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=0.001)
    for epoch in range(EPOCHS):
        order.set_epoch(epoch)
        for images, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), targets).backward()
            optimizer.step()
    return network.state_dict()


@pytest.mark.parametrize(
    ("options", "mode", "in_memory", "seed"),
    [
        pytest.param(BARE, "L", "true", 0, id="bare, grey, in memory"),
        pytest.param(BARE, "RGB", "false", 1, id="bare, colour, on demand"),
        pytest.param(FULL, "L", "false", 2, id="tracked with bar and callbacks, grey, on demand"),
        pytest.param(FULL, "RGB", "true", 3, id="tracked with bar and callbacks, colour, in memory"),
        pytest.param(DRAWN, "RGB", "false", 4, id="tracked with all that draws, colour, on demand"),
    ],
)
def test_weights_are_those_of_the_script_bit_for_bit(
    options, mode, in_memory, seed, pictures, command, store, tmp_path
):
    """Images in memory or decoded on demand give the script's weights, with and without tracking and pictures."""
    root, files, labels = pictures[mode]
    params = f"{{image_size: {SIZE}, mode: {mode}, mean: {MEAN[mode]}, std: {STD[mode]}, in_memory: {in_memory}}}"
    text = CONFIG
    values = {"SEED": seed, "PARAMS": params, "ROOT": root, "CHANNELS": len(MEAN[mode]), "STORE": store}
    for placeholder, value in values.items():
        text = text.replace(placeholder, str(value))
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "own.py").write_text(OWN)
    outcome = command("train", "config.yaml", *options, cwd=tmp_path, code=0)
    ours = {name: value for name, value in weights(outcome.folder / "last.ckpt").items() if name.startswith("network.")}
    theirs = by_hand(files, labels, mode, seed)
    assert list(ours) == [f"network.{name}" for name in theirs]
    assert [name for name in theirs if not torch.equal(ours[f"network.{name}"], theirs[name])] == []
