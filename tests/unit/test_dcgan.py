"""The DCGAN pair: what it takes and gives, and what it refuses."""

import pytest
import torch
from example_code import module_of

networks = module_of("dcgan/dcgan.py")
Generator, Discriminator = networks.Generator, networks.Discriminator


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (16, 3), (28, 1), (32, 3), (64, 1), (12, 2)])
def test_noise_becomes_pictures_and_pictures_numbers(size, channels):
    """Pictures of the size that is asked for, from -1 to 1; one number for each; all of both networks learns."""
    generator = Generator(size, channels, latent_size=5, width=2)
    discriminator = Discriminator(size, channels, width=2)
    made = generator(torch.randn(4, generator.latent_size))
    assert made.shape == (4, channels, size, size)
    assert made.abs().max() <= 1
    answers = discriminator(made)
    assert answers.shape == (4,)
    answers.sum().backward()
    assert all(parameter.grad is not None for parameter in (*generator.parameters(), *discriminator.parameters()))


def test_weights_are_drawn_as_the_paper_says():
    """From N(0, 0.02), and the scales of batch norm from N(1, 0.02)."""
    torch.manual_seed(0)
    generator = Generator(32, 3, latent_size=64, width=32)
    assert generator.project.weight.std().item() == pytest.approx(0.02, rel=0.02)
    scales = torch.cat([m.weight for m in generator.modules() if isinstance(m, torch.nn.BatchNorm2d)])
    assert scales.mean().item() == pytest.approx(1, abs=0.01)
    assert scales.std().item() == pytest.approx(0.02, rel=0.25)


@pytest.mark.parametrize("network", [Generator, Discriminator])
@pytest.mark.parametrize("size", [4, 9, 0, 8.0])
def test_impossible_sizes_are_refused(network, size):
    """What four to seven places cannot be doubled to is a ValueError that says what can."""
    with pytest.raises(ValueError, match=r"image_size must be 4, 5, 6 or 7 doubled once or more \(8, 16, 28"):
        network(size, 1)
