"""Read a past run from its folder and its tracker."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from deeplightning.config.source import read
from deeplightning.config.tree import flat, plain
from deeplightning.config.trust import RunConfig, refuse_links, run_config
from deeplightning.runfolder import RunFolder, read_object
from deeplightning.tracking import resolve_run
from deeplightning.tracking.claims import find_run
from deeplightning.tracking.client import Client
from deeplightning.tracking.code import Code, read_code
from deeplightning.tracking.entities import Run
from deeplightning.tracking.metrics_file import Series, is_repeatable, last_values, read_series, series_of
from deeplightning.tracking.store import Store, locate
from deeplightning.words import stage_of

_ID = re.compile(r"[0-9a-f]{32}")
_NO_RESULT = re.compile(r"(lr|grad_norm|epoch|seed)($|[-_/].*)|.*_step|best step")


@dataclass
class PastRun:
    """A past run."""

    folder: RunFolder
    store: Store | None  # that tracks it; None if unknown, as for a copied folder
    run_id: str | None  # in that store
    trust: bool = False  # this and the next as in `deeplightning.config.trust.run_config`
    allow: Sequence[str] = ()

    def __str__(self) -> str:
        return self.run_id or str(self.folder.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Values of the config by dotted key, as they were written."""
        return dict(flat(plain(read(self.source).root, written=True)))

    @cached_property
    def source(self) -> RunConfig:
        """The config file and its text.

        Raises:
            CheckpointError: the config is missing, or the run is untrusted and its config is not plain.
        """
        return run_config(self.folder, self.allow, trust=self.trust)

    @cached_property
    def environment(self) -> dict[str, Any]:
        return read_object(self.folder.environment)

    @cached_property
    def code(self) -> Code | None:
        return read_code(self.folder.code) if self.folder.code.is_file() else None

    @cached_property
    def data(self) -> dict[str, Any] | None:
        found = read_object(self.folder.data)
        return found if isinstance(found.get("files"), dict) else None

    @cached_property
    def series(self) -> Series | None:
        """Metric series from the run folder, else from the store, for Lightning's logger; None if neither has them."""
        try:
            return read_series(self.folder.metrics)
        except ValueError:
            if self._tracked is None or self.store is None or self.run_id is None:
                return None
            return series_of(Client(self.store).history(self.run_id))

    @property
    def status(self) -> str | None:
        """FINISHED, FAILED, KILLED or RUNNING, from the store."""
        return run.status if (run := self._tracked) is not None else None

    @property
    def name(self) -> str | None:
        """Name in the store."""
        return run.name if (run := self._tracked) is not None else None

    @property
    def _tracked(self) -> Run | None:
        return find_run(self.store, self.run_id) if self.store is not None and self.run_id is not None else None

    @cached_property
    def results(self) -> dict[str, Any]:
        """The best value, and the metrics of the evaluations."""
        found: dict[str, object] = {}
        best = read_object(self.folder.best_score)
        if {"metric", "value", "step"} <= best.keys():
            found |= {f"best {best['metric']}": best["value"], "best step": best["step"]}
        for stage in ("validate", "test"):
            found |= read_object(self.folder.results(stage))
        return found

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Last value of each metric, and the best of the monitored one, without learning rates, times and loads."""
        found = last_values(self.series or {}) | self.results
        found = {name: value for name, value in found.items() if f"{name}_epoch" not in found}  # of a single batch
        kept = ((n, value) for n, value in found.items() if is_repeatable(n) and not _NO_RESULT.fullmatch(n))
        return {name: float(value) for name, value in kept if isinstance(value, int | float)}

    @property
    def directory(self) -> Path | None:
        """Working directory of the run, if it still exists."""
        folder_name = self.environment.get("directory")
        return Path(folder_name) if folder_name and Path(folder_name).is_dir() else None


def by_stage(metrics: Iterable[str]) -> list[str]:
    """Return the names of metrics without duplicates, those of the test set first."""
    names = set(metrics)
    order = ("test", "val", "best", "train", "")
    place = {name: order.index("best" if name.startswith("best ") else stage_of(name)[0]) for name in names}
    return sorted(names, key=lambda name: (place[name], "loss" in name, name))


def past_run(run: str, remote: bool = True, trust: bool = False, allow: Sequence[str] = ()) -> PastRun:
    """Find RUN, as given on the command line, and the store that tracks it.

    Args:
        remote: for a run folder, query remote stores too.
        trust, allow: as in `deeplightning.config.trust.run_config`.

    Raises:
        CheckpointError: there is no such run; or it is untrusted, and its config is not plain or it has a link outside.
        SetupError: the store cannot be queried.
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
    if folder.path.name == "artifacts" and _ID.fullmatch(run_id):
        for store in _stores_around(folder):
            if (remote or not store.is_remote) and find_run(store, run_id) is not None:
                return PastRun(folder, store, run_id)
    return PastRun(folder, None, None)


def _stores_around(folder: RunFolder) -> Iterator[Store]:
    """Yield the stores that may track the run in a folder: the one around it, and the default one here."""
    artifact_root = folder.path.parents[2]
    if (artifact_root / "mlflow.db").is_file() or any(artifact_root.glob("*/meta.yaml")):
        yield locate(artifact_root)
    store = locate(None)
    if store.is_remote or (store.database is not None and store.database.is_file()):
        yield store
