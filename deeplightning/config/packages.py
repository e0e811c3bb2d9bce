"""Resolve `pkg://PACKAGE/PATH` to a file inside an installed package, without importing the package.

Deep Lightning's own files are `pkg://deeplightning/configs/…` and `pkg://deeplightning/examples/…`. These folders are
inside the package if it is installed, and next to it in a clone.
"""

import importlib.util
import os
import re
from pathlib import Path, PurePosixPath

from deeplightning.faults import ConfigError, Fault, nearest

PREFIX = "pkg://deeplightning/"
SHIPPED = ("configs", "examples")
_PACKAGE = Path(__file__).parents[1]
HOME = _PACKAGE if (_PACKAGE / SHIPPED[0]).is_dir() else _PACKAGE.parent
"""The folder that contains the shipped `configs` and `examples`."""

_SETUP_COMMAND = "TORCH_BACKEND=auto bash env.sh"
TORCH_BUILD = f"`{_SETUP_COMMAND if (HOME / 'env.sh').is_file() else 'uv pip install --torch-backend=auto -U torch'}`"
"""The command that installs a build of torch that fits the machine."""

_ADDRESS = re.compile(r"pkg:/+([^/]*)/*(.*)", re.DOTALL)  # a Path keeps one slash of two
_MAX_CHARACTERS = 200  # of a shipped path


def is_package_address(path: str | Path) -> bool:
    """Return whether a path begins with `pkg:/`."""
    return _ADDRESS.fullmatch(str(path)) is not None


def locate(address: str | Path, key: str | None = None, place: str | None = None) -> Path:
    """Return the file of a `pkg://` address; `key` and `place` are where it is written, for errors.

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
    if package == "deeplightning":
        folders = [HOME if inner.parts[0] in SHIPPED else _PACKAGE]
    else:
        spec = importlib.util.find_spec(package)  # for a top-level name, this imports nothing
        folders = [*map(Path, (spec and spec.submodule_search_locations) or ())]
    if not folders:
        raise ConfigError(Fault(f"{shown}: the package `{package}` is not installed. Install it", key, place))
    for folder in folders:
        if os.path.isfile(file := folder / inner):  # noqa: PTH113  (Path's fails for a name that is too long)
            return file
    near = nearest(inner.name, [path.name for folder in folders for path in (folder / inner.parent).glob("*.y*ml")])
    raise ConfigError(Fault(f"{shown}: the package `{package}` has no such file{near and f'.{near}'}", key, place))


def shipped_instead(path: str | Path) -> str:
    """Return a hint for a missing file if Deep Lightning ships one under the same name."""
    inner = PurePosixPath(path)
    is_ours = inner.parts[:1] and inner.parts[0] in SHIPPED and ".." not in inner.parts
    if not is_ours or len(str(inner)) > _MAX_CHARACTERS or not (HOME / inner).is_file():
        return ""
    return f"; the one that ships with Deep Lightning is {PREFIX}{inner}"
