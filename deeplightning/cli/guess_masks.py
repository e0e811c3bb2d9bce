"""Find the classes and the ignored value in masks of pictures, for the config of a new project."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deeplightning.cli.guess import Guess, errors_of_data, evenly, folders, require_folder, some, stages
from deeplightning.cli.guess_pictures import examine_pictures
from deeplightning.config.target import find
from deeplightning.faults import SetupError

MAX_NUMBERED, MAX_VALUES = 200, 32
"""Maximum number of classes in masks whose values are numbered from 0, and in others: more are smoothed edges."""


def segmentation(data: Path) -> Guess:
    """Inspect the folders `images` and `masks`, or `train` and perhaps `val` and `test` with these.

    Raises:
        SetupError: the data are something else.
    """
    require_folder(data)
    found: Any = find("deeplightning.data.splits.set_folders")
    sets = found(data, "images")
    sets = sets if "train" in sets else {}
    top = sets.get("train", data)
    for name in ("images", "masks"):
        if not (top / name).is_dir():
            found_names = ", ".join(folders(top)[:8]) or "none"
            raise SetupError(
                f"{top} holds no folder `{name}` (its folders: {found_names}); put the pictures into `images`, and the "
                "masks, PNG files of the same names with a value or colour for each class, into `masks`"
            )
    with errors_of_data():
        pair: Any = find("deeplightning.data.masks.pictures_and_masks")
        pairs = [pair(each) for each in sets.values() or [top]]  # training reads each set, train first
        files, masks = pairs[0]
        picture_values, seen, bad = examine_pictures(files, multiple=8)
        if bad:
            raise SetupError(f"{top / 'images'} holds pictures that cannot be decoded: {some(bad)}; remove them")
        examined = evenly([*zip(files, masks, strict=True)])
        values, ignore, notes = _values_of(examined, top, is_whole=not sets and len(examined) == len(files))
    if inner := [each.name for each in found(top / "images").values()]:
        notes.append(f"{top / 'images'} holds the folders {some(inner)}; for sets, put `images` and `masks` into them")
    names = [f"class_{number}" for number in range(len(values))]
    which, left_out = stages(data, sets, len(files))
    of_data = {
        "stages": which,
        "count": len(files),
        "number": len(names),
        "names": names,
        "values": None if values == [*range(len(values))] else values,
        "ignore": ignore,
        **picture_values,
    }
    notes += ["write the names of the classes in data.module.params.class_names", *seen, *left_out]
    return Guess(of_data, notes, files[0])


def _values_of(
    files: Sequence[tuple[Path, Path]], top: Path, is_whole: bool
) -> tuple[list[Any], int | None, list[str]]:
    """Return the value of each class in the masks of some pictures in the folder `top`, or of all if `is_whole`, the
    ignored value, and notes.

    255 is ignored if the other values are numbered from 0 upwards, and is a class otherwise. The value is the index in
    a palette, unless one index has several colours or other masks have colours.

    Raises:
        SetupError: a mask cannot be read, or the masks have only one value, or too many.
        DataError: a mask and its picture have different sizes.
    """
    import numpy as np
    from PIL import Image

    from deeplightning.image_spec import shown_size

    check_size: Any = find("deeplightning.data.masked.check_size")
    read_codes: Any = find("deeplightning.data.masked.read_codes")
    value_of: Any = find("deeplightning.data.masked.value_of")
    codes, colours, palettes, alphas = set[int](), set[int](), set[tuple[int, int]](), set[int]()
    bare = 0
    for path, mask in files:
        try:
            with Image.open(path) as picture, Image.open(mask) as opened:
                check_size(str(mask), opened.size, str(path), shown_size(picture))
                found, first = np.unique(read_codes(opened, by_colour=False), return_index=True)
                as_colours = read_codes(opened, by_colour=True).ravel()[first]
                palettes |= {*zip(found.tolist(), as_colours.tolist(), strict=True)} if opened.mode == "P" else set()
                alphas |= {*opened.getchannel("A").getextrema()} if "A" in opened.getbands() else set()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise SetupError(f"{mask}: the mask of {path} cannot be read: {error}") from None
        codes |= {*found.tolist()}
        bare += {*found.tolist()} == {0, 255}
        colours |= {*as_colours.tolist()}
    folder, differ = top / "masks", len({index for index, _ in palettes}) < len(palettes)
    by_colour = differ or any(not isinstance(value_of(code, by_colour=False), int) for code in codes)
    notes = [f"the palettes in {folder} differ, so a class is a colour there, not an index"] if differ else []
    seen = sorted(colours if by_colour else codes)
    ignore = 255 if not by_colour and 255 in seen and _are_numbered(sorted({*seen} - {255})) else None
    kinds = [code for code in seen if code != ignore]
    is_numbered = not by_colour and _are_numbered(kinds)
    if is_numbered and not is_whole:
        kinds = [*range(kinds[-1] + 1)]  # masks that were not examined may have the missing values
    values = [value_of(code, by_colour=by_colour) for code in kinds]
    shown = some(values) + " (their alpha channel, which differs, is not read; save it as grey)" * (len(alphas) > 1)
    if len(values) < 2:
        raise SetupError(f"the masks in {folder} hold only one value, {shown}; they must hold two classes or more")
    dark, light = ([code for code in kinds if low <= code <= high] for low, high in ((0, 32), (223, 255)))
    is_noise = min(len(dark), len(light)) > 1 and len(dark) + len(light) == len(kinds)  # black and white in a JPEG
    if is_noise or len(values) > (MAX_NUMBERED if is_numbered else MAX_VALUES):
        raise SetupError(
            f"the masks in {folder} hold too many values for classes: {shown}; save them without smoothed edges, "
            "with one value or colour for each class"
        )
    found_by, left_out = "colours" if by_colour else "values", "" if ignore is None else f"; {ignore} does not count"
    if ignore is not None and bare:
        left_out += f" ({bare} masks hold only 0 and 255; if 255 is a class there, write its number)"
    return values, ignore, [f"{len(values)} classes, by the {found_by} in {folder}: {some(values)}{left_out}", *notes]


def _are_numbered(values: list[int]) -> bool:
    """Return whether sorted values are the numbers of two or more classes from 0 upwards; some may be missing."""
    return len(values) > 1 and values[0] == 0 and values[-1] < 2 * len(values)
