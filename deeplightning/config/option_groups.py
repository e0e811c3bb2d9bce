"""Option groups: `_base_: [{model: resnet18}]` selects a file of the folder `model`, and `model=vit` on the command
line selects another."""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from deeplightning.config.packages import HOME
from deeplightning.config.tree import Entry, kind, parse
from deeplightning.faults import ConfigError, Fault, nearest
from deeplightning.own_code import frozen

SUFFIX = ".yaml"
SHIPPED_GROUPS = HOME / "configs"  # its folders are the option groups that ship with Deep Lightning
NAME = re.compile(r"[A-Za-z_][\w-]*(/[A-Za-z_][\w-]*)*", re.ASCII)
_OPTION = re.compile(r"[\w.+-]+(/[\w.+-]+)*")
_MAX_LISTED = 20  # options in an error message


@dataclass(frozen=True)
class Group:
    """One option group of a config, and the options chosen from it.

    Attributes:
        name: the path of its folder, `model/optimizer`.
        chosen: the options, where later ones override earlier ones; empty if none is chosen.
        place: where they were chosen.
        roots: the folders that may contain the group's folder, in search order.
    """

    name: str
    chosen: tuple[str, ...]
    place: str
    roots: list[Path] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Return the dotted key under which the options' content is placed."""
        return self.name.replace("/", ".")

    def options(self) -> list[str]:
        """Return the sorted names of the available options."""
        return sorted({file.stem for root in self.roots for file in (root / self.name).glob(f"[!.]*{SUFFIX}")})

    def find(self, option: str) -> tuple[Path, Path]:
        """Return the file of an option and the root folder that contains it.

        Raises:
            ConfigError: the group has no such option; the message lists the options and suggests the nearest.
        """
        if _OPTION.fullmatch(option) and ".." not in option.split("/"):
            for root in self.roots:
                if os.path.isfile(frozen(file := root / self.name / f"{option}{SUFFIX}")):  # noqa: PTH113  (long names)
                    return root, file
        options = self.options()
        listed = ", ".join(options[:_MAX_LISTED]) + (" …" if len(options) > _MAX_LISTED else "") or "none"
        message = f"the group has no option `{option:.60}`.{nearest(option, options)} There are: {listed}"
        raise ConfigError(Fault(message, self.name, self.place, found=option, allowed=listed))


def chosen(entry: Entry) -> tuple[str, ...]:
    """Return the options that a value names: one, several in a list, or none for null.

    Raises:
        ConfigError: the value is of another type.
    """
    if entry.value is None:
        return ()
    items = entry.value if isinstance(entry.value, list) else [entry]
    for item in items:
        if not (isinstance(item.value, str) and item.value):
            message = "a `_base_` is the path of a file, not a mapping; an option of a group is chosen by "
            message += f"{{GROUP: OPTION}}, where OPTION is the name of a file, not {kind(item)}"
            raise ConfigError(Fault(message, "_base_", item.place))
    return tuple(item.value for item in items)


def choices(overrides: Iterable[str]) -> dict[str, Entry]:
    """Return the overrides that may choose an option, `model=resnet18`, `model/optimizer=adam` or `model=null`, by
    group name."""
    found = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or not NAME.fullmatch(name):
            continue
        place = f"override {text}"
        with contextlib.suppress(ConfigError):  # reported by the override itself
            entry = parse(value, place, [], is_override=True)
            if chosen(entry) or entry.value is None:
                found[name] = Entry(entry.value, place)
    return found
