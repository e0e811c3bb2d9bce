"""Put a run's callbacks in order: each class of ours names those that it comes before and after."""

from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import Any

OWN = "train.callbacks"
"""Stands for the callbacks that the config names."""


def in_order(callbacks: Sequence[object], own: Sequence[object] = ()) -> list[Any]:
    """Return all callbacks such that each comes after those that the names in its `after` stand for, and before those
    in its `before`; without these, in the order given. Lightning itself moves those that save checkpoints to the end.

    Args:
        callbacks: of ours, whose classes may have `before` and `after`, tuples of class names and `OWN`.
        own: of the config, in its order.

    Raises:
        graphlib.CycleError: two of ours contradict each other.
    """
    every = [*callbacks, *own]
    names = [*(type(callback).__name__ for callback in callbacks), *[OWN] * len(own)]
    earlier: dict[int, set[int]] = {number: set() for number in range(len(every))}
    for number, callback in enumerate(callbacks):
        for other, name in enumerate(names):
            if name in getattr(callback, "after", ()):
                earlier[number].add(other)
            if name in getattr(callback, "before", ()):
                earlier[other].add(number)
    TopologicalSorter(earlier).prepare()
    placed: dict[int, object] = {}

    def place(number: int) -> None:
        for other in sorted(earlier[number] - placed.keys()):
            place(other)
        placed[number] = every[number]

    for number in earlier:
        if number not in placed:
            place(number)
    return [*placed.values()]
