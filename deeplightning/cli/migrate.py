"""`deeplightning migrate FILE…`: the text of a config becomes one of the present version; comments and order are kept.

It alone imports ruamel.yaml. The rows that it applies are those of `deeplightning.config.versions`.
"""

import difflib
import glob
import io
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from deeplightning.config.schema import VERSION, Config, keys
from deeplightning.config.source import short, text_of
from deeplightning.config.tree import Entry, parse, plain
from deeplightning.config.versions import UNNUMBERED, Entries, Migration, migrate, present_names, version_of
from deeplightning.faults import ConfigError, Fault, SetupError
from deeplightning.process.shared_folder import is_alive
from deeplightning.runfolder import RunFolder
from deeplightning.words import first_line


@dataclass
class Migrated:
    """A file and its text in the present version.

    Attributes:
        changes: what differs in the text, in words.
        notes: what a person must look at.
    """

    path: Path
    before: str
    after: str
    changes: list[str]
    notes: list[str]

    def diff(self) -> str:
        """The change as a unified diff, which `patch -p1` applies; empty where there is none."""
        name = short(self.path)
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True), self.after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def migrated(path: Path) -> Migrated:
    """A config file in the present version.

    Raises:
        ConfigError: it is no config, has a later version, or a row cannot be applied.
    """
    text = text_of(path)
    name = short(path)
    before = _tree(text, name)
    had = before.value.get("version")
    version_of(had)
    if _is_option(before):
        note = "no key of a whole config is in it; an option of a group is migrated in memory"
        return Migrated(path, text, text, [], [note])
    yaml = _yaml(text)
    try:
        document = yaml.load(text)
    except (YAMLError, ValueError) as error:
        raise ConfigError(Fault(f"not YAML: {first_line(error)}", place=name)) from None
    if not isinstance(document, CommentedMap):  # a set, or another kind with a tag
        raise ConfigError(Fault("a config is a mapping of keys such as `data:`", place=name))
    migration = Migration(RoundTrip(document, name))
    migration.apply(UNNUMBERED if had is None else version_of(had))
    for mapping, key, now in [*present_names(document)]:
        migration.changes.append(f"{mapping[key]} is now {now}")
        mapping[key] = now
    changes = migration.changes
    if had is None:
        document.insert(0, "version", VERSION)
        changes = [f"version: {VERSION}", *changes]
    elif had is not None and had.value != VERSION:
        document["version"] = VERSION
        changes = [f"version: {had.value} is now {VERSION}", *changes]
    if not changes:
        return Migrated(path, text, text, [], migration.notes)
    if had is None and changes == [f"version: {VERSION}"]:
        after = _with_first_line(text)
    else:
        written = io.StringIO()
        yaml.dump(document, written)
        after = written.getvalue()
    _compare(before, had is None, _tree(after, name), name)
    return Migrated(path, text, after, changes, migration.notes)


def _tree(text: str, name: str) -> Entry:
    faults: list[Fault] = []
    tree = parse(text, name, faults)
    if not faults and not isinstance(tree.value, dict):
        faults = [Fault("this file holds no mapping; a config is a mapping of keys such as `data:`", place=name)]
    if faults:
        raise ConfigError(faults)
    return tree


def _compare(before: Entry, unnumbered: bool, after: Entry, name: str) -> None:
    """Asserts that the new text holds what migration in memory makes of the old one."""
    if unnumbered:
        Migration(Entries(before)).apply(UNNUMBERED)
    else:
        migrate(before)
    for tree in (before, after):
        tree.value.pop("version", None)
    expected = plain(before)
    for mapping, key, now in [*present_names(expected)]:
        mapping[key] = now
    if expected != plain(after):
        raise ConfigError(
            Fault(
                "cannot be rewritten without changing other values; edit it by hand, `check` has the lines", place=name
            )
        )


def _is_option(tree: Entry) -> bool:
    """Whether a file has no key of a whole config: it is an option of a group, or no config at all."""
    return not any(name == "_base_" or name in {f.name for f in keys(Config)} for name in tree.value)


def _yaml(text: str) -> YAML:
    """A reader and writer that keeps quotes, long lines, and the indentation of the text's lists."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.allow_duplicate_keys = False
    yaml.representer.add_representer(
        type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    mapping = re.search(r"^[\w.]+:[^\S\n]*(?:#.*)?\n(?:[^\S\n]*(?:#.*)?\n)*( +)[\w~]", text, re.MULTILINE)
    sequence = re.search(r"^( *)[\w.]+:[^\S\n]*(?:#.*)?\n( *)-( +)\S", text, re.MULTILINE)
    step = len(mapping[1]) if mapping else 2
    if sequence:
        offset = len(sequence[2]) - len(sequence[1])
        yaml.indent(mapping=step, sequence=offset + 1 + len(sequence[3]), offset=offset)
    else:
        yaml.indent(mapping=step, sequence=step + 2, offset=step)
    return yaml


def _with_first_line(text: str) -> str:
    """The text with the line `version: 1` before its first key; nothing else changes."""
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = text.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith(("#", "---", "%")))
    if lines[first].lstrip().startswith("{"):  # one flow mapping
        return text.replace("{", f"{{version: {VERSION}, ", 1)
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    return "".join([*lines[:first], f"{indent}version: {VERSION}{newline}", *lines[first:]])


def write(found: Migrated) -> None:
    """Writes the new text in the place of the old one, whole or not at all, with the same permissions.

    Raises:
        ConfigError: the file is the record of a run.
        SetupError: it cannot be written.
    """
    path = found.path.resolve()
    if path.name == "cfg.yaml" and RunFolder(path.parent).environment.is_file():
        message = (
            "this is the record of a run, which stays as it is: every verb migrates it in memory. To train with it, "
            "copy it and migrate the copy"
        )
        raise ConfigError(Fault(message, place=short(found.path)))
    save(path, found.after)


def save(path: Path, text: str) -> None:
    """Writes a file whole or not at all; the permissions of an existing one are kept. What a killed command has left
    beside it is removed.

    Raises:
        SetupError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
            if re.fullmatch(r"\d{1,9}", pid := left.name.rpartition(".")[2]) and not is_alive(int(pid)):
                left.unlink(missing_ok=True)
        try:
            with beside.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
            if path.exists():
                beside.chmod(stat.S_IMODE(path.stat().st_mode))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise SetupError(f"{path}: cannot be written: {error.strerror}; the file is unchanged") from error


class RoundTrip:
    """A document of ruamel.yaml, as a `Tree` of `deeplightning.config.versions`."""

    def __init__(self, root: CommentedMap, name: str):
        self.root, self.name = root, name

    def _above(self, key: str, make: bool = False) -> tuple[Any, str]:
        *sections, last = key.split(".")
        found: Any = self.root
        for name in sections:
            if not isinstance(found, dict):
                return None, last
            if found.get(name) is None and make:
                found[name] = CommentedMap()
            if name not in found:
                return None, last
            found = found[name]
        return (found if isinstance(found, dict) else None), last

    def has(self, key: str) -> bool:
        """Whether the key is set."""
        above, last = self._above(key)
        return above is not None and last in above

    def value(self, key: str) -> Any:
        """The scalar at a key that is set."""
        above, last = self._above(key)
        return above[last]

    def place(self, key: str) -> str:
        """`file:line:col` of a key that is set."""
        above, last = self._above(key)
        row, column = above.lc.key(last) if last in above.lc.data else (above.lc.line, above.lc.col)
        return f"{self.name}:{row + 1}:{column + 1}"

    def move(self, old: str, new: str) -> None:
        """Gives a value another key; in the same mapping its position and comments remain."""
        above, last = self._above(old)
        there, name = self._above(new, make=True)
        if there is None:
            raise ConfigError(
                Fault(f"this key is now {new}, and a section above that is no mapping", old, self.place(old))
            )
        comments = above.ca.items.pop(last, None)
        position = [*above].index(last)
        value = above.pop(last)
        if there is above:
            above.insert(position, name, value)
        else:
            there[name] = value
        if comments is not None:
            there.ca.items[name] = comments

    def drop(self, key: str) -> None:
        """Removes a key that is set, with the comment in its line."""
        above, last = self._above(key)
        del above[last]

    def put(self, key: str, value: object) -> None:
        """Sets a key in a mapping that is there."""
        above, last = self._above(key, make=True)
        above[last] = value
