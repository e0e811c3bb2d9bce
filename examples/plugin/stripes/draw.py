"""Draw the pictures. Imports neither torch nor Deep Lightning, so that the verb starts quickly."""

import numpy as np

NAMES = ["vertical", "rising", "horizontal", "falling"]
SIZE = 16


def draw(direction: int, random: np.random.RandomState) -> np.ndarray:
    """Return one picture.

    Args:
        direction: index of its name in `NAMES`.
        random: generator of width, contrast, shift and noise.

    Returns:
        uint8, (16, 16).
    """
    turn = np.pi / 4 * direction + random.uniform(-0.2, 0.2)
    down, right = np.mgrid[:SIZE, :SIZE]
    wave = np.cos(
        random.uniform(0.8, 1.4) * (right * np.cos(turn) + down * np.sin(turn)) + random.uniform(0, 2 * np.pi)
    )
    noisy = 128 + random.uniform(30, 100) * wave + random.normal(0, 25, wave.shape)
    return noisy.clip(0, 255).astype(np.uint8)
