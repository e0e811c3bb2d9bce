"""What is logged, for a terminal or a file: nothing in a line can steer a terminal, wherever its words come from."""

import logging

from deeplightning.process.terminal import LAYOUT
from deeplightning.words import printable


class Printable(logging.Formatter):
    """Writes escapes for what could steer a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), LAYOUT)


def escape_warnings() -> None:
    """Has Python write the warnings of a process that has set up no log in this format."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Printable())
