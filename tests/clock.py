"""How fast this machine is at this moment, for tests that bound CPU time."""

import time

COUNTS, COUNT_S = 2_000_000, 20e-9
"""What is counted, and what one takes on the machine on which the bounds were set."""


def slowness() -> float:
    """How many times longer Python counts now than where the bounds were set; at least 1.

    Where neighbours share cores and caches, the same work takes twice its CPU seconds for a while."""
    begin = time.process_time()
    for _ in range(COUNTS):
        pass
    return max(1.0, (time.process_time() - begin) / (COUNTS * COUNT_S))
