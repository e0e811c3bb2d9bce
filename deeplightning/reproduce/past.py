"""A run as it lies there: what its folder and its tracker know of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from deeplightning.checks.trust import RunConfig, refuse_links, run_config
from deeplightning.config.source import read, text_of
from deeplightning.config.tree import flat, parse, plain
from deeplightning.faults import ConfigError
from deeplightning.runfolder import RunFolder
from deeplightning.tracking import resolve_run
from deeplightning.tracking.code import Code, read_code
from deeplightning.tracking.open import open_tracker
from deeplightning.tracking.series import Series, from_file, is_repeatable, read_series
from deeplightning.tracking.store import Store, locate
from deeplightning.tracking.tracker import Run

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass
class PastRun:
    """A run as it lies there.

    Attributes:
        folder: with its files.
        store: where it is tracked; None: that is not known, as with a copied folder.
        run_id: in that store.
        trust, allow: as of `deeplightning.checks.trust.run_config`.
    """

    folder: RunFolder
    store: Store | None
    run_id: str | None
    trust: bool = False
    allow: Sequence[str] = ()

    def __str__(self) -> str:
        return self.run_id or str(self.folder.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The keys of the config with their values as they were written."""
        return dict(flat(plain(read(self.source).root)))

    @cached_property
    def source(self) -> RunConfig:
        """The text of the config.

        Raises:
            CheckpointError: the config is missing, or the run is foreign and its config is not plain.
        """
        return run_config(self.folder, self.allow, trust=self.trust)

    @cached_property
    def asked(self) -> dict[str, Any]:
        """The keys that were asked to be otherwise than the config has them, with what was asked."""
        try:
            file = self.folder.asked
            asked = dict(flat(plain(parse(text_of(file), file.name, [])))) if file.is_file() else {}
        except ConfigError:
            return {}
        return {key: value for key, value in asked.items() if self.config.get(key) != value}

    @cached_property
    def environment(self) -> dict[str, Any]:
        return _json(self.folder.environment)

    @cached_property
    def code(self) -> Code | None:
        return read_code(self.folder.code) if self.folder.code.is_file() else None

    @cached_property
    def data(self) -> dict[str, Any] | None:
        found = _json(self.folder.data)
        return found if isinstance(found.get("files"), dict) else None

    @cached_property
    def series(self) -> Series | None:
        """From the store, else from the file that the run has left; None: neither is there."""
        if self.store is not None and self.run_id is not None:
            found = read_series(self.store, self.run_id)
            if found is not None:
                return found
        try:
            return {n: s for n, s in from_file(self.folder.series).items() if is_repeatable(n)}
        except ValueError:
            return None

    @property
    def status(self) -> str | None:
        """FINISHED, FAILED, KILLED or RUNNING, as the store has it."""
        return self._tracked.status if self._tracked is not None else None

    @property
    def name(self) -> str | None:
        """The name that the store has."""
        return self._tracked.tags.get("mlflow.runName") if self._tracked is not None else None

    @cached_property
    def _tracked(self) -> Run | None:
        if self.store is None or self.run_id is None:
            return None
        tracker = open_tracker(self.store, self.run_id)
        run = tracker.run(self.run_id)
        tracker.close()
        return run

    @cached_property
    def results(self) -> dict[str, Any]:
        """What came out: the best value and the metrics of each evaluation that was made."""
        found: dict[str, object] = {}
        best = _json(self.folder.best_score)
        if {"metric", "value", "step"} <= best.keys():
            found |= {f"best {best['metric']}": best["value"], "best step": best["step"]}
        for stage in ("validate", "test"):
            found |= _json(self.folder.results(stage))
        return found

    @property
    def directory(self) -> Path | None:
        """The working directory that it ran in, if it is still there."""
        folder_name = self.environment.get("directory")
        return Path(folder_name) if folder_name and Path(folder_name).is_dir() else None


def past_run(run: str, remote: bool = True, trust: bool = False, allow: Sequence[str] = ()) -> PastRun:
    """Find RUN, as a person writes it, and the store that it is tracked in.

    Args:
        remote: of a run folder, ask stores on other machines too.
        trust, allow: as of `deeplightning.checks.trust.run_config`.

    Raises:
        CheckpointError: there is no such run; or it is foreign, and its config is not plain or a link leads out of it.
        SetupError: the store cannot be asked.
    """
    folder = RunFolder(resolve_run(run, None))
    if folder.config.is_file() and not trust:
        run_config(folder, allow)
        refuse_links(folder)
    return replace(_with_store(run, folder, remote), trust=trust, allow=allow)


def _with_store(run: str, folder: RunFolder, remote: bool) -> PastRun:
    if not (Path(run).expanduser().is_dir() or run.startswith("file:")):
        run_id = run.removeprefix("runs:/").strip("/")
        inside = folder.path.parent.name if folder.path.name == "artifacts" else folder.path.name
        return PastRun(folder, locate(None), run_id if _ID.fullmatch(run_id) else inside)
    run_id = folder.path.parent.name
    if folder.path.name != "artifacts" or not _ID.fullmatch(run_id):
        return PastRun(folder, None, None)
    for store in _stores_around(folder):
        if store.is_remote and not remote:
            continue
        tracker = open_tracker(store, run_id)
        found = tracker.run(run_id)
        tracker.close()
        if found is not None:
            return PastRun(folder, store, run_id)
    return PastRun(folder, None, None)


def _stores_around(folder: RunFolder) -> Iterator[Store]:
    """The stores on this machine that the run in a folder may be tracked in."""
    artifact_root = folder.path.parents[2]
    if (artifact_root / "mlflow.db").is_file() or any(artifact_root.glob("*/meta.yaml")):
        yield locate(artifact_root)
    # The address in somebody else's config could be anywhere.
    recorded = _tracking_uri(folder)
    for uri in (recorded, os.environ.get("MLFLOW_TRACKING_URI"), "mlruns"):
        if uri and "${" not in str(uri):
            store = locate(uri)
            if store.is_remote or (store.database is not None and store.database.is_file()):
                yield store


def _tracking_uri(folder: RunFolder) -> Any:
    """Return the store that an own run names; None: it names none, or the run is foreign."""
    try:
        config = run_config(folder)
        return dict(flat(plain(read(config).root))).get("logger.params.tracking_uri") if config.is_trusted else None
    except Exception:  # no config, or a damaged one: that is reported where it is needed
        return None


def _json(path: Path) -> dict[str, object]:
    """A file of the run; {} where there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
