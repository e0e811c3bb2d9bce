"""Addresses in the place of paths, such as `https://HOST/PATH` and `s3://BUCKET/PATH`."""

import os
import posixpath
import re

_ADDRESS = re.compile(  # a Path keeps one slash of two; `zip::s3://…` is a file in another
    r"((?:[A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+):/{1,2}(.*)", re.DOTALL
)


def is_address(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address, other than `pkg://`."""
    found = _ADDRESS.fullmatch(os.fspath(path))
    return found is not None and found[1] != "pkg"


def shown(address: str | os.PathLike[str]) -> str:
    """An address for messages and records: without a query and a fragment, which may hold a signature."""
    return whole(address).partition("?")[0].partition("#")[0].replace("runs://", "runs:/")


def whole(address: str | os.PathLike[str]) -> str:
    """An address with the slashes that a Path has dropped."""
    found = _ADDRESS.fullmatch(os.fspath(address))
    assert found is not None, address
    scheme, rest = found[1].lower(), found[2]
    return f"{scheme}://{rest if scheme != 'file' else '/' + rest.lstrip('/')}"


def beside(address: str, name: str) -> str:
    """The address of a file that another one names, relative to its folder; `/NAME` and `~/NAME` are no paths of this
    machine there."""
    found = _ADDRESS.fullmatch(address)
    assert found is not None, address
    return f"{found[1]}://{posixpath.normpath(posixpath.join(posixpath.dirname(found[2]), name.lstrip('/')))}"
