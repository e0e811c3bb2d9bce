"""The usual size of training pictures before they are prepared, which the prediction page compares a picture with."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from deeplightning.data.datasets import Samples
from deeplightning.data.images import ImageData


def size_of(items):
    """The usual size of a data module's training pictures."""
    samples = Samples(items, np.zeros(len(items), np.int64))
    return ImageData.picture_size(SimpleNamespace(_samples={"train": samples}))


def test_it_is_the_median_of_files(tmp_path):
    """Width and height of their headers; a file that cannot be read does not count."""
    for number, size in enumerate([(10, 40), (30, 20), (500, 30)]):
        Image.new("L", size).save(tmp_path / f"{number}.png")
    (tmp_path / "3.png").write_bytes(b"no picture")
    assert size_of([str(tmp_path / f"{number}.png") for number in range(4)]) == (30, 30)
    assert size_of([str(tmp_path / "3.png"), str(tmp_path / "none.png")]) is None


@pytest.mark.parametrize("shape", [(3, 28, 20), (3, 28, 20, 3)], ids=["grey", "colour"])
def test_it_is_that_of_arrays(shape):
    """Pixels (N, height, width) or with channels."""
    assert size_of(np.zeros(shape, np.uint8)) == (20, 28)
