"""Record runs: in MLflow, with their code, data and environment. This package is cheap to import."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplightning.tracking.logger import MLflowLogger
    from deeplightning.tracking.resolve import resolve_run

__all__ = ["MLflowLogger", "resolve_run"]


def __getattr__(name: str) -> object:
    """Import a public name on first use: MLflow costs 1.2 CPU seconds, Lightning and torch twice that."""
    if name == "MLflowLogger":
        from deeplightning.tracking.logger import MLflowLogger

        return MLflowLogger
    if name == "resolve_run":
        from deeplightning.tracking.resolve import resolve_run

        return resolve_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
