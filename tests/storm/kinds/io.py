"""Each call of a run on its files fails once: the run ends with a note, or continues and reports what it did not write.

The run's calls on its store, its folder and its config are counted once; then a case has one of them fail, with an
error that such a call can have. What remains is looked at, and the same command without a fault has to bring the run to
the end that nothing disturbed.
"""

import errno
import json
import random
import zipfile
from pathlib import Path
from typing import Any

from commands import Outcome

from storm import shim
from storm.ended import End, end_of, folder_of, names_of, statuses
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
"""What a run has beside `COMMON`, and what the run before had that it resumes."""

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
"""That each kind of call can have."""


def environment() -> dict[str, str]:
    return shim.environment()


def case(draw: random.Random, place: Place) -> str:
    """One call fails, or all that change something from it on."""
    whole = {name: json.loads((_whole(place, name) / "whole.json").read_text()) for name in VARIANTS}
    calls = [(name, number) for name, known in whole.items() for number in range(1, known["calls"] + 1)]
    random.Random(1).shuffle(calls)
    variant, number = calls[place.number % len(calls)]
    errors = {kind: draw.choice(allowed) for kind, allowed in ERRORS.items()}
    if sticky := draw.random() < 0.15:  # every program tries an interrupted call again, without end
        errors = {kind: errno.EIO if error == errno.EINTR else error for kind, error in errors.items()}
    _before(place, place.folder, variant)
    journal = place.folder / "calls"
    done = _start(place, place.folder, variant, **_order(place.folder, journal, number, sticky, errors))
    tried = shim.read(journal)
    failed = next((call for call in tried if call.number == number), None)
    what = f"{variant}: {failed or f'call {number}, which did not come'}{', and each later change' * sticky}"
    if failed is not None and not failed.error:
        what += f", short by half of {failed.kind}"
    _judge(place, variant, done, what, whole[variant])
    return f"{what}; exit code {done.code}"


def _names_a_path(note: str, folder: Path) -> bool:
    """Whether it names a file below a folder in which the command runs: in full, or the config by its name."""
    return str(folder) in note or "error: tiny.yaml: " in note


def _judge(place: Place, variant: str, done: Outcome, what: str, whole: dict[str, Any]) -> None:
    store = place.folder / "mlruns"
    expect("Traceback" not in done.err, "a failing call shows a traceback", what, done.err)
    expect(done.code in (0, 3, 4), "a failing call does not end the run with exit code 0, 3 or 4", what, done.err)
    if done.code:
        expect(
            sum(line.startswith("error: ") for line in done.err.splitlines()) == 1,
            "there is not one note",
            what,
            done.err,
        )
        note = done.err[done.err.index("error: ") :]
        expect(_names_a_path(note, place.folder), "the note does not have the path", what, done.err)
    for path in store.glob("*/*/artifacts/*.ckpt"):
        with zipfile.ZipFile(path) as archive:
            expect(archive.testzip() is None, "a checkpoint is torn", path, what, done.err)
    if variant != "new":
        expect(list(store.glob("*/*/artifacts/last.ckpt")), "the checkpoint that was there is gone", what, done.err)
    listed = place.run("runs", "--tracking-uri", store)  # this writes what is left in journals
    lists = listed.code == 0 or not (store / "mlflow.db").exists()  # the call came before the store was made
    expect(lists and "Traceback" not in listed.err, "`runs` fails afterwards", what, done.err, listed.err)
    after = statuses(store, EXPERIMENT)
    wanted = "FAILED" if done.code else "FINISHED"
    if done.code == 0:
        expect(
            list(after.values()) == [wanted], f"the runs are {after} instead of {wanted}", what, done.err, listed.err
        )
    else:
        open_ = [run for run, status in after.items() if status not in ("FAILED", "FINISHED")]
        expect(not open_, f"the runs are {after}", what, done.err, listed.err)
        again = _start(place, place.folder, variant)
        expect(again.code == 0, "the same command, without a fault, does not end with 0", what, done.err, again.err)
        after = statuses(store, EXPERIMENT)
        finished = [run for run, status in after.items() if status == "FINISHED"]
        expect(len(finished) == 1, f"the runs are {after} at the end", what, done.err, again.err)
        done = Outcome(0, done.out + again.out, done.err + again.err)
    run = next(run for run, status in after.items() if status == "FINISHED")
    folder, told = folder_of(store, run), done.err + done.out
    there = names_of(folder)
    gone = [name for name in whole["names"] if name not in there and name not in told]
    if "the run chooses a new best checkpoint" in told:
        gone = [name for name in gone if not name.endswith(".ckpt")]
    if "code.zip is not written" in told:
        gone = [name for name in gone if not name.startswith("code.")]
    expect(not gone, f"files are missing without a word: {gone}", what, done.err)
    differs = end_of(store, EXPERIMENT, run).differs(End(**whole["end"]))
    words = ("not written", "cannot be written", "could not be written", "Not tracked", "a new best checkpoint")
    named = "warning" in told and any(each in told for each in words)
    expect(not differs or named, f"it ends otherwise, without a word: {differs}", what, done.err)
    _readable(folder, what)


def _readable(folder: Path, what: str) -> None:
    """Each file in a run's folder is whole."""
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".ipynb"):
            try:
                json.loads(path.read_text())
            except ValueError as error:
                expect(False, f"{path} is torn: {error}", what)
        if path.suffix in (".zip", ".ckpt"):
            with zipfile.ZipFile(path) as archive:
                expect(archive.testzip() is None, f"{path} is torn", what)


def _order(folder: Path, journal: Path, number: int, sticky: bool, errors: dict[str, int]) -> dict[str, str]:
    watched = [folder / "mlruns", folder / "tiny.yaml"]
    return shim.order(watched, journal, fail_at=number, sticky=sticky, errors=errors)


def _start(place: Place, folder: Path, variant: str, *overrides: str, **variables: str) -> Outcome:
    main = {"main": "storm.shim:main"} if variables else {}
    settings = [*COMMON, *VARIANTS[variant][0], *overrides]
    return place.run("train", folder / "tiny.yaml", *settings, cwd=folder, **main, **variables)


def _before(place: Place, folder: Path, variant: str) -> None:
    """The config, and the run that is resumed."""
    place.config(folder=folder)
    if (before := VARIANTS[variant][1]) is not None:
        done = _start(place, folder, variant, *before, "train.export=false", "stages=[train]")
        expect(done.code == 0, "the run before does not end with 0", done)


def _whole(place: Place, variant: str) -> Path:
    """The run whose calls are counted, and its end."""

    def make(folder: Path) -> None:
        _before(place, folder, variant)
        done = _start(place, folder, variant, **_order(folder, folder / "calls", 0, False, {}))
        expect(done.code == 0, f"the run that nothing disturbs ({variant}) does not end with 0", done)
        (run,) = statuses(folder / "mlruns", EXPERIMENT)
        calls = shim.read(folder / "calls")
        store = folder / "mlruns"
        told: dict[str, Any] = {"calls": calls[-1].number, "names": names_of(folder_of(store, run))}
        told["end"] = end_of(store, EXPERIMENT).plain()
        (folder / "whole.json").write_text(json.dumps(told | {"counts": shim.counts(calls)}))

    return place.once(f"whole-{variant}", make)
