"""Draw a folder of pictures like a user's own: `python examples/image_folder/draw.py FOLDER [NUMBER]`.

FOLDER/disc/000.jpg …: NUMBER (150) pictures of different shapes and sizes for each of three classes.
"""

import math
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("disc", "square", "triangle")


def draw(kind: str, random: np.random.RandomState) -> Image.Image:
    """Return one picture, RGB, with sides of 70 to 140 pixels."""
    width, height = map(int, random.randint(70, 141, size=2))
    ground = random.randint(0, 256, 3)
    picture = Image.new("RGB", (width, height), tuple(map(int, ground)))
    pen = ImageDraw.Draw(picture)
    colour = tuple(int(value) for value in (ground + random.randint(60, 196, 3)) % 256)
    r = random.uniform(0.25, 0.4) * min(width, height)
    x, y = width / 2 + random.uniform(-6, 6), height / 2 + random.uniform(-6, 6)
    if kind == "disc":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif kind == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    else:
        turn = random.uniform(-0.3, 0.3) - math.pi / 2
        pen.polygon([(x + r * math.cos(turn + n * 2 * math.pi / 3), y + r * math.sin(turn + n * 2 * math.pi / 3))
                     for n in range(3)], fill=colour)  # fmt: skip
    noisy = np.asarray(picture).astype(np.float64) + random.normal(0, 15, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def main(folder: Path, number: int = 150) -> None:
    random = np.random.RandomState(0)
    for kind in CLASSES:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for count in range(number):
            draw(kind, random).save(folder / kind / f"{count:03}.jpg", quality=85)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
