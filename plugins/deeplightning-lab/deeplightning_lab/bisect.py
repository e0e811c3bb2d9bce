"""Run `deeplightning bisect GOOD BAD`: find a minimal set of differences that makes BAD worse than GOOD, by real runs.

First both ends run again, each with several seeds; if the difference is noise, nothing is bisected. Then `ddmin`
chooses mixed runs (`cause`, `bisect_run`). Each is prepared as `reproduce` prepares a run, and trains in a child
process under one parent run (`trials`). A trial is identified by the digest of its config and code, so the same command
continues an interrupted bisection, and repeats a finished one without training again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from deeplightning.config.examine import check
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.faults import ConfigError, SetupError, UserError
from deeplightning.process.identity import require_single_process
from deeplightning.process.terminal import say_path
from deeplightning.reproduce.again import Say, address_of, check_data, quoted, to_execute
from deeplightning.reproduce.past import PastRun
from deeplightning.runfolder import RunFolder, make_private, read_object, write_whole
from deeplightning.tracking.code import describe_program
from deeplightning.tracking.datafiles import describe_again
from deeplightning.tracking.parent import Parent, Stopped
from deeplightning_lab.bisect_run import fixed, is_available, parts_of, switchable
from deeplightning_lab.cause import Bisection, listed
from deeplightning_lab.interpreters import interpreters
from deeplightning_lab.trials import Trials, run_metrics


def bisect(
    good: str,
    bad: str,
    overrides: Sequence[str] = (),
    *,
    metric: str | None = None,
    by: float | None = None,
    seeds: int = 3,
    max_runs: int | None = None,
    any_data: bool = False,
    trust: bool = False,
    environment: str | None = None,
    say: Say,
) -> Path:
    """Find the differences that make one run worse than another; print them and a table of all runs.

    Args:
        good: RUN, the better one.
        bad: RUN, the worse one.
        overrides: `key=value` for all runs, such as the current folder of the data.
        metric: a metric that both runs have; None: the best value of the monitored one.
        by: a run counts as bad if its metric is worse than GOOD's mean by at least this; None: half of the difference
            between the means of both ends.
        seeds: runs of each end, each with another seed; the first has the seed of the original run.
        max_runs: maximum number of runs to start; None: as many as needed.
        any_data: run even if data files have changed since.
        trust: execute the code of runs that this user did not make on this machine.
        environment: the interpreter of a second environment, with the packages of one of the runs.
        say: prints progress messages.

    Returns:
        The folder with the table, `bisect.csv`, and the result, `bisect.json`.

    Raises:
        CheckpointError: there is no such run, or it is foreign and not trusted.
        ConfigError: the runs do not share the metric, or no difference can be switched.
        SetupError: the data have changed, the store cannot be used, or another process runs this bisection.
        RunError: the difference is noise, or an end cannot be run again.
        Stopped: a signal ended it.
    """
    require_single_process("bisect")
    ends = to_execute(good, trust), to_execute(bad, trust)
    metric, recorded = _choose_metric(*ends, metric)
    pythons = interpreters(*ends, environment)
    parts = parts_of(ends[0], pythons[0]), parts_of(ends[1], pythons[1])
    differences = switchable(*parts, overrides)
    unswitchable = fixed(*ends, differences)
    if not differences:
        others = f"; these differences cannot be switched here: {listed(unswitchable)}" if unswitchable else ""
        raise ConfigError(f"{good} and {bad}: there is no difference to bisect in config, code or threads{others}")
    for run, part in zip(ends, parts, strict=True):
        check_data(run, _data_root(run, (part.tree.get("data") or {}).get("root"), overrides), any_data, say)

    tracked = [f"logger.params.tracking_uri={quoted(address_of(ends[0]))}"]
    report = check(ends[0].source, [*tracked, *overrides], beside=False)
    cfg = report.config or report.checked()
    parent = Parent(cfg, f"bisect-{_short_id(ends[0])}-{_short_id(ends[1])}", "bisections")
    home, store = parent.home, parent.home.parents[2]  # STORE/bisections/EXPERIMENT/NAME
    try:
        make_private(home / "trials", store)
        lock = RunFolder(home).lock()
    except OSError as error:
        raise SetupError(f"{home}: the folder of this bisection cannot be written: {error.strerror}") from error
    if lock is None:
        raise SetupError(f"another process works on this bisection, in {home}; wait for it, or end it")
    try:
        salt = _salt(ends, any_data)
        with _open_parent(parent, home) as search_id:
            trials = Trials(cfg, parent, search_id, home, ends[0].store, overrides, salt, max_runs, say)
            bisection = Bisection(parts, differences, unswitchable, trials, metric, by, seeds, recorded)
            with trials.forward_signals():
                bisection.run()
    finally:
        lock.release()
    say_path(parent.folder, "Artifact storage path: ")
    return parent.folder


def _data_root(run: PastRun, root: str | None, overrides: Sequence[str]) -> str | None:
    """Return `data.root` of a run with overrides, references resolved; `root`: the absolute one, if it has none."""
    local = [f"data.root={quoted(root)}"] if root and "${" not in root else []
    found: str | None = (plain(read(run.source, [*local, *overrides]).root).get("data") or {}).get("root")
    return found


def _choose_metric(good: PastRun, bad: PastRun, requested: str | None) -> tuple[str, tuple[float, float]]:
    """Return the metric to compare, and its values in both runs.

    Raises:
        ConfigError: one run lacks it, or its values are equal or not finite.
    """
    one, two = run_metrics(good), run_metrics(bad)
    both = [name for name in one if name in two]
    best = [name for name in both if name.startswith("best ")]
    name = requested or (best[0] if best else None)
    choice = f"both runs have {', '.join(both) or 'no metric'}"
    if name is None:
        raise ConfigError(f"the runs share no monitored metric; name one: --metric NAME; {choice}")
    if name not in both:
        missing = [str(run) for run, values in ((good, one), (bad, two)) if name not in values]
        raise ConfigError(f"--metric {name}: {' and '.join(missing)} has no such metric; {choice}")
    values = one[name], two[name]
    if not all(map(math.isfinite, values)):
        raise ConfigError(f"--metric {name}: {values[0]} → {values[1]} cannot be compared; {choice}")
    if values[0] == values[1]:
        raise ConfigError(f"--metric {name}: both runs have {values[0]:.6g}, so neither is worse; {choice}")
    return name, values


def _short_id(run: PastRun) -> str:
    return (run.run_id or hashlib.sha256(run.folder.config.read_bytes()).hexdigest())[:8]


def _salt(ends: Sequence[PastRun], any_data: bool) -> str:
    """Return everything else that affects the metrics of all runs and may change before the next command.

    This is the content of changed data files, and the version of Deep Lightning if it differs from that of the runs.
    """
    parts = []
    for run in ends:
        if any_data and run.data is not None:
            parts.append(json.dumps(describe_again(run.data, None)["files"], sort_keys=True))
        if run.code is not None and not is_available(run.code):
            parts.append(describe_program()["digest"])
    return "\0".join(parts)


@contextlib.contextmanager
def _open_parent(parent: Parent, home: Path) -> Iterator[str]:
    """Open the parent run, or reopen the one of an earlier command. On exit, close it as finished, failed or killed.

    Yields:
        The tag of the runs of this bisection.
    """
    file = home / "parent.json"
    record = read_object(file)
    if record.get("run") and not parent.run_exists(record["run"]):
        record = {}
    search_id = record.get("sign") or secrets.token_hex(16)
    write_whole(file, json.dumps({"sign": search_id, "run": record.get("run")}))
    run_id = record.get("run") or (parent.find_runs(search_id).get(None) if record else None)
    write_whole(file, json.dumps({"sign": search_id, "run": parent.open(run_id, search_id)}))
    try:
        yield search_id
    except BaseException as error:
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        with contextlib.suppress(UserError):  # the first error is the one to report
            parent.close("KILLED" if stopped else "FAILED", str(error))
        raise
    parent.close("FINISHED")
