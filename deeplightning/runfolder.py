"""Name the files of a run, and write and lock them. Standard library only; no other module names these files."""

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, TypedDict

BUNDLE_FORMAT = 2
"""Version of the layout of a bundle, see `deeplightning.export.bundle`. A reader refuses any other."""


class Card(TypedDict):
    """Content of `bundle.json`, which `deeplightning.export.bundle.export` documents.

    The file may come from somebody else, so the server checks each value before it uses it.
    """

    format: int  # BUNDLE_FORMAT
    task: str  # a name of `deeplightning.kinds.KINDS`
    input: dict[str, Any]  # the `to_dict()` of the spec
    labels: list[str]
    output: NotRequired[dict[str, Any]]  # a task's `answer_details()`
    files: dict[str, str]  # name → SHA-256
    run: dict[str, Any]
    golden: dict[str, Any]  # samples and answers by name; `digest`: `golden_digest`
    int8: NotRequired[dict[str, float]]  # figures of the quantized model
    digest: str  # `card_digest`


RUNS_FILE = "runs.csv"
"""Table with a row for each run, which `train --seeds` and `train --multirun` write to their folder."""

_start_directory: str | None = None  # the working directory when the command started


@contextlib.contextmanager
def remember_start_folder() -> Iterator[None]:
    """Remember the working directory: relative paths of a command refer to it even if user code changes it."""
    global _start_directory
    before = _start_directory
    try:
        with contextlib.suppress(OSError):  # the folder was removed
            _start_directory = _start_directory or os.getcwd()  # noqa: PTH109
        yield
    finally:
        _start_directory = before


def start_folder() -> Path:
    """Return the folder that relative paths refer to: the working directory when the command started."""
    return Path(_start_directory or os.getcwd())  # noqa: PTH109


def from_start(path: str | os.PathLike) -> Path:
    """Make a path absolute relative to `start_folder`, with `~` expanded."""
    path = Path(path).expanduser()
    return path if path.is_absolute() else start_folder() / path


class RunFolder:
    """Paths of the files in the folder of one run (`path` is made absolute).

    It creates nothing: code that writes a file creates its folder.
    """

    def __init__(self, path: str | Path):
        self.path = from_start(path)
        self.config = self.path / "cfg.yaml"
        self.environment = self.path / "environment.json"
        self.code = self.path / "code.zip"  # the user's own code when the run started
        self.data = self.path / "data.json"  # name, size and SHA-256 of the files that were read
        self.metrics = self.path / "metrics.jsonl"  # all points, see `deeplightning.tracking.metrics_file`
        self.last = self.path / "last.ckpt"
        self.best = self.path / "best.ckpt"
        self.best_score = self.path / "best.json"
        self.samples = self.path / "samples.npz"
        self.bundle = self.path / "bundle"
        self.bundle_card = self.bundle / "bundle.json"
        self.bundle_model = self.bundle / "model.onnx"
        self.bundle_int8 = self.bundle / "model.int8.onnx"
        self.bundle_fp16 = self.bundle / "model.fp16.onnx"
        self.bundle_weights = self.bundle / "weights.safetensors"
        self.model = self.path / "model"  # an MLflow model of the bundle
        self.predictions = self.path / "predictions.csv"
        self.places = self.path / "places.json"  # dotted key → the place in the config files that set it
        self.report = self.path / "report.html"
        self.flops = self.path / "flops.txt"

    def checkpoint(self, epoch: int, step: int) -> Path:
        """Return the path of a checkpoint that is kept besides `last` and `best`."""
        return self.path / f"epoch={epoch}-step={step}.ckpt"

    def checkpoints(self) -> list[Path]:
        """Return the existing checkpoints in the order in which a run tries to resume from them.

        First comes the last one, then the others by step, the latest first; `best.ckpt` without `best.json` comes at
        the end.
        """
        kept = {path: int(found[1]) for path in self.path.glob("*.ckpt") if (found := _KEPT_NAME.fullmatch(path.name))}
        if self.best.is_file():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                kept[self.best] = -1
                kept[self.best] = int(json.loads(self.best_score.read_text())["step"])
        last = [self.last] if self.last.is_file() else []
        return last + sorted(kept, key=kept.__getitem__, reverse=True)

    def former(self, path: Path) -> Path:
        """Return the path under which a file of the run is kept when another replaces it.

        `cfg.yaml` becomes `cfg.1.yaml`, then `cfg.2.yaml`.
        """
        taken = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
        return next(candidate for candidate in taken if not candidate.exists())

    def replace(self, path: Path, text: str) -> None:
        """Write a file of the run, and keep an existing one under another name."""
        if path.exists():
            write_whole(self.former(path), path.read_bytes())
        write_whole(path, text)

    def unfinished(self) -> list[Path]:
        """Return partial files of processes that were killed while writing. Call it only while no process writes."""
        return [path for path in self.path.glob(".*") if _PARTIAL_NAME.fullmatch(path.name)]

    def lock(self) -> "FolderLock | None":
        """Lock the folder, which must exist, for this process, or return None if a running process has the lock.

        The lock lasts until it is released or the process ends, however it ends.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except (ImportError, OSError):  # Windows, or a file system without locks
            pass
        return FolderLock(descriptor)

    def log(self, rank: int) -> Path:
        """Return the path of the output of one process."""
        return self.path / "logs" / f"rank_{rank}.log"

    def results(self, stage: str) -> Path:
        """Return the path of the metrics of `validate` (`val_results.json`) or `test` (`test_results.json`)."""
        return self.path / f"{_stage_prefix(stage)}_results.json"

    def stage_predictions(self, stage: str) -> Path:
        """Return the path of the predictions of the validation or test set, one row per sample in data order."""
        return self.path / f"{_stage_prefix(stage)}_predictions.csv"

    def mistakes(self, stage: str) -> Path:
        """Return the path of the worst answers of the validation or test set, each with its sample."""
        return self.path / f"{_stage_prefix(stage)}_mistakes.json"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


def make_private(folder: Path, store: Path) -> None:
    """Create a folder below a store and, if missing, the store itself, which only its owner can enter."""
    if not store.exists():
        store.parent.mkdir(parents=True, exist_ok=True)
        store.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file, or return {} if that fails."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_int=lambda n: int(n) if len(n) < 300 else float(n))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, as `whole` does."""
    with whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that appears completely or not at all, even if the process is killed or the machine
    fails.

    It is written to a temporary file beside its path, synced, then renamed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_names(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write names no file
        raise


_synced: set[Path] = set()


def sync_names(folder: Path) -> None:
    """Sync the names in a folder to the disk, and at the first call also the folders above it.

    A rename is atomic, but it survives a loss of power only once its folder has been synced (fsync(2)). Where folders
    cannot be synced, as on Windows, this does nothing.
    """
    folders = [folder] if folder in _synced else [folder, *folder.absolute().parents]
    _synced.add(folder)
    for each in folders:
        with contextlib.suppress(OSError):  # a folder above is not readable, or the file system does not sync folders
            descriptor = os.open(each, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def card_digest(card: Mapping[str, object]) -> str:
    """Return the digest of a bundle's card, which reveals an edit: SHA-256 of its content without `digest`.

    Raises:
        ValueError: it contains a number that is not finite, which JSON does not allow.
    """
    content = {key: value for key, value in card.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def golden_digest(card: Card) -> str:
    """Return the digest of a bundle's golden answers and of everything that they depend on: SHA-256 of the card without
    its digests.

    It reveals an edit of labels, task, input or files even if `digest` was recomputed. Models of another precision are
    not included, because they may be added to the bundle later.
    """
    golden = {key: value for key, value in card["golden"].items() if key != "digest"}
    names = RunFolder(".")
    later = {names.bundle_int8.name, names.bundle_fp16.name}
    files = {name: digest for name, digest in card["files"].items() if name not in later}
    return card_digest({**card, "golden": golden, "files": files})


class FolderLock:
    """Lock on a folder or a file. Forked processes such as loader workers close their copy, or it would outlive us."""

    def __init__(self, descriptor: int):
        self._descriptor: int | None = descriptor
        _locks.add(self)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        _locks.discard(self)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # the lock is released even if closing fails
                os.close(descriptor)


_locks: set[FolderLock] = set()
_PARTIAL_NAME = re.compile(r"\..+\.(\d+|partial)")
_KEPT_NAME = re.compile(r"epoch=\d+-step=(\d+)\.ckpt")

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [*map(FolderLock.release, [*_locks])])


def _stage_prefix(stage: str) -> str:
    return "val" if stage == "validate" else stage


def shards_folder(checkpoint: Path) -> Path:
    """Return the folder of the shards of a checkpoint that several processes write."""
    return checkpoint.with_suffix(".pieces")


def shards_of(checkpoint: Path, token: str, rank: int) -> Path:
    """Return the file of one process's shards of a checkpoint; the token identifies one save of it."""
    return shards_folder(checkpoint) / f"{token}-{rank}.pt"
