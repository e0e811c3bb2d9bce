"""What a trial imports is imported before it is forked, so that all trials together pay for it once."""

from __future__ import annotations

from deeplightning.config.schema import Config


def warm(cfg: Config) -> None:
    """Imports what a run of this config uses."""
    import deeplightning.run  # noqa: F401
