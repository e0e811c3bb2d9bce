"""What Lightning asks of whoever has started the processes, answered from this process's place among them."""

from __future__ import annotations

import os
import warnings

from lightning_fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning_fabric.utilities.rank_zero import rank_zero_only

from deeplightning.process.identity import Identity, identity


def cluster() -> ClusterEnvironment:
    """Of this process: started by somebody else, else one that starts the others on its machine itself.

    Lightning 2.6 would go by variables of Slurm also in a shell that Slurm has only given a machine to.
    """
    # Where Slurm is installed, Lightning thinks that it should be used.
    warnings.filterwarnings("ignore", "The `srun` command is available")
    found = identity()
    return Own() if found is None or not found.is_binding else Cluster(found)


class Own(LightningEnvironment):
    """The processes of a machine, started by the first of them."""

    def teardown(self) -> None:
        """Nothing: Lightning's takes WORLD_SIZE out of the environment, by which later stages know their place."""


class Cluster(ClusterEnvironment):
    """The processes of a launch, all started by somebody else; see `deeplightning.process.identity`."""

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
        """It is as it is."""

    def global_rank(self) -> int:
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        """It is as it is."""

    def local_rank(self) -> int:
        return self.place.local_rank

    def node_rank(self) -> int:
        return self.place.node
