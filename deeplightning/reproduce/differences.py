"""Compare two runs: config, code, data, environment, hardware and metrics; for a reproduced run, weights as well."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

from deeplightning.config.tree import flat
from deeplightning.process.terminal import LAYOUT
from deeplightning.reproduce.past import PastRun
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.datafiles import changes
from deeplightning.tracking.entities import is_test_metric
from deeplightning.tracking.metrics_file import first_differences, is_repeatable, last_values
from deeplightning.words import printable

if TYPE_CHECKING:
    from torch import Tensor

PATH_KEYS = ("data.root", "logger.params", "logger.params.tracking_uri")
"""Keys of folders, which are not compared: the data files are."""

PROGRAM = "deeplightning (its own files)"

GROUPS = ("config", "code", "data", "environment", "hardware", "metrics")


def differences(first: PastRun, second: PastRun, patch: bool = False) -> dict[str, list[tuple[str, object, object]]]:
    """Return the differences of two runs by group (`GROUPS`): name, value in the first, value in the second, of plain
    types; None for a missing value. Values that always differ, such as times, ids and folders, are ignored.

    Args:
        patch: for code files that differ, return the file name, a unified diff and None.
    """
    return {
        "config": [apart for apart in between(first.config, second.config) if apart[0] not in PATH_KEYS],
        "code": list(_code_between(first, second, patch)),
        "data": list(_data_between(first, second)),
        "environment": list(between(_environment(first), _environment(second))),
        "hardware": list(between(_hardware(first), _hardware(second))),
        "metrics": list(_metrics_between(first, second)),
    }


def as_text(found: Mapping[str, list[tuple[str, object, object]]]) -> str:
    """Format differences for people, by group; "" if there are none."""
    lines = []
    for group, items in found.items():
        lines += [group] * bool(items)
        for name, one, two in items:
            if isinstance(one, str) and one.startswith("--- "):
                lines += [f"  {printable(line, LAYOUT)}" for line in one.splitlines()]
            else:
                lines.append(printable(f"  {name}: {shown(one)} → {shown(two)}"))
    return "\n".join(lines)


def between(one: Mapping[str, object], two: Mapping[str, object]) -> Iterator[tuple[str, object, Any]]:
    """Yield each name whose values differ, with both values; None for a missing value."""
    for name in sorted({*one, *two}):
        first, second = one.get(name), two.get(name)
        if (name in one) != (name in two) or (first != second and repr(first) != repr(second)):  # NaN equals NaN
            yield name, first, second


def _code_between(first: PastRun, second: PastRun, patch: bool) -> Iterator[tuple[str, object, object]]:
    one, two = first.code, second.code
    if one is None or two is None:
        if one is not two:
            yield first.folder.code.name, one and "kept", two and "kept"
        return
    if one.program.get("version") == two.program.get("version"):
        mine, theirs = one.program.get("digest"), two.program.get("digest")
        if mine != theirs and None not in (mine, theirs):
            yield PROGRAM, str(mine)[:12], str(theirs)[:12]
    before, after = one.names(), two.names()
    for name in sorted({*before, *after}):
        text, other = before.get(name), after.get(name)
        if text == other:
            continue
        lines, others = ((t or b"").decode("utf-8", "replace").splitlines() for t in (text, other))
        diff = difflib.unified_diff(lines, others, f"first/{name}", f"second/{name}", lineterm="")
        if patch and (words := "\n".join(diff)):
            yield name, words, None
        else:  # also if only line ends differ
            yield name, size_of(text), size_of(other)


def size_of(text: bytes | None) -> str | None:
    """Return number of lines and digest of a file's content, or None if there is no file."""
    return None if text is None else f"{len(text.splitlines())} lines, {hashlib.sha256(text).hexdigest()[:8]}"


def _data_between(first: PastRun, second: PastRun) -> Iterator[tuple[str, object, object]]:
    one, two = first.data, second.data
    if one is None or two is None:
        if one is not two:
            yield first.folder.data.name, one and "kept", two and "kept"
        return
    for name in changes(one, two):
        yield name, _content(one["files"].get(name)), _content(two["files"].get(name))


def _content(found: list[object] | None) -> str | None:
    return None if found is None else f"{found[0]:,} bytes, {str(found[1])[:8]}"


def _environment(run: PastRun) -> dict[str, object]:
    environment = run.environment
    found = {"python": (environment.get("python") or {}).get("version")}
    found |= {name: environment.get(name) for name in ("os", "threads")}
    found |= run.code.packages if run.code is not None else {}
    found |= dict(environment.get("packages") or {}) | dict(environment.get("variables") or {})
    return {name: value for name, value in found.items() if value is not None}


def _hardware(run: PastRun) -> dict[str, object]:
    names = ("host", "cpu", "memory_gib", "gpus")
    return dict(flat({name: value for name in names if (value := run.environment.get(name))}))


def _metrics_between(first: PastRun, second: PastRun) -> Iterator[tuple[str, object, object]]:
    one, two = first.series, second.series
    known: set[str] = set()
    if one is not None and two is not None:
        known = {*one, *two}
        last, other = last_values(one), last_values(two)
        for apart in sorted(first_differences(one, two), key=lambda apart: apart.name):
            yield f"{apart.name} (from step {apart.step} on)", last.get(apart.name), other.get(apart.name)
    yield from _results_between(first, second, known)


def _results_between(first: PastRun, second: PastRun, known: Set[str]) -> Iterator[tuple[str, object, object]]:
    """Yield results that differ, except those with these names and those that no run repeats."""
    for name, one, two in between(first.results, second.results):
        if name not in known and is_repeatable(name):
            yield name, one, two


def shown(value: object) -> str:
    """Format a value for a message."""
    return "none" if value is None else str(value)


# ---- a reproduced run


def compare(original: PastRun, again: PastRun, say: Callable[[str], None]) -> list[str]:
    """Return the differences in metrics, results and weights, in this order; [] if there are none."""
    is_complete = original.status in (None, "FINISHED")
    if not is_complete:
        say(f"the run ended as {original.status}: what it logged until then is compared")
    found: list[str] = []
    one, two = original.series, again.series
    tested = again.folder.results("test").is_file()  # else `test RUN` may have tested the original later
    later = set() if tested else {n for n in {*(one or ()), *original.results} - {*(two or ())} if is_test_metric(n)}
    if one is None or two is None:
        say("there are no metric series to compare: neither a tracker nor metrics.jsonl has those of the original run")
    else:
        one = {name: points for name, points in one.items() if name not in later}
        two = two if is_complete else {name: two.get(name, [])[: len(one[name])] for name in one}
        found += [str(apart) for apart in first_differences(one, two)]
        if not found:
            say(f"metrics: the same {sum(map(len, one.values()))} points of {len(one)} metrics")
    if is_complete:
        results = _results_between(original, again, {*(one or ()), *later})
        found += [f"{name}: {shown(a)} → {shown(b)}" for name, a, b in results]
    found += _weight_differences(original.folder, again.folder, say, is_complete)
    return found


def _weight_differences(one: RunFolder, two: RunFolder, say: Callable[[str], None], is_complete: bool) -> list[str]:
    """Return the first difference between the last checkpoints, if any; a complete run must end at the same step."""
    if not one.last.exists():
        say(f"there are no weights to compare: no {one.last.name} in {one.path}")
        return []
    if not two.last.exists():
        return [f"the new run has no {two.last.name}"]
    from deeplightning.engine.checkpoint_reading import read_checkpoint

    first, second = read_checkpoint(one.last), read_checkpoint(two.last)
    if first.get("global_step") != second.get("global_step"):
        apart = f"{one.last.name}: step {first.get('global_step')} → {second.get('global_step')}"
        if not is_complete:
            say(f"the weights are not compared: {apart}")
        return [apart] * is_complete
    a, b = first["state_dict"], second["state_dict"]
    differ = [n for n in a | b if n not in a or n not in b or _bytes(a[n]) != _bytes(b[n]) or a[n].dtype != b[n].dtype]
    if not differ:
        say(f"weights: the same {len(a)} tensors")
        return []
    return [f"the tensor {differ[0]} ({len(differ)} of {len(a)} tensors differ)"]


def _bytes(tensor: Tensor) -> bytes:
    import torch

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
