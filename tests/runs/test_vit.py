"""The Vision Transformer: patches that fit, an answer per picture, and its ONNX form."""

import onnxruntime
import pytest
import torch
from exported import Pixels, exported
from torch import nn

from deeplightning.model.attention import Attention
from deeplightning.model.vit import ViT

TINY = {"image_size": 8, "patch_size": 4, "num_channels": 1, "width": 16, "depth": 2, "heads": 2}


@pytest.mark.parametrize(
    ("params", "shape", "patches"),
    [
        ({"num_channels": 1, "image_size": 28, "patch_size": 7, "num_patches": 16}, (2, 1, 28, 28), 16),
        ({}, (2, 3, 32, 32), 64),
        ({"image_size": [32, 48], "patch_size": [8, 16]}, (1, 3, 32, 48), 12),
        ({"image_size": 28, "patch_size": 28, "dropout": 0.5, "mlp_width": 7}, (1, 3, 28, 28), 1),
    ],
)
def test_patches(params, shape, patches):
    """DL-69: 28x28 pixels in patches of 7 are 16; each has a position, and a picture becomes a logit per class."""
    network = ViT(10, **params, width=24, depth=2, heads=2)
    assert network.num_patches == patches
    assert network.positions.shape == (1, patches + 1, 24)
    logits = network(torch.rand(shape))
    assert logits.shape == (shape[0], 10)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"image_size": [32, 30], "patch_size": 4}, "patch_size 4 does not divide the picture's width of 30 pixels"),
        (
            {"image_size": 28, "patch_size": 7, "num_patches": 49},
            "num_patches is 49, but 28x28 pixels make 4 x 4 = 16 patches of 7x7",
        ),
        ({"width": 64, "heads": 3}, "width 64 cannot be shared by 3 heads: heads must divide it"),
        ({"width": "wide"}, "width must be a whole number of at least 1, not 'wide'"),
        ({"patch_size": [4]}, "patch_size must be one whole number or"),
    ],
)
def test_impossible_arguments(params, words):
    """What does not fit is a ValueError with the numbers, and with those that would do."""
    with pytest.raises(ValueError, match=words):
        ViT(**{"num_classes": 10, **params})


def test_images_of_another_size():
    """Images of another size are named with both sizes and the argument that mends it."""
    with pytest.raises(ValueError, match=r"images are 16x8, .* made for 8x8: give it image_size: \[16, 8\]"):
        ViT(10, **TINY)(torch.rand(1, 1, 16, 8))


def test_attention_is_torchs():
    """The numbers of torch's own MultiheadAttention with the same weights."""
    torch.manual_seed(0)
    ours, theirs = Attention(12, 3), torch.nn.MultiheadAttention(12, 3, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.asked.weight)
        theirs.in_proj_bias.copy_(ours.asked.bias)
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    tokens = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(tokens), theirs(tokens, tokens, tokens, need_weights=False)[0])


def test_it_becomes_a_bundle(tmp_path):
    """Its ONNX form answers like torch for batches of any size."""
    network = Pixels(ViT(3, **TINY | {"num_channels": 3, "image_size": (6, 5), "patch_size": (3, 5)}), nn.Softmax(1))
    task, folder = exported(tmp_path, "image_classification", network)
    session = onnxruntime.InferenceSession(str(folder.bundle_model))
    for size in (1, 4, 5):
        samples = torch.randint(256, (size, 3, 6, 5), dtype=torch.uint8)
        (answers,) = session.run(None, {"images": samples.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(answers), task.inference_model()(samples))
