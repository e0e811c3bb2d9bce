"""A discrete variational autoencoder: encodes pictures as a small grid of codebook tokens, and decodes them.

The first stage of DALL-E (Ramesh et al., "Zero-Shot Text-to-Image Generation", 2021, https://arxiv.org/abs/2102.12092),
small. In training, tokens are sampled by the Gumbel-softmax (Jang et al., "Categorical Reparameterization with
Gumbel-Softmax", 2017, https://arxiv.org/abs/1611.01144); in evaluation, the most likely ones are used.

B batch, C channels, S side of the picture, K tokens in the codebook, D their dimensions, h side of the grid.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class DiscreteVAE(nn.Module):
    """Encodes a picture by layers that halve its sides, chooses a token for each cell of the resulting grid, and
    decodes the tokens to a picture.

    Args:
        image_size: S, a power of two; pictures are square.
        num_channels: C, at least 1.
        num_tokens: K, at least 2.
        codebook_dim: D, at least 1.
        num_layers: number of halvings, at least 1: h = S / 2**num_layers, at least 1.
        width: channels of the hidden layers.
        temperature: of the Gumbel-softmax, above 0; the closer to 0, the closer a sample is to a single token.
        straight_through: true: a sample is a single token, with the gradients of the soft sample; false: it is a
            mixture of tokens.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        image_size: int,
        num_channels: int,
        num_tokens: int = 512,
        codebook_dim: int = 64,
        num_layers: int = 2,
        width: int = 64,
        temperature: float = 0.9,
        straight_through: bool = False,
    ):
        super().__init__()
        minima = {"num_channels": 1, "num_tokens": 2, "codebook_dim": 1, "num_layers": 1, "width": 1}
        given = (num_channels, num_tokens, codebook_dim, num_layers, width)
        for (name, low), number in zip(minima.items(), given, strict=True):
            if not _is_whole(number) or number < low:
                raise ValueError(f"{name} must be a whole number of at least {low}, not {number!r}")
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, not {temperature!r}")
        _check_size(image_size, num_layers)
        self.image_size, self.num_channels = image_size, num_channels
        self.num_tokens, self.temperature, self.straight_through = num_tokens, temperature, straight_through
        layers: list[nn.Module] = []
        for number in range(num_layers):
            layers += [nn.Conv2d(width if number else num_channels, width, 4, stride=2, padding=1), nn.ReLU()]
        self.encoder = nn.Sequential(*layers, _Residual(width), nn.Conv2d(width, num_tokens, 1))
        self.codebook = nn.Conv2d(num_tokens, codebook_dim, 1, bias=False)  # maps a one-hot token to its vector
        layers = [nn.Conv2d(codebook_dim, width, 1), _Residual(width)]
        for _ in range(num_layers):
            layers += [nn.ConvTranspose2d(width, width, 4, stride=2, padding=1), nn.ReLU()]
        self.decoder = nn.Sequential(*layers, nn.Conv2d(width, num_channels, 1))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """
        Args:
            images: float (B, C, S, S).

        Returns:
            `reconstruction`, float (B, C, S, S); `logits` of the tokens, float (B, K, h, h).

        Raises:
            ValueError: the images do not have the size and channels of the network.
        """
        logits = self.logits(images)
        if self.training:
            # Uses only torch's default generator, so that runs are reproducible.
            weights = functional.gumbel_softmax(logits, tau=self.temperature, hard=self.straight_through, dim=1)
            return {"reconstruction": self.decoder(self.codebook(weights)), "logits": logits}
        return {"reconstruction": self.decode(logits.argmax(1)), "logits": logits}

    def logits(self, images: Tensor) -> Tensor:
        """Map images, float (B, C, S, S), to logits of the tokens in each cell, float (B, K, h, h)."""
        expected = (self.num_channels, self.image_size, self.image_size)
        if images.shape[1:] != expected:
            raise ValueError(
                f"the images are {tuple(images.shape[1:])}, but this DiscreteVAE was made for {expected} "
                "(num_channels, image_size, image_size)"
            )
        return self.encoder(images)

    def encode(self, images: Tensor) -> Tensor:
        """Map images, float (B, C, S, S), to their most likely tokens, int64 (B, h, h)."""
        return self.logits(images).argmax(1)

    def decode(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 (B, h, h), to pictures, float (B, C, S, S)."""
        weights = tokens.unsqueeze(1) == torch.arange(self.num_tokens, device=tokens.device).view(1, -1, 1, 1)
        return self.decoder(self.codebook(weights.to(self.codebook.weight.dtype)))


class _Residual(nn.Module):
    """Adds the output of two convolutions to their input, (B, width, h, h)."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _check_size(image_size: object, num_layers: int) -> None:
    if not _is_whole(image_size) or image_size < 1:  # type: ignore[operator]
        raise ValueError(f"image_size must be one whole number of pixels, a power of two, not {image_size!r}")
    assert isinstance(image_size, int)
    if image_size & (image_size - 1):
        above = 1 << image_size.bit_length()
        raise ValueError(
            f"image_size must be a power of two, not {image_size}: {above // 2} and {above} are the nearest; give the "
            "data module the same image_size"
        )
    if image_size < 2**num_layers:
        raise ValueError(
            f"image_size {image_size} cannot be halved {num_layers} times; num_layers is at most "
            f"{image_size.bit_length() - 1}"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
