"""A user's own pictures: one folder per class, with or without `train`, `val` and `test` folders above."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.datasets import Batch, Samples, in_threads, report_messages
from deeplightning.data.images import ImageFiles, endings
from deeplightning.image_spec import EXTENSIONS, ImageError, files_below

_NAMED = 20  # files that a warning names, of those that it counts

log = logging.getLogger(__name__)


class ImageFolder(ImageFiles):
    """Pictures in `data.root`, in one of two layouts; images may also lie deeper, and hidden files do not count.

    - `CLASS/*.jpg`: divided 80/10/10 within each class by the seed.
    - `train/CLASS/*.jpg`, and where there are such `val/…` and `test/…` with the same classes. Without `val`, or with
      `data.num_splits`, a tenth or a fold of `train` validates. It is this layout when `train` holds folders and no
      image, so that trains may also be a class.

    The classes are the names of the folders, sorted. Files without an image's ending are ignored.

    Args:
        cfg: the whole config.
        args, options: see `deeplightning.data.images.ImageFiles`, such as image_size.
        extensions: endings of image files, with their dot.
        on_bad_image: what becomes of a file that cannot be decoded. "error": the run ends and names it. "skip": it is
            left out, of every set and on every process, and one warning names such files; to find them, the first
            process decodes all images at each start.
    """

    def __init__(
        self,
        cfg: PartConfig,
        *args: Any,
        extensions: Sequence[str] = EXTENSIONS,
        on_bad_image: Literal["error", "skip"] = "error",
        **options: Any,
    ):
        super().__init__(cfg, *args, **options)
        if on_bad_image not in ("error", "skip"):
            raise DataConfigError(f"data.module.params.on_bad_image must be error or skip, not {on_bad_image!r}.")
        self.root, self.extensions = self.root_folder("the images"), endings(extensions)
        self.on_bad_image = on_bad_image

    def check(self) -> None:
        if not self.root.is_dir():
            raise DataError(
                f"ImageFolder: {self.root} is not a folder. Set data.root to the one that holds the images."
            )
        top = self.root / "train" if self._is_divided() else self.root
        if not _folders(top):
            raise DataError(
                f"ImageFolder: {top} holds no folder. Put the images of each class into a folder of the class's name."
            )

    def example_batch(self, size: int) -> Batch:
        """As of every `ImageData`; the classes are those of the folders, where `data.root` is there."""
        if self.root.is_dir():
            self.class_names = _folders(self.root / "train" if self._is_divided() else self.root)
        return super().example_batch(size)

    def read(self) -> dict[str, Samples]:
        found = self._find()
        return found if self.on_bad_image == "error" else self._without_bad(found)

    def _find(self) -> dict[str, Samples]:
        """All files of each set."""
        if not self._is_divided():
            self.class_names = _folders(self.root)
            return {"all": self._read(self.root, complete=True)}
        train = self.root / "train"
        self.class_names = _folders(train)
        sets = {"train": self._read(train, complete=True)}
        others = _folders(self.root)
        for split in ("val", "test"):
            if split in others:
                self._require_same_classes(self.root / split)
                sets[split] = self._read(self.root / split)
        if unknown := sorted(set(others) - {"train", "val", "test"}):
            log.warning("Ignored in %s, beside train, val and test: %s", self.root, ", ".join(unknown))
        return sets

    def _is_divided(self) -> bool:
        train = self.root / "train"
        return train.is_dir() and bool(_folders(train)) and not any(map(self._is_image, train.iterdir()))

    def _is_image(self, path: Path) -> bool:
        return path.is_file() and not path.name.startswith(".") and path.name.lower().endswith(self.extensions)

    def _read(self, folder: Path, complete: bool = False) -> Samples:
        """All images of one folder of classes; `complete`: each class must have one."""
        paths: list[str] = []
        labels: list[int] = []
        ignored = 0
        for label, name in enumerate(self.class_names):
            files = list(files_below(folder / name))
            images = sorted(str(path) for path in files if path.name.lower().endswith(self.extensions))
            ignored += len(files) - len(images)
            if complete and not images:
                raise DataError(
                    f"ImageFolder: {folder / name} holds no image ({', '.join(self.extensions)}). "
                    "Put some there, or remove the folder."
                )
            paths += images
            labels += [label] * len(images)
        if not paths:
            raise DataError(f"ImageFolder: {folder} holds no image ({', '.join(self.extensions)}).")
        if ignored:
            log.info("Ignored in %s: %d files that do not have the ending of an image", folder, ignored)
        return Samples(paths, np.array(labels, dtype=np.int64))

    def _without_bad(self, found: dict[str, Samples]) -> dict[str, Samples]:
        """The sets without the files that cannot be decoded."""
        trainer, bad = self.trainer, dict[str, str]()
        if trainer is None or trainer.world_size == 1 or trainer.is_global_zero:
            paths = [path for samples in found.values() for path in samples.items]
            bad = {path: reason for path, reason in in_threads(self._fault_of, paths) if reason is not None}
        if trainer is not None and trainer.world_size > 1:
            bad = trainer.strategy.broadcast(bad)  # else a disk that stumbles would give processes different sets
        if not bad:
            return found
        named = [f"{path} ({reason})" for path, reason in list(bad.items())[:_NAMED]]
        log.warning(
            "Skipped %d of %d images, which cannot be decoded: %s%s",
            len(bad),
            sum(map(len, found.values())),
            ", ".join(named),
            f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else "",
        )
        kept = {}
        for name, samples in found.items():
            kept[name] = samples.take(np.flatnonzero([path not in bad for path in samples.items]))
            left = set(kept[name].labels.tolist())
            gone = [label for label in range(len(self.class_names)) if label not in left]
            if gone and (name in ("all", "train") or not left):
                raise DataError(
                    f"ImageFolder: no image of the class {self.class_names[gone[0]]} in {self.root} can be decoded. "
                    "Put some into its folder, or remove that."
                )
        return kept

    def _fault_of(self, path: str) -> str | None:
        """Why a file cannot be decoded, in words; None: it can."""
        try:
            self.image_spec.decode(path, self.max_pixels)
        except (ImageError, OSError) as error:
            return str(error).rstrip(".")
        finally:
            report_messages(path)
        return None

    def _require_same_classes(self, folder: Path) -> None:
        found = _folders(folder)
        if found != self.class_names:
            missing, more = (sorted(set(a) - set(b)) for a, b in ((self.class_names, found), (found, self.class_names)))
            faults = [
                f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("unknown", more)) if names
            ]
            raise DataError(
                f"ImageFolder: {folder} must have the same classes as {self.root / 'train'} ({'; '.join(faults)})."
            )


def _folders(path: Path) -> list[str]:
    """Names of the folders in a folder, sorted, without hidden ones."""
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
