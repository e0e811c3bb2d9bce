"""Provide a case of the storm with a folder, commands to start, and files that all cases of its kind share."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands import Forking, Outcome, Running
from tiny import OWN, TINY


class Broken(Exception):
    """A promise did not hold; the message describes it."""


class Skipped(Exception):
    """This machine cannot run the case; the message gives the reason."""


class Place:
    """Working directory of a case, and the means to run commands in it.

    Attributes:
        folder: the working directory, empty at first; removed if the promise held.
        shared: folder of all cases of the kind in one run of the storm.
        count: how many faults the case has tried.
        number: number of the case, from 0; kinds that enumerate their faults use it as an index.
    """

    def __init__(self, folder: Path, shared: Path, number: int = 0):
        self.folder, self.shared, self.number = folder, shared, number
        self.count = 1
        (folder / ".output").mkdir()
        self.commands = Forking(folder / ".output")

    def start(self, *arguments: object, cwd: Path | None = None, **options: Any) -> Running:
        """Start `deeplightning VERB …` as a fork of this process; options as for `commands.Commands.start`."""
        return self.commands.start(*arguments, cwd=cwd or self.folder, **options)

    def run(self, *arguments: object, **options: Any) -> Outcome:
        """Start a command and wait for its end."""
        return self.start(*arguments, **options).end()

    def config(self, folder: Path | None = None) -> Path:
        """Write the tiny config, which uses a store beside it, and the user code."""
        folder = folder or self.folder
        path = folder / "tiny.yaml"
        path.write_text(TINY.replace("STORE", str(folder / "mlruns")))
        (folder / "own.py").write_text(OWN)
        return path

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return a shared folder, which the first case that needs it fills while others wait."""
        path = self.shared / name
        self.shared.mkdir(parents=True, exist_ok=True)
        with (self.shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = self.shared / f"{name}.done"
            if not done.exists():  # filled in place: its content may include its path
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
    """Raise `Broken` unless `holds`, with the promise and what was seen."""
    if not holds:
        raise Broken("\n".join([promise, *map(str, seen)]))
