"""The command `deeplightning VERB`: it runs one verb and turns errors into messages and exit codes."""

import os
import sys

import click

from deeplightning.cli import commands_config  # noqa: F401 (adds its verbs to the group)
from deeplightning.cli.exit_codes import interrupted, run_verb
from deeplightning.cli.group import cli
from deeplightning.process import garbage, streams
from deeplightning.process.identity import RANK_VARIABLES
from deeplightning.runfolder import remember_start_folder


def _import_rest() -> None:
    from deeplightning.cli import commands_run  # noqa: F401


cli.import_rest = _import_rest


def main(verb: click.Command = cli) -> None:
    """Run a verb, by default the one on the command line, and end the process with its exit code."""
    try:
        streams.prepare()
        garbage.postpone()
        # Waiting threads must not spin; torch reads this when it is imported. Two spinning OpenMP threads next to a
        # busy process ran 9 to 23 times slower than one thread (November 2026).
        os.environ.setdefault("GOMP_SPINCOUNT", "0")
        if any(name in os.environ for name in RANK_VARIABLES):  # may be one of several processes
            from deeplightning.process import member

            member.join_launch()
        with remember_start_folder():
            code = run_verb(verb)
    except KeyboardInterrupt:
        code = interrupted()
    streams.release()
    sys.exit(code)
