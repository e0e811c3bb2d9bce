"""Read what a project's Python files pass to LightningCLI: classes, defaults, and links between arguments.

The files are parsed, never run. Code that changes the training but has no key in a config is reported with its line.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deeplightning.config.source import short, text_of
from deeplightning.config.tree import Entry, entry_at
from deeplightning.faults import ConfigError, Fault
from deeplightning.signatures import definition
from deeplightning.signatures.signature import Undecided
from deeplightning_migrate.composed import merge
from deeplightning_migrate.reading import Script

CLI_PARAMETERS = (
    *("model_class", "datamodule_class", "save_config_callback", "save_config_kwargs"),
    *("trainer_class", "trainer_defaults", "seed_everything_default"),
)
"""The first parameters of LightningCLI, in order."""
SECTIONS = {"model_class": "model", "datamodule_class": "data"}
REGISTER_METHODS = {
    "add_optimizer_args": (("optimizer_class", "nested_key", "link_to"), "optimizer"),
    "add_lr_scheduler_args": (("lr_scheduler_class", "nested_key", "link_to"), "lr_scheduler"),
    "add_lightning_class_args": (("lightning_class", "nested_key"), ""),
}
"""Methods of its parser that take a class: their parameters and the default section."""
OVERRIDDEN_METHODS = (
    *("before_instantiate_classes", "instantiate_classes", "after_instantiate_classes", "instantiate_trainer"),
    *("configure_optimizers", "before_fit", "fit"),
)
"""Methods that a subclass of LightningCLI may override to change the training."""


class CliScript:
    """The call of LightningCLI in a project.

    Args:
        folders: the folders of its Python files.
        files: the Python files that the user named; if none, one file in the folders must call LightningCLI.

    Attributes:
        classes: the class of each section, such as {"model": "net.Model"}.
        callbacks: the sections that are callbacks.
        faults: what cannot be converted.

    Raises:
        ConfigError: several files call LightningCLI.
    """

    def __init__(self, folders: Sequence[Path], files: Sequence[Path] = ()):
        self.classes: dict[str, str] = {}
        self.callbacks: list[str] = []
        self.faults: list[Fault] = []
        self._imports: dict[str, str] = {}
        self._place = ""
        self._defaults = Entry({}, "")
        self._links: list[tuple[str, str, str]] = []
        named = [file.absolute() for file in files]
        scripts = {path: s for path in [*named, *_python_files(folders)] if (s := _parse_script(path)) is not None}
        if lost := [path for path in named if path not in scripts]:
            message = "there is no Python file of this name that calls LightningCLI"
            raise ConfigError(Fault(message, place=short(lost[0])))
        names = {"LightningCLI"}
        for _ in scripts:
            names |= {
                node.name for s in scripts.values() for node in _nodes(s, ast.ClassDef) if _is_subclass(s, node, names)
            }
        calls = [(p, n) for p, s in scripts.items() for n in _nodes(s, ast.Call) if _last_name(s, n.func) in names]
        others = {path for path, _ in calls if named and path not in named}
        calls = [(path, node) for path, node in calls if path not in others]
        if len(calls) > 1:
            places = " and ".join(_place(path, node) for path, node in calls)
            raise ConfigError(Fault(f"{places} call LightningCLI; add the Python file that trains to the command"))
        for path, node in calls:
            self._read_call(path, scripts[path], node)
        for path, script in scripts.items() if calls else ():
            for cli in _nodes(script, ast.ClassDef) if path not in others else ():
                if _is_subclass(script, cli, names):
                    self._read_class(path, script, cli)

    def _refuse(self, path: Path, node: Any, message: str) -> None:
        self.faults.append(Fault(message, place=_place(path, node)))

    def _read_call(self, path: Path, script: Script, call: ast.Call) -> None:
        self._place = _place(path, call)
        self._imports = script.imports | {name: f"{path.stem}.{name}" for name in script.classes}
        for name, node in _arguments(call, CLI_PARAMETERS).items():
            if name in SECTIONS:
                self._add_class(path, script, SECTIONS[name], node)
            elif name == "trainer_defaults":
                self._add_defaults(path, node, "trainer")
            elif name == "seed_everything_default":
                if type(script.value(node)) is int:
                    self._add_defaults(path, node, "seed_everything")
            elif name in ("trainer_class", "parser_kwargs", "args"):
                self._refuse(path, node, f"`{name}` of LightningCLI has no key here; set its values in the config")
        top = [node for node in script.tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If)]
        if any(call in ast.walk(node) for node in top):
            for name in [name for name in self.classes.values() if name.startswith(f"{path.stem}.")]:
                message = f"importing {name} would start LightningCLI; call it below `if __name__ == '__main__':`"
                self._refuse(path, call, message)

    def _read_class(self, path: Path, script: Script, cli: ast.ClassDef) -> None:
        for node in ast.walk(cli):
            if isinstance(node, ast.FunctionDef) and node.name in OVERRIDDEN_METHODS:
                message = f"`{node.name}` may change what is trained; move its code into the modules or a callback"
                self._refuse(path, node, message)
            elif not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            elif node.func.attr == "link_arguments":
                self._add_link(path, script, node)
            elif node.func.attr == "set_defaults":
                for values in node.args:
                    self._add_defaults(path, values)
                for keyword in node.keywords:
                    self._add_defaults(path, keyword.value, keyword.arg or "")
            elif node.func.attr in REGISTER_METHODS:
                parameters, section = REGISTER_METHODS[node.func.attr]
                arguments = _arguments(node, parameters)
                if "nested_key" in arguments:
                    section = str(script.value(arguments["nested_key"]))
                if "link_to" in arguments:
                    message = "`link_to` has no key here; pass the optimizer as an argument of the model"
                    self._refuse(path, arguments["link_to"], message)
                elif parameters[0] in arguments:
                    self._add_class(path, script, section, arguments[parameters[0]])
                    if node.func.attr == "add_lightning_class_args" and section in self.classes:
                        self.callbacks.append(section)

    def _add_class(self, path: Path, script: Script, section: str, node: ast.expr) -> None:
        if isinstance(node, ast.Name | ast.Attribute):
            self.classes[section] = script.name(node)

    def _add_defaults(self, path: Path, node: ast.expr, key: str = "") -> None:
        """Merge literal values into the defaults at a dotted key; the keys of a mapping may be dotted too."""
        try:
            value = ast.literal_eval(node)
        except ValueError:
            self._refuse(path, node, "these defaults are not plain values; set them in the config")
            return
        place = _place(path, node)
        for inner, item in value.items() if not key else [(key, value)]:
            tree = _entry(item, place)
            for name in reversed(str(inner).split(".")):
                tree = Entry({name: tree}, place)
            self._defaults = merge(self._defaults, tree)

    def _add_link(self, path: Path, script: Script, node: ast.Call) -> None:
        arguments = _arguments(node, ("source", "target", "compute_fn", "apply_on"))
        values = {name: script.value(item) for name, item in arguments.items()}
        source, target = values.get("source"), values.get("target")
        is_plain = isinstance(source, str) and isinstance(target, str) and values.get("compute_fn") is None
        if is_plain and values.get("apply_on", "parse") == "parse":
            self._links.append((str(source), str(target), _place(path, node)))
        else:
            self._refuse(path, node, "this link is computed when LightningCLI runs; set its value in the config")

    def complete_settings(self, items: dict[str, Entry]) -> dict[str, Entry]:
        """Return the settings of a project, completed with the classes, defaults and links of its Python files."""
        tree: dict[str, Entry] = merge(self._defaults, Entry(items, "")).value
        for name, kind in self.classes.items():
            entry = tree.get(name) or Entry({}, self._place)
            if isinstance(entry.value, dict) and "class_path" not in entry.value:
                tree[name] = Entry({"class_path": Entry(kind, entry.place), "init_args": entry}, entry.place)
        for source, target, place in self._links:
            value = self._link_value(tree, source)
            if value is None:
                message = f"`{source}` has no value that can be read; set it in the config"
                self.faults.append(Fault(message, place=place))
                continue
            section, *inner = _key_path(tree, target)
            for name in reversed(inner):
                value = Entry({name: value}, value.place)
            tree[section] = merge(tree[section], value) if section in tree else value
        for name in self.callbacks:
            trainer = tree.setdefault("trainer", Entry({}, self._place)).value
            found = trainer.get("callbacks") or Entry([], self._place)
            callbacks = found.value if isinstance(found.value, list) else [found]
            trainer["callbacks"] = Entry([*[each for each in callbacks if each.value], tree.pop(name)], found.place)
        return tree

    def full_name(self, name: str) -> str:
        """Return the full name of a class that the Python file imports; return other names unchanged."""
        return name if "." in name else self._imports.get(name, name)

    def _link_value(self, tree: dict[str, Entry], source: str) -> Entry | None:
        """Return the value at a key, else the default of the class's parameter."""
        section, *inner = _key_path(tree, source)
        found, kind = (entry_at(Entry(tree, ""), [section, *path]) for path in (inner, ["class_path"]))
        if found is not None or kind is None or len(inner) != 2 or inner[0] != "init_args":
            return found
        try:
            parameters = definition.look_up(str(kind.value)).signature().parameters
            defaults = {p.name: p.default for p in parameters if not p.required}
        except (ValueError, Undecided):
            return None
        default = defaults.get(inner[1])
        return Entry(default, tree[section].place) if isinstance(default, str | int | float | bool) else None


def _python_files(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in dict.fromkeys(folder.absolute() for folder in folders):
        yield from sorted(folder.glob("*.py"))


def _parse_script(path: Path) -> Script | None:
    """Return a parsed Python file, or None if it cannot call LightningCLI or a class derived from it."""
    try:
        text = text_of(path)
        return Script(path.stem, ast.parse(text)) if "CLI" in text else None
    except (ConfigError, SyntaxError, ValueError, RecursionError):
        return None


def _nodes(script: Script, kind: Any) -> list[Any]:
    return [node for node in ast.walk(script.tree) if isinstance(node, kind)]


def _last_name(script: Script, node: ast.expr) -> str:
    return script.name(node).rpartition(".")[2]


def _is_subclass(script: Script, node: ast.ClassDef, names: set[str]) -> bool:
    return any(_last_name(script, base) in names for base in node.bases)


def _arguments(call: ast.Call, names: Sequence[str]) -> dict[str, ast.expr]:
    """Return the arguments of a call by name."""
    return dict(zip(names, call.args, strict=False)) | {word.arg: word.value for word in call.keywords if word.arg}


def _place(path: Path, node: Any) -> str:
    return f"{short(path)}:{node.lineno}:{node.col_offset + 1}"


def _entry(value: Any, place: str) -> Entry:
    """Return a plain value as a tree."""
    if isinstance(value, dict):
        return Entry({str(name): _entry(item, place) for name, item in value.items()}, place)
    return Entry([_entry(item, place) for item in value] if isinstance(value, list) else value, place)


def _key_path(tree: dict[str, Entry], key: str) -> list[str]:
    """Return the path of a key in the tree; the arguments of a class are below `init_args`."""
    section, *inner = key.split(".")
    entry = tree.get(section)
    has_class = entry is not None and isinstance(entry.value, dict) and "class_path" in entry.value
    return [section, *(["init_args"] if has_class and inner and inner[0] != "init_args" else []), *inner]
