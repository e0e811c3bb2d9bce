"""Compile the shim `shim.c`, arm it in the process of a run, and read the journal that it writes.

`Place.start("train", …, main="storm.shim:main", **order(…))` runs `deeplightning` with it.
"""

import ctypes
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from storm.place import Skipped

SOURCE = Path(__file__).with_name("shim.c")
KINDS = (
    *("open", "read_open", "create", "write", "truncate", "sync", "rename", "link", "unlink", "mkdir", "rmdir"),
    *("close", "map", "lock"),
)
"""Kinds of calls, in the order of the enumeration in `shim.c`."""
SHORT = 0
"""Used instead of an error number: write only half."""

_ORDER = "STORM_SHIM"
_RECORD = struct.Struct("=IIQQQIIQ")


def environment() -> dict[str, str]:
    """Return LD_PRELOAD with the compiled shim, for the process from which runs are forked.

    Raises:
        Skipped: this machine has no compiler, or no Linux.
    """
    library = _library()
    former = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{former}" if former and str(library) not in former else str(library)}


def _library() -> Path:
    """Return the path of the shim; compile it if this source has not been compiled yet."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path("/proc/self/fd").is_dir():
        raise Skipped("no C compiler (cc) for tests/storm/shim.c" if compiler is None else "no Linux")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = SOURCE.parents[2] / "dist" / f"storm-shim-{digest}.so"
    if re.search(r"[\s:]", str(library)):  # these separate names in LD_PRELOAD
        library = Path(tempfile.gettempdir()) / f"storm-shim-{os.getuid()}" / library.name
        if re.search(r"[\s:]", str(library)):
            raise Skipped(f"LD_PRELOAD accepts no spaces: {library}; set TMPDIR to a path without them")
        library.parent.mkdir(mode=0o700, exist_ok=True)
        if library.parent.stat().st_uid != os.getuid():
            raise Skipped(f"{library.parent} is another user's; set TMPDIR to another folder")
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        beside = library.with_name(f"{library.name}.{os.getpid()}")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(beside), str(SOURCE), "-ldl", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Skipped(f"tests/storm/shim.c does not compile here: {done.stderr.strip()[-300:]}")
        beside.replace(library)
    return library


def order(
    folders: Iterable[Path],
    journal: Path,
    keeps_data: bool = False,
    fail_at: int = 0,
    sticky: bool = False,
    errors: dict[str, int] | None = None,
) -> dict[str, str]:
    """Return the environment variables that configure `main`.

    Args:
        folders: calls on paths below them are counted.
        journal: file that gets a record of each call, created if it is missing.
        keeps_data: whether the journal includes the data that is written.
        fail_at: number of the call that fails; 0: none.
        sticky: whether every later call that changes something fails too.
        errors: error number, or `SHORT`, for each kind of call.
    """
    numbers = [(errors or {}).get(kind, 0) for kind in KINDS]
    options = {"folders": [str(path.resolve()) for path in folders], "journal": str(journal), "keeps_data": keeps_data}
    return {_ORDER: json.dumps(options | {"fail_at": fail_at, "sticky": sticky, "errors": numbers})}


def arm(options: dict) -> None:
    """Start counting calls.

    Raises:
        OSError: the journal cannot be opened.
        AttributeError: the shim is not loaded.
    """
    library = ctypes.CDLL(None, use_errno=True)
    errors = (ctypes.c_int * len(KINDS))(*options["errors"])
    folders, journal, fail_at = "\n".join(options["folders"]).encode(), options["journal"].encode(), options["fail_at"]
    if library.storm_arm(folders, journal, options["keeps_data"], ctypes.c_long(fail_at), options["sticky"], errors):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), options["journal"])


def main() -> None:
    """Arm the shim and run the command, instead of `deeplightning.cli:main`."""
    from deeplightning import cli

    arm(json.loads(os.environ.pop(_ORDER)))
    cli.main()


@dataclass(frozen=True)
class Call:
    """A call in the journal.

    Attributes:
        error: 0, or the error number of a failed call.
        inode: inode of the file or directory.
        offset: position of a write; new size of a truncation; 1 for a shared map.
        other: the new name of a rename or a link.
    """

    kind: str
    number: int
    error: int
    inode: int
    offset: int
    path: str
    other: str
    data: bytes

    def __str__(self) -> str:
        failed = f": {os.strerror(self.error)}" if self.error else ""
        return f"call {self.number}, {self.kind} {self.path}{f' to {self.other}' * bool(self.other)}{failed}"


def read(journal: Path) -> list[Call]:
    """Return the calls of a run in their order."""
    return list(_calls(journal.read_bytes()))


def _calls(content: bytes) -> Iterator[Call]:
    at = 0
    while at < len(content):
        kind, error, number, inode, offset, path, other, data = _RECORD.unpack_from(content, at)
        parts: list[bytes] = []
        at += _RECORD.size
        for size in (path, other, data):
            parts.append(content[at : at + size])
            at += size
        names = [os.fsdecode(part) for part in parts[:2]]
        yield Call(KINDS[kind], number, error, inode, offset, *names, parts[2])
