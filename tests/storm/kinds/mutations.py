"""Files of a run are damaged: flipped bits, cut ends, swapped and foreign parts; each is caught, or without effect.

Each target has a whole original, a way to read it as the commands do, and what it may answer: a note with its exit code
(4; 3 for a store), or exactly what the original answers.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from killing import SETTINGS

from storm.mutate import damage
from storm.place import Broken, Place, expect

WHAT = "flipped bits, cut ends, swapped parts in checkpoint, pieces, bundle, code, metrics, cache, store"
HOUR = 10_000
LIMIT = 300
TIMES = 25
"""Damages of a case, each to a fresh copy."""


def case(draw: random.Random, place: Place) -> str:
    """One target, damaged a few times."""
    whole = place.once("whole", lambda folder: _make(place, folder))
    (name,) = draw.choices(list(TARGETS), [weight for weight, _ in TARGETS.values()])
    _, target = TARGETS[name]
    place.count, caught = 0, 0
    for number in range(TIMES if name not in SLOW else 5):
        copy = place.folder / f"copy-{number}"
        caught += target(draw, whole, copy)
        shutil.rmtree(copy, ignore_errors=True)
        place.count += 1
    return f"{name}: {caught} of {place.count} caught, the others without effect"


def _read(what: str, read: Callable[[], Any], codes: tuple[int, ...], expected: Any) -> bool:
    """Reads what is damaged; whether that was caught.

    Raises:
        Broken: it answers otherwise than the original, or fails with another error.
    """
    try:
        found = read()
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code not in codes:
            raise Broken(f"{what}: {type(error).__name__} (exit code {code}): {error!s:.500}") from error
        return True
    expect(found == expected, f"{what}: it is believed, and answers otherwise", f"{found!s:.500}", f"{expected!s:.500}")
    return False


# ---- targets


def _checkpoint(draw: random.Random, whole: Path, copy: Path) -> bool:
    from deeplightning.engine.checkpoint_io import read_checkpoint

    copy.mkdir()
    source, other = whole / "one" / "last.ckpt", whole / "one" / "best.ckpt"
    path = Path(shutil.copy(source, copy / "last.ckpt"))
    what = damage(draw, path, [other])
    return _read(what, lambda: _plain(read_checkpoint(path)), (4,), _plain(read_checkpoint(source)))


def _pieces(draw: random.Random, whole: Path, copy: Path) -> bool:
    from deeplightning.engine.checkpoint_io import read_checkpoint

    source = whole / "two"
    shutil.copytree(source, copy)
    files = [path for path in sorted(copy.rglob("*")) if path.is_file()]
    path = draw.choice(files)
    what = damage(draw, path, [other for other in files if other != path])
    return _read(
        what, lambda: _plain(read_checkpoint(copy / "last.ckpt")), (4,), _plain(read_checkpoint(source / "last.ckpt"))
    )


def _bundle(draw: random.Random, whole: Path, copy: Path) -> bool:
    from serve.bundle import Bundle

    def answers(folder: Path) -> Any:
        opened = Bundle.open(folder)
        name = opened.session.get_inputs()[0].name
        return opened.labels, opened.session.run(None, {name: opened.samples})[0].tobytes()

    source = whole / "one" / "bundle"
    shutil.copytree(source, copy)
    files = [path for path in sorted(copy.rglob("*")) if path.is_file()]
    path = draw.choice(files)
    what = damage(draw, path, [other for other in files if other != path])
    return _read(what, lambda: answers(copy), (4,), answers(source))


def _code(draw: random.Random, whole: Path, copy: Path) -> bool:
    from deeplightning.tracking.code import read_code

    copy.mkdir()
    source = whole / "one" / "code.zip"
    path = Path(shutil.copy(source, copy / "code.zip"))
    what = damage(draw, path, [])
    return _read(what, lambda: read_code(path), (4,), read_code(source))


def _metrics(draw: random.Random, whole: Path, copy: Path) -> bool:
    """A line that is damaged costs no other line. The lines have no check sums: a number may be another one."""
    from deeplightning.cli.listing import sync
    from deeplightning.tracking.metrics_file import read_points

    shutil.copytree(whole / "killed", copy)
    (path,) = copy.glob("*/*/artifacts/metrics.jsonl")
    (claim,) = copy.glob("mlflow.db.unsent/*.unsent")
    claim.write_text(json.dumps(json.loads(claim.read_text()) | {"metrics": str(path)}))
    original = path.read_bytes().split(b"\n")
    what = damage(draw, path, [])
    intact = path.with_name("intact.jsonl")
    intact.write_bytes(b"\n".join([line for line in path.read_bytes().split(b"\n")[:-1] if line in original] + [b""]))
    expected = {(point.name, point.step, point.value) for point in read_points(intact)}
    try:
        told = list(sync(copy))
    except Exception as error:
        expect(getattr(error, "exit_code", None) == 3, f"{what}: {type(error).__name__}: {error}")
        return True
    points = []
    if (copy / "mlflow.db").stat().st_size:
        with closing(sqlite3.connect(copy / "mlflow.db")) as database:
            points = database.execute("SELECT key, step, value FROM metrics").fetchall()
    expect(len(points) == len(set(points)), f"{what}: a point twice", told)
    is_refused = "refused" in str(told)
    expect(is_refused or expected <= set(points), f"{what}: points are lost", sorted(expected - set(points)), told)
    return is_refused or " damaged line" in str(told)


def _cache(draw: random.Random, whole: Path, copy: Path) -> bool:
    """The pictures are always those that decoding gives."""
    source = whole / "cache"
    shutil.copytree(source, copy)
    files = [path for path in sorted(copy.rglob("*")) if path.name in ("pixels", "index")]
    path = draw.choice([path for path in files if path.stat().st_size])
    what = damage(draw, path, [other for other in files if other != path])
    expected = json.loads((whole / "pictures.json").read_text())
    _read(what, lambda: _pictures(whole / "pictures", copy), (), expected)
    return False


def _store(draw: random.Random, whole: Path, copy: Path) -> bool:
    """SQLite has no check sums: what is promised is a note with exit code 3, or a listing; nothing worse."""
    from deeplightning.cli.listing import listing

    copy.mkdir()
    path = Path(shutil.copy(whole / "mlruns" / "mlflow.db", copy / "mlflow.db"))
    what = damage(draw, path, [])
    try:
        listing(str(copy))
    except Exception as error:
        code = getattr(error, "exit_code", None)
        expect(code == 3, f"{what}: {type(error).__name__} (exit code {code}): {error!s:.500}")
        return True
    return False


TARGETS: dict[str, tuple[int, Callable[[random.Random, Path, Path], bool]]] = {
    "checkpoint": (4, _checkpoint),
    "pieces": (3, _pieces),
    "bundle": (2, _bundle),
    "code": (2, _code),
    "metrics": (4, _metrics),
    "cache": (4, _cache),
    "store": (2, _store),
}
SLOW = ("bundle",)


def _plain(value: Any) -> Any:
    """The same without tensors, which `==` does not compare."""
    import torch

    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return repr(value)


# ---- the originals


def _make(place: Place, folder: Path) -> None:
    """A finished run with its bundle, a checkpoint in pieces, the store of a killed process, and a cache."""
    config = place.config(folder=folder)
    (folder / "kills.py").write_text("import pytorch_lightning as pl\n\n\nclass Events(pl.Callback):\n    pass\n")
    usual = [*SETTINGS, "data.num_workers=0", "train.num_epochs=2", "train.export=true"]
    done = place.run("train", config, *usual, cwd=folder)
    expect(done.code == 0, "the original run fails", done)
    (folder / "one").symlink_to(done.folder)
    engine = ["engine.processes=2", "engine.backend=fsdp", "data.batch_size=8", "train.num_epochs=1"]
    shared = place.run("train", config, *engine, cwd=folder, ranks=2)
    expect(shared.code == 0, "the original run of two processes fails", shared)
    (folder / "two").mkdir()
    shutil.copy(shared.folder / "last.ckpt", folder / "two")
    shutil.copytree(shared.folder / "last.pieces", folder / "two" / "last.pieces")
    _make_killed(folder / "killed")
    draw_pictures(folder / "pictures")
    (folder / "pictures.json").write_text(json.dumps(_pictures(folder / "pictures", folder / "cache")))
    expect((folder / "cache").is_dir(), "there is no cache")


def _make_killed(store: Path) -> None:
    from deeplightning.tracking import MLflowLogger

    if (child := os.fork()) == 0:
        logger = MLflowLogger(tracking_uri=store, system_metrics=False)
        logger.log_hyperparams({"lr": 0.1})
        for step in range(40):
            logger.log_metrics({"x": float(step), "y": step / 3}, step)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    expect(len(list(store.glob("mlflow.db.unsent/*.unsent"))) == 1, "the process that was killed left no claim")


def draw_pictures(root: Path, count: int = 36) -> None:
    """Pictures of noise in three classes, which count as old."""
    import numpy as np
    from PIL import Image

    for number in range(count):
        path = root / "abc"[number % 3] / f"{number:03}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.RandomState(number).randint(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        os.utime(path, (1_700_000_000, 1_700_000_000))


def _pictures(root: Path, cache: Path) -> list[str]:
    """The digests of the pictures, as the data module gives them with this cache."""
    from deeplightning.data.cache import ImageCache
    from deeplightning.image_spec import ImageSpec

    paths = [str(path) for path in sorted(root.rglob("*.bmp"))]
    spec = ImageSpec(height=8, width=8)
    found = ImageCache(cache, str(root), spec, 10**8, len(paths)).rows_of(paths)
    if found is None:  # decoded without the cache
        decoded = [spec.decode(Path(path).read_bytes(), 10**8).transpose(2, 0, 1) for path in paths]
        return [hashlib.sha256(one.tobytes()).hexdigest() for one in decoded]
    pixels, rows = found
    return [hashlib.sha256(pixels[row].tobytes()).hexdigest() for row in rows]
