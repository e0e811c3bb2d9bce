"""Check the sizes that networks are built with, and those of the pictures that they get."""

from collections.abc import Sequence

from torch import Tensor, nn

from deeplightning.words import is_whole


def check_sizes(**sizes: object) -> None:
    """Raise ValueError unless each of these arguments is a whole number of at least 1."""
    for name, size in sizes.items():
        if not is_whole(size, 1):
            raise ValueError(f"{name} must be a whole number of at least 1, not {size!r}")


def height_and_width(name: str, size: int | Sequence[int], least: int = 1) -> tuple[int, int]:
    """Return the argument `name`, one number for a square or two, as (height, width).

    Raises:
        ValueError: it is something else, or a side has fewer pixels than `least`.
    """
    sides = size if isinstance(size, Sequence) else (size, size)
    if len(sides) != 2 or not all(is_whole(side, least) for side in sides):
        raise ValueError(f"{name} must be one whole number or [height, width], each at least {least}, not {size!r}")
    return sides[0], sides[1]


def check_pictures(network: nn.Module, images: Tensor, size: tuple[int, int]) -> None:
    """Raise ValueError unless pictures, (B, C, H, W), have the size that a network was made for."""
    if images.shape[2:] != size:
        height, width = images.shape[2:]
        raise ValueError(
            f"the images are {height}x{width}, but this {type(network).__name__} was made for {size[0]}x{size[1]}: "
            f"give it image_size: [{height}, {width}]"
        )
