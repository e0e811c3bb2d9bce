"""The two convolutional networks of a DCGAN: one generates pictures from noise, one distinguishes them from real ones.

Radford et al., "Unsupervised Representation Learning with Deep Convolutional Generative Adversarial Networks", 2016,
https://arxiv.org/abs/1511.06434: strided convolutions instead of pooling, batch norm except next to the pictures,
ReLU in the generator and LeakyReLU in the discriminator, weights drawn from N(0, 0.02).

B batch, Z noise dimensions, C channels, S side of a picture.
"""

from itertools import pairwise

from torch import Tensor, nn


class Generator(nn.Module):
    """Maps noise to a picture: a grid with sides of 4 to 7 is doubled until it has the size of the picture.

    Args:
        image_size: S: 4, 5, 6 or 7 doubled once or more (8, 16, 28, 32, 64 …); pictures are square.
        num_channels: C, at least 1.
        latent_size: Z, at least 1.
        width: channels of the layer before the picture; each earlier layer has twice as many.

    Attributes:
        latent_size: Z, for drawing the noise.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(self, image_size: int, num_channels: int, latent_size: int = 64, width: int = 32):
        super().__init__()
        _check(num_channels=num_channels, latent_size=latent_size, width=width)
        doublings = _doublings(image_size)
        self.latent_size = latent_size
        channels = [width * 2**number for number in reversed(range(doublings))]  # the last is `width`
        self.start = (channels[0], image_size >> doublings, image_size >> doublings)
        layers: list[nn.Module] = [nn.BatchNorm2d(channels[0]), nn.ReLU()]
        for before, after in pairwise(channels):
            layers += [nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.project = nn.Linear(latent_size, channels[0] * self.start[1] * self.start[2], bias=False)
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(channels[-1], num_channels, 4, 2, 1), nn.Tanh())
        self.apply(_initialize)

    def forward(self, noise: Tensor) -> Tensor:
        """Map float (B, Z), drawn from N(0, 1), to float (B, C, S, S) from -1 to 1."""
        return self.layers(self.project(noise).unflatten(1, self.start))


class Discriminator(nn.Module):
    """Maps each picture to a logit: the higher, the more likely the picture is real.

    Args:
        image_size: S, as the generator's.
        num_channels: C, at least 1.
        width: channels of the layer after the picture; each later layer has twice as many.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(self, image_size: int, num_channels: int, width: int = 32):
        super().__init__()
        _check(num_channels=num_channels, width=width)
        halvings = _doublings(image_size)
        layers: list[nn.Module] = [nn.Conv2d(num_channels, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for number in range(1, halvings):
            before, after = width * 2 ** (number - 1), width * 2**number
            layers += [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers)
        self.answer = nn.Linear(width * 2 ** (halvings - 1) * (image_size >> halvings) ** 2, 1)
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        """Map float (B, C, S, S) from -1 to 1 to logits, float (B,): above 0 means real."""
        return self.answer(self.layers(images).flatten(1)).squeeze(1)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def _doublings(image_size: object) -> int:
    """Return how many times 4, 5, 6 or 7 is doubled to give a size."""
    if isinstance(image_size, int) and not isinstance(image_size, bool):
        for times in range(1, image_size.bit_length()):
            if image_size % 2**times == 0 and 4 <= image_size >> times <= 7:
                return times
    raise ValueError(
        f"image_size must be 4, 5, 6 or 7 doubled once or more (8, 16, 28, 32, 64 …), not {image_size!r}; give the "
        "data module the same image_size"
    )


def _check(**numbers: object) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")
