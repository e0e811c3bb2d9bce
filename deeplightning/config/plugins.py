"""Read the entry points by which installed packages add verbs, short names, launchers and sections of a config. Listing
them imports nothing.

https://packaging.python.org/specifications/entry-points
"""

import functools
from collections.abc import Collection
from dataclasses import make_dataclass
from typing import Any, cast

from deeplightning.config.schema import Config, PluginSection, key, keys
from deeplightning.faults import SetupError, not_installed, plugin_of
from deeplightning.words import first_line

# Groups of entry points.
VERBS = "deeplightning.verbs"  # a `click.Command` each
TARGETS = "deeplightning.targets"  # short names, of any section of a config
LAUNCHERS = "deeplightning.launchers"  # short names of `engine.launcher`
SCHEMA = "deeplightning.schema"  # sections of a config: a dataclass each, a subclass of `PluginSection`
DRY_RUN = "deeplightning.dry_run"  # repeats a dry run on the devices and in the processes of a config


def entry_points(**which: Any) -> Any:
    """Return the entry points of a group, optionally only those with a name."""
    from importlib import metadata  # 0.06 CPU s, which most commands do without

    return metadata.entry_points(**which)


def names(group: str) -> list[str]:
    """Return the names that installed packages define in a group, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def full_names(group: str, name: str) -> list[str]:
    """Return the dotted names, MODULE.NAME, of a name in a group; several if several packages define it."""
    found = {entry.value for entry in entry_points(group=group, name=name)}
    return sorted(value.partition("[")[0].strip().replace(":", ".") for value in found)


def load(group: str, name: str) -> Any:
    """Import and return the object behind a name of a group; None if no package defines it.

    Raises:
        SetupError: several packages define it, or importing it fails.
    """
    found = [*entry_points(group=group, name=name)]
    if not found:
        return None
    owners = sorted({entry.dist.name if entry.dist is not None else entry.value for entry in found})
    if len({entry.value for entry in found}) > 1:
        raise SetupError(f"{name}: several installed packages add it: {', '.join(owners)}; uninstall all but one")
    try:
        return found[0].load()
    except Exception as error:
        message = f"{name}, which the installed package {owners[0]} adds, cannot be imported: {first_line(error)}"
        raise SetupError(message) from error


# ---- sections of a config


def section_names() -> list[str]:
    """Return the names of the sections that installed packages add."""
    core = {field.name for field in keys(Config)}
    return [name for name in names(SCHEMA) if name not in core]


def config_class(found: Collection[str] | None = None) -> type[Config]:
    """Return `Config` with the sections of plug-ins.

    Args:
        found: the top-level keys of a config, to add only their sections; None: add those of all installed packages.

    Raises:
        SetupError: an entry point cannot be imported, or is not a section.
    """
    if found is not None and {field.name for field in keys(Config)}.issuperset(found):
        return Config
    return _extended_config(*(name for name in section_names() if found is None or name in found))


@functools.cache
def _extended_config(*sections: str) -> type[Config]:
    """Return `Config` with these sections, each null by default. Its instances can be pickled."""
    if not sections:
        return Config
    more = []
    for name in sections:
        cls = load(SCHEMA, name)
        if not (isinstance(cls, type) and issubclass(cls, PluginSection)):
            raise SetupError(f"the section {name} of an installed package is not a PluginSection: {cls!r:.200}")
        doc = (cls.__doc__ or name).strip().splitlines()[0].rstrip(".")
        doc = f"{doc[0].lower()}{doc[1:]}; null: none"
        if plugin := plugin_of(f"{name}:"):
            doc += f"; {not_installed(plugin)}"  # also in a JSON Schema that is read without the plug-in
        more.append((name, cls | None, key(doc, None)))
    members = {"__doc__": Config.__doc__, "__reduce__": lambda config: (_restored, (sections, vars(config)))}
    return cast("type[Config]", make_dataclass("Config", more, bases=(Config,), namespace=members))


def _restored(sections: tuple[str, ...], values: dict[str, Any]) -> Config:
    config = object.__new__(_extended_config(*sections))
    vars(config).update(values)
    return config
