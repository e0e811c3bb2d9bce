"""Base of the image data modules: labelled samples go in, seeded splits and fast loaders of uint8 batches come out.

Your own data module subclasses `ImageData` and returns its samples from `read`.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor, nn, uint8

from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataConfigError, DataError, require_whole
from deeplightning.data.datasets import Batch, InMemory, OnDemand, Pictures, Prepare, Samples, prepare_all
from deeplightning.data.loading import SplitData
from deeplightning.image_spec import MAX_PIXELS, ImageSpec
from deeplightning.words import is_whole

_STATISTICS = {"RGB": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), "L": ((0.449,), (0.226,))}


class ImageData(SplitData):
    """Base of the image data modules.

    Loading draws no random numbers from torch, so results do not depend on `data.num_workers`.

    Image files are decoded once, on all cores, into a cache that all processes of this run and of later ones map into
    memory (`deeplightning.data.cache`; `deeplightning.data.cache_files` has its location, size and removal). Sets in
    the cache or in memory are loaded without workers: a batch is one indexing operation, cheaper than a transfer
    between processes. Workers are started by a fork server, since forking a process with threads may hang; scripts then
    need `if __name__ == "__main__":`. `data.loader.multiprocessing_context` changes the start method.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        image_spec: how images are prepared.
        augment: modules that map uint8 (B, C, H, W) to the same, applied in turn to training batches on their device.
        in_memory: true: each process keeps the prepared images in its memory; "device": also on its GPU; false: they
            come from the cache, or are prepared for each batch if there is none. None: like false if they are cached,
            otherwise like true if they take at most `loading.IN_MEMORY_LIMIT`. "auto": like None, and copied to the GPU
            after the first step if they take at most `SHARE_OF_GPU` of the memory that it leaves free.
        limit: use at most this many training samples (validation included), and test samples, chosen by the seed.
        max_pixels: largest image file that is decoded.
        cache: folder for decoded image files; true: the one that the environment variable `DEEPLIGHTNING_CACHE` names,
            or `deeplightning/images` in the user's cache folder; false: no cache.

    Attributes:
        image_spec: as given.
        class_names: the name of each label, in order; set by `setup`.
    """

    has_labels = True
    """Whether pictures have a label; otherwise they have a mask."""

    def __init__(
        self,
        cfg: PartConfig,
        image_spec: ImageSpec,
        *,
        augment: Sequence[nn.Module] = (),
        in_memory: bool | Literal["auto", "device"] | None = "auto",
        limit: int | None = None,
        max_pixels: int = MAX_PIXELS,
        cache: bool | str = True,
    ):
        super().__init__(cfg, in_memory, limit)
        self.image_spec, self.max_pixels, self.cache = image_spec, max_pixels, cache
        self.class_names: list[str] = []
        require_whole("max_pixels", max_pixels)
        for position, module in enumerate(augment):
            if not isinstance(module, nn.Module):
                raise DataConfigError(f"data.module.params.augment[{position}] must be an nn.Module, not {module!r}.")
        self._augment = nn.Sequential(*augment)
        if not augment and type(self).on_after_batch_transfer.__module__.startswith("deeplightning."):
            # So that Lightning calls the task's own; a bound method would keep this module alive.
            vars(self)["on_after_batch_transfer"] = partial(SplitData.on_after_batch_transfer, None)  # type: ignore
        self._preparer: Prepare = Pictures(image_spec, max_pixels)

    def example_batch(self, size: int) -> Batch:
        """Make up a batch to test whether the parts of a config fit together, without data and `setup`.

        Args:
            size: number of samples.

        Returns:
            A batch like those of a loader: random pixels, and labels from the first class to the last, or 0 as long as
            `class_names` is empty.
        """
        spec, last = self.image_spec, max(0, len(self.class_names) - 1)
        shape = (size, spec.channels, spec.height, spec.width)
        pixels = torch.randint(256, shape, dtype=uint8, generator=Generator().manual_seed(0))
        return {"image": pixels, "label": torch.linspace(0, last, size).round().long(), "index": torch.arange(size)}

    def _prepare(self, samples: Samples) -> InMemory | OnDemand:
        small = {"label": torch.from_numpy(samples.labels)} if self.has_labels else {}
        if self._decoded is not None:
            pixels, rows = self._decoded
            if self.in_memory:
                return InMemory({"image": pixels[rows[id(samples)]]}, small, None, samples)
            return InMemory({"image": pixels}, small, rows[id(samples)], samples)
        if self.in_memory is None:
            spec = self.image_spec
            self.in_memory = self._fits((spec.channels + (not self.has_labels)) * spec.height * spec.width)
        if self.in_memory:
            return InMemory(prepare_all(samples, self._preparer), small, None, samples)
        return OnDemand(samples, self._preparer, small)

    @cached_property
    def _decoded(self) -> tuple[Tensor, dict[int, Tensor]] | None:
        """The pictures of all sets, mapped from the cache, uint8 (R, C, H, W), and the rows of each set, int64 (N,), by
        the `id` of its samples; None if there is no cache, or the pictures are not files."""
        sets = [*self._samples.values()]
        if any(isinstance(getattr(samples, "items", None), np.ndarray) for samples in sets):
            return None
        from deeplightning.data.cache import decoded
        from deeplightning.data.cache_files import cache_folder

        if (folder := cache_folder(self.cache)) is None:
            return None
        paths = [path for samples in sets for path in samples.items]
        if (found := decoded(folder, self.image_spec, self.max_pixels, paths)) is None:
            return None
        rows = torch.from_numpy(found[1]).split([*map(len, sets)])
        with warnings.catch_warnings(action="ignore"):  # torch warns that mapped pixels are read-only
            return torch.from_numpy(found[0]), {id(samples): part for samples, part in zip(sets, rows, strict=True)}

    def sample(self, split: str, position: int) -> dict[str, Any]:
        """Return the picture as the network gets it, uint8 (C, H, W), and the name of its file below `data.root`."""
        samples, found = self._samples[split], {"image": self.dataset(split)[[position]]["image"][0].numpy()}
        if hasattr(samples, "named"):
            return found | {"name": samples.named(position)}
        if isinstance(samples.items, np.ndarray):
            return found
        path, root = Path(samples.items[position]), self.cfg.data.root
        if root is not None and path.is_relative_to(top := Path(root).expanduser().absolute()):
            return found | {"name": str(path.relative_to(top))}
        return found | {"name": path.name}

    def on_after_batch_transfer(self, batch: Mapping[str, Tensor], dataloader_idx: int) -> object:
        """Apply random augmentation to training images, on the device."""
        if len(self._augment) == 0 or self.trainer is None or not self.trainer.training:
            return batch
        images = self._augment(batch["image"])
        found = images.dtype if isinstance(images, torch.Tensor) else type(images).__name__
        if found != uint8:
            raise DataConfigError(f"data.module.params.augment must return uint8 images, not {found}.")
        return {**batch, "image": images}


class ImageFiles(ImageData):
    """Base of the data modules whose pictures are files in `data.root`.

    Args:
        cfg: the whole config.
        image_size: pixels, one number for a square or [height, width].
        mode: "RGB" or "L" (grey).
        resize: "crop", "stretch" or "pad", see `deeplightning.image_spec.ImageSpec`.
        mean: per channel, on the scale 0 to 1; None: ImageNet's, as pretrained networks expect, or its average over the
            channels for grey pictures.
        std: per channel, on the scale 0 to 1; None: as `mean`.
        options: augment, in_memory, limit, max_pixels and cache of `ImageData`.
    """

    def __init__(
        self,
        cfg: PartConfig,
        image_size: int | Sequence[int] = 64,
        mode: Literal["RGB", "L"] = "RGB",
        resize: Literal["crop", "stretch", "pad"] = "crop",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **options: Any,
    ):
        default = _STATISTICS.get(mode, ((), ()))
        means, deviations = default[0] if mean is None else tuple(mean), default[1] if std is None else tuple(std)
        super().__init__(cfg, ImageSpec(*height_width(image_size), mode, resize, means, deviations), **options)


class DownloadedImages(ImageData):
    """Base of the data modules whose files torchvision downloads into `data.root`.

    Args:
        cfg: the whole config; `data.root` is read, too.
        image_spec: how images are prepared.
        download: download missing files.
        options: see `deeplightning.data.images.ImageData`.

    Raises:
        DataConfigError: `data.root` is null, or see `ImageData`.
    """

    source: str
    needed: Sequence[str]
    """The files that are read, relative to `data.root`."""

    remedy = "download it: data.module.params.download=true"

    def __init__(self, cfg: PartConfig, image_spec: ImageSpec, download: bool, **options: Any):
        super().__init__(cfg, image_spec, **options)
        self.root = self.root_folder(f"{self.needed[0]}, or a folder to download it to")
        self._required_paths = {name: self.root / name for name in self.needed}
        self.download = download

    def fetch(self) -> None:
        """Download missing files with torchvision's class `source`."""
        from torchvision import datasets

        getattr(datasets, self.source)(str(self.root), download=True)

    def check(self) -> None:
        if not self.download:
            super().check()

    def setup(self, stage: str | None = None) -> None:
        super().check()
        super().setup(stage)

    def prepare_data(self) -> None:
        """Download under a lock, so that only one of the processes that share the folder does it."""
        self.check()
        is_complete = all(path.is_file() for path in self._required_paths.values())
        if not self.download or (is_complete and not os.access(self.root, os.W_OK)):
            return
        from filelock import FileLock

        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / f".{type(self).__name__}.lock"):
                if not all(path.is_file() for path in self._required_paths.values()):
                    self.fetch()
        except (OSError, RuntimeError) as error:  # RuntimeError: torchvision's, for a wrong hash or no mirror left
            raise DataError(f"{type(self).__name__} cannot be downloaded into {self.root}: {error}") from error


def height_width(image_size: int | Sequence[int]) -> tuple[int, int]:
    """Return `image_size` of a config as (height, width); raise DataConfigError unless it is one size or two."""
    sides = image_size if isinstance(image_size, Sequence) else (image_size, image_size)
    if len(sides) != 2 or not all(is_whole(side, 1) for side in sides):
        raise DataConfigError(
            "data.module.params.image_size must be a whole number of pixels of at least 1, or [height, width], "
            f"not {image_size!r}."
        )
    return sides[0], sides[1]
