"""Expand overrides with several values, `lr=0.1,0.01` and `seed=range(3)`, into a grid: one list per run."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from deeplightning.config.source import is_file
from deeplightning.config.tree import line, scalar
from deeplightning.faults import ConfigError, Fault

MAX_POINTS = 1000

_RANGE = re.compile(r"range\((.*)\)", re.DOTALL)
_OPEN, _CLOSE = "([{", ")]}"


def points(overrides: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the keys that have several values, and the overrides of each point, the last key varying first.

    `a,b,c` are the values a, b and c; `range(STOP)`, `range(START,STOP)` and `range(START,STOP,STEP)` numbers without
    STOP. A comma inside quotes or brackets is part of a value.

    Raises:
        ConfigError: with every override that cannot be read, or there are more than `MAX_POINTS` points.
    """
    keys: list[str] = []
    choices: list[list[str]] = []
    faults: list[Fault] = []
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or is_file(word) or key.startswith(("~", "+")):
            choices.append([word])
            continue
        try:
            values = values_of(text)
        except ValueError as error:
            faults.append(Fault(str(error), key, f"override {word}"))
            continue
        if len(values) > 1:
            keys.append(key)
        choices.append([f"{key}={value}" for value in values])
    if faults:
        raise ConfigError(faults)
    if (number := math.prod(map(len, choices))) > MAX_POINTS:
        message = f"this grid has {number} points, more than {MAX_POINTS}; `deeplightning tune` draws some of a space"
        raise ConfigError(Fault(message))
    return keys, [[*point] for point in itertools.product(*choices)]


def values_of(text: str) -> list[str]:
    """Return the values that an override's text lists; the text itself if it is no list.

    Raises:
        ValueError: says what cannot be read.
    """
    called = _RANGE.fullmatch(text.strip())
    parts = _parts(called[1] if called else text)
    if "" in parts and (called or len(parts) > 1):
        raise ValueError(f"there is no value between two commas, or at an end: {text:.60}")
    if called is None:
        return parts if len(parts) > 1 else [text]
    numbers = [scalar(part) for part in parts]
    if not 1 <= len(numbers) <= 3 or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        raise ValueError(f"range takes one to three numbers, range(STOP) or range(START,STOP,STEP), not {text:.60}")
    start, stop, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    if step == 0 or not 0 < (stop - start) / step <= MAX_POINTS:
        raise ValueError(f"{text:.60} has no number in it, or more than {MAX_POINTS}")
    numbers = [start + step * number for number in range(math.ceil((stop - start) / step - 1e-9))]
    return [line(round(value, 12)) for value in numbers]


def _parts(text: str) -> list[str]:
    """Split a text at commas outside quotes and brackets."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _OPEN:
            depth += 1
        elif sign in _CLOSE:
            depth -= 1
        if sign == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]
