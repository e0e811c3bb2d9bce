"""Serve a bundle over HTTP. Imports no torch, Lightning or MLflow; from the core only `image_spec`, `text_spec`,
`table_spec`, `array_spec`, `kinds`, `runfolder`, `words`.

`create_app` makes the WSGI application. Importing this package alone loads nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> object:
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from serve.app import create_app

    return create_app
