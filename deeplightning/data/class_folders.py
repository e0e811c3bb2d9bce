"""Find the files in a folder with one subfolder per class, with or without `train`, `val` and `test` above."""

import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deeplightning.data.data_errors import DataError
from deeplightning.data.splits import set_folders
from deeplightning.image_spec import files_below

log = logging.getLogger("deeplightning.data")


@dataclass(frozen=True)
class ClassFolders:
    """A folder in one of two layouts; files may be in subfolders, and hidden ones are ignored.

    - `CLASS/FILE`
    - `train/CLASS/FILE` and, optionally, `val/…` and `test/…` with the same classes; the sets may also be called
      `Training`, `valid` and so on, see `SET_NAMES`. This layout is assumed if `train` contains folders and no file
      with one of the extensions, so that `train` may also be a class.

    Attributes:
        root: the folder.
        noun: for a file in messages, such as image.
        endings: the extensions of the files, in lower case; other files are ignored, and the log counts them.
    """

    root: Path
    noun: str
    endings: tuple[str, ...]

    def sets(self) -> dict[str, Path]:
        """Return the folders of train, val and test; empty for the first layout."""
        found = set_folders(self.root)
        train = found.get("train", self.root / "train")
        is_divided = _folders(train) and not any(path.is_file() and self._is_counted(path) for path in train.iterdir())
        return found if is_divided else {}

    def _is_counted(self, path: Path) -> bool:
        return path.name.lower().endswith(self.endings) and not path.name.startswith(".")

    def classes(self) -> list[str]:
        """Return the names of the classes, sorted; raise DataError if there are none."""
        if not self.root.is_dir():
            raise DataError(f"{self.root} is not a folder. Set data.root to the one that holds the {self.noun}s.")
        top = self.sets().get("train", self.root)
        if not (names := _folders(top)):
            raise DataError(f"{top} holds no folder. Put the {self.noun}s of each class into a folder of its name.")
        if wrong := next((name for name in names if re.search("[\ud800-\udfff]", name)), None):
            raise DataError(f"{top}: the name of the folder {wrong!r} is not UTF-8. Rename it.")
        return names

    def find(self) -> dict[str, tuple[list[str], np.ndarray]]:
        """Return the paths of each set and their classes, int64 (N,); for the first layout under "all".

        Raises:
            DataError: a class has no file, or the sets have different classes.
        """
        classes, sets = self.classes(), self.sets()
        if not sets:
            return {"all": self._files(self.root, classes, is_complete=True)}
        if unknown := sorted({*_folders(self.root)} - {folder.name for folder in sets.values()}):
            log.warning("Ignored folders in %s, besides train, val and test: %s", self.root, ", ".join(unknown))
        found = {}
        for name, folder in sets.items():
            if (own := _folders(folder)) != classes:
                differing = ", ".join(sorted({*own} ^ {*classes}))
                raise DataError(f"{folder} must have the same classes as {sets['train']}; they differ in {differing}.")
            found[name] = self._files(folder, classes, name == "train")
        return found

    def _files(self, folder: Path, classes: list[str], is_complete: bool) -> tuple[list[str], np.ndarray]:
        """Return the files of one set and their classes; `is_complete`: each class must have a file."""
        paths, labels, ignored = list[str](), list[int](), Counter[str]()
        lacks = f"holds no {self.noun} ({', '.join(self.endings)})"
        for label, name in enumerate(classes):
            below = [*files_below(folder / name)]
            counted = sorted(str(path) for path in below if self._is_counted(path))
            if is_complete and not counted:
                raise DataError(f"{folder / name} {lacks}. Put some there, or remove the folder.")
            paths += counted
            labels += [label] * len(counted)
            ignored.update(path.suffix or "no ending" for path in below if not self._is_counted(path))
        if not paths:
            raise DataError(f"{folder} {lacks}.")
        if ignored:
            ends = ", ".join(f"{end} ({number})" for end, number in ignored.most_common(9))
            log.warning("Files ignored in %s, by ending: %s", folder, ends)
        return paths, np.array(labels, dtype=np.int64)


def _folders(path: Path) -> list[str]:
    """Return the names of the subfolders, sorted, without hidden ones and those of a project in this folder."""
    names = (each.name for each in path.iterdir() if each.is_dir()) if path.is_dir() else ()
    return sorted(name for name in names if not re.match(r"\.|(lost\+found|mlruns|__pycache__)$", name))
