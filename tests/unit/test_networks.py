"""The built-in networks and those of the examples: their inputs, their outputs, and the arguments that they refuse."""

import math

import onnxruntime
import pytest
import torch
from example_code import module_of
from exported import Pixels, exported
from torch import nn
from torch.distributions import Categorical, kl_divergence

from deeplightning.model.attention import Attention
from deeplightning.model.cnn import SimpleCNN
from deeplightning.model.resnet import ResNet18
from deeplightning.model.table_net import TableNet
from deeplightning.model.transformer import TextTransformer
from deeplightning.model.unet import UNet
from deeplightning.model.vit import ViT

DCGAN = module_of("dcgan/dcgan.py")
DiscreteVAE = module_of("vqvae/discrete_vae.py").DiscreteVAE
VAE_PARAMS = {"image_size": 8, "num_channels": 3, "num_tokens": 5, "codebook_dim": 4, "num_layers": 1, "width": 6}
VIT_PARAMS = {"num_classes": 10, "width": 24, "depth": 2, "heads": 2}


@pytest.mark.parametrize(
    ("make", "params", "inputs", "outputs"),
    [
        (SimpleCNN, {"num_classes": 10, "num_channels": 1, "image_size": 28}, (5, 1, 28, 28), (5, 10)),
        (SimpleCNN, {"num_classes": 10, "num_channels": 1, "image_size": 8}, (5, 1, 8, 8), (5, 10)),
        (SimpleCNN, {"num_classes": 3, "num_channels": 3, "image_size": [64, 48]}, (5, 3, 64, 48), (5, 3)),
        (SimpleCNN, {"num_classes": 2, "num_channels": 2, "image_size": (4, 5)}, (5, 2, 4, 5), (5, 2)),
        (SimpleCNN, {"num_classes": 1, "num_channels": 1, "image_size": 30}, (5, 1, 30, 30), (5, 1)),
        (UNet, {"num_classes": 5}, (2, 3, 16, 24), (2, 5, 16, 24)),
        (UNet, {"num_classes": 5, "depth": 1, "num_channels": 1}, (2, 1, 2, 6), (2, 5, 2, 6)),
        (UNet, {"num_classes": 5, "depth": 4, "width": 2}, (2, 3, 48, 16), (2, 5, 48, 16)),
        (UNet, {"num_classes": 5}, (2, 3, 8, 8), (2, 5, 8, 8)),
    ],
)
def test_each_parameter_of_a_network_learns(make, params, inputs, outputs):
    """Images become a logit per class, or per class and pixel, and every parameter gets a gradient."""
    network = make(**params)
    logits = network(torch.rand(inputs))
    assert logits.shape == outputs
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    if make is SimpleCNN:
        assert all(parameter.grad.abs().sum() > 0 for name, parameter in network.named_parameters() if "bias" in name)


def test_the_sizes_of_networks():
    """A SimpleCNN for ten classes of 28x28 grey images has 28,938 parameters, a U-Net for four classes half a million,
    and one of the paper's width and depth 31 million."""
    with torch.device("meta"):
        networks = SimpleCNN(10, 1), UNet(4), UNet(2, 1, width=64, depth=4)
    sizes = [sum(parameter.numel() for parameter in network.parameters()) for network in networks]
    assert sizes == [28_938, 482_788, 31_036_546]


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
    """DL-69: 28x28 pixels make 16 patches of 7x7; each has a position, and a picture becomes a logit per class."""
    network = ViT(**VIT_PARAMS | params)
    assert network.num_patches == patches
    assert network.positions.shape == (1, patches + 1, 24)
    logits = network(torch.rand(shape))
    assert logits.shape == (shape[0], 10)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


IMPOSSIBLE = [
    (SimpleCNN, {"num_classes": 0}, "num_classes must be a whole number of at least 1, not 0"),
    (SimpleCNN, {"num_channels": 0}, "num_channels must be a whole number"),
    (SimpleCNN, {"num_classes": True}, "num_classes must be a whole number"),
    (SimpleCNN, {"image_size": 3}, "image_size must be one whole number or .* at least 4, not 3"),
    (SimpleCNN, {"image_size": [28]}, "image_size"),
    (SimpleCNN, {"image_size": [28, 2]}, "image_size"),
    (SimpleCNN, {"image_size": "28"}, "image_size"),
    (ResNet18, {"num_classes": 0}, "num_classes must be a whole number of at least 1, not 0"),
    (ResNet18, {"num_channels": 0}, "num_channels must be a whole number of at least 1, not 0"),
    (ResNet18, {"small_images": 1}, "small_images must be true or false, not 1"),
    (UNet, {"num_classes": 0}, "num_classes must be a whole number of at least 1, not 0"),
    (UNet, {"depth": 0}, "depth must be a whole number"),
    (UNet, {"image_size": 30}, "30x30 pixels cannot be halved 3 times: .* multiples of 8, such as 32x32"),
    (UNet, {"image_size": [64, 60]}, "64x60 pixels cannot be halved 3 times: .* such as 64x64"),
    (UNet, {"image_size": [64]}, "image_size must be one whole number or"),
    (ViT, {"image_size": [32, 30], "patch_size": 4}, "patch_size 4 does not divide the picture's width of 30 pixels"),
    (ViT, {"image_size": 28, "patch_size": 7, "num_patches": 49}, "is 49, but 28x28 pixels make 4 x 4 = 16 patches of"),
    (ViT, {"width": 64, "heads": 3}, "width 64 cannot be shared by 3 heads: heads must divide it"),
    (ViT, {"width": "wide"}, "width must be a whole number of at least 1, not 'wide'"),
    (ViT, {"patch_size": [4]}, "patch_size must be one whole number or"),
    (TextTransformer, {"width": 15}, "width must be a multiple of 2 and of num_heads"),
    (TextTransformer, {"num_classes": 0}, "num_classes must be a whole number"),
    (TextTransformer, {"dropout": 1.5}, "dropout probability has to be between 0 and 1"),
    (TextTransformer, {"pooling": "first"}, "pooling must be mean or end"),
    (TextTransformer, {"padding": 50}, "padding must be a token, from 0 to 49"),
    (TableNet, {"members": 0}, "members must be"),
    (TableNet, {"depth": -1}, "depth must be"),
    (TableNet, {"num_numbers": 0}, "must be a column"),
    (DiscreteVAE, {"image_size": 28}, "image_size must be a power of two, not 28: 16 and 32 are the nearest"),
    (DiscreteVAE, {"image_size": [8, 8]}, "image_size must be one whole number of pixels"),
    (DiscreteVAE, {"num_layers": 4}, "image_size 8 cannot be halved 4 times; num_layers is at most 3"),
    (DiscreteVAE, {"num_layers": 0}, "num_layers must be a whole number of at least 1, not 0"),
    (DiscreteVAE, {"num_tokens": 1}, "num_tokens must be a whole number of at least 2, not 1"),
    (DiscreteVAE, {"temperature": 0}, "temperature must be above 0, not 0"),
    *(
        (network, {"image_size": size}, r"image_size must be 4, 5, 6 or 7 doubled once or more \(8, 16, 28")
        for network in (DCGAN.Generator, DCGAN.Discriminator)
        for size in (4, 9, 0, 8.0)
    ),
]
RIGHT = {
    SimpleCNN: {"num_classes": 10, "num_channels": 1},
    ResNet18: {"num_classes": 10},
    UNet: {"num_classes": 2},
    ViT: {"num_classes": 10},
    TextTransformer: {"num_classes": 3, "vocabulary_size": 50, "width": 16, "num_heads": 2},
    TableNet: {"num_numbers": 2, "num_outputs": 1},
    DiscreteVAE: VAE_PARAMS,
    DCGAN.Generator: {"num_channels": 1},
    DCGAN.Discriminator: {"num_channels": 1},
}


@pytest.mark.parametrize(("make", "params", "words"), IMPOSSIBLE)
def test_impossible_arguments(make, params, words):
    """An impossible argument is a ValueError with its value and the allowed ones."""
    with pytest.raises(ValueError, match=words):
        make(**RIGHT[make] | params)


@pytest.mark.parametrize(
    ("make", "params", "given", "words"),
    [
        (SimpleCNN, {}, (2, 1, 8, 8), r"images are 8x8, .* made for 28x28: .* image_size: \[8, 8\]"),
        (UNet, {}, (1, 3, 20, 16), r"pictures of 20x16 pixels cannot be halved 3 times: .* such as 16x16"),
        (UNet, {}, (1, 3, 2, 2), "such as 8x8"),
        (
            *(ViT, VIT_PARAMS | {"num_channels": 1, "image_size": 8, "patch_size": 4}, (1, 1, 16, 8)),
            r"images are 16x8, .* made for 8x8: give it image_size: \[16, 8\]",
        ),
        (DiscreteVAE, {}, (1, 3, 16, 16), r"\(3, 16, 16\), but this DiscreteVAE was made for \(3, 8, 8\)"),
    ],
)
def test_pictures_of_another_size(make, params, given, words):
    """The error has both sizes and the remedy; without a declared size the first unsuitable picture is reported."""
    with pytest.raises(ValueError, match=words):
        make(**RIGHT[make] | params)(torch.zeros(given))


def test_pixels_of_a_unet_see_their_surroundings():
    """The logits of a pixel depend on distant pixels, and on the pixel itself."""
    torch.manual_seed(0)
    network, images = UNet(2, depth=3, width=4).eval(), torch.rand(1, 3, 32, 32, requires_grad=True)
    network(images)[0, 0, 16, 16].backward()
    seen = images.grad[0].abs().sum(0) > 0
    assert seen[16, 16]
    assert seen.sum() > 20 * 20


def test_attention_is_torchs():
    """torch's MultiheadAttention with the same weights gives the same numbers."""
    torch.manual_seed(0)
    ours, theirs = Attention(12, 3), torch.nn.MultiheadAttention(12, 3, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.asked.weight)
        theirs.in_proj_bias.copy_(ours.asked.bias)
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    tokens = torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(tokens), theirs(tokens, tokens, tokens, need_weights=False)[0])


def test_a_vit_becomes_a_bundle(tmp_path):
    """ONNX Runtime gives the same answers as torch for batches of any size."""
    network = Pixels(ViT(3, width=16, depth=2, heads=2, image_size=(6, 5), patch_size=(3, 5)), nn.Softmax(1))
    task, folder = exported(tmp_path, "image_classification", network)
    session = onnxruntime.InferenceSession(str(folder.bundle_model))
    for size in (1, 4, 5):
        samples = torch.randint(256, (size, 3, 6, 5), dtype=torch.uint8)
        (answers,) = session.run(None, {"images": samples.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(answers), task.inference_model()(samples))


# ---- of the examples


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (16, 3), (28, 1), (32, 3), (64, 1), (12, 2)])
def test_noise_becomes_pictures_and_pictures_numbers(size, channels):
    """Pictures have the configured size, values from -1 to 1 and one score each; every parameter gets a gradient."""
    generator = DCGAN.Generator(size, channels, latent_size=5, width=2)
    discriminator = DCGAN.Discriminator(size, channels, width=2)
    pictures = generator(torch.randn(4, generator.latent_size))
    assert pictures.shape == (4, channels, size, size)
    assert pictures.abs().max() <= 1
    answers = discriminator(pictures)
    assert answers.shape == (4,)
    answers.sum().backward()
    assert all(parameter.grad is not None for parameter in (*generator.parameters(), *discriminator.parameters()))


def test_weights_are_drawn_as_the_paper_says():
    """Weights are drawn from N(0, 0.02), and the scales of batch norm from N(1, 0.02)."""
    torch.manual_seed(0)
    generator = DCGAN.Generator(32, 3, latent_size=64, width=32)
    assert generator.project.weight.std().item() == pytest.approx(0.02, rel=0.02)
    scales = torch.cat([m.weight for m in generator.modules() if isinstance(m, torch.nn.BatchNorm2d)])
    assert scales.mean().item() == pytest.approx(1, abs=0.01)
    assert scales.std().item() == pytest.approx(0.02, rel=0.25)


@pytest.mark.parametrize(("size", "layers", "side"), [(8, 1, 4), (8, 3, 1), (16, 2, 4), (32, 2, 8)])
def test_pictures_come_back_through_a_grid_of_tokens(size, layers, side):
    """A reconstruction has the size of its picture, each layer halves the side of the token grid, and every parameter
    gets a gradient."""
    network = DiscreteVAE(**VAE_PARAMS | {"image_size": size, "num_layers": layers})
    images = torch.randn(2, 3, size, size)
    outputs = network(images)
    assert outputs["reconstruction"].shape == images.shape
    assert outputs["logits"].shape == (2, 5, side, side)
    (outputs["reconstruction"] - images).square().mean().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_evaluation_takes_the_likeliest_token():
    """Evaluation is deterministic: the decoder gets the likeliest tokens."""
    network = DiscreteVAE(**VAE_PARAMS).eval()
    images = torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        outputs = network(images)
        tokens = outputs["logits"].argmax(1)
        assert torch.equal(network.encode(images), tokens)
        assert torch.equal(network(images)["reconstruction"], outputs["reconstruction"])
        vectors = network.codebook.weight[:, :, 0, 0].T[tokens]  # (3, 4, 4, D): looked up, not multiplied
        expected = network.decoder(vectors.permute(0, 3, 1, 2))
    torch.testing.assert_close(outputs["reconstruction"], expected)


def test_draws_follow_from_torchs_generator():
    """In training the same seed gives the same draw, and another seed another one."""
    network, images = DiscreteVAE(**VAE_PARAMS), torch.randn(2, 3, 8, 8)

    def drawn(seed):
        torch.manual_seed(seed)
        return network(images)["reconstruction"]

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def codebook_input(**settings):
    """Return the input of the codebook in training, (B, K, h, w)."""
    network, seen = DiscreteVAE(**VAE_PARAMS | settings), []
    network.codebook.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    torch.manual_seed(0)
    network(torch.randn(4, 3, 8, 8))["reconstruction"].sum().backward()
    assert network.encoder[0].weight.grad.abs().sum() > 0  # gradients pass, however the token was chosen
    return seen[0].detach()


def test_temperature_and_straight_through():
    """With `straight_through` each position has one token; otherwise a mixture, which is closer to one token at a lower
    temperature."""
    hard = codebook_input(straight_through=True)
    cold, warm = codebook_input(temperature=0.05), codebook_input(temperature=5.0)
    torch.testing.assert_close(hard, torch.nn.functional.one_hot(hard.argmax(1), 5).permute(0, 3, 1, 2).float())
    assert warm.max(1).values.mean() < 0.5 < 0.9 < cold.max(1).values.mean() < 1


LOSSES = module_of("vqvae/vae_losses.py")
TRUTH = torch.linspace(-2, 2, 96).view(3, 2, 4, 4)


def divergence(logits):
    """Return the mean over pictures and positions, computed by torch.distributions."""
    q = Categorical(logits=logits.permute(0, 2, 3, 1))
    return kl_divergence(q, Categorical(logits=torch.zeros_like(q.logits))).mean()


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_the_loss_is_error_plus_weighted_divergence(weight):
    """The loss is error + kl_weight * KL(q || uniform), both as means, for either kind of error."""
    torch.manual_seed(0)
    outputs = {"reconstruction": torch.randn(3, 2, 4, 4), "logits": 3 * torch.randn(3, 7, 2, 2, requires_grad=True)}
    weighted, difference = weight * divergence(outputs["logits"]), (outputs["reconstruction"] - TRUTH).abs()
    torch.testing.assert_close(LOSSES.DiscreteVAELoss(weight)(outputs, TRUTH), difference.square().mean() + weighted)
    smooth = torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean()
    torch.testing.assert_close(LOSSES.DiscreteVAELoss(weight, "smooth_l1")(outputs, TRUTH), smooth + weighted)


def test_divergence_runs_from_0_to_the_logarithm_of_the_tokens():
    """The divergence is 0 if all tokens are equally likely, and ln K, not infinite, if one is certain."""
    certain = torch.zeros(1, 8, 1, 1)
    certain[:, 3] = 1e4
    assert LOSSES.UniformDivergence()({"logits": torch.zeros(2, 8, 3, 3)}, TRUTH).item() == pytest.approx(0, abs=1e-6)
    assert LOSSES.UniformDivergence()({"logits": certain}, TRUTH).item() == pytest.approx(math.log(8))
