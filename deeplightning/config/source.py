"""Read a config as one tree of values: `_base_` files, the files that extend them, overrides, with references resolved.
Every value has the place that set it.

`OmegaConf.merge` is not used: it drops the places, has no `~key`, and its import costs 0.1 CPU s, which configs without
`${…}` do not need.
"""

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.config import packages
from deeplightning.config.interpolation import resolve
from deeplightning.config.merge import OVERRIDE, apply_override, merge_file
from deeplightning.config.secrets import Secrets
from deeplightning.config.section_kinds import role_of
from deeplightning.config.tree import Entry, KeyPath, kind, nodes, parse, plain, to_yaml
from deeplightning.faults import ConfigError, Fault, Notice, SetupError, is_disk_failure
from deeplightning.own_code import frozen
from deeplightning.words import address_shown, is_address

if TYPE_CHECKING:
    from deeplightning.config.option_groups import Group

MAX_BYTES = 1_000_000  # of a file, and of a file with all its bases
MAX_BASES = 50
_ADDRESS = "a config must be a file, not an address; download it and name the file"


@dataclass(frozen=True)
class Text:
    """The path and the text of a config file. The file is not read again."""

    path: Path
    text: str

    def left_out(self) -> list[str]:
        """Return overrides that reset the ignored parts of the config to their defaults."""
        return []

    def admit(self, source: "Source") -> None:
        """Allow every name in a tree; `RunConfig` restricts the names of a foreign run."""


Given = Mapping[str, Any] | Text
"""A config that is passed as a value: a dict, an OmegaConf object, or the text of a file."""

GIVEN = "dict"
"""The place of values from a dict, in messages."""


@dataclass
class Source:
    """A config as it was written: the merged tree, and the folders of its files, nearest first.

    Attributes:
        groups: the option groups that its files use.
        notices: messages of the checks that are not faults.
        names: the files that the user named, as shown in messages.
        files: all files that were read.
    """

    root: Entry
    folders: list[Path]
    faults: list[Fault]
    groups: "dict[str, Group]" = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)
    notices: list[Notice] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def is_top(self, place: str) -> bool:
        """Return whether a place is in an override or in a file that the user named, not in a base file."""
        return place.startswith(OVERRIDE) or place.rsplit(":", 2)[0] in self.names

    def resolve(self) -> None:
        """Resolve the references in place.

        Raises:
            ConfigError: the references expand to too many values.
        """
        self.secrets = resolve(self.root, self.faults)
        for path, entry in nodes(self.root):
            if path[-1:] == ("type",) and isinstance(entry.value, str) and entry.value.isidentifier():
                self._expand_short_name(path, entry)

    def _expand_short_name(self, path: KeyPath, entry: Entry) -> None:
        """Replace a short name, as in `type: Adam`, by the full name."""
        from deeplightning.config.short_names import LAUNCHER, full_name

        key = ".".join(map(str, path[:-1]))
        role = key if key == LAUNCHER else role_of(key)
        if role is None or not 2 <= len(path) <= 4 or "params" in path:
            return
        try:
            full = full_name(role, entry.value)
        except ValueError as error:
            code = getattr(error, "exit_code", 2)
            self.faults.append(Fault(str(error), f"{key}.type", entry.place, found=entry.value, exit_code=code))
            return
        if full is not None:
            entry.written, entry.value = entry.written or entry.value, full


def is_file(word: str) -> bool:
    """Return whether an override is a further config file: it ends in `.yaml` or `.yml` and is not `key=value`, `~key`
    or `+list=[x]`."""
    if not word.endswith((".yaml", ".yml")) or (word.startswith(("~", "+")) and not word.startswith("~/")):
        return False
    return "=" not in word or os.path.isfile(word)  # noqa: PTH113  (a folder may be called `lr=0.1`)


def read(path: str | Path | Given | None, overrides: list[str] | None = None) -> Source:
    """Read a config file, its base files, and the overrides; without a file, only the overrides.

    Args:
        path: the file or its text; or a dict or an OmegaConf object, which is treated as a file in the working
            directory.
        overrides: `key=value`, `~key` and `+list=[x]`, which are applied last; and further config files, each merged
            over `path` and the files before it.

    Raises:
        ConfigError: no tree can be built. Other faults are in the result.
    """
    source = compose(path, overrides)
    source.resolve()
    return source


def compose(path: str | Path | Given | None, overrides: list[str] | None = None) -> Source:
    """Read a config as `read` does, but leave references unresolved.

    Raises:
        ConfigError: no tree can be built.
    """
    faults, given = list[Fault](), dict[Path, str]()
    if isinstance(path, Mapping):
        path = Text(Path.cwd() / GIVEN, to_yaml(path, GIVEN))
    if isinstance(path, Text):
        given[path.path], path = path.text, path.path
    tops = [located(name) for name in [*([] if path is None else [path]), *filter(is_file, overrides or [])]]
    words = [word for word in overrides or [] if not is_file(word)]
    reader = _Reader(faults, {}, [*map(_folder, tops)], given)
    if words:
        from deeplightning.config.option_groups import choices

        reader.words = choices(words)
    # The last file has priority if several choose from the same option group.
    trees = [reader.tree(file, (number,)) for number, file in reversed([*enumerate(tops)])]
    layers = [layer for tree in reversed(trees) for layer in tree]
    root = functools.reduce(merge_file, layers) if layers else Entry({}, "")
    _refuse_foreign_format(root, [short(file) for file in tops])
    for text in words:
        if text.partition("=")[0] in reader.groups and choices([text]):  # it chose an option
            continue
        try:
            apply_override(root, text)
        except ConfigError as error:
            faults += error.faults
    files = sorted(reader.files, key=lambda file: (len(file.above), file.order))
    folders, paths = [*dict.fromkeys(file.root for file in files)], [file.path for file in files]
    return Source(root, folders, faults, reader.groups, names=[short(file) for file in tops], files=paths)


def located(path: str | Path) -> Path:
    """Return the path of a config, which may be in a package.

    Raises:
        ConfigError: the package or the file in it does not exist, or the config is a URL.
    """
    if is_address(path) and not os.path.exists(path):  # noqa: PTH110
        raise ConfigError(Fault(_ADDRESS, place=address_shown(path)))
    if packages.is_package_address(path) and not os.path.exists(path):  # noqa: PTH110  (Path's fails for a long name)
        return packages.locate(path)
    return Path(os.path.expanduser(path))  # noqa: PTH111  (Path's fails for an unknown ~user)


# ---- files


@dataclass(frozen=True)
class _File:
    """A file that was read.

    Attributes:
        above: the chain of files that include it.
        order: its position among the files of the config.
        inside: the option group that it belongs to, or "".
        root: the folder to import names from: the parent of its group's folder, else its own folder.
        size: its size in characters.
    """

    path: Path
    above: "tuple[_File, ...]"
    order: tuple[int, ...]
    inside: str
    root: Path
    size: int


@dataclass
class _Reader:
    """Reads the files of a config.

    Attributes:
        words: the overrides that may choose an option, by the name of the group.
        tops: the folders of the files that the user named.
        given: the texts of configs that are not read from files, by path.
        files: the files that were read.
        groups: the option groups found so far; the first choice counts.
    """

    faults: list[Fault]
    words: dict[str, Entry]
    tops: list[Path]
    given: dict[Path, str] = field(default_factory=dict)
    files: list[_File] = field(default_factory=list)
    groups: "dict[str, Group]" = field(default_factory=dict)

    def tree(
        self,
        path: Path,
        order: tuple[int, ...],
        above: tuple[_File, ...] = (),
        place: str | None = None,
        inside: str = "",
        root: Path | None = None,
    ) -> list[Entry]:
        """Return the trees of a file's `_base_` files and of the file, in the order in which they are merged.

        Args:
            place: the place of the `_base_` that names it.
            order, above, inside, root: as in `_File`.
        """
        # Unlike Path.resolve, realpath does not raise for circular links.
        *trail, here = (Path(os.path.realpath(each)) for each in (*(file.path for file in above), path))
        if here in trail:
            chain = " → ".join(short(p) for p in [*trail[trail.index(here) :], here])
            message = f"`_base_` is circular: {chain}; remove one `_base_`"
            raise ConfigError(Fault(message, place=place))
        if len(self.files) >= MAX_BASES:
            raise ConfigError(Fault(f"more than {MAX_BASES} files build on each other", place=short(path)))
        text = self.given[path] if path in self.given else text_of(path)
        this = _File(path, above, order, inside, root or _folder(path), len(text))
        self.files.append(this)
        if sum(file.size for file in self.files) > MAX_BYTES:
            message = f"the files that build on each other have at most {MAX_BYTES // 1000} kB together"
            raise ConfigError(Fault(message, place=short(path)))
        if inside and re.search(r"^#\s*@package\b", text, re.MULTILINE):
            message = f"`@package` is Hydra's and has no effect: this file is placed under `{inside}`; remove the line"
            raise ConfigError(Fault(message, place=short(path)))
        tree = parse(text, short(path), self.faults, [*filter(None, inside.split("/"))])
        if short(path) == GIVEN:  # a dict has no lines
            for _, entry in nodes(tree):
                entry.place = GIVEN
        if not isinstance(tree.value, dict):
            what = "is empty" if tree.value is None else f"holds {kind(tree)}"
            message = f"this file {what}; a config is a mapping of keys such as `data:`"
            raise ConfigError(Fault(message, place=short(path)))
        if inside:
            tree.value.pop("version", None)
        base = tree.value.pop("_base_", None)
        if base is None or base.value is None:
            return [tree]
        names = base.value if isinstance(base.value, list) else [base]
        # Its own choices have priority over those of its options and bases, and a later base over an earlier one.
        choices = [(n, self._choose(name.value, this)) for n, name in enumerate(names) if isinstance(name.value, dict)]
        parts = {number: self._options(groups, this, number) for number, groups in choices}
        files = {}
        for number, name in enumerate(names):
            if isinstance(name.value, str):
                files[number] = _base_file(name.value, path, name.place), name.place
            elif number not in parts:
                message = f"a `_base_` is the path of a file, not {kind(name)}; an option is {{GROUP: OPTION}}"
                raise ConfigError(Fault(message, "_base_", name.place))
        for number, (file, named_at) in reversed(files.items()):
            parts[number] = self.tree(file, (*order, number), (*above, this), named_at, inside, root)
        return [*(part for number in sorted(parts) for part in parts[number]), tree]

    def _choose(self, items: dict[str, Entry], file: _File) -> "list[tuple[str, Group]]":
        """Choose the options in `{group: option}`, unless a file closer to the user has; return names and groups."""
        from deeplightning.config.option_groups import NAME, SHIPPED_GROUPS, Group, chosen

        found = []
        for name, entry in items.items():
            if not NAME.fullmatch(name):
                what = "an option group, the path of a folder such as `model` or `model/optimizer`"
                raise ConfigError(Fault(f"`{name:.60}` is not {what}", "_base_", entry.place))
            group_key = f"{file.inside}/{name}" if file.inside else name
            if group_key not in self.groups:
                choice = self.words.get(group_key, entry)
                roots = [each.root for each in (*file.above, file)]
                folders = list(dict.fromkeys([*self.tops, *roots, SHIPPED_GROUPS]))
                self.groups[group_key] = group = Group(group_key, chosen(choice), choice.place, folders)
                found.append((name, group))
        return found

    def _options(self, groups: "list[tuple[str, Group]]", file: _File, at: int) -> list[Entry]:
        """Return the trees of the options of groups, each under the key of its group."""
        found = []
        for name, group in groups:
            for number, option in enumerate(group.chosen):
                root, path = group.find(option)
                trees = self.tree(path, (*file.order, at, number), (*file.above, file), group.place, group.name, root)
                for part in reversed(name.split("/")):
                    trees = [Entry({part: tree}, tree.place) for tree in trees]
                found += trees
        return found


def _folder(path: Path) -> Path:
    return Path(os.path.abspath(path.parent))  # noqa: PTH100 (without `..`)


def _base_file(name: str, path: Path, place: str) -> Path:
    """Return the file that a `_base_` in the file at `path` names."""
    if packages.is_package_address(name):
        return packages.locate(name, "_base_", place)
    file = path.parent / os.path.expanduser(name)  # noqa: PTH111  (Path's fails for an unknown ~user)
    if not os.path.isfile(frozen(file)):  # noqa: PTH113  (Path's fails for a name that is too long)
        missing = f"there is no file {short(file)} to build on{packages.shipped_instead(name)}"
        message = f"{address_shown(name)}: {_ADDRESS}" if is_address(name) else missing
        raise ConfigError(Fault(message, "_base_", place))
    return file


def text_of(path: Path) -> str:
    """Return the text of a config file.

    Raises:
        ConfigError: it cannot be read.
    """
    place = short(path)
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113  (Path's fail for long names)
        raise ConfigError(Fault("this is a folder, a pipe or a device; name a YAML file", place=place))
    try:
        with frozen(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(Fault(f"there is no such config file{packages.shipped_instead(path)}", place=place)) from None
    except OSError as error:
        kind = SetupError if is_disk_failure(error) else ConfigError
        raise kind(Fault(f"cannot be read: {error.strerror}", place=place)) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(Fault(f"a config has at most {MAX_BYTES // 1000} kB; is this the right file?", place=place))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"not text in UTF-8 (byte {error.start} is {data[error.start]:#04x}); is this the right file?"
        raise ConfigError(Fault(message, place=place)) from None


def values_of(path: Path) -> dict[str, Any]:
    """Return the values of one config file as written, or {} if it cannot be read."""
    try:
        return plain(parse(text_of(path), path.name, [])) or {}
    except ConfigError:
        return {}


def short(path: Path) -> str:
    """Return a path as the user would write it: relative if it is below the working directory."""
    absolute, here = str(path.absolute()), os.path.join(Path.cwd(), "")  # noqa: PTH118  (Path removes the last slash)
    return absolute.removeprefix(here) if absolute.startswith(here) else str(path)  # relative_to can take minutes


def _refuse_foreign_format(root: Entry, files: list[str]) -> None:
    """Refuse a whole config of LightningCLI or Hydra with one fault instead of one per key.

    Raises:
        ConfigError: with the command that converts it.
    """
    items = {name: entry.value for name, entry in root.value.items()}
    words = {word for name in ("model", "data") if isinstance(items.get(name), dict) for word in items[name]}
    listed: Any = items.get("defaults")
    groups = [item.value for item in listed if isinstance(item.value, dict)] if isinstance(listed, list) else []
    if isinstance(items.get("fit"), dict):
        system, sign = "lightning-cli", "fit"
    elif any({"model", "data", "datamodule", "trainer"} & {str(name).lstrip("/") for name in each} for each in groups):
        system, sign = "hydra", "defaults"
    elif "trainer" in items and ("seed_everything" in items or words & {"class_path", "_target_"}):
        system, sign = "hydra" if "_target_" in words else "lightning-cli", "trainer"
    else:
        return
    command = f"deeplightning migrate --from {system} {' '.join(files)} --write"
    message = f"this is a config of another system. `{command}` converts it"
    raise ConfigError(Fault(message, sign, root.value[sign].place))
