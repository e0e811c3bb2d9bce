"""Two to eight of everything at once: trainings on one store and cache, exports of one run, two commands that resume
one run, syncs, cleaning.

The end is that of one after the other: each training is FINISHED with its points once, the weights are those of the
same training alone, what is exported opens, the store opens in MLflow.
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
    """A schedule of commands that begin within a second."""
    from serve.bundle import Bundle

    whole = place.once("whole", lambda folder: _make(place, folder))
    known = json.loads((whole / "known.json").read_text())
    config = place.config()
    store, cache = place.folder / "mlruns", place.folder / "cache"
    words = [draw.choice(KINDS) for _ in range(draw.randint(2, 8))]
    shared = place.run("train", config, "train.num_epochs=1").folder
    if "resume" in words:
        words.append("resume")  # one alone meets nobody
        begun = place.run("train", config, *RESUMED, "train.num_epochs=1")
        expect(begun.code == 0, "the run that is to be resumed fails", begun)
    running = []
    for number, word in enumerate(words):
        named = f"logger.params.experiment_name=own-{number}"
        if word == "train":
            started = place.start("train", config, "train.num_epochs=1", named)
        elif word.startswith("cached"):
            pictures = picture_settings(whole / "pictures", word.removeprefix("cached-"))
            started = place.start("train", config, *pictures, named, DEEPLIGHTNING_CACHE=str(cache))
        elif word == "resume":
            started = place.start("train", config, *RESUMED)
        elif word == "export":
            started = place.start("export", shared)
        else:
            asked = {"sync": ["--sync"], "clean": ["--clean", "--delete"], "list": []}[word]
            started = place.start("runs", *asked, "--tracking-uri", store)
        running.append(started)
        time.sleep(draw.choice([0, 0, draw.random() * 0.3]))
    ended = [each.end() for each in running]
    what = ", ".join(words)
    for number, (word, outcome) in enumerate(zip(words, ended, strict=True)):
        expect(outcome.code == 0, f"{what}: {word} (number {number}) ends with {outcome.code}", outcome)
        expect("Traceback" not in outcome.err, f"{what}: {word} (number {number}) shows a traceback", outcome)
        if word == "train" or word.startswith("cached"):
            end = end_of(store, f"own-{number}")
            expect(end.status == "FINISHED", f"{what}: a training is {end.status}")
            found = [digest(outcome.folder / "last.ckpt"), end.series]
            expect(found == known[word], f"{what}: {word} ends otherwise than alone", found, known[word])
    if "export" in words:
        Bundle.open(shared)
    if "resume" in words:
        _resumed(store, what, ended, words, known["resume"])
    left = sorted(path.name for path in [*store.glob("*.unsent/*"), *store.glob("*.lock")])
    expect(not left, f"{what}: the store is left with {left}")
    return what


def _resumed(store: Path, what: str, ended: list[Outcome], words: list[str], known: list[Any]) -> None:
    """One command resumes the run; another one that finds it at work has a run of its own."""
    for word, outcome in zip(words, ended, strict=True):
        if word == "resume":
            found = digest(outcome.folder / "last.ckpt")
            expect(found == known[0], f"{what}: what resumes ends with other weights", outcome)
    ends = {run: end_of(store, "resumed", run) for run in statuses(store, "resumed")}
    expect({end.status for end in ends.values()} == {"FINISHED"}, f"{what}: resumed runs are not all FINISHED", ends)
    twice = {
        name
        for end in ends.values()
        for name, points in end.series.items()
        if len(points) > len({step for step, _ in points})
    }
    expect(not twice, f"{what}: points are twice in the store: {', '.join(sorted(twice))}")
    expect(any(end.series == known[1] for end in ends.values()), f"{what}: no run has all points of one alone", ends)


def _make(place: Place, folder: Path) -> None:
    """What each training gives alone."""
    draw_pictures(folder / "pictures", 90)
    config = place.config(folder=folder)
    settings = {"train": ["train.num_epochs=1"], "resume": [*RESUMED]}
    settings |= {f"cached-{resize}": picture_settings(folder / "pictures", resize) for resize in ("crop", "stretch")}
    known = {}
    for word, own in settings.items():
        done = place.run("train", config, *own, f"logger.params.experiment_name={word}", cwd=folder)
        expect(done.code == 0, f"a training alone fails: {word}", done)
        known[word] = [digest(done.folder / "last.ckpt"), end_of(folder / "mlruns", word).series]
    (folder / "known.json").write_text(json.dumps(known))
