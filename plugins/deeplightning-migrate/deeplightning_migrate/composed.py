"""The config files of a project of LightningCLI or Hydra become one tree whose values know their lines."""

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
    """Return the tree of a project's config files, the later over the earlier; of Hydra over their defaults lists.

    Raises:
        ConfigError: a file cannot be read, is no mapping, or is in its own defaults list.
    """
    root = Entry({}, "")
    for file in files:
        root = over(root, _composed(file, _choices(file, ()), ()) if system == "hydra" else mapping(file))
    for section in [root, *(root.value.get(name) for name in SUBCOMMANDS)] if system == "lightning-cli" else []:
        items = section.value if section is not None and isinstance(section.value, dict) else {}
        for name in ("trainer", "model", "data", "optimizer", "lr_scheduler"):  # each may be a file of its own
            value = items[name].value if name in items else None
            if isinstance(value, str) and value.endswith((".yaml", ".yml")):
                items[name] = mapping(files[0].parent / value)
            elif isinstance(value, str):
                items[name] = Entry({"class_path": Entry(value, items[name].place)}, items[name].place)
    return root


def mapping(path: Path) -> Entry:
    """Return the tree of a YAML file of another system.

    Raises:
        ConfigError: it is no YAML, or no mapping.
    """
    faults: list[Fault] = []
    text = text_of(path)
    tree = parse(text, short(path), faults, ["params", "theirs"])  # keys have the types that YAML gives
    if faults:
        raise ConfigError(faults)
    if not isinstance(tree.value, dict):
        raise ConfigError(Fault("this file holds no mapping of settings; is this the right file?", place=short(path)))
    _as_yaml_1_1(tree, yaml.safe_load(text))
    return tree


def _as_yaml_1_1(entry: Entry, theirs: Any) -> None:
    """Take the words that both tools read as YAML 1.1 does, such as `yes` and `0x10`, for what they mean there."""
    if isinstance(entry.value, dict) and isinstance(theirs, dict):
        for key, item in entry.value.items():
            _as_yaml_1_1(item, theirs.get(key))
    elif isinstance(entry.value, list) and isinstance(theirs, list):
        for item, other in zip(entry.value, theirs, strict=True):
            _as_yaml_1_1(item, other)
    elif not isinstance(entry.value, dict | list) and isinstance(theirs, bool | int | float):
        entry.value = theirs


def over(base: Entry, top: Entry) -> Entry:
    """Lay one tree over another. The arguments of another class are none of those below."""
    if not (isinstance(base.value, dict) and isinstance(top.value, dict)):
        return top
    below, above = (tree.value.get("class_path") for tree in (base, top))
    if below is not None and above is not None and below.value != above.value:
        return top
    return Entry(
        base.value | {key: over(base.value[key], e) if key in base.value else e for key, e in top.value.items()},
        top.place,
    )


def _defaults(path: Path) -> tuple[Entry, list[tuple[str, Entry]]]:
    """Return a file of Hydra without its defaults list, and that list as pairs of a group and an option; a file of the
    same folder has the group `""`."""
    content = mapping(path)
    listed = content.value.pop("defaults", None)
    pairs = []
    for item in listed.value if listed is not None and isinstance(listed.value, list) else []:
        for group, option in item.value.items() if isinstance(item.value, dict) else [("", item)]:
            pairs += [(group, one) for one in (option.value if isinstance(option.value, list) else [option])]
    return content, pairs


def _choices(path: Path, trail: tuple[Path, ...], root: Path | None = None) -> dict[str, Entry]:
    """Return the options that files of a defaults list choose for other groups, by group: `override /data: mnist`."""
    root = root or path.parent
    found: dict[str, Entry] = {}
    if path in trail or len(trail) > MAX_FILES:
        raise ConfigError(Fault("this file is in its own defaults list; remove it there", place=short(path)))
    for group, option in _defaults(path)[1]:
        *words, name = group.split() or [""]
        if "override" in words:
            found[name.lstrip("/").partition("@")[0]] = option
        elif (file := _file(path, root, group, option)) is not None:
            found |= _choices(file, (*trail, path), root)
    return found


def _file(path: Path, root: Path, group: str, option: Entry) -> Path | None:
    """Return the file of an option; None: the option is null, `_self_`, optional and not there, or Hydra's own."""
    *words, name = group.split() or [""]
    name = name.partition("@")[0]
    if option.value in (None, "_self_") or name.lstrip("/").partition("/")[0] == "hydra":
        return None
    folder = root if name.startswith("/") or "override" in words else path.parent
    file = folder / name.lstrip("/") / f"{str(option.value).removesuffix('.yaml')}.yaml"
    return None if "optional" in words and not file.is_file() else file


def _composed(path: Path, choices: dict[str, Entry], trail: tuple[Path, ...], package: str = "") -> Entry:
    """Return the tree of a file of Hydra over its defaults, each below its package."""
    root = (trail or (path,))[0].parent
    content, pairs = _defaults(path)
    header = re.search(r"^#\s*@package\s+(\S+)", text_of(path), re.MULTILINE)
    if header and header[1] != "_group_":
        package = header[1].replace("_global_", "").lstrip(".")
    for part in reversed(package.split(".") if package else []):
        content = Entry({part: content}, content.place)
    made, is_laid = Entry({}, short(path)), False
    for group, option in pairs:
        *words, name = group.split() or [""]
        if option.value == "_self_":
            made, is_laid = over(made, content), True
            continue
        if "override" in words:
            continue
        group_of, _, at = name.partition("@")
        inside = f"{path.parent.relative_to(root)}/{group_of}".removeprefix("./").strip("/")
        whole = group_of.lstrip("/") if group_of.startswith("/") else inside
        file = _file(path, root, group, choices.get(whole, option) if name else option)
        if file is not None:
            relative = at or (group_of.lstrip("/") if group_of.startswith("/") else group_of).replace("/", ".")
            below = ".".join(filter(None, ["" if group_of.startswith("/") else package, relative]))
            made = over(made, _composed(file, choices, (*trail, path), below))
    return made if is_laid else over(made, content)
