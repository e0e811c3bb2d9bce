"""Lightning's cluster environment, answered from this process's identity."""

from __future__ import annotations

import os
import warnings

from lightning_fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning_fabric.utilities.rank_zero import rank_zero_only

from deeplightning.process.identity import Identity, identity


def cluster() -> ClusterEnvironment:
    """Return the cluster environment of this process: of an external launcher, or one that starts its own processes.

    Lightning 2.6 would use Slurm's variables even in a shell for which Slurm has only allocated a machine.
    """
    # If Slurm is installed, Lightning suggests to use it.
    warnings.filterwarnings("ignore", "The `srun` command is available")
    found = identity()
    return Own() if found is None or not found.is_binding else Cluster(found)


class Own(LightningEnvironment):
    """The processes of a machine, started by the first of them."""

    def teardown(self) -> None:
        """Keep WORLD_SIZE, which Lightning's version deletes and later stages read."""


class Cluster(ClusterEnvironment):
    """The processes of a launch that were all started externally; see `deeplightning.process.identity`."""

    def __init__(self, place: Identity):
        self.place = place
        rank_zero_only.rank = place.rank  # type: ignore[attr-defined]

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.place.address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT") or self.place.port or 29500)  # torch's own default

    @staticmethod
    def detect() -> bool:
        return identity() is not None

    def world_size(self) -> int:
        return self.place.world

    def set_world_size(self, size: int) -> None:
        """Ignore the size, which is fixed."""

    def global_rank(self) -> int:
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore the rank, which is fixed."""

    def local_rank(self) -> int:
        return self.place.local_rank

    def node_rank(self) -> int:
        return self.place.node
