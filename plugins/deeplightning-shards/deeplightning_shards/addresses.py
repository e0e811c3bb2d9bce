"""List the files at an address such as `s3://BUCKET/FOLDER`, with fsspec."""

import json
import posixpath
import re
from collections.abc import Mapping

from deeplightning.data.data_errors import DataConfigError, DataError

VERSION_KEYS = {
    *("etag", "md5", "md5hash", "content-md5", "checksum", "crc32c", "digest", "sha256", "blob_id", "generation"),
    *("mtime", "modified", "last_modified", "last-modified", "lastmodified", "created", "updated"),
}
"""Lower-case keys under which fsspec's file systems report the version of a file."""


def without_query(address: str) -> str:
    """Return an address without its query and fragment, which may contain a signature; for messages."""
    return address.partition("?")[0].partition("#")[0]


def files_at(root: str) -> dict[str, tuple[str, int, str]]:
    """Map the name of each file below an address, relative to it, to the file's path, size in bytes and version.

    Raises:
        DataConfigError: the address is invalid.
        DataError: the store does not answer or has no files there, or a library is missing.
    """
    if re.match(r"[^/]+://[^/@]*:[^/@]*@", root):
        raise DataConfigError("data.root has a password, which a run would record; put it in the store's own settings.")
    try:
        from fsspec.core import url_to_fs

        system, top = url_to_fs(root)
        listing: dict[str, Mapping[str, object]] = system.find(top, detail=True)
        for path in [name for name, info in listing.items() if name.endswith(".tar") and info.get("size") is None]:
            listing[path] = system.info(path)  # a listing of HTTP has neither sizes nor versions
    except ImportError as error:
        package = re.match(r"Install (\S+)", str(error))  # wording of fsspec
        remedy = f"pip install {package[1]}" if package else str(error)
        raise DataError(f"data.root: {without_query(root)} needs a library that is not installed: {remedy}") from None
    except ValueError as error:  # unknown protocol
        raise DataConfigError(f"data.root: {without_query(root)}: {error}") from None
    except Exception as error:  # each store raises its own classes
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"data.root: {without_query(root)} does not answer: {reason}") from error
    found = {}
    for path, info in listing.items():
        name = posixpath.relpath(path, top or ".")
        if not path.endswith("/"):  # S3's console creates a folder as an empty object whose name ends in a slash
            version = {key: str(value) for key, value in sorted(info.items()) if key.lower() in VERSION_KEYS}
            found[name] = (path, int(str(info.get("size") or 0)), json.dumps(version))
    if not found:
        raise DataError(f"data.root: there are no files below {without_query(root)}")
    return found
