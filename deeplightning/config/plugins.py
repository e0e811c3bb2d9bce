"""Read the entry points by which installed packages add verbs, short names and launchers; listing imports nothing.

https://packaging.python.org/specifications/entry-points
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from deeplightning.faults import SetupError
from deeplightning.words import first_line

# Groups of entry points.
VERBS = "deeplightning.verbs"  # a `click.Command` each
TARGETS = "deeplightning.targets"  # short names, of any section of a config
LAUNCHERS = "deeplightning.launchers"  # short names of `engine.launcher`
SCHEMA = "deeplightning.schema"  # sections of a config: a dataclass each, a subclass of `PluginSection`
DRY_RUN = "deeplightning.dry_run"  # repeats a dry run on the devices and in the processes of a config


def names(group: str) -> list[str]:
    """Return the names that installed packages have in a group, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def full_names(group: str, name: str) -> list[str]:
    """Return the dotted names, MODULE.NAME, of a name in a group; several if several packages define it."""
    found = {entry.value for entry in entry_points(group=group, name=name)}
    return sorted(value.partition("[")[0].strip().replace(":", ".") for value in found)


def load(group: str, name: str) -> Any:
    """Import and return the object behind a name of a group; None: no package has it.

    Raises:
        SetupError: several packages have it, or importing it fails.
    """
    found: list[EntryPoint] = [*entry_points(group=group, name=name)]
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
