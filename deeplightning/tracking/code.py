"""Pack the user's own code into a zip in the run folder, and unpack it. Standard library only.

The zip contains what a run could import from its import roots (the working directory, the folder of the config,
PYTHONPATH) except installed packages and Deep Lightning: imported modules, modules that these import by name, and the
package folders of both, with small text files next to the sources. Nothing else is scanned, so a working directory with
a hundred thousand files costs nothing. The zip has a folder for each root, 0, 1 … in search order, and `manifest.json`.
Equal code gives equal bytes.
"""

import hashlib
import importlib.metadata
import io
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath

from deeplightning import own_code
from deeplightning.config.secret_scan import conceal
from deeplightning.faults import PROJECTS, CheckpointError
from deeplightning.tracking import environment
from deeplightning.version import __version__

MAX_FILES, MAX_BYTES, MAX_FILE_BYTES = 2_000, 20_000_000, 1_000_000
"""Maximum number of files, their total size in bytes, and the size of one file."""
MAX_TEXT_BYTES = 64_000
"""Maximum size of a text file next to the sources of a package: labels, settings. A larger one is data."""
MAX_WALKED = 10_000
"""Maximum number of files and folders that are scanned in packages."""

MANIFEST = "manifest.json"
_FORMAT = 1
TEXT_SUFFIXES = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".txt")
_SECRET_NAME = re.compile(r"(?i)secret|credential|password|token(?!iz)|\.env|\.pem|\.key|netrc|htpasswd")
_SKIPPED_FOLDERS = ("__pycache__", "node_modules", "site-packages", "mlruns")
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+([^\W\d]\w*)[\w.]*[ \t]+import\b|import[ \t]+([^#;\n]+))", re.MULTILINE)


@dataclass
class Code:
    """The code of a run. The last two fields are not in the zip."""

    roots: list[str] = field(default_factory=list)  # absolute import roots, in search order
    working_directory: str | None = None  # one of the roots; None: no code came from there
    files: dict[tuple[int, str], bytes] = field(default_factory=dict)  # by index of the root and path, with `/`
    left_out: dict[str, str] = field(default_factory=dict)  # files and folders that were left out, and why
    concealed: list[str] = field(default_factory=list)  # places (`own.py:12`) of redacted secrets
    packages: dict[str, str] = field(default_factory=dict)  # versions of installed packages that it imports
    program: dict[str, str] = field(default_factory=dict)  # Deep Lightning itself, see `describe_program`
    imported: set[str] = field(default_factory=set)  # names of modules that are installed or in Python's library
    secrets: set[str] = field(default_factory=set, repr=False)  # redacted texts, except ordinary words

    def names(self) -> dict[str, bytes]:
        """Return the files by path. If two files have the same path, the index of the root is added."""
        paths = [path for _, path in self.files]
        return {
            path if paths.count(path) == 1 else f"{path} (root {root})": content
            for (root, path), content in self.files.items()
        }

    def pack(self, redact: Callable[[str], str] = str) -> bytes:
        """Return the files as a zip."""
        manifest = {
            "format": _FORMAT,
            "roots": [redact(root) for root in self.roots],
            "working_directory": self.working_directory and redact(self.working_directory),
            "files": [f"{root}/{path}" for root, path in sorted(self.files)],
            "left_out": {redact(path): why for path, why in self.left_out.items()},
            "concealed": self.concealed,
            "packages": self.packages,
            "deeplightning": self.program,
        }
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            content = {f"{root}/{path}": text for (root, path), text in sorted(self.files.items())}
            for name, text in {MANIFEST: json.dumps(manifest, indent=1).encode(), **content}.items():
                entry = zipfile.ZipInfo(name)  # dated 1980-01-01: equal code gives an equal zip
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(entry, text)
        return packed.getvalue()


@cache
def describe_program() -> dict[str, str]:
    """Describe this Deep Lightning: `version`, the SHA-256 `digest` of its sources and, for a clone, its `commit`."""
    top, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(path for name in ("deeplightning", "serve") for path in (top / name).rglob("*.py")):
        with suppress(OSError):
            digest.update(path.relative_to(top).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    is_clone = (top / ".git").exists()
    commit = environment.ask_git("rev-parse", "--verify", "--quiet", "HEAD", folder=top) if is_clone else None
    return {"version": __version__, "digest": digest.hexdigest()} | ({"commit": commit} if commit else {})


def collect(
    redact: Callable[[str], str] = str,
    before: Code | None = None,
    modules: Mapping[str, object] | None = None,
    verbatim: bool = False,
) -> Code:
    """Collect the code of this process's run; for a sealed launch, the sealed code under its original paths.

    Args:
        redact: removes values that came from the environment from a text.
        before: code collected earlier in the run; its files stay unchanged.
        modules: imported modules by name; None: those of this process.
        verbatim: include secrets, and all sources in the import roots, so that the code runs unchanged.
    """
    found = _Collector(redact, before or Code(), sys.modules if modules is None else modules, verbatim)
    found.collect()
    return found.code()


class _Collector:
    """Collects files by root and path."""

    def __init__(self, redact: Callable[[str], str], before: Code, modules: Mapping[str, object], verbatim: bool):
        self.redact, self.modules, self.verbatim = redact, modules, verbatim
        self.path = list(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))  # noqa: PTH100 (of `.` too)
        self.left_out, self.concealed = dict(before.left_out), list(before.concealed)
        self.secrets = set(before.secrets)
        self.files = {(before.roots[r], path): content for (r, path), content in before.files.items()}
        self.bytes = sum(map(len, self.files.values()))
        self.entries = 0
        self.unfollowed: list[bytes] = [*self.files.values()]  # sources whose imports are still to be followed
        self.walked_packages: set[str] = set()
        self.installed_names: set[str] = set()

    def collect(self) -> None:
        for name, module in list(self.modules.items()):
            file = getattr(module, "__dict__", {}).get("__file__")
            if isinstance(file, str) and file.endswith(".py") and not _is_installed(file):
                self.add_module(name, module, os.path.abspath(file))  # noqa: PTH100 (three times as fast)
        followed: set[str] = set()
        while self.unfollowed:
            for top in _imported_by(self.unfollowed.pop()) - followed:
                followed.add(top)
                self.add_import(top)
        # For a launch, all sources in the import roots: a computed name may import one later.
        copies = own_code.seal().get("roots", {}) if self.verbatim else {}
        roots = [*own_code.original_roots(), *(root for root, _ in self.files)] if self.verbatim else []
        for root in dict.fromkeys(roots):
            folder = copies.get(root, root)
            for file in sorted(Path(folder).glob("*.py")):
                if not file.name.startswith("."):
                    self.add_file(folder, str(file))

    def add_module(self, name: str, module: object, file: str) -> None:
        """Add an imported module and the folder of its package."""
        if name == "__main__":
            spec = getattr(module, "__spec__", None)
            name = spec.name if spec is not None else Path(file).stem
        inner = name.replace(".", os.sep)
        for ending in (f"{os.sep}{inner}.py", f"{os.sep}{inner}{os.sep}__init__.py"):
            if file.endswith(ending):
                root = file.removesuffix(ending) or os.sep
                if module is self.modules.get("__main__") and root not in self.path:
                    return  # a script that was started by its path
                self.add_file(root, file)
                if os.sep in file[len(root) + 1 :]:
                    self.add_package(root, name.partition(".")[0])
                return

    def add_import(self, top: str) -> None:
        """Add the module that a name refers to, if it is the user's."""
        spec = own_code.top_level(top)
        if (spec is None or spec.loader is None) and top not in self.modules:
            with suppress(Exception):
                spec = PathFinder.find_spec(top)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        places = folders or [spec.origin or "" if spec is not None else ""]
        if all(place in ("", "built-in", "frozen") or _is_installed(f"{place}{os.sep}") for place in places):
            self.installed_names.add(top)
            return
        for place in map(os.path.abspath, places):
            root = os.path.dirname(place)  # noqa: PTH120
            if folders:
                self.add_package(root, top)
            elif place.endswith(".py"):
                self.add_file(root, place)

    def add_package(self, root: str, top: str) -> None:
        """Add the sources of a package, and small text files next to them."""
        package = os.path.join(root, top)  # noqa: PTH118
        if package in self.walked_packages:
            return
        self.walked_packages.add(package)
        for folder, below, names in os.walk(package):
            below[:] = sorted(name for name in below if name not in _SKIPPED_FOLDERS and not name.startswith("."))
            if own_code.SEAL in names:
                below.clear()
                continue
            self.entries += len(below) + len(names)
            if self.entries > MAX_WALKED:
                self.left_out[own_code.original(folder)] = f"more than {MAX_WALKED:,} files and folders in its packages"
                return
            for name in sorted(name for name in names if not name.startswith(".")):
                if name.endswith(".py"):
                    self.add_file(root, os.path.join(folder, name))  # noqa: PTH118
                elif name.endswith(TEXT_SUFFIXES) and not _SECRET_NAME.search(name):
                    self.add_file(root, os.path.join(folder, name), MAX_TEXT_BYTES)  # noqa: PTH118

    def add_file(self, root: str, file: str, max_bytes: int | None = None) -> None:
        max_bytes = MAX_FILE_BYTES if max_bytes is None else max_bytes
        path = os.path.relpath(file, root).replace(os.sep, "/")
        root, original = own_code.original(root), own_code.original(file)
        if (root, path) in self.files or not os.path.isfile(file):  # noqa: PTH113
            return
        try:
            with open(file, "rb") as opened:  # noqa: PTH123
                content = opened.read(max_bytes + 1)
        except OSError as error:
            self.left_out[original] = error.strerror or str(error)
            return
        if len(content) > max_bytes:
            self.left_out[original] = f"larger than {max_bytes:,} bytes"
            return
        if len(self.files) >= MAX_FILES or self.bytes + len(content) > MAX_BYTES:
            self.left_out[original] = f"more than {MAX_FILES:,} files or {MAX_BYTES:,} bytes of code"
            return
        if path.endswith(".py"):
            self.unfollowed.append(content)
        if not self.verbatim:
            content, lines = without_secrets(content, self.redact, path, self.secrets)
            self.concealed += [f"{path}:{line}" for line in lines]
        self.files[root, path] = content
        self.bytes += len(content)

    def code(self) -> Code:
        found = map(own_code.original, [*own_code.roots(), *self.path])
        order = {root: number for number, root in reversed([*enumerate(found)])}
        roots = sorted({root for root, _ in self.files}, key=lambda root: (order.get(root, len(order)), root))
        current = None
        with suppress(OSError):  # it was deleted
            current = str(own_code.start_folder())
        return Code(
            roots=roots,
            working_directory=current if current in roots else None,
            files={(roots.index(root), path): content for (root, path), content in self.files.items()},
            left_out=dict(sorted(self.left_out.items())),
            concealed=sorted({*self.concealed}),
            program={"version": __version__},
            imported=self.installed_names,
            secrets=self.secrets,
        )


def _is_installed(file: str) -> bool:
    if file.startswith(own_code.EXAMPLES):
        return False
    ours = (*own_code.INSTALLED, *own_code.OURS)
    return file.startswith(ours) or f"{os.sep}site-packages{os.sep}" in file or "dist-packages" in file


def without_secrets(
    content: bytes, redact: Callable[[str], str], name: str, found: set[str] | None = None
) -> tuple[bytes, list[int]]:
    """Return a file's content without secrets, and the lines of secrets that cannot be restored. Bytes that are not
    UTF-8 are preserved.

    Args:
        found: receives the redacted texts, see `conceal`.
    """
    clean, lines = conceal(redact(content.decode("utf-8", "surrogateescape")), name, found)
    return clean.encode("utf-8", "surrogateescape"), lines


def _imported_by(source: bytes) -> set[str]:
    """Return the top-level names that a source imports. Text that only looks like an import does no harm."""
    names = set()
    for one, several in _IMPORT.findall(source):
        for name in [one] if one else several.split(b","):
            if found := re.match(rb"\s*([^\W\d]\w*)", name):
                names.add(found[1].decode("latin-1"))
    return names


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages of these modules by project name, if it follows from the module's name.
    Packages in `environment.PACKAGES` are left out: each run records them anyway."""
    found = {}
    for name in sorted({*names} - sys.stdlib_module_names - {"deeplightning", "serve"}):
        project = PROJECTS.get(name, name)
        if project.replace("_", "-").lower() not in environment.PACKAGES:
            with suppress(Exception):  # a project with another name, or damaged metadata
                found[project] = importlib.metadata.version(project)
    return found


def read_code(path: Path) -> Code:
    """Read the code in a zip. Nothing in it is executed, and no path in it may lead out of a folder.

    Raises:
        CheckpointError: it is damaged, too large, or was not made by `Code.pack`.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > 3 * MAX_BYTES or len(entries) > 2 * MAX_FILES:
                raise CheckpointError(f"{path}: is too large for the code of a run")
            manifest = json.loads(archive.read(MANIFEST))
            if manifest["format"] != _FORMAT:
                raise CheckpointError(f"{path}: has the format {manifest['format']!r}, which this version cannot read")
            code = Code(
                roots=[str(root) for root in manifest["roots"]],
                working_directory=manifest["working_directory"],
                left_out=dict(manifest["left_out"]),
                concealed=list(manifest["concealed"]),
                packages=dict(manifest["packages"]),
                program=dict(manifest["deeplightning"]),
            )
            for name in manifest["files"]:
                root, _, inside = name.partition("/")
                inner = PurePosixPath(inside)
                leads_out = not inner.parts or inner.is_absolute() or ".." in inner.parts or "\\" in inside
                if leads_out or not root.isdecimal() or int(root) >= len(code.roots):
                    raise CheckpointError(f"{path}: {name!r} is not the name of a code file")
                code.files[int(root), inside] = archive.read(name)
            return code
    except CheckpointError:
        raise
    except Exception as error:  # zipfile, zlib and json each have their own errors; KeyError: another format
        raise CheckpointError(f"{path}: is damaged, or not the code of a run ({error})") from error


def unpack(code: Code, into: Path, restore: Callable[[bytes], bytes] = bytes) -> list[Path]:
    """Write the files into a folder for each root, and return these folders in order.

    Args:
        restore: inserts the values of the environment, of which the zip contains only the names.
    """
    roots = [into / str(number) for number in range(len(code.roots))]
    for root in roots:
        root.mkdir(parents=True)
    for (number, path), content in code.files.items():
        target = roots[number] / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(restore(content))
    return roots


def restored(content: bytes, secrets: Mapping[str, str]) -> bytes:
    """Restore the values of the environment that were removed from a file.

    Args:
        secrets: the values, by the expression that refers to them in the config.
    """
    for expression, value in secrets.items():
        content = content.replace(expression.encode(), value.encode())
    return content
