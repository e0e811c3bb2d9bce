"""A Ray cluster on this machine whose nodes come and go: reads `add` and `remove`, a line each, until its input ends.

The first line on stdout is the cluster's address; every further one answers a word when it is done.
"""

import sys

from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=SMALL, shutdown_at_exit=True)
    others = []
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "add":
            others.append(cluster.add_node(num_cpus=1, object_store_memory=80_000_000))
        elif line.strip() == "remove":
            cluster.remove_node(others.pop())
        print(line.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
