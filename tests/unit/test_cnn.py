"""SimpleCNN: the size it promises, for the images it was made for."""

import pytest
import torch

from deeplightning.model.cnn import SimpleCNN


def test_28938_parameters():
    """Ten classes of 28x28 grey images take 28,938 parameters."""
    assert sum(parameter.numel() for parameter in SimpleCNN(10, 1).parameters()) == 28_938


@pytest.mark.parametrize(
    ("classes", "channels", "size"), [(10, 1, 28), (10, 1, 8), (3, 3, [64, 48]), (2, 2, (4, 5)), (1, 1, 30)]
)
def test_logits(classes, channels, size):
    """Images of the promised size become one logit per class, and every parameter gets a gradient."""
    network = SimpleCNN(num_classes=classes, num_channels=channels, image_size=size)
    height, width = (size, size) if isinstance(size, int) else size
    logits = network(torch.rand(5, channels, height, width))
    assert logits.shape == (5, classes)
    logits.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for name, parameter in network.named_parameters() if "bias" in name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1), "num_classes must be a whole number of at least 1, not 0"),
        ((10, 0), "num_channels must be a whole number"),
        ((True, 1), "num_classes must be a whole number"),
        ((10, 1, 3), "image_size must be one whole number or .* at least 4, not 3"),
        ((10, 1, [28]), "image_size"),
        ((10, 1, [28, 2]), "image_size"),
        ((10, 1, "28"), "image_size"),
    ],
)
def test_impossible_arguments(arguments, words):
    """Each impossible argument is a ValueError in words; so are images of another size, with the argument that mends
    it."""
    with pytest.raises(ValueError, match=words):
        SimpleCNN(*arguments)
    with pytest.raises(ValueError, match=r"images are 8x8, .* made for 28x28: .* image_size: \[8, 8\]"):
        SimpleCNN(10, 1)(torch.rand(2, 1, 8, 8))
