"""What a case of the storm is given: a folder, commands to start, and what all cases of its kind share."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands import Forking, Outcome, Running
from tiny import OWN, TINY


class Broken(Exception):
    """A promise did not hold; the message has it in words."""


class Skipped(Exception):
    """This machine cannot try it; the message has the reason."""


class Place:
    """Where a case takes place.

    Attributes:
        folder: empty at first, the working directory of the case; removed where the promise held.
        shared: of all cases of the kind, in one run of the storm.
        count: how many things the case has tried.
        number: of the case, from 0; what is to be tried completely goes through it by that.
    """

    def __init__(self, folder: Path, shared: Path, number: int = 0):
        self.folder, self.shared, self.number = folder, shared, number
        self.count = 1
        (folder / ".output").mkdir()
        self.commands = Forking(folder / ".output")

    def start(self, *arguments: object, cwd: Path | None = None, **options: Any) -> Running:
        """Starts `deeplightning VERB …` as a fork of this process; options as `commands.Commands.start` has."""
        return self.commands.start(*arguments, cwd=cwd or self.folder, **options)

    def run(self, *arguments: object, **options: Any) -> Outcome:
        """The same, until its end."""
        return self.start(*arguments, **options).end()

    def config(self, folder: Path | None = None) -> Path:
        """Writes the tiny config, on a store beside it, and the own code."""
        folder = folder or self.folder
        path = folder / "tiny.yaml"
        path.write_text(TINY.replace("STORE", str(folder / "mlruns")))
        (folder / "own.py").write_text(OWN)
        return path

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """A shared folder of this name, filled by the first case that needs it; others wait for that one."""
        path = self.shared / name
        self.shared.mkdir(parents=True, exist_ok=True)
        with (self.shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = self.shared / f"{name}.done"
            if not done.exists():  # its path may be part of what it holds, so it has its name from the start
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                os.chdir(path)
                try:
                    make(path)
                finally:
                    os.chdir(self.folder)
                done.touch()
        return path


def expect(holds: object, promise: str, *seen: object) -> None:
    """Raises `Broken` unless it holds; what was seen comes behind the promise."""
    if not holds:
        raise Broken("\n".join([promise, *map(str, seen)]))
