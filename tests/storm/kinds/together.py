"""Two to eight of everything at once: trainings on one store and cache, exports of one run, syncs, cleaning.

The end is that of one after the other: each training is FINISHED with its points once, the weights are those of the
same training alone, what is exported opens, the store opens in MLflow.
"""

import json
import random
import time
from pathlib import Path

from tiny import digest

from storm.ended import end_of
from storm.kinds.mutations import draw_pictures
from storm.place import Place, expect

WHAT = "two to eight at once: trainings on one store and cache, exports of one run, --sync, --clean, listings"
HOUR = 500
LIMIT = 300

KINDS = ("train", "train", "cached", "export", "sync", "clean", "list")


def case(draw: random.Random, place: Place) -> str:
    """A schedule of commands that begin within a second."""
    from serve.bundle import Bundle

    whole = place.once("whole", lambda folder: _make(place, folder))
    known = json.loads((whole / "known.json").read_text())
    config = place.config()
    store, cache = place.folder / "mlruns", place.folder / "cache"
    words = [draw.choice(KINDS) for _ in range(draw.randint(2, 8))]
    shared = place.run("train", config, "train.num_epochs=1").folder
    running = []
    for number, word in enumerate(words):
        named = f"logger.params.experiment_name=own-{number}"
        if word == "train":
            started = place.start("train", config, "train.num_epochs=1", named)
        elif word == "cached":
            pictures = _pictures(whole / "pictures")
            started = place.start("train", config, *pictures, named, DEEPLIGHTNING_CACHE=str(cache))
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
        if word in ("train", "cached"):
            end = end_of(store, f"own-{number}")
            expect(end.status == "FINISHED", f"{what}: a training is {end.status}")
            found = [digest(outcome.folder / "last.ckpt"), end.series]
            expect(found == known[word], f"{what}: {word} ends otherwise than alone", found, known[word])
    if "export" in words:
        Bundle.open(shared)
    left = sorted(path.name for path in store.iterdir() if ".journal" in path.name or path.name.endswith(".lock"))
    expect(not left, f"{what}: the store is left with {left}")
    return what


def _pictures(root: Path) -> list[str]:
    return [
        f"data={{module: {{type: deeplightning.data.image_folder.ImageFolder, params: {{image_size: 8}}}}, "
        f"root: '{root}', batch_size: 8}}",
        "model.network.params={num_classes: 3, num_channels: 3, image_size: 8}",
        "train.num_epochs=1",
    ]


def _make(place: Place, folder: Path) -> None:
    """What each training gives alone."""
    draw_pictures(folder / "pictures", 90)
    config = place.config(folder=folder)
    known = {}
    for word, settings in (("train", ["train.num_epochs=1"]), ("cached", _pictures(folder / "pictures"))):
        done = place.run("train", config, *settings, f"logger.params.experiment_name={word}", cwd=folder)
        expect(done.code == 0, f"a training alone fails: {word}", done)
        known[word] = [digest(done.folder / "last.ckpt"), end_of(folder / "mlruns", word).series]
    (folder / "known.json").write_text(json.dumps(known))
