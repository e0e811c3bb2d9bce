"""Define the verb `deeplightning push`. Heavy imports are inside the function, so that `--help` is fast."""

from pathlib import Path

import click

from deeplightning.cli.group import folder_of, with_run
from deeplightning.process.terminal import say


@click.command()
@with_run
@click.argument("address", metavar="hf://USER/NAME|mlflow://NAME")
@click.option(
    "--to", metavar="DIR", type=click.Path(file_okay=False, path_type=Path), help="Write the files there instead."
)
def push(run: str, address: str, to: Path | None) -> None:
    """Publish RUN: bundle, config and a model card to Hugging Face; or its MLflow model in its store's registry.

    Hugging Face requires HF_TOKEN; a new repository is private. With --to nothing is sent. Files with pickle, secrets
    and paths of this machine are never published.
    """
    from deeplightning_hub import push as of

    kind, name = of.parse(address)
    if to is not None:
        left_out, where = of.write(folder_of(run), name.rpartition("/")[2], to), str(to)
    elif kind == "hf":
        where, left_out = of.upload(folder_of(run), name)
    else:
        where, left_out = of.register(run, name), []
    for file in left_out:
        say(f"left out: {file}, which holds pickle", err=True)
    if kind == "hf" or to is not None:
        say("bundle.json holds samples of the data; README.md has a licence and limits to fill in", err=True)
    say(where)
