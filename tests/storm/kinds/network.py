"""The network between two machines, a process on each, is cut once or several times, for moments or for longer than
processes wait.

A run that is cut for moments ends as one that nothing disturbed. After a longer cut each machine ends within the
time-out with one cause, the run is FAILED, and the same command, started again, ends so.
"""

import json
import random
import time
from pathlib import Path

from cable import ADDRESS, Cable, NoCable
from commands import Outcome, free_port

from storm.ended import End, end_of
from storm.place import Place, Skipped, expect

WHAT = "the network between two machines is cut for moments, several times, for longer than processes wait, or for good"
HOUR = 40
LIMIT = 240
TIMEOUT = 12
"""Seconds that processes wait for one another."""

MARKS = '''\
import os
import pathlib
import time

import pytorch_lightning as pl


class Marks(pl.Callback):
    """Makes a file before the batch of a step, and waits some moments."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        mark = pathlib.Path(os.environ["MARK"])
        if trainer.global_step == self.step and trainer.global_rank == 0 and not mark.exists():
            mark.touch()
            time.sleep(0.3)
'''


def case(draw: random.Random, place: Place) -> str:
    """One run, whose network is cut."""
    try:
        cable = Cable()
    except NoCable as reason:
        raise Skipped(str(reason)) from None
    try:
        return _case(draw, place, cable)
    finally:
        cable.remove()


def _case(draw: random.Random, place: Place, cable: Cable) -> str:
    whole = place.once("whole", lambda folder: _whole(place, folder, cable))
    expected = End(**json.loads((whole / "end.json").read_text()))
    cuts = {
        "for moments": [draw.uniform(0.2, 5)],
        "several times": [draw.uniform(0.1, 1) for _ in range(draw.randint(2, 4))],
        "for long": [draw.uniform(TIMEOUT + 10, TIMEOUT + 20)],
        "for good": [],
    }
    how = draw.choice(list(cuts))
    step = draw.randrange(12)
    told = f"cut {how} at step {step}: {', '.join(f'{pause:.1f} s' for pause in cuts[how])}"
    running = _start(place, place.folder, cable, step)
    mark = place.folder / "mark"
    while not mark.exists() and not all(each.ended(0) for each in running):
        time.sleep(0.01)
    for pause in cuts[how]:
        cable.cut()
        time.sleep(pause)
        cable.mend()
        time.sleep(draw.uniform(0, 0.5))
    if how == "for good":
        cable.cut()
    begun = time.monotonic()
    ended = [each.end() for each in running]
    seconds = time.monotonic() - begun
    shown = "\n".join(map(str, ended))
    store = place.folder / "mlruns"
    if how in ("for moments", "several times"):
        expect([each.code for each in ended] == [0, 0], f"{told}: the processes do not end with 0", shown)
    else:
        expect([each.code for each in ended] == [5, 5], f"{told}: the processes do not end with 5", shown)
        expect(seconds < TIMEOUT + 60, f"{told}: the last process ends after {seconds:.0f} s", shown)
        for each in ended:
            causes = [line for line in each.err.splitlines() if line.startswith("error")]
            expect(len(causes) == 1, f"{told}: a machine has {len(causes)} causes", shown)
        cable.mend()
        place.run("runs", "--tracking-uri", store)
        status = end_of(store, "network").status
        expect(status == "FAILED", f"{told}: the run is {status}", shown)
        again = [each.end() for each in _start(place, place.folder, cable, step)]
        expect([each.code for each in again] == [0, 0], f"{told}: it does not resume", shown, *again)
    end = end_of(store, "network")
    expect(end == expected, f"{told}: the end is another: {end.differs(expected)}", shown)
    return told


def _start(place: Place, folder: Path, cable: Cable, step: int) -> list:
    """Starts the command on both machines; each has a folder for temporary files of its own."""
    (folder / "marks.py").write_text(MARKS)
    config, port, running = place.config(folder=folder), free_port(), []
    settings = [
        *("logger.params.experiment_name=network", "engine.num_nodes=2", "engine.backend=ddp", "data.batch_size=6"),
        *(f"engine.params.timeout={TIMEOUT}", "train.resume_ckpt=auto", "train.checkpoint={every_n_steps: 4}"),
        f"train.callbacks=[{{type: marks.Marks, params: {{step: {step}}}}}]",
    ]
    for number, name in enumerate(cable.names):
        own = folder / f"machine-{number}"
        own.mkdir(exist_ok=True)
        variables = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": port, "DEEPLIGHTNING_MEET_SECONDS": "60"}
        variables |= {"NODE_RANK": str(number), "NAMESPACE": name, "TMPDIR": str(own), "MARK": str(folder / "mark")}
        running.append(place.start("train", config, *settings, cwd=folder, main="cable:in_namespace", **variables))
    return running


def _whole(place: Place, folder: Path, cable: Cable) -> None:
    ended: list[Outcome] = [each.end() for each in _start(place, folder, cable, 0)]
    expect(all(each.code == 0 for each in ended), "the run that nothing disturbs fails", *ended)
    (folder / "end.json").write_text(json.dumps(end_of(folder / "mlruns", "network").plain()))
