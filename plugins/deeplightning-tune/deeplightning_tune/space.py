"""Define and check the space of a search: the values that each key may have.

A value is valid if the whole config is valid with it: both ends of each range, and each choice, go through the check of
a config before the first trial. Optuna is not imported here.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from deeplightning.config.report import Report
from deeplightning.config.tree import line
from deeplightning.faults import Fault, nearest

KINDS = ("uniform", "log_uniform", "int", "log_int", "choice")
STEPPED = ("uniform", "int")

# Names in other tools → our names.
_ALIASES = {
    "loguniform": "log_uniform",
    "quniform": "uniform with a step",
    "float": "uniform",
    "randint": "int",
    "categorical": "choice",
    "values": "choice",
    "grid_search": "choice",
}
_NOT_SEARCHABLE = {
    "tune": "it is the search itself",
    "logger": "where trials are tracked does not affect training",
    "stages": "every trial trains",
    "serve": "a trial is not served",
    "train.resume_ckpt": "each trial starts from scratch",
    "_base_": "search over the keys themselves",
}
MAX_GRID = 1_000_000
MAX_CHECKED = 1000
"""Maximum number of dimensions of a space, and of choices of one: each is checked with the whole config."""


class SpaceError(ValueError):
    """Raised for an invalid distribution."""


@dataclass(frozen=True, eq=False)  # by identity: choices may be lists, which have no hash
class Dimension:
    """One key of the config and the values that trials may give it.

    Attributes:
        key: dotted.
        kind: one of KINDS.
        low, high: ends of a range, both included.
        step: distance of neighbouring values; None: any value between the ends.
        choices: plain values of any kind.
    """

    key: str
    kind: str
    low: float = 0
    high: float = 0
    step: float | None = None
    choices: tuple[object, ...] = ()

    @property
    def is_log(self) -> bool:
        return self.kind.startswith("log_")

    @property
    def is_whole(self) -> bool:
        return self.kind in ("int", "log_int")

    def number_of_values(self) -> int | None:
        """Return the number of different values, or None if it is infinite."""
        if self.kind == "choice":
            return len(self.choices)
        step = self.step or (1 if self.is_whole else None)
        return None if step is None else 1 + math.floor((self.high - self.low) / step + 1e-9)

    def values(self) -> list[object]:
        """Return all values of a dimension with a finite number of them."""
        if self.kind == "choice":
            return list(self.choices)
        step, count = self.step or 1, self.number_of_values()
        assert count is not None
        if self.is_whole:
            return [int(self.low + number * step) for number in range(count)]
        return [round(self.low + number * step, 12) for number in range(count)]

    def samples(self) -> list[object]:
        """Return the values to check: both ends of a range, or every choice."""
        ends = self.choices if self.kind == "choice" else dict.fromkeys((self.low, self.high))
        return list(ends)

    def override(self, value: object) -> str:
        """Return the override that sets the key to a value."""
        return f"{self.key}={line(value)}"


def size(space: Sequence[Dimension]) -> int | None:
    """Return the number of different points of a space, or None if it is infinite."""
    product = 1
    for dimension in space:
        count = dimension.number_of_values()
        if count is None:
            return None
        product *= count
    return product


def dimensions(space: Mapping[str, object]) -> Iterator[tuple[str, Dimension | SpaceError]]:
    """Yield each key of a space with its dimension, or with the error in it. Keys may be nested or dotted."""
    for name, given in space.items():
        if isinstance(given, Mapping) and given and all(isinstance(item, Mapping) for item in given.values()):
            for inner, found in dimensions(given):
                yield (
                    f"{name}.{inner}",
                    replace(found, key=f"{name}.{found.key}") if isinstance(found, Dimension) else found,
                )
            continue
        try:
            yield name, _dimension(name, given)
        except SpaceError as error:
            yield name, error


def space_of(space: Mapping[str, object]) -> list[Dimension]:
    """Return the dimensions of a checked space."""
    return [found for _, found in dimensions(space) if isinstance(found, Dimension)]


def faults(space: Mapping[str, object], needs_grid: bool) -> Iterator[tuple[str, str]]:
    """Yield the errors of a space by itself: (key of the space, message).

    Args:
        needs_grid: every dimension must have a finite number of values.
    """
    if not space:
        yield "", "there is nothing to search over; for example {model.optimizer.params.lr: {log_uniform: [1e-4, 0.1]}}"
    if len(space) > MAX_CHECKED:
        yield "", f"{len(space)} keys to search over are more than {MAX_CHECKED}"
        return
    found = list(dimensions(space))
    names = {name for name, _ in found}
    for name, dimension in found:
        excluded = next((key for key in _NOT_SEARCHABLE if f"{name}.".startswith(f"{key}.")), None)
        above = next((other for at, sign in enumerate(name) if sign == "." and (other := name[:at]) in names), None)
        if excluded is not None:
            yield name, f"`{excluded}` cannot be searched over: {_NOT_SEARCHABLE[excluded]}"
        elif above is not None:
            yield name, f"`{above}`, which is also searched over, sets this whole section; keep one of them"
        elif isinstance(dimension, SpaceError):
            yield name, str(dimension)
        elif needs_grid and dimension.number_of_values() is None:
            yield name, "a grid needs a finite number of values: add a `step`, or use {choice: [0.01, 0.1]}"
    dims = [what for _, what in found if isinstance(what, Dimension)]
    if needs_grid and len(dims) == len(found) and (size(dims) or 0) > MAX_GRID:
        yield "", f"this grid has {size(dims)} points; optuna.samplers.TPESampler draws some of them"


def _dimension(key: str, given: object) -> Dimension:
    known = f"one of {', '.join(KINDS)}"
    if not isinstance(given, Mapping):
        words = f"{{choice: {line(given)}}}" if isinstance(given, list) else f"{{choice: [{line(given)}]}}"
        raise SpaceError(f"must be a mapping of {known} to its values, not {line(given):.60}; perhaps {words:.60}")
    kinds = [word for word in given if word in KINDS]
    for word in given:
        if word not in KINDS and word != "step":
            hint = f" Did you mean {_ALIASES[word]}?" if word in _ALIASES else nearest(word, [*KINDS, "step"])
            raise SpaceError(f"there is no distribution `{word}`.{hint} Known here: {', '.join(KINDS)}, and step")
    if len(kinds) != 1:
        raise SpaceError(f"must be {known}, not {' and '.join(kinds) or 'none'}; for example {{uniform: [0, 0.5]}}")
    kind, step = kinds[0], given.get("step")
    if "step" in given and kind not in STEPPED:
        raise SpaceError(f"`step` goes with {' and '.join(STEPPED)}, not with {kind}")
    if kind == "choice":
        return Dimension(key, kind, choices=_choices(given[kind]))
    return _range(key, kind, given[kind], step)


def _choices(given: object) -> tuple[object, ...]:
    if not isinstance(given, list) or not given:
        raise SpaceError(f"choice must be a list of values, such as [16, 32], not {line(given):.60}")
    if len(given) > MAX_CHECKED:
        raise SpaceError(f"{len(given)} choices are more than {MAX_CHECKED}; {{int: [1, 100000]}} is a range")
    written = set[str]()
    for text in map(line, given):
        if text in written:
            raise SpaceError(f"the choice {text:.60} occurs twice; remove one")
        written.add(text)
    return tuple(given)


def _range(key: str, kind: str, given: object, step: float | None) -> Dimension:
    whole = kind in ("int", "log_int")
    allowed = f"{kind} must be its two ends, {'whole ' * whole}numbers, such as {'[1, 9]' if whole else '[0.1, 0.5]'}"
    if not isinstance(given, list) or len(given) != 2 or not all(_is_number(end, whole) for end in given):
        raise SpaceError(f"{allowed}, not {line(given):.60}")
    low, high = (given[0], given[1]) if whole else (float(given[0]), float(given[1]))
    if low > high:
        raise SpaceError(f"the ends are in the wrong order: {line([low, high])}; write {line([high, low])}")
    if kind.startswith("log_") and low <= 0:
        raise SpaceError(f"{kind} needs ends above 0, not {line(low)}; to include 0, use {kind.removeprefix('log_')}")
    if step is not None:
        if not _is_number(step, whole) or step <= 0:
            raise SpaceError(f"step must be a {'whole ' * whole}number above 0, not {line(step):.60}")
        high = low + math.floor((high - low) / step + 1e-9) * step
        high = high if whole else round(high, 12)
    return Dimension(key, kind, low, high, step)


def _is_number(value: object, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return math.isfinite(value) and abs(value) < 2**53  # larger floats are not exact integers


def value_faults(space: Sequence[Dimension], examine: Callable[[list[str]], Report], before: Report) -> Iterator[Fault]:
    """Yield the faults that the check of the whole config finds with the values of a space.

    Each check combines values of all dimensions, so there are as many checks as the longest dimension has values.

    Args:
        examine: checks the config with additional overrides.
        before: the check of the config without them; its faults are skipped.
    """
    seen: set[tuple[str, str]] = set()
    columns = [dimension.samples() for dimension in space]
    known = {(fault.key, fault.message) for fault in before.faults}
    for row in range(max(map(len, columns), default=0)):
        point = {d: values[row % len(values)] for d, values in zip(space, columns, strict=True)}
        report = examine([d.override(value) for d, value in point.items()])
        for fault in report.faults:
            if (fault.key, fault.message) in known:
                continue
            about = next((d for d in space if _concerns(fault, d, point[d])), None)
            if about is None:
                words, key = ", ".join(f"{d.key}={line(value):.60}" for d, value in point.items()), "tune.space"
            else:
                words, key = line(point[about]), f"tune.space.{about.key}"
            if about is not None and about.kind != "choice" and any(where == key for where, _ in seen):
                continue  # the other end has the same fault
            if (key, fault.message) in seen:
                continue
            seen.add((key, fault.message))
            below = (fault.key or "").removeprefix(about.key if about else "").strip(".")
            if about is not None and "uniform" in about.kind and "a whole number" in fault.message:
                message = f"{fault.message}; use {about.kind.replace('uniform', 'int')}"
                fault = replace(fault, message=message)
            inside = f"{below}: " if below and about is not None and fault.key != about.key else ""
            message = f"{words:.60}: {inside}{fault.message}"
            yield replace(fault, key=key, message=message, place=None)


def _concerns(fault: Fault, dimension: Dimension, value: object) -> bool:
    key = fault.key or ""
    return (
        f"{key}.".startswith(f"{dimension.key}.")
        or (key != "" and f"{dimension.key}.".startswith(f"{key}."))
        or fault.place == f"override {dimension.override(value)}"
    )
