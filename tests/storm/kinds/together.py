"""Two to eight commands run at once: trainings on one store and cache, exports of one run, two commands that resume one
run, syncs, cleaning.

The result equals that of sequential commands: each training is FINISHED without duplicate points, its weights are those
of the same training alone, and the exported bundle can be opened.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

from commands import Outcome
from tiny import digest

from storm.ended import end_of, statuses
from storm.kinds.mutations import draw_pictures, picture_settings
from storm.place import Place, expect

WHAT = "two to eight at once: trainings on one store and cache, exports and resumptions of one run, --sync, --clean"
HOUR = 500
LIMIT = 300

KINDS = ("train", "train", "cached-crop", "cached-stretch", "resume", "export", "sync", "clean", "list")

RESUMED = ["train.num_epochs=3", "train.resume_ckpt=auto", "logger.params.experiment_name=resumed"]


def case(draw: random.Random, place: Place) -> str:
    """Start a random list of commands, each shortly after the previous one."""
    from serve.bundle import Bundle

    originals = place.once("originals", lambda folder: _make(place, folder))
    known = json.loads((originals / "known.json").read_text())
    config = place.config()
    store, cache = place.folder / "mlruns", place.folder / "cache"
    kinds = [draw.choice(KINDS) for _ in range(draw.randint(2, 8))]
    shared = place.run("train", config, "train.num_epochs=1").folder
    if "resume" in kinds:
        kinds.append("resume")  # at least two, so that they compete
        begun = place.run("train", config, *RESUMED, "train.num_epochs=1")
        expect(begun.code == 0, "the run to be resumed fails", begun)
    running = []
    for number, kind in enumerate(kinds):
        named = f"logger.params.experiment_name=own-{number}"
        if kind == "train":
            started = place.start("train", config, "train.num_epochs=1", named)
        elif kind.startswith("cached"):
            pictures = picture_settings(originals / "pictures", kind.removeprefix("cached-"))
            started = place.start("train", config, *pictures, named, DEEPLIGHTNING_CACHE=str(cache))
        elif kind == "resume":
            started = place.start("train", config, *RESUMED)
        elif kind == "export":
            started = place.start("export", shared)
        else:
            asked = {"sync": ["--sync"], "clean": ["--clean", "--delete"], "list": []}[kind]
            started = place.start("runs", *asked, "--tracking-uri", store)
        running.append(started)
        time.sleep(draw.choice([0, 0, draw.random() * 0.3]))
    ended = [each.end() for each in running]
    what = ", ".join(kinds)
    for number, (kind, outcome) in enumerate(zip(kinds, ended, strict=True)):
        expect(outcome.code == 0, f"{what}: {kind} (number {number}) ends with {outcome.code}", outcome)
        expect("Traceback" not in outcome.err, f"{what}: {kind} (number {number}) shows a traceback", outcome)
        if kind == "train" or kind.startswith("cached"):
            end = end_of(store, f"own-{number}")
            expect(end.status == "FINISHED", f"{what}: a training is {end.status}")
            found = [digest(outcome.folder / "last.ckpt"), end.series]
            expect(found == known[kind], f"{what}: {kind} has another result than alone", found, known[kind])
    if "export" in kinds:
        Bundle.open(shared)
    if "resume" in kinds:
        _check_resumed(store, what, ended, kinds, known["resume"])
    left = sorted(path.name for path in [*store.glob("*.unsent/*"), *store.glob("*.lock")])
    expect(not left, f"{what}: the store still has {left}")
    return what


def _check_resumed(store: Path, what: str, ended: list[Outcome], kinds: list[str], known: list[Any]) -> None:
    """Check that one command resumes the run, and that another one that finds it running starts a new run."""
    for kind, outcome in zip(kinds, ended, strict=True):
        if kind == "resume":
            found = digest(outcome.folder / "last.ckpt")
            expect(found == known[0], f"{what}: a resumed run has other weights", outcome)
    ends = {run: end_of(store, "resumed", run) for run in statuses(store, "resumed")}
    expect({end.status for end in ends.values()} == {"FINISHED"}, f"{what}: resumed runs are not all FINISHED", ends)
    series = [(name, points) for end in ends.values() for name, points in end.series.items()]
    duplicate = {name for name, points in series if len(points) > len({step for step, _ in points})}
    expect(not duplicate, f"{what}: the store has duplicate points: {', '.join(sorted(duplicate))}")
    expect(any(end.series == known[1] for end in ends.values()), f"{what}: no run has all points of one alone", ends)


def _make(place: Place, folder: Path) -> None:
    """Record the result of each training alone."""
    draw_pictures(folder / "pictures", 90)
    config = place.config(folder=folder)
    settings = {"train": ["train.num_epochs=1"], "resume": [*RESUMED]}
    settings |= {f"cached-{resize}": picture_settings(folder / "pictures", resize) for resize in ("crop", "stretch")}
    known = {}
    for kind, overrides in settings.items():
        done = place.run("train", config, *overrides, f"logger.params.experiment_name={kind}", cwd=folder)
        expect(done.code == 0, f"a training alone fails: {kind}", done)
        known[kind] = [digest(done.folder / "last.ckpt"), end_of(folder / "mlruns", kind).series]
    (folder / "known.json").write_text(json.dumps(known))
