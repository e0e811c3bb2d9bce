"""A search under Slurm is one array of jobs: a task for each trial, submitted at once and released one by one.

The tasks are held until their trial is drawn, so that they take no machine while a search thinks, and none that is
killed leaves jobs that start without it. The queue shows one line, and `scancel` of one number ends all of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deeplightning.faults import Fault, SetupError
from deeplightning.launch.slurm_commands import ask, largest_array, submit, there_is_slurm
from deeplightning.launch.slurm_script import VARIABLES
from deeplightning.runfolder import make_private, permissions_of, write_whole

PLACE = "DEEPLIGHTNING_SLURM_TASK"
"""The variable by which a search tells the process of a trial which task of its array is the trial's."""


@dataclass(frozen=True)
class Place:
    """One task of an array.

    Attributes:
        folder: for its config, code and logs.
        number: by which Slurm knows it, `ARRAY_TASK`.
    """

    folder: Path
    number: str

    def release(self) -> None:
        """Lets the task start.

        Raises:
            SetupError: in Slurm's own words.
        """
        code, words = ask("scontrol", "release", self.number)
        if code != 0:
            message = f"Slurm does not release job {self.number}: {words or f'exit code {code}'}"
            raise SetupError(Fault(message, "engine.launcher"))

    def cancel(self) -> None:
        """Ends the task: a trial that trains saves a checkpoint first."""
        ask("scancel", self.number)


def place_here() -> Place | None:
    """The task that this process is to release; None: it submits a job of its own."""
    if (text := os.environ.get(PLACE)) is None:
        return None
    values = json.loads(text)
    return Place(Path(values["folder"]), values["number"])


class Array:
    """The tasks of a search.

    Args:
        folder: has a folder for each task; is made here.
        trials: how many are to come.
        note: a file that keeps the numbers of the arrays, so that the next command can end what a kill has left.
        script: gives the batch script of an array, of its folder and the number of its tasks.
    """

    def __init__(self, folder: Path, trials: int, note: Path, script: Callable[[Path, int], str]):
        self.folder, self.note, self._script = folder, note, script
        self._left = trials  # that have no task yet
        self._numbers: list[str] = []  # of the arrays; the last one has the next task
        self._next, self._size, self._largest = 0, 0, 0

    def variables(self, environment: Mapping[str, str | None]) -> dict[str, str]:
        """Gives a trial the next task.

        Args:
            environment: what the trial's processes are to have in their environment; None: what they are not to have.

        Returns:
            Variables for the process that starts the trial; empty: it submits a job of its own.

        Raises:
            SetupError: Slurm refuses the array.
        """
        if self._next == self._size and not self._submit():
            return {}
        task, self._next = self._next, self._next + 1
        folder = self._home() / str(task)
        lines = [
            f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
            for name, value in environment.items()
        ]
        file = folder / VARIABLES
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write("\n".join([*lines, ""]))
        return {PLACE: json.dumps({"folder": str(folder), "number": f"{self._numbers[-1]}_{task}"})}

    def _home(self) -> Path:
        number = len(self._numbers)
        return self.folder if number == 1 else self.folder / f"array-{number}"

    def _submit(self) -> bool:
        """Submits the next array, as large as Slurm allows; False: it allows none."""
        there_is_slurm()
        if not self._numbers:
            self._cancel_former()
            self._largest = largest_array()
        size = made = min(self._left, self._largest)
        if size < 2:
            return False
        self._numbers.append("")
        home = self._home()
        try:
            make_private(home, self.folder.parent)
            with permissions_of(home):
                for task in range(size):
                    (home / str(task)).mkdir()
        except OSError as error:
            message = f"{home}: this folder cannot be made: {error.strerror}"
            raise SetupError(Fault(message, "engine.launcher.params.folder")) from error
        while True:
            try:
                with permissions_of(home):
                    self._numbers[-1] = submit(self._script(home, size), home)
                break
            except SetupError as error:
                if size == 2 or not re.search("limit|array", str(error), re.IGNORECASE):
                    raise
                size = self._largest = max(2, size // 2)  # a user may have fewer jobs than that
        for task in range(size, made):
            (home / str(task)).rmdir()
        self._left, self._next, self._size = self._left - size, 0, size
        write_whole(self.note, "\n".join(self._numbers))
        return True

    def _cancel_former(self) -> None:
        """Ends what a search that was killed has left: tasks that nobody would release, and trials that would report to
        nobody, which save a checkpoint first. Slurm refuses where a number is another user's by now."""
        with contextlib.suppress(OSError):
            if numbers := [word for word in self.note.read_text().split() if word.isdecimal()]:
                ask("scancel", *numbers)

    def close(self) -> None:
        """Ends the tasks that no trial has taken, and the trials of a search that does not come to its end."""
        if numbers := list(filter(None, self._numbers)):
            ask("scancel", *numbers)
            self.note.unlink(missing_ok=True)
            for task in range(self._next, self._size):
                with contextlib.suppress(OSError):
                    (self._home() / str(task)).rmdir()
