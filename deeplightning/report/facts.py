"""Read a run folder into plain values. The folder may be untrusted: nothing is unpickled or imported, links out of it
are not followed, and values of an unexpected form are skipped.
"""

import base64
import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deeplightning.config.secret_scan import REDACTED, conceal, secrets_in_value
from deeplightning.config.tree import flat, parse, plain
from deeplightning.faults import CheckpointError, Fault
from deeplightning.runfolder import RunFolder, read_object
from deeplightning.tracking.metrics_file import Series, read_series
from deeplightning.words import first_line

MAX_FILE_BYTES = 64 * 2**20
"""Maximum size of a file of the run; larger ones are skipped."""

MAX_PICTURE_BYTES = 4 * 2**20
"""Maximum size of a picture in a report."""

STAGES = {"test": "test", "validate": "validation"}
"""Stages with results, and the names of their data sets. Pictures are drawn for the first one that a run has."""

PNG, SVG = b"\x89PNG\r\n\x1a\n", b"<svg"


@dataclass
class Mistake:
    """A sample with a wrong or bad answer; unknown values are empty."""

    words: dict[str, str]  # details of the answer by name, such as `true` and `predicted`
    name: str = ""  # file of the sample
    text: str = ""  # the sample itself, if it is a text
    image: bytes = b""  # a PNG of the sample


@dataclass
class Facts:
    """Facts about a run; unknown values are empty."""

    folder: RunFolder
    run_id: str = ""  # this and the next two are from the store
    name: str = ""
    status: str = ""  # FINISHED, FAILED, KILLED or RUNNING
    config: dict[str, Any] = field(default_factory=dict)  # values by dotted key, redacted
    places: dict[str, str] = field(default_factory=dict)  # the source of each; a missing key has its default
    environment: dict[str, Any] = field(default_factory=dict)  # machine, code and packages
    results: dict[str, dict[str, float]] = field(default_factory=dict)  # metrics of the evaluations, by stage
    best: dict[str, Any] = field(default_factory=dict)  # metric, value and step of the best checkpoint
    series: Series = field(default_factory=dict)  # points of each metric
    classes: list[str] = field(default_factory=list)  # their names
    mistakes: dict[str, list[Mistake]] = field(default_factory=dict)  # the worst answers, by stage

    @property
    def title(self) -> str:
        """Name of the run in its store, else network and data."""
        if self.name:
            return self.name
        network, data = (str(self.config.get(f"{key}.type") or "") for key in ("model.network", "data.module"))
        return " on ".join(part.rpartition(".")[2] for part in (network, data) if part) or self.folder.path.name

    @property
    def stage(self) -> str | None:
        """The first stage with a file of answers, or None."""
        return next((stage for stage in STAGES if self.folder.stage_predictions(stage).is_file()), None)

    @property
    def best_step(self) -> int | None:
        at, points = self.best.get("step"), self.series.get(str(self.best.get("metric")), [])
        same = [step for step, value in points if value == self.best.get("value")]  # `at` counts each optimizer, from 1
        several = any(name.startswith("lr-") for name in self.series)
        at = next((step for step in same if step + 1 == at and not several), next(iter(same), at))
        return at if isinstance(at, int) else None


def facts(folder: RunFolder, series: Series | None = None) -> Facts:
    """Read the facts about a run from its folder.

    Args:
        series: metrics from its store; None: read them from the folder.

    Raises:
        CheckpointError: this is not a run folder.
    """
    if not folder.config.is_file():
        raise CheckpointError(f"{folder.path}: this is not a run folder: it has no {folder.config.name}")
    found = Facts(folder)
    inside = folder.path.parent.name if folder.path.name == "artifacts" else folder.path.name
    found.run_id = inside if re.fullmatch("[0-9a-f]{32}", inside) else ""
    try:
        faults: list[Fault] = []
        # Not `read`, which follows `_base_` to other files.
        root = parse(folder.config.read_text(encoding="utf-8"), str(folder.config), faults)
        found.config = {key: _without_secrets(key, value) for key, value in flat(plain(root))}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder.config}: cannot be read: {first_line(error)}") from error
    if faults:
        raise CheckpointError(f"{folder.config}: cannot be read: {faults[0].message}")
    found.places = {str(k): without_secrets(str(v)) for k, v in _mapping(folder, folder.places).items()}
    found.environment = _mapping(folder, folder.environment)
    for stage in STAGES:
        results = _mapping(folder, folder.results(stage)).items()
        if numbers := {name: float(value) for name, value in results if isinstance(value, int | float)}:
            found.results[stage] = numbers
        content = _mapping(folder, folder.mistakes(stage))
        if (given := content.get("mistakes")) and isinstance(given, list):
            found.mistakes[stage] = [_mistake(one) for one in given[:100] if isinstance(one, dict)]
        names = content.get("classes")
        if isinstance(names, list) and not found.classes:
            found.classes = [str(name) for name in names]
    best = _mapping(folder, folder.best_score)
    if {"metric", "value", "step"} <= best.keys() and isinstance(best["value"], int | float):
        found.best = best
    if series is not None:
        found.series = series
    elif is_inside(folder, folder.metrics):
        with contextlib.suppress(ValueError, RecursionError):
            found.series = read_series(folder.metrics)
    return found


def without_secrets(text: str) -> str:
    """Redact everything in a text that looks like a secret."""
    return conceal(text, ".txt")[0]


def _without_secrets(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_without_secrets(key, item) for item in value]
    if isinstance(value, dict):
        return {name: _without_secrets(f"{key}.{name}", item) for name, item in value.items()}
    if not isinstance(value, str):
        return value
    for start, end in reversed(secrets_in_value(key.rpartition(".")[2], value)):
        value = value[:start] + REDACTED + value[end:]
    return value


def is_inside(folder: RunFolder, path: Path, max_bytes: int = MAX_FILE_BYTES) -> bool:
    """Return whether a file exists, is not too large, and is no link out of the folder."""
    try:
        real = path.resolve(strict=True)
        return real.is_file() and real.is_relative_to(folder.path.resolve()) and real.stat().st_size <= max_bytes
    except OSError:
        return False


def _mapping(folder: RunFolder, path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of the run; {} if that fails."""
    return read_object(path) if is_inside(folder, path) else {}


def _mistake(given: Mapping[str, Any]) -> Mistake:
    found = Mistake({}, name=str(given.get("name") or ""), text=str(given.get("text") or ""))
    for name, value in given.items():
        if name in ("name", "text", "image"):
            continue
        is_share = name in ("probability", "acc", "iou") and isinstance(value, float) and math.isfinite(value)
        found.words[str(name)] = f"{value:{'.1%' if is_share else '.6g'}}" if isinstance(value, float) else str(value)
    with contextlib.suppress(ValueError):  # it is not base64
        image = base64.b64decode(str(given.get("image") or ""), validate=True)
        found.image = image if image.startswith(PNG) else b""
    return found


def pictures(folder: RunFolder) -> list[Path]:
    """Return the pictures in the run folder, sorted by name. Subfolders are not searched."""
    found = []
    for path in sorted(folder.path.glob("*")):
        if path.suffix in (".png", ".svg") and is_inside(folder, path, MAX_PICTURE_BYTES):
            with path.open("rb") as file:
                if file.read(len(PNG)).startswith((PNG, SVG)):
                    found.append(path)
    return found
