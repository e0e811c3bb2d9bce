"""Files of a run are damaged: flipped bits, truncation, swapped and foreign parts; each damage is detected or harmless.

Each target has an intact original and a way to read it as the commands do. The result is an error with its exit code
(4; 3 for a store), or exactly that of the original.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from killing import SETTINGS

from storm.mutate import damage
from storm.place import Place, expect

Target = Callable[[random.Random, Path, Path], bool]
"""Damages a copy of a file in the folder of the originals, reads it, and returns whether the damage was found."""

WHAT = "flipped bits, cut ends, swapped parts in checkpoint, pieces, bundle, code, metrics, cache, store"
HOUR = 10_000
LIMIT = 300
TIMES = 25
"""Damages per case, each to a fresh copy."""


def case(draw: random.Random, place: Place) -> str:
    """Damage one target several times."""
    originals = place.once("originals", lambda folder: _make(place, folder))
    (name,) = draw.choices(list(TARGETS), [weight for weight, _ in TARGETS.values()])
    _, target = TARGETS[name]
    place.count, caught = 0, 0
    for number in range(TIMES if name not in SLOW else 5):
        copy = place.folder / f"copy-{number}"
        caught += target(draw, originals, copy)
        shutil.rmtree(copy, ignore_errors=True)
        place.count += 1
    return f"{name}: {caught} of {place.count} detected, the others harmless"


def _damaged(draw: random.Random, source: Path, copy: Path, pattern: str = "") -> str:
    """Copy a folder, damage one of the files whose name matches, perhaps with parts of others; return a description."""
    shutil.copytree(source, copy)
    files = [path for path in sorted(copy.rglob("*")) if path.is_file() and re.search(pattern, path.name)]
    path = draw.choice([path for path in files if path.stat().st_size])
    return damage(draw, path, [other for other in files if other != path])


def _code_of(error: Exception, what: str, *codes: int) -> int:
    """Return the exit code of an error; raise `Broken` unless it is one of `codes`."""
    code = getattr(error, "exit_code", 0)
    expect(code in codes, f"{what}: {type(error).__name__} (exit code {code}): {error!s:.500}")
    return code


# ---- targets


def _refused_or_equal(name: str, read: Callable[[Path], Any]) -> Target:
    """Return a target for a folder that, once damaged, is rejected with exit code 4 or read like the original."""

    def target(draw: random.Random, originals: Path, copy: Path) -> bool:
        expected, what = read(originals / name), _damaged(draw, originals / name, copy)
        try:
            found = read(copy)
        except Exception as error:
            return bool(_code_of(error, what, 4))
        expect(found == expected, f"{what}: other content is read", f"{found!s:.500}", f"{expected!s:.500}")
        return False

    return target


def _checkpoints(folder: Path) -> Any:
    from deeplightning.engine.checkpoint_reading import read_checkpoint

    return [_plain(read_checkpoint(path)) for path in sorted(folder.glob("*.ckpt"))]


def _bundle(folder: Path) -> Any:
    from serve.bundle import Bundle

    opened = Bundle.open(folder)
    name = opened.session.get_inputs()[0].name
    return opened.labels, opened.session.run(None, {name: opened.samples})[0].tobytes()


def _code(folder: Path) -> Any:
    from deeplightning.tracking.code import read_code

    return read_code(folder / "code.zip")


def _metrics(draw: random.Random, originals: Path, copy: Path) -> bool:
    """A damaged line loses no other line. Lines have no checksums, so a number may change."""
    from deeplightning.tracking.metrics_file import read_points
    from deeplightning.tracking.store import locate
    from deeplightning.tracking.unsent import SILENT_SECONDS, send_leftovers

    shutil.copytree(originals / "killed", copy)
    (path,) = copy.glob("*/*/artifacts/metrics.jsonl")
    (claim,) = copy.glob("mlflow.db.unsent/*.unsent")
    claim.write_text(json.dumps(json.loads(claim.read_text()) | {"metrics": str(path)}))
    original = path.read_bytes().split(b"\n")
    what = damage(draw, path, [])
    intact = path.with_name("intact.jsonl")
    intact.write_bytes(b"\n".join([line for line in path.read_bytes().split(b"\n")[:-1] if line in original] + [b""]))
    expected = {(point.name, point.step, point.value) for point in read_points(intact)}
    try:
        sent = list(send_leftovers(locate(copy), silent=SILENT_SECONDS))
    except Exception as error:
        return bool(_code_of(error, what, 3))
    points = []
    if (copy / "mlflow.db").stat().st_size:
        with closing(sqlite3.connect(copy / "mlflow.db")) as database:
            points = database.execute("SELECT key, step, value FROM metrics").fetchall()
    expect(len(points) == len(set(points)), f"{what}: duplicate points", sent)
    is_refused = "refused" in str(sent)
    expect(is_refused or expected <= set(points), f"{what}: points are lost", sorted(expected - set(points)), sent)
    return is_refused or " damaged line" in str(sent)


def _cache(draw: random.Random, originals: Path, copy: Path) -> bool:
    """The pictures always equal the decoded ones."""
    what = _damaged(draw, originals / "cache", copy, "^(pixels|index)$")
    expected = json.loads((originals / "pictures.json").read_text())
    expect(_pictures(originals / "pictures", copy) == expected, f"{what}: the cache returns other pictures")
    return False


def _store(draw: random.Random, originals: Path, copy: Path) -> bool:
    """SQLite has no checksums: the promise is an error with exit code 3, or a listing."""
    from deeplightning.cli.listing import listing

    what = _damaged(draw, originals / "store", copy)
    try:
        listing(str(copy))
    except Exception as error:
        return bool(_code_of(error, what, 3))
    return False


TARGETS: dict[str, tuple[int, Target]] = {
    "checkpoint": (4, _refused_or_equal("one", _checkpoints)),
    "pieces": (3, _refused_or_equal("two", _checkpoints)),
    "bundle": (2, _refused_or_equal("bundle", _bundle)),
    "code": (2, _refused_or_equal("code", _code)),
    "metrics": (4, _metrics),
    "cache": (4, _cache),
    "store": (2, _store),
}
"""Weight and target."""

SLOW = ("bundle",)


def _plain(value: Any) -> Any:
    """Replace tensors, which `==` does not compare, by dtype, shape and digest."""
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
    """Make a finished run with its bundle, a sharded checkpoint, the store of a killed process, and a cache."""
    config = place.config(folder=folder)
    (folder / "kills.py").write_text("import pytorch_lightning as pl\n\n\nclass Events(pl.Callback):\n    pass\n")
    usual = [*SETTINGS, "data.num_workers=0", "train.num_epochs=2", "train.export=true"]
    done = place.run("train", config, *usual, cwd=folder)
    expect(done.code == 0, "the original run fails", done)
    shutil.copytree(done.folder / "bundle", folder / "bundle")
    for name, files in {"one": ["last.ckpt", "best.ckpt"], "code": ["code.zip"]}.items():
        (folder / name).mkdir()
        for file in files:
            shutil.copy(done.folder / file, folder / name)
    engine = ["engine.processes=2", "engine.backend=fsdp", "data.batch_size=8", "train.num_epochs=1"]
    shared = place.run("train", config, *engine, cwd=folder, ranks=2)
    expect(shared.code == 0, "the original run of two processes fails", shared)
    (folder / "two").mkdir()
    shutil.copy(shared.folder / "last.ckpt", folder / "two")
    shutil.copytree(shared.folder / "last.pieces", folder / "two" / "last.pieces")
    (folder / "store").mkdir()
    shutil.copy(folder / "mlruns" / "mlflow.db", folder / "store")
    logged(folder / "killed", 40, "killed")
    claims = list((folder / "killed").glob("mlflow.db.unsent/*.unsent"))
    expect(len(claims) == 1, "the process that was killed left no claim")
    draw_pictures(folder / "pictures")
    (folder / "pictures.json").write_text(json.dumps(_pictures(folder / "pictures", folder / "cache")))
    expect((folder / "cache").is_dir(), "there is no cache")


def logged(store: Path, points: int, how: str) -> str:
    """Log a run in a forked process, which ends with SIGKILL or sets the status `how`; return the run's id."""
    from deeplightning.tracking import MLflowLogger

    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        logger = MLflowLogger(tracking_uri=store, system_metrics=False)
        logger.log_hyperparams({"lr": 0.1})
        os.write(writing, str(logger.run_id).encode())
        for step in range(points):
            logger.log_metrics({"x": float(step), "y": step / 3}, step)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        assert logger.artifact_folder is not None
        (logger.artifact_folder / "cfg.yaml").write_text("seed: 1\n")
        logger.finalize(how)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        run_id = pipe.read()
    os.waitpid(child, 0)
    return run_id


def draw_pictures(root: Path, count: int = 36) -> None:
    """Write pictures of noise in three classes, with old modification times."""
    import numpy as np
    from PIL import Image

    for number in range(count):
        path = root / "abc"[number % 3] / f"{number:03}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.RandomState(number).randint(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        os.utime(path, (1_700_000_000, 1_700_000_000))


def picture_settings(root: Path, resize: str) -> list[str]:
    """Return overrides for a training of one epoch on pictures of `draw_pictures`."""
    params = f"{{image_size: 8, resize: {resize}}}"
    return [
        f"data={{module: {{type: deeplightning.data.image_folder.ImageFolder, params: {params}}}, "
        f"root: '{root}', batch_size: 8}}",
        "model.network.params={num_classes: 3, num_channels: 3, image_size: 8}",
        "train.num_epochs=1",
    ]


def _pictures(root: Path, cache: Path) -> list[str]:
    """Return the digests of the pictures that the data module loads with this cache."""
    from deeplightning.data.cache import decoded
    from deeplightning.image_spec import ImageSpec

    paths = [str(path) for path in sorted(root.rglob("*.bmp"))]
    spec = ImageSpec(height=8, width=8)
    found = decoded(cache, spec, 10**8, paths)
    if found is None:  # decoded without the cache
        images = [spec.decode(Path(path).read_bytes(), 10**8).transpose(2, 0, 1) for path in paths]
        return [hashlib.sha256(one.tobytes()).hexdigest() for one in images]
    pixels, rows = found
    return [hashlib.sha256(pixels[row].tobytes()).hexdigest() for row in rows]
