"""Index tar files of samples in WebDataset's format, on a disk or at an address.

One pass over the headers finds the position of each sample, and the result is cached.

A sample consists of consecutive members with one KEY: `KEY.jpg` (or another picture) and its label, `KEY.cls` (a
number or a word) or `KEY.json`. Python's `tarfile` reads the headers; nothing is extracted, and shards with members
that only pickle could read are refused. The package `webdataset` would bring its own loops over processes, workers and
epochs, whose position a resumed run could not restore.

Shards at an address are copied when their first sample is needed, into a folder with at most
`DEEPLIGHTNING_CACHE_LIMIT` GiB; the least recently used are removed. N samples.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from deeplightning.data.cache import rule_of
from deeplightning.data.cache_files import limit_in_bytes, refuse_foreign, stat_of
from deeplightning.data.data_errors import DataError
from deeplightning.image_spec import EXTENSIONS, ImageError, ImageSpec
from deeplightning.runfolder import write_whole
from deeplightning_shards.addresses import files_at, without_query

PICKLE_EXTENSIONS = ("pyd", "pkl", "pickle", "pth", "pt")
"""Extensions of members that need pickle, which can run code."""

MAX_SHARDS = 1_000_000
"""Maximum number of names that a pattern may expand to."""

_MAX_LABEL_BYTES = 2**20  # of a .cls or .json
_MAX_OPEN_SHARDS = 64  # in a process
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")

log = logging.getLogger(__name__)


def expand(pattern: str) -> list[str]:
    """Return the names that a brace pattern expands to: `{000..012}` is each number in turn, `{a,b}` each word.

    Raises:
        ValueError: there are more than `MAX_SHARDS`, or a range is descending.
    """
    parts = _BRACES.split(pattern)
    choices: list[Sequence[str]] = []
    count = 1
    for place, part in enumerate(parts):
        if place % 2 == 0:
            choices.append([part])
        elif (found := _RANGE.fullmatch(part)) is not None:
            first, last = int(found[1]), int(found[2])
            if last < first:
                raise ValueError(f"{{{part}}} runs backwards")
            if last - first >= MAX_SHARDS:
                raise ValueError(f"{{{part}}} is more than {MAX_SHARDS:,} names")
            choices.append([str(number).zfill(len(found[1])) for number in range(first, last + 1)])
        else:
            choices.append(part.split(","))
        count *= len(choices[-1])
    if count > MAX_SHARDS:
        raise ValueError(f"it expands to more than {MAX_SHARDS:,} names")
    return ["".join(words) for words in product(*choices)]


@dataclass(frozen=True)
class Shard:
    """One tar file.

    Attributes:
        name: below `data.root`.
        path: on the disk; for a shard at an address, the path of its copy.
        version: a string that changes with its content.
        size: bytes.
        remote: its path in the object store; None for a local file.
    """

    name: str
    path: Path
    version: str
    size: int
    remote: str | None = None


@dataclass(frozen=True)
class Index:
    """Positions of the samples of one shard.

    Attributes:
        offsets, sizes: of the pictures in the file, int64 (n,).
        words: the different labels.
        codes: the position of each sample's label in `words`, int64 (n,).
        skipped: descriptions of samples that were left out.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    words: list[str]
    codes: np.ndarray
    skipped: list[str]


class Source:
    """Reader of the shards of all sets. A copy in a loader worker opens its own files.

    Args:
        root: `data.root`.
        shards: all of them.
    """

    def __init__(self, root: str, shards: Sequence[Shard]):
        self.root, self.shards = root, list(shards)
        self._files: dict[int, int] = {}  # open shards, the least recently used first

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Read bytes of a shard.

        Raises:
            OSError: the shard was removed or truncated.
            DataError: it cannot be copied.
        """
        file = self._files.pop(shard, -1)
        if file < 0:
            while len(self._files) >= _MAX_OPEN_SHARDS:
                os.close(self._files.pop(next(iter(self._files))))
            file = self.open(self.shards[shard])
        self._files[shard] = file
        data = os.pread(file, size, offset)
        if len(data) < size:
            raise OSError(f"the file ends before byte {offset + size}")
        return data

    def open(self, shard: Shard) -> int:
        """Return a file descriptor of a shard; the caller closes it.

        Raises:
            OSError: it cannot be opened.
            DataError: it cannot be copied.
        """
        for _ in range(10):
            with contextlib.suppress(FileNotFoundError):  # another process has removed the copy meanwhile
                return os.open(self.local(shard), os.O_RDONLY)
            if shard.remote is None:
                break
        raise FileNotFoundError(f"{shard.path} is gone")

    def local(self, shard: Shard) -> Path:
        """Return the path of a shard on the disk; copy it first if it is at an address and has no copy."""
        if shard.remote is None:
            return shard.path
        if shard.path.is_file():
            with contextlib.suppress(OSError):
                os.utime(shard.path)
            return shard.path
        from filelock import FileLock

        folder = shard.path.parent
        with FileLock(folder / "lock"):
            if not shard.path.is_file():
                _make_room(folder, shard)
                file, partial = tempfile.mkstemp(prefix=".partial-", dir=folder)
                os.close(file)
                try:
                    from fsspec.core import url_to_fs

                    url_to_fs(self.root)[0].get_file(shard.remote, partial)
                    if (found := Path(partial).stat().st_size) != shard.size:
                        raise OSError(f"{found:,} bytes received, but the store reported {shard.size:,}")
                    Path(partial).rename(shard.path)
                except Exception as error:  # each store raises its own classes
                    reason = " ".join(str(error).split())[:200]
                    raise DataError(f"{without_query(self.root)}: {shard.name} cannot be copied: {reason}") from error
                finally:
                    Path(partial).unlink(missing_ok=True)
        return shard.path


def _make_room(folder: Path, shard: Shard) -> None:
    """Remove the least recently used copies until a shard fits. The caller holds the lock."""
    for partial in folder.glob(".partial-*"):  # left by a killed process
        partial.unlink(missing_ok=True)
    limit = limit_in_bytes()
    if shard.size > limit:
        raise DataError(f"{shard.name} has {shard.size / 2**30:.3g} GiB, more than DEEPLIGHTNING_CACHE_LIMIT allows.")
    files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("*.tar"))
    total = sum(size for _, size, _ in files)
    while files and total + shard.size > limit:
        _, size, path = files.pop(0)
        path.unlink(missing_ok=True)  # processes that have it open can still read it
        total -= size


def index_of(source: Source, shard: Shard, label: str, check: ImageSpec | None, max_pixels: int) -> Index:
    """Read the headers and labels of a shard.

    Args:
        source: reads the shard.
        label: the key of the label in `KEY.json`.
        check: skip samples without a label, or whose picture this spec cannot decode; None: an invalid sample is an
            error.
        max_pixels: largest picture that is decoded.

    Raises:
        DataError: the shard cannot be read as tar, has members that need pickle, or a sample is incomplete.
    """
    name, offsets, sizes, codes = shard.name, list[int](), list[int](), list[int]()
    known, skipped = dict[str, int](), list[str]()
    try:
        with os.fdopen(source.open(shard), "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for key, members in _samples(archive, file.fileno(), name):
                try:
                    picture, word = _sample(archive, key, members, label)
                    if check is not None:
                        check.decode(os.pread(file.fileno(), picture.size, picture.offset_data), max_pixels)
                except (ValueError, ImageError) as error:
                    if check is None:
                        raise DataError(f"{name}, sample {key}: {error}") from error
                    skipped.append(f"{name}, sample {key} ({str(error).rstrip('.')})")
                    continue
                offsets.append(picture.offset_data)
                sizes.append(picture.size)
                codes.append(known.setdefault(word, len(known)))
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{name} cannot be read as a plain tar file: {error}.") from error
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error
    kind = np.int64
    return Index(np.array(offsets, kind), np.array(sizes, kind), list(known), np.array(codes, kind), skipped)


def _samples(archive: tarfile.TarFile, file: int, name: str) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yield the key of each sample and its members by extension."""
    key, members = None, dict[str, tarfile.TarInfo]()
    for member in archive:
        folder, _, base = member.name.rpartition("/")
        stem, _, ending = base.partition(".")
        if not member.isreg() or not stem or not ending:
            continue  # folders, links and hidden files
        ending = ending.lower()
        if ending.rpartition(".")[2] in PICKLE_EXTENSIONS:
            raise DataError(
                f"{name}, member {member.name}: it needs pickle, which can run code; write the shard without it."
            )
        current = f"{folder}/{stem}" if folder else stem
        if current != key:
            if key is not None:
                yield key, members
            key, members = current, {}
        if ending in members:
            raise DataError(f"{name}, member {member.name}: it occurs twice in its sample.")
        members[ending] = member
    if any(os.pread(file, 512, archive.offset)):  # tarfile treats a damaged header as the end
        raise DataError(f"{name} is damaged: no member header at byte {archive.offset}.")
    if key is not None:
        yield key, members


def _sample(
    archive: tarfile.TarFile, key: str, members: dict[str, tarfile.TarInfo], label: str
) -> tuple[tarfile.TarInfo, str]:
    """Return the member with the picture, and the label.

    Raises:
        ValueError: the picture or the label is missing, or occurs more than once; the message names it.
    """
    extensions = ", ".join(f".{ending}" for ending in members)
    pictures = [member for ending, member in members.items() if f".{ending}" in EXTENSIONS]
    if len(pictures) != 1:
        raise ValueError(f"{len(pictures) or 'no'} pictures ({', '.join(EXTENSIONS)}); it has {extensions}")
    if pictures[0].issparse():  # its bytes are not consecutive
        raise ValueError(f"{pictures[0].name} is stored with holes; write the shard without --sparse")
    found = members.get("cls") or members.get("json")
    if found is None:
        raise ValueError(f"the label is missing: .cls or .json; it has {extensions}")
    if found.size > _MAX_LABEL_BYTES:
        raise ValueError(f"{found.name} has {found.size:,} bytes, too many for a label")
    stream = archive.extractfile(found)
    assert stream is not None, "it is a regular file"
    text = stream.read().decode("utf-8-sig").strip()
    if "cls" not in members:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"{found.name} is not JSON") from None
        word = value.get(label) if isinstance(value, dict) else None
        if isinstance(word, bool) or not isinstance(word, int | str):
            raise ValueError(f"{found.name} has no integer or text under {label!r} (data.module.params.label)")
        text = str(word).strip()
    if not text:
        raise ValueError(f"{found.name} is empty")
    return pictures[0], text


def indices_of(source: Source, label: str, check: ImageSpec | None, max_pixels: int) -> list[Index]:
    """Return the index of each shard, from the cache if possible. Arguments and errors are those of `index_of`."""
    from filelock import FileLock

    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    folder = _cache() / "index"
    spec = rule_of(check, max_pixels) if check else None  # another decoder may skip other samples
    found, read = [], 0
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # where nothing can be written, the headers are read at each start
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held.enter_context(FileLock(folder / "lock"))  # only one process reads the headers
        for shard in source.shards:
            cache_key = (code, shard.name, shard.version, label, spec, max_pixels)
            path = folder / f"{hashlib.sha256(repr(cache_key).encode()).hexdigest()[:32]}.json"
            if (index := _load_index(path)) is None:
                if read % 100 == 0:
                    log.info("Reading the headers of %s, one of %d shards", shard.name, len(source.shards))
                read += 1
                index = index_of(source, shard, label, check, max_pixels)
                _save_index(path, index)
            found.append(index)
    return found


def in_folder(root: Path) -> dict[str, Shard]:
    if not root.is_dir():
        raise DataError(f"Shards: {root} is not a folder. Set data.root to the folder with the shards.")
    found = {}
    for path in sorted(root.rglob("*.tar")):
        status = path.stat()
        name = path.relative_to(root).as_posix()
        found[name] = Shard(name, path, repr(stat_of(status)), status.st_size)
    return found


def at_address(root: str) -> dict[str, Shard]:
    folder = _cache() / "copies"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = {}
    for name, (path, size, version) in files_at(root).items():
        if name.endswith(".tar"):
            digest = hashlib.sha256(repr((root, name, size, version)).encode()).hexdigest()[:32]
            found[name] = Shard(name, folder / f"{digest}.tar", repr((root, size, version)), size, path)
    return found


def _cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplightning" / "shards"
    except RuntimeError:  # there is no home folder
        return Path(os.devnull)  # nothing can be read or written below it


def _load_index(path: Path) -> Index | None:
    """Return a cached index, or None if there is no usable one."""
    try:
        refuse_foreign(path.parent)
        found = json.loads(path.read_bytes())
        arrays = {name: np.array(found[name], np.int64) for name in ("offsets", "sizes", "codes")}
        return Index(words=found["words"], skipped=found["skipped"], **arrays)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save_index(path: Path, index: Index) -> None:
    values = {name: getattr(index, name).tolist() for name in ("offsets", "sizes", "codes")}
    values |= {"words": index.words, "skipped": index.skipped}
    with contextlib.suppress(OSError):  # the index is rebuilt next time
        write_whole(path, json.dumps(values))
