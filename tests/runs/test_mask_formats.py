"""Mask formats that tools write: `init` guesses the classes, and training reads the classes that were drawn."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deeplightning.cli.init import init
from deeplightning.config.examine import load_config
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.faults import SetupError
from deeplightning.run.assemble import init_module

GREEN, RED = [0, 128, 0], [128, 0, 0]
PALETTE = [0, 0, 0, *GREEN, *RED]


def grey(*values):
    """Return a function that draws masks with these values for class 0, 1 …"""
    return lambda classes, number: Image.fromarray(np.array(values, np.uint8)[classes])


def palette(classes, number):
    image = Image.fromarray(classes)
    image.putpalette(PALETTE)
    return image


def own_palette(classes, number):
    """A palette whose order differs from file to file, as written by programs that shrink files."""
    order = np.roll(np.arange(3, dtype=np.uint8), number % 3)  # the index of each class
    image = Image.fromarray(order[classes])
    image.putpalette(np.array(PALETTE).reshape(3, 3)[order.argsort()].ravel().tolist())
    return image


def colours(classes, number):
    return palette(classes, number).convert("RGB")


def sixteen_bits(classes, number):
    return Image.fromarray(np.array([0, 1000, 40000], np.uint16)[classes])


# How a mask is drawn, its number of classes, and the `values` and `ignore` that `init` writes.
FORMATS = {
    "numbers": (grey(0, 1, 2), 3, None, None),
    "0 and 255": (grey(0, 255), 2, [0, 255], None),
    "one bit": (lambda classes, number: Image.fromarray(classes > 0), 2, [0, 255], None),
    "palette": (palette, 3, None, None),
    "a palette for each file": (own_palette, 3, [[0, 0, 0], GREEN, RED], None),
    "colours": (colours, 3, [[0, 0, 0], GREEN, RED], None),
    "0, 128 and 255": (grey(0, 128, 255), 3, [0, 128, 255], None),
    "1 and 2": (grey(1, 2), 2, [1, 2], None),
    "1 and 255": (grey(1, 255), 2, [1, 255], None),
    "0 and 2": (grey(0, 2), 2, [0, 2], None),
    "grey as RGB": (lambda classes, number: grey(0, 1, 2)(classes, number).convert("RGB"), 3, None, None),
    "transparent": (lambda classes, number: colours(classes, number).convert("RGBA"), 3, [[0, 0, 0], GREEN, RED], None),
    "grey and alpha": (lambda classes, number: grey(0, 9, 99)(classes, number).convert("LA"), 3, [0, 9, 99], None),
    "sixteen bits": (sixteen_bits, 3, [0, 1000, 40000], None),
    "one bit and 0 and 255": (
        lambda classes, number: grey(0, 255)(classes, number).convert("1" if number % 2 else "L"), 2, [0, 255], None
    ),
    "0, 1, 2 and 255 for none": (grey(0, 1, 2, 255), 4, None, 255),
}  # fmt: skip


def draw(top: Path, form: str) -> Path:
    """Draw 20 pictures whose brightness shows the classes, with masks of a format."""
    mask_of, number_of_classes, *_ = FORMATS[form]
    random = np.random.default_rng(0)
    for folder in ("images", "masks"):
        (top / folder).mkdir(parents=True)
    for number in range(20):
        classes = np.kron(random.integers(0, number_of_classes, (4, 4)), np.ones((4, 4))).astype(np.uint8)
        pixels = classes * 60 + random.integers(0, 40, (16, 16))
        Image.fromarray(pixels.astype(np.uint8)).save(top / "images" / f"{number:02}.png")
        mask_of(classes, number).save(top / "masks" / f"{number:02}.png")
    return top


def classes_of(path: str) -> np.ndarray:
    """Return the classes that `draw` drew for a picture, by the darkest pixel of each square of 4 x 4."""
    pixels = np.asarray(Image.open(path)).reshape(4, 4, 4, 4)
    return np.kron(pixels.min((1, 3)) // 60, np.ones((4, 4))).astype(np.uint8)


@pytest.mark.parametrize("form", FORMATS)
def test_init_guesses_the_classes_and_training_reads_them(form, tmp_path, monkeypatch):
    """The config has the mask values, and batches hold the classes that were drawn; 255 is ignored."""
    _, number_of_classes, values, ignore = FORMATS[form]
    init(tmp_path / "project", "segmentation", draw(tmp_path / "data", form))
    monkeypatch.chdir(tmp_path / "project")
    params = plain(read(Path("config.yaml")).root)["data"]["module"]["params"]
    assert (params["values"], params["ignore"]) == (values, ignore)
    assert len(params["class_names"]) == number_of_classes - (ignore is not None)
    data = init_module(load_config(Path("config.yaml"), []), "data")
    data.setup()
    for split in ("train", "val", "test"):
        dataset = data.dataset(split)
        expected = np.stack([classes_of(path) for path in dataset.samples.items])
        if ignore is not None:
            expected[expected == number_of_classes - 1] = 255
        np.testing.assert_array_equal(dataset[np.arange(len(dataset))]["mask"], expected)


def test_masks_in_two_conventions_are_counted(tmp_path):
    """If some masks hold 0 and 1 and others 0 and 255, 255 is ignored, and a note counts the masks that hold it."""
    data = draw(tmp_path / "data", "numbers")
    for number, path in enumerate(sorted((data / "masks").iterdir())):
        Image.fromarray(np.eye(16, dtype=np.uint8) * (255 if number < 7 else 1)).save(path)
    notes, _ = init(tmp_path / "project", "segmentation", data)
    assert "; 255 does not count (7 masks hold only 0 and 255; if 255 is a class there, write its number)" in notes[0]


@pytest.mark.parametrize(
    ("mask_of", "message"),
    [
        (lambda number: np.zeros((16, 16), np.uint8), "hold only one value, 0; they must hold two classes or more"),
        (lambda number: np.arange(256, dtype=np.uint8).reshape(16, 16), "hold too many values for classes: 0, 1, 2"),
        (lambda number: np.random.default_rng(number).integers(0, 255, (16, 16, 3), np.uint8), "too many values"),
        (
            lambda number: np.stack([np.zeros((16, 16), np.uint8)] * 3 + [np.eye(16, dtype=np.uint8) * 255], -1),
            r"only one value, 0 \(their alpha channel, which differs, is not read; save it as grey\)",
        ),
    ],
)
def test_masks_that_tell_no_classes_are_refused(mask_of, message, tmp_path):
    """Masks with one value, and masks with smoothed edges, end `init` with one error."""
    data = draw(tmp_path / "data", "numbers")
    for number, path in enumerate(sorted((data / "masks").iterdir())):
        Image.fromarray(mask_of(number)).save(path)
    with pytest.raises(SetupError, match=message):
        init(tmp_path / "project", "segmentation", data)
