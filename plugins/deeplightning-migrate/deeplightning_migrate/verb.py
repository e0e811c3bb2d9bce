"""The verb `deeplightning migrate`. Heavy imports stand inside it, so that `--help` answers at once."""

from pathlib import Path

import click

from deeplightning.process.terminal import say


@click.command()
@click.argument("files", metavar="FILE…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--write", is_flag=True, help="Write the configs; default: print them.")
@click.option(
    "--from",
    "system",
    required=True,
    type=click.Choice(["stoke", "raysgd", "bolt", "universal", "lightning-cli", "hydra"]),
    help="The system whose config or script FILE is.",
)
def migrate(files: tuple[Path, ...], write: bool, system: str) -> None:
    """Convert FILEs of another system to a config and print it; with --write, put it beside FILE, which stays, as
    NAME.deeplightning.yaml.

    FILEs of LightningCLI and of Hydra are one project; what cannot be converted is a fault at its line. For the others
    a comment is at each line that needs a person. A FILE in Python is read, never run.
    """
    from deeplightning_migrate.older_systems import convert

    say(convert(files, system, write), nl=False)
