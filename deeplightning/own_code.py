"""The user's own modules: those in the working directory and beside the configs that the user names.

A name in a config is looked up in these folders first, and so is what their files import. No other import sees them
first: a module of the user's whose name something installed has as well (`wave.py`) is imported as a submodule of this
module, `deeplightning.own_code.wave`, so that `import wave` elsewhere still gives the standard library's.

`lightning` in own code and configs means `pytorch_lightning`, whose classes Deep Lightning uses, whether the package
`lightning` is installed or not. Installed modules that import it get the package itself.

A sealed launch (`deeplightning.launch.sealed`) keeps a copy of these folders as they were when it was submitted. In its
processes the copy of each folder takes the place of the folder, here and in `sys.path`.
"""

import builtins
import contextlib
import importlib
import itertools
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import machinery
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from deeplightning.faults import SetupError
from deeplightning.runfolder import start_folder

ROOTS = "DEEPLIGHTNING_ROOTS"
"""The environment variable in which the processes that a run starts get the folders, as a JSON list."""

SEALED = "DEEPLIGHTNING_SEALED"
"""The environment variable in which the processes of a sealed launch get the folder of its frozen code and configs."""
SEAL = "seal.json"
"""The file of that folder that maps originals to copies inside it: `roots` the folders of own code, `configs` the
config files; and `addresses`, those of configs, to files of the cache."""

LIBRARIES = ("deeplightning", "torch", "torchvision", "torchmetrics", "pytorch_lightning")
"""Names that always mean what is installed: a foreign config may name these alone, see `deeplightning.checks.trust`."""

_UNIFIED = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
"""The packages that the package `lightning` unites, and their own names."""
UNIFIED = "deeplightning.unified"
"""The module that has the names of its top level; imported where own code imports any part of `lightning`."""

ON_IMPORT: dict[str, Callable[[], None]] = {}
"""What to call, by the name of an installed module, after own code imports it."""

PREFIX = f"{__name__}."
INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))

OURS = tuple(f"{Path(__file__).parents[1] / package}{os.sep}" for package in ("deeplightning", "serve", "plugins"))
EXAMPLES = f"{Path(__file__).parent / 'examples'}{os.sep}"
"""Where an installed Deep Lightning has its examples, whose modules are a user's own as in a clone."""

_MOST_ENTRIES = 1000
"""So many folders, and of each so many entries, are searched for Python files."""

_added: list[str] = json.loads(os.environ.get(ROOTS, "[]"))  # for every config of this process
_roots: list[str] = [*_added]
_on_path: list[str] = []  # their entries in `sys.path`
_seal: tuple[str, dict[str, Any]] = ("", {})  # the folder of the launch's seal, and the content of its file
__path__: list[str] = [*_roots]  # with it, `PREFIX + name` can be imported, in a spawned process too


def add_import_roots(*folders: Path) -> None:
    """Lets the names of every config come from these folders, before those that were added earlier."""
    _added[:] = dict.fromkeys([*(str(folder.absolute()) for folder in folders), *_added])
    use_import_roots(*_added, *roots())


def added_roots() -> list[str]:
    """The folders of `add_import_roots`, and those that the process which started this one has had."""
    return [*_added]


def use_import_roots(*folders: str | Path) -> None:
    """Lets names come from these folders alone, in this order, before what is installed.

    For everybody else they stand at the end of `sys.path`, where they shadow nothing. A module that was imported from a
    folder that is none any more, or comes later than another one of its name, is imported anew when it is named again.

    Raises:
        SetupError: the code that this launch has sealed is gone.
    """
    copies = seal().get("roots", {})
    new = [*dict.fromkeys(copies.get(root, root) for root in (str(Path(folder).absolute()) for folder in folders))]
    own = {} if new == _roots else _own_modules()
    _put_copies_on_path(copies)
    for root in _on_path:
        if root not in new and root in sys.path:
            sys.path.remove(root)
    _on_path[:] = [root for root in new if root not in sys.path or root in _on_path]
    sys.path += [root for root in new if root not in sys.path]
    _roots[:] = __path__[:] = new
    for root in _roots:
        sys.path_importer_cache.pop(root, None)
    for top, places in own.items():
        spec = top_level(top)
        if spec is None or _places(spec) != places:
            for name in [*sys.modules]:
                if name.removeprefix(PREFIX).partition(".")[0] == top:
                    del sys.modules[name]


def _own_modules() -> dict[str, set[str]]:
    """The top-level modules that were imported from the folders of the user's own code, and where each lies."""
    found = {}
    for name, module in [*sys.modules.items()]:
        top = name.removeprefix(PREFIX)
        spec = None if "." in top or top == "__main__" else top_level(top)
        if spec is None or not _is_from(module, spec):
            continue
        file = spec.origin or f"{next(iter(spec.submodule_search_locations or ()), '')}{os.sep}"
        if is_own(file):
            found[top] = _places(spec)
    return found


def _is_from(module: ModuleType, spec: ModuleSpec) -> bool:
    there = getattr(module, "__spec__", None)
    return there is not None and _places(there) == _places(spec)


def use_seal(folder: Path | None) -> None:
    """Lets own code come from the copies of a seal, in this process and in those that it starts; None: from the
    originals again.

    Raises:
        SetupError: there is no seal in this folder.
    """
    former, before = os.environ.pop(SEALED, None), {copy: root for root, copy in _seal[1].get("roots", {}).items()}
    if folder is not None:
        os.environ[SEALED] = str(folder)
        try:
            seal()
        except SetupError:
            os.environ.pop(SEALED)
            os.environ |= {SEALED: former} if former is not None else {}
            raise
    use_import_roots(*(before.get(root, root) for root in roots()))
    sys.path[:] = dict.fromkeys(before.get(entry, entry) for entry in sys.path)


def seal() -> dict[str, Any]:
    """The content of `SEAL` for this process; {}: its launch is not sealed.

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
    """The path of the original of a file or folder of sealed code; any other path as it is."""
    for root, copy in seal().get("roots", {}).items():
        if path == copy or path.startswith(f"{copy}{os.sep}"):
            return f"{root.rstrip(os.sep)}{path[len(copy) :]}" or os.sep
    return path


def frozen(path: Path) -> Path:
    """The copy of a config file that this process's launch has sealed; any other file as it is."""
    copies: dict[str, str] = seal().get("configs", {})
    return Path(copies.get(os.path.abspath(path), path))  # noqa: PTH100 (without `..`)


def roots() -> list[str]:
    """The folders of the user's own code, the first to be looked through first."""
    return [root for root in _roots if root in sys.path]


def original_roots() -> list[str]:
    """The same folders; of sealed code the originals."""
    return [*map(original, roots())]


def is_own(file: str | None) -> bool:
    """Whether a file is in one of these folders and was not installed there."""
    return (
        file is not None
        and any(file.startswith(f"{root.rstrip(os.sep)}{os.sep}") for root in roots())
        and (
            file.startswith(EXAMPLES)
            or (not file.startswith((*INSTALLED, *OURS)) and f"{os.sep}site-packages{os.sep}" not in file)
        )
    )


def full_name(name: str, inside: Iterable[str] = ()) -> str:
    """Return the name under which `sys.modules` has the module that own code and configs call `name`.

    Args:
        inside: what is wanted of it. A folder without `__init__.py` comes before something installed only where it has
            a module of this name: folders of data are called `datasets` or `test` as well.
    """
    top, *rest = name.split(".")
    spec = top_level(top)
    if top == "lightning" and (spec is None or spec.loader is None):
        package = _UNIFIED.get(".".join([top, *rest[:1]]))
        return UNIFIED if not rest else ".".join([package, *rest[1:]]) if package else name
    if spec is None or not _is_shadowed(spec):
        return name
    if spec.loader is None:
        places = list(spec.submodule_search_locations or ())
        if not any(getattr(PathFinder.find_spec(part, places), "loader", None) for part in rest[:1] or inside):
            return name
    return PREFIX + name


def shown(text: str) -> str:
    """A text with the names of own modules as configs have them."""
    return text.replace(PREFIX, "")


def top_level(name: str) -> ModuleSpec | None:
    """The user's own module of this name, if there is one."""
    return None if name in LIBRARIES else PathFinder.find_spec(name, roots())


def read_from(name: str, file: object) -> str:
    """A sentence on the file that a name of a config was looked up in; "": there is no question."""
    top = name.partition(".")[0]
    return "" if top in LIBRARIES or not isinstance(file, str) else f" `{top}` was read from {short(file)}."


def short(file: str) -> str:
    """A file as the user would write it: relative where it lies below the working directory. Of sealed code it is the
    original, unless that was edited since."""
    if (origin := original(file)) != file:
        with contextlib.suppress(OSError):
            file = origin if Path(origin).read_bytes() == Path(file).read_bytes() else file
    here = start_folder()
    return os.path.relpath(file, here) if Path(file).is_relative_to(here) else file


def lines_of(error: BaseException) -> list[tuple[str, int]]:
    """File and line of each call of the user's own code that an error came through."""
    calls = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    return [(file, line) for file, line in calls if is_theirs(file)]


def is_theirs(file: str) -> bool:
    """Whether the code of a file is the user's: neither ours nor installed."""
    return file.startswith(EXAMPLES) or not file.startswith((*INSTALLED, *OURS, "<"))


def line_of(error: BaseException) -> str:
    """` (file:line)` of the innermost of them, or nothing."""
    lines = lines_of(error)
    return f" ({short(lines[-1][0])}:{lines[-1][1]})" if lines else ""


def running_line(until: Collection[str] = ()) -> str:
    """`file:line` of the innermost line of the user's own code that runs now; empty: there is none.

    Args:
        until: names of modules; what called the innermost function of one of them is not looked at.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in until:
        if is_theirs(frame.f_code.co_filename):
            return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def forget() -> None:
    """Lets each of the user's own modules be imported anew when it is named again."""
    tops = set(_own_modules())
    for name in [*sys.modules]:
        if name.removeprefix(PREFIX).partition(".")[0] in tops:
            del sys.modules[name]


def raiser(error: BaseException) -> str:
    """The file whose code raised an error."""
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1]


def _is_shadowed(spec: ModuleSpec) -> bool:
    """Whether an ordinary `import` of a top-level module of the user's gives another one."""
    loaded = sys.modules.get(spec.name)
    other = _ordinary(spec.name) if loaded is None else getattr(loaded, "__spec__", None)
    if other is None:
        return loaded is not None
    return _places(other) != _places(spec)


def _ordinary(name: str) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if not isinstance(finder, _Finder) and (found := finder.find_spec(name, None)) is not None:
            return found
    return None


def _places(spec: ModuleSpec) -> set[str]:
    return {
        os.path.realpath(place) for place in ([spec.origin] if spec.origin else spec.submodule_search_locations or [])
    }


class _Folder(machinery.FileFinder):
    """Finds the modules in a folder of own code. A folder there without Python files is no package: it may have the
    name of a library that an installed one tries to import."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, target)
        if spec is None or spec.loader is not None or any(map(_has_code, spec.submodule_search_locations or ())):
            return spec
        return None


def _has_code(folder: str) -> bool:
    """Whether there are Python files in a folder or below it."""
    folders = [folder]
    for place in folders:
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in itertools.islice(entries, _MOST_ENTRIES):
                if entry.name.endswith((*machinery.SOURCE_SUFFIXES, *machinery.EXTENSION_SUFFIXES)):
                    return True
                if entry.name.isidentifier() and entry.is_dir() and len(folders) < _MOST_ENTRIES:
                    folders.append(entry.path)
    return False


def _folder(path: str) -> Any:
    """A hook of `sys.path_hooks`."""
    if os.path.abspath(path) not in _roots:  # noqa: PTH100
        raise ImportError
    return _Folder.path_hook(
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
        (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
    )(path)


class _Finder:  # importlib.abc would import a dozen modules
    """Finds own modules, which import each other first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, _ = name.rpartition(".")
        if not parent:
            spec = top_level(name)
            if spec is None or spec.loader is None or _is_shadowed(spec):
                return None
        elif f"{parent}." == PREFIX:
            spec = PathFinder.find_spec(name, roots())
        elif path and is_own(f"{next(iter(path))}{os.sep}"):
            spec = PathFinder.find_spec(name, path)
        else:
            return None
        if spec is not None and type(spec.loader) is SourceFileLoader and is_own(spec.origin):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


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
    full = name if level else full_name(name, fromlist or ())
    if full != name and not full.startswith(PREFIX):
        importlib.import_module(UNIFIED)  # the log tells of it
    if full == name or fromlist:
        module = builtins.__import__(full, globals, locals, fromlist, level)
        if (call := ON_IMPORT.get(full.partition(".")[0])) is not None and not level:
            call()
        return module
    importlib.import_module(full)
    top = name.partition(".")[0]
    return sys.modules[PREFIX + top] if full.startswith(PREFIX) else importlib.import_module(full_name(top))


sys.meta_path.insert(0, _Finder())
sys.path_hooks.insert(0, _folder)
with contextlib.suppress(SetupError):  # raised again where a config is read
    use_import_roots(*_roots)
