"""Load pictures from tar shards: batches read the bytes of samples, shard after shard.

N samples, R processes.
"""

import contextlib
import fnmatch
import logging
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.images import ImageFiles
from deeplightning.data.samplers import BatchIndices
from deeplightning.data.train_sampler import replicas, resume_sampler
from deeplightning.image_spec import ImageError, ImageSpec
from deeplightning.words import is_address, is_whole
from deeplightning_shards.addresses import without_query
from deeplightning_shards.tar_files import Index, Shard, Source, at_address, expand, in_folder, indices_of

if TYPE_CHECKING:
    from deeplightning.config.part_config import PartConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardSamples:
    """Samples in shards, in the order of the shards.

    Attributes:
        source: the shards.
        shards: the number of each sample's shard, int32 (N,).
        offsets, sizes: the position of each picture in its shard, int64 (N,).
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
        """Return the samples at these positions, int (n,), in this order."""
        parts = (self.shards, self.offsets, self.sizes, self.labels)
        return ShardSamples(self.source, *(part[positions] for part in parts))

    def prepare(self, position: int, spec: ImageSpec, max_pixels: int) -> np.ndarray:
        """Return one picture, uint8 (C, H, W).

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
        """Return the shard and member of a sample, for messages."""
        shard, offset = self.source.shards[int(self.shards[position])], int(self.offsets[position])
        with (
            contextlib.suppress(OSError, DataError, tarfile.TarError, StopIteration),
            os.fdopen(self.source.open(shard), "rb") as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
        ):
            return f"{shard.name}, member {next(one.name for one in archive if one.offset_data == offset)}"
        return f"{shard.name}, the member at byte {offset}"


class ShardBatches(BatchIndices):
    """Draw training batches of nearby samples.

    Each epoch permutes the shards and gives each process a contiguous part of their samples, shuffled in windows of
    `window` samples. The order depends only on (seed, epoch, R), not on the number of loader workers. The sizes of the
    parts differ by at most one, so a shard at a border is read by two processes. Each sample occurs once.

    Args:
        dataset: a dataset of `ShardSamples`.
        window: number of consecutive samples that are shuffled together.
        batch_size, num_replicas, rank, seed, drop_last: as for `BatchIndices`.
    """

    def __init__(self, dataset: Any, batch_size: int, window: int, **options: Any):
        super().__init__(dataset, batch_size, shuffle=True, **options)
        self.window = window

    def _order(self) -> np.ndarray:
        shards = self.dataset.samples.shards  # type: ignore[attr-defined]
        bits = np.random.MT19937(np.random.SeedSequence([self.seed, self.epoch], spawn_key=(4,)))
        random = np.random.RandomState(bits)
        position = random.permutation(int(shards.max()) + 1)  # of each shard in this epoch
        order = np.argsort(position[shards], kind="stable")
        interleaved = np.empty(len(order), np.int64)
        start = 0
        for rank in range(self.num_replicas):  # rank r takes positions r, r + R, r + 2 R, …
            size = len(range(rank, len(order), self.num_replicas))
            part = order[start : start + size]
            for first in range(0, size, self.window):
                part[first : first + self.window] = random.permutation(part[first : first + self.window])
            interleaved[rank :: self.num_replicas] = part
            start += size
        return interleaved


class Shards(ImageFiles):
    """Pictures of one class each in tar shards below `data.root`, a folder or an address such as `s3://BUCKET/FOLDER`.

    Without shards for validation or test, samples of the training shards are held out, as in every `ImageData`.
    Pictures are decoded when a batch is loaded, in parallel with `data.num_workers`.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        train: names of shards below `data.root`: `train-{000000..000099}.tar`, `train-*.tar`, or a list of these.
        validation, test: the same; None: samples held out from the training shards.
        class_names: names of the classes, in the order of their numbers; None: the labels, sorted.
        label: the key of the label in `KEY.json`; `KEY.cls` needs none.
        window: number of consecutive samples that are shuffled together.
        on_bad_sample: "error": a sample without a label, or whose picture cannot be decoded, ends the run and names
            shard and member. "skip": such samples are skipped and counted; this decodes all pictures once.
        options: see `deeplightning.data.images.ImageFiles`, such as image_size, augment and limit.

    Raises:
        DataConfigError: a config value is invalid. It is a ValueError.
    """

    def __init__(
        self,
        cfg: "PartConfig",
        train: str | Sequence[str],
        validation: str | Sequence[str] | None = None,
        test: str | Sequence[str] | None = None,
        *,
        class_names: Sequence[str] | None = None,
        label: str = "label",
        window: int = 10_000,
        on_bad_sample: Literal["error", "skip"] = "error",
        **options: Any,
    ):
        super().__init__(cfg, **options, in_memory=False, cache=False)
        if cfg.data.root is None:
            raise DataConfigError("data.root is null, but Shards needs the folder or the address of the shards.")
        self._root = cfg.data.root
        if not is_whole(window, 1):
            raise DataConfigError(f"data.module.params.window must be a number of at least 1, not {window!r}.")
        if on_bad_sample not in ("error", "skip"):
            raise DataConfigError(f"data.module.params.on_bad_sample must be error or skip, not {on_bad_sample!r}.")
        self.window, self.label, self.on_bad_sample = window, label, on_bad_sample
        self._names = None if class_names is None else [str(name) for name in class_names]
        if self._names is not None and (not self._names or len(set(self._names)) != len(self._names)):
            raise DataConfigError(f"data.module.params.class_names must be different names, not {class_names!r}.")
        self.class_names = list(self._names or [])
        named = {"train": train, "val": validation, "test": test}
        self._patterns = {
            split: self._expand("validation" if split == "val" else split, patterns)
            for split, patterns in named.items()
            if patterns is not None
        }
        self._shards: dict[str, list[Shard]] = {}

    def _expand(self, key: str, patterns: str | Sequence[str]) -> list[str]:
        given = [patterns] if isinstance(patterns, str) else list(patterns)
        where = f"data.module.params.{key}"
        if not given or not all(isinstance(pattern, str) and pattern for pattern in given):
            raise DataConfigError(
                f"{where} must be the name of a shard, a pattern or a list of these, not {patterns!r}."
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
        return names

    # ---- discovery and index

    def check(self) -> None:
        """Find the shards.

        Raises:
            DataError: a shard is missing, or a pattern matches none.
        """
        if self._shards:
            return
        root = self._root
        found = at_address(root) if is_address(root) else in_folder(Path(root).expanduser().absolute())
        names = sorted(found)
        shards: dict[str, list[Shard]] = {}
        for split, some in self._patterns.items():
            shards[split] = []
            for name in some:
                matching = fnmatch.filter(names, name) if _is_glob(name) else [name] * (name in found)
                if not matching:
                    near = f" It has {', '.join(names[:3])}{' …' if len(names) > 3 else ''}." if names else ""
                    raise DataError(
                        f"{_readable_root(str(root))} has no shard {name} (data.module.params."
                        f"{'validation' if split == 'val' else split}; {sum(one in found for one in some)} of its "
                        f"{len(some)} names exist).{near}"
                    )
                shards[split] += [found[one] for one in matching]
        owner = dict[str, str]()
        for split, listed in shards.items():
            for shard in listed:
                if shard.name in owner:
                    both = f"in both {owner[shard.name]} and {split}: a shard belongs to one set"
                    raise DataConfigError(f"{shard.name} is {'named twice' if owner[shard.name] == split else both}.")
                owner[shard.name] = split
        self._shards = shards

    def read(self) -> dict[str, Any]:
        """Return the samples of each set.

        Raises:
            DataError: a shard is damaged, or a sample is incomplete.
        """
        source = Source(str(self.cfg.data.root), [shard for some in self._shards.values() for shard in some])
        check = self.image_spec if self.on_bad_sample == "skip" else None
        indices = iter(indices_of(source, self.label, check, self.max_pixels))
        parts, first = dict[str, tuple[list[Index], int]](), 0
        for split, shards in self._shards.items():
            parts[split] = ([next(indices) for _ in shards], first)
            first += len(shards)
        self._log_skipped([words for some, _ in parts.values() for index in some for words in index.skipped])
        if self._names is None:
            words = {word for index in parts["train"][0] for word in index.words}
            self.class_names = sorted(words, key=_label_sort_key)
        found = {split: self._join(source, split, *part) for split, part in parts.items()}
        return found if len(found) > 1 else {"all": found["train"]}

    def _join(self, source: Source, split: str, indices: list[Index], first: int) -> ShardSamples:
        numbers = {name: number for number, name in enumerate(self.class_names)}
        if self._names is not None:  # a label may also be the number of its class
            numbers |= {str(number): number for number in range(len(self._names)) if str(number) not in numbers}
        labels = [np.array([numbers.get(word, -1) for word in index.words], np.int64)[index.codes] for index in indices]
        of_shard = [np.full(len(index.codes), shard, np.int32) for shard, index in enumerate(indices, first)]
        if not sum(map(len, of_shard)):
            raise DataError(f"{self._describe()}: the shards of {split} contain no samples.")
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
                f"{samples.named(int((samples.labels < 0).argmax()))}: its label {unknown!r:.60} is not a class; the "
                f"classes are {', '.join(self.class_names):.200}."
            )
        return samples

    def _log_skipped(self, skipped: list[str]) -> None:
        if skipped and (self.trainer is None or self.trainer.is_global_zero):
            more = f" and {len(skipped) - 20} more" if len(skipped) > 20 else ""
            log.warning("Skipped %d unusable samples: %s%s", len(skipped), ", ".join(skipped[:20]), more)

    # ---- batches

    def _train_sampler(self) -> BatchIndices:
        if getattr(self.cfg.data, "sampler", None) is not None:
            return super()._train_sampler()
        if self._sampler is None or self._sampler.made_for != replicas(self.trainer):
            world, rank = replicas(self.trainer)
            place = {"num_replicas": world, "rank": rank, "seed": self.cfg.seed, "drop_last": self._drop_last}
            self._sampler = ShardBatches(self.dataset("train"), self.cfg.data.batch_size, self.window, **place)
            if len(self._shards["train"]) < world and rank == 0 and getattr(self.trainer, "is_global_zero", True):
                log.warning(
                    "There are %d training shards for %d processes, so several processes read each shard. More, "
                    "smaller shards avoid that.",
                    *(len(self._shards["train"]), world),
                )
        if self.trainer:
            resume_sampler(self._sampler, self.trainer)
        return self._sampler

    def _describe(self) -> str:
        return f"Shards in {_readable_root(str(self.cfg.data.root))}"


def _label_sort_key(word: str) -> tuple[bool, int, str]:
    """Return the sort key of a label: numbers by value come before words."""
    is_number = word.isdecimal() and len(word) < 20
    return (not is_number, int(word) if is_number else 0, word)


def _readable_root(root: str) -> str:
    return without_query(root) if is_address(root) else root


def _is_glob(name: str) -> bool:
    return any(sign in name for sign in "*?[")
