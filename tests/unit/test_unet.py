"""The U-Net: a logit per class and pixel, for sizes that its halvings divide."""

import pytest
import torch

from deeplightning.model.unet import UNet


def test_a_small_one_by_default():
    """Four classes of three channels take half a million parameters; the paper's width and depth 31 million."""
    assert sum(p.numel() for p in UNet(4).parameters()) == 482_788
    with torch.device("meta"):
        assert sum(p.numel() for p in UNet(2, 1, width=64, depth=4).parameters()) == 31_036_546


@pytest.mark.parametrize(
    ("params", "size"),
    [({}, (16, 24)), ({"depth": 1, "num_channels": 1}, (2, 6)), ({"depth": 4, "width": 2}, (48, 16)), ({}, (8, 8))],
)
def test_logits_of_each_pixel(params, size):
    """Any size that 2**depth divides comes back as it was, and every parameter gets a gradient."""
    network = UNet(5, **params)
    logits = network(torch.rand(2, params.get("num_channels", 3), *size))
    assert logits.shape == (2, 5, *size)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_pixels_see_their_surroundings():
    """A pixel's answer depends on pixels that are far away, and on near ones at full size."""
    torch.manual_seed(0)
    network, images = UNet(2, depth=3, width=4).eval(), torch.rand(1, 3, 32, 32, requires_grad=True)
    network(images)[0, 0, 16, 16].backward()
    seen = images.grad[0].abs().sum(0) > 0
    assert seen[16, 16]
    assert seen.sum() > 20 * 20


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"num_classes": 0}, "num_classes must be a whole number of at least 1, not 0"),
        ({"depth": 0}, "depth must be a whole number"),
        ({"image_size": 30}, "30x30 pixels cannot be halved 3 times: .* sizes that 8 divides, such as 32x32"),
        ({"image_size": [64, 60]}, "64x60 pixels cannot be halved 3 times: .* such as 64x64"),
        ({"image_size": [64]}, "image_size must be one whole number or"),
    ],
)
def test_impossible_arguments(params, words):
    """Each impossible argument is a ValueError in words, with a size that would do."""
    with pytest.raises(ValueError, match=words):
        UNet(**{"num_classes": 2, **params})


def test_pictures_of_another_size():
    """Where no size was told, the picture that comes is what shows it; too small ones are told the smallest size."""
    with pytest.raises(ValueError, match=r"pictures of 20x16 pixels cannot be halved 3 times: .* such as 16x16"):
        UNet(2)(torch.rand(1, 3, 20, 16))
    with pytest.raises(ValueError, match="such as 8x8"):
        UNet(2)(torch.rand(1, 3, 2, 2))
