"""Merge the trees of files and apply overrides to them; each value keeps the place that set it."""

import re
from dataclasses import replace
from typing import Any

from deeplightning.config.schema import Logger
from deeplightning.config.tree import Entry, key_named, kind, nodes, parse
from deeplightning.faults import ConfigError, Fault

OVERRIDE = "override "


def merge_file(base: Entry, top: Entry) -> Entry:
    """Merge the tree of a file over those below it, without the params of a logger that it replaces."""
    return _merge(_drop_logger_params(base, top), top)


def _merge(base: Entry, top: Entry) -> Entry:
    """Merge `top` over `base`: mappings at any depth are merged, anything else is replaced, `~name` removes `name`."""
    if not (isinstance(base.value, dict) and isinstance(top.value, dict)):
        return top
    merged = dict(base.value)
    for name, entry in sorted(top.value.items(), key=lambda item: not str(item[0]).startswith("~")):  # removals first
        if isinstance(name, str) and name.startswith("~") and (key := key_named(name[1:], base.value)) in base.value:
            merged.pop(key, None)
        else:
            merged[name] = _merge(merged[name], entry) if name in merged else entry
    return Entry(merged, top.place)


def _drop_logger_params(base: Entry, top: Entry) -> Entry:
    """Drop the logger params that files set in `base`, if `top` names a logger of another class."""
    below, above = (tree.value.get("logger") for tree in (base, top))
    if below is None or above is None or not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return base
    names = [section.value.get("type", Entry(Logger.type, "")).value for section in (below, above)]
    params = below.value.get("params")
    if "type" not in above.value or params is None or not isinstance(params.value, dict):
        return base
    if len({str(name).rpartition(".")[2].lower() for name in names}) == 1:  # Lightning's own MLFlowLogger too
        return base
    kept = {name: item for name, item in params.value.items() if item.place.startswith(OVERRIDE)}
    section = replace(below, value=below.value | {"params": replace(params, value=kept)})
    return replace(base, value=base.value | {"logger": section})


def apply_override(root: Entry, text: str) -> None:
    """Apply one override to the tree: `key=value`, `~key`, or `+list=[x]`."""
    place = f"{OVERRIDE}{text}"
    sign = text[:1] if text[:1] in ("~", "+") else ""
    name, equals, value = text.removeprefix(sign).partition("=")
    name = name.strip()
    parts = name.split(".")
    if name == "_base_":
        message = "`_base_` cannot be set by an override; write a file that has both, or name another config"
        raise ConfigError(Fault(message, name, place))
    is_hydras = name.startswith("+") or (sign == "+" and not value.lstrip().startswith("["))
    if not all(parts) or (equals == "") != (sign == "~") or name.startswith("-") or is_hydras:
        what = "unknown option, see --help; " if text.startswith("-") else ""
        raise ConfigError(Fault(f"{what}an override is key=value, ~key (remove), or +list=[x] (append)", place=place))
    new = None if sign == "~" else _override_value(value, name, place)
    if name == "logger.type" and new is not None:
        root.value = _drop_logger_params(root, Entry({"logger": Entry({"type": new}, place)}, place)).value
    above, last = _container_of(root, parts, place, make=sign != "~")
    items = above.value
    old = items[last] if isinstance(items, list) else items.get(last)
    if new is None:
        if old is None:
            raise ConfigError(Fault("there is no such key to remove", name, place))
        del items[last]
    elif sign == "+":
        before = [] if old is None or old.value is None else old.value
        if old is not None and not isinstance(before, list):
            raise ConfigError(Fault(f"`+` appends a list to a list; this is {kind(old)}", name, place))
        items[last] = Entry([*before, *new.value], place)
    else:
        items[last] = new


def _override_value(text: str, name: str, place: str) -> Entry:
    """Parse the value of an override, and set the place of everything in it."""
    problems: list[Fault] = []
    try:
        value = parse(text, place, problems, name.split("."), is_override=True)
    except ConfigError as error:
        problems = error.faults
    if problems:
        raise ConfigError([Fault(fault.message, name, place) for fault in problems])
    for _, entry in nodes(value):
        entry.place = place
    return value


def _container_of(entry: Entry, parts: list[str], place: str, make: bool) -> tuple[Entry, Any]:
    """Return the mapping or list that contains the last of `parts`, and its key or index there. `make` creates missing
    mappings on the way."""
    end = 0
    while True:
        depth, part, end = end, parts[end], end + 1
        above = ".".join(parts[:depth])
        if entry.value is None and make:
            entry.value = {}
        if isinstance(entry.value, list):
            length = len(entry.value)
            if not re.fullmatch("-?[0-9]{1,9}", part) or not -length <= int(part) < length:
                message = f"`{above}` is a list of {length}; `{part}` is not an index from 0 to {length - 1}"
                raise ConfigError(Fault(message, place=place))
            index: Any = int(part)
        elif isinstance(entry.value, dict):
            # A key may contain dots, as in `tune.space`: the longest one counts.
            end = next((n for n in range(len(parts), depth, -1) if ".".join(parts[depth:n]) in entry.value), end)
            index = key_named(".".join(parts[depth:end]), entry.value, parts[:depth])
        else:
            raise ConfigError(Fault(f"`{above}` is {kind(entry)}; `{part}` cannot be inside it", place=place))
        if end == len(parts):
            break
        if isinstance(entry.value, dict) and index not in entry.value:
            if not make:
                raise ConfigError(Fault("there is no such key to remove", ".".join(parts), place))
            entry.value[index] = Entry({}, place)
        entry = entry.value[index]
    return entry, index
