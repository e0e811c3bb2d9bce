"""A Ray cluster on this machine whose nodes come and go: reads `add` and `remove`, a line each, until its input ends.

The first line on stdout is the cluster's address; every further one answers a word when it is done.
"""

import contextlib
import sys

from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


def patiently(start):
    """What a start gives. Ray gives one 30 s, which is little for a machine that is busy."""
    for _ in range(4):
        with contextlib.suppress(Exception):
            return start()
    return start()


def main() -> None:
    cluster, others = patiently(lambda: Cluster(initialize_head=True, head_node_args=SMALL)), []
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "add":
            others.append(patiently(lambda: cluster.add_node(num_cpus=1, object_store_memory=80_000_000)))
        elif line.strip() == "remove":
            cluster.remove_node(others.pop())
        print(line.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
