"""Turn errors into messages and exit codes. No other module decides the exit code of the command."""

import errno
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from deeplightning.faults import FREE_SPACE_HINT, UserError, free_space, is_disk_failure, is_full
from deeplightning.process import streams
from deeplightning.process.identity import own_rank
from deeplightning.process.terminal import LAYOUT, is_interactive, say, styled, wrapped
from deeplightning.words import first_line, lacks_memory, printable


@dataclass
class Session:
    """State of one call of the command.

    Attributes:
        redact: removes the secrets of the loaded config from a message.
    """

    redact: Callable[[str], str] = str


def run_verb(verb: click.Command) -> int:
    """Run a verb, or the one that the command line names if it is a group; return its exit code."""
    session = Session()
    try:
        verb.main(standalone_mode=False, prog_name="deeplightning", obj=session)
        sys.stdout.flush()  # raises here if the reader of stdout has gone
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        return interrupted()
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning exits with code 1 when interrupted
            return interrupted()
        if isinstance(error.code, str):  # `sys.exit("no data")` in the user's code
            say(f"error: {session.redact(error.code)}", err=True)
        return error.code if isinstance(error.code, int) else 5 if error.code else 1
    except BaseException as error:
        if streams.received_signal and getattr(error, "exit_code", None) is None:  # a library raised its own error
            return interrupted()
        return report(error, session.redact)
    return 0


def interrupted() -> int:
    """Report that a signal ended the command, and return the exit code."""
    if streams.received_signal:
        say("error: interrupted by SIGTERM", err=True)
        return streams.TERMINATED_CODE
    say("interrupted", err=True)
    return 130


def report(error: BaseException, redact: Callable[[str], str] = str) -> int:
    """Print the messages of an error, after its traceback if no message explains it; return the exit code.

    With several processes, one prints the first cause, and all exit with its exit code.
    """
    from deeplightning.config.devices import unusable
    from deeplightning.config.target import needs
    from deeplightning.process import failure, member

    code = getattr(error, "exit_code", None)
    notes = [str(fault) for fault in error.faults] if isinstance(error, UserError) else [str(error)]
    if code is None and lacks_memory(error):
        first = first_line(error).rstrip(".")
        is_device = type(error).__name__ == "OutOfMemoryError" or "CUDA" in first or "_STATUS_" in first
        remedy = "A smaller data.batch_size helps, as do engine.precision=bf16 and engine.activation_checkpointing"
        code, notes = 5, [f"the {'device' if is_device else 'machine'} has no memory left: {first}. {remedy}"]
    if code is None and (note := unusable(error)) is not None:
        code, notes = 3, [note]
    if code is None and isinstance(error, OSError) and is_full(error):
        room = f"{free_space(Path(os.fsdecode(error.filename)).absolute().parent)}; " if error.filename else ""
        code, notes = 3, [f"the disk is full: {error}. {room}{FREE_SPACE_HINT}"]
    if code is None and isinstance(error, OSError) and is_disk_failure(error):
        remedy = "When it works again, train.resume_ckpt=auto resumes the run"
        code, notes = 3, [f"the disk failed: {error}. {remedy}"]
    if code is None and isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        code, notes = 2, [f"this file name is too long: {error.filename}"]
    if code is None and (lacks := needs(error)) is not None:
        code, notes = 3, [f"the run {lacks}"]
    has_note = code is not None
    if code is None:
        code, notes = failure.exit_code_of(error), [failure.reason_of(error)]
    rank = f" [rank {own_rank()}]" if own_rank() else ""
    if (group := member.current()) is not None:
        cause, is_reporter = group.final_cause(error, "; ".join(notes), code)
        if not is_reporter:
            return cause.exit_code
        rank = f" [{cause.whose}]" if cause.whose else ""
        if isinstance(error, failure.RankError) or cause.rank != group.rank or failure.is_lost(error):
            code, notes, has_note = cause.exit_code, [cause.reason + (group.resume_hint() if cause.lost else "")], True
    if not has_note or os.environ.get("DEEPLIGHTNING_DEBUG") == "1":
        say(redact("".join(traceback.format_exception(error))), err=True)
    prefix = styled("error", 31, sys.stderr) + rank
    if not has_note and code == 1:
        notes = [f"{notes[0]}; this looks like a bug in Deep Lightning: report it with the lines above"]
    for note in notes:
        text = f"error{rank}: {redact(note)}"
        text = wrapped(text, 2) if is_interactive(sys.stderr) else text
        text = printable(text.removeprefix(f"error{rank}"), LAYOUT)
        print(prefix + text, file=sys.stderr)  # noqa: T201  (styled)
    return code
