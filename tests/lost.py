"""`deeplightning` whose stdout is closed, full, or has lost its reader; instead of `deeplightning.cli:main`."""

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
    """Nobody reads its stdout."""
    _without_reader(1)
    cli.main()


def both() -> None:
    """Nobody reads what it says at all."""
    _without_reader(1, 2)
    cli.main()


def full() -> None:
    """Its stdout is a file on a full disk."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    cli.main()


def closed() -> None:
    """Started with `>&-`."""
    os.close(1)
    sys.stdout = sys.__stdout__ = None  # type: ignore[misc, assignment]
    cli.main()
