"""The network between two machines, with a process on each, is cut one or more times, briefly or beyond the timeout.

After short cuts the result equals that of an undisturbed run. After a longer cut each machine ends within the timeout
with one error, the run is FAILED, and the same command, started again, reaches that result.
"""

import random
import time
from pathlib import Path

from cable import ADDRESS, Cable, NoCable
from commands import Running, free_port

from storm.ended import end_of, undisturbed
from storm.kinds.ranks import FAULTY, TIMEOUT
from storm.place import Place, Skipped, expect

WHAT = "the network between two machines is cut for moments, several times, for longer than processes wait, or for good"
HOUR = 40
LIMIT = 240


def case(draw: random.Random, place: Place) -> str:
    """Cut the network of one run."""
    try:
        cable = Cable()
    except NoCable as reason:
        raise Skipped(str(reason)) from None
    try:
        return _case(draw, place, cable)
    finally:
        cable.remove()


def _case(draw: random.Random, place: Place, cable: Cable) -> str:
    reference = undisturbed(place, "network", lambda folder: [each.end() for each in _start(place, folder, cable, 0)])
    cuts = {
        "for moments": [draw.uniform(0.2, 5)],
        "several times": [draw.uniform(0.1, 1) for _ in range(draw.randint(2, 4))],
        "for long": [draw.uniform(TIMEOUT + 10, TIMEOUT + 20)],
        "for good": [],
    }
    how = draw.choice(list(cuts))
    step = draw.randrange(12)
    what = f"cut {how} at step {step}: {', '.join(f'{pause:.1f} s' for pause in cuts[how])}"
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
    outcomes = "\n".join(map(str, ended))
    store = place.folder / "mlruns"
    code = 0 if how in ("for moments", "several times") else 5
    expect([each.code for each in ended] == [code, code], f"{what}: the processes do not end with {code}", outcomes)
    if code:
        expect(seconds < TIMEOUT + 60, f"{what}: the last process ends after {seconds:.0f} s", outcomes)
        for each in ended:
            causes = [line for line in each.err.splitlines() if line.startswith("error")]
            expect(len(causes) == 1, f"{what}: a machine has {len(causes)} errors", outcomes)
        cable.mend()
        place.run("runs", "--tracking-uri", store)
        status = end_of(store, "network").status
        expect(status == "FAILED", f"{what}: the run is {status}", outcomes)
        again = [each.end() for each in _start(place, place.folder, cable, step)]
        expect([each.code for each in again] == [0, 0], f"{what}: it does not resume", outcomes, *again)
    differs = end_of(store, "network").differs(reference.end)
    expect(not differs, f"{what}: the result differs: {differs}", outcomes)
    return what


def _start(place: Place, folder: Path, cable: Cable, step: int) -> list[Running]:
    """Start the command on both machines, each with a separate temporary folder."""
    (folder / "faulty.py").write_text(FAULTY)
    config, port, running = place.config(folder=folder), free_port(), []
    settings = [
        *("logger.params.experiment_name=network", "engine.num_nodes=2", "engine.backend=ddp", "data.batch_size=6"),
        *(f"engine.params.timeout={TIMEOUT}", "train.resume_ckpt=auto", "train.checkpoint={every_n_steps: 4}"),
        f"train.callbacks=[{{type: faulty.Once, params: {{rank: 0, step: {step}, what: pause}}}}]",
    ]
    for number, name in enumerate(cable.names):
        own = folder / f"machine-{number}"
        own.mkdir(exist_ok=True)
        variables = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": port, "DEEPLIGHTNING_MEET_SECONDS": "60"}
        variables |= {"NODE_RANK": str(number), "NAMESPACE": name, "TMPDIR": str(own), "MARK": str(folder / "mark")}
        running.append(place.start("train", config, *settings, cwd=folder, main="cable:in_namespace", **variables))
    return running
