"""A training is killed or signalled at random instants, up to five times, and restarted each time by the same command.

Its result equals that of an undisturbed run: weights, points, best checkpoints, bundle, and one FINISHED run. An
instant is an event of the run (`tests/killing.py`) or a time. A run that gets SIGTERM or SIGINT while it trains ends
with the exit code of the signal.
"""

import contextlib
import random
import signal
import time
from pathlib import Path

from commands import Running
from killing import KILLS, SETTINGS, WRITING

from storm.ended import end_of, undisturbed
from storm.place import Place, expect

WHAT = "kill -9 at any instant of training, validation, checkpoint, export and end; resumed; up to five times"
HOUR = 1000
LIMIT = 240
PRELOAD = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")

EXPERIMENT = "storm"
EXPORTED = ["train.export=true", "train.num_epochs=3"]
VARIANTS: dict[str, tuple[int, int, list[str]]] = {
    "one": (12, 1, []),
    "export": (4, 1, EXPORTED),
    "workers": (1, 1, ["data.num_workers=2"]),
    "ddp": (3, 2, []),
    "fsdp": (1, 2, ["engine.backend=fsdp"]),
    "stage_2": (1, 2, ["engine.backend=deepspeed_stage_2", "model.scheduler.warmup=0"]),
    "stage_3": (1, 2, ["engine.backend=deepspeed_stage_3", "model.scheduler.warmup=0"]),
}
"""Weight, processes and settings. Data workers cost seconds at each start."""


def case(draw: random.Random, place: Place) -> str:
    """Kill or signal one run up to five times."""
    (variant,) = draw.choices(list(VARIANTS), [weight for weight, _, _ in VARIANTS.values()])
    _, processes, _ = VARIANTS[variant]
    reference = undisturbed(place, EXPERIMENT, lambda f: [_start(place, _prepare(place, f), variant).end()], variant)
    events = [(reference.folder / f"events.{rank}").read_text().splitlines() for rank in range(processes)]
    config = _prepare(place, place.folder)
    kills = []
    for _ in range(draw.randint(1, 5)):
        how = draw.choice(["event", "event", "writing", "time", "signal"])
        if how == "time":
            delay = draw.random() * reference.seconds
            running = _start(place, config, variant)
            time.sleep(delay)
            for rank in range(processes):
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    running.signal(signal.SIGKILL, rank)
            running.end()
            kills.append(f"after {delay:.2f} s")
            continue
        victims = "0" if processes == 1 else draw.choice(["01", "10", "0", "1"])
        own = events[int(victims[0])]
        number = draw.randint(1, len(own))
        if how == "signal":
            kills.append(_signalled(draw, place, config, variant, own))
            continue
        if how == "writing" and (places := [n for n, event in enumerate(own, 1) if event in WRITING]):
            number = draw.choice(places)
        ended = _start(place, config, variant, KILL=f"{victims}:{number}").end()
        # A run that resumes late has fewer events, and ends by itself.
        kills.append(own[number - 1] if ended.code else "not: it had ended")
    done = _start(place, config, variant).end()
    what = f"{variant}: {', '.join(kills)}"
    expect(all(each.code == 0 for each in done.ranks or [done]), "the resumed run does not end with 0", what, done)
    differs = end_of(place.folder / "mlruns", EXPERIMENT).differs(reference.end)
    expect(not differs, f"the result differs: {differs}", what, done)
    return what


def _signalled(draw: random.Random, place: Place, config: Path, variant: str, events: list[str]) -> str:
    """Signal every process after a batch in the first half of the training, counted from where it resumes."""
    name, processes = draw.choice(["SIGTERM", "SIGINT"]), VARIANTS[variant][1]
    batches = [number for number, event in enumerate(events, 1) if event.startswith("after batch")]
    number = draw.choice(batches[: len(batches) // 2])
    (place.folder / "events.0").unlink(missing_ok=True)
    ended = _start(place, config, variant, KILL=f"{'01'[:processes]}:{number}", HOW=name).end()
    codes, own = {each.code for each in ended.ranks or [ended]}, {"SIGTERM": 143, "SIGINT": 130}[name]
    # A run that resumes late has fewer or other events, and may end earlier.
    log = (place.folder / "events.0").read_text().splitlines()
    reached = len(log) >= number and log[number - 1].startswith("after batch")
    what = f"{name} {events[number - 1]}"
    if not reached:  # after its run a process no longer catches signals; a shell reports the same code
        codes = {128 - code if code < 0 else code for code in codes}
    expect(codes <= {0, own}, f"{what}: the processes end with {codes}", ended)
    expect(not reached or codes == {own}, f"{what}: the exit codes are {codes}", ended)
    return what


def _prepare(place: Place, folder: Path) -> Path:
    (folder / "kills.py").write_text(KILLS)
    return place.config(folder=folder)


def _start(place: Place, config: Path, variant: str, **variables: str) -> Running:
    _, processes, settings = VARIANTS[variant]
    named = [f"logger.params.experiment_name={EXPERIMENT}", f"engine.processes={processes}"]
    each = [f"data.batch_size={16 // processes}", "data.num_workers=0"]
    overrides = [*SETTINGS, *each, *named, *settings]
    folder = config.parent
    events = str(folder / "events")
    return place.start("train", config, *overrides, cwd=folder, ranks=processes, EVENTS=events, **variables)
