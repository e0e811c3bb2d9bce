"""The files that a data module reads, by name, size and SHA-256, so that a changed one can be named later.

The data module names them in `files`, keeps their paths as attributes, or gets them from the config's params; else they
are all files below `data.root`. For data that come with a package, its version is enough. Standard library only.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.runfolder import from_start, start_folder

if TYPE_CHECKING:
    import pytorch_lightning as pl

MAX_FILES = 20_000
"""Files that are listed."""
SECONDS = 120.0
"""How long files are hashed; of those that are left, the sizes are kept."""

_BLOCK = 1 << 20
_WORTH_KEEPING = 8 << 20  # bytes; hashing less is as fast as looking it up
_SETTLED = 2_000_000_000  # nanoseconds; what changed less before may change again without a trace
_NO_DATA = (".py", ".pyc", ".ckpt", ".lock")

Never = Callable[[], bool]


def paths_of(data: "pl.LightningDataModule | None", root: str | None, params: Mapping[str, object]) -> list[Path]:
    """Return the absolute paths of the files and folders that a data module reads; [] if they are unknown.

    Args:
        data: the data module, or None.
        root: `data.root`.
        params: of the data module; texts in it that are paths count.
    """
    top = from_start(root) if root is not None else None
    declared = getattr(data, "files", None)
    with suppress(Exception):  # a user's own, which may mean something else
        declared = declared() if callable(declared) else declared
    found = []
    for path in _texts_and_paths(declared):
        is_its_own = isinstance(path, Path) and path.exists()
        found.append(Path(path).absolute() if is_its_own else (top or start_folder()) / path)
    for name, value in list(getattr(data, "__dict__", {}).items()):
        if name not in ("files", "trainer"):
            found += [path.absolute() for path in _texts_and_paths(value) if isinstance(path, Path) and path.is_file()]
    for name, value in params.items():
        for text in _texts_and_paths(value) if not name.startswith(("cache", "augment")) else ():
            near = [folder / text for folder in (start_folder(), top) if folder is not None and len(str(text)) < 4096]
            with suppress(OSError, ValueError):  # a text that can be no path
                found += [path for path in near if str(text) not in ("", ".") and path.exists()][:1]
    there = [path for path in dict.fromkeys(found) if path.exists() and path != top]
    if declared is None or not there:
        there += [top] if top is not None and top.exists() else []
    return [path for path in there if "site-packages" not in path.parts]


def _texts_and_paths(value: object, depth: int = 0) -> Iterator[str | Path]:
    if isinstance(value, str | Path):
        yield value
    elif isinstance(value, Mapping | list | tuple) and len(value) <= MAX_FILES and depth < 4:
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_and_paths(item, depth + 1)


def describe_files(
    paths: Iterable[Path],
    root: str | None,
    *,
    without: Iterable[Path] = (),
    seconds: float = SECONDS,
    stop: Never = lambda: False,
    remember: bool = True,
) -> dict[str, Any]:
    """Name, bytes and SHA-256 of files, and of all files in folders.

    Args:
        paths: files and folders, absolute.
        root: `data.root`; names below it are relative.
        without: folders that are passed over.
        seconds: how long it may take; then sizes only.
        stop: is asked between two blocks; true: sizes only from here on.
        remember: take the SHA-256 of a file that has not changed since from the user's cache, and keep it there.

    Returns:
        Plain types for JSON: `root` (absolute, or None), `folders` (names), `files` (by name [bytes, SHA-256 or None]),
        `incomplete` (why files are missing here or have no SHA-256; None: they are all there).
    """
    until = time.monotonic() + seconds
    top = from_start(root) if root is not None else None
    files: dict[str, Path] = {}
    folders, incomplete, passed = [], None, {str(path) for path in without}
    for path in paths:
        if path.is_dir():
            folders.append(_name(path, top))
            for file in _below(path, passed):
                if len(files) >= MAX_FILES:
                    incomplete = f"only the first {MAX_FILES:,} files are listed"
                    break
                files[_name(file, top)] = file
        else:
            files[_name(path, top)] = path
    known = _Known(top or Path("/"), remember)
    listed: dict[str, list[object]] = {}
    unread = 0
    for name in sorted(files):
        size, digest = 0, None
        with suppress(OSError):
            size = files[name].stat().st_size
            over = time.monotonic() > until or stop()
            digest = None if over else known.digest(files[name], lambda: time.monotonic() > until or stop())
        unread += digest is None
        listed[name] = [size, digest]
    known.keep()
    if unread:
        incomplete = incomplete or f"of {unread:,} files only the size is known: reading all would take too long"
    return {"root": str(top) if top else None, "folders": folders, "files": listed, "incomplete": incomplete}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Describe the differences between an earlier and a later description, by file name."""
    found = {}
    one, two = before["files"], now["files"]
    for name in sorted({*one, *two}):
        if name not in two:
            found[name] = "missing"
        elif name not in one:
            if len(one) < MAX_FILES:  # else it may have been there, unlisted
                found[name] = "new"
        elif one[name][0] != two[name][0]:
            found[name] = f"{one[name][0]:,} bytes → {two[name][0]:,}"
        elif one[name][1] != two[name][1] and None not in (one[name][1], two[name][1]):
            found[name] = f"other content (SHA-256 {one[name][1][:12]} → {two[name][1][:12]})"
    return found


def describe_again(before: Mapping[str, Any], root: str | None) -> dict[str, Any]:
    """Describe the same files and folders as they are now, without files that are gone.

    Args:
        root: where `data.root` is now.
    """
    top = from_start(root or before["root"] or "/")
    listed = [top / name for name in before["files"]]
    paths = [top / name for name in before["folders"]] + [path for path in listed if path.is_file()]
    unread = [name for name, (_, digest) in before["files"].items() if digest is None]
    now = describe_files(
        dict.fromkeys(path for path in paths if path.exists()),
        str(top),
        seconds=float("inf") if not unread else SECONDS,
        remember=False,
    )
    if before["root"] is None:
        now["files"] = {str(top / name): found for name, found in now["files"].items()}
    return now


def _name(path: Path, top: Path | None) -> str:
    return path.relative_to(top).as_posix() if top is not None and path.is_relative_to(top) else str(path)


def _below(top: Path, without: set[str]) -> Iterator[Path]:
    """List the files below a folder, sorted by name, without hidden ones, code and tracking stores."""
    seen = set()
    for name, below, names in os.walk(top, followlinks=True):
        with suppress(OSError):
            status = os.stat(name)  # noqa: PTH116
            if (status.st_dev, status.st_ino) in seen or name in without or ("mlflow.db" in names and name != str(top)):
                below.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
        below[:] = sorted(inner for inner in below if not inner.startswith((".", "__pycache__")))
        for file in sorted(names):
            if not file.startswith(".") and not file.endswith(_NO_DATA):
                yield Path(name, file)


class _Known:
    """SHA-256 of files that have not changed since, in the user's cache: a run that is repeated does not read all of
    its data twice. A file is the same while device, inode, size and both times are."""

    def __init__(self, top: Path, remember: bool):
        self.file: Path | None = None
        self.there: dict[str, list[Any]] = {}
        self.new: dict[str, list[Any]] = {}
        if not remember or os.environ.get("DEEPLIGHTNING_CACHE", "").lower() == "off":
            return
        with suppress(OSError, RuntimeError, ValueError):  # a user without a home; a damaged file
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplightning" / "digests"
            self.file = cache / f"{hashlib.sha256(str(top).encode()).hexdigest()[:24]}.json"
            there = json.loads(self.file.read_text()) if self.file.exists() else {}
            self.there = there if isinstance(there, dict) else {}

    def digest(self, path: Path, stop: Never) -> str | None:
        """Return the SHA-256, or None after a request to stop."""
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            mark = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
            if (found := self.there.get(str(path))) is not None and found[:5] == mark:
                self.new[str(path)] = found
                return str(found[5])
            digest, block = hashlib.sha256(), bytearray(min(_BLOCK, max(1, status.st_size)))
            while read := file.readinto(block):
                digest.update(memoryview(block)[:read])
                if stop():
                    return None
        text = digest.hexdigest()
        if max(status.st_mtime_ns, status.st_ctime_ns) < time.time_ns() - _SETTLED:
            self.new[str(path)] = [*mark, text]
        return text

    def keep(self) -> None:
        is_worth_it = sum(found[2] for found in self.new.values()) >= _WORTH_KEEPING
        if self.file is None or not is_worth_it or self.new == self.there:
            return
        with suppress(OSError):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside = self.file.with_name(f".{self.file.name}.{os.getpid()}")
            beside.write_text(json.dumps(self.new))
            beside.replace(self.file)
