"""Drawn pictures with masks: discs, squares and triangles on a noisy background, in files like a user's own."""

import math
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from deeplightning.data.masks import MaskFolder

SIDE = 32
PALETTE = [40, 40, 40, 230, 75, 60, 50, 160, 240, 85, 190, 90]  # RGB of classes 0 to 3


class ShapeMasks(MaskFolder):
    """`MaskFolder` that draws its files into `data.root`, unless this folder exists.

    Args:
        cfg: the whole config; `seed` determines the pictures.
        count: number of pictures.
        options: see `MaskFolder`.
    """

    def __init__(self, cfg, count: int = 600, **options):
        super().__init__(cfg, **options)
        self.count = count

    def prepare_data(self):
        """Draw the files, once per node. Another process finds either the complete folder or none."""
        if self.root.exists():
            return
        self.root.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=self.root.parent, prefix=".shapes-"))
        for name in ("images", "masks"):
            (partial / name).mkdir()
        random = np.random.RandomState(self.cfg.seed)
        for number in range(self.count):
            picture, mask = draw(random)
            picture.save(partial / "images" / f"{number:04}.jpg", quality=90)
            mask.save(partial / "masks" / f"{number:04}.png")
        partial.chmod(0o755)
        try:
            os.rename(partial, self.root)  # noqa: PTH104 (atomic)
        except OSError:  # another process was faster
            shutil.rmtree(partial)


def draw(random: np.random.RandomState) -> tuple[Image.Image, Image.Image]:
    """Return a picture, RGB, and its mask: 0 background, 1 disc, 2 square, 3 triangle, 255 edge."""
    ground = random.randint(0, 256, 3)
    picture = Image.new("RGB", (SIDE, SIDE), tuple(map(int, ground)))
    mask = Image.new("P", (SIDE, SIDE), 0)
    mask.putpalette([*PALETTE, *[255] * (768 - len(PALETTE))])
    for _ in range(random.randint(1, 4)):
        kind = random.randint(1, 4)
        colour = tuple(int(value) for value in (ground + random.randint(60, 196, 3)) % 256)
        r = random.uniform(5, 9)
        x, y = random.uniform(r, SIDE - r, size=2)
        for surface, fill, edge in ((picture, colour, None), (mask, int(kind), 255)):
            pen = ImageDraw.Draw(surface)
            if kind == 1:
                pen.ellipse((x - r, y - r, x + r, y + r), fill=fill, outline=edge)
            elif kind == 2:
                pen.rectangle((x - r, y - r, x + r, y + r), fill=fill, outline=edge)
            else:
                corners = [(x + r * math.cos(a), y + r * math.sin(a)) for a in (-math.pi / 2, 0.5, math.pi - 0.5)]
                pen.polygon(corners, fill=fill, outline=edge)
    noisy = np.asarray(picture).astype(np.float64) + random.normal(0, 20, (SIDE, SIDE, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)), mask
