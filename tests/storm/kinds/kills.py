"""A training is killed at random instants, up to five times, and started again by the same command each time.

Its end is that of a run that nothing disturbed: weights, points, the best and their files, one FINISHED run.
An instant is one of the run's events (`tests/killing.py`), or a moment in time.
"""

import contextlib
import json
import random
import signal
import time
from pathlib import Path

from killing import KILLS, SETTINGS, WRITING

from storm.ended import End, end_of
from storm.place import Place, expect

WHAT = "kill -9 at any instant of a training, again and again"
HOUR = 1000
LIMIT = 240

EXPERIMENT = "storm"


def case(draw: random.Random, place: Place) -> str:
    """One run, killed up to five times."""
    processes = 1 if draw.random() < 0.7 else 2
    whole = place.once(f"whole-{processes}", lambda folder: _whole(place, folder, processes))
    known = json.loads((whole / "end.json").read_text())
    events = [(whole / f"events.{rank}").read_text().splitlines() for rank in range(processes)]
    background = {"BACKGROUND": "1"} if draw.random() < 0.3 else {}
    _code(place.folder)
    config = place.config()
    told, left = [], draw.randint(1, 5)
    for _ in range(left):
        how = draw.choice(["event", "event", "writing", "time"])
        if how == "time":
            delay = draw.random() * known["seconds"]
            running = _start(place, config, place.folder, processes, **background)
            time.sleep(delay)
            for rank in range(processes):
                with contextlib.suppress(ProcessLookupError):  # it was faster
                    running.signal(signal.SIGKILL, rank)
            running.end()
            told.append(f"after {delay:.2f} s")
            continue
        victims = "0" if processes == 1 else draw.choice(["01", "10", "0", "1"])
        own = events[int(victims[0])]
        number = draw.randint(1, len(own))
        if how == "writing" and (places := [n for n, event in enumerate(own, 1) if event in WRITING]):
            number = draw.choice(places)
        ended = _start(place, config, place.folder, processes, KILL=f"{victims}:{number}", **background).end()
        # What resumes late has fewer events than the number, and is over.
        told.append(own[number - 1] if ended.code else "not: it had ended")
    done = _start(place, config, place.folder, processes, **background).end()
    what = f"{processes} process{'es' * (processes > 1)}{', in the background' * bool(background)}: {', '.join(told)}"
    expect(all(each.code == 0 for each in done.ranks or [done]), "the run that resumes does not end with 0", what, done)
    end = end_of(place.folder / "mlruns", EXPERIMENT)
    expected = End.of(known["end"])
    expect(end == expected, "a run that was killed ends otherwise", what, end, expected, done)
    return what


def _code(folder: Path) -> None:
    (folder / "kills.py").write_text(KILLS)


def _start(place: Place, config: Path, folder: Path, processes: int, **variables: str):
    named = [f"logger.params.experiment_name={EXPERIMENT}", f"engine.processes={processes}"]
    events = {"EVENTS": str(folder / "events")}
    each = f"data.batch_size={16 // processes}"
    return place.start("train", config, *SETTINGS, each, *named, cwd=folder, ranks=processes, **events, **variables)


def _whole(place: Place, folder: Path, processes: int) -> None:
    """The run that nothing disturbs: its end, the events of each process, and the seconds that it takes."""
    _code(folder)
    begun = time.monotonic()
    done = _start(place, place.config(folder=folder), folder, processes).end()
    seconds = time.monotonic() - begun
    expect(done.code == 0, "the run that nothing disturbs does not end with 0", done)
    end = end_of(folder / "mlruns", EXPERIMENT)
    (folder / "end.json").write_text(json.dumps({"end": end.plain(), "seconds": seconds}))
