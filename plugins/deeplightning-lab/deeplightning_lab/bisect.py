"""Run `deeplightning bisect GOOD BAD`: find by real runs the smallest set of differences that makes BAD worse than
GOOD.

Both ends run again first, each with several seeds: if the difference is noise, nothing is bisected. Then `ddmin`
chooses mixed runs (`cause`, `bisect_run`). Each is prepared as `reproduce` prepares a run, and trains in a child
process under one parent run (`trials`). A trial is identified by the digest of its config and code, so the same command
continues an interrupted bisection, and repeats a finished one without running anything again.
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
from deeplightning.faults import ConfigError, SetupError, UserError
from deeplightning.process.identity import refuse_several
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
from deeplightning_lab.trials import Trials, measured


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
        overrides: `key=value` that all runs get, such as the present folder of the data.
        metric: a metric that both runs have; None: the best value of the monitored one.
        by: a run counts as bad if its metric is worse than GOOD's mean by at least this; None: half of the difference
            between the means of both ends.
        seeds: runs of each end, each with another seed; the first has the run's own.
        max_runs: most runs to start; None: as many as needed.
        any_data: run also if data files have changed since.
        trust: execute the code of runs that this user did not make on this machine.
        environment: the interpreter of a second environment, with the packages of one of the runs.
        say: prints progress messages.

    Returns:
        The folder with the table, `bisect.csv`, and the result, `bisect.json`.

    Raises:
        CheckpointError: there is no such run, or it is foreign and not trusted.
        ConfigError: there is no such metric in both, or nothing that can be switched.
        SetupError: the data have changed, the store cannot be used, or another process runs this bisection.
        RunError: the difference is noise, or an end cannot be run again.
        Stopped: a signal asked for the end.
    """
    refuse_several("bisect")
    ends = to_execute(good, trust), to_execute(bad, trust)
    metric, recorded = _metric(*ends, metric)
    pythons = interpreters(*ends, environment)
    parts = parts_of(ends[0], pythons[0]), parts_of(ends[1], pythons[1])
    differences = switchable(*parts, overrides)
    left = fixed(*ends, differences)
    if not differences:
        others = f"; what differs cannot be switched here: {listed(left)}" if left else ""
        raise ConfigError(f"{good} and {bad}: there is no difference to bisect in config, code or threads{others}")
    given = [text.removeprefix("data.root=") for text in overrides if text.startswith("data.root=")]
    for run, part in zip(ends, parts, strict=True):
        check_data(run, given[-1] if given else (part.tree.get("data") or {}).get("root"), any_data, say)

    tracked = [f"logger.params.tracking_uri={quoted(address_of(ends[0]))}"]
    report = check(ends[0].source, [*tracked, *overrides], beside=False)
    cfg = report.config or report.checked()
    parent = Parent(cfg, f"bisect-{_short(ends[0])}-{_short(ends[1])}", "bisections")
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
        with _opened(parent, home) as sign:
            trials = Trials(cfg, parent, sign, home, ends[0].store, overrides, salt, max_runs, say)
            found = Bisection(parts, differences, left, trials, metric, by, seeds, recorded)
            with trials.passing_signals_on():
                found.run()
    finally:
        lock.release()
    say_path(parent.folder, "Artifact storage path: ")
    return parent.folder


def _metric(good: PastRun, bad: PastRun, asked: str | None) -> tuple[str, tuple[float, float]]:
    """Return the metric to compare, and its values in both runs.

    Raises:
        ConfigError: one run lacks it, or its values are equal or not numbers.
    """
    one, two = measured(good), measured(bad)
    both = [name for name in one if name in two]
    best = [name for name in both if name.startswith("best ")]
    name = asked or (best[0] if best else None)
    choice = f"both runs have {', '.join(both) or 'no metric'}"
    if name is None:
        raise ConfigError(f"neither run monitors a metric that the other has too; name one: --metric NAME; {choice}")
    if name not in both:
        missing = [str(run) for run, values in ((good, one), (bad, two)) if name not in values]
        raise ConfigError(f"--metric {name}: {' and '.join(missing)} has no such metric; {choice}")
    values = one[name], two[name]
    if not all(map(math.isfinite, values)):
        raise ConfigError(f"--metric {name}: {values[0]} → {values[1]} cannot be compared; {choice}")
    if values[0] == values[1]:
        raise ConfigError(f"--metric {name}: both runs have {values[0]:.6g}, so neither is worse; {choice}")
    return name, values


def _short(run: PastRun) -> str:
    return (run.run_id or hashlib.sha256(run.folder.config.read_bytes()).hexdigest())[:8]


def _salt(ends: Sequence[PastRun], any_data: bool) -> str:
    """Return everything else that affects the metrics of all runs and may change before the next command.

    That is the content of changed data files, and the version of Deep Lightning if it is not that of the runs.
    """
    words = []
    for run in ends:
        if any_data and run.data is not None:
            words.append(json.dumps(describe_again(run.data, None)["files"], sort_keys=True))
        if run.code is not None and not is_available(run.code):
            words.append(describe_program()["digest"])
    return "\0".join(words)


@contextlib.contextmanager
def _opened(parent: Parent, home: Path) -> Iterator[str]:
    """Open the parent run, or reopen that of an earlier command, and close it with the status of the work in the
    context.

    Yields:
        The tag of the runs of this bisection.
    """
    notes = home / "parent.json"
    known = read_object(notes)
    if known.get("run") and not parent.is_there(known["run"]):
        known = {}
    sign = known.get("sign") or secrets.token_hex(16)
    write_whole(notes, json.dumps({"sign": sign, "run": known.get("run")}))
    run_id = known.get("run") or (parent.known(sign).get(None) if known else None)
    write_whole(notes, json.dumps({"sign": sign, "run": parent.open(run_id, sign)}))
    try:
        yield sign
    except BaseException as error:
        stopped = isinstance(error, Stopped | KeyboardInterrupt)
        with contextlib.suppress(UserError):  # the first error is the one to report
            parent.close("KILLED" if stopped else "FAILED", str(error))
        raise
    parent.close("FINISHED")
