"""Where a run is written down: MLflow, its store on disk, the machine it ran on. Importing it is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplightning.tracking.logger import MLflowLogger
    from deeplightning.tracking.resolve import resolve_run

__all__ = ["MLflowLogger", "resolve_run"]

_PLACES = {"MLflowLogger": "deeplightning.tracking.logger", "resolve_run": "deeplightning.tracking.resolve"}


def __getattr__(name: str):
    """Fetch a public name when it is asked for: MLflow costs 1.2 CPU seconds, Lightning and torch twice that."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
