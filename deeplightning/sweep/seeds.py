"""`deeplightning train CONFIG --seeds 5`: runs that differ only by the seed, under one parent run, and the mean,
standard deviation and 95 % interval of each metric over them.

A group is identified by the digest of its config without the seeds, and of the user's code. The same command continues
with the runs that have not finished, and a larger number adds the missing seeds.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import logging
import math
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from deeplightning.config.schema import Config
from deeplightning.config.secrets import without_secrets
from deeplightning.config.source import read
from deeplightning.config.tree import dump, plain
from deeplightning.faults import ConfigError, Fault
from deeplightning.launch import apply_environment
from deeplightning.process.identity import require_single_process
from deeplightning.process.terminal import in_columns, number, say
from deeplightning.reproduce.past import PastRun, by_stage
from deeplightning.runfolder import RunFolder, read_object, write_whole
from deeplightning.sweep import multirun
from deeplightning.sweep.frozen_code import code_of_grid, own_code
from deeplightning.sweep.multirun import FINISHED, Grid
from deeplightning.sweep.worker import Train
from deeplightning.tracking.entities import Point, clean
from deeplightning.tracking.parent import Parent, Stopped

log = logging.getLogger("deeplightning")

SUMMARY = "summary.csv"
"""The table of means and intervals in the group's folder."""

LARGEST_SEED = 2**32 - 1


def train_seeds(cfg: Config, path: Path, overrides: Sequence[str], train: Train, jobs: int = 1) -> Path:
    """Train a config with each of `train.seeds` seeds that has not finished, and print the summary of all.

    Args:
        cfg: the config that `path` and `overrides` resolve to.
        train: calls `deeplightning train` in this process; it runs in processes forked from this one.
        jobs: the number of runs at the same time.

    Returns:
        The folder of the group: `runs.csv` and `summary.csv`.

    Raises:
        ConfigError: there are not that many seeds.
        SetupError: another process works on this group, or the store cannot be used.
        RunError: runs failed.
        Stopped: a signal ended the command.
    """
    require_single_process("a group of seeds")
    assert cfg.train.seeds is not None
    tree = plain(read(path, [*overrides]).root, written=True)
    first = cfg.seed if tree.get("seed", cfg.seed) is not None else 0
    assert first is not None, "load_config draws one"
    last = first + cfg.train.seeds - 1
    if last > LARGEST_SEED:
        message = f"counts from seed={first} to {last}, but the largest seed is {LARGEST_SEED}"
        raise ConfigError(Fault(message, "train.seeds", found=str(cfg.train.seeds)))
    apply_environment(cfg)
    group = Seeds(cfg, path, overrides, range(first, last + 1), train, jobs)
    with contextlib.closing(group.seal):
        return group.run()


class Seeds(Grid):
    """Runs of one config with several seeds, started by this process."""

    VERB = "seeds"

    def __init__(
        self, cfg: Config, path: Path, overrides: Sequence[str], seeds: Sequence[int], train: Train, jobs: int
    ):
        tree = without_secrets(read(path, [*overrides, "train.seeds=null"]).root, cfg.secrets)
        tree.pop("seed", None)
        digest = hashlib.sha256(json.dumps([dump(tree), sorted(own_code().items())]).encode()).hexdigest()[:8]
        given = cfg.logger.params.get("run_name")
        stem = re.sub(r"[^\w-]+", "-", path.stem).strip("-_") or "run"
        parent = Parent(cfg, str(given) if given else f"{stem}-{digest}", "seeds", f"-{digest}" if given else "")
        self.tag = f"seeds-{digest}"
        grid = [[*overrides, "train.seeds=null", f"seed={seed}"] for seed in seeds]
        super().__init__(cfg, path, ["seed"], grid, train, jobs, code_of_grid(path, grid[0], parent), parent)

    def _open(self) -> None:
        """Start the parent run, or resume it; a group whose parent was deleted starts over. Raise SetupError if the
        store cannot be used."""
        file = self.home / "group.json"
        saved = read_object(file)
        run_id = saved.get("run")
        if run_id is not None and not self.parent.run_exists(run_id):
            log.warning("The parent run %s was deleted; its runs start again.", run_id)
            for point in self.points:
                point.file.unlink(missing_ok=True)
            run_id = None
        elif run_id is None and not saved and any(point.record for point in self.points):
            run_id = self.parent.find_runs(self.tag).get(None)  # killed before the id of the new run was saved
        opened = self.parent.open(run_id, self.tag)
        write_whole(file, json.dumps({"run": opened, "folder": str(self.parent.folder)}))

    def _tracking_overrides(self, point: multirun.Point) -> list[str]:
        return self.parent.overrides(f"{self.parent.name}-seed-{point.words[-1].partition('=')[2]}")

    def _summarize(self) -> None:
        """Print and write mean, standard deviation and interval of each metric, and log them to the parent run."""
        from scipy import stats

        records = [point.record for point in self.points]
        runs = [PastRun(RunFolder(Path(r["folder"])), None, None) for r in records if r.get("state") == FINISHED]
        found = {}
        for name in by_stage(name for run in runs for name in run.metrics):
            values = [run.metrics[name] for run in runs if name in run.metrics]
            if finite := [*filter(math.isfinite, values)]:
                found[name] = finite
        if not found:
            return
        head = ["metric", "mean", "95 % from", "to", "std", "runs"]
        shown, exact, points, now = [head], [head], [], time.time_ns() // 1_000_000
        for name, values in found.items():
            mean, spread = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan
            half = float(stats.t.ppf(0.975, len(values) - 1)) * spread / math.sqrt(len(values))
            figures = (mean, mean - half, mean + half, spread)
            size = spread if spread > 0 else None
            shown.append([name, *(number(figure, size) for figure in figures), str(len(values))])
            exact.append([name, *("" if math.isnan(figure) else repr(figure) for figure in figures), str(len(values))])
            for suffix, figure in zip(("", "_low", "_high", "_std"), figures, strict=True):
                if not math.isnan(figure):
                    points.append(Point(clean(f"{name}{suffix}"), figure, now, 0))
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(exact)
        write_whole(self.parent.folder / SUMMARY, out.getvalue())
        say(in_columns(shown, SUMMARY))
        self.parent.log(points, {"seeds": str(len(runs))})

    def _close(self, error: BaseException | None) -> None:
        if error is None:
            self.parent.close("FINISHED")
            return
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        with contextlib.suppress(Exception):  # the store may be the cause of the error
            self.parent.close("KILLED" if stopped else "FAILED", self.cfg.redact(str(error)))
