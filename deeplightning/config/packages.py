"""`pkg://PACKAGE/PATH` becomes a file inside an installed package. Nothing of the package is imported.

Deep Lightning's own files are `pkg://deeplightning/configs/…` and `pkg://deeplightning/examples/…`. In an installed
package these folders are inside it, in a clone beside it.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from deeplightning.faults import ConfigError, Fault, nearest
from deeplightning.own_code import LIBRARIES

PREFIX = "pkg://deeplightning/"
SHIPPED = ("configs", "examples")
_PACKAGE = Path(__file__).parents[1]
HOME = _PACKAGE if (_PACKAGE / SHIPPED[0]).is_dir() else _PACKAGE.parent
"""The folder that holds the shipped `configs` and `examples`."""

_SETS_UP = "TORCH_BACKEND=auto bash env.sh"
TORCH_BUILD = f"`{_SETS_UP if (HOME / 'env.sh').is_file() else 'uv pip install --torch-backend=auto -U torch'}`"
"""The command that installs a build of torch that fits the machine."""

_ADDRESS = re.compile(r"pkg:/+([^/]*)/*(.*)", re.DOTALL)  # a Path keeps one slash of two
_LONGEST = 200  # characters of a shipped path


def is_address(path: str | Path) -> bool:
    """Return whether a path begins with `pkg:/`."""
    return _ADDRESS.fullmatch(str(path)) is not None


def locate(address: str | Path, beside: Path, key: str | None = None, place: str | None = None) -> Path:
    """Return the file of a `pkg://` address.

    A folder in `beside` or in the working directory takes precedence over the installed package of the same name, as
    own modules do. The names in `deeplightning.own_code.LIBRARIES` always refer to the installed package.

    Args:
        beside: the folder of the file that has the address; of the command line, the working directory.
        key, place: of the address, for notes.

    Raises:
        ConfigError: there is no such package, or no such file in it.
    """
    found = _ADDRESS.fullmatch(str(address))
    assert found is not None, address
    package, inner = found[1], PurePosixPath(found[2])
    shown = f"pkg://{package}/{found[2]}"
    if not package.isidentifier() or not inner.parts or inner.is_absolute() or ".." in inner.parts:
        message = f"{shown} is not pkg://PACKAGE/PATH, such as {PREFIX}configs/base.yaml; PATH has no `..`"
        raise ConfigError(Fault(message, key, place))
    folders = [*_folders(package, beside, inner.parts[0])]
    if not folders:
        raise ConfigError(Fault(f"{shown}: there is no package `{package}` here. Install it", key, place))
    for folder in folders:
        if os.path.isfile(file := folder / inner):  # noqa: PTH113  (Path's fails for a name that is too long)
            return file
    raise ConfigError(Fault(f"{shown}: the package `{package}` has no such file{_near(folders, inner)}", key, place))


def _folders(package: str, beside: Path, first: str) -> Iterator[Path]:
    """Return the folders of a package in search order."""
    if package == "deeplightning":
        yield HOME if first in SHIPPED else _PACKAGE
        return
    if package not in LIBRARIES:
        yield from dict.fromkeys(folder for top in (beside, Path.cwd()) if (folder := top / package).is_dir())
    for finder in sys.meta_path:  # a top-level name is found without importing anything
        spec = finder.find_spec(package, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            yield from map(Path, spec.submodule_search_locations or ())
            return


def _near(folders: list[Path], inner: PurePosixPath) -> str:
    """Return `. Did you mean …?` with a file beside a missing one."""
    names = [path.name for folder in folders for path in (folder / inner.parent).glob("*.y*ml")]
    hint = nearest(inner.name, names)
    return hint and f".{hint}"


def address_of(path: Path) -> str | None:
    """Return `pkg://deeplightning/…` for a shipped file of an installed Deep Lightning, or None for any other file."""
    if HOME != _PACKAGE:
        return None
    try:
        inner = Path(os.path.normpath(path)).relative_to(HOME)
    except ValueError:
        return None
    return f"{PREFIX}{inner.as_posix()}" if inner.parts and inner.parts[0] in SHIPPED else None


def shipped_instead(path: str | Path) -> str:
    """Return a hint for a missing file if Deep Lightning ships one under the same name."""
    inner = PurePosixPath(path)
    is_ours = inner.parts[:1] and inner.parts[0] in SHIPPED and ".." not in inner.parts
    if not is_ours or len(str(inner)) > _LONGEST or not (HOME / inner).is_file():
        return ""
    return f"; the one that ships with Deep Lightning is {PREFIX}{inner}"


def shipped() -> list[str]:
    """List the addresses of the shipped configs, examples last, without the options in subfolders of `configs`."""
    files = [*sorted((HOME / "configs").glob("*.yaml")), *sorted((HOME / "examples").glob("*/*.yaml"))]
    return [f"{PREFIX}{path.relative_to(HOME).as_posix()}" for path in files]
