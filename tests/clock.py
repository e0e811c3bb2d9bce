"""Measure the current speed of this machine, for tests that bound CPU time."""

import time

NUM_ITERATIONS, ITERATION_SECONDS = 2_000_000, 20e-9
"""Iterations of the measured loop, and the time of one on the machine on which the bounds were set."""


def slowness() -> float:
    """Return how many times slower Python runs now than where the bounds were set; at least 1.

    If neighbours share cores and caches, the same work takes twice its CPU seconds for a while.
    """
    begin = time.process_time()
    for _ in range(NUM_ITERATIONS):
        pass
    return max(1.0, (time.process_time() - begin) / (NUM_ITERATIONS * ITERATION_SECONDS))
