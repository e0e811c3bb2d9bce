"""A stand-in for CIFAR-10 without its files: ten kinds of coloured shapes, 32 x 32 pixels, drawn in memory."""

import math

import numpy as np
from PIL import Image, ImageDraw

from deeplightning.data.cifar import MEAN, STD
from deeplightning.data.datasets import Samples
from deeplightning.data.images import ImageData
from deeplightning.image_spec import ImageSpec

KINDS = ("disc", "ring", "square", "frame", "triangle", "diamond", "cross", "star", "bars", "dots")


class TenShapes(ImageData):
    """Bright shapes of random colour, size and place on a dark ground, with noise; colours do not depend on the class.

    Args:
        cfg: the whole config; `seed` determines the pictures.
        train: number of training pictures, a tenth of which is held out for validation.
        test: number of test pictures.
        options: `augment`, `in_memory` and `limit`, see `ImageData`.
    """

    def __init__(self, cfg, train: int = 1000, test: int = 200, **options):
        super().__init__(cfg, ImageSpec(32, 32, mode="RGB", mean=MEAN, std=STD), **options)
        self.class_names = list(KINDS)
        self.sizes = {"train": train, "test": test}

    def read(self):
        random = np.random.RandomState(self.cfg.seed)
        sets = {}
        for name, size in self.sizes.items():
            labels = np.arange(size) % len(KINDS)
            sets[name] = Samples(np.stack([draw(KINDS[label], random) for label in labels]), labels)
        return sets


def draw(kind: str, random: np.random.RandomState) -> np.ndarray:
    """Return one picture, uint8 (32, 32, 3), drawn four times as large for smooth edges."""
    ground, ink = random.randint(0, 90, 3), random.randint(120, 256, 3)
    picture = Image.new("RGB", (128, 128), tuple(map(int, ground)))
    pen, colour = ImageDraw.Draw(picture), tuple(map(int, ink))
    r = random.uniform(36, 52)
    x, y = random.uniform(r + 4, 124 - r, size=2)
    box = (x - r, y - r, x + r, y + r)

    def around(points: int, radii: tuple[float, ...]) -> list[tuple[float, float]]:
        turns = [2 * math.pi * n / points - math.pi / 2 for n in range(points)]
        return [(x + radii[n % len(radii)] * math.cos(a), y + radii[n % len(radii)] * math.sin(a))
                for n, a in enumerate(turns)]  # fmt: skip

    if kind == "disc":
        pen.ellipse(box, fill=colour)
    elif kind == "ring":
        pen.ellipse(box, outline=colour, width=12)
    elif kind == "square":
        pen.rectangle(box, fill=colour)
    elif kind == "frame":
        pen.rectangle(box, outline=colour, width=12)
    elif kind == "triangle":
        pen.polygon(around(3, (r,)), fill=colour)
    elif kind == "diamond":
        pen.polygon(around(4, (r, 0.6 * r)), fill=colour)
    elif kind == "cross":
        pen.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=colour)
        pen.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=colour)
    elif kind == "star":
        pen.polygon(around(10, (r, 0.4 * r)), fill=colour)
    elif kind == "bars":
        for shift in (-0.8, 0, 0.8):
            pen.rectangle((x - r, y + shift * r - r / 5, x + r, y + shift * r + r / 5), fill=colour)
    else:
        for across in (-0.6, 0.6):
            for down in (-0.6, 0.6):
                spot = (x + across * r, y + down * r)
                pen.ellipse((spot[0] - r / 3, spot[1] - r / 3, spot[0] + r / 3, spot[1] + r / 3), fill=colour)
    small = np.asarray(picture.resize((32, 32), Image.Resampling.BOX)).astype(np.float64)
    return (small + random.normal(0, 12, small.shape)).clip(0, 255).astype(np.uint8)
