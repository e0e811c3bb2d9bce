"""Find the files of a folder that has one folder for each class, with or without `train`, `val` and `test` above."""

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
    """A folder in one of two layouts; files may also lie deeper, and hidden ones do not count.

    - `CLASS/FILE`
    - `train/CLASS/FILE`, and where there are such `val/…` and `test/…` with the same classes; the sets may also be
      called `Training`, `valid` and so on, see `SET_NAMES`. It is this layout when `train` holds folders and no file
      with one of the endings, so that trains may also be a class.

    Attributes:
        root: the folder.
        word: for a file, in messages, such as image.
        endings: of the files, in lower case; others are ignored, and the log counts them.
    """

    root: Path
    word: str
    endings: tuple[str, ...]

    def sets(self) -> dict[str, Path]:
        """Return the folders of train, val and test; none in the first layout."""
        found = set_folders(self.root)
        train = found.get("train", self.root / "train")
        is_divided = _folders(train) and not any(path.is_file() and self._counts(path) for path in train.iterdir())
        return found if is_divided else {}

    def _counts(self, path: Path) -> bool:
        return path.name.lower().endswith(self.endings) and not path.name.startswith(".")

    def classes(self) -> list[str]:
        """Return the names of the classes, sorted; raise DataError if there is no folder of a class."""
        if not self.root.is_dir():
            raise DataError(f"{self.root} is not a folder. Set data.root to the one that holds the {self.word}s.")
        top = self.sets().get("train", self.root)
        if not (names := _folders(top)):
            raise DataError(f"{top} holds no folder. Put the {self.word}s of each class into a folder of its name.")
        if wrong := next((name for name in names if re.search("[\ud800-\udfff]", name)), None):
            raise DataError(f"{top}: the name of the folder {wrong!r} is not UTF-8. Rename it.")
        return names

    def find(self) -> dict[str, tuple[list[str], np.ndarray]]:
        """Return the paths of each set and their classes, int64 (N,); under "all" those of the first layout.

        Raises:
            DataError: a class has no file, or the sets have not the same classes.
        """
        classes, sets = self.classes(), self.sets()
        if not sets:
            return {"all": self._files(self.root, classes, is_complete=True)}
        if unknown := sorted({*_folders(self.root)} - {folder.name for folder in sets.values()}):
            log.warning("Ignored in %s, beside train, val and test: %s", self.root, ", ".join(unknown))
        found = {}
        for name, folder in sets.items():
            if (there := _folders(folder)) != classes:
                differing = ", ".join(sorted({*there} ^ {*classes}))
                raise DataError(f"{folder} must have the same classes as {sets['train']}; they differ in {differing}.")
            found[name] = self._files(folder, classes, name == "train")
        return found

    def _files(self, folder: Path, classes: list[str], is_complete: bool) -> tuple[list[str], np.ndarray]:
        """Return the files of one set; `is_complete`: each class must have one."""
        paths, labels, others = list[str](), list[int](), Counter[str]()
        known = f"holds no {self.word} ({', '.join(self.endings)})"
        for label, name in enumerate(classes):
            below = [*files_below(folder / name)]
            counted = sorted(str(path) for path in below if self._counts(path))
            if is_complete and not counted:
                raise DataError(f"{folder / name} {known}. Put some there, or remove the folder.")
            paths += counted
            labels += [label] * len(counted)
            others.update(path.suffix or "no ending" for path in below if not self._counts(path))
        if not paths:
            raise DataError(f"{folder} {known}.")
        if others:
            ends = ", ".join(f"{end} ({number})" for end, number in others.most_common(9))
            log.warning("Files ignored in %s, by ending: %s", folder, ends)
        return paths, np.array(labels, dtype=np.int64)


def _folders(path: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones."""
    entries = path.iterdir() if path.is_dir() else ()
    return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
