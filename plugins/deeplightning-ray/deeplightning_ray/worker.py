"""Train as one process of a run on a Ray cluster: `python -P -m deeplightning_ray.worker`, which the agent starts."""

import sys

import click

from deeplightning.cli import main
from deeplightning.cli.group import session
from deeplightning.process import streams
from deeplightning_ray.worker_stdin import receive


@click.command()
def worker() -> None:
    """Train the config that the launcher sends to standard input."""
    streams.ignore_closed_stdout()
    cfg = receive()
    session().redact = cfg.redact_message
    from deeplightning.run.train import launch
    from deeplightning_ray.ray_elastic import GroupGrows, fetch, store_all
    from deeplightning_ray.storage import RESIZE_EXIT_CODE

    fetch(cfg)
    try:
        folder = launch(cfg)
    except GroupGrows:
        sys.exit(RESIZE_EXIT_CODE)
    store_all(cfg, folder.path)


if __name__ == "__main__":
    main(worker)
