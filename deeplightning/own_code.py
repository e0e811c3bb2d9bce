"""Import the user's own modules: those in the working directory and beside the configs that the user names.

These folders come first on `sys.path`, as the folder of a program does under `python program.py`, in every process that
a run starts. A file there that hides an installed module is one warning with both paths.

`lightning` means `pytorch_lightning`, whose classes Deep Lightning uses, in own code, configs and installed modules,
whether the package `lightning` is installed or not: modules of libraries that are written for it train as they are.

A sealed launch (`deeplightning.launch.sealed`) keeps a copy of these folders as they were when it was submitted. In its
processes the copy of each folder takes the place of the folder, here and in `sys.path`.
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

from deeplightning.faults import OF_A_SCRIPT, SetupError
from deeplightning.runfolder import start_folder

ROOTS = "DEEPLIGHTNING_ROOTS"
"""The environment variable in which the processes that a run starts get the folders, as a JSON list."""

SEALED = "DEEPLIGHTNING_SEALED"
"""The environment variable in which the processes of a sealed launch get the folder of its frozen code and configs."""
SEAL = "seal.json"
"""The file of that folder that maps originals to copies inside it: `roots` the folders of own code, `configs` the
config files."""

LIBRARIES = ("deeplightning", "torch", "torchvision", "torchmetrics", "pytorch_lightning")
"""Names that always mean what is installed: a foreign config may name these alone, see `deeplightning.config.trust`."""

_NEVER_OWN = {*LIBRARIES, "serve", *sys.builtin_module_names}

_UNIFIED = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
"""The packages that the package `lightning` unites, and their own names."""
UNIFIED = "deeplightning.unified"
"""The module that has the names of its top level; imported with any part of `lightning`."""

ON_IMPORT: dict[str, Callable[[], None]] = {}
"""What to call, by the name of an installed module, after own code imports it."""

_TARGETS = [place for place in sys.path if place not in ("", os.getcwd()) and any(Path(place).glob("*.dist-info"))]  # noqa: PTH109
INSTALLED = tuple(
    f"{place}{os.sep}"
    for place in [*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), *_TARGETS]
)
"""The folders of installed modules, also those of `pip install --target`."""

OURS = tuple(f"{Path(__file__).parents[1] / package}{os.sep}" for package in ("deeplightning", "serve", "plugins"))
EXAMPLES = f"{Path(__file__).parent / 'examples'}{os.sep}"
"""Where an installed Deep Lightning has its examples, whose modules are a user's own as in a clone."""

_added: list[str] = json.loads(os.environ.get(ROOTS, "[]"))  # for every config of this process
_roots: list[str] = [*_added]
_on_path: list[str] = []  # the entries that were put in front of `sys.path`
_reported: set[str] | None = None if ROOTS in os.environ else set()  # names; None: the parent process reports them
_seal: tuple[str, dict[str, Any]] = ("", {})  # the folder of the launch's seal, and the content of its file


def add_import_roots(*folders: Path) -> None:
    """Import the names of every config from these folders, before those that were added earlier."""
    _added[:] = dict.fromkeys([*(str(folder.absolute()) for folder in folders), *_added])
    use_import_roots(*_added, *roots())


def added_roots() -> list[str]:
    """Return the folders of `add_import_roots`, and those of the process that started this one."""
    return [*_added]


def use_import_roots(*folders: str | Path) -> None:
    """Put these folders first on `sys.path`, in this order, in place of those of an earlier call.

    A module is imported again on its next use if its folder is no longer one of these, or if another folder with a
    module of that name now comes first.

    Raises:
        SetupError: the code that this launch has sealed is gone.
    """
    copies = seal().get("roots", {})
    new = [*dict.fromkeys(copies.get(root, root) for root in (str(Path(folder).absolute()) for folder in folders))]
    own = {} if new == _roots else _own_modules()
    for root in _on_path:
        if root in sys.path:
            sys.path.remove(root)
    _put_copies_on_path(copies)
    _roots[:] = _on_path[:] = new
    sys.path[:0] = new
    for root in _roots:
        sys.path_importer_cache.pop(root, None)
    _forget(top for top, places in own.items() if (spec := top_level(top)) is None or _places(spec) != places)


def _own_modules() -> dict[str, set[str]]:
    """Return the top-level modules that were imported from the folders of the user's own code, and their files."""
    found = {}
    for name, module in [*sys.modules.items()]:
        spec = None if "." in name or name == "__main__" else top_level(name)
        there = getattr(module, "__spec__", None)
        if spec is None or there is None or _places(there) != _places(spec):
            continue
        if is_own(spec.origin or f"{next(iter(spec.submodule_search_locations or ()), '')}{os.sep}"):
            found[name] = _places(spec)
    return found


def _forget(tops: Iterable[str]) -> None:
    gone = {*tops}
    for name in [*sys.modules]:
        if name.partition(".")[0] in gone:
            del sys.modules[name]


def use_seal(folder: Path | None) -> None:
    """Import own code from the copies of a seal, in this process and in those that it starts; None: from the originals
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


def _put_copies_on_path(copies: Mapping[str, str]) -> None:
    ours = str(Path(__file__).parents[1])
    path = []
    for entry in sys.path:
        copy = copies.get(os.path.abspath(entry))  # noqa: PTH100 (of "" too)
        path += [entry] if copy is None else [copy, entry] if os.path.abspath(entry) == ours else [copy]  # noqa: PTH100
    sys.path[:] = dict.fromkeys(path)


def original(path: str) -> str:
    """Return the path of the original of a file or folder of sealed code, and any other path as it is."""
    for root, copy in seal().get("roots", {}).items():
        if path == copy or path.startswith(f"{copy}{os.sep}"):
            return f"{root.rstrip(os.sep)}{path[len(copy) :]}" or os.sep
    return path


def frozen(path: Path) -> Path:
    """Return the copy of a config file that this process's launch has sealed, and any other file as it is."""
    copies: dict[str, str] = seal().get("configs", {})
    return Path(copies.get(os.path.abspath(path), path))  # noqa: PTH100 (without `..`)


def roots() -> list[str]:
    """Return the folders of the user's own code, the first to be searched first."""
    return [root for root in _roots if root in sys.path]


def original_roots() -> list[str]:
    """Return the same folders; of sealed code the originals."""
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
    """Return the module that code and configs mean by a name: `lightning` is `pytorch_lightning`, but for a module of
    the user's own."""
    top, *rest = name.split(".")
    if top != "lightning" or getattr(top_level(top), "loader", None) is not None:
        return name
    package = _UNIFIED.get(".".join([top, *rest[:1]]))
    return UNIFIED if not rest else ".".join([package, *rest[1:]]) if package else name


def top_level(name: str) -> ModuleSpec | None:
    """Return the user's own module of this name, if there is one."""
    return None if name in _NEVER_OWN else PathFinder.find_spec(name, roots())


def _installed(name: str) -> ModuleSpec | None:
    return PathFinder.find_spec(name, [entry for entry in sys.path if os.path.abspath(entry) not in _roots])  # noqa: PTH100


def _warn_if_hides(own: ModuleSpec) -> None:
    """Log a warning, once and on rank 0, where a module of the user's has the name of an installed one."""
    is_first = all(os.environ.get(name, "0") == "0" for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"))
    if _reported is None or not is_first or own.name in _reported or not is_own(own.origin):
        return
    _reported.add(own.name)
    hidden = _installed(own.name)
    if hidden is not None and hidden.loader is not None and _places(hidden) != _places(own):
        import logging

        text = "%s hides %s, which libraries may need: rename it"
        logging.getLogger("deeplightning").warning(text, short(str(own.origin)), hidden.origin)


def read_from(name: str, file: object) -> str:
    """Return a sentence on the file that a name of a config was looked up in; "": there is no question."""
    top = name.partition(".")[0]
    if top == "__main__":
        return OF_A_SCRIPT
    return f" `{top}` was read from {short(file)}." if top not in LIBRARIES and isinstance(file, str) else ""


def short(file: str) -> str:
    """Return a file as the user would write it: relative where it lies below the working directory. Of sealed code it
    is the original."""
    file, here = original(file), start_folder()
    return os.path.relpath(file, here) if file.startswith(os.path.join(here, "")) else file  # noqa: PTH118  (Path is slow)


def lines_of(error: BaseException) -> list[tuple[str, int]]:
    """Return file and line of each call of the user's own code that an error came through."""
    calls = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    return [(file, line) for file, line in calls if is_theirs(file)]


def is_theirs(file: str) -> bool:
    """Return whether the code of a file is the user's: neither ours nor installed."""
    return file.startswith(EXAMPLES) or not file.startswith((*INSTALLED, *OURS, "<"))


def line_of(error: BaseException) -> str:
    """Return ` (file:line)` of the innermost of them, or nothing."""
    lines = lines_of(error)
    return f" ({short(lines[-1][0])}:{lines[-1][1]})" if lines else ""


def forget() -> None:
    """Forget the user's own modules, so that the next use imports them again."""
    _forget(_own_modules())


def raiser(error: BaseException) -> str:
    """Return the file whose code raised an error."""
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1]


def _places(spec: ModuleSpec) -> set[str]:
    return {
        os.path.realpath(place) for place in ([spec.origin] if spec.origin else spec.submodule_search_locations or [])
    }


class _Finder:  # importlib.abc would import a dozen modules
    """Finds own modules, and gives them their own `import`; finds `lightning`, unless it was imported before."""

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
            _warn_if_hides(spec)
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
        self._spec = module.__spec__  # importlib puts that of the second name in its place
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
    """Do what an `import` in own code asks for."""
    module = builtins.__import__(name, globals, locals, fromlist, level)
    if (call := ON_IMPORT.get(name.partition(".")[0])) is not None and not level:
        call()
    return module


sys.meta_path.insert(0, _Finder())
with contextlib.suppress(SetupError):  # raised again where a config is read
    use_import_roots(*_roots)
