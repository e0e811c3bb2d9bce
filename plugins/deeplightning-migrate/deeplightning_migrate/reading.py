"""Configs and scripts of other systems as nested mappings, in which a class with arguments is a `Call`.

A script is parsed, never run: the keywords of its calls are its settings.
"""

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deeplightning.config.source import short, text_of
from deeplightning.config.tree import plain
from deeplightning.faults import ConfigError, Fault
from deeplightning_migrate.composed import mapping


@dataclass
class Call:
    """A class or function with arguments: a call of a script.

    Attributes:
        positions: the arguments without a name, as source text.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    positions: list[str] = field(default_factory=list)


# ---- YAML


def read_yaml(path: Path) -> dict[str, Any]:
    """Return what a YAML file of another system holds.

    Raises:
        ConfigError: it is no YAML, or no mapping.
    """
    found = plain(mapping(path))
    return {str(name): item for name, item in found.items()}


# ---- Python


def read_python(path: Path) -> dict[str, Any]:
    """Return the settings of a script: the keywords of the calls that it makes, and the defaults of its command line.

    Raises:
        ConfigError: it is no Python.
    """
    text = text_of(path)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        row = getattr(error, "lineno", None) or 1
        raise ConfigError(Fault(f"not Python: {error}", place=f"{short(path)}:{row}:1")) from None
    return Script(path.stem, tree).settings()


MAIN = {"Stoke", "TorchTrainer", "PyTorchTrainer", "Trainer", "BoltTrainer", "DataLoader", "Bolt", "train"}
"""Calls whose keywords are settings."""


class Script:
    """A script's imports, functions and values, by name."""

    def __init__(self, module: str, tree: ast.Module):
        self.module, self.tree = module, tree
        self.imports: dict[str, str] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.classes: set[str] = set()
        self.values: dict[str, ast.expr] = {}
        self.open: set[str] = set()
        self.used: set[str] = set()
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
        """Return `torch.optim.SGD` of what is written `optim.SGD`."""
        if isinstance(node, ast.Attribute):
            return f"{self.name(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            if node.id in self.functions or node.id in self.classes:
                return f"{self.module}.{node.id}"
            return self.imports.get(node.id, node.id)
        return ast.unparse(node)

    def value(self, node: ast.expr) -> Any:
        """Return a literal, a call, or the source text of anything else."""
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
        if isinstance(node, ast.Name) and node.id in self.values and node.id not in self.open:
            self.open.add(node.id)
            found = self.value(self.values[node.id])
            self.open.discard(node.id)
            return found
        if isinstance(node, ast.Name) and node.id in self.functions:
            return self.made_by(self.functions[node.id])
        if isinstance(node, ast.Call):
            return self.call(node)
        return self.name(node)

    def made_by(self, function: ast.FunctionDef) -> Any:
        """Return what a function such as a `model_creator` returns, where that is one call; else its name."""
        answers = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
        if len(answers) == 1 and function.name not in self.open:
            self.open.add(function.name)
            found = self.value(answers[0])
            self.open.discard(function.name)
            if isinstance(found, Call):
                return found
        return Call(f"{self.module}.{function.name}")

    def call(self, node: ast.Call) -> Any:
        """Return a call; `config.get("lr", 0.1)` is what the script's `config` has, else 0.1."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and 1 <= len(node.args) <= 2:
            name = self.value(node.args[0])
            self.used.add(str(name))
            known = self.value(self.values["config"]) if "config" in self.values else self._given()
            default = self.value(node.args[1]) if len(node.args) == 2 else None
            return known.get(name, default) if isinstance(known, dict) else default
        arguments = {word.arg: self.value(word.value) for word in node.keywords if word.arg}
        texts = [ast.unparse(item) for item in node.args]
        return Call(self.name(node.func), arguments, [text for text in texts if "parameters()" not in text])

    def _given(self) -> Any:
        """Return the mapping that a call passes as `config`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.keyword) and node.arg == "config" and isinstance(node.value, ast.Dict):
                return self.value(node.value)
        return None

    def settings(self) -> dict[str, Any]:
        """Return every setting by its name; the first of a name counts."""
        found: dict[str, Any] = {}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call):
                continue
            last = self.name(node.func).rpartition(".")[2]
            if last == "add_argument" and node.args:
                name = str(self.value(node.args[-1])).lstrip("-")
                default = next((self.value(word.value) for word in node.keywords if word.arg == "default"), None)
                if default is not None:
                    found.setdefault(name.replace("-", "_"), default)
            elif last in MAIN:
                for word, value in self.call(node).arguments.items():
                    for key, item in _opened(word, value):
                        found.setdefault(key, item)
        return {key: item for key, item in found.items() if key not in self.used}  # these are arguments already


def _opened(word: str, value: Any) -> list[tuple[str, Any]]:
    """Return a keyword's settings: those of a mapping `config`, and of an object of settings such as
    `ClipGradNormConfig`."""
    if word == "config" and isinstance(value, dict):
        return list(value.items())
    if isinstance(value, Call) and value.name.rpartition(".")[2].endswith("Config"):
        return [(f"{value.name.rpartition('.')[2]}.{key}", item) for key, item in value.arguments.items()]
    if word == "configs" and isinstance(value, list):
        return [pair for item in value for pair in _opened(word, item) if isinstance(item, Call)]
    if isinstance(value, dict) and isinstance(
        value.get("optimizer"), str
    ):  # a dictionary of an optimizer and its arguments
        return [(word, Call(value["optimizer"], value.get("optimizer_kwargs") or {}))]
    if isinstance(value, Call) and value.name.rpartition(".")[2] == "StokeOptimizer":
        arguments = value.arguments
        return [(word, Call(str(arguments.get("optimizer")), arguments.get("optimizer_kwargs") or {}))]
    return [(word, value)]
