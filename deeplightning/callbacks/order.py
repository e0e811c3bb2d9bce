"""The order of a run's callbacks: each class of ours says which others it comes before and after."""

from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import Any

OWN = "train.callbacks"
"""Stands for the callbacks that the config names."""


def in_order(callbacks: Sequence[Any], own: Sequence[Any] = ()) -> list[Any]:
    """All callbacks such that each comes after those that the names in its `after` stand for, and before those in its
    `before`; where nothing is said, in the order given. Lightning itself moves those that save checkpoints to the end.

    Args:
        callbacks: of ours, whose classes may have `before` and `after`, tuples of class names and `OWN`.
        own: of the config, in its order.
    """
    every = [*callbacks, *own]
    names = {number: OWN if number >= len(callbacks) else type(c).__name__ for number, c in enumerate(every)}
    sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(names, ()))
    for number, callback in enumerate(callbacks):
        for other, name in names.items():
            if name in getattr(callback, "after", ()):
                sorter.add(number, other)
            if name in getattr(callback, "before", ()):
                sorter.add(other, number)
    for number in range(len(callbacks) + 1, len(every)):
        sorter.add(number, number - 1)
    sorter.prepare()
    ordered, ready = [], list(sorter.get_ready())
    while ready:
        first = min(ready)
        ready.remove(first)
        ordered.append(every[first])
        sorter.done(first)
        ready += sorter.get_ready()
    return ordered
