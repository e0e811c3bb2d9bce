"""Follow a job: print what its first process writes until the job has ended, and return its exit code."""

from __future__ import annotations

import os
import re
import sys
import time as clock
from collections.abc import Mapping
from pathlib import Path

from deeplightning.config.own_runs import note_launched
from deeplightning.faults import RunError, SetupError
from deeplightning.process.streams import INTERRUPTED
from deeplightning.process.terminal import say
from deeplightning_slurm.commands import state_of

SILENCE_SECONDS = 600.0  # without a response from Slurm, after which following ends with an error
POLL_SECONDS = 0.25  # between two reads of a job's output
CANCEL_SECONDS = 60.0  # for an interrupted job to end
MAX_PAUSE_SECONDS = 15.0  # between two queries of its state

WAITING_STATES = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
ACTIVE_STATES = WAITING_STATES | {
    *("CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
}
"""States of a job that has not ended, https://slurm.schedmd.com/squeue.html."""


class Follower:
    """Print what the first process of a job writes, as it is written.

    Args:
        number: Slurm's number of the job.
        folder: the folder of the job's logs.
    """

    def __init__(self, number: str, folder: Path):
        self.number, self.folder = number, folder
        self._out, self._err = _Tail(log_of(folder, number)), _Tail(log_of(folder, number, kind="err"))
        self._last_message = ""
        self._next_query, self._pause = 0.0, 1.0
        self._silent_since: float | None = None

    def follow(self) -> int:
        """Wait for the end of the job; return its exit code.

        Raises:
            RunError: it was cancelled, or lost its node, time or memory.
            SetupError: Slurm has no record of it, or did not answer for `SILENCE_SECONDS`.
        """
        say(f"job {self.number} is submitted; its config, script and logs are in {self.folder}", err=True)
        while True:
            ended = self._state()
            self._echo(to_the_end=ended is not None)
            if ended is not None:
                return self._exit_code(ended)
            clock.sleep(POLL_SECONDS)

    def follow_cancelled(self) -> int:
        """Wait at most `CANCEL_SECONDS` for the end of an interrupted job; return its exit code."""
        self._next_query, self._pause, until = 0.0, 1.0, clock.monotonic() + CANCEL_SECONDS
        while clock.monotonic() < until and self._state() is None:
            self._echo(to_the_end=False)
            clock.sleep(POLL_SECONDS)
        self._echo(to_the_end=True)
        return 130

    def _echo(self, to_the_end: bool) -> None:
        for tail, stream in ((self._err, sys.stderr), (self._out, sys.stdout)):
            if text := tail.read_new(to_the_end):
                stream.write(text)
                stream.flush()
                if re.search(r"Artifact storage path|^(error|srun|slurmstepd)", text, re.MULTILINE):
                    self._next_query, self._pause = 0.0, 1.0  # the end is near
                for folder in re.findall(r"^Artifact storage path: (.+)", text * (tail is self._out), re.MULTILINE):
                    note_launched(folder)

    def _state(self) -> dict[str, str] | None:
        """Return Slurm's record of a job that has ended; None while it runs, or if the last query is too recent."""
        if clock.monotonic() < self._next_query:
            return None
        try:
            found = state_of(self.number)
        except TimeoutError as error:
            self._silent_since = self._silent_since or clock.monotonic()
            if clock.monotonic() - self._silent_since > SILENCE_SECONDS:
                message = f"Slurm has not answered for {SILENCE_SECONDS:.0f} s: {error}; job {self.number} may continue"
                raise SetupError(f"{message}: tail -F {log_of(self.folder, self.number)}") from error
            self._report(f"Slurm does not answer; the job is not affected: {error}")
            found = {"JobState": "RUNNING"}
        else:
            self._silent_since = None
        if found is None:
            where = f"its logs are in {self.folder}"
            raise SetupError(f"Slurm no longer has a record of job {self.number}, so its result is unknown; {where}")
        self._next_query = clock.monotonic() + self._pause
        self._pause = min(MAX_PAUSE_SECONDS, 1.5 * self._pause)
        state = found["JobState"]
        if state in WAITING_STATES:
            again = f" (restart {found['Restarts']})" if found.get("Restarts", "0") != "0" else ""
            reason = found.get("Reason", "None").replace("_", " ")
            if reason != "None":  # Slurm has none at first
                self._report(f"job {self.number} waits{again}: {reason}")
        elif state == "RUNNING" and self._silent_since is None:
            self._report(f"job {self.number} runs on {found.get('NodeList', 'its nodes')}")
        return None if state in ACTIVE_STATES else found

    def _report(self, message: str) -> None:
        """Print a message that differs from the last one."""
        if message != self._last_message:
            self._last_message, self._pause = message, 1.0
            say(message, err=True)

    def _exit_code(self, found: Mapping[str, str]) -> int:
        state, (code, _, number) = found["JobState"], found.get("ExitCode", "0:0").partition(":")
        if state == "COMPLETED":
            return 0
        self._print_other_errors()
        where = f"its logs are in {self.folder}"
        if state == "FAILED" and int(code):
            say(f"job {self.number} failed with exit code {code}; {where}", err=True)
            killed = int(code) > 128 and int(code) not in INTERRUPTED.values()
            return 5 if killed else int(code)
        why = f" (signal {number})" if number not in ("", "0", "15") else ""
        raise RunError(f"job {self.number} ended as {state}{why}, after {found.get('RunTime', 'some time')}; {where}")

    def _print_other_errors(self) -> None:
        """Print the errors of all processes but the first."""
        paths = self.folder.glob(f"{self.number}_*_log.err")
        for path in sorted(paths, key=lambda path: int(path.name.split("_")[-2])):
            text = path.read_text(errors="replace")
            if path != self._err.path and (found := re.search(r"^(error|Traceback)", text, re.MULTILINE)):
                sys.stderr.write(text[found.start() :])
        sys.stderr.flush()


class _Tail:
    """Reader of the new lines of a file that grows, or does not exist yet."""

    def __init__(self, path: Path):
        self.path, self._read = path, 0

    def read_new(self, to_the_end: bool) -> str:
        """Return the lines that were added since the last call; with `to_the_end` also an unterminated last line."""
        try:
            with self.path.open("rb") as file:
                self._read = min(self._read, os.fstat(file.fileno()).st_size)
                file.seek(self._read)
                added = file.read()
        except OSError:
            return ""
        whole = added if to_the_end else added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace")


def log_of(folder: Path, number: str, rank: int = 0, kind: str = "out") -> Path:
    """Return the log file that submitit assigns to a task."""
    return folder / f"{number}_{rank}_log.{kind}"
