"""Run a Ray cluster on this machine, and add and remove nodes: reads lines `add` and `remove` until its input ends.

The first line on stdout is the address of the cluster; each further line confirms a command.
"""

import contextlib
import sys

from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


def retry(start):
    """Call `start` up to five times: Ray's limit of 30 s is short for a busy machine."""
    for _ in range(4):
        with contextlib.suppress(Exception):
            return start()
    return start()


def main() -> None:
    cluster, others = retry(lambda: Cluster(initialize_head=True, head_node_args=SMALL)), []
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "add":
            others.append(retry(lambda: cluster.add_node(num_cpus=1, object_store_memory=80_000_000)))
        elif line.strip() == "remove":
            cluster.remove_node(others.pop())
        print(line.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
