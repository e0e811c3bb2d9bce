"""The power fails after a random call of a run; the run resumes from each state that the disk may then have.

A case makes a run, whose journal has each of its calls with the data, draws a call, and builds states of the disk after
it (`storm/disk.py`). In each state it repeats the command.
"""

import io
import multiprocessing
import random
import re
import sqlite3
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

from storm import shim
from storm.disk import Disk, content_of, replay, restore
from storm.ended import End, end_of, expect_readable, statuses, undisturbed
from storm.kinds.io import COMMON, EXPERIMENT
from storm.place import Place, expect

WHAT = "power loss: unsynced writes are torn or lost, unsynced names are lost; the run resumes from each state"
HOUR = 2000
LIMIT = 300
STATES = 20
"""Maximum number of states per case."""


def environment() -> dict[str, str]:
    return shim.environment()


def case(draw: random.Random, place: Place) -> str:
    """Draw one call of one run, and resume from states after it."""
    reference = undisturbed(
        place, EXPERIMENT, lambda folder: [place.run("train", place.config(folder=folder), *COMMON, cwd=folder)]
    )
    config, store = place.config(), place.folder / "mlruns"
    store.mkdir()
    journal = place.folder / "calls"
    done = place.run("train", config, *COMMON, main="storm.shim:main", **shim.order([store], journal, True))
    expect(done.code == 0, "the run does not end with 0", done.err)
    calls = shim.read(journal)
    expect(not any(call.kind == "map" and call.offset for call in calls), "the journal does not see a shared map")
    last = [number for number, call in enumerate(calls, 1) if call.kind != "lock"]
    # Most calls are on the database, which SQLite protects, and on checkpoints, so draw a file first.
    files: dict[str, list[int]] = {}
    for number in last:
        if "mlflow.db" not in calls[number - 1].path:
            files.setdefault(calls[number - 1].path, []).append(number)
    # A file written in place may be torn, and a temporary file may be used by mistake: a quarter of the cases each.
    bare = [number for number in last if _is_written(calls[number - 1], hidden=False)]
    beside = [number for number in last if _is_written(calls[number - 1], hidden=True)]
    number = draw.choice(draw.choice([last, files[draw.choice(sorted(files))], bare or last, beside or last]))
    disk = replay(store, calls[:number])
    steps = _saved(store, calls[:number])
    states = [disk.state(draw, 0.0), disk.state(draw, 1.0)]
    for _ in range(STATES - 2):
        if (state := disk.state(draw, draw.choice([0.1, 0.5, 0.9]), draw.random() < 0.5)) not in states:
            states.append(state)
    place.count = len(states)
    what = f"after {calls[number - 1]}, {disk.pending()} changes not durable, {len(states)} states"
    for count, state in enumerate(states):
        restore(state, store)
        # In a separate process: MLflow keeps a connection to the database, which the next state replaces.
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as apart:
            apart.submit(_judge, place, config, store, steps, f"{what}; state {count}", reference.end).result()
    return what


def _is_written(call: shim.Call, hidden: bool) -> bool:
    """Return whether a call writes a file that is read later: in place, or hidden until it is renamed."""
    name = Path(call.path).name
    if name.startswith(".") != hidden:
        return False
    is_read = any(f"{suffix}." in f"{name}." for suffix in (".json", ".yaml", ".zip", ".ckpt"))
    return call.kind in ("create", "write", "truncate") and is_read


def _judge(place: Place, config: Path, store: Path, steps: list[int], what: str, reference: End) -> None:
    if (store / "mlflow.db").exists():
        with closing(sqlite3.connect(store / "mlflow.db")) as connection:
            found = connection.execute("PRAGMA integrity_check").fetchall()
        expect(found == [("ok",)], "the database is damaged", found[:3], what)
    expect_readable(store.rglob("[!.]*"), what)
    done = place.run("train", config, *COMMON)
    expect(done.code == 0, "the command does not end with 0", what, done.err)
    expect("Traceback" not in done.err, "a traceback is shown", what, done.err)
    resumed = re.search(r"resumes +.+ \(step (\d+),", done.out)
    at = int(resumed[1]) if resumed else 0
    least = max(steps, default=0)
    expect(at >= least, f"resumes at step {at}; checkpoints of the steps {steps} had been saved", what, done.err)
    listed = place.run("runs", "--tracking-uri", store)
    expect(listed.code == 0 and "Traceback" not in listed.err, "`runs` fails afterwards", what, listed.err)
    after = statuses(store, EXPERIMENT)
    finished = [run for run, status in after.items() if status == "FINISHED"]
    expect(finished and set(after.values()) <= {"FINISHED", "FAILED"}, f"the runs are {after}", what, done.err)
    folder = done.folder
    differs = end_of(store, EXPERIMENT, folder.parent.name).differs(reference)
    expect(not differs, f"the result differs: {differs}", what, done.out[-1500:], done.err)
    expect_readable(folder.rglob("[!.]*"), what)


def _saved(store: Path, calls: list[shim.Call]) -> list[int]:
    """Return the steps of the checkpoints whose names were durable: of `last.ckpt`, from which a run resumes, or of
    others if it did not exist yet."""
    import torch

    disk, named = Disk(store), dict[Path, list[tuple[str, int]]]()
    steps: dict[bool, list[int]] = {True: [], False: []}
    for call in calls:
        disk.apply(call)
        path = Path(call.other or call.path)
        if call.kind == "rename" and not call.error and path.suffix == ".ckpt" and not path.name.startswith("."):
            node = disk.find(str(path))
            assert node is not None, path
            step = torch.load(io.BytesIO(content_of(node)), weights_only=True)["global_step"]
            named.setdefault(path.parent, []).append((path.name, step))
        if call.kind == "sync" and not call.error:
            for name, step in named.pop(path, []):
                steps[name == "last.ckpt"].append(step)
    return sorted(set(steps[True] or steps[False]))
