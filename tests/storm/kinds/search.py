"""Other commands are killed at a random moment: search, export, cleaning, sync, init, reproduce, caching, a program.

The same command, started again, resumes or starts over, with the result of an undisturbed one; MLflow can open the
store.
"""

import contextlib
import json
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from commands import Outcome
from tiny import csv_rows, digest

from storm.kinds.mutations import draw_pictures, logged, picture_settings
from storm.mutate import damage
from storm.place import Place, expect
from storm.worker import GRACE, living_after

WHAT = (
    "kill -9 of tune, export, runs --clean --delete, runs --sync, init, reproduce, of cache building, "
    "and of a program that trains"
)
HOUR = 300
LIMIT = 300

SEARCH = """\
tune:
  metric: val_acc
  mode: max
  num_trials: 3
  name: torn
  space:
    model.optimizer.params.lr: {log_uniform: [1e-4, 0.1]}
    data.batch_size: {int: [8, 32], step: 8}
"""


def case(draw: random.Random, place: Place) -> str:
    """Kill one command up to three times."""
    (name,) = draw.choices(list(COMMANDS), [weight for weight, _ in COMMANDS.values()])
    return f"{name}: {COMMANDS[name][1](draw, place)}"


def _kill(draw: random.Random, place: Place, longest: float, *arguments: object, **options: Any) -> str:
    """Kill a command up to three times, each within `longest` seconds; return exit codes and times."""
    ends = []
    for _ in range(draw.randint(1, 3)):
        delay = draw.uniform(0, longest)
        running = place.start(*arguments, **options)
        running.ended(delay)
        if running.processes():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                running.signal(signal.SIGKILL)
        ends.append(f"{running.end().code} after {delay:.2f} s")
    return ", ".join(ends)


def _good(outcome: Outcome, what: str) -> Outcome:
    expect(outcome.code == 0, f"{what}; started again it ends with {outcome.code}", outcome)
    return outcome


def _opens(store: Path) -> dict[str, str]:
    """Return the status of each run, read with MLflow's client."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return {run.info.run_id: run.info.status for run in client.search_runs(experiments)}


# ---- commands


def _search(place: Place, folder: Path | None = None) -> Path:
    """Write the config of a search."""
    config = place.config(folder=folder)
    config.write_text(config.read_text() + SEARCH)
    return config


def _tune(draw: random.Random, place: Place) -> str:
    def rows(folder: Path) -> list[dict[str, str]]:
        return [row | {"run": ""} for row in csv_rows(folder / "trials.csv")]

    def make(folder: Path) -> None:
        begun = time.monotonic()
        done = place.run("tune", _search(place, folder), cwd=folder)
        expect(done.code == 0, "the undisturbed search fails", done)
        (folder / "rows.json").write_text(json.dumps(rows(done.folder)))
        (folder / "seconds").write_text(str(time.monotonic() - begun))

    reference = place.once("tune", make)
    config = _search(place)
    what = _kill(draw, place, float((reference / "seconds").read_text()), "tune", config)
    done = _good(place.run("tune", config), what)
    found, expected = rows(done.folder), json.loads((reference / "rows.json").read_text())
    expect(found == expected, f"{what}: the trials differ from those of an undisturbed search", found, expected)
    statuses = _opens(place.folder / "mlruns")
    all_finished = sorted(statuses.values()) == ["FINISHED"] * 4
    expect(all_finished, f"{what}: there are not four FINISHED runs", statuses)
    return what


def _study(draw: random.Random, place: Place) -> str:
    """Damage the database of a search, then start the search again."""
    config = _search(place)
    _good(place.run("tune", config), "undisturbed")
    (database,) = (place.folder / "mlruns").glob("**/study.db")
    intact = database.read_bytes()
    damages = []
    for _ in range(4):
        damages.append(damage(draw, database, []))
        done = place.run("tune", config)
        expect(done.code in (0, 3, 4), f"{damages[-1]}: the search ends with {done.code}", done)
        expect("Traceback" not in done.err, f"{damages[-1]}: a traceback is shown", done)
        expect(done.code == 0 or "study.db" in done.err, f"{damages[-1]}: the file is not named", done)
        database.write_bytes(intact)
    _good(place.run("tune", config), "restored")
    place.count = len(damages)
    return "; ".join(damages)


def _export(draw: random.Random, place: Place) -> str:
    from serve.bundle import Bundle, BundleError

    config = place.config()
    run = place.run("train", config, "train.num_epochs=1").folder
    what = _kill(draw, place, 1.5, "export", run)
    if (run / "bundle").exists():
        try:
            Bundle.open(run)
        except BundleError:
            expect(not (run / "bundle" / "bundle.json").exists(), f"{what}: a bundle with its card does not open")
    _good(place.run("export", run), what)
    Bundle.open(run)
    left = [path.name for path in run.iterdir() if path.name.startswith(".") and path.name != ".metrics.sent"]
    expect(not left, f"{what}: a later export does not remove the files of the killed one", left)
    return what


def _clean(draw: random.Random, place: Place) -> str:
    store = place.folder / "mlruns"
    kept = [logged(store, 3, "success") for _ in range(2)]
    gone = [logged(store, 3, draw.choice(["failed", "killed"])) for _ in range(draw.randint(2, 8))]
    asked = ("runs", "--clean", "--delete", "--tracking-uri", store)
    what = _kill(draw, place, 0.4, *asked)
    _good(place.run(*asked), what)
    expect(_opens(store) == dict.fromkeys(kept, "FINISHED"), f"{what}: the wrong runs remain", gone)
    for run_id in kept:
        found = list(store.glob(f"*/{run_id}/artifacts/cfg.yaml"))
        expect(found, f"{what}: a kept run has lost a file")
    return what


def _sync(draw: random.Random, place: Place) -> str:
    store = place.folder / "mlruns"
    points = [draw.randint(1, 300) for _ in range(draw.randint(1, 4))]
    folder = store / "mlflow.db.unsent"
    killed = []
    for count in points:  # hide earlier claims, since each process sends what they name
        killed.append(logged(store, count, "killed"))
        if folder.exists():
            folder.rename(store / f"aside-{len(killed)}")
    folder.mkdir(mode=0o700)
    for path in store.glob("aside-*/*.unsent"):
        path.rename(folder / path.name)
    asked = ("runs", "--sync", "--tracking-uri", store)
    what = _kill(draw, place, 0.4, *asked)
    _good(place.run(*asked), what)
    with closing(sqlite3.connect(store / "mlflow.db")) as database:
        for run_id, count in zip(killed, points, strict=True):
            rows = database.execute("SELECT key, step, value FROM metrics WHERE run_uuid = ?", (run_id,)).fetchall()
            logged_points = [(name, n, value) for n in range(count) for name, value in (("x", float(n)), ("y", n / 3))]
            expect(sorted(rows) == sorted(logged_points), f"{what}: points are missing or duplicate", rows)
    expect(set(_opens(store).values()) == {"FAILED"}, f"{what}: a run that was killed is not FAILED")
    return what


def _init(draw: random.Random, place: Place) -> str:
    kind = draw.choice(["images", "table", "text", "own", "regression"])
    intact, torn = (place.folder / name / "project" for name in ("intact", "torn"))
    intact.parent.mkdir()
    torn.parent.mkdir()
    _good(place.run("init", "project", "--kind", kind, cwd=intact.parent), "undisturbed")
    what = f"{kind}, {_kill(draw, place, 0.3, 'init', 'project', '--kind', kind, cwd=torn.parent)}"

    def files(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    expected = files(intact)
    half = {name for name, text in files(torn).items() if expected.get(name) != text}
    expect(not {name for name in half if not Path(name).name.startswith(".")}, f"{what}: a partial file remains", half)
    again = place.run("init", "project", "--kind", kind, cwd=torn.parent)
    is_refused = again.code == 3 and "already exists and is not overwritten; remove it" in again.err
    expect(again.code == 0 or is_refused, f"{what}: started again it ends with {again.code}", again)
    shutil.rmtree(torn)
    _good(place.run("init", "project", "--kind", kind, cwd=torn.parent), what)
    expect(files(torn) == expected, f"{what}: the project differs", files(torn).keys() ^ expected.keys())
    return what


def _cache(draw: random.Random, place: Place) -> str:
    draw_pictures(place.folder / "pictures", 90)
    config = place.config()
    settings = picture_settings(place.folder / "pictures", "crop")
    plain = _good(place.run("train", config, *settings), "without a cache")
    cached = {"DEEPLIGHTNING_CACHE": str(place.folder / "cache")}
    what = _kill(draw, place, 0.8, "train", config, *settings, **cached)
    done = _good(place.run("train", config, *settings, **cached), what)
    same = digest(done.folder / "last.ckpt") == digest(plain.folder / "last.ckpt")
    expect(same, f"{what}: training from the cache gives other weights")
    return what


def _reproduce(draw: random.Random, place: Place) -> str:
    config = place.config()
    run = place.run("train", config, "train.num_epochs=1").folder
    what = _kill(draw, place, 8, "reproduce", run)
    _good(place.run("reproduce", run), what)
    return what


def train_from_python() -> None:
    """Train from a Python program, instead of `deeplightning.cli:main`."""
    import deeplightning

    deeplightning.train(sys.argv[2], sys.argv[3:])


def _program(draw: random.Random, place: Place) -> str:
    """A training, which would run for long in a separate process, ends when the program that called it is killed."""
    config, store = place.config(), place.folder / "mlruns"
    running = place.start(
        *("train", config, "train.num_epochs=100000"), main="storm.kinds.search:train_from_python", cwd=place.folder
    )
    delay = draw.uniform(1, 10)
    running.ended(delay)
    expect(running.processes(), "the program ended before it was killed")
    running.signal(signal.SIGKILL)
    running.end()
    left = living_after(GRACE)
    expect(not left, f"killed after {delay:.1f} s; processes are left: {left}")
    if list(store.glob("*/*/artifacts")):
        _good(place.run("runs", "--tracking-uri", store), "listed")
        expect(set(_opens(store).values()) <= {"FAILED", "KILLED"}, "a run is not FAILED", _opens(store))
        _good(place.run("train", config, "train.num_epochs=1", "train.resume_ckpt=auto"), "resumed")
    return f"killed after {delay:.1f} s"


COMMANDS: dict[str, tuple[int, Callable[[random.Random, Place], str]]] = {
    "tune": (1, _tune),
    "study": (1, _study),
    "export": (4, _export),
    "clean": (5, _clean),
    "sync": (5, _sync),
    "init": (4, _init),
    "cache": (5, _cache),
    "reproduce": (1, _reproduce),
    "program": (3, _program),
}
