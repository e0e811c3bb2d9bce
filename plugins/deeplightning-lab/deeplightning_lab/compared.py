"""Find the runs of each side of `deeplightning compare A B`, and format the comparison."""

import math
import os
from pathlib import Path

import click

from deeplightning.cli.group import newest_run
from deeplightning.cli.listing import listing
from deeplightning.faults import CheckpointError, count, nearest
from deeplightning.process.terminal import in_columns, number
from deeplightning.reproduce.past import PastRun, past_run
from deeplightning.words import printable, stage_of
from deeplightning_lab.groups import Group, group_of, runs_in
from deeplightning_lab.significance import Comparison, Row, samples_sentence

FILTERS = ("name", "experiment", "status", "metric")
"""Names of the filters that select runs, as the options of `runs`."""


def resolve_side(word: str) -> Group:
    """Return the runs of one side: a RUN, the folder or run of a group, several of these separated by commas, or
    filters.

    Raises:
        CheckpointError: there is no such run, or it has no metrics.
        SetupError: the store cannot be read.
        ValueError: a filter is invalid.
    """
    is_path = os.path.exists(os.path.expanduser(word))  # noqa: PTH110, PTH111  (Path's fails for a long name)
    if not is_path and (filters := _parse_filters(word)):
        return _filtered_group(word, filters)
    names = [word] if is_path else [part.strip() for part in word.split(",")]
    if "" in names:
        raise ValueError(f"{word!r}: there is no run between two commas, or at an end")
    try:
        parts = [_runs_of(name) for name in names]
    except CheckpointError as error:
        if is_path or "here is no " not in str(error) or not all("=" in name for name in names):
            raise
        raise CheckpointError(f"{error} Filters are {', '.join(f'{name}=' for name in FILTERS)}") from error
    runs = [run for found, _, _ in parts for run in found]
    if not runs:
        raise CheckpointError(f"{word}: none of its runs has finished; the command that started them continues")
    shown = parts[0][2] if len(parts) == 1 else word
    return group_of(shown, runs, [note for _, notes, _ in parts for note in notes])


def _runs_of(name: str) -> tuple[list[PastRun], list[str], str]:
    """Return a run, or the runs of a group; notes on omitted runs; and the name to show."""
    run = past_run(newest_run(click.get_current_context(), click.Argument(["run"]), name), remote=False)
    title = run.name or (Path(name).name if Path(name).expanduser().exists() else name)
    inside = runs_in(run.folder.path)
    return ([run], [], title) if inside is None else (*inside, title)


def _parse_filters(word: str) -> dict[str, str]:
    """Parse filters such as `name=wide*,experiment=Digits`; return {} if the word has none."""
    parts = [part.partition("=") for part in word.split(",")]
    is_filter = any(nearest(name.strip(), FILTERS) for name, _, _ in parts)  # else names of runs, such as `seed=0`
    if not is_filter or not all(equals for _, equals, _ in parts):
        return {}
    for name, _, value in parts:
        if name.strip() not in FILTERS or not value.strip():
            known = ", ".join(f"{filter_}=" for filter_ in FILTERS)
            raise ValueError(f"{word!r}: filters are {known} each with a value.{nearest(name.strip(), FILTERS)}")
    return {name.strip(): value.strip() for name, _, value in parts}


def _filtered_group(word: str, filters: dict[str, str]) -> Group:
    """Return the runs of the store that match filters, as in `deeplightning runs`; by default only finished ones."""
    statuses = [filters.get("status", "finished").upper()]
    rows = listing(None, statuses, filters.get("metric"), filters.get("name"), filters.get("experiment"))
    runs = [past_run(f"runs:/{row['id']}") for row in rows]
    runs = [run for run in runs if run.folder.config.is_file()]  # the runs of groups and searches are listed too
    if not runs:
        raise CheckpointError(f"{word}: there is no such run. `deeplightning runs` lists the existing ones")
    return group_of(word, runs)


def as_text(found: Comparison) -> str:
    """Format a comparison for a terminal: the two sides, the table, the two sentences and the notes."""
    rows = [row for row in found.rows if row.metric == found.judged or stage_of(row.metric)[0] != "train"]
    table = [["metric", "A", "B", "B - A", "95 % from", "to", "g", "evidence"], *(_cells(row) for row in rows)]
    lines = [f"A  {found.a}", f"B  {found.b}", "", "", *found.sentences]
    if found.samples is not None and not any("test samples" in sentence for sentence in found.sentences):
        lines.append(samples_sentence(found.samples))
    lines += [f"note: {note}" for note in found.notes]
    lines = [printable(line) for line in lines]
    return "\n".join([*lines[:3], in_columns(table, "--format json"), *lines[3:]])


def _cells(row: Row) -> list[str]:
    size = max(abs(row.low), abs(row.high)) if math.isfinite(row.low) else abs(row.difference) or None
    labels = {"same": "the same", "open": "not enough", "unknown": "none"}
    evidence = labels.get(row.state) or f"enough: B {row.state}"
    if row.more is not None:
        evidence += f", {count(row.more, 'more seed')}"
    interval = [number(row.low, size), number(row.high, size)]
    means = [_mean(row.a, row.a_low, row.a_high, size), _mean(row.b, row.b_low, row.b_high, size)]
    gap = f"{'+' if row.difference > 0 else ''}{number(row.difference, size)}"
    return [row.metric, *means, gap, *interval, "-" if row.g is None else f"{row.g:.2f}", evidence]


def _mean(mean: float, low: float, high: float, size: float | None) -> str:
    """Format a mean, with the half width of its interval if that is known."""
    if not math.isfinite(low):
        return number(mean, size)
    half = (high - low) / 2
    return f"{number(mean, size or half)} ± {number(half, size or half)}"
