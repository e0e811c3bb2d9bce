"""Each call of a run on its files fails once: the run ends with one error, or continues and names the missing files.

The run's calls on its store, folder and config are counted once; then each case makes one of them fail with an error
that the call can have. The remaining files are checked, and the same command without a fault must reach the result of
an undisturbed run.
"""

import errno
import random
from pathlib import Path

from commands import Outcome

from storm import shim
from storm.ended import Reference, end_of, expect_readable, folder_of, names_of, statuses, undisturbed
from storm.place import Place, expect

WHAT = "each call on a file fails once: open, write (short too), fsync, rename, link, unlink, mkdir, close, map, lock"
HOUR = 2000
LIMIT = 120

EXPERIMENT = "storm"
COMMON = [
    f"logger.params.experiment_name={EXPERIMENT}",
    "train.num_epochs=3",
    "train.checkpoint={monitor: val_loss, save_top_k: 2}",
    "train.resume_ckpt=auto",
    "stages=[train,test]",
]
VARIANTS: dict[str, tuple[list[str], list[str] | None]] = {
    "new": ([], None),
    "resumed": ([], ["train.num_epochs=1"]),
    "exported": (["train.export=true"], ["train.num_epochs=2"]),
}
"""Overrides in addition to `COMMON`, and those of the earlier run that it resumes, if any."""

FULL = (errno.ENOSPC, errno.EDQUOT)
ANY = (errno.EIO, errno.ESTALE, errno.EINTR)
ERRORS: dict[str, tuple[int, ...]] = {
    "open": (*ANY, errno.EROFS),
    "read_open": ANY,
    "create": (*ANY, *FULL, errno.EROFS),
    "write": (*ANY, *FULL, shim.SHORT, shim.SHORT),
    "truncate": (*ANY, errno.EROFS),
    "sync": (errno.EIO, *FULL, errno.ESTALE, errno.EROFS),
    "rename": (*ANY, *FULL, errno.EROFS),
    "link": (*ANY, *FULL, errno.EROFS),
    "unlink": (*ANY, errno.EROFS),
    "mkdir": (*ANY, *FULL, errno.EROFS),
    "rmdir": (*ANY, errno.EROFS),
    "close": (errno.EIO, *FULL, errno.EINTR),
    "map": (errno.EIO, errno.ENOMEM, errno.ESTALE),
    "lock": (errno.EIO, errno.EINTR, errno.ENOLCK, errno.ESTALE),
}
"""Errors that each kind of call can have."""


def environment() -> dict[str, str]:
    return shim.environment()


def case(draw: random.Random, place: Place) -> str:
    """Let one call fail, or all calls from it on that change something."""
    references = {name: _reference(place, name) for name in VARIANTS}
    counts = {name: shim.read(run.folder / "calls")[-1].number for name, run in references.items()}
    calls = [(name, number) for name, count in counts.items() for number in range(1, count + 1)]
    random.Random(1).shuffle(calls)
    variant, number = calls[place.number % len(calls)]
    errors = {kind: draw.choice(allowed) for kind, allowed in ERRORS.items()}
    if sticky := draw.random() < 0.15:  # every program repeats an interrupted call endlessly
        errors = {kind: errno.EIO if error == errno.EINTR else error for kind, error in errors.items()}
    _before(place, place.folder, variant)
    journal = place.folder / "calls"
    done = _start(place, place.folder, variant, **_order(place.folder, journal, number, sticky, errors))
    tried = shim.read(journal)
    failed = next((call for call in tried if call.number == number), None)
    what = f"{variant}: {failed or f'call {number}, which did not happen'}{', and each later change' * sticky}"
    if failed is not None and not failed.error:
        what += f", short by half of {failed.kind}"
    _judge(place, variant, done, what, references[variant])
    return f"{what}; exit code {done.code}"


def _judge(place: Place, variant: str, done: Outcome, what: str, reference: Reference) -> None:
    store = place.folder / "mlruns"
    expect("Traceback" not in done.err, "a failing call shows a traceback", what, done.err)
    expect(done.code in (0, 3, 4), "a failing call does not end the run with exit code 0, 3 or 4", what, done.err)
    if done.code:
        notes = [line for line in done.err.splitlines() if line.startswith("error: ")]
        expect(len(notes) == 1, "there is not exactly one error", what, done.err)
        note = done.err[done.err.index("error: ") :]
        has_path = str(place.folder) in note or "error: tiny.yaml: " in note  # the config by its name
        expect(has_path, "the error does not name the path", what, done.err)
    expect_readable(store.glob("*/*/artifacts/*.ckpt"), what, done.err)
    if variant != "new":
        expect(list(store.glob("*/*/artifacts/last.ckpt")), "the earlier checkpoint is gone", what, done.err)
    listed = place.run("runs", "--tracking-uri", store)  # this sends unsent points
    lists = listed.code == 0 or not (store / "mlflow.db").exists()  # the call failed before the store was created
    expect(lists and "Traceback" not in listed.err, "`runs` fails afterwards", what, done.err, listed.err)
    after = statuses(store, EXPERIMENT)
    if done.code:
        open_ = [run for run, status in after.items() if status not in ("FAILED", "FINISHED")]
        expect(not open_, f"the runs are {after}", what, done.err, listed.err)
        again = _start(place, place.folder, variant)
        expect(again.code == 0, "the same command, without a fault, does not end with 0", what, done.err, again.err)
        after = statuses(store, EXPERIMENT)
        done = Outcome(0, done.out + again.out, done.err + again.err)
    else:
        expect(len(after) == 1, f"the runs are {after}", what, done.err, listed.err)
    finished = [run for run, status in after.items() if status == "FINISHED"]
    expect(len(finished) == 1, f"the runs are {after} at the end", what, done.err)
    (run,) = finished
    folder, output = folder_of(store, run), done.err + done.out
    names = names_of(folder)
    (intact,) = reference.folder.glob("mlruns/*/*/artifacts")
    gone = [name for name in names_of(intact) if name not in names and name not in output]
    if "the run chooses a new best checkpoint" in output:
        gone = [name for name in gone if not name.endswith(".ckpt")]
    if "code.zip is not written" in output:
        gone = [name for name in gone if not name.startswith("code.")]
    expect(not gone, f"files are missing without a warning: {gone}", what, done.err)
    differs = end_of(store, EXPERIMENT, run).differs(reference.end)
    texts = ("not written", "cannot be written", "could not be written", "Not tracked", "a new best checkpoint")
    is_named = "warning" in output and any(text in output for text in texts)
    expect(not differs or is_named, f"the result differs without a warning: {differs}", what, done.err)
    expect_readable(folder.rglob("[!.]*"), what)


def _order(folder: Path, journal: Path, number: int, sticky: bool, errors: dict[str, int]) -> dict[str, str]:
    watched = [folder / "mlruns", folder / "tiny.yaml"]
    return shim.order(watched, journal, fail_at=number, sticky=sticky, errors=errors)


def _start(place: Place, folder: Path, variant: str, *overrides: str, **variables: str) -> Outcome:
    main = {"main": "storm.shim:main"} if variables else {}
    settings = [*COMMON, *VARIANTS[variant][0], *overrides]
    return place.run("train", folder / "tiny.yaml", *settings, cwd=folder, **main, **variables)


def _before(place: Place, folder: Path, variant: str) -> None:
    """Write the config, and make the run that is resumed, if any."""
    place.config(folder=folder)
    if (before := VARIANTS[variant][1]) is not None:
        done = _start(place, folder, variant, *before, "train.export=false", "stages=[train]")
        expect(done.code == 0, "the earlier run does not end with 0", done)


def _reference(place: Place, variant: str) -> Reference:
    """Return the undisturbed run, whose calls are counted."""

    def run(folder: Path) -> list[Outcome]:
        _before(place, folder, variant)
        return [_start(place, folder, variant, **_order(folder, folder / "calls", 0, False, {}))]

    return undisturbed(place, EXPERIMENT, run, f"reference-{variant}")
