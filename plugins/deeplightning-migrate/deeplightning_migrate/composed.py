"""Merge the config files of a LightningCLI or Hydra project into one tree; each value keeps its file and line."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from deeplightning.config.source import short, text_of
from deeplightning.config.tree import Entry, parse
from deeplightning.faults import ConfigError, Fault

MAX_FILES = 50
SUBCOMMANDS = ("validate", "test", "predict", "fit")


def read(files: Sequence[Path], system: str) -> Entry:
    """Return the merged tree of a project's config files. Later files take precedence; Hydra's defaults are composed.

    Raises:
        ConfigError: a file cannot be read, is not a mapping, or is in its own defaults list.
    """
    root = Entry({}, "")
    overrides = {group: e for file in files if system == "hydra" for group, e in _group_overrides(file, ()).items()}
    for file in files:
        root = merge(root, _compose(file, overrides, ()) if system == "hydra" else read_mapping(file))
    for section in [root, *(root.value.get(name) for name in SUBCOMMANDS)] if system == "lightning-cli" else []:
        items = section.value if section is not None and isinstance(section.value, dict) else {}
        for name in ("trainer", "model", "data", "optimizer", "lr_scheduler"):  # each may be in its own file
            value = items[name].value if name in items else None
            if isinstance(value, str) and value.endswith((".yaml", ".yml")):
                items[name] = read_mapping(files[0].parent / value)
            elif isinstance(value, str):
                items[name] = Entry({"class_path": Entry(value, items[name].place)}, items[name].place)
    return root


def read_mapping(path: Path) -> Entry:
    """Return the tree of a YAML file of another system.

    Raises:
        ConfigError: it is not valid YAML, or not a mapping.
    """
    faults: list[Fault] = []
    text = text_of(path)
    tree = parse(text, short(path), faults, ["params", "theirs"])  # keys keep their YAML types
    if faults:
        raise ConfigError(faults)
    if tree.value is None:  # an empty option file, such as `callbacks/none.yaml`
        tree.value = {}
    if not isinstance(tree.value, dict):
        raise ConfigError(Fault("this file has no mapping of settings; is this the right file?", place=short(path)))
    _convert_to_yaml_1_1(tree, yaml.safe_load(text))
    return tree


def _convert_to_yaml_1_1(entry: Entry, theirs: Any) -> None:
    """Replace scalars such as `yes` and `0x10` by their value in YAML 1.1, which both tools read."""
    if isinstance(entry.value, dict) and isinstance(theirs, dict):
        for key, item in entry.value.items():
            _convert_to_yaml_1_1(item, theirs.get(key))
    elif isinstance(entry.value, list) and isinstance(theirs, list):
        for item, other in zip(entry.value, theirs, strict=True):
            _convert_to_yaml_1_1(item, other)
    elif not isinstance(entry.value, dict | list) and isinstance(theirs, bool | int | float):
        entry.value = theirs


def merge(base: Entry, top: Entry) -> Entry:
    """Merge one tree over another. If the class differs, the arguments of the base are dropped."""
    if not (isinstance(base.value, dict) and isinstance(top.value, dict)):
        return top
    old, new = (tree.value.get("class_path") for tree in (base, top))
    if old is not None and new is not None and old.value != new.value:
        return top
    return Entry(
        base.value | {key: merge(base.value[key], e) if key in base.value else e for key, e in top.value.items()},
        top.place,
    )


def _read_with_defaults(path: Path) -> tuple[Entry, list[tuple[str, Entry]]]:
    """Return a Hydra file without its defaults list, and that list as pairs of a group and an option; the group of a
    file in the same folder is `""`."""
    content = read_mapping(path)
    defaults = content.value.pop("defaults", None)
    pairs = []
    for item in defaults.value if defaults is not None and isinstance(defaults.value, list) else []:
        for group, option in item.value.items() if isinstance(item.value, dict) else [("", item)]:
            is_split = isinstance(option.value, list) and "override" not in group.split()
            pairs += [(group, one) for one in (option.value if is_split else [option])]
    return content, pairs


def _group_overrides(path: Path, trail: tuple[Path, ...], root: Path | None = None) -> dict[str, Entry]:
    """Return the options that a defaults list sets for other groups (`override /data: mnist`), by group."""
    root = root or path.parent
    found: dict[str, Entry] = {}
    if path in trail or len(trail) > MAX_FILES:
        raise ConfigError(Fault("this file is in its own defaults list; remove it there", place=short(path)))
    for group, option in _read_with_defaults(path)[1]:
        *words, name = group.split() or [""]
        if "override" in words:
            found[name.lstrip("/").partition("@")[0]] = option
        elif (file := _option_file(path, root, group, option)) is not None:
            found |= _group_overrides(file, (*trail, path), root)
    return found


def _option_file(path: Path, root: Path, group: str, option: Entry) -> Path | None:
    """Return the file of an option, or None if it is null, `_self_`, Hydra's own, or optional and missing."""
    *words, name = group.split() or [""]
    name = name.partition("@")[0]
    if option.value in (None, "_self_") or name.lstrip("/").partition("/")[0] == "hydra":
        return None
    folder = root if name.startswith("/") or "override" in words else path.parent
    file = folder / name.lstrip("/") / f"{str(option.value).removesuffix('.yaml')}.yaml"
    return None if "optional" in words and not file.is_file() else file


def _compose(path: Path, overrides: dict[str, Entry], trail: tuple[Path, ...], package: str = "") -> Entry:
    """Return the tree of a Hydra file composed with its defaults, each at its package."""
    root = (trail or (path,))[0].parent
    content, pairs = _read_with_defaults(path)
    header = re.search(r"^#\s*@package\s+(\S+)", text_of(path), re.MULTILINE)
    if header and header[1] != "_group_":
        package = header[1].replace("_global_", "").lstrip(".")
    for part in reversed(package.split(".") if package else []):
        content = Entry({part: content}, content.place)
    composed, is_merged = Entry({}, short(path)), False
    for group, option in pairs:
        *words, name = group.split() or [""]
        if option.value == "_self_":
            composed, is_merged = merge(composed, content), True
            continue
        if "override" in words:
            continue
        group_of, _, at = name.partition("@")
        inside = f"{path.parent.relative_to(root)}/{group_of}".removeprefix("./").strip("/")
        full_group = group_of.lstrip("/") if group_of.startswith("/") else inside
        chosen = overrides.get(full_group, option) if name else option
        relative = at or (group_of.lstrip("/") if group_of.startswith("/") else group_of).replace("/", ".")
        below = ".".join(filter(None, ["" if group_of.startswith("/") else package, relative]))
        for one in chosen.value if isinstance(chosen.value, list) else [chosen]:
            if (file := _option_file(path, root, group, one)) is not None:
                composed = merge(composed, _compose(file, overrides, (*trail, path), below))
    return composed if is_merged else merge(composed, content)
