"""Define the verb `deeplightning push`. Heavy imports are inside the function, so that `--help` is fast."""

from pathlib import Path

import click

from deeplightning.cli.group import folder_of, with_run
from deeplightning.process.terminal import say


@click.command()
@with_run
@click.argument("address", metavar="hf://USER/NAME|mlflow://NAME")
@click.option(
    "--to", metavar="DIR", type=click.Path(file_okay=False, path_type=Path), help="Write the files to DIR instead."
)
def push(run: str, address: str, to: Path | None) -> None:
    """Publish RUN: bundle, config and model card to Hugging Face, or its MLflow model to its store's registry.

    Hugging Face requires HF_TOKEN; a new repository is private. With --to nothing is sent. Files with pickled data,
    secrets and paths of this machine are never published.
    """
    from deeplightning_hub import push as publisher

    kind, name = publisher.parse(address)
    if to is not None:
        left_out, target = publisher.write(folder_of(run), name.rpartition("/")[2], to), str(to)
    elif kind == "hf":
        target, left_out = publisher.upload(folder_of(run), name)
    else:
        target, left_out = publisher.register(run, name), []
    for file in left_out:
        say(f"left out: {file}, which contains pickled data", err=True)
    if kind == "hf" or to is not None:
        say("bundle.json contains samples of the data; fill in the licence and the limits in README.md", err=True)
    say(target)
