"""The reference part of the manual, made from the code.

`.venv/bin/python tools/reference_pages.py` renews the pages of docs/reference, and llms.txt, the list of
all pages. Each page has a head that people write, and
below the line `START` what is made here. The tests compare the pages with what this file makes now, so a new key, verb
or metric cannot be left out.
"""

import ast
import inspect
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, asdict, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import griffe
from combination_tables import engines, table

from deeplightning import faults
from deeplightning.array_spec import ArraySpec
from deeplightning.cli import cli, manual
from deeplightning.config import schema
from deeplightning.config.allowed import sections
from deeplightning.config.schema import options_of
from deeplightning.config.tree import dump
from deeplightning.kinds import KINDS
from serve.limits import Limits
from serve.metrics import Metrics
from serve.openapi import describe

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
START = "<!-- The rest of this page is made by `tools/reference_pages.py`. -->"


def rows(head: str, cells: Iterable[Iterable[str]]) -> str:
    """A Markdown table; its head is written `One, Two`."""
    names = head.split(", ")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Text of a docstring in one line."""
    return " ".join(inspect.cleandoc(text).split())


# ---- keys

PAGES_OF_KEYS = {
    "keys": ("", "data", "model", "test", "logger", "serve"),
    "keys-of-training": ("engine", "train"),
}
for _name, _section in sections(schema.Config):
    if issubclass(_section, schema.PluginSection):  # its page is in the plug-in; the path begins at docs/reference
        _package = _section.__module__.partition(".")[0]
        _folder = f"../../plugins/{_package.replace('_', '-')}/{_package}/docs"
        PAGES_OF_KEYS[f"{_folder}/{_name}"] = (_name,)


def keys(page: str) -> str:
    """The tables of the sections of a page: every key with its type, its default and its sentence."""
    parts = []
    for path, cls in sections(schema.Config):
        if _page_of(path) != page:
            continue
        found = []
        for field in schema.keys(cls if path else schema.Config):  # at the top level the keys of the core
            hint = typing.get_type_hints(cls)[field.name]
            name = f"{path}.{field.name}".lstrip(".")
            found.append((f"`{name}`", _type(hint, field, name, page), _default(field), _meaning(field)))
        parts += [f"## {path or 'Top level'}", plain(cls.__doc__ or ""), rows("Key, Value, Default, Meaning", found)]
    return "\n\n".join(parts)


def _page_of(path: str) -> str:
    section = path.partition(".")[0]
    return next(page for page, names in PAGES_OF_KEYS.items() if section in names)


def _type(hint: object, field: Field[object], path: str, page: str) -> str:
    low = field.metadata["low"]
    words = " or ".join(_word(option, path, page) for option in options_of(hint))
    return words + (f", at least {low}" if low is not None else "")


def _word(option: Any, path: str, page: str) -> str:
    simple = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "boolean",
        type(None): "`null`",
        Any: "any",
    }
    if option in simple:
        return simple[option]
    origin, inner = typing.get_origin(option), typing.get_args(option)
    if origin is types.UnionType:
        return " or ".join(_word(one, path, page) for one in inner)
    if origin is typing.Literal:
        words = ", ".join(f"`{word}`" for word in inner)
        return re.sub(r"(`\w+:0`), .*(`\w+:\d+`)$", r"\1 … \2", words)  # of numbered words the first and the last
    if origin is list:
        return f"list ({_word(inner[0], path, page)})"
    if origin is dict:
        if inner[1] in (Any, str):
            return "mapping"
        return f"{_word(inner[1], path, page).replace('target]', 'targets]')} by name"
    if option is schema.Target:
        return f"[target]({'../../../../docs/reference/' if page.startswith('.') else ''}targets.md)"
    kind = "target" if issubclass(option, schema.Target) and path != "logger" else "section"
    there = "" if _page_of(path) == page else f"{_page_of(path)}.md"
    return f"[{kind}]({there}#{path.replace('.', '')})"  # as GitHub names the heading


def _default(field: Field[object]) -> str:
    value = schema.default_of(field)
    if value is MISSING:
        return "required"
    return "" if is_dataclass(value) else f"`{_flow(value)}`"


def _flow(value: object) -> str:
    """A value as one would write it in a line of YAML."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    return dump(value).removesuffix("...\n").strip()


def _meaning(field: Field[object]) -> str:
    text: str = field.metadata["doc"]
    example = field.metadata["example"]
    return f"{text}; for example `{example}`" if example else text


# ---- engines


def settings_with_engines() -> str:
    """What each engine answers to each setting."""
    return f"## Settings with each engine\n\n{engines()}"


# ---- verbs


def verbs() -> str:
    """Each verb with its usage, the first two sentences of its help, and its options."""
    parts = []
    cli.import_rest()
    for name, command in cli.commands.items():
        if command.hidden:
            continue
        usage = " ".join(command.collect_usage_pieces(click.Context(command, info_name=name)))
        usage = usage.replace("[OPTIONS] ", "").replace("[OPTIONS]", "").strip()
        about = " ".join(re.split(r"(?<=\.) (?=[A-Z`-])", plain(command.help or ""))[:2])
        parts += [f"## {name}", f"`deeplightning {name} {usage}`".replace(" `", "`") + f": {about}"]
        found = [(_names(param), param.help or "") for param in _options_of(command)]
        if found:
            parts.append(rows("Option, Meaning", found))
    return "\n\n".join(parts)


SHARED = ("configs", "allow", "code")
"""Options of many verbs; the head of the page describes them."""


def _options_of(command: click.Command) -> Iterator[click.Option]:
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden and param.name not in SHARED:
            yield param


def _names(option: click.Option) -> str:
    value = ""
    if not (option.is_flag or option.count):
        kinds = {"integer range": "N", "float": "NUMBER"}
        value = " " + (option.metavar or kinds.get(option.type.name, option.type.name.upper()))
        if isinstance(option.type, click.Choice):
            value = " " + "|".join(option.type.choices)
    return ", ".join(f"`{name}{value}`" for name in option.opts)


# ---- metrics


def metrics() -> str:
    """What a task logs by default."""
    found = []
    for file in sorted((ROOT / "deeplightning" / "task").glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and (names := _literal(node, "metric_names")):
                found.append((f"`deeplightning.task.{file.stem}.{node.name}`", ", ".join(f"`{n}`" for n in names)))
    return (
        "## Metrics of each task\n\nWhere `model.metrics` is `null`; a subclass has those of its parent.\n\n"
        f"{rows('Task, METRIC', found)}"
    )


def families(counted: Any) -> Iterator[Any]:
    """The metrics of a server that has answered nothing, as the Prometheus client has them."""
    labels = {"run": "", "task": "", "precision": ""}
    yield from counted.collect(labels) if inspect.signature(counted.collect).parameters else counted.collect()


def _literal(node: ast.ClassDef, name: str) -> object:
    for statement in node.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if isinstance(target, ast.Name) and target.id == name:
            return ast.literal_eval(statement.value)  # type: ignore[attr-defined]
    return None


# ---- HTTP


SUMMARIES = {
    "/predict": "The answers to one input or several.",
    "/openapi.json": "The addresses, bodies and answers of this server for programs, as OpenAPI 3.0.",
    "/docs": "The same for people, on a page.",
}
"""Where the server's own words are of one kind of run, or of the document that they stand in."""


def http() -> str:
    """The addresses of the server, its answers by status, and the bodies that each kind of run takes and gives."""
    specs: dict[str, Any] = {
        "table": SimpleNamespace(columns=[], missing="fill", unknown="other"),
        "array": ArraySpec((1, 1)),
    }
    models: dict[str, Any] = {
        task: SimpleNamespace(task=task, labels=["a"], spec=specs.get(kind.takes), example=None)
        for task, kind in KINDS.items()
    }
    documents = {task: describe(model, Limits(), secured=True) for task, model in models.items()}
    first = documents["image_classification"]
    addresses = [
        (f"`{method.upper()} {path}`", SUMMARIES.get(path, operation["summary"]))
        for path, methods in first["paths"].items()
        for method, operation in methods.items()
    ]
    answers = first["paths"]["/predict"]["post"]["responses"]
    statuses = [(f"`{status}`", answer["description"]) for status, answer in sorted(answers.items()) if status != "200"]
    takes: dict[str, str] = {}
    gives: dict[str, str] = {}
    for task, document in documents.items():
        source, _, target = task.partition("_")
        operation = document["paths"]["/predict"]["post"]
        takes[f"`{source}_…`"] = ", ".join(f"`{kind}`" for kind in operation["requestBody"]["content"])
        schemas = document["components"]["schemas"]
        answer = next(schemas[name] for name in ("Prediction", "Picture", "Mask") if name in schemas)
        gives[f"`…_{target}`"] = ", ".join(f"`{name}`" for name in answer["properties"] if name != "input")
    keys_of_serve = {field.name for field in schema.keys(schema.Serve)}
    limits = [(f"`{name}`", f"{value:,}") for name, value in asdict(Limits()).items() if name not in keys_of_serve]
    counted = [
        (f"`{family.name}{'_total' if family.type == 'counter' else ''}`", family.type, family.documentation)
        for family in families(Metrics())
    ]
    return "\n\n".join(
        [
            f"## Addresses\n\n{rows('Address, Answers', addresses)}",
            f"## Statuses of `POST /predict`\n\n{rows('Status, When', statuses)}",
            f"## Bodies\n\n{rows('Kind of run, Takes', takes.items())}",
            rows("Kind of run, Answer of one input has", gives.items()),
            "## Limits\n\n`GET /info` has those of a server. Beside the [keys of `serve`](keys.md#serve):\n\n"
            f"{rows('Limit, Value', limits)}",
            f"## Metrics\n\nThe answer of `GET /metrics`, for Prometheus:\n\n{rows('Metric, Kind, Meaning', counted)}",
        ]
    )


# ---- Python


def python() -> str:
    """What `import deeplightning` offers: the signature and the first sentence of each docstring."""
    import deeplightning

    package = griffe.load("deeplightning", search_paths=[ROOT], docstring_parser="google")
    offered, of_run = [], []
    for name in sorted(deeplightning.__all__, key=str.lower):
        if name == "__version__":
            continue
        found: Any = package[deeplightning._HOMES[name]][name]
        found = found.final_target if found.is_alias else found
        offered.append(_described(found))
        if found.is_class:
            of_run += [
                _described(member)
                for member in found.members.values()
                if not member.name.startswith("_") and (member.is_function or member.is_attribute) and member.docstring
            ]
    return "\n\n".join(["## Functions", "\n".join(offered), "## Run", "\n".join(of_run)])


def _described(found: Any) -> str:
    """One line: the signature and the first paragraph of the docstring."""
    return f"- `{found.name}{_arguments(found)}`: {plain(found.docstring.value.partition(chr(10) * 2)[0])}"


def _arguments(found: Any) -> str:
    if not found.is_function:
        return ""
    words = []
    for parameter in found.parameters:
        if parameter.name == "self":
            continue
        word = f"{parameter.name}: {parameter.annotation}" if parameter.annotation is not None else parameter.name
        words.append(f"{word} = {parameter.default}" if parameter.default is not None else word)
    returned = f" -> {found.returns}" if found.returns is not None else ""
    return f"({', '.join(words)}){returned}".replace(" | ", " or ")


# ---- exit codes


OTHER_CODES = {
    0: "Done.",
    1: "A bug in Deep Lightning, with its traceback.",
    130: "Interrupted by Ctrl-C.",
    141: "The reader of a result left first, as in `deeplightning explain mine.yaml | head`. A training continues.",
    143: "Ended by SIGTERM.",
}


def exit_codes() -> str:
    """Each code, with the Python exception where a command ends with an error of ours."""
    found = {code: (f"`{code}`", meaning, "") for code, meaning in OTHER_CODES.items()}
    for name, error in inspect.getmembers(faults, inspect.isclass):
        if issubclass(error, faults.UserError) and error is not faults.UserError:
            found[error.exit_code] = (f"`{error.exit_code}`", plain(error.__doc__ or ""), f"`{name}`")
    table = rows("Exit code, Meaning, Exception of `deeplightning.faults`", [found[code] for code in sorted(found)])
    return f"## Exit codes\n\n`deeplightning` and the scripts end with these:\n\n{table}"


# ---- versions


def versions() -> str:
    """What the package requires, each with the releases that are allowed and the one that the lock has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    extras = project["optional-dependencies"]
    needed = {None: project["dependencies"]} | {name: extras[name] for name in ("deepspeed", "text")}
    found = [("Python", project["requires-python"], "3.11 to 3.14")]
    for extra, requirements in needed.items():
        for requirement in requirements:
            name, allowed = re.findall(r"^([\w-]+)([^;]*)", requirement)[0]
            found.append((name + (f" (extra `{extra}`)" if extra else ""), allowed.strip(), locked[name]))
    table = rows("Package, Allowed, Tested", [(name, f"`{allowed}`", tested) for name, allowed, tested in found])
    about = "`bash test.sh --all` tests these releases, and the lowest that are allowed, with the Python that it finds."
    return f"## Versions\n\n{about}\n\n{table}"


# ---- words of other tools

WORDS = "../../plugins/deeplightning-migrate/deeplightning_migrate/docs/words"
"""The page, from docs/reference."""


def words_of_others() -> str:
    """Return a table of the words of all other tools, by what they are called here."""
    from deeplightning_migrate.foreign_words import SYSTEMS  # the plug-in: the other pages need none

    by_ours: dict[str, list[str]] = {}
    for words in SYSTEMS.values():
        for old, new in words.items():
            by_ours.setdefault(_ours(new), []).extend(f"`{word.lstrip('/')}`" for word in old.split())
    found = sorted(by_ours.items(), key=lambda row: (row[0].startswith("none:"), row[0].replace("the same in ", "")))
    return f"## All words\n\n{rows('There, Here', ((', '.join(old), new) for new, old in found))}"


def _ours(new: str) -> str:
    if new.startswith("none:"):
        return new
    key, _, remark = new.partition(" ")
    key, same = (key.removesuffix(".*"), "the same in ") if key.endswith(".*") else (key.lstrip("."), "")
    return f"{same}`{key}`" + (f" {remark}" if remark else "")


PAGES: dict[str, Callable[[], str]] = {
    **{name: (lambda name=name: keys(name)) for name in PAGES_OF_KEYS},
    "check": lambda: f"## Settings that exclude each other\n\n{table()}",
    "engines": settings_with_engines,
    "verbs": verbs,
    "files": metrics,
    "http": http,
    "python": python,
    "environment": lambda: f"{exit_codes()}\n\n{versions()}",
    WORDS: words_of_others,
}
"""By the name of a page, what makes the rest of it."""


def renewed(name: str) -> str:
    """A page with its made part as the code is now."""
    head = (FOLDER / f"{name}.md").read_text().partition(START)[0]
    return f"{head.rstrip()}\n\n{START}\n\n{PAGES[name]()}\n"


HEADINGS = dict(zip(manual.PARTS, ("Tutorials", "How-to pages", "Reference", "Explanation"), strict=True))


def list_of_pages() -> str:
    """The list of all pages in the format of llms.txt (https://llmstxt.org): titles, paths, first sentences."""
    lines = [
        "# Deep Lightning",
        "",
        "> A YAML file becomes a tracked, reproducible, distributed training run, and the run an HTTP endpoint.",
        "",
        "`deeplightning docs NAME` prints a page in the terminal; NAME is its path without `.md`.",
    ]
    part = ""
    for name, file in manual.pages().items():
        if (its := name.partition("/")[0]) != part:
            part = its
            lines += ["", f"## {HEADINGS.get(part, 'Plug-ins')}", ""]
        title, *blocks = manual.text_of(file).split("\n\n")
        about = f": {_first_sentence(blocks)}" if _first_sentence(blocks) else ""
        lines.append(f"- [{title.removeprefix('# ')}]({file.relative_to(ROOT)}){about}")
    return "\n".join(lines) + "\n"


def _first_sentence(blocks: list[str]) -> str:
    """The first sentence of the first prose in Markdown; "": there is none."""
    for block in blocks:
        if block[:1].isalpha() or block[:1] in "`[":
            line = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block).split())
            return re.split(r"(?<=[.:]) (?=[A-Z`])", line)[0].rstrip(":")
    return ""


if __name__ == "__main__":
    for page in PAGES:
        (FOLDER / f"{page}.md").write_text(renewed(page))
    (ROOT / "llms.txt").write_text(list_of_pages())
