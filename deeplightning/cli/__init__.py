"""The command `deeplightning VERB`: words from the shell become one call, errors become notes and exit codes."""

import os
import sys

import click

from deeplightning.cli import commands_config  # noqa: F401 (its verbs join the group)
from deeplightning.cli.exit_codes import interrupted, run_verb
from deeplightning.cli.group import cli
from deeplightning.process import garbage, streams
from deeplightning.process.identity import RANK_VARIABLES
from deeplightning.runfolder import started_here


def _import_rest() -> None:
    from deeplightning.cli import commands_run  # noqa: F401


cli.import_rest = _import_rest


def main(verb: click.Command = cli) -> None:
    """Run a verb, that of the command line if none is given, and end the process with its exit code."""
    try:
        streams.prepare()
        garbage.postpone()
        # Threads that wait must not spin; read when torch is imported. Two spinning OpenMP threads beside a busy
        # neighbour ran 9 to 23 times slower than one (November 2026).
        os.environ.setdefault("GOMP_SPINCOUNT", "0")
        if any(name in os.environ for name in RANK_VARIABLES):  # perhaps one of several processes
            from deeplightning.process import member

            member.follow()
        with started_here():
            code = run_verb(verb)
    except KeyboardInterrupt:
        code = interrupted()
    streams.release()
    sys.exit(code)
