"""One of two or three processes of a run is killed, exits, fails, hangs, stops or is slow, at a random step.

All processes end within the timeout with one error, the run is FAILED, and the same command, started again, reaches the
result of an undisturbed run. A launch with restarts reaches it by itself.
"""

import random
import time
from pathlib import Path

from commands import Outcome
from killing import GOES_WRONG

from storm.ended import end_of, undisturbed
from storm.place import Place, expect

WHAT = "a process of two or three is killed, leaves, fails, hangs, stops, is slow; with and without restarts"
HOUR = 200
LIMIT = 240
TIMEOUT = 12
"""Seconds that processes wait for one another."""

FAULTY = (
    GOES_WRONG
    + '''

class Once(At):
    """Calls the method `what` before a step of one rank, but not when the run is started again."""

    def __init__(self, rank, step, what):
        self.rank, self.step, self.what = rank, step, what

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        mark = pathlib.Path(os.environ["MARK"])
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step) and not mark.exists():
            mark.touch()
            getattr(self, self.what)(module)

    def pause(self, module):
        time.sleep(0.3)

    def slow(self, module):
        time.sleep(3)
'''
)

CODES = {"kill": {5, -9}, "crash": {5, -11}, "leave": {5, 7}, "fault": {5}, "sleep": {5}, "stop": {5}, "slow": {0}}


def case(draw: random.Random, place: Place) -> str:
    """Cause one fault in one process."""
    ranks = draw.choice([2, 2, 2, 3])
    what = draw.choice(["kill", "kill", "crash", "leave", "fault", "sleep", "stop", "slow"])
    rank, step = draw.randrange(ranks), draw.randrange(12)
    restarts = draw.random() < 0.5 and what in ("kill", "crash")
    message = f"{what} in rank {rank} of {ranks} at step {step}{', restarted' * restarts}"
    no_rank = -1
    reference = undisturbed(
        place, "ranks", lambda f: [_start(place, _prepare(place, f), ranks, no_rank, 0, "slow", False)], str(ranks)
    )
    config = _prepare(place, place.folder)
    begun = time.monotonic()
    done = _start(place, config, ranks, rank, step, what, restarts)
    seconds = time.monotonic() - begun
    ended = done.ranks or [done]
    if restarts:
        expect(done.code == 0, f"{message}: the launch does not end with 0", done)
    else:
        codes = {each.code for each in ended}
        expect(codes <= CODES[what], f"{message}: the processes end with {codes}", done)
        expect(what == "slow" or 0 not in codes, f"{message}: a process ends with 0", done)
        # Imports and the run itself take some seconds on a busy machine.
        expect(seconds < TIMEOUT + 60, f"{message}: the last process ends after {seconds:.0f} s", done)
        causes = sum(line.startswith("error") for each in ended for line in each.err.splitlines())
        expect(causes == (what != "slow"), f"{message}: {causes} errors are reported", done)
        if what != "slow":
            # If rank 0 was lost, the next process that opens the store writes the status.
            place.run("runs", "--tracking-uri", place.folder / "mlruns")
            status = end_of(place.folder / "mlruns", "ranks").status
            expect(status == "FAILED", f"{message}: the run is {status}", done)
            again = _start(place, config, ranks, rank, step, what, False)
            expect(all(each.code == 0 for each in again.ranks or [again]), f"{message}: it does not resume", again)
    differs = end_of(place.folder / "mlruns", "ranks").differs(reference.end)
    expect(not differs, f"{message}: the result differs: {differs}", done)
    return message


def _prepare(place: Place, folder: Path) -> Path:
    (folder / "faulty.py").write_text(FAULTY)
    return place.config(folder=folder)


def _start(place: Place, config: Path, ranks: int, rank: int, step: int, what: str, restarts: bool) -> Outcome:
    at = f"train.callbacks=[{{type: faulty.Once, params: {{rank: {rank}, step: {step}, what: {what}}}}}]"
    settings = [
        *("logger.params.experiment_name=ranks", "engine.backend=ddp", f"engine.params.timeout={TIMEOUT}"),
        *(f"engine.processes={ranks}", f"data.batch_size={12 // ranks}", "train.resume_ckpt=auto", at),
        "train.checkpoint={every_n_steps: 4}",
        # Otherwise torch sums the gradients of three processes in another order in the first step after a start.
        *(["engine.params.find_unused_parameters=true"] if ranks > 2 else []),
    ]
    options = {"cwd": config.parent, "MARK": str(config.parent / "mark")}
    if restarts or what == "stop":  # only the launcher can end a stopped process
        settings.append("engine.max_restarts=1" if restarts else "engine.launcher={type: deeplightning.launch.Local}")
        return place.run("train", config, *settings, main="forks:main", **options)
    return place.run("train", config, *settings, ranks=ranks, **options)
