"""Define the verb `deeplightning tune`. Heavy imports are inside the function, so that `--help` is fast."""

from pathlib import Path

import click

from deeplightning.cli.commands_config import train_here
from deeplightning.cli.group import LOOSE, OVERRIDES, with_config
from deeplightning.process import streams


@click.command(context_settings=LOOSE, epilog=OVERRIDES)
@with_config()
def tune(config: Path, overrides: tuple[str, ...]) -> None:
    """Search for the best values of the keys in CONFIG's `tune.space`.

    Each trial is a run. The same command resumes a search that was interrupted. The last line on stdout is the
    folder with best.yaml, the table of trials and pictures.
    """
    from deeplightning.config.source import located
    from deeplightning_tune.search import search

    streams.ignore_closed_stdout()
    search(located(config), overrides, train_here)
