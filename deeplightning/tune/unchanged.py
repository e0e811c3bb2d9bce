"""Whether a search that resumes has the config and the code with which it began."""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from deeplightning.config.tree import line
from deeplightning.faults import Fault
from deeplightning.own_code import is_theirs, original

FREE = ("tune.num_trials", "tune.parallel", "tune.sampler", "tune.pruner", "tune.name", "seed", "serve")
"""Sections and keys in which a resumed search may differ from how it began."""

_NONE = object()


def changed_settings(before: Mapping[str, object], now: Mapping[str, object], name: str, config: Path) -> list[Fault]:
    """The settings whose change makes trials of before and after incomparable; at most five.

    Args:
        before: the complete config with which the search began.
        now: the complete config.
        name: of the search.
        config: the file with which it can be resumed.
    """
    began, found = dict(_flat(before)), dict(_flat(now))
    changed = [
        key
        for key in sorted(began | found)
        if not f"{key}.".startswith(tuple(f"{free}." for free in FREE))
        and began.get(key, _NONE) != found.get(key, _NONE)
        and (key in began or key.startswith("tune.space."))
    ]
    remedy = f"To continue it, restore this, or give `deeplightning tune {config}`; for another search: tune.name=NEW"
    faults = []
    for key in changed[:5]:
        old, new = (_shown(values.get(key, _NONE)) for values in (began, found))
        message = f"was {old} when the search {name} began, and is {new}; trials of both cannot be compared. {remedy}"
        faults.append(Fault(message, key, found=new, allowed=old))
    return faults


def changed_code(before: Mapping[str, str], name: str) -> list[Fault]:
    """The files of own code that are not those with which a search began whose code was not sealed, or is gone.

    Args:
        before: digests by path.
        name: of the search.
    """
    faults = []
    for file, digest in before.items():
        now = _digest(Path(file))
        if now != digest:
            change = "has changed" if now else "is gone"
            faults.append(
                Fault(
                    f"{file}: this code {change} since the search {name} began, and trials of both cannot be "
                    "compared. Put it back to continue, or start another search: tune.name=NEW"
                )
            )
    return faults


def own_code() -> dict[str, str]:
    """The files of modules that are neither installed nor ours, and their digests; of sealed code under the names of
    the originals."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name == "__main__" or not is_theirs(file) or not file.endswith(".py"):
            continue
        if digest := _digest(Path(file)):
            found[original(str(Path(file).absolute()))] = digest
    return found


def _digest(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a config by their keys; a distribution of the space is one."""
    if isinstance(value, dict) and value and not name.startswith("tune.space."):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}".lstrip("."))
    else:
        yield name, value


def _shown(value: object) -> str:
    return "absent" if value is _NONE else line(value)
