"""Addresses in the place of paths, such as `https://HOST/PATH` and `s3://BUCKET/PATH`."""

import os
import re

_ADDRESS = re.compile(  # a Path keeps one slash of two; `zip::s3://…` is a file in another
    r"((?:[A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+):/{1,2}(.*)", re.DOTALL
)


def is_address(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an address, other than `pkg://`."""
    found = _ADDRESS.fullmatch(os.fspath(path))
    return found is not None and found[1] != "pkg"


def shown(address: str | os.PathLike[str]) -> str:
    """Return an address for messages: without its query and fragment, which may hold a signature, and without a user
    and password."""
    return re.sub(r"://[^/]*@", "://", _ADDRESS.sub(r"\1://\2", os.fspath(address))).partition("?")[0].partition("#")[0]
