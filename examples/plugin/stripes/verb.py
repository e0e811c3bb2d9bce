"""The verb `deeplightning stripes`."""

from pathlib import Path

import click

from .draw import NAMES


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--direction", type=click.Choice(NAMES), default=NAMES[0], show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
def stripes(file: Path, direction: str, seed: int) -> None:
    """Draw a picture of stripes into FILE, to send it to the endpoint."""
    import numpy as np
    from PIL import Image

    from .draw import draw

    try:
        Image.fromarray(draw(NAMES.index(direction), np.random.RandomState(seed))).save(file)
    except (OSError, ValueError) as error:  # no such folder, or an extension that Pillow does not support
        raise click.ClickException(f"{file}: {error}") from error
