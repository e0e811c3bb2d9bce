"""Import rules, so that a network can be deleted, and the server started, without the rest.

`LAYERS` lists the folders of the core from top to bottom: a file imports files of its own folder and of folders later
in the list. Nothing imports the entry points. `serve` imports only `image_spec`, `text_spec`, `table_spec`,
`array_spec`, `kinds`, `runfolder` and `words`; only `api`, `torch_server`, the MLflow model and `predict RUN FILE`,
whose answers are those of the endpoint, import `serve`. The parts (`data`, `task`, `model`) are named in YAML and
imported by no module; of the core they import only `config.target.build`, the types in `config.part_config`,
`batches`, `figures`, the modules `…_spec`, `kinds`, `transfer` and `words`. A plug-in imports the core, but neither an
entry point nor another plug-in; the core imports and names no module of a plug-in.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from deeplightning.faults import PLUGINS
from deeplightning.version import __version__

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = {"deeplightning", "__main__", "api", "torch_server"}
"""What a user imports or starts: an entry point may import everything, and only entry points import it."""
LAYERS = [
    *("cli", "sweep", "reproduce", "dry_run", "run", "report", "callbacks", "export", "launch", "tracking"),
    *("engine", "config", "signatures", "process", "private", "figures"),
]
BASE = {
    *("array_spec", "batches", "faults", "image_spec", "kinds", "own_code", "runfolder", "table_format", "table_spec"),
    *("text_spec", "transfer", "unified", "version", "words"),
}
"""Files that any folder of the core may import, and that import only each other."""
IMPORT_SERVE = {
    *("deeplightning.api", "deeplightning.torch_server", "deeplightning.tracking.pyfunc"),
    "deeplightning.tracking.flavour",
    *("deeplightning.run.inputs", "deeplightning.run.predict"),
}
PARTS = {"data", "task", "model"}
OPEN_TO_PARTS = {
    *("config.target.build", "config.part_config", "batches", "figures", "words", "transfer", "kinds"),
    *("image_spec", "text_spec", "table_format", "table_spec", "array_spec"),
}
FILES = sorted([*ROOT.glob("deeplightning/**/*.py"), *ROOT.glob("serve/**/*.py")])


def name_of(file: Path) -> str:
    """`deeplightning.config.schema` of `deeplightning/config/schema.py`; a folder's `__init__` counts as the folder."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree, which is parsed once."""
    return [*ast.walk(ast.parse(file.read_text()))]


@cache
def imported_by(file: Path) -> set[str]:
    """Return each dotted name that a file imports anywhere: `a.b.c` for `import a.b.c` and for `from a.b import c`."""
    names: set[str] = set()
    package = name_of(file).split(".") + ([""] if file.name == "__init__.py" else [])
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: -node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{source}.{alias.name}" for alias in node.names}
    return names


def layer(name: str) -> str:
    """`config` of `deeplightning.config.schema`; `serve` and `deeplightning` of themselves."""
    first, *rest = name.split(".")
    return rest[0] if first == "deeplightning" and rest else first


def allowed(importer: str, imported: str) -> bool:
    """Return whether a module of the product may import a name of the product."""
    here, there = layer(importer), layer(imported)
    if here == there:
        return True
    if here in PARTS:
        return any(f"{imported}.".startswith(f"deeplightning.{name}.") for name in OPEN_TO_PARTS)
    if importer in IMPORT_SERVE and there == "serve":
        return True
    if here == "serve":
        return there in BASE - {"batches", "faults", "own_code", "transfer", "unified", "version"}
    if here in ENTRIES or there in BASE:
        return there not in PARTS | {"serve"} and (there not in ENTRIES or here in ENTRIES)
    return here in LAYERS and there in LAYERS and LAYERS.index(here) < LAYERS.index(there)


def test_imports_only_go_down():
    """No module imports a higher layer, and the core imports no part."""
    pairs = [(name_of(file), name) for file in FILES for name in imported_by(file)]
    ours = [pair for pair in pairs if pair[1].split(".")[0] in {"deeplightning", "serve"}]
    assert [f"{importer} imports {imported}" for importer, imported in ours if not allowed(importer, imported)] == []


def test_no_imports_go_in_a_circle():
    """No file imports itself through others, whether at its top or inside a function."""
    files = {name_of(file): file for file in FILES}

    def file_of(name: str) -> str:
        return name if name in files or "." not in name else file_of(name.rpartition(".")[0])

    imports = {
        name: {file_of(other) for other in imported_by(file)} & (files.keys() - {name}) for name, file in files.items()
    }
    assert [*TopologicalSorter(imports).static_order()]  # raises CycleError, which names the files


def test_the_core_names_no_plugin_and_no_plugin_another():
    """A plug-in can be removed: the core has its names only in `deeplightning.faults.PLUGINS`."""
    named = {name_of(file): re.findall(r"\bdeeplightning_[a-z]\w*", file.read_text()) for file in FILES}
    tops = {folder.name.replace("-", "_") for folder in ROOT.glob("plugins/*")}
    assert {name: found for name, found in named.items() if tops & {*found}} == {}
    for folder in ROOT.glob("plugins/*"):
        own = folder.name.replace("-", "_")
        imported = {name for file in folder.glob("deeplightning_*/**/*.py") for name in imported_by(file)}
        parts = [name.split(".") for name in imported]
        assert {first for first, *_ in parts} & (tops - {own}) == set()
        assert {rest[0] for first, *rest in parts if first == "deeplightning" and rest} & ENTRIES == set()


def test_the_table_of_plugins_has_their_entry_points():
    """What `PLUGINS` lists is in the pyproject.toml of each plug-in, and each plug-in is an extra of the core."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {}
    for folder in ROOT.glob("plugins/*"):
        plugin = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        name = plugin["name"].removeprefix("deeplightning-")
        groups = plugin["entry-points"].items()
        entries = {f"{entry}{':' * group.endswith('.schema')}" for group, added in groups for entry in added}
        found[name] = sorted(entries)
        assert plugin["name"] == folder.name
        assert plugin["version"] == __version__
        core, *others = plugin["dependencies"]
        assert core == f"deeplightning=={__version__}"
        assert {*others} <= {*project["dependencies"], *project["optional-dependencies"]["dev"]}  # so the lock has them
        assert project["optional-dependencies"][name] == [folder.name]
        assert [path.name for path in (folder / "tests").glob("test_*.py")]
        assert [*folder.glob("deeplightning_*/docs/*.md")]
    attributes = {plugin: [name.rpartition(".")[2] for name in names] for plugin, names in PLUGINS.items()}
    assert found == {plugin: sorted(names) for plugin, names in attributes.items()}


def test_every_module_has_its_place():
    """A file in no layer would escape the rules above."""
    known = {"serve", *ENTRIES, *LAYERS, *PARTS, *BASE}
    assert [name_of(file) for file in FILES if layer(name_of(file)) not in known] == []


def test_no_base_name_occurs_twice():
    """A file name states its purpose, so no two files of the core share one."""
    names = Counter(path.name for path in (ROOT / "deeplightning").rglob("*.py") if path.name != "__init__.py")
    assert [name for name, number in names.items() if number > 1] == []


def test_only_one_place_imports_by_name():
    """Only config/target.py calls `importlib.import_module`, and nothing calls `__import__`, except own_code.py for the
    imports of a user's own files."""
    users = {
        name_of(file)
        for file in FILES
        for node in nodes_of(file)
        if {"import_module", "__import__"} & {getattr(node, field, None) for field in ("id", "attr", "name")}
    }
    assert users <= {"deeplightning.config.target", "deeplightning.own_code"}


def test_light_modules_stay_light():
    """Importing every module of a light layer loads no heavy library, directly or through others."""
    light, heavy = {"config", "image_spec", "text_spec", "runfolder", "serve"}, {"torch", "pytorch_lightning", "mlflow"}
    names = [n for n in map(name_of, FILES) if layer(n) in light and not n.endswith("__main__")]
    program = f"import sys, {', '.join(names)}; print(*sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
