"""The networks that are served, and how a picture, a text or a row of a table reaches them, as with plain torch."""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision import transforms

SIZES = {"resnet18": 64, "small": 28}
MODES = {"resnet18": "RGB", "small": "L"}
MEANS = {"resnet18": (0.485, 0.456, 0.406), "small": (0.1307,)}
STDS = {"resnet18": (0.229, 0.224, 0.225), "small": (0.3081,)}
COLUMNS = [f"c{number}" for number in range(20)]  # of the rows of `tables`
WORDS, TOKENS = 1000, 64  # that `texts` knows, and takes at most


def network(name: str) -> nn.Module:
    """With fresh weights: pictures (N, C, H, W), tokens (N, L) or rows (N, 20) to logits (N, 10). `small` has 106,314
    parameters, `texts` is the transformer of examples/sst2."""
    if name == "tables":
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if name == "texts":
        sys.path.append(str(Path(__file__).resolve().parents[2]))
        from deeplightning.model.transformer import TextTransformer

        return TextTransformer(10, WORDS, width=64, num_layers=1, num_heads=4, max_length=TOKENS)
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


def reader(name: str, weights: str | Path) -> Callable[[Any], torch.Tensor]:
    """What makes an input of the network of a request's content: the bytes of a picture, or what its JSON has."""
    if name == "tables":
        return lambda content: torch.tensor([float(content["rows"][0][column]) for column in COLUMNS])
    if name == "texts":
        words = json.loads(Path(weights).with_suffix(".json").read_text())
        numbers = {word: number for number, word in enumerate(words)}

        def tokens(content: dict[str, str]) -> torch.Tensor:
            found = [numbers.get(word, 1) for word in re.findall(r"\w+|[^\w\s]", content["text"].lower())]
            found = [*found[: TOKENS - 1], 2]
            return torch.tensor(found + [0] * (TOKENS - len(found)))

        return tokens
    prepare = transform(name)
    return lambda data: prepare(picture(name, data))


def answer(probabilities: torch.Tensor) -> dict:
    """What each server says of one picture's probabilities (10,)."""
    return {"class": int(probabilities.argmax()), "probabilities": probabilities.tolist()}
