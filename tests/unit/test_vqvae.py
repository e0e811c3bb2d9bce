"""The discrete VAE: what it takes and gives, what it draws, and what it refuses."""

import pytest
import torch
from example_code import module_of

DiscreteVAE = module_of("vqvae/discrete_vae.py").DiscreteVAE

SMALL = {"image_size": 8, "num_channels": 3, "num_tokens": 5, "codebook_dim": 4, "num_layers": 1, "width": 6}


@pytest.mark.parametrize(("size", "layers", "side"), [(8, 1, 4), (8, 3, 1), (16, 2, 4), (32, 2, 8)])
def test_pictures_come_back_through_a_grid_of_tokens(size, layers, side):
    """A picture comes back as large as it was, from tokens on a grid whose side is halved by each layer; all of the
    network learns."""
    network = DiscreteVAE(**SMALL | {"image_size": size, "num_layers": layers})
    images = torch.randn(2, 3, size, size)
    outputs = network(images)
    assert outputs["reconstruction"].shape == images.shape
    assert outputs["logits"].shape == (2, 5, side, side)
    (outputs["reconstruction"] - images).square().mean().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_evaluation_takes_the_likeliest_token():
    """In evaluation nothing is drawn: the answer is what the decoder makes of the likeliest tokens, each time."""
    network = DiscreteVAE(**SMALL).eval()
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
    """In training the same seed gives the same draw, another seed another one."""
    network, images = DiscreteVAE(**SMALL), torch.randn(2, 3, 8, 8)

    def drawn(seed):
        torch.manual_seed(seed)
        return network(images)["reconstruction"]

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def weights(**settings):
    """What the codebook is given in training, (B, K, h, w)."""
    network, seen = DiscreteVAE(**SMALL | settings), []
    network.codebook.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    torch.manual_seed(0)
    network(torch.randn(4, 3, 8, 8))["reconstruction"].sum().backward()
    assert network.encoder[0].weight.grad.abs().sum() > 0  # gradients pass, however the token was chosen
    return seen[0].detach()


def test_temperature_and_straight_through():
    """Straight through, each place has one token; else a mixture, which is the nearer to one the colder it is."""
    hard, cold, warm = weights(straight_through=True), weights(temperature=0.05), weights(temperature=5.0)
    torch.testing.assert_close(hard, torch.nn.functional.one_hot(hard.argmax(1), 5).permute(0, 3, 1, 2).float())
    assert warm.max(1).values.mean() < 0.5 < 0.9 < cold.max(1).values.mean() < 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"image_size": 28}, "image_size must be a power of two, not 28: 16 and 32 are the next"),
        ({"image_size": [8, 8]}, "image_size must be a power of two, one whole number"),
        ({"num_layers": 4}, "image_size 8 cannot be halved 4 times; num_layers is at most 3"),
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1, not 0"),
        ({"num_tokens": 1}, "num_tokens must be a whole number of at least 2, not 1"),
        ({"temperature": 0}, "temperature must be above 0, not 0"),
    ],
)
def test_impossible_arguments_are_refused(settings, words):
    """What cannot be built is a ValueError that says what can."""
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        DiscreteVAE(**SMALL | settings)


def test_pictures_of_another_shape_are_refused():
    """Pictures of another size or number of channels than it was made for are named, with what it was made for."""
    with pytest.raises(ValueError, match=r"\(3, 16, 16\), but this DiscreteVAE was made for \(3, 8, 8\)"):
        DiscreteVAE(**SMALL)(torch.zeros(1, 3, 16, 16))
