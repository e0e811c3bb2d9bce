"""The shim of `shim.c`: compiles it, arms it in the process of a run, and reads the journal that it leaves.

`main` stands for `deeplightning` in `Place.start("train", …, main="storm.shim:main", **order(…))`.
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
"""Of calls, in the order of the enumeration in `shim.c`."""
SHORT = 0
"""Instead of an error: a write takes half."""

_ORDER = "STORM_SHIM"
_RECORD = struct.Struct("=IIQQQIIQ")


def environment() -> dict[str, str]:
    """LD_PRELOAD with the compiled shim, for the process from which runs are forked.

    Raises:
        Skipped: there is no compiler, or no Linux.
    """
    library = _library()
    former = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{library}:{former}" if former and str(library) not in former else str(library)}


def _library() -> Path:
    """The compiled shim, made at first use of this source."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not Path("/proc/self/fd").is_dir():
        raise Skipped("no C compiler (cc) is here to compile tests/storm/shim.c" if compiler is None else "no Linux")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = SOURCE.parents[2] / "dist" / f"storm-shim-{digest}.so"
    if re.search(r"[\s:]", str(library)):  # what LD_PRELOAD has between two names
        library = Path(tempfile.gettempdir()) / f"storm-shim-{os.getuid()}" / library.name
        if re.search(r"[\s:]", str(library)):
            raise Skipped(f"LD_PRELOAD takes no path with a blank: {library}; set TMPDIR to one without")
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
    """The variables that tell `main` what to do.

    Args:
        folders: calls on paths below them are counted.
        journal: the file that takes a record of each, made if it is not there.
        keeps_data: what is written is in the journal too.
        fail_at: the number of the call that fails; 0: none.
        sticky: each call after it that would change something fails too.
        errors: by kind of call the error, or `SHORT`.
    """
    numbers = [(errors or {}).get(kind, 0) for kind in KINDS]
    told = {"folders": [str(path.resolve()) for path in folders], "journal": str(journal), "keeps_data": keeps_data}
    return {_ORDER: json.dumps(told | {"fail_at": fail_at, "sticky": sticky, "errors": numbers})}


def arm(told: dict) -> None:
    """Has the shim count from now on.

    Raises:
        OSError: the journal cannot be opened.
        AttributeError: the shim is not loaded.
    """
    library = ctypes.CDLL(None, use_errno=True)
    errors = (ctypes.c_int * len(KINDS))(*told["errors"])
    folders, journal = "\n".join(told["folders"]).encode(), told["journal"].encode()
    if library.storm_arm(folders, journal, told["keeps_data"], ctypes.c_long(told["fail_at"]), told["sticky"], errors):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), told["journal"])


def main() -> None:
    """Instead of `deeplightning.cli:main`."""
    from deeplightning import cli

    arm(json.loads(os.environ.pop(_ORDER)))
    cli.main()


@dataclass(frozen=True)
class Call:
    """A call as the journal has it.

    Attributes:
        error: 0, or why it failed.
        inode: of the file or directory that it is about.
        offset: of what was written; the new size where it was truncated; 1 for a map whose changes reach the file.
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
    """The calls of a run, in their order."""
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
