"""The versions of configs: one table of every rename, removal and change of meaning, and the migration that it drives.

A config file has the key `version`; a file without it has version 1. Reading a file migrates it in memory, before files
are merged. `deeplightning migrate` applies the same rows to the text of a file, and those of `UNNUMBERED` as well. It
imports no YAML library: both forms of a config are a `Tree` here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from deeplightning.config.moved import present
from deeplightning.config.schema import BACKENDS, PRECISIONS, VERSION
from deeplightning.config.tree import Entry, kind
from deeplightning.faults import ConfigError, Fault

UNNUMBERED = 0
"""The version of rows for configs from before the key `version`. They need a look by a person, so only `deeplightning
migrate` applies them."""
ASSUMED = 1
"""The version of a file without the key."""


@dataclass(frozen=True)
class Renamed:
    """The key `old` of configs up to version `until` is now the key `new`, with the same values."""

    until: int
    old: str
    new: str


@dataclass(frozen=True)
class Removed:
    """The key has no effect and no successor; `reason` tells what to use instead."""

    until: int
    key: str
    reason: str


@dataclass(frozen=True)
class Reworded:
    """The values of a key have other words."""

    until: int
    key: str
    words: Mapping[Any, Any]


@dataclass(frozen=True)
class Changed:
    """A key that a config omits has another meaning now.

    Attributes:
        sibling: the row counts only where this key is set.
        former: the value that keeps the former meaning, and is written; None: nothing is written, `note` is printed.
    """

    until: int
    key: str
    sibling: str
    note: str
    former: Any = None


Row = Renamed | Removed | Reworded | Changed

_MODE = "without a mode the metric's class or name decides; before 2026-11-23 it was min"
ROWS: tuple[Row, ...] = (
    Renamed(UNNUMBERED, "train.ckpt_resume_path", "train.resume_ckpt"),
    Renamed(UNNUMBERED, "train.max_epochs", "train.num_epochs"),
    Reworded(UNNUMBERED, "engine.backend", BACKENDS),
    Reworded(UNNUMBERED, "engine.precision", PRECISIONS),
    Changed(UNNUMBERED, "train.checkpoint.mode", "train.checkpoint.monitor", _MODE),
    Changed(UNNUMBERED, "train.early_stop.mode", "train.early_stop.metric", _MODE),
    Changed(UNNUMBERED, "tune.mode", "tune.metric", _MODE),
    Changed(UNNUMBERED, "serve.max_pixels", "serve", "the default is 24000000; before 2026-11-23 it was 50000000"),
)
"""In the order in which they are applied. A row of the present version or a later one is an error."""


class Tree(Protocol):
    """A config that a row is applied to; a key is a dotted path of mappings."""

    def has(self, key: str) -> bool:
        """Whether the key is set."""

    def value(self, key: str) -> Any:
        """The scalar at a key that is set."""

    def move(self, old: str, new: str) -> None:
        """Gives a value another key, and makes the mappings above it; a mapping that becomes empty is removed."""

    def drop(self, key: str) -> None:
        """Removes a key that is set."""

    def put(self, key: str, value: object) -> None:
        """Sets a key in a mapping that is there."""

    def place(self, key: str) -> str:
        """`file:line:col` of a key that is set."""


@dataclass
class Migration:
    """The migration of one file: what its rows changed, in words, and what a person must look at."""

    tree: Tree
    inside: str = ""  # dotted: the section that the file is placed under, an option of a group
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def apply(self, version: int) -> None:
        """Applies the rows of configs of this version and later ones.

        Raises:
            ConfigError: a former key and its successor are both set, or a successor lies outside the file's section.
        """
        for row in ROWS:
            if row.until >= version:
                self._row(row)

    def _local(self, key: str) -> str | None:
        """A key of the config as the file has it; None: outside the file."""
        if not self.inside:
            return key
        return key.removeprefix(f"{self.inside}.") if key.startswith(f"{self.inside}.") else None

    def _row(self, row: Row) -> None:
        if isinstance(row, Renamed):
            self._rename(row)
            return
        key = self._local(row.key)
        if key is None:
            return
        if isinstance(row, Removed):
            for name in _with_sign(key):
                if self.tree.has(name):
                    self.tree.drop(name)
                    self.changes.append(f"{row.key} is removed: {row.reason}")
        elif isinstance(row, Reworded):
            if self.tree.has(key) and isinstance(old := self.tree.value(key), str | int) and old in row.words:
                self.tree.put(key, row.words[old])
                self.changes.append(f"{row.key}: {old} is now {row.words[old]}")
        elif (sibling := self._local(row.sibling)) is not None and self.tree.has(sibling) and not self.tree.has(key):
            if row.former is None:
                self.notes.append(f"{row.key}: {row.note}")
            else:
                self.tree.put(key, row.former)
                self.changes.append(f"{row.key}: {row.former} keeps the former meaning; {row.note}")

    def _rename(self, row: Renamed) -> None:
        old, new = self._local(row.old), self._local(row.new)
        if old is None:
            return
        for former, present_name in zip(_with_sign(old), _with_sign(new or row.new), strict=True):
            if not self.tree.has(former):
                continue
            place = self.tree.place(former)
            if new is None:
                message = f"this key is now {row.new}, which this file of the option group cannot set; set it elsewhere"
                raise ConfigError(Fault(message, row.old, place))
            if self.tree.has(present_name):
                message = f"this key and {row.new}, its present name, are both set; remove one"
                raise ConfigError(Fault(message, row.old, place))
            self.tree.move(former, present_name)
            self.changes.append(f"{row.old} is now {row.new}")


def _with_sign(key: str) -> Iterator[str]:
    """A key, and the key `~name` that removes it from a base."""
    above, dot, last = key.rpartition(".")
    yield key
    yield f"{above}{dot}~{last}"


def version_of(entry: Entry | None) -> int:
    """The version of a file, of the value at its key `version`.

    Raises:
        ConfigError: it is no version, or one of a later release.
    """
    if entry is None:
        return ASSUMED
    found = entry.value
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        message = f"must be a whole number from 1 to {VERSION}, not {kind(entry)}; write `version: {VERSION}`"
        raise ConfigError(Fault(message, "version", entry.place, found=str(found), allowed=str(VERSION)))
    if found > VERSION:
        message = (
            f"this config has version {found}, and this release of Deep Lightning reads configs up to version "
            f"{VERSION}; install the release that wrote it, or a later one"
        )
        raise ConfigError(Fault(message, "version", entry.place, found=str(found), allowed=str(VERSION)))
    return found


def migrate(tree: Entry, inside: str = "") -> list[str]:
    """Migrates the tree of a file in place, its `version` too; what was changed, in words.

    Args:
        tree: a mapping.
        inside: dotted, the section that the file is placed under.

    Raises:
        ConfigError: its version is not known, or a row cannot be applied.
    """
    migration = Migration(Entries(tree), inside)
    entry = tree.value.pop("version", None)
    migration.apply(version_of(entry))
    if entry is not None and not inside:
        entry.value = VERSION
        tree.value = {"version": entry, **tree.value}
    return migration.changes


def present_names(value: Any) -> Iterator[tuple[Any, str, str]]:
    """The targets in nested mappings and lists whose module has moved: the mapping, its key, and the present name."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        if name in ("type", "ref") and isinstance(item, str) and present(item) != item:
            yield value, name, present(item)
        yield from present_names(item)


class Entries:
    """A tree of entries that know their places, as a `Tree`."""

    def __init__(self, root: Entry):
        self.root = root

    def _above(self, key: str, make: bool = False) -> tuple[dict[str, Entry] | None, str]:
        *sections, last = key.split(".")
        entry = self.root
        for name in sections:
            if not isinstance(entry.value, dict):
                return None, last
            if name not in entry.value:
                if not make:
                    return None, last
                entry.value[name] = Entry({}, entry.place, entry.at)
            elif make and entry.value[name].value is None:
                entry.value[name].value = {}
            entry = entry.value[name]
        return (entry.value if isinstance(entry.value, dict) else None), last

    def has(self, key: str) -> bool:
        """Whether the key is set."""
        above, last = self._above(key)
        return above is not None and last in above

    def _entry(self, key: str) -> Entry:
        above, last = self._above(key)
        assert above is not None
        return above[last]

    def value(self, key: str) -> Any:
        """The scalar at a key that is set."""
        return self._entry(key).value

    def place(self, key: str) -> str:
        """`file:line:col` of a key that is set."""
        return self._entry(key).place

    def move(self, old: str, new: str) -> None:
        """Gives a value another key; its place remains."""
        entry = self._entry(old)
        self.drop(old)
        above, last = self._above(new, make=True)
        if above is None:
            raise ConfigError(Fault(f"this key is now {new}, and a section above that is no mapping", old, entry.place))
        above[last] = entry

    def drop(self, key: str) -> None:
        """Removes a key that is set."""
        above, last = self._above(key)
        assert above is not None
        del above[last]

    def put(self, key: str, value: object) -> None:
        """Sets a key in a mapping that is there."""
        above, last = self._above(key, make=True)
        assert above is not None
        old = above.get(last)
        place = old.place if old is not None else self.root.place
        above[last] = Entry(value, place, old.at if old is not None else "")
