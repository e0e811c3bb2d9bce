"""A report of where each process of a launch is in its code: they answer in the shared folder when one asks."""

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

from deeplightning.process.failure import place_in

POLL_SECONDS = 0.25


def where_is(thread: int | None) -> str:
    """Return what a thread of this process does: `waits` for other processes, or `is at FILE:LINE`."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_stack(frame)]
    # Gradients are reduced, and waited for, in autograd's engine.
    waits = any(f"torch{os.sep}{part}{os.sep}" in frames[-1][0] for part in ("distributed", "autograd"))
    waits = waits or any(f"torch{os.sep}distributed{os.sep}" in name for name, _ in frames[-4:])
    return "waits" if waits else f"is at {place_in(frames)}"


def where_others_are(folder: Path, own_rank: int) -> list[str]:
    """Ask all other processes; return what each does that is not itself waiting for others."""
    with contextlib.suppress(OSError):
        (folder / "asked").touch()
    others = {int(path.stem) for path in folder.glob("*.pid")} - {own_rank}
    until = time.monotonic() + 2 + 4 * POLL_SECONDS
    answers: dict[int, str] = {}
    while len(answers) < len(others) and time.monotonic() < until:
        time.sleep(POLL_SECONDS / 5)
        for rank in others - answers.keys():
            with contextlib.suppress(OSError):
                answers[rank] = (folder / f"{rank}.where").read_text()
    places = {rank: answers.get(rank, "does not answer") for rank in sorted(others)}
    return [f"rank {rank} {words}" for rank, words in places.items() if words != "waits"]


def answer(folder: Path, rank: int, words: str) -> None:
    """Write what this process does for the process that asked."""
    beside = folder / f"{rank}.where.new"
    beside.write_text(words)
    beside.replace(folder / f"{rank}.where")
