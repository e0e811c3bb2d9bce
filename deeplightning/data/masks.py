"""Load pictures with masks, a class for each pixel: two folders of files with the same names.

B batch, C channels, H height, W width of the prepared picture, K classes.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, uint8

from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.datasets import Batch, Samples
from deeplightning.data.images import ImageFiles
from deeplightning.data.loading import checked_names
from deeplightning.data.masked import NO_CLASS, MaskedSamples, Masks, code_of
from deeplightning.data.splits import set_folders
from deeplightning.image_spec import EXTENSIONS, files_below

log = logging.getLogger(__name__)


class MaskFolder(ImageFiles):
    """Pictures and masks in `data.root`, in one of two layouts; files may be in subfolders, hidden ones are ignored.

    - `images/*.jpg` and `masks/*.png`: split 80/10/10 by the seed.
    - `train/images/…` and `train/masks/…` and, optionally, `val/…` and `test/…`; the sets may also be called
      `Training`, `valid` and so on. Without `val`, or with `data.num_splits`, it is a tenth or a fold of `train`.

    Picture and mask have the same name except for the extension, and the same size after the picture's EXIF rotation.
    A mask is a PNG: grey, palette, one bit per pixel (0 and 255), or colour. It is resized like its picture, by nearest
    neighbour; pixels that padding or `RandomCrop` adds have no class.

    A batch is {"image": uint8 (B, C, H, W), "mask": uint8 (B, H, W), "index": int64 (B,)}; 255 in a mask is no class.
    Decoded files are not cached between runs.

    Args:
        cfg: the whole config.
        class_names: of class 0, 1 … in order; at most 255.
        ignore: the value or colour of pixels that are excluded from losses and metrics; None: no pixel is.
        augment: modules that move pixels, applied in turn to training batches on their device: those of
            `deeplightning.data.augment`. They get pictures with the mask as a last channel, uint8 (B, C + 1, H, W), so
            that both are moved alike. A module that changes colours would change classes.
        values: of the pixels of class 0, 1 … in the files: a number from 0 to 65535 (the index in a palette), or a
            colour [red, green, blue]. If any is a colour, palette pixels are compared by colour. None: 0, 1, 2 …
        options: see `deeplightning.data.images.ImageFiles`, such as image_size and limit.
    """

    has_labels = False

    def __init__(
        self,
        cfg: PartConfig,
        class_names: Sequence[str],
        ignore: int | Sequence[int] | None = NO_CLASS,
        values: Sequence[int | Sequence[int]] | None = None,
        **options: Any,
    ):
        super().__init__(cfg, **options, cache=False)
        self.class_names = names = checked_names(class_names, most=NO_CLASS)
        codes = list(range(len(names))) if values is None else _codes("values", values)
        if len(codes) != len(names) or len(set(codes)) < len(codes):
            raise DataConfigError(
                f"data.module.params.values must be {len(names)} different values, one for each of class_names, not "
                f"{values!r}."
            )
        ignored = None if ignore is None else _codes("ignore", [ignore])[0]
        if ignored in codes:
            raise DataConfigError(
                f"data.module.params.ignore must be null or a value that is not a class, not {ignore!r}, the value of "
                f"{names[codes.index(ignored)]}."
            )
        self.root = self.root_folder("images and masks")
        by_colour = any(not isinstance(value, int) for value in (*(values or ()), ignore) if value is not None)
        self._preparer = Masks(self.image_spec, self.max_pixels, codes, ignored, by_colour)

    def check(self) -> None:
        top = set_folders(self.root, "images").get("train", self.root)
        for name in ("images", "masks"):
            if not (top / name).is_dir():
                raise DataError(
                    f"{type(self).__name__}: {top} holds no folder `{name}`. Set data.root to the folder that holds "
                    "the pictures in `images`, and the masks, of the same names, in `masks`."
                )

    def example_batch(self, size: int) -> Batch:
        """Make up a batch, see `ImageData`; the mask contains every class and ignored pixels."""
        batch = super().example_batch(size)
        spec, classes = self.image_spec, len(self.class_names)
        shape = (size, spec.height, spec.width)
        values = torch.randint(classes + 1, shape, dtype=uint8, generator=Generator().manual_seed(1))
        mask = torch.where(values == classes, NO_CLASS, values).to(uint8)
        return {"image": batch["image"], "mask": mask, "index": batch["index"]}

    def read(self) -> dict[str, Samples]:
        sets = set_folders(self.root, "images")
        return {name: self._read(top) for name, top in (sets if "train" in sets else {"all": self.root}).items()}

    def _read(self, top: Path) -> Samples:
        """Find the pictures of one folder with their masks, sorted by name."""
        pictures, masks = pictures_and_masks(top)
        return MaskedSamples([*map(str, pictures)], np.zeros(len(pictures), dtype=np.int64), [*map(str, masks)])

    def _prepare_stage(self, stage: str | None) -> None:
        super()._prepare_stage(stage)
        if stage not in ("fit", None):
            return
        dataset, seen = self.dataset("train"), set[int]()
        for position in range(len(dataset)):  # usually stops at the first mask
            seen |= {*dataset[[position]]["mask"].unique().tolist()} - {NO_CLASS}
            if len(seen) > 1:
                return
        raise DataError(
            f"{self._describe()}: the {len(dataset)} training masks hold fewer than two classes. Check "
            "data.module.params: values lists the value of each class, and ignore names the value that does not count."
        )

    def on_after_batch_transfer(self, batch: Mapping[str, Tensor], dataloader_idx: int) -> object:
        """Move the pixels of training pictures and their masks at random, on the device."""
        if len(self._augment) == 0 or self.trainer is None or not self.trainer.training:
            return batch
        # Here classes start at 1 and 0 is no class, so the black pixels that a shift adds have no class.
        classes = (batch["mask"] + 1).unsqueeze(1)  # (B, 1, H, W); 255 + 1 is 0 in 8 bits
        moved = self._augment(torch.cat([batch["image"], classes], dim=1))
        if not isinstance(moved, torch.Tensor) or moved.dtype != uint8 or moved.shape[1] != batch["image"].shape[1] + 1:
            raise DataConfigError(
                "data.module.params.augment gets pictures with their masks as a last channel, and must return uint8 "
                "with the same number of channels."
            )
        return {**batch, "image": moved[:, :-1], "mask": moved[:, -1] - 1}


def _codes(param: str, values: Sequence[int | Sequence[int]]) -> list[int]:
    """Return the codes of the values of a parameter; raise DataConfigError if one is not a mask value."""
    try:
        return [code_of(value) for value in values]
    except (TypeError, ValueError) as error:
        raise DataConfigError(f"data.module.params.{param}: {error}, not {values!r}.") from None


def pictures_and_masks(top: Path) -> tuple[list[Path], list[Path]]:
    """Find the pictures in the subfolder `images`, and their masks in `masks`.

    Raises:
        DataError: there is no picture, or one has no mask.
    """
    pictures = _files_by_name(top / "images", EXTENSIONS)
    masks = _files_by_name(top / "masks", (".png",)) if (top / "masks").is_dir() else {}
    if not pictures:
        raise DataError(f"{top / 'images'} holds no picture ({', '.join(EXTENSIONS)}).")
    if without := [path for name, path in pictures.items() if name not in masks]:
        wanted = (top / "masks" / without[0].relative_to(top / "images")).with_suffix(".png")
        stem, present = without[0].stem, files_below(top / "masks") if (top / "masks").is_dir() else ()
        near = next((one for one in present if one.stem == stem or re.match(rf"{re.escape(stem)}[_-]", one.name)), None)
        hint = f" (there is {near.name}). A mask is a PNG with the picture's name" if near else ""
        raise DataError(f"{without[0]}: this picture has no mask; it would be {wanted}{hint}.")
    if unused := [path for name, path in masks.items() if name not in pictures]:
        log.warning("Ignored in %s: %d masks without a picture, such as %s", top, len(unused), unused[0])
    return [*pictures.values()], [masks[name] for name in pictures]


def _files_by_name(top: Path, endings: tuple[str, ...]) -> dict[str, Path]:
    """Find the files below a folder with one of these extensions, sorted, by their path without it; raise DataError if
    two files have the same name."""
    found: dict[str, Path] = {}
    for path in sorted(path for path in files_below(top) if path.name.lower().endswith(endings)):
        name = str(path.relative_to(top).with_suffix(""))
        if name in found:
            raise DataError(f"{path}: another file has this name, {found[name]}; each needs its own mask.")
        found[name] = path
    return found
