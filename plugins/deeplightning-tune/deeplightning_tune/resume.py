"""Check whether a search can resume with the config and the code that it started with."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from deeplightning.config.examine import examine
from deeplightning.config.own_runs import is_noted
from deeplightning.config.tree import line
from deeplightning.faults import ConfigError, Fault
from deeplightning.launch.sealed import files_of
from deeplightning.own_code import SEAL, add_import_roots, original_roots, short, use_seal
from deeplightning.sweep.frozen_code import FOLDER, SearchCode, digest_of, freeze
from deeplightning.tracking.parent import Parent
from deeplightning_tune.section import search_of

CHANGEABLE_KEYS = ("tune.num_trials", "tune.parallel", "tune.sampler", "tune.pruner", "tune.name", "seed", "serve")
"""Sections and keys that may change between the start of a search and its resumption."""
MAX_NAMED = 5
"""Maximum number of edited files and changed settings that a message names."""

_ABSENT = object()


def code_of_search(path: Path, overrides: Sequence[str]) -> SearchCode:
    """Make this process import user code from the frozen copy of a search; create the copy for a new search.

    Raises:
        ConfigError: the search has no usable copy and its code has changed, or other code shadows the copy.
        SetupError: the copy cannot be written.
    """
    report = examine(path, list(overrides))
    cfg, search = report.config, search_of(report.config)
    wrong = any(re.match(r"logger\b|tune$|tune\.name$", str(fault.key)) for fault in report.faults)
    if cfg is None or search is None or cfg.logger is None or wrong:
        return SearchCode()
    name = search.name or path.stem
    parent = Parent(cfg, name)
    notes = _notes(parent)
    if sealed := notes.get("sealed"):
        folder = parent.home / FOLDER / sealed
        if is_intact(folder):
            _add_roots(folder, name)
            use_seal(folder)
            return SearchCode(folder, _edit_notices(folder, notes["code"], name), kept=True)
    if faults := _changed_code(notes.get("code", {}), name):
        raise ConfigError(faults)
    return freeze(parent, path, overrides)


def _notes(parent: Parent) -> Mapping[str, Any]:
    """Return the notes of a search's file, or {} if the file is missing or its run was deleted: the search is new."""
    database = parent.home / "study.db"
    if not database.exists():
        return {}
    from deeplightning_tune.study import notes_of

    try:
        notes = notes_of(database)
    except Exception:  # Optuna's, SQLAlchemy's: reported where the file is opened
        return {}
    run_id = notes.get("run")
    is_current = run_id is None or parent.run_exists(run_id)
    return notes if is_current else {}


def is_intact(folder: Path) -> bool:
    """Return whether this user created a seal on this machine (`note_own`) and no file of it has changed.

    Bytecode caches in it, which have no digest, are deleted.
    """
    try:
        if not is_noted(folder / SEAL):
            return False
        for cache in [*(folder / "code").rglob("__pycache__")]:
            shutil.rmtree(cache)
        digests = json.loads((folder / SEAL).read_text())["digests"]
        return {path.relative_to(folder).as_posix(): digest_of(path) for path in files_of(folder)} == digests
    except (OSError, ValueError, KeyError):
        return False


def edited(folder: Path) -> dict[str, str]:
    """Return the user-code files that changed since a seal was created, each with the kind of change."""
    content = json.loads((folder / SEAL).read_text())
    found = {}
    for copy, digest in content["digests"].items():
        root, top = next(((r, t) for r, t in content["roots"].items() if copy.startswith(f"{t}/")), ("", ""))
        origin = Path(root, copy.removeprefix(f"{top}/"))
        if root and (now := digest_of(origin)) != digest:
            found[str(origin)] = "has changed" if now else "is gone"
    return found


def _add_roots(folder: Path, name: str) -> None:
    """Add all folders of a frozen copy to the import path, whatever the working directory.

    Raises:
        ConfigError: an import folder of this command, which would come first, has other code of the same name.
    """
    content = json.loads((folder / SEAL).read_text())
    known, missing, tops = {*original_roots(), *map(os.path.abspath, sys.path)}, list[str](), set[str]()
    for root, copy in content["roots"].items():
        paths = [file.removeprefix(f"{copy}/") for file in content["digests"] if file.startswith(f"{copy}/")]
        if paths and root not in known:
            missing.append(root)
            tops.update(path.partition("/")[0] for path in paths)
    for root in original_roots():
        if found := sorted(top for top in tops if (Path(root) / top).exists()):
            message = (
                f"{root} has {', '.join(found)}, but the search {name} started with own code of that name in "
                f"{', '.join(missing)}: run the command where the search started. For another search: tune.name=NEW"
            )
            raise ConfigError(Fault(message))
    add_import_roots(*map(Path, missing))


def _edit_notices(folder: Path, imported: Iterable[str], name: str) -> list[str]:
    """Return a notice that names the files that a search imported and that were edited since, or []."""
    changed = [f"{short(file)} {what}" for file, what in edited(folder).items() if file in imported]
    if not changed:
        return []
    more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
    return [
        f"{', '.join(changed[:MAX_NAMED])}{more} since the search {name} began: it continues with the code that it "
        f"began with, {folder}. To search with the code as it is now: tune.name=NEW"
    ]


def _changed_code(before: Mapping[str, str], name: str) -> list[Fault]:
    """Return a fault for each file of user code that has changed since the start of a search without a frozen copy.

    Args:
        before: digests by path.
        name: name of the search.
    """
    faults = []
    for file, digest in before.items():
        if (now := digest_of(Path(file))) != digest:
            change = "has changed" if now else "is gone"
            message = (
                f"{file}: this code {change} since the search {name} began, and trials of both cannot be compared. "
                "Put it back to continue, or start another search: tune.name=NEW"
            )
            faults.append(Fault(message))
    return faults


def changed_settings(before: Mapping[str, object], now: Mapping[str, object], name: str, config: Path) -> list[Fault]:
    """Return a fault for each changed setting that makes earlier and later trials incomparable; at most `MAX_NAMED`.

    Args:
        before: the complete config at the start of the search.
        now: the complete config of this command.
        name: name of the search.
        config: the file that resumes the search.
    """
    former, current = dict(_flat(before)), dict(_flat(now))
    changed = [
        key
        for key in sorted(former | current)
        if not f"{key}.".startswith(tuple(f"{free}." for free in CHANGEABLE_KEYS))
        and former.get(key, _ABSENT) != current.get(key, _ABSENT)
        and (key in former or key.startswith("tune.space.") or ".params." in key or key.endswith(".type"))
    ]
    remedy = f"Put it back, or run `deeplightning tune {quote(str(config))}`; for another search: tune.name=NEW"
    faults = []
    for key in changed[:MAX_NAMED]:
        old, new = ("absent" if (v := values.get(key, _ABSENT)) is _ABSENT else line(v) for values in (former, current))
        message = f"was {old} when the search {name} began, and is {new}; trials of both cannot be compared. {remedy}"
        faults.append(Fault(message, key, found=new, allowed=old))
    return faults


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key, value) of each leaf of a config; a distribution of the space is a leaf."""
    if isinstance(value, dict) and value and not name.startswith("tune.space."):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}".lstrip("."))
    else:
        yield name, value
