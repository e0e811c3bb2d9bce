"""Run a search as one array of jobs: a task for each trial, submitted together and released one by one.

Slurm holds each task until the search has chosen its trial, so no machine waits for it. After a search is killed, no
further task starts. The queue shows one line, and one `scancel` ends the search.
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
from deeplightning.runfolder import make_private, write_whole
from deeplightning_slurm.batch_script import VARIABLES
from deeplightning_slurm.commands import check_slurm, max_array_size, run_command, submit

TASK = "DEEPLIGHTNING_SLURM_TASK"
"""Environment variable of a trial's process: the array task that it releases, as JSON."""


@dataclass(frozen=True)
class ArrayTask:
    """A task of an array.

    Attributes:
        folder: for its config, code and logs.
        number: its number in Slurm, `ARRAY_TASK`.
    """

    folder: Path
    number: str

    def release(self) -> None:
        """Let the task start.

        Raises:
            SetupError: Slurm refuses.
        """
        code, output = run_command("scontrol", "release", self.number)
        if code != 0:
            message = f"Slurm does not release job {self.number}: {output or f'exit code {code}'}"
            raise SetupError(Fault(message, "engine.launcher"))

    def cancel(self) -> None:
        """End the task; a trial that trains saves a checkpoint first."""
        run_command("scancel", self.number)


def task_here() -> ArrayTask | None:
    """Return the array task that this process releases, or None if it submits a job itself."""
    if (text := os.environ.get(TASK)) is None:
        return None
    values = json.loads(text)
    return ArrayTask(Path(values["folder"]), values["number"])


class TrialArray:
    """Submit the arrays of a search, and assign a task to each trial.

    Args:
        folder: folder to create, with a subfolder for each task.
        trials: the number of trials to run.
        note: file with the numbers of the arrays, so that the next command can cancel them after a kill.
        script: returns the batch script of an array, from its folder and its number of tasks.
    """

    def __init__(self, folder: Path, trials: int, note: Path, script: Callable[[Path, int], str]):
        self.folder, self.note, self._script = folder, note, script
        self._remaining = trials  # trials without a task
        self._numbers: list[str] = []  # Slurm's numbers of the arrays; the last array has the next task
        self._next_task, self._size, self._max_size = 0, 0, 0

    def variables(self, environment: Mapping[str, str | None]) -> dict[str, str]:
        """Assign the next task to a trial; see `deeplightning.launch.job.TrialJobs`.

        Raises:
            SetupError: Slurm refuses the array.
        """
        if self._next_task == self._size and not self._submit():
            return {}
        task, self._next_task = self._next_task, self._next_task + 1
        folder = self._array_folder() / str(task)
        lines = [
            f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
            for name, value in environment.items()
        ]
        file = folder / VARIABLES
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write("\n".join([*lines, ""]))
        return {TASK: json.dumps({"folder": str(folder), "number": f"{self._numbers[-1]}_{task}"})}

    def _array_folder(self) -> Path:
        number = len(self._numbers)
        return self.folder if number == 1 else self.folder / f"array-{number}"

    def _submit(self) -> bool:
        """Submit the next array, as large as Slurm allows; return False if it allows none."""
        check_slurm()
        if not self._numbers:
            self._cancel_previous()
            self._max_size = max_array_size()
        size = num_folders = min(self._remaining, self._max_size)
        if size < 2:
            return False
        self._numbers.append("")
        folder = self._array_folder()
        try:
            make_private(folder, self.folder.parent)
            for task in range(size):
                (folder / str(task)).mkdir()
        except OSError as error:
            message = f"{folder}: this folder cannot be created: {error.strerror}"
            raise SetupError(Fault(message, "engine.launcher.params.folder")) from error
        while True:
            try:
                self._numbers[-1] = submit(self._script(folder, size), folder)
                break
            except SetupError as error:
                if size == 2 or not re.search("limit|array", str(error), re.IGNORECASE):
                    raise
                size = self._max_size = max(2, size // 2)  # the limit of a user may be lower
        for task in range(size, num_folders):
            (folder / str(task)).rmdir()
        self._remaining, self._next_task, self._size = self._remaining - size, 0, size
        write_whole(self.note, "\n".join(self._numbers))
        return True

    def _cancel_previous(self) -> None:
        """Cancel the arrays of a killed search. Trials that train save a checkpoint first. Slurm refuses a number that
        now belongs to another user."""
        with contextlib.suppress(OSError):
            if numbers := [word for word in self.note.read_text().split() if word.isdecimal()]:
                run_command("scancel", *numbers)

    def close(self) -> None:
        """Cancel unassigned tasks and unfinished trials."""
        if numbers := list(filter(None, self._numbers)):
            run_command("scancel", *numbers)
            self.note.unlink(missing_ok=True)
            for task in range(self._next_task, self._size):
                with contextlib.suppress(OSError):
                    (self._array_folder() / str(task)).rmdir()
