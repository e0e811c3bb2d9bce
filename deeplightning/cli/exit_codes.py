"""Turn errors into notes and exit codes: the one place that decides what the command ends with."""

import errno
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from deeplightning.faults import FREE_SOME, UserError, is_full, is_of_machine, no_room
from deeplightning.process import streams
from deeplightning.process.identity import own_rank
from deeplightning.process.terminal import LAYOUT, is_interactive, say, styled, wrapped
from deeplightning.words import first_line, lacks_memory, printable


@dataclass
class Session:
    """State of one call of the command.

    Attributes:
        redact: takes the secrets of the config that was read out of a message.
    """

    redact: Callable[[str], str] = str


def run_verb(verb: click.Command) -> int:
    """Run a verb, or that of a group which the command line names; return its exit code."""
    session = Session()
    try:
        verb.main(standalone_mode=False, prog_name="deeplightning", obj=session)
        sys.stdout.flush()  # here a reader that has gone is noticed in time
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        return interrupted()
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning ends with 1 where it is interrupted
            return interrupted()
        return error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        if streams.heard and getattr(error, "exit_code", None) is None:  # a library made an error of its own of it
            return interrupted()
        return report(error, session.redact)
    return 0


def interrupted() -> int:
    """Report that a signal has ended the command, and return the exit code."""
    if streams.heard:
        say("error: interrupted by SIGTERM", err=True)
        return streams.TERMINATED_CODE
    say("interrupted", err=True)
    return 130


def report(error: BaseException, redact: Callable[[str], str] = str) -> int:
    """Show an error as notes, after its traceback if no note explains it; return the exit code.

    Of several processes one shows the first cause, and all end with its exit code.
    """
    from deeplightning.config.gpus import unusable
    from deeplightning.config.target import needs
    from deeplightning.process import failure, member

    code = getattr(error, "exit_code", None)
    notes = [str(fault) for fault in error.faults] if isinstance(error, UserError) else [str(error)]
    if code is None and lacks_memory(error):
        first, is_device = first_line(error).rstrip("."), type(error).__name__ == "OutOfMemoryError"
        remedy = "A smaller data.batch_size helps, so do engine.precision=bf16 and engine.activation_checkpointing"
        code, notes = 5, [f"the {'device' if is_device else 'machine'} has no memory left: {first}. {remedy}"]
    if code is None and (note := unusable(error)) is not None:
        code, notes = 3, [note]
    if code is None and isinstance(error, OSError) and is_full(error):
        where = Path(os.fsdecode(error.filename)).absolute().parent if error.filename else Path.cwd()
        code, notes = 3, [f"the disk is full: {error}. {no_room(where)}; {FREE_SOME}"]
    if code is None and isinstance(error, OSError) and is_of_machine(error):
        remedy = "Once it does, train.resume_ckpt=auto resumes"
        code, notes = 3, [f"the disk does not answer as it should: {error}. {remedy}"]
    if code is None and isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        code, notes = 2, [f"no file can have so long a name: {error.filename}"]
    if code is None and (lacks := needs(error)) is not None:
        code, notes = 3, [f"the run {lacks}"]
    has_note = code is not None
    if code is None:
        code, notes = failure.exit_code_of(error), [failure.reason_of(error)]
    rank = f" [rank {own_rank()}]" if own_rank() else ""
    if (group := member.here()) is not None:
        cause, is_ours_to_tell = group.verdict(error, "; ".join(notes), code)
        if not is_ours_to_tell:
            return cause.exit_code
        rank = f" [{cause.whose}]" if cause.whose else ""
        if isinstance(error, failure.RankError) or cause.rank != group.rank or failure.is_lost(error):
            code, notes, has_note = cause.exit_code, [cause.reason + (group.resume_hint() if cause.lost else "")], True
    if not has_note or os.environ.get("DEEPLIGHTNING_DEBUG") == "1":
        say(redact("".join(traceback.format_exception(error))), err=True)
    word = styled("error", 31, sys.stderr) + rank
    if not has_note and code == 1:
        notes = [f"{notes[0]}; this looks like a bug in Deep Lightning: report it with the lines above"]
    for note in notes:
        text = f"error{rank}: {redact(note)}"
        text = wrapped(text, 2) if is_interactive(sys.stderr) else text
        text = printable(text.removeprefix(f"error{rank}"), LAYOUT)
        print(word + text, file=sys.stderr)  # noqa: T201  (with the style of the word)
    return code
