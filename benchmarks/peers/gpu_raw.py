"""A training on pictures like CIFAR-10's as a person writes it by hand: gpu_raw.py --data FOLDER --loader workers …

`--loader workers`: torchvision's transforms in a DataLoader with workers, and torch's optimizer as it comes. `--loader
device`: all pictures on the GPU, changed there, and a fused optimizer; nothing waits for the GPU inside an epoch.

Prints the seconds and pictures of each epoch, and val_loss and val_acc after it, and saves last.ckpt.
"""

import argparse
import importlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

MEAN, STD = 0.5, 0.25


class Pictures(Dataset):
    """Of an array, one at a time, as torchvision's own data sets do it."""

    def __init__(self, pictures, labels, transform):
        self.pictures, self.labels, self.transform = pictures, labels, transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, position):
        return self.transform(Image.fromarray(self.pictures[position])), int(self.labels[position])


def loaders(training, validation, batch_size, workers):
    """DataLoaders for training and for validation."""
    from torchvision import transforms

    normal = [transforms.ToTensor(), transforms.Normalize((MEAN,) * 3, (STD,) * 3)]
    changed = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    sets = Pictures(*training, transforms.Compose(changed + normal)), Pictures(*validation, transforms.Compose(normal))
    options = {"num_workers": workers, "pin_memory": torch.cuda.is_available(), "persistent_workers": workers > 0}
    return [DataLoader(each, batch_size, shuffle=each is sets[0], **options) for each in sets]


class OnDevice:
    """Batches of pictures on the device; those for training are shifted and mirrored there.

    Args:
        drop_last: leave out the last batch where it is short, since a compiled network is compiled again for its shape.
    """

    def __init__(self, pictures, labels, batch_size, device, change, drop_last=False):
        self.pictures = torch.from_numpy(pictures).to(device).permute(0, 3, 1, 2)  # uint8 (N, 3, 32, 32)
        self.labels = torch.from_numpy(labels).to(device)
        self.batch_size, self.change = batch_size, change
        self.batches = len(labels) // batch_size if drop_last else -(-len(labels) // batch_size)

    def __len__(self):
        return self.batches

    def __iter__(self):
        count, device = len(self.labels), self.labels.device
        order = torch.randperm(count, device=device) if self.change else torch.arange(count, device=device)
        for chosen in order.split(self.batch_size)[: self.batches]:
            pictures = self.pictures[chosen]
            if self.change:
                pictures = changed(pictures)
            yield pictures.float().div_(255).sub_(MEAN).div_(STD), self.labels[chosen]


def changed(pictures):
    """uint8 (B, 3, H, W) → the same, each shifted by up to 4 pixels and mirrored or not."""
    count, _, height, width = pictures.shape
    device = pictures.device
    padded = F.pad(pictures, [4] * 4)
    rows = torch.randint(9, (count, 1), device=device) + torch.arange(height, device=device)
    columns = torch.randint(9, (count, 1), device=device) + torch.arange(width, device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    each = torch.arange(count, device=device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def evaluate(network, batches, device, precision):
    network.eval()
    loss, right, seen = torch.zeros((), device=device), torch.zeros((), device=device), 0
    with torch.no_grad():
        for images, labels in batches:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with precision:
                logits = network(images.contiguous(memory_format=torch.channels_last))
            loss += F.cross_entropy(logits.float(), labels, reduction="sum")
            right += (logits.argmax(1) == labels).sum()
            seen += len(labels)
    network.train()
    return loss.item() / seen, right.item() / seen


def wait_for(device):
    if device == "cuda":
        torch.cuda.synchronize()


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--data", type=Path, help="a folder with pictures.npz; the last tenth validates")
    words.add_argument("--network", help="MODULE.NAME")
    words.add_argument("--params", type=json.loads, default={}, help="its keyword arguments, JSON")
    words.add_argument("--loader", choices=["workers", "device"])
    words.add_argument("--workers", type=int, default=8)
    words.add_argument("--batch-size", type=int, default=128)
    words.add_argument("--epochs", type=int, default=2)
    words.add_argument("--device", default="cuda")
    words.add_argument("--compile", help="a mode of torch.compile")
    given = words.parse_args()
    device, fast = given.device, given.loader == "device"
    with np.load(given.data / "pictures.npz") as file:
        pictures, labels = file["images"], file["labels"]
    held_out = len(labels) // 10
    training, validation = (pictures[:-held_out], labels[:-held_out]), (pictures[-held_out:], labels[-held_out:])
    if fast:
        batches = [OnDevice(*training, given.batch_size, device, True, drop_last=given.compile is not None)]
        batches += [OnDevice(*validation, given.batch_size, device, False)]
    else:
        batches = loaders(training, validation, given.batch_size, given.workers)
    module, _, name = given.network.rpartition(".")
    torch.manual_seed(0)
    network = getattr(importlib.import_module(module), name)(**given.params)
    network = network.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=fast or None
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=given.epochs * len(batches[0]))
    precision = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    compute = torch.compile(network, mode=given.compile) if given.compile else network
    step = 0
    for epoch in range(given.epochs):
        wait_for(device)
        begun, seen = time.monotonic(), 0
        for images, labels in batches[0]:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad()
            with precision:
                logits = compute(images.contiguous(memory_format=torch.channels_last))
                loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            schedule.step()
            if step == 0:
                print(f"first step at {time.monotonic():.3f}", flush=True)
            if step % 50 == 0 and not fast:
                print(f"step {step} train_loss {loss.item():.4f}")
            seen, step = seen + len(labels), step + 1
        wait_for(device)
        print(f"epoch {epoch} seconds {time.monotonic() - begun:.4f} pictures {seen}", flush=True)
        val_loss, val_acc = evaluate(network, batches[1], device, precision)
        print(f"epoch {epoch} val_loss {val_loss:.4f} val_acc {val_acc:.4f}")
        torch.save({"state_dict": network.state_dict(), "optimizer": optimizer.state_dict()}, "last.ckpt")


if __name__ == "__main__":
    main()
