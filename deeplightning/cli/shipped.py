"""List the configs that ship with Deep Lightning, and copy one so that it works in any folder."""

import re
from pathlib import Path, PurePosixPath

from deeplightning.config.packages import HOME, PREFIX, shipped
from deeplightning.faults import ConfigError, Fault, SetupError, nearest

_COMMAND = re.compile(r"bash train\.sh(?: \S+\.yaml)?")
_SCHEMA = re.compile(r"^# yaml-language-server: .*\n", re.MULTILINE)
_BASE = re.compile(r"^_base_: *(?P<path>[^\s#\[]+)", re.MULTILINE)


def names() -> list[str]:
    """Return `base`, `mnist` … of `configs`, and `examples/FOLDER/NAME` of the examples."""
    return [one.removeprefix(PREFIX).removesuffix(".yaml").removeprefix("configs/") for one in shipped()]


def listing() -> list[str]:
    """Return a line for each: its name, and the first sentence about it."""
    found = names()
    width = max(map(len, found))
    return [f"{name:{width}}  {_about(_file(name).read_text())}" for name in found]


def text_of(name: str, called: str) -> str:
    """Return a shipped config as a file of its own: what it builds on has its `pkg://` address.

    Args:
        called: the name of the file, for the command in its first line.

    Raises:
        ConfigError: none ships under this name.
    """
    file = _file(name)

    def address(found: re.Match[str]) -> str:
        base = (file.parent / found["path"]).resolve().relative_to(HOME.resolve())
        return f"_base_: {PREFIX}{base.as_posix()}"

    text = _BASE.sub(address, _SCHEMA.sub(lambda _: schema_line(), file.read_text()))
    return _COMMAND.sub(lambda _: f"deeplightning train {called}", text)


def schema_line() -> str:
    """Return the comment with the address of the installed schema, by which editors complete and check a config
    anywhere on this machine."""
    return f"# yaml-language-server: $schema={(HOME / 'configs' / 'schema.json').as_uri()}\n"


def copy(name: str, to: Path) -> list[Path]:
    """Write a shipped config, and beside it the modules of an example's own; return the files.

    Args:
        to: a file that is not there, or a folder.

    Raises:
        ConfigError: none ships under this name.
        SetupError: a file is there already, or cannot be written.
    """
    file = _file(name)
    target = to / file.name if to.is_dir() else to
    content = {target: text_of(name, target.name)}
    content |= {target.parent / path.name: path.read_text() for path in sorted(file.parent.glob("*.py"))}
    write_new(content)
    return [*content]


def write_new(content: dict[Path, str]) -> None:
    """Write files that are not there yet; where one is there, none.

    Raises:
        SetupError: one is there already, or cannot be written.
    """
    there = [str(path) for path in content if path.exists() or path.is_symlink()]
    if there:
        raise SetupError(f"{', '.join(there)}: already there and not overwritten; remove it, or name another place")
    try:
        for path, text in content.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{error.filename or path} cannot be written: {error.strerror}") from None


def _file(name: str) -> Path:
    """Return the file of a name; `NAME.yaml`, its path in the clone and its address are names too."""
    inner = PurePosixPath(name.removeprefix(PREFIX).removesuffix(".yaml").removeprefix("configs/"))
    known = names()
    if str(inner) not in known:
        hint = f"{nearest(str(inner), known)} `deeplightning configs` lists all"
        raise ConfigError(Fault(f"no config of this name ships with Deep Lightning.{hint}", place=name))
    folder = HOME if inner.parts[0] == "examples" else HOME / "configs"
    return folder / f"{inner}.yaml"


def _about(text: str) -> str:
    """Return the first sentence of the comment that opens a config, behind the command."""
    head = re.match(r"(?:#.*\n)+", text)
    paragraphs = re.split(r"^#\n", _SCHEMA.sub("", head[0] if head else ""), flags=re.MULTILINE)
    about = " ".join(line.lstrip("# ") for line in paragraphs[min(1, len(paragraphs) - 1)].splitlines())
    return re.split(r"(?<=\.) ", about)[0]
