"""Load a user's own pictures: one folder per class, with or without `train`, `val` and `test` folders above."""

import contextlib
import logging
from typing import Any, Literal

import numpy as np

from deeplightning.config.part_config import PartConfig
from deeplightning.data.class_folders import ClassFolders
from deeplightning.data.data_errors import DataError
from deeplightning.data.datasets import Batch, Samples, in_threads
from deeplightning.data.images import ImageFiles
from deeplightning.image_spec import EXTENSIONS, ImageError

_MAX_NAMED = 20  # maximum number of files that a warning names

log = logging.getLogger(__name__)


class ImageFolder(ImageFiles):
    """Pictures in `data.root`, in one of two layouts; images may be in subfolders, and hidden files are ignored.

    - `CLASS/*.jpg`: split 80/10/10 within each class by the seed.
    - `train/CLASS/*.jpg` and, optionally, `val/…` and `test/…` with the same classes. Without `val`, or with
      `data.num_splits`, a tenth or a fold of `train` is for validation. This layout is assumed if `train` contains
      folders and no image, so that `train` may also be a class.

    The classes are the names of the folders, sorted. Files without an image extension are ignored.

    Args:
        cfg: the whole config.
        args, options: see `deeplightning.data.images.ImageFiles`, such as image_size.
        on_bad_image: how to treat a file that cannot be decoded. "error": raise an error. "skip": leave it out of every
            set on every process, with one warning that names such files; to find them, the first process decodes all
            images at each start.
    """

    def __init__(self, cfg: PartConfig, *args: Any, on_bad_image: Literal["error", "skip"] = "error", **options: Any):
        super().__init__(cfg, *args, **options)
        self.root = self.root_folder("the images")
        self.folders = ClassFolders(self.root, "image", EXTENSIONS)
        self.on_bad_image = on_bad_image

    def check(self) -> None:
        self.folders.classes()

    def example_batch(self, size: int) -> Batch:
        """Return a made-up batch, see `ImageData`; the classes are those of the folders if `data.root` exists."""
        with contextlib.suppress(DataError):
            self.class_names = self.folders.classes()
        return super().example_batch(size)

    def read(self) -> dict[str, Samples]:
        self.class_names = self.folders.classes()
        found = {name: Samples(*files) for name, files in self.folders.find().items()}
        return found if self.on_bad_image == "error" else self._without_bad(found)

    def _without_bad(self, found: dict[str, Samples]) -> dict[str, Samples]:
        """Return the sets without the files that cannot be decoded."""
        trainer, bad = self.trainer, dict[str, str]()
        if trainer is None or trainer.world_size == 1 or trainer.is_global_zero:
            paths = [path for samples in found.values() for path in samples.items]
            bad = {path: reason for path, reason in in_threads(self._decoding_error, paths) if reason is not None}
        if trainer is not None and trainer.world_size > 1:
            bad = trainer.strategy.broadcast(bad)  # a transient disk error must not give processes different sets
        if not bad:
            return found
        named = [f"{path} ({reason})" for path, reason in list(bad.items())[:_MAX_NAMED]]
        more = f" and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
        message = "Skipped %d of %d images, which cannot be decoded: %s%s"
        log.warning(message, len(bad), sum(map(len, found.values())), ", ".join(named), more)
        kept = {}
        for name, samples in found.items():
            kept[name] = samples.take(np.flatnonzero([path not in bad for path in samples.items]))
            lost = {*samples.labels.tolist()} - {*kept[name].labels.tolist()}
            if lost and (name in ("all", "train") or not len(kept[name])):
                raise DataError(
                    f"ImageFolder: no image of the class {self.class_names[min(lost)]} in {self.root} can be decoded."
                )
        return kept

    def _decoding_error(self, path: str) -> str | None:
        """Return the reason why a file cannot be decoded, or None if it can."""
        try:
            self.image_spec.decode(path, self.max_pixels)
        except (ImageError, OSError) as error:
            return str(error).rstrip(".")
        return None
