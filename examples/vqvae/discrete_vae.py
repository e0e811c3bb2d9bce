"""A discrete variational autoencoder: pictures become a small grid of tokens of a codebook, and pictures again.

The first stage of DALL-E (Ramesh et al., "Zero-Shot Text-to-Image Generation", 2021, https://arxiv.org/abs/2102.12092),
small. While it learns, tokens are drawn by the Gumbel-softmax (Jang et al., "Categorical Reparameterization with
Gumbel-Softmax", 2017, https://arxiv.org/abs/1611.01144); in evaluation each token is the likeliest.

B batch, C channels, S side of the picture, K tokens of the codebook, D width of the codebook, h side of the grid.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class DiscreteVAE(nn.Module):
    """Halves a picture's sides by each of its layers, chooses one token for each place of what is left, and draws the
    picture from the tokens.

    Args:
        image_size: S, a power of two; pictures are square.
        num_channels: C, at least 1.
        num_tokens: K, at least 2.
        codebook_dim: D, at least 1.
        num_layers: halvings, at least 1: h = S / 2**num_layers, at least 1.
        width: channels of the layers between.
        temperature: of the Gumbel-softmax, above 0; the nearer to 0, the nearer each draw is to a single token.
        straight_through: true: a draw is a single token, and gradients pass as if it were the soft one; false: it is
            a mixture of tokens.

    Raises:
        ValueError: if an argument is impossible.
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
        least = {"num_channels": 1, "num_tokens": 2, "codebook_dim": 1, "num_layers": 1, "width": 1}
        given = (num_channels, num_tokens, codebook_dim, num_layers, width)
        for (name, low), number in zip(least.items(), given, strict=True):
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
        self.codebook = nn.Conv2d(num_tokens, codebook_dim, 1, bias=False)  # of one token it gives that token's vector
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
            ValueError: if the images are not of the shape the network was made for.
        """
        logits = self.logits(images)
        if self.training:
            # Drawn from torch's own generator and nothing else, so that a run can be repeated.
            weights = functional.gumbel_softmax(logits, tau=self.temperature, hard=self.straight_through, dim=1)
            return {"reconstruction": self.decoder(self.codebook(weights)), "logits": logits}
        return {"reconstruction": self.decode(logits.argmax(1)), "logits": logits}

    def logits(self, images: Tensor) -> Tensor:
        """How likely each token is at each place: float (B, C, S, S) → float (B, K, h, h)."""
        expected = (self.num_channels, self.image_size, self.image_size)
        if images.shape[1:] != expected:
            raise ValueError(
                f"the images are {tuple(images.shape[1:])}, but this DiscreteVAE was made for {expected} "
                "(num_channels, image_size, image_size)"
            )
        return self.encoder(images)

    def encode(self, images: Tensor) -> Tensor:
        """The likeliest tokens: float (B, C, S, S) → int64 (B, h, h)."""
        return self.logits(images).argmax(1)

    def decode(self, tokens: Tensor) -> Tensor:
        """The picture of tokens: int64 (B, h, h) → float (B, C, S, S)."""
        weights = tokens.unsqueeze(1) == torch.arange(self.num_tokens, device=tokens.device).view(1, -1, 1, 1)
        return self.decoder(self.codebook(weights.to(self.codebook.weight.dtype)))


class _Residual(nn.Module):
    """Adds to its input (B, width, h, h) what two convolutions make of it."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _check_size(image_size: object, num_layers: int) -> None:
    if not _is_whole(image_size) or image_size < 1:  # type: ignore[operator]
        raise ValueError(f"image_size must be a power of two, one whole number of pixels, not {image_size!r}")
    assert isinstance(image_size, int)
    if image_size & (image_size - 1):
        above = 1 << image_size.bit_length()
        raise ValueError(
            f"image_size must be a power of two, not {image_size}: {above // 2} and {above} are the next; give the "
            "data module the same image_size"
        )
    if image_size < 2**num_layers:
        raise ValueError(
            f"image_size {image_size} cannot be halved {num_layers} times; num_layers is at most "
            f"{image_size.bit_length() - 1}"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
