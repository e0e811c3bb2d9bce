"""Replacements for `deeplightning.cli:main` that run it with a stdout that is closed, full, or without a reader."""

import os
import sys

from deeplightning import cli


def _without_reader(*descriptors: int) -> None:
    reading, writing = os.pipe()
    for descriptor in descriptors:
        os.dup2(writing, descriptor)
    os.close(writing)
    os.close(reading)


def stdout() -> None:
    """Run it with a pipe without a reader as stdout."""
    _without_reader(1)
    cli.main()


def both() -> None:
    """Run it with a pipe without a reader as stdout and stderr."""
    _without_reader(1, 2)
    cli.main()


def full() -> None:
    """Run it with a stdout on a full disk."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    cli.main()


def closed() -> None:
    """Run it as with `>&-`."""
    os.close(1)
    sys.stdout = sys.__stdout__ = None  # type: ignore[misc, assignment]
    cli.main()
