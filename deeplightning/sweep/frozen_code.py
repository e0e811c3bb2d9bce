"""Freeze the user's code when a grid or a search starts, so that all of its runs use the same code.

This happens before the command imports any of the user's code, so that nothing is imported twice and later edits have
no effect.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deeplightning.config.examine import examine, load_config
from deeplightning.config.own_runs import note_own
from deeplightning.faults import SetupError
from deeplightning.launch.sealed import seal
from deeplightning.own_code import SEAL, is_user_file, original, use_seal
from deeplightning.runfolder import make_private
from deeplightning.sweep.worker import fork
from deeplightning.tracking.environment import git_state
from deeplightning.tracking.parent import Parent

FOLDER = ".sealed"
"""The folder of a search or a multirun that has its seals. Hidden, so that programs that search for code skip it."""


@dataclass
class SearchCode:
    """The frozen code of a grid or a search in this process."""

    folder: Path | None = None  # of the copy; None if the config is wrong, which is reported when it is loaded
    notices: list[str] = field(default_factory=list)  # messages for the user about edited files
    kept: bool = False  # whether to keep the copy when the command ends

    @property
    def name(self) -> str | None:
        """Return the name of the copy's folder."""
        return None if self.folder is None else self.folder.name

    def drop_others(self) -> None:
        """Remove copies that killed commands left in the same folder, which no other process may use."""
        if self.folder is not None:
            for other in {*self.folder.parent.iterdir()} - {self.folder}:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Let this process import the originals again, and remove the copy unless it is kept."""
        if self.folder is not None:
            use_seal(None)
            if not self.kept:
                shutil.rmtree(self.folder, ignore_errors=True)


def code_of_grid(path: Path, overrides: Sequence[str], parent: Parent | None = None) -> SearchCode:
    """Freeze the code of the runs of a grid while the command runs, and let this process import the copy.

    Args:
        overrides: the overrides of the first point.
        parent: the run whose folder gets the copy; None for the config's multirun.

    Raises:
        SetupError: the copy cannot be written.
    """
    report = examine(path, list(overrides))
    if report.faults or report.config is None:
        return SearchCode()
    return freeze(parent or Parent(report.config, path.stem, "multiruns"), path, overrides)


def freeze(parent: Parent, path: Path, overrides: Sequence[str]) -> SearchCode:
    """Copy the code that a config imports, and let this process import the copy. A child imports the originals.

    Args:
        parent: the run whose folder gets the copy.

    Raises:
        SetupError: the copy cannot be written.
    """
    folder, store = parent.home / FOLDER / secrets.token_hex(8), parent.home.parents[2]

    def make() -> None:
        load_config(path, [*overrides])  # imports the code to copy
        try:
            make_private(folder.parent, store)
        except OSError as error:
            raise SetupError(f"{folder.parent}: this folder cannot be created: {error.strerror}") from error
        seal(folder, git=git_state())

    def work() -> int:
        for stream in (1, 2):  # this process imports the same code, which prints the same, and reports errors
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        make()
        return 0

    os.waitpid(fork(work), 0)
    if not (folder / SEAL).is_file():
        make()
    note_own(folder / SEAL)
    use_seal(folder)
    return SearchCode(folder)


def own_code() -> dict[str, str]:
    """Return the files of imported modules that are neither installed nor ours, with their digests; frozen code under
    the names of the originals."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name == "__main__" or not is_user_file(file) or not file.endswith(".py"):
            continue
        if digest := digest_of(Path(file)):
            found[original(str(Path(file).absolute()))] = digest
    return found


def digest_of(file: Path) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
