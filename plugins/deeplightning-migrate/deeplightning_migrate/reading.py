"""Read configs and scripts of other systems as nested mappings, in which a class with arguments is a `Call`.

A script is parsed, never run: the keyword arguments of its calls are its settings.
"""

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deeplightning.config.source import short, text_of
from deeplightning.config.tree import plain
from deeplightning.faults import ConfigError, Fault
from deeplightning_migrate.composed import read_mapping


@dataclass
class Call:
    """A call in a script: a class or function with arguments.

    Attributes:
        positional: the positional arguments, as source text.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)


# ---- YAML


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file of another system.

    Raises:
        ConfigError: it is not valid YAML, or not a mapping.
    """
    found = plain(read_mapping(path))
    return {str(name): item for name, item in found.items()}


# ---- Python


def read_python(path: Path) -> dict[str, Any]:
    """Return the settings of a script: the keyword arguments of its calls, and the defaults of its command line.

    Raises:
        ConfigError: it is not valid Python.
    """
    text = text_of(path)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        row = getattr(error, "lineno", None) or 1
        raise ConfigError(Fault(f"not Python: {error}", place=f"{short(path)}:{row}:1")) from None
    return Script(path.stem, tree).settings()


SETTING_CALLS = {"Stoke", "TorchTrainer", "PyTorchTrainer", "Trainer", "BoltTrainer", "DataLoader", "Bolt", "train"}
"""Calls whose keyword arguments are settings."""


class Script:
    """A parsed script: its imports, functions, classes and assigned values."""

    def __init__(self, module: str, tree: ast.Module):
        self.module, self.tree = module, tree
        self.imports: dict[str, str] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.classes: set[str] = set()
        self.values: dict[str, ast.expr] = {}
        self.resolving: set[str] = set()
        self.config_keys: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.imports |= {
                    a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
                }
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            elif isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, node)
            elif isinstance(node, ast.ClassDef):
                self.classes.add(node.name)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.values[node.targets[0].id] = node.value

    def name(self, node: ast.expr) -> str:
        """Return the full name of an expression, such as `torch.optim.SGD` for `optim.SGD`."""
        if isinstance(node, ast.Attribute):
            return f"{self.name(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            if node.id in self.functions or node.id in self.classes:
                return f"{self.module}.{node.id}"
            return self.imports.get(node.id, node.id)
        return ast.unparse(node)

    def value(self, node: ast.expr) -> Any:
        """Return the value of a literal, a `Call`, or the source text of any other expression."""
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        if isinstance(node, ast.Dict):
            return {
                str(self.value(k)): self.value(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None
            }
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Name) and node.id in self.values and node.id not in self.resolving:
            self.resolving.add(node.id)
            found = self.value(self.values[node.id])
            self.resolving.discard(node.id)
            return found
        if isinstance(node, ast.Name) and node.id in self.functions:
            return self.function_result(self.functions[node.id])
        if isinstance(node, ast.Call):
            return self.call(node)
        return self.name(node)

    def function_result(self, function: ast.FunctionDef) -> Any:
        """Return the call that a function such as `model_creator` returns; if it is not one call, the function's."""
        results = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
        if len(results) == 1 and function.name not in self.resolving:
            self.resolving.add(function.name)
            found = self.value(results[0])
            self.resolving.discard(function.name)
            if isinstance(found, Call):
                return found
        return Call(f"{self.module}.{function.name}")

    def call(self, node: ast.Call) -> Any:
        """Return a `Call`; for `config.get("lr", 0.1)`, the value in the script's `config`, else 0.1."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and 1 <= len(node.args) <= 2:
            name = self.value(node.args[0])
            self.config_keys.add(str(name))
            config = self.value(self.values["config"]) if "config" in self.values else self._passed_config()
            default = self.value(node.args[1]) if len(node.args) == 2 else None
            return config.get(name, default) if isinstance(config, dict) else default
        arguments = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}
        texts = [ast.unparse(item) for item in node.args]
        return Call(self.name(node.func), arguments, [text for text in texts if "parameters()" not in text])

    def _passed_config(self) -> Any:
        """Return the mapping that a call passes as `config`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.keyword) and node.arg == "config" and isinstance(node.value, ast.Dict):
                return self.value(node.value)
        return None

    def settings(self) -> dict[str, Any]:
        """Return all settings by name; the first occurrence counts."""
        found: dict[str, Any] = {}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call):
                continue
            last = self.name(node.func).rpartition(".")[2]
            if last == "add_argument" and node.args:
                name = str(self.value(node.args[-1])).lstrip("-")
                default = next((self.value(item.value) for item in node.keywords if item.arg == "default"), None)
                if default is not None:
                    found.setdefault(name.replace("-", "_"), default)
            elif last in SETTING_CALLS:
                for name, value in self.call(node).arguments.items():
                    for key, item in _expand_setting(name, value):
                        found.setdefault(key, item)
        return {key: item for key, item in found.items() if key not in self.config_keys}  # already used as arguments


def _expand_setting(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the settings in a keyword argument: the items of a mapping `config`, or the arguments of a settings object
    such as `ClipGradNormConfig`."""
    if name == "config" and isinstance(value, dict):
        return list(value.items())
    if isinstance(value, Call) and value.name.rpartition(".")[2].endswith("Config"):
        return [(f"{value.name.rpartition('.')[2]}.{key}", item) for key, item in value.arguments.items()]
    if name == "configs" and isinstance(value, list):
        return [pair for item in value for pair in _expand_setting(name, item) if isinstance(item, Call)]
    if isinstance(value, dict) and isinstance(value.get("optimizer"), str):  # an optimizer and its arguments
        return [(name, Call(value["optimizer"], value.get("optimizer_kwargs") or {}))]
    if isinstance(value, Call) and value.name.rpartition(".")[2] == "StokeOptimizer":
        arguments = value.arguments
        return [(name, Call(str(arguments.get("optimizer")), arguments.get("optimizer_kwargs") or {}))]
    return [(name, value)]
