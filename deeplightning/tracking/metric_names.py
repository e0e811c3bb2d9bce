"""Names and texts in the form that MLflow takes."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

MAX_NAME, MAX_PARAM, MAX_TAG, MAX_REASON = 250, 6000, 5000, 1000
"""Characters that MLflow takes in a name, a parameter and a tag; and those kept of the reason of a failure."""


NETWORK, DATA, ENGINE = "network", "data", "engine"
"""The tags that say what a run has trained, from what and on what: columns of the table of runs."""
NOTE = "mlflow.note.content"
"""The tag that MLflow shows as the description of a run, in Markdown."""


def flatten(params: Mapping[str, object]) -> dict[str, str]:
    """Flatten nested mappings and lists into one mapping of text, keys joined by `/`, within MLflow's limits."""
    flat: dict[str, str] = {}

    def visit(path: tuple[str, ...], value: object) -> None:
        items = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if not isinstance(items, Mapping) or (not items and path):
            flat[clean("/".join(path))] = str(value)[:MAX_PARAM]
            return
        for key, inner in items.items():
            visit((*path, str(key)), inner)

    visit((), params)
    return flat


@lru_cache(maxsize=4096)
def clean(name: str) -> str:
    """Make a name valid for MLflow: letters, digits and `_-. :/`, no empty or dotted part, at most 250 characters."""
    parts = re.sub(r"[^\w.\- :/]", "_", str(name)).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:MAX_NAME]


def inside(name: str) -> Path:
    """Return a path below the run's artifacts.

    Raises:
        ValueError: it would lead out of them.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} is not a name inside the run's artifacts: write a relative path without '..'.")
    return path
