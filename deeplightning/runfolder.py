"""The one place that names the files a run leaves. Standard library only."""

import contextlib
import hashlib
import itertools
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, TypedDict

BUNDLE_FORMAT = 2
"""The number of the layout of a bundle that `deeplightning.export.bundle` describes. A reader refuses any other."""


class Card(TypedDict):
    """What `bundle.json` holds; `deeplightning.export.bundle.export` documents it. A card is read from a file that
    somebody else may have written: the server checks each value before it uses one."""

    format: int  # BUNDLE_FORMAT
    task: str  # a name of `deeplightning.kinds.KINDS`
    input: dict[str, Any]  # the `to_dict()` of the spec
    labels: list[str]
    output: NotRequired[dict[str, Any]]  # a task's `answer_details()`
    files: dict[str, str]  # name → SHA-256
    run: dict[str, Any]
    golden: dict[str, Any]  # samples and answers by name; `digest`: `golden_digest`
    int8: NotRequired[dict[str, float]]  # figures of the quantized model
    digest: str  # `seal`


_start: str | None = None  # the working directory when the command started


@contextlib.contextmanager
def started_here() -> Iterator[None]:
    """Remember the working directory: relative paths of a command refer to it, also after user code has changed it."""
    global _start
    before = _start
    try:
        with contextlib.suppress(OSError):  # the folder was removed
            _start = _start or os.getcwd()  # noqa: PTH109
        yield
    finally:
        _start = before


def start_folder() -> Path:
    """Return the folder that relative paths refer to: the working directory when the command started."""
    return Path(_start or os.getcwd())  # noqa: PTH109


def from_start(path: str | os.PathLike) -> Path:
    """Return a path as absolute, seen from `start_folder`, with `~` expanded."""
    path = Path(path).expanduser()
    return path if path.is_absolute() else start_folder() / path


class RunFolder:
    """The folder of one run (`path` is made absolute); every attribute is the path of one thing in it.

    Nothing is created here: whoever writes a file makes its folder.
    """

    def __init__(self, path: str | Path):
        self.path = from_start(path)
        self.config = self.path / "cfg.yaml"
        self.asked = self.path / "asked.yaml"  # what was asked for where cfg.yaml has something else, by keys
        self.environment = self.path / "environment.json"
        self.git_diff = self.path / "git.diff"
        self.code = self.path / "code.zip"  # the user's own, as it was
        self.data = self.path / "data.json"  # name, size and SHA-256 of the files that were read
        self.series = self.path / "metrics.json"
        self.last = self.path / "last.ckpt"
        self.best = self.path / "best.ckpt"
        self.best_score = self.path / "best.json"
        self.samples = self.path / "samples.npz"
        self.bundle = self.path / "bundle"
        self.bundle_card = self.bundle / "bundle.json"
        self.bundle_model = self.bundle / "model.onnx"
        self.bundle_int8 = self.bundle / "model.int8.onnx"
        self.bundle_fp16 = self.bundle / "model.fp16.onnx"
        self.bundle_torchscript = self.bundle / "model.torchscript.pt"
        self.bundle_pt2 = self.bundle / "model.pt2"
        self.bundle_weights = self.bundle / "weights.safetensors"
        self.model = self.path / "model"  # an MLflow model of the bundle
        self.predictions = self.path / "predictions.csv"
        self.places = self.path / "places.json"  # dotted key → the place in the config's files that set it
        self.curves = self.path / "curves"  # with .svg and .png
        self.report = self.path / "report.html"
        self.flops = self.path / "flops.txt"
        self.memory = self.path / "memory.json"  # what a training took; `deeplightning.callbacks.memory`

    def checkpoint(self, epoch: int, step: int) -> Path:
        """A checkpoint kept besides `last` and `best`."""
        return self.path / f"epoch={epoch}-step={step}.ckpt"

    def checkpoints(self) -> list[Path]:
        """The checkpoints that are there, in the order in which a run resumes from them: the last, then by steps, the
        latest first; `best.ckpt` without `best.json` comes at the end."""
        kept = {path: int(found[1]) for path in self.path.glob("*.ckpt") if (found := _KEPT.fullmatch(path.name))}
        if self.best.is_file():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                kept[self.best] = -1
                kept[self.best] = int(json.loads(self.best_score.read_text())["step"])
        last = [self.last] if self.last.is_file() else []
        return last + sorted(kept, key=lambda path: kept[path], reverse=True)

    def former(self, path: Path) -> Path:
        """Where a file of the run is kept when another takes its place: `cfg.yaml` as `cfg.1.yaml`, then
        `cfg.2.yaml`."""
        taken = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
        return next(candidate for candidate in taken if not candidate.exists())

    def unfinished(self) -> list[Path]:
        """What processes that were killed while they wrote have left; not to be asked while one writes."""
        return [path for path in self.path.glob(".*") if _UNFINISHED.fullmatch(path.name)]

    def hold(self) -> "Hold | None":
        """Claims the folder for this process until the hold is released or the process ends, however it ends; None: a
        process that runs has it. The folder must be there."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except (ImportError, OSError):  # Windows, or a file system without locks
            pass
        return Hold(descriptor)

    def log(self, rank: int) -> Path:
        """The output of one process."""
        return self.path / "logs" / f"rank_{rank}.log"

    def results(self, stage: str) -> Path:
        """Metrics of `validate` (`val_results.json`) or `test` (`test_results.json`)."""
        return self.path / f"{_short(stage)}_results.json"

    def stage_predictions(self, stage: str) -> Path:
        """One row per sample of the validation or test set, in data order."""
        return self.path / f"{_short(stage)}_predictions.csv"

    def mistakes(self, stage: str) -> Path:
        """The worst answers of the validation or test set, each with its sample."""
        return self.path / f"{_short(stage)}_mistakes.json"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


def make_private(folder: Path, store: Path) -> None:
    """Makes a folder below a store, and the store's own; each that is new has the permissions of the store's folder, or
    is its owner's alone where that is new too."""
    if not store.exists():
        store.parent.mkdir(parents=True, exist_ok=True)
        store.mkdir(mode=0o700, exist_ok=True)
    with permissions_of(store):
        folder.mkdir(parents=True, exist_ok=True)


class _Umask:
    """This process's umask, which all of its threads share: the latest that one of them has asked for and not given
    back, else the user's. Were each to restore what it has found, one could restore the user's while another writes."""

    def __init__(self) -> None:
        self._lock, self._asked, self._users = threading.Lock(), dict[object, int](), 0

    def ask(self, umask: int) -> object:
        """Sets it; gives what `give_back` takes."""
        with self._lock:
            before, token = os.umask(umask), object()
            if not self._asked:
                self._users = before
            self._asked[token] = umask
        return token

    def give_back(self, token: object) -> None:
        with self._lock:
            del self._asked[token]
            os.umask(next(reversed(self._asked.values()), self._users))


UMASK = _Umask()


@contextlib.contextmanager
def permissions_of(folder: Path | None) -> Iterator[None]:
    """What this process makes meanwhile has the permissions of a folder; None: those that the user has set."""
    token = UMASK.ask(umask_of(folder)) if folder is not None else None
    try:
        yield
    finally:
        if token is not None:
            UMASK.give_back(token)


def umask_of(folder: Path) -> int:
    """The umask under which what is made has the permissions of a folder, but that others may not write it; its owner's
    alone where the folder is not there."""
    mode = folder.stat().st_mode if folder.exists() else 0o700
    return ~mode & 0o077 | 0o002


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all, as `whole` does."""
    with whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to be written that is there whole or not at all, whatever ends the process or the machine: it is written
    beside the path, synced, then renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_names(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write names no file
        raise


_synced: set[Path] = set()


def sync_names(folder: Path) -> None:
    """Makes durable which names a folder has; at its first time also that it is there itself, and what it is in.

    A rename is atomic, and lasts through a loss of power only when its folder has been synced (fsync(2)). Where folders
    cannot be synced, as on Windows, nothing is done.
    """
    folders = [folder] if folder in _synced else [folder, *folder.absolute().parents]
    _synced.add(folder)
    for each in folders:
        with contextlib.suppress(OSError):  # no right to read one above, or a file system that syncs no folder
            descriptor = os.open(each, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def seal(card: Mapping[str, object]) -> str:
    """The digest of a bundle's card: SHA-256 of all that it says besides `digest`, so that an edit is noticed.

    Raises:
        ValueError: it holds a number that is not finite, which JSON does not know.
    """
    content = {key: value for key, value in card.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def golden_digest(card: Card) -> str:
    """The digest of a bundle's golden answers and of what they mean: SHA-256 of the card without its digests, so that
    labels, task, input and files are those that the answers were given with, even if the card is sealed again. Models
    of another precision may join the bundle later."""
    golden = {key: value for key, value in card["golden"].items() if key != "digest"}
    names = RunFolder(".")
    later = {names.bundle_int8.name, names.bundle_fp16.name}
    files = {name: digest for name, digest in card["files"].items() if name not in later}
    return seal({**card, "golden": golden, "files": files})


class Hold:
    """A claim on a folder. Forked processes, such as the workers of a loader, let go of it, or it would outlive us."""

    def __init__(self, descriptor: int):
        self._descriptor: int | None = descriptor
        _held.add(self)

    def release(self) -> None:
        """Gives the folder free; a second time does nothing."""
        _held.discard(self)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # it is free all the same, and nothing was written through it
                os.close(descriptor)


_held: set[Hold] = set()
_UNFINISHED = re.compile(r"\..+\.(\d+|partial)")
_KEPT = re.compile(r"epoch=\d+-step=(\d+)\.ckpt")


def _release_all() -> None:
    for hold in list(_held):
        hold.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)


def _short(stage: str) -> str:
    return "val" if stage == "validate" else stage
