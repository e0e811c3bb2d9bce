"""Log formatting: control characters in a record, wherever its text comes from, cannot steer a terminal."""

import logging

from deeplightning.process.terminal import LAYOUT
from deeplightning.words import printable


class Printable(logging.Formatter):
    """Escape control characters in log records."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), LAYOUT)


def escape_warnings() -> None:
    """Format warnings with `Printable` in a process that has not configured logging."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Printable())
