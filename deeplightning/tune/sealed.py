"""The code of a search: sealed when it begins, and used again whenever it resumes, whatever became of the files.

All of it comes before the search imports any of the user's code, so that nothing is imported twice, and a file that is
broken by now does no harm.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deeplightning.checks.examine import examine, load_config
from deeplightning.checks.trust import note_own
from deeplightning.faults import ConfigError, Fault, SetupError, UserError
from deeplightning.launch.sealed import edited, is_intact, seal, sealed_roots
from deeplightning.own_code import SEAL, add_import_roots, original_roots, short, use_seal
from deeplightning.runfolder import make_private
from deeplightning.tracking.environment import git_answers
from deeplightning.tracking.parent import Parent
from deeplightning.tune.unchanged import changed_code

MAX_NAMED = 5
"""Edited files that a notice names."""

FOLDER = ".sealed"
"""The folder of a search, or of a multirun, that has its seals. Hidden, so that programs that look for code pass by."""


@dataclass
class SearchCode:
    """The code of a search in this process.

    Attributes:
        folder: its seal; None: the config is wrong, which is reported where it is loaded.
        notices: what a person should know of it.
        kept: whether the search's file names the seal.
    """

    folder: Path | None = None
    notices: list[str] = field(default_factory=list)
    kept: bool = False

    @property
    def name(self) -> str | None:
        """What the search's file has of it."""
        return None if self.folder is None else self.folder.name

    def drop_others(self) -> None:
        """Removes what a command that was killed has left beside the seal; nobody else may be at this search."""
        if self.folder is not None:
            for other in {*self.folder.parent.iterdir()} - {self.folder}:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Lets this process import the originals again; a seal that no search names is removed."""
        if self.folder is not None:
            use_seal(None)
            if not self.kept:
                shutil.rmtree(self.folder, ignore_errors=True)


def code_of_search(path: Path, overrides: Sequence[str]) -> SearchCode:
    """Lets this process import own code from the seal of a search, which is made where the search is new.

    Raises:
        ConfigError: the search has no seal that can be used here, and its code has changed; or there is other code.
        SetupError: the seal cannot be written.
    """
    report = examine(path, list(overrides))
    cfg = report.config
    wrong = any(re.match(r"logger\b|tune$|tune\.name$", str(fault.key)) for fault in report.faults)
    if cfg is None or cfg.tune is None or cfg.logger is None or wrong:
        return SearchCode()
    name = cfg.tune.name or path.stem
    parent = Parent(cfg, name)
    notes = _notes(parent)
    if known := notes.get("sealed"):
        folder = parent.home / FOLDER / known
        if is_intact(folder):
            _add_roots(folder, name)
            use_seal(folder)
            return SearchCode(folder, _changes(folder, notes["code"], name), kept=True)
    if faults := changed_code(notes.get("code", {}), name):
        raise ConfigError(faults)
    folder = parent.home / FOLDER / secrets.token_hex(8)
    seal_of_config(folder, path, overrides, parent.home.parents[2])
    use_seal(folder)
    return SearchCode(folder)


def code_of_grid(path: Path, overrides: Sequence[str], parent: Parent | None = None) -> SearchCode:
    """The same for the runs of a grid, whose seal lasts as long as the command.

    Args:
        overrides: of its first point.
        parent: in whose folder the seal is; None: that of the config's multirun.

    Raises:
        SetupError: the seal cannot be written.
    """
    report = examine(path, list(overrides))
    if report.faults or report.config is None:
        return SearchCode()
    parent = parent or Parent(report.config, path.stem, "multiruns")
    folder = parent.home / FOLDER / secrets.token_hex(8)
    seal_of_config(folder, path, overrides, parent.home.parents[2])
    use_seal(folder)
    return SearchCode(folder)


def seal_of_config(folder: Path, path: Path, overrides: Sequence[str], store: Path) -> None:
    """Seals what a config imports. It is imported in a child, so that this process imports the copies alone.

    Args:
        folder: becomes the seal.
        store: the folder of the tracking store, whose permissions new folders take.

    Raises:
        SetupError: the seal cannot be written.
    """
    from deeplightning.tune.forked_child import in_child

    def work() -> dict[str, object]:
        for stream in (1, 2):  # this process imports the same, and prints the same
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        cfg = load_config(path, [*overrides])
        make_private(folder.parent, store)
        seal(folder, git=git_answers(cfg.redact))
        return {}

    with contextlib.suppress(UserError, SystemExit):  # which this process comes to as well, in better words
        in_child(work, None, str)
    if not (folder / SEAL).is_file():
        cfg = load_config(path, [*overrides])
        try:
            make_private(folder.parent, store)
        except OSError as error:
            raise SetupError(f"{folder.parent}: this folder cannot be made: {error.strerror}") from error
        seal(folder, git=git_answers(cfg.redact))
    note_own(folder / SEAL)


def _notes(parent: Parent) -> Mapping[str, Any]:
    """What the search's file has; {}: there is none, or the search begins anew since its run was deleted."""
    database = parent.home / "study.db"
    if not database.exists():
        return {}
    from deeplightning.tune.study import notes_of

    try:
        notes = notes_of(database)
    except Exception:  # Optuna's, SQLAlchemy's: reported where the file is opened
        return {}
    run_id = notes.get("run")
    is_there = run_id is None or parent.is_there(run_id)
    parent.let_go()
    return notes if is_there else {}


def _add_roots(folder: Path, name: str) -> None:
    """Lets names come from all folders of a seal, also where the command is given elsewhere.

    Raises:
        ConfigError: a folder of this command, which would come first, has other code of the same name.
    """
    missing = sealed_roots(folder, without={*original_roots(), *map(os.path.abspath, sys.path)})
    tops = {path.partition("/")[0] for paths in missing.values() for path in paths}
    for root in original_roots():
        if found := sorted(top for top in tops if (Path(root) / top).exists()):
            message = (
                f"{root} has {', '.join(found)}, and the search {name} began with own code of that name in "
                f"{', '.join(missing)}: give the command where the search began. For another search: tune.name=NEW"
            )
            raise ConfigError(Fault(message))
    add_import_roots(*map(Path, missing))


def _changes(folder: Path, imported: Iterable[str], name: str) -> list[str]:
    """What a person should know of the files that a search imported and that were edited since."""
    changed = [f"{short(file)} {what}" for file, what in edited(folder).items() if file in imported]
    if not changed:
        return []
    more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
    return [
        f"{', '.join(changed[:MAX_NAMED])}{more} since the search {name} began: it continues with the code that it "
        f"began with, {folder}. To search with the code as it is now: tune.name=NEW"
    ]
