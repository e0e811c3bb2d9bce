"""Record the files that a data module reads by name, size and SHA-256, so that later changes can be reported.

The data module lists them in `files`, keeps their paths as attributes, or gets them from its params; otherwise, they
are all files below `data.root`. For data in an installed package, its version is enough. Standard library only.
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
"""Maximum number of files that are listed."""
SECONDS = 120.0
"""Time limit for hashing; of the remaining files only the sizes are recorded."""

_BLOCK_BYTES = 1 << 20
_MIN_CACHED_BYTES = 8 << 20  # hashing less is as fast as a lookup
_STABLE_NANOSECONDS = 2_000_000_000  # a file that changed more recently may change again with equal times
_SKIPPED_SUFFIXES = (".py", ".pyc", ".ckpt", ".lock")

ShouldStop = Callable[[], bool]


def paths_of(data: "pl.LightningDataModule | None", root: str | None, params: Mapping[str, object]) -> list[Path]:
    """Return the absolute paths of the files and folders that a data module reads; [] if they are unknown.

    Args:
        data: the data module, or None.
        root: `data.root`.
        params: params of the data module; texts that are existing paths count.
    """
    top = from_start(root) if root is not None else None
    declared = getattr(data, "files", None)
    with suppress(Exception):  # an attribute of the user's, which may mean something else
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
            with suppress(OSError, ValueError):  # a text that cannot be a path
                found += [path for path in near if str(text) not in ("", ".") and path.exists()][:1]
    existing = [path for path in dict.fromkeys(found) if path.exists() and path != top]
    if declared is None or not existing:
        existing += [top] if top is not None and top.exists() else []
    return [path for path in existing if "site-packages" not in path.parts]


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
    stop: ShouldStop = lambda: False,
    remember: bool = True,
) -> dict[str, Any]:
    """Describe files, and all files in folders, by name, size in bytes and SHA-256.

    Args:
        paths: files and folders, absolute.
        root: `data.root`; names below it are relative.
        without: folders to skip.
        seconds: time limit; after it, only sizes are recorded.
        stop: called between two blocks; if true, only sizes are recorded from then on.
        remember: use the SHA-256 of unchanged files in the user's cache, and update it.

    Returns:
        Plain types for JSON: `root` (absolute, or None), `folders` (names), `files` (by name [bytes, SHA-256 or None]),
        `incomplete` (why files are missing here or have no SHA-256, or None if it is complete).
    """
    until = time.monotonic() + seconds
    top = from_start(root) if root is not None else None
    files: dict[str, Path] = {}
    folders, incomplete, skipped = [], None, {str(path) for path in without}
    for path in paths:
        if path.is_dir():
            folders.append(_relative_name(path, top))
            for file in _files_below(path, skipped):
                if len(files) >= MAX_FILES:
                    incomplete = f"only the first {MAX_FILES:,} files are listed"
                    break
                files[_relative_name(file, top)] = file
        else:
            files[_relative_name(path, top)] = path
    cache = _DigestCache(top or Path("/"), remember)
    listed: dict[str, list[object]] = {}
    unhashed = 0
    for name in sorted(files):
        size, digest = 0, None
        with suppress(OSError):
            size = files[name].stat().st_size
            is_over = time.monotonic() > until or stop()
            digest = None if is_over else cache.digest(files[name], lambda: time.monotonic() > until or stop())
        unhashed += digest is None
        listed[name] = [size, digest]
    cache.save()
    if unhashed:
        incomplete = incomplete or f"only the size of {unhashed:,} files is recorded: hashing all takes too long"
    return {"root": str(top) if top else None, "folders": folders, "files": listed, "incomplete": incomplete}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Describe the differences between an earlier and a later description, by file name."""
    found = {}
    one, two = before["files"], now["files"]
    for name in sorted({*one, *two}):
        if name not in two:
            found[name] = "missing"
        elif name not in one:
            if len(one) < MAX_FILES:  # otherwise it may have existed without being listed
                found[name] = "new"
        elif one[name][0] != two[name][0]:
            found[name] = f"{one[name][0]:,} bytes → {two[name][0]:,}"
        elif one[name][1] != two[name][1] and None not in (one[name][1], two[name][1]):
            found[name] = f"other content (SHA-256 {one[name][1][:12]} → {two[name][1][:12]})"
    return found


def describe_again(before: Mapping[str, Any], root: str | None) -> dict[str, Any]:
    """Describe the current state of the same files and folders, without files that are gone.

    Args:
        root: current `data.root`.
    """
    top = from_start(root or before["root"] or "/")
    listed = [top / name for name in before["files"]]
    paths = [top / name for name in before["folders"]] + [path for path in listed if path.is_file()]
    seconds = SECONDS if None in [digest for _, digest in before["files"].values()] else float("inf")
    existing = dict.fromkeys(path for path in paths if path.exists())
    now = describe_files(existing, str(top), seconds=seconds, remember=False)
    if before["root"] is None:
        now["files"] = {str(top / name): found for name, found in now["files"].items()}
    return now


def _relative_name(path: Path, top: Path | None) -> str:
    return path.relative_to(top).as_posix() if top is not None and path.is_relative_to(top) else str(path)


def _files_below(top: Path, without: set[str]) -> Iterator[Path]:
    """List the files below a folder, sorted by name, except hidden files, code and tracking stores."""
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
            if not file.startswith(".") and not file.endswith(_SKIPPED_SUFFIXES):
                yield Path(name, file)


class _DigestCache:
    """SHA-256 of unchanged files, in the user's cache: a repeated run does not read all its data again. A file is
    unchanged if its device, inode, size and both times are the same."""

    def __init__(self, top: Path, remember: bool):
        self.file: Path | None = None
        self.cached: dict[str, list[Any]] = {}
        self.new: dict[str, list[Any]] = {}
        if not remember or os.environ.get("DEEPLIGHTNING_CACHE", "").lower() == "off":
            return
        with suppress(OSError, RuntimeError, ValueError):  # a user without a home; a damaged file
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplightning" / "digests"
            self.file = folder / f"{hashlib.sha256(str(top).encode()).hexdigest()[:24]}.json"
            content = json.loads(self.file.read_text()) if self.file.exists() else {}
            self.cached = content if isinstance(content, dict) else {}

    def digest(self, path: Path, stop: ShouldStop) -> str | None:
        """Return the SHA-256, or None if `stop` is true."""
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            state = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
            if (found := self.cached.get(str(path))) is not None and found[:5] == state:
                self.new[str(path)] = found
                return str(found[5])
            digest, block = hashlib.sha256(), bytearray(min(_BLOCK_BYTES, max(1, status.st_size)))
            while read := file.readinto(block):
                digest.update(memoryview(block)[:read])
                if stop():
                    return None
        text = digest.hexdigest()
        if max(status.st_mtime_ns, status.st_ctime_ns) < time.time_ns() - _STABLE_NANOSECONDS:
            self.new[str(path)] = [*state, text]
        return text

    def save(self) -> None:
        is_worth_it = sum(found[2] for found in self.new.values()) >= _MIN_CACHED_BYTES
        if self.file is None or not is_worth_it or self.new == self.cached:
            return
        with suppress(OSError):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = self.file.with_name(f".{self.file.name}.{os.getpid()}")
            temporary.write_text(json.dumps(self.new))
            temporary.replace(self.file)
