"""Score what `deeplightning check` reports for a mutation against what it should report.

`check` runs as people start it, arguments in, text and exit code out, in a process forked from this one: nothing is
kept from one mutation to the next, and only the start of Python is saved. The files lie in a copy of the folders that
hold the shipped configs.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mutations import Mutation

FOLDERS = ("configs", "examples/own_code")
LIMIT_SECONDS = 60  # of one check, after which it counts as hanging


@dataclass(frozen=True)
class Told:
    """One fault as `check` told it; `place` is `file:line`."""

    place: str
    message: str
    suggestion: str | None = None


@dataclass(frozen=True)
class Answer:
    """What `check` said: its exit code, and every fault in its order."""

    code: int
    told: tuple[Told, ...]
    output: str = ""


@dataclass(frozen=True)
class Score:
    """What an answer is worth.

    Attributes:
        caught: the exit code is 2, the config's.
        right_line: it is caught, and a fault stands where the mutation was made.
        right_word: the first suggestion there is the word that was meant; None where there was no typo.
        noise: further faults.
    """

    caught: bool
    right_line: bool
    right_word: bool | None
    noise: int


def score(mutation: Mutation, answer: Answer) -> Score:
    """Compare an answer with the expected one."""
    caught = answer.code == 2
    here = [told for told in answer.told if told.place in mutation.lines]
    right_line = caught and bool(here)
    first = next((told.suggestion for told in here if told.suggestion), None)
    right_word = right_line and first in mutation.meant if mutation.meant else None
    return Score(caught, right_line, right_word, len(answer.told) - right_line)


# ---- running


@contextmanager
def sandbox(root: Path) -> Iterator[Path]:
    """Create a folder with copies of the shipped configs, which mutations overwrite one by one."""
    with tempfile.TemporaryDirectory() as folder:
        for name in FOLDERS:
            shutil.copytree(root / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        yield Path(folder)


def check_mutation(mutation: Mutation, place: Path) -> Answer:
    """Check a mutation; restore the file in the sandbox afterwards."""
    file = place / mutation.file
    before = file.read_text()
    file.write_text(mutation.text)
    try:
        return check(mutation.config, place)
    finally:
        file.write_text(before)


def check(config: str, place: Path) -> Answer:
    """Check a config in the sandbox."""
    out, err = place / "out", place / "err"
    child = os.fork()
    if child == 0:
        _run(["check", config, "--format", "json"], place, out, err)
    _, status = os.waitpid(child, 0)
    return read(os.waitstatus_to_exitcode(status), out.read_text(), err.read_text())


def _run(arguments: list[str], place: Path, out: Path, err: Path) -> None:
    """Run the command in this process, which ends here."""
    code: object = 1
    try:
        signal.alarm(LIMIT_SECONDS)  # noqa: TID251  (it has no handler: the child ends)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(out, flags), 1)
        os.dup2(os.open(err, flags), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not what the caller holds back or redirects
        os.chdir(place)
        sys.path[0] = str(place)  # as `python -m` has it
        sys.argv = ["deeplightning", *arguments]
        from deeplightning.cli import main

        main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def read(code: int, out: str, err: str) -> Answer:
    """Parse the faults in the output of `check --format json`."""
    try:
        said = json.loads(out)
    except ValueError:
        return Answer(code, (), out + err)
    told = tuple(
        Told(f"{fault['file']}:{fault['line']}", fault["message"], fault["suggestion"]) for fault in said["faults"]
    )
    return Answer(code, told, out + err)
