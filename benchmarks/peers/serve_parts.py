"""The two networks that are served, and how a picture reaches them with torchvision, as its users write it."""

import io
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision import transforms

SIZES = {"resnet18": 64, "small": 28}
MODES = {"resnet18": "RGB", "small": "L"}
MEANS = {"resnet18": (0.485, 0.456, 0.406), "small": (0.1307,)}
STDS = {"resnet18": (0.229, 0.224, 0.225), "small": (0.3081,)}


def network(name: str) -> nn.Module:
    """With fresh weights: pictures (N, C, H, W) to logits (N, 10). `small` has 106,314 parameters."""
    if name == "resnet18":
        return torchvision.models.resnet18(num_classes=10)
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10))


def trained(name: str, weights: str | Path) -> nn.Module:
    """With the weights of a file, ready to answer."""
    model = network(name)
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval()


def transform(name: str) -> transforms.Compose:
    """A PIL picture to float (C, H, W)."""
    size = SIZES[name]
    steps = [transforms.Resize((size, size)), transforms.ToTensor(), transforms.Normalize(MEANS[name], STDS[name])]
    return transforms.Compose(steps)


def picture(name: str, data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert(MODES[name])


def answer(probabilities: torch.Tensor) -> dict:
    """What each server says of one picture's probabilities (10,)."""
    return {"class": int(probabilities.argmax()), "probabilities": probabilities.tolist()}
