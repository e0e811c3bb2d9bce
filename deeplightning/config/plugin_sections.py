"""Make the class of a config with the sections that installed packages add.

`plugins` is imported where it is needed, since that takes 0.06 CPU s.
"""

import functools
from collections.abc import Collection
from dataclasses import make_dataclass
from typing import Any, cast

from deeplightning.config.schema import Config, PluginSection, key, keys
from deeplightning.faults import SetupError, not_installed, plugin_of


def names() -> list[str]:
    """Return the names of the sections that installed packages add."""
    from deeplightning.config import plugins

    core = {field.name for field in keys(Config)}
    return [name for name in plugins.names(plugins.SCHEMA) if name not in core]


def config_class(found: Collection[str] | None = None) -> type[Config]:
    """Return `Config` with the sections of plug-ins.

    Args:
        found: the top-level keys of a config, whose sections alone are added; None: those of all installed packages.

    Raises:
        SetupError: an entry point cannot be imported, or is no section.
    """
    if found is not None and {field.name for field in keys(Config)}.issuperset(found):
        return Config
    return _extended(*(name for name in names() if found is None or name in found))


@functools.cache
def _extended(*sections: str) -> type[Config]:
    """Return `Config` with these sections, each null by default. Its instances can be pickled."""
    if not sections:
        return Config
    from deeplightning.config import plugins

    more = []
    for name in sections:
        cls = plugins.load(plugins.SCHEMA, name)
        if not (isinstance(cls, type) and issubclass(cls, PluginSection)):
            raise SetupError(f"the section {name} of an installed package is no PluginSection: {cls!r:.200}")
        doc = (cls.__doc__ or name).strip().splitlines()[0].rstrip(".")
        doc = f"{doc[0].lower()}{doc[1:]}; null: none"
        if plugin := plugin_of(f"{name}:"):
            doc += f"; {not_installed(plugin)}"  # also in a JSON Schema that is read without the plug-in
        more.append((name, cls | None, key(doc, None)))
    members = {"__doc__": Config.__doc__, "__reduce__": lambda config: (_restored, (sections, vars(config)))}
    return cast("type[Config]", make_dataclass("Config", more, bases=(Config,), namespace=members))


def _restored(sections: tuple[str, ...], values: dict[str, Any]) -> Config:
    config = object.__new__(_extended(*sections))
    vars(config).update(values)
    return config
