"""List the files at an address such as `s3://BUCKET/FOLDER`, by fsspec."""

import json
import posixpath
import re
from collections.abc import Mapping

from deeplightning.data.data_errors import DataConfigError, DataError

VERSIONS = {
    *("etag", "md5", "md5hash", "content-md5", "checksum", "crc32c", "digest", "sha256", "blob_id", "generation"),
    *("mtime", "modified", "last_modified", "last-modified", "lastmodified", "created", "updated"),
}
"""Lower-case names under which fsspec's file systems give the version of a file."""


def shown(address: str) -> str:
    """Return an address for messages, without its query and fragment, which may hold a signature."""
    return address.partition("?")[0].partition("#")[0]


def files_at(root: str) -> dict[str, tuple[str, int, str]]:
    """Return the path, bytes and version of each file below an address, by its name relative to it.

    Raises:
        DataConfigError: the address is wrong.
        DataError: it does not answer, has no files, or a library is missing.
    """
    if re.match(r"[^/]+://[^/@]*:[^/@]*@", root):
        raise DataConfigError("data.root has a password, which a run would keep; give it by the store's own settings.")
    try:
        from fsspec.core import url_to_fs

        system, top = url_to_fs(root)
        listing: Mapping[str, Mapping[str, object]] = system.find(top, detail=True)
    except ImportError as error:
        package = re.match(r"Install (\S+)", str(error))  # as fsspec words it
        remedy = f"pip install {package[1]}" if package else str(error)
        raise DataError(f"data.root: {shown(root)} needs a library that is not installed: {remedy}") from None
    except ValueError as error:  # no such protocol
        raise DataConfigError(f"data.root: {shown(root)}: {error}") from None
    except Exception as error:  # each store has its own
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"data.root: {shown(root)} does not answer: {words}") from error
    found = {}
    for path, info in listing.items():
        name = posixpath.relpath(path, top or ".")
        if not path.endswith("/"):  # S3's console makes a folder as an empty object whose name ends in a slash
            version = {key: str(value) for key, value in sorted(info.items()) if key.lower() in VERSIONS}
            found[name] = (path, int(str(info.get("size") or 0)), json.dumps(version))
    if not found:
        raise DataError(f"data.root: there are no files below {shown(root)}")
    return found
