"""Check the sizes that networks are built with."""

from collections.abc import Sequence

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
