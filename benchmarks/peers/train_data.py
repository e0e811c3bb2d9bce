"""The pictures that scripts of benchmarks/train.py learn from, by torchvision and torch: the same split and the same
order as a run of ours has, so that the same weights can come out.

A folder holds MNIST/raw, or pictures.npz with `images` uint8 (N, H, W) or (N, H, W, C) and `labels` int64 (N,).
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
MEAN, STD = 0.5, 0.25  # of other pictures, each channel


def split(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions for training and for validation, a tenth of each class: `deeplightning.data.splits.assign_folds`."""
    bits = np.random.MT19937(np.random.SeedSequence(seed, spawn_key=(2,)))
    shuffled = np.random.RandomState(bits).permutation(len(labels))
    held_out = shuffled[np.argsort(labels[shuffled], kind="stable")][9::10]
    return np.setdiff1d(np.arange(len(labels)), held_out), np.sort(held_out)


class Order(Sampler):
    """Positions 0 to size - 1, in another order each time: `deeplightning.data.samplers.BatchIndices`."""

    def __init__(self, size: int, seed: int):
        self.size, self.seed, self.epoch = size, seed, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        bits = np.random.MT19937(np.random.SeedSequence([self.seed, self.epoch]))
        self.epoch += 1
        return iter(np.random.RandomState(bits).permutation(self.size).tolist())


class Pictures(Dataset):
    """Of pictures.npz, one at a time, as torchvision's own data sets do it."""

    def __init__(self, folder: str, transform):
        with np.load(Path(folder) / "pictures.npz") as file:
            self.data, self.targets = file["images"], file["labels"]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, position: int):
        return self.transform(Image.fromarray(self.data[position])), int(self.targets[position])


def sets(folder: str, seed: int) -> tuple[Subset, Subset]:
    """For training and for validation; each picture is decoded, scaled and normalised when it is asked for."""
    from torchvision import datasets, transforms

    if (Path(folder) / "MNIST").is_dir():
        normalise = transforms.Normalize((MNIST_MEAN,), (MNIST_STD,))
        whole = datasets.MNIST(folder, transform=transforms.Compose([transforms.ToTensor(), normalise]))
    else:
        whole = Pictures(folder, transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)]))
    training, validation = split(np.asarray(whole.targets), seed)
    return Subset(whole, training.tolist()), Subset(whole, validation.tolist())


def loaders(folder: str, seed: int, batch_size: int, workers: int = 0) -> tuple[DataLoader, DataLoader]:
    """For training and for validation: float (B, C, H, W) and int64 (B,)."""
    training, validation = sets(folder, seed)
    order = Order(len(training), seed)
    shuffled = DataLoader(training, batch_size, sampler=order, num_workers=workers, persistent_workers=workers > 0)
    return shuffled, DataLoader(validation, batch_size, num_workers=workers, persistent_workers=workers > 0)


class Batches:
    """All pictures in one tensor, on a device: a batch is one indexing operation and normalised whole. How a script is
    written by someone who has measured."""

    def __init__(self, folder: str, seed: int, batch_size: int, device: str, training: bool):
        if (Path(folder) / "MNIST").is_dir():
            from torchvision import datasets

            whole = datasets.MNIST(folder)
            pixels, labels, self.mean, self.std = whole.data.numpy(), whole.targets.numpy(), MNIST_MEAN, MNIST_STD
        else:
            with np.load(Path(folder) / "pictures.npz") as file:
                pixels, labels, self.mean, self.std = file["images"], file["labels"], MEAN, STD
        mine = split(labels, seed)[not training]
        pixels = pixels if pixels.ndim == 4 else pixels[..., None]  # (N, H, W, C)
        # A copy, since one channel may count as contiguous with the strides of channels last, which round otherwise.
        images = torch.from_numpy(pixels[mine]).permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
        self.images = images.to(device)
        self.labels = torch.from_numpy(labels[mine]).to(device)
        self.batch_size, self.order = batch_size, Order(len(mine), seed) if training else range(len(mine))

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for positions in torch.tensor(list(self.order), device=self.labels.device).split(self.batch_size):
            images = self.images[positions].float().div_(255).sub_(self.mean).div_(self.std)
            yield images, self.labels[positions]
