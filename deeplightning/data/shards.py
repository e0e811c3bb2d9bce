"""Pictures in shards: plain tar files as WebDataset has them, on a disk or at an address. One pass over the headers
finds where each sample lies; batches then read the bytes of their samples, shard after shard.

A sample is the members of one KEY that follow each other: `KEY.jpg` (or another picture) and its label, `KEY.cls` (a
number or a word) or `KEY.json`. Python's `tarfile` reads the headers, and nothing else of an archive is interpreted:
nothing is extracted, and shards with members that only pickle could read are refused. The package `webdataset` would
bring its own loops over processes, workers and epochs, and could not say where in them a run stands.

Shards at an address are copied, when their first sample is needed, into a folder that holds `DEEPLIGHTNING_CACHE_LIMIT`
GiB at most; the longest unused are removed. N samples, R processes.
"""

import contextlib
import fnmatch
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
from typing import Any, Literal

import numpy as np
from torch import nn

from deeplightning.address import is_address, shown
from deeplightning.data.addresses import files_at
from deeplightning.data.cache_files import Unusable, limit_in_bytes, refuse_foreign, stat_of
from deeplightning.data.datasets import OnDemand
from deeplightning.data.errors import DataConfigError, DataError
from deeplightning.data.image_folder import STATISTICS
from deeplightning.data.images import ImageData, height_width
from deeplightning.data.loading import is_whole
from deeplightning.data.samplers import BatchIndices, go_on, is_made_for
from deeplightning.image import EXTENSIONS, MAX_PIXELS, ImageError, ImageSpec

PICKLES = ("pyd", "pkl", "pickle", "pth", "pt")
"""Endings of members that only pickle, which can run code, could read."""

MOST_SHARDS = 1_000_000
"""The most names that a pattern stands for."""

_LARGEST_LABEL = 2**20  # bytes of a .cls or .json
_OPEN = 64  # shards that a process holds open
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")

log = logging.getLogger(__name__)


def expand(pattern: str) -> list[str]:
    """The names that a brace pattern stands for: `{000..012}` is each number in turn, `{a,b}` each word.

    Raises:
        ValueError: there are more than `MOST_SHARDS`, or a range runs backwards.
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
            if last - first >= MOST_SHARDS:
                raise ValueError(f"{{{part}}} is more than {MOST_SHARDS:,} names")
            choices.append([str(number).zfill(len(found[1])) for number in range(first, last + 1)])
        else:
            choices.append(part.split(","))
        count *= len(choices[-1])
    if count > MOST_SHARDS:
        raise ValueError(f"it stands for more than {MOST_SHARDS:,} names")
    return ["".join(words) for words in product(*choices)]


@dataclass(frozen=True)
class Shard:
    """One tar file.

    Attributes:
        name: below `data.root`.
        path: on the disk; of an address where its copy goes.
        version: what changes with its content.
        size: bytes.
        remote: its path at the store; None: it is on the disk.
    """

    name: str
    path: Path
    version: str
    size: int
    remote: str | None = None


@dataclass(frozen=True)
class Index:
    """Where the samples of one shard lie.

    Attributes:
        offsets, sizes: of the pictures in the file, int64 (n,).
        words: the labels that occur.
        codes: of each sample the position of its label, int64 (n,).
        skipped: what was left out, in words.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    words: list[str]
    codes: np.ndarray
    skipped: list[str]


class Source:
    """The shards of all sets; a copy in a loader worker opens them again.

    Args:
        root: `data.root`.
        shards: all of them.
    """

    def __init__(self, root: str, shards: Sequence[Shard]):
        self.root, self.shards = root, list(shards)
        self._files: dict[int, int] = {}  # of the shards that are open, the longest unused first

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """
        Raises:
            OSError: the shard is gone, or shorter than it was.
            DataError: it cannot be copied.
        """
        file = self._files.pop(shard, -1)
        if file < 0:
            while len(self._files) >= _OPEN:
                os.close(self._files.pop(next(iter(self._files))))
            file = self.open(self.shards[shard])
        self._files[shard] = file
        data = os.pread(file, size, offset)
        if len(data) < size:
            raise OSError(f"the file ends before byte {offset + size}")
        return data

    def open(self, shard: Shard) -> int:
        """A file descriptor of a shard, to be closed by the caller.

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
        """The file, which of an address is copied where it is not there."""
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
                        raise OSError(f"{found:,} bytes came, and the store said {shard.size:,}")
                    Path(partial).rename(shard.path)
                except OSError as error:
                    raise DataError(f"{shown(self.root)}: {shard.name} cannot be copied: {error}") from error
                except Exception as error:  # each store has its own
                    words = " ".join(str(error).split())[:200]
                    raise DataError(f"{shown(self.root)}: {shard.name} cannot be copied: {words}") from error
                finally:
                    Path(partial).unlink(missing_ok=True)
        return shard.path


def _make_room(folder: Path, shard: Shard) -> None:
    """Removes the longest unused copies, so that a shard fits; with the lock held."""
    for left in folder.glob(".partial-*"):  # of a process that was killed
        left.unlink(missing_ok=True)
    limit = limit_in_bytes()
    if shard.size > limit:
        raise DataError(f"{shard.name} has {shard.size / 2**30:.3g} GiB, more than DEEPLIGHTNING_CACHE_LIMIT allows.")
    files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("*.tar"))
    taken = sum(size for _, size, _ in files)
    while files and taken + shard.size > limit:
        _, size, path = files.pop(0)
        path.unlink(missing_ok=True)  # those that have opened it can still read it
        taken -= size


def index_of(source: Source, shard: Shard, label: str, check: ImageSpec | None, max_pixels: int) -> Index:
    """Reads the headers and labels of a shard.

    Args:
        source: opens it.
        label: the key of the label in `KEY.json`.
        check: None: what is wrong ends it; else samples without a label, or whose picture this cannot decode, are left
            out.
        max_pixels: of a picture.

    Raises:
        DataError: the shard cannot be read as tar, has members that only pickle reads, or a sample is not whole.
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
    """Key and members, by their endings, of each sample."""
    key, members = None, dict[str, tarfile.TarInfo]()
    for member in archive:
        folder, _, base = member.name.rpartition("/")
        stem, _, ending = base.partition(".")
        if not member.isreg() or not stem or not ending:
            continue  # folders, links and hidden files
        ending = ending.lower()
        if ending.rpartition(".")[2] in PICKLES:
            raise DataError(
                f"{name}, member {member.name}: it could only be read by pickle, which can run code; make "
                "the shard without it."
            )
        own = f"{folder}/{stem}" if folder else stem
        if own != key:
            if key is not None:
                yield key, members
            key, members = own, {}
        if ending in members:
            raise DataError(f"{name}, member {member.name}: it comes twice in its sample.")
        members[ending] = member
    if any(os.pread(file, 512, archive.offset)):  # tarfile takes a damaged header for the end
        raise DataError(f"{name} is damaged at byte {archive.offset}: there is no header of a member.")
    if key is not None:
        yield key, members


def _sample(
    archive: tarfile.TarFile, key: str, members: dict[str, tarfile.TarInfo], label: str
) -> tuple[tarfile.TarInfo, str]:
    """The member with the picture, and the label.

    Raises:
        ValueError: there is none, or several, of one of them; the message says which.
    """
    there = ", ".join(f".{ending}" for ending in members)
    pictures = [member for ending, member in members.items() if f".{ending}" in EXTENSIONS]
    if len(pictures) != 1:
        raise ValueError(f"{len(pictures) or 'no'} pictures ({', '.join(EXTENSIONS)}); it has {there}")
    found = members.get("cls") or members.get("json")
    if found is None:
        raise ValueError(f"the label is missing: .cls or .json; it has {there}")
    if found.size > _LARGEST_LABEL:
        raise ValueError(f"{found.name} has {found.size:,} bytes, too many for a label")
    stream = archive.extractfile(found)
    assert stream is not None, "it is a regular file"
    text = stream.read().decode("utf-8", "replace").strip()
    if "cls" not in members:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"{found.name} is not JSON") from None
        word = value.get(label) if isinstance(value, dict) else None
        if isinstance(word, bool) or not isinstance(word, int | str):
            raise ValueError(f"{found.name} has no number or word under {label!r} (data.module.params.label)")
        text = str(word).strip()
    if not text:
        raise ValueError(f"{found.name} is empty")
    return pictures[0], text


@dataclass(frozen=True)
class ShardSamples:
    """Samples in shards, in the order of the shards.

    Attributes:
        source: the shards.
        shards: of each sample the number of its shard, int32 (N,).
        offsets, sizes: of each picture in its file, int64 (N,).
        labels: int64 (N,).
    """

    source: Source
    shards: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, positions: np.ndarray) -> "ShardSamples":
        """The samples at these positions, int (n,), in this order."""
        parts = (self.shards, self.offsets, self.sizes, self.labels)
        return ShardSamples(self.source, *(part[positions] for part in parts))

    def prepare(self, position: int, spec: ImageSpec, max_pixels: int) -> np.ndarray:
        """One picture, uint8 (C, H, W).

        Raises:
            DataError: it cannot be read; the message names shard and member.
        """
        shard, offset, size = int(self.shards[position]), int(self.offsets[position]), int(self.sizes[position])
        try:
            return spec.decode(self.source.read(shard, offset, size), max_pixels).transpose(2, 0, 1)
        except (ImageError, OSError) as error:
            raise DataError(
                f"{self.named(position)}: cannot be used as an image. {error} "
                "data.module.params.on_bad_sample=skip leaves such samples out."
            ) from error

    def named(self, position: int) -> str:
        """Shard and member of a sample, for messages."""
        shard, offset = self.source.shards[int(self.shards[position])], int(self.offsets[position])
        with (
            contextlib.suppress(OSError, DataError, tarfile.TarError, StopIteration),
            os.fdopen(self.source.open(shard), "rb") as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            return f"{shard.name}, member {next(one.name for one in archive if one.offset_data == offset)}"
        return f"{shard.name}, the member at byte {offset}"


class ShardBatches(BatchIndices):
    """Training batches whose samples lie near each other: in each epoch the shards are in another order, each process
    has a part of it in which all samples follow each other, and every `window` of these are shuffled.

    The order follows from (seed, epoch, R) alone, whatever the number of loader workers. The parts differ by one sample
    at most, so a shard at a border is read by two processes. Each sample occurs once.

    Args:
        dataset: of `ShardSamples`.
        window: samples that are shuffled among each other.
        batch_size, num_replicas, rank, seed, drop_last: as of `BatchIndices`.
    """

    def __init__(self, dataset: Any, batch_size: int, window: int, **options: Any):
        super().__init__(dataset, batch_size, shuffle=True, **options)
        self.window = window

    def _order(self) -> np.ndarray:
        shards = self.dataset.samples.shards  # type: ignore[attr-defined]
        bits = np.random.MT19937(np.random.SeedSequence([self.seed, self.epoch], spawn_key=(4,)))
        random = np.random.RandomState(bits)
        place = random.permutation(int(shards.max()) + 1)  # of each shard in this epoch
        order = np.argsort(place[shards], kind="stable")
        found = np.empty(len(order), np.int64)
        start = 0
        for rank in range(self.num_replicas):  # rank r takes every R-th position from the r-th on
            size = len(range(rank, len(order), self.num_replicas))
            part = order[start : start + size]
            for at in range(0, size, self.window):
                part[at : at + self.window] = random.permutation(part[at : at + self.window])
            found[rank :: self.num_replicas] = part
            start += size
        return found


class Shards(ImageData):
    """Pictures of one class each in tar shards below `data.root`, a folder or an address such as `s3://BUCKET/FOLDER`.

    Without shards for validation or tests, samples of the training shards take their place, as with every `ImageData`.
    Pictures are decoded for each batch; `data.num_workers` does that in parallel.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        train: names of shards below `data.root`: `train-{000000..000099}.tar`, `train-*.tar`, or a list of such.
        validation, test: likewise; None: samples of the training shards.
        class_names: the name of each class, in the order of the numbers; None: the labels themselves, sorted.
        label: the key of the label in `KEY.json`; `KEY.cls` needs none.
        window: samples that are shuffled among each other, of consecutive shards.
        on_bad_sample: "error": a sample without a label, or whose picture cannot be decoded, ends the run, which names
            shard and member. "skip": it is left out and counted; to find such, all pictures are decoded once.
        image_size, mode, resize, mean, std, max_pixels: see `deeplightning.data.image_folder.ImageFolder`.
        augment, limit: see `deeplightning.data.images.ImageData`.

    Raises:
        DataConfigError: a value of the config is impossible. It is a ValueError.
    """

    def __init__(
        self,
        cfg: Any,
        train: str | Sequence[str],
        validation: str | Sequence[str] | None = None,
        test: str | Sequence[str] | None = None,
        *,
        class_names: Sequence[str] | None = None,
        label: str = "label",
        window: int = 10_000,
        on_bad_sample: Literal["error", "skip"] = "error",
        image_size: int | Sequence[int] = 64,
        mode: Literal["RGB", "L"] = "RGB",
        resize: Literal["crop", "stretch", "pad"] = "crop",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        max_pixels: int = MAX_PIXELS,
        augment: Sequence[nn.Module] = (),
        limit: int | None = None,
    ):
        usual = STATISTICS.get(mode, ((), ()))
        spec = ImageSpec(
            *height_width(image_size),
            mode=mode,
            resize=resize,
            mean=usual[0] if mean is None else tuple(mean),
            std=usual[1] if std is None else tuple(std),
        )
        super().__init__(cfg, spec, augment=augment, in_memory=False, limit=limit, max_pixels=max_pixels, cache=False)
        if cfg.data.root is None:
            raise DataConfigError("data.root is null, but Shards needs the folder or the address of the shards.")
        if not is_whole(window, 1):
            raise DataConfigError(f"data.module.params.window must be a number of at least 1, not {window!r}.")
        if on_bad_sample not in ("error", "skip"):
            raise DataConfigError(f"data.module.params.on_bad_sample must be error or skip, not {on_bad_sample!r}.")
        self.window, self.label, self.on_bad_sample = window, label, on_bad_sample
        self._given = None if class_names is None else [str(name) for name in class_names]
        if self._given is not None and (not self._given or len(set(self._given)) != len(self._given)):
            raise DataConfigError(f"data.module.params.class_names must be different names, not {class_names!r}.")
        self.class_names = list(self._given or [])
        named = {"train": train, "val": validation, "test": test}
        self._patterns = {
            split: self._expanded("validation" if split == "val" else split, patterns)
            for split, patterns in named.items()
            if patterns is not None
        }
        self._shards: dict[str, list[Shard]] = {}

    def _expanded(self, key: str, patterns: str | Sequence[str]) -> list[str]:
        given = [patterns] if isinstance(patterns, str) else list(patterns)
        where = f"data.module.params.{key}"
        if not given or not all(isinstance(pattern, str) and pattern for pattern in given):
            raise DataConfigError(
                f"{where} must be the name of a shard, a pattern or a list of such, not {patterns!r}."
            )
        try:
            names = [name for pattern in given for name in expand(pattern)]
        except ValueError as error:
            raise DataConfigError(f"{where}: {error}.") from None
        for name in names:
            if not name.endswith(".tar"):
                raise DataConfigError(f"{where}: {name} must end in .tar: shards are plain tar files, not compressed.")
            if name.startswith(("/", "~")) or ".." in name.split("/"):
                raise DataConfigError(f"{where}: {name} is not inside data.root.")
        if twice := [name for name in names if names.count(name) > 1] if len(names) < 10_000 else []:
            raise DataConfigError(f"{where}: {twice[0]} is named twice.")
        return names

    # ---- finding

    def check(self) -> None:
        """Finds the shards.

        Raises:
            DataError: one is missing, or a pattern matches none.
        """
        if self._shards:
            return
        root = self.cfg.data.root
        found = _at_address(root) if is_address(root) else _in_folder(Path(root).expanduser().absolute())
        there = sorted(found)
        shards: dict[str, list[Shard]] = {}
        for split, some in self._patterns.items():
            shards[split] = []
            for name in some:
                matching = fnmatch.filter(there, name) if _is_glob(name) else [name] * (name in found)
                if not matching:
                    near = f" It has {', '.join(there[:3])}{' …' if len(there) > 3 else ''}." if there else ""
                    raise DataError(
                        f"{_place(str(root))} has no shard {name} (data.module.params."
                        f"{'validation' if split == 'val' else split}; {sum(one in found for one in some)} of its "
                        f"{len(some)} names are there).{near}"
                    )
                shards[split] += [found[one] for one in matching]
        owner = dict[str, str]()
        for split, listed in shards.items():
            for shard in listed:
                if owner.setdefault(shard.name, split) != split:
                    raise DataConfigError(
                        f"{shard.name} is of {owner[shard.name]} and of {split}: a shard belongs to one set."
                    )
        self._shards = shards

    def read(self) -> dict[str, Any]:
        """
        Raises:
            DataError: a shard is damaged, or a sample not whole.
        """
        source = Source(str(self.cfg.data.root), [shard for some in self._shards.values() for shard in some])
        indices = iter(self._indices(source))
        parts, first = dict[str, tuple[list[Index], int]](), 0
        for split, shards in self._shards.items():
            parts[split] = ([next(indices) for _ in shards], first)
            first += len(shards)
        self._say_skipped([words for some, _ in parts.values() for index in some for words in index.skipped])
        if self._given is None:
            words = {word for index in parts["train"][0] for word in index.words}
            self.class_names = sorted(words, key=_by_number)
        found = {split: self._joined(source, split, *part) for split, part in parts.items()}
        return found if len(found) > 1 else {"all": found["train"]}

    def _joined(self, source: Source, split: str, indices: list[Index], first: int) -> ShardSamples:
        numbers = {name: number for number, name in enumerate(self.class_names)}
        if self._given is not None:  # labels may be their numbers
            numbers |= {str(number): number for number in range(len(self._given)) if str(number) not in numbers}
        labels = [np.array([numbers.get(word, -1) for word in index.words], np.int64)[index.codes] for index in indices]
        of_shard = [np.full(len(index.codes), shard, np.int32) for shard, index in enumerate(indices, first)]
        if not sum(map(len, of_shard)):
            raise DataError(f"{self._describe()}: the shards of {split} hold no sample.")
        samples = ShardSamples(
            source,
            np.concatenate(of_shard),
            np.concatenate([index.offsets for index in indices]),
            np.concatenate([index.sizes for index in indices]),
            np.concatenate(labels),
        )
        if (samples.labels < 0).any():
            unknown = next(word for index in indices for word in index.words if word not in numbers)
            raise DataError(
                f"{samples.named(int((samples.labels < 0).argmax()))}: its label {unknown!r:.60} is no class; there "
                f"are {', '.join(self.class_names):.200}."
            )
        return samples

    def _indices(self, source: Source) -> list[Index]:
        """Of each shard; those that have been made before are read."""
        from filelock import FileLock

        check = self.image_spec if self.on_bad_sample == "skip" else None
        code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        folder = _cache() / "index"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        spec = (check.height, check.width, check.mode, check.resize) if check else None
        found, read = [], 0
        with FileLock(folder / "lock"):  # of several processes one reads the headers
            for shard in source.shards:
                rule = (code, shard.name, shard.version, self.label, spec, self.max_pixels)
                path = folder / f"{hashlib.sha256(repr(rule).encode()).hexdigest()[:32]}.json"
                if (index := _kept(path)) is None:
                    if read % 100 == 0:
                        log.info("Reading the headers of %s, one of %d shards", shard.name, len(source.shards))
                    read += 1
                    index = index_of(source, shard, self.label, check, self.max_pixels)
                    _keep(path, index)
                found.append(index)
        return found

    def _say_skipped(self, skipped: list[str]) -> None:
        if skipped and (self.trainer is None or self.trainer.is_global_zero):
            more = f" and {len(skipped) - 20} more" if len(skipped) > 20 else ""
            log.warning("Skipped %d samples, which cannot be used: %s%s", len(skipped), ", ".join(skipped[:20]), more)

    # ---- batches

    def _prepare(self, samples: Any) -> OnDemand:
        return OnDemand(samples, self.image_spec, self.max_pixels)

    def _train_sampler(self) -> BatchIndices:
        if self._has_own_order:
            return super()._train_sampler()
        if self._sampler is None or not is_made_for(self._sampler, self.trainer):
            world, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
            place = {"num_replicas": world, "rank": rank, "seed": self.cfg.seed, "drop_last": self._drop_last}
            self._sampler = ShardBatches(self.dataset("train"), self.cfg.data.batch_size, self.window, **place)
            if len(self._shards["train"]) < world and rank == 0:
                log.warning(
                    "There are %d shards to learn from and %d processes: each shard is read by several of them. More, "
                    "smaller shards avoid that.",
                    *(len(self._shards["train"]), world),
                )
        if self.trainer:
            go_on(self._sampler, self.trainer)
        return self._sampler

    def _describe(self) -> str:
        return f"Shards in {_place(str(self.cfg.data.root))}"


def _by_number(word: str) -> tuple[bool, int, str]:
    """The order of labels: numbers by their value, then words."""
    is_number = word.isdecimal() and len(word) < 20
    return (not is_number, int(word) if is_number else 0, word)


def _place(root: str) -> str:
    return shown(root) if is_address(root) else root


def _is_glob(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _in_folder(root: Path) -> dict[str, Shard]:
    if not root.is_dir():
        raise DataError(f"Shards: {root} is not a folder. Set data.root to the one that holds the shards.")
    found = {}
    for path in sorted(root.rglob("*.tar")):
        status = path.stat()
        name = path.relative_to(root).as_posix()
        found[name] = Shard(name, path, repr(stat_of(status)), status.st_size)
    return found


def _at_address(root: str) -> dict[str, Shard]:
    folder = _cache() / "copies"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = {}
    for name, (path, size, version) in files_at(root, ())[1].items():
        if name.endswith(".tar"):
            digest = hashlib.sha256(repr((root, name, size, version)).encode()).hexdigest()[:32]
            found[name] = Shard(name, folder / f"{digest}.tar", repr((root, size, version)), size, path)
    return found


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplightning" / "shards"


def _kept(path: Path) -> Index | None:
    """An index that was made before; None: there is none that may be used."""
    try:
        with path.open("rb") as file:
            refuse_foreign(file.fileno(), path)
            found = json.load(file)
        arrays = {name: np.array(found[name], np.int64) for name in ("offsets", "sizes", "codes")}
        return Index(words=found["words"], skipped=found["skipped"], **arrays)
    except (OSError, ValueError, KeyError, TypeError, Unusable):
        return None


def _keep(path: Path, index: Index) -> None:
    values = {name: getattr(index, name).tolist() for name in ("offsets", "sizes", "codes")}
    values |= {"words": index.words, "skipped": index.skipped}
    with contextlib.suppress(OSError):  # the index is made again next time
        file, made = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with os.fdopen(file, "w") as stream:
                json.dump(values, stream)
            Path(made).rename(path)
        finally:
            Path(made).unlink(missing_ok=True)
