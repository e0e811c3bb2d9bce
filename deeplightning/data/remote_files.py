"""`data.root` as an address, such as `s3://BUCKET/FOLDER`: its files are copied into the user's cache, once, and data
modules read the copy.

A folder of the cache (`deeplightning.data.cache_files`) is named by the address and by what the store tells of its
files: names, sizes, dates, checksums. Where one of them changes, all are copied again, into another folder; the former
one stays for the runs that read it. It holds the folder `files`, and `index` once that is complete. Deleting it is safe
when no run uses it.
"""

import json
import logging
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from deeplightning.address import is_address, shown
from deeplightning.data import cache_files
from deeplightning.data.data_errors import DataConfigError, DataError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

VERSIONS = {
    *("etag", "md5", "md5hash", "content-md5", "checksum", "crc32c", "digest", "sha256", "blob_id", "generation"),
    *("mtime", "modified", "last_modified", "last-modified", "lastmodified", "created", "updated"),
}
"""Lower-case names under which fsspec's file systems give the version of a file."""

log = logging.getLogger("deeplightning")


def folder_of(root: str, files: Sequence[str] = ()) -> Path:
    """Return the local folder of `data.root`, absolute.

    Args:
        root: a path, or an address.
        files: those that are needed, relative to it; of an address no others are copied. None: all.

    Raises:
        DataConfigError: the address is wrong.
        DataError: it does not answer, has no such files, a library is missing, or the disk is full.
    """
    return _copied(root, tuple(sorted(files))) if is_address(root) else Path(root).expanduser().absolute()


@lru_cache
def _copied(root: str, files: tuple[str, ...]) -> Path:
    for name in files:
        if name.startswith(("/", "~")) or ".." in name.split("/"):
            raise DataConfigError(f"{name} is not inside data.root: {shown(root)}")
    system, found = files_at(root, files)
    manifest = {name: [size, version] for name, (_, size, version) in sorted(found.items())}
    top = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplightning" / "data"
    folder = top / cache_files.folder_name(root, manifest)

    def find() -> Path:
        (folder / "index").stat()
        return folder / "files"

    try:
        return cache_files.find_or_make(folder, find, lambda: _copy(system, root, found, folder))
    except OSError as error:
        raise DataError(f"{shown(root)} cannot be copied to {top}: {error.strerror or error}") from error


def files_at(root: str, files: tuple[str, ...]) -> tuple[object, dict[str, tuple[str, int, str]]]:
    """Return the file system, and of each file under its name its path there, bytes and version.

    Args:
        root: the address of a folder.
        files: those that are needed, relative to it; none: all.

    Raises:
        DataConfigError: the address is wrong.
        DataError: it does not answer, has no such files, or a library is missing.
    """
    if re.match(r"[^/]+://[^/@]*:[^/@]*@", root):
        raise DataConfigError("data.root has a password, which a run would keep; give it by the store's own settings.")
    try:
        from fsspec.core import url_to_fs

        system, top = url_to_fs(root)
        if files:
            infos = {name: system.info(f"{top.rstrip('/')}/{name}") for name in files}
        else:
            listing: Mapping[str, object] = system.find(top, detail=True)
            # S3's console makes a folder as an empty object whose name ends in a slash.
            objects = {path: info for path, info in listing.items() if not path.endswith("/")}
            infos = {posixpath.relpath(path, top or "."): info for path, info in objects.items()}
    except FileNotFoundError as error:
        raise DataError(f"{shown(root)}: there is no such file: {error}") from None
    except ImportError as error:
        package = re.match(r"Install (\S+)", str(error))  # as fsspec words it
        remedy = f"pip install {package[1]}" if package else str(error)
        raise DataError(f"data.root: {shown(root)} needs a library that is not installed: {remedy}") from None
    except ValueError as error:  # no such protocol
        raise DataConfigError(f"data.root: {shown(root)}: {error}") from None
    except Exception as error:  # each store has its own
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"data.root: {shown(root)} does not answer: {words}") from error
    if not infos or any(name.split("/")[0] in ("..", ".") for name in infos):
        raise DataError(f"data.root: there are no files below {shown(root)}")
    found = {}
    for name, info in infos.items():
        version = {key: str(value) for key, value in sorted(info.items()) if key.lower() in VERSIONS}
        found[name] = (info["name"], int(info.get("size") or 0), json.dumps(version))
    return system, found


def _copy(system: "AbstractFileSystem", root: str, found: Mapping[str, tuple[str, int, str]], folder: Path) -> None:
    total = sum(size for _, size, _ in found.values())
    log.info("data       copying %.3g MiB, files: %d, from %s", total / 2**20, len(found), shown(root))
    targets = [folder / "files" / name for name in found]
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        system.get([path for path, _, _ in found.values()], [*map(str, targets)])
    except OSError:
        raise
    except Exception as error:  # each store has its own
        raise DataError(f"{shown(root)} cannot be copied: {' '.join(str(error).split())[:200]}") from error
    (folder / "index").touch()
