"""Find a minimal set of changes that makes a test fail, by delta debugging. It imports nothing else of Deep Lightning.

The algorithm is `ddmin` of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE
Transactions on Software Engineering 28(2), 2002, section 3.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item")


class Outcome(Enum):
    """Outcome of a test of a set of changes: it passes, it fails, or its result could not be determined."""

    GOOD = "good"
    BAD = "bad"
    UNRESOLVED = "unresolved"


def most_tests(size: int) -> int:
    """Return the maximum number of tests that `ddmin` runs for `size` changes: n² + 3n, the paper's worst case."""
    return size * size + 3 * size


def ddmin(changes: Sequence[Item], test: Callable[[list[Item]], Outcome]) -> list[Item]:
    """Return a set of changes that fails, and from which no single change can be removed.

    Args:
        changes: all changes, which fail together; related ones should be neighbours.
        test: returns the outcome of a subset in the order of `changes`; called at most once for each subset, and
            neither for all changes nor for none.

    Returns:
        The set, in the order of `changes`. It is 1-minimal: without any one of its changes the test does not fail. A
        set that is smaller by more than one change may exist.
    """
    found: dict[tuple[int, ...], Outcome] = {}

    def fails(chosen: Sequence[int]) -> bool:
        key = tuple(chosen)
        if key not in found:
            found[key] = test([changes[number] for number in key])
        return found[key] is Outcome.BAD

    current, parts = list(range(len(changes))), 2
    while len(current) > 1:
        subsets = _split(current, parts)
        if (subset := next(filter(fails, subsets), None)) is not None:
            current, parts = subset, 2
            continue
        complements = [[n for n in current if n not in subset] for subset in subsets] if parts > 2 else []
        if (complement := next(filter(fails, complements), None)) is not None:
            current, parts = complement, max(parts - 1, 2)
        elif parts < len(current):
            parts = min(len(current), 2 * parts)
        else:
            break
    return [changes[number] for number in current]


def _split(numbers: Sequence[int], parts: int) -> list[list[int]]:
    """Split numbers into consecutive parts of sizes that differ by at most one."""
    edges = [len(numbers) * part // parts for part in range(parts + 1)]
    return [list(numbers[start:end]) for start, end in pairwise(edges)]
