"""The public surface and the size of the code are frozen in `tests/surface.toml`, which each addition must edit.

The commit that adds a verb, a key, a variable, an exit code, an entry point or an upper bound states what was removed
for it or why it is worth it. The line limit of a folder falls, or the commit states why it rises.
"""

import inspect
import re
import tomllib
from itertools import chain
from pathlib import Path

import click
import pytest

from deeplightning import faults
from deeplightning.cli import cli
from deeplightning.config import schema
from deeplightning.config.allowed import sections
from deeplightning.config.plugins import VERBS, load

ROOT = Path(__file__).parents[2]
FROZEN = tomllib.loads((ROOT / "tests" / "surface.toml").read_text())
SPARE = 100  # lines by which a folder may be below its limit
MOST_OF_A_PLUGIN = 3_000  # lines


def verbs() -> dict[str, list[str]]:
    """Return the options of each visible verb by their longest names; those of plug-ins that are not installed are
    taken from the file."""
    of_plugins = [name for name in chain(*faults.PLUGINS.values()) if name.isidentifier() and name.islower()]
    cli.import_rest()
    found = dict(cli.commands) | {name: load(VERBS, name) for name in of_plugins}
    return {
        name: FROZEN["verbs"][name]
        if verb is None
        else sorted(max(o.opts, key=len) for o in verb.params if isinstance(o, click.Option) and not o.hidden)
        for name, verb in found.items()
        if verb is None or (not verb.hidden and getattr(verb.callback, "__module__", "").startswith("deeplightning"))
    }


def keys() -> dict[str, list[str]]:
    """Return the keys of each config section; those of plug-ins that are not installed are taken from the file."""
    found = {path or "top": sorted(field.name for field in schema.keys(cls)) for path, cls in sections(schema.Config)}
    of_plugins = [name[:-1] for name in chain(*faults.PLUGINS.values()) if name.endswith(":")]
    missing = {name: FROZEN["keys"][name] for name in of_plugins if name not in found}
    return found | {"top": sorted([*found["top"], *missing])} | missing


def sources() -> list[Path]:
    """Return the Python files of the product and its plug-ins."""
    folders = [ROOT / "deeplightning", ROOT / "serve", *sorted(ROOT.glob("plugins/*/deeplightning_*"))]
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def variables() -> list[str]:
    """Return the `DEEPLIGHTNING_…` variables that the code or a script reads or sets."""
    texts = [path.read_text() for path in (*sources(), *ROOT.glob("*.sh"))]
    return sorted({name for text in texts for name in re.findall(r"\bDEEPLIGHTNING_[A-Z_]*[A-Z]\b", text)})


def exit_codes() -> list[int]:
    """Return the exit codes of the error classes."""
    return sorted({c.exit_code for _, c in inspect.getmembers(faults, inspect.isclass) if hasattr(c, "exit_code")})


def bounds() -> list[str]:
    """Return the requirements with an upper bound or an excluded release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for found in project["optional-dependencies"].values() for each in found]
    return sorted(each.partition(";")[0].strip() for each in (*project["dependencies"], *extras) if "<" in each)


def entry_points() -> list[str]:
    """Return the groups of entry points that the product looks up."""
    group = re.compile(r'"(deeplightning\.(?:verbs|targets|launchers|rules|schema|dry_run))"')
    return sorted({name for path in sources() for name in group.findall(path.read_text())})


def folder_of(path: Path) -> str:
    """Return the folder to which a Python file counts: a package in `deeplightning`, a plug-in, or `serve`."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: 2 if len(parts) > 2 and parts[0] != "serve" else 1])


def lines() -> dict[str, int]:
    """Return the lines of the product's Python files by folder."""
    found: dict[str, int] = {}
    for path in sources():
        found[folder_of(path)] = found.get(folder_of(path), 0) + path.read_text().count("\n")
    return found


@pytest.mark.parametrize("found", [verbs, keys, variables, exit_codes, entry_points, bounds])
def test_the_surface_is_the_list(found):
    """The surface equals the list: an addition or a removal is an edit of the file."""
    assert found() == FROZEN[found.__name__]


def test_no_folder_grows():
    """A folder has at most its number of lines, a limit that is too high must fall, and plug-ins have a maximum."""
    now, most = lines(), FROZEN["lines"]
    assert {folder: count for folder, count in now.items() if count > most.get(folder, 0)} == {}
    assert {folder: count for folder, count in most.items() if count > now.get(folder, 0) + SPARE} == {}
    plugins = {folder: count for folder, count in most.items() if folder.startswith("plugins/")}
    assert [folder for folder, count in plugins.items() if count > MOST_OF_A_PLUGIN] == []
