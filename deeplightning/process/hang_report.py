"""Where the processes of a launch are in their code: each answers in the shared folder when another asks."""

import contextlib
import os
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

from deeplightning.process.failure import place_in

LOOK = 0.25  # seconds between two looks at the others


def where_is(thread: int | None) -> str:
    """What a thread of this process is doing: `waits` for other processes, or `is at FILE:LINE`."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_stack(frame)]
    # Gradients are summed up, and waited for, in autograd's engine.
    waits = any(f"torch{os.sep}{part}{os.sep}" in frames[-1][0] for part in ("distributed", "autograd"))
    waits = waits or any(f"torch{os.sep}distributed{os.sep}" in name for name, _ in frames[-4:])
    return "waits" if waits else f"is at {place_in(frames)}"


def where_others_are(folder: Path, own_rank: int) -> list[str]:
    """Of each process that is not itself waiting for others: what it is doing."""
    with contextlib.suppress(OSError):
        (folder / "asked").touch()
    others = {int(path.stem) for path in folder.glob("*.pid")} - {own_rank}
    until = time.monotonic() + 2 + 4 * LOOK
    answers: dict[int, str] = {}
    while len(answers) < len(others) and time.monotonic() < until:
        time.sleep(LOOK / 5)
        for rank in others - answers.keys():
            with contextlib.suppress(OSError):
                answers[rank] = (folder / f"{rank}.where").read_text()
    places = {rank: answers.get(rank, "does not answer") for rank in sorted(others)}
    return [f"rank {rank} {words}" for rank, words in places.items() if words != "waits"]


def answer(folder: Path, rank: int, words: str) -> None:
    """Says to a process that has asked where the others are what this one is doing."""
    beside = folder / f"{rank}.where.new"
    beside.write_text(words)
    beside.replace(folder / f"{rank}.where")
