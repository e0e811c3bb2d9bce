"""Start a project: write a config, the modules that it names, a README.md and a .gitignore, from templates and from the
user's data. Nothing is overwritten.

The templates of a kind are in `templates/KIND`: `sample` for a project without data; `data` for one with data, or with
a sample that is written into the project; `labels` for pictures with several labels. `$name` in a YAML file is replaced
by a value.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from deeplightning.cli import guess_masks, guess_pictures, guess_signals, guess_tables
from deeplightning.cli.guess import Columns, Guess, errors_of_data
from deeplightning.config.packages import HOME
from deeplightning.config.schema import literal_values
from deeplightning.config.tree import line
from deeplightning.faults import ConfigError, Fault, SetupError, nearest
from deeplightning.words import printable

TEMPLATES = HOME / "templates"


@dataclass(frozen=True)
class Kind:
    """A kind of project.

    Attributes:
        about: a sentence for README.md.
        examine: examines data; None if the kind takes no data. It gets `Columns` too, if there are options.
        options: the fields of `Columns` that the kind takes.
        modules: shipped files that are copied into a project without data.
        ask: an argument of `deeplightning ask` for a project without data; None if it has no endpoint.
        sample: for a project without data, a table's name and the function that writes it; examined like a user's.
        template: the kind whose templates are used; None for its own.
    """

    about: str
    examine: Callable[..., Guess] | None
    modules: tuple[str, ...] = ()
    ask: str | None = None
    sample: tuple[str, Callable[[], str]] | None = None
    template: str | None = None
    options: tuple[str, ...] = ()


def _wine() -> str:
    """Write 178 wines as CSV: 13 measurements, and one of three kinds in the column `kind`."""
    from sklearn.datasets import load_wine  # imported lazily: it takes a second

    found: Any = load_wine(as_frame=True)
    return str(found.data.assign(kind=found.target_names[found.target]).to_csv(index=False))


def _diabetes() -> str:
    """Write 442 patients as CSV: 10 measurements, and the progress of the disease after a year in `progression`."""
    from sklearn.datasets import load_diabetes

    found: Any = load_diabetes(as_frame=True, scaled=False)
    return str(found.data.assign(progression=found.target).to_csv(index=False))


_OF_ROWS = ("target", "ignore", "task")
_DIGITS = "                  # the sample digits; any other picture: deeplightning ask FILE"

KINDS = {
    "images": Kind("Classifies pictures.", guess_pictures.images, ask=_DIGITS),
    "text": Kind(
        "Classifies texts.",
        guess_tables.text,
        ("examples/sst2/reviews.py",),
        '--text "a charming film" "its plot is dull"',
        options=("target",),
    ),
    "segmentation": Kind(
        "Predicts the class of each pixel.",
        guess_masks.segmentation,
        ("examples/segmentation/shape_masks.py",),
        "shapes/images/0000.jpg",
    ),
    "table": Kind(
        "Predicts a column of a table from the others.", guess_tables.rows, sample=("wine.csv", _wine), options=_OF_ROWS
    ),
    "regression": Kind(
        "Predicts a number from the columns of a table.",
        lambda data, columns: guess_tables.rows(data, replace(columns, task="regression")),
        sample=("diabetes.csv", _diabetes),
        template="table",
        options=("target", "ignore"),
    ),
    "signal": Kind("Classifies signals.", guess_signals.signals, ask="signal.json"),
    "own": Kind(
        "Own data, network, loss and task.",
        None,
        tuple(f"examples/own_code/own_{part}.py" for part in ("data", "network", "loss")),
        _DIGITS,
    ),
}

_SERVED = """\
deeplightning train                # trains, tests and exports
deeplightning serve last           # answers at http://127.0.0.1:5000; Ctrl-C ends it
deeplightning ask {ask}"""

_PREDICTED = """\
deeplightning train                # trains and tests
deeplightning test last            # tests the best weights again
deeplightning predict last         # a row for each test sample, in predictions.csv of the run's folder"""


def init(folder: Path, kind: str, data: Path | None, columns: Columns | None = None) -> tuple[list[str], list[Path]]:
    """Write a new project.

    Args:
        folder: created if it does not exist.
        kind: a key of `KINDS`.
        data: the user's data; None for shipped data.
        columns: the options for the columns of a table.

    Returns:
        The guesses about the data, one per line, and the files that were written.

    Raises:
        ConfigError: there is no such kind, or it takes no data.
        SetupError: the data do not exist or do not fit the kind, or a file exists already.
    """
    if kind not in KINDS:
        message = f"there is no kind {kind!r}.{nearest(kind, KINDS)} There are: {', '.join(KINDS)}"
        raise ConfigError(Fault(message, "--kind"))
    chosen, found, files = KINDS[kind], None, dict[str, str]()
    columns = columns or Columns()
    for name, value in vars(columns).items():
        if value and (name not in chosen.options or (data is None and chosen.sample is None)):
            why = "takes no such option" if name not in chosen.options else "takes it only with --data"
            raise ConfigError(Fault(f"the kind {kind} {why}", f"--{columns.task if name == 'task' else name}"))
    more = (columns,) if chosen.options else ()
    if data is not None:
        if chosen.examine is None:
            message = f"the kind {kind} takes no data; own_data.py in the project reads them"
            raise ConfigError(Fault(message, "--data"))
        if not os.path.exists(data):  # noqa: PTH110  (Path's fails for a name that is too long, before Python 3.14)
            raise SetupError(f"--data {data}: there is no such file or folder")
        with errors_of_data():
            found = chosen.examine(data, *more)
    elif chosen.sample is not None and chosen.examine is not None:
        name, write = chosen.sample
        with tempfile.TemporaryDirectory() as top:
            table = Path(top) / name
            table.write_text(write())
            found, files = chosen.examine(table, *more), {name: table.read_text()}
            found = replace(found, notes=[each.replace(str(table), name) for each in found.notes])
    if found is not None:
        found = replace(found, notes=[printable(note) for note in found.notes])
    values = {"project": folder.absolute().name or "project", "folder": ".", **(found.values if found else {})}
    if data is not None:
        values["root"], values["folder"] = _path_from(folder, data), _path_from(folder, data.parent)
    templates = TEMPLATES / (chosen.template or kind) / (found.template if found else "sample")
    content = _files(templates, chosen, found is not None, {n: line(v) for n, v in literal_values(values).items()})
    ask = found.ask if found else chosen.ask
    if isinstance(ask, Path):
        ask = shlex.quote(_path_from(folder, ask))
    modules = sorted(name for name in content if name.endswith(".py"))
    content |= files | (found.files if found else {})
    content["README.md"] = _readme(values["project"], chosen.about, ask, modules, found.notes if found else [])
    content[".gitignore"] = (TEMPLATES / "gitignore").read_text()
    paths = {folder / name: text for name, text in content.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"{folder} cannot be created: {error.strerror}") from None
    write_new(paths)
    return (found.notes if found else []), [*paths]


def write_new(content: dict[Path, str]) -> None:
    """Write new files; if one of them exists already, write none.

    Raises:
        SetupError: one exists already, or cannot be written.
    """
    if existing := [str(path) for path in content if path.exists() or path.is_symlink()]:
        raise SetupError(f"{', '.join(existing)}: already exists and is not overwritten; remove it, or name another")
    try:
        for path, text in content.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{error.filename or path} cannot be written: {error.strerror}") from None


def _files(templates: Path, chosen: Kind, has_data: bool, values: dict[str, str]) -> dict[str, str]:
    """Return the content of the config and the modules, by name."""
    content = {}
    schema = f"# yaml-language-server: $schema={(HOME / 'configs' / 'schema.json').as_uri()}\n"
    for path in sorted(templates.iterdir()):
        if path.suffix in (".yaml", ".py", ".json"):
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".yaml":
                filled = Template(text).substitute(values)
                text = re.sub("^(?!#)", lambda _: schema, filled, count=1, flags=re.MULTILINE)
            content[path.name] = text
    for shipped in () if has_data else chosen.modules:
        content[Path(shipped).name] = (HOME / shipped).read_text()
    return content


def _readme(project: str, about: str, ask: str | None, modules: list[str], notes: list[str]) -> str:
    more = [f"- `{name}` is used by `config.yaml`; change it as you like." for name in modules]
    more += [f"- {each[0].upper()}{each[1:]}." for each in notes]
    commands = _PREDICTED if ask is None else _SERVED.format(ask=ask)
    values = {"project": project, "about": about, "commands": commands, "more": "\n".join(more)}
    return Template((TEMPLATES / "README.md").read_text()).substitute(values).rstrip("\n") + "\n"


def _path_from(folder: Path, data: Path) -> str:
    """Return the path of the data for the config: a relative path if the data are in the project or next to it."""
    top = Path(os.path.abspath(folder))  # noqa: PTH100 (without `..`)
    path = Path(os.path.abspath(data))  # noqa: PTH100
    return os.path.relpath(path, top) if path.is_relative_to(top.parent) else str(path)
