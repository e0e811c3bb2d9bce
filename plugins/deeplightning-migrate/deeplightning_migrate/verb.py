"""Define the verb `deeplightning migrate`. Heavy imports are inside the function, so that `--help` is fast."""

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
    help="The system that FILE is written for.",
)
def migrate(files: tuple[Path, ...], write: bool, system: str) -> None:
    """Convert FILEs of another system to a config and print it; with --write, write it next to FILE as
    NAME.deeplightning.yaml.

    FILEs of LightningCLI and Hydra form one project; what cannot be converted is an error with its line. For the other
    systems, a TODO comment marks each line that needs review. Python files are parsed, never run.
    """
    from deeplightning_migrate.older_systems import convert

    say(convert(files, system, write), nl=False)
