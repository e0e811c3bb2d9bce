"""Import the user's own modules: those in the working directory and beside the configs that the user names.

These folders come first on `sys.path` in every process of a run, as the folder of a program does with
`python program.py`. A file there that shadows an installed module causes one warning with both paths.

`lightning` means `pytorch_lightning`, whose classes Deep Lightning uses, in own code, configs and installed modules,
whether or not the package `lightning` is installed: library modules that are written for it work unchanged.

A sealed launch (`deeplightning.launch.sealed`) has a copy of these folders from the time of its submission. In its
processes the copies replace the folders, here and in `sys.path`.
"""

import builtins
import contextlib
import importlib
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from deeplightning.faults import SCRIPT_HINT, SetupError
from deeplightning.runfolder import start_folder

ROOTS = "DEEPLIGHTNING_ROOTS"
"""Environment variable that passes the folders to the processes of a run, as a JSON list."""

SEALED = "DEEPLIGHTNING_SEALED"
"""Environment variable that passes the folder of frozen code and configs to the processes of a sealed launch."""
SEAL = "seal.json"
"""File in that folder that maps originals to copies inside it: `roots` for the folders of own code, `configs` for the
config files."""

LIBRARIES = ("deeplightning", "torch", "torchvision", "torchmetrics", "pytorch_lightning")
"""Names that always mean the installed module. A foreign config may use only these (`deeplightning.config.trust`)."""

_NEVER_OWN = {*LIBRARIES, "serve", *sys.builtin_module_names}

_UNIFIED = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
"""The packages inside the package `lightning`, and their own names."""
UNIFIED = "deeplightning.unified"
"""Module with the names of its top level; imported with any part of `lightning`."""

ON_IMPORT: dict[str, Callable[[], None]] = {}
"""Functions to call after own code imports an installed module, by its name."""

_TARGETS = [place for place in sys.path if place not in ("", os.getcwd()) and any(Path(place).glob("*.dist-info"))]  # noqa: PTH109
_STDLIB = os.path.dirname(os.__file__)  # noqa: PTH120  (Homebrew's sysconfig names it by a link)
INSTALLED = tuple(
    f"{place}{os.sep}" for place in [_STDLIB, *map(sysconfig.get_path, ("platstdlib", "purelib", "platlib")), *_TARGETS]
)
"""Folders of installed modules, including those of `pip install --target`."""

OURS = tuple(f"{Path(__file__).parents[1] / package}{os.sep}" for package in ("deeplightning", "serve", "plugins"))
EXAMPLES = f"{Path(__file__).parent / 'examples'}{os.sep}"
"""Folder of the examples of an installed Deep Lightning; their modules count as the user's own, as in a clone."""

_added: list[str] = json.loads(os.environ.get(ROOTS, "[]"))  # roots for every config of this process
_roots: list[str] = [*_added]
_on_path: list[str] = []  # entries that were prepended to `sys.path`
_reported: set[str] | None = None if ROOTS in os.environ else set()  # names; None: the parent process reports them
_seal: tuple[str, dict[str, Any]] = ("", {})  # folder of the seal, and the content of its file


def add_import_roots(*folders: Path) -> None:
    """Add folders from which the names of every config are imported, ahead of those that were added earlier."""
    _added[:] = dict.fromkeys([*(str(folder.absolute()) for folder in folders), *_added])
    use_import_roots(*_added, *roots())


def added_roots() -> list[str]:
    """Return the folders of `add_import_roots`, including those from the process that started this one."""
    return [*_added]


def use_import_roots(*folders: str | Path) -> None:
    """Put these folders first on `sys.path`, in this order, in place of those of an earlier call.

    A module is imported again on its next use if its folder is no longer one of these, or if another folder with a
    module of that name now comes first.

    Raises:
        SetupError: the sealed code of this launch cannot be read.
    """
    copies = seal().get("roots", {})
    new = [*dict.fromkeys(copies.get(root, root) for root in (str(Path(folder).absolute()) for folder in folders))]
    own = {} if new == _roots else _own_modules()
    for root in _on_path:
        if root in sys.path:
            sys.path.remove(root)
    ours, path = str(Path(__file__).parents[1]), list[str]()
    for entry in sys.path:
        copy = copies.get(os.path.abspath(entry))  # noqa: PTH100 (of "" too)
        path += [entry] if copy is None else [copy, entry] if os.path.abspath(entry) == ours else [copy]  # noqa: PTH100
    sys.path[:] = dict.fromkeys(path)
    _roots[:] = _on_path[:] = new
    sys.path[:0] = new
    for root in _roots:
        sys.path_importer_cache.pop(root, None)
    _unload(top for top, places in own.items() if (spec := top_level(top)) is None or _locations(spec) != places)


def _own_modules() -> dict[str, set[str]]:
    """Return the top-level modules that were imported from the folders of own code, and their files."""
    found = {}
    for name, module in [*sys.modules.items()]:
        spec = None if "." in name or name == "__main__" else top_level(name)
        loaded = getattr(module, "__spec__", None)
        if spec is None or loaded is None or _locations(loaded) != _locations(spec):
            continue
        if is_own(spec.origin or f"{next(iter(spec.submodule_search_locations or ()), '')}{os.sep}"):
            found[name] = _locations(spec)
    return found


def _unload(tops: Iterable[str]) -> None:
    gone = {*tops}
    for name in [*sys.modules]:
        if name.partition(".")[0] in gone:
            del sys.modules[name]


def use_seal(folder: Path | None) -> None:
    """Import own code from the copies of a seal, in this process and in its child processes; None: from the originals
    again.

    Raises:
        SetupError: there is no seal in this folder.
    """
    os.environ.pop(SEALED, None)
    before = {copy: root for root, copy in _seal[1].get("roots", {}).items()}
    if folder is not None:
        os.environ[SEALED] = str(folder)
    use_import_roots(*(before.get(root, root) for root in roots()))
    sys.path[:] = dict.fromkeys(before.get(entry, entry) for entry in sys.path)


def seal() -> dict[str, Any]:
    """Return the content of `SEAL` for this process, or {} if its launch is not sealed.

    Raises:
        SetupError: it cannot be read.
    """
    global _seal
    folder = os.environ.get(SEALED, "")
    if folder != _seal[0]:
        content: dict[str, Any] = {}
        if folder:
            try:
                content = json.loads(Path(folder, SEAL).read_text())
                for section in ("roots", "configs"):
                    content[section] = {name: os.path.join(folder, copy) for name, copy in content[section].items()}  # noqa: PTH118
            except (OSError, ValueError, KeyError) as error:
                message = f"{folder}: the code that was sealed for this launch cannot be read ({error})"
                raise SetupError(f"{message}; submit it again") from error
        _seal = folder, content
    return _seal[1]


def original(path: str) -> str:
    """Return the original path of a file or folder of sealed code, and any other path unchanged."""
    for root, copy in seal().get("roots", {}).items():
        if path == copy or path.startswith(f"{copy}{os.sep}"):
            return f"{root.rstrip(os.sep)}{path[len(copy) :]}" or os.sep
    return path


def frozen(path: Path) -> Path:
    """Return the copy of a config file that is sealed for this launch, and any other file unchanged."""
    copies: dict[str, str] = seal().get("configs", {})
    return Path(copies.get(os.path.abspath(path), path))  # noqa: PTH100 (without `..`)


def roots() -> list[str]:
    """Return the folders of the user's own code, in search order."""
    return [root for root in _roots if root in sys.path]


def original_roots() -> list[str]:
    """Return the same folders, with the originals in place of sealed copies."""
    return [*map(original, roots())]


def is_own(file: str | None) -> bool:
    """Return whether a file is in one of these folders and was not installed there."""
    return (
        file is not None
        and any(file.startswith(f"{root.rstrip(os.sep)}{os.sep}") for root in roots())
        and (
            file.startswith(EXAMPLES)
            or (not file.startswith((*INSTALLED, *OURS)) and f"{os.sep}site-packages{os.sep}" not in file)
        )
    )


def full_name(name: str) -> str:
    """Return the module that a name in code and configs refers to: `lightning` is `pytorch_lightning`, unless the user
    has a module of that name."""
    top, *rest = name.split(".")
    if top != "lightning" or getattr(top_level(top), "loader", None) is not None:
        return name
    package = _UNIFIED.get(".".join([top, *rest[:1]]))
    return UNIFIED if not rest else ".".join([package, *rest[1:]]) if package else name


def top_level(name: str) -> ModuleSpec | None:
    """Return the spec of the user's own module of this name, or None if there is none."""
    return None if name in _NEVER_OWN else PathFinder.find_spec(name, roots())


def _installed(name: str) -> ModuleSpec | None:
    return PathFinder.find_spec(name, [entry for entry in sys.path if os.path.abspath(entry) not in _roots])  # noqa: PTH100


def _warn_if_shadows(own: ModuleSpec) -> None:
    """Log a warning, once and on rank 0, if a module of the user shadows an installed one."""
    is_first = all(os.environ.get(name, "0") == "0" for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"))
    if _reported is None or not is_first or own.name in _reported or not is_own(own.origin):
        return
    _reported.add(own.name)
    hidden = _installed(own.name)
    if hidden is not None and hidden.loader is not None and _locations(hidden) != _locations(own):
        import logging

        text = "%s hides %s, which libraries may need: rename it"
        logging.getLogger("deeplightning").warning(text, short(str(own.origin)), hidden.origin)


def lookup_hint(name: str, file: object) -> str:
    """Return a sentence that names the file in which a name of a config was looked up, or "" if that is obvious."""
    top = name.partition(".")[0]
    if top == "__main__":
        return SCRIPT_HINT
    return f" `{top}` was read from {short(file)}." if top not in LIBRARIES and isinstance(file, str) else ""


def short(file: str) -> str:
    """Return the path of a file as the user would write it: relative if below the working directory, and the original
    of sealed code."""
    file, here = original(file), start_folder()
    return os.path.relpath(file, here) if file.startswith(os.path.join(here, "")) else file  # noqa: PTH118  (Path is slow)


def user_frames(error: BaseException) -> list[tuple[str, int]]:
    """Return file and line of each frame of the user's own code in the traceback of an error."""
    calls = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    return [(file, line) for file, line in calls if is_user_file(file)]


def is_user_file(file: str) -> bool:
    """Return whether a file contains the user's code: neither ours nor installed."""
    return file.startswith(EXAMPLES) or not file.startswith((*INSTALLED, *OURS, "<"))


def user_location(error: BaseException) -> str:
    """Return ` (file:line)` of the innermost frame of the user's own code, or "" if there is none."""
    frames = user_frames(error)
    return f" ({short(frames[-1][0])}:{frames[-1][1]})" if frames else ""


def unload_own_modules() -> None:
    """Remove the user's own modules from `sys.modules`, so that the next use imports them again."""
    _unload(_own_modules())


def raising_file(error: BaseException) -> str:
    """Return the file whose code raised an error."""
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1]


def _locations(spec: ModuleSpec) -> set[str]:
    return {*map(os.path.realpath, [spec.origin] if spec.origin else spec.submodule_search_locations or [])}


class _Finder:  # importlib.abc would import a dozen modules
    """Finds own modules and replaces their `__import__`; also finds `lightning`, unless it was imported before."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        full = full_name(name)
        if full != name and ("." not in name or sys.modules.get("lightning") is sys.modules.get(UNIFIED)):
            return ModuleSpec(name, _Alias(full))  # type: ignore[arg-type]
        if path is None:
            if name in _NEVER_OWN:
                return _installed(name)
            spec = top_level(name)
            if spec is None or spec.loader is None:
                return None
            _warn_if_shadows(spec)
        elif path and is_own(f"{next(iter(path))}{os.sep}"):
            spec = PathFinder.find_spec(name, path)
        else:
            return None
        if spec is not None and type(spec.loader) is SourceFileLoader and is_own(spec.origin):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Alias:
    """Loads another module under a second name."""

    def __init__(self, name: str):
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__  # importlib replaces it with that of the second name
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": _import}
        super().exec_module(module)


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Import as `import` does, then call the hook of `ON_IMPORT`, if any."""
    module = builtins.__import__(name, globals, locals, fromlist, level)
    if (call := ON_IMPORT.get(name.partition(".")[0])) is not None and not level:
        call()
    return module


sys.meta_path.insert(0, _Finder())
with contextlib.suppress(SetupError):  # raised again where a config is read
    use_import_roots(*_roots)
