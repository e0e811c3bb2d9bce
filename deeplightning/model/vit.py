"""The Vision Transformer, which treats the patches of a picture as tokens (Dosovitskiy et al. 2021,
https://arxiv.org/abs/2010.11929).

B batch, C channels, H height, W width of the picture; N patches; D width; K classes.
"""

from collections.abc import Sequence

import torch
from torch import nn

from deeplightning.model.attention import Block
from deeplightning.model.sizes import check_pictures, check_sizes, height_and_width


class ViT(nn.Module):
    """A transformer of `depth` pre-norm blocks over patches and a class token with learned positions; the class token
    is classified.

    With the default width, depth and heads it has 2.7 million parameters; the paper's ViT-B/16 is `image_size: 224,
    patch_size: 16, width: 768, depth: 12, heads: 12`. Its tensors have other names than torchvision's.

    Args:
        num_classes: K, at least 1.
        num_channels: C, at least 1.
        image_size: in pixels, one number for a square or [H, W].
        patch_size: in pixels, one number for a square or [height, width]; must divide the picture's size.
        num_patches: N, as a check: must equal the number that the sizes give. None: no check.
        width: D, at least 1; divisible by `heads`.
        depth: number of blocks, at least 1.
        heads: number of attention heads, at least 1.
        mlp_width: width of the hidden layer in each block's MLP; None: four times `width`.
        dropout: probability, after the positions and inside each block; 0: no dropout.

    Attributes:
        num_patches: N.

    Raises:
        ValueError: an argument is invalid, alone or in combination with another.
    """

    def __init__(
        self,
        num_classes: int,
        num_channels: int = 3,
        image_size: int | Sequence[int] = 32,
        patch_size: int | Sequence[int] = 4,
        num_patches: int | None = None,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
        mlp_width: int | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        check_sizes(num_classes=num_classes, num_channels=num_channels, width=width, depth=depth, heads=heads)
        mlp_width = 4 * width if mlp_width is None else mlp_width
        check_sizes(mlp_width=mlp_width)
        if width % heads:
            raise ValueError(f"width {width} cannot be shared by {heads} heads: heads must divide it")
        self.image_size = height_and_width("image_size", image_size)
        patch = height_and_width("patch_size", patch_size)
        for side, piece, word in zip(self.image_size, patch, ("height", "width"), strict=True):
            if side % piece:
                raise ValueError(f"patch_size {piece} does not divide the picture's {word} of {side} pixels")
        rows, columns = (side // piece for side, piece in zip(self.image_size, patch, strict=True))
        self.num_patches = rows * columns
        if num_patches is not None and num_patches != self.num_patches:
            raise ValueError(
                f"num_patches is {num_patches!r}, but {self.image_size[0]}x{self.image_size[1]} pixels make {rows} x "
                f"{columns} = {self.num_patches} patches of {patch[0]}x{patch[1]}; leave it out, or change a size"
            )
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, self.num_patches + 1, width))
        self.patches = nn.Conv2d(num_channels, width, kernel_size=patch, stride=patch)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, mlp_width, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, float (B, K).

        Args:
            images: float (B, C, H, W).

        Raises:
            ValueError: the images do not have the network's `image_size`.
        """
        check_pictures(self, images, self.image_size)
        tokens = self.patches(images).flatten(2).transpose(1, 2)  # (B, N, D)
        tokens = torch.cat([self.class_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)  # (B, N + 1, D)
        tokens = self.blocks(self.dropout(tokens + self.positions))
        return self.head(self.norm(tokens[:, 0]))
