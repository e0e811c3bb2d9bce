"""Reserve room for the workers of a run on a Ray cluster, and start an agent on each."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deeplightning.faults import Fault, SetupError
from deeplightning.launch.sealed import own_code_now
from deeplightning.own_code import INSTALLED, original, roots
from deeplightning.version import __version__
from deeplightning_ray.agent import Agent, Report
from deeplightning_ray.cluster import Connection

POLL_SECONDS = 1.0  # for one query of a worker
SETTLE_SECONDS = 5.0  # for Ray to find the resources that it has announced
START_SECONDS = 60.0  # for an agent, and later its process, to start

NO_MODULE = "ModuleNotFoundError"
"""Text in Ray 2.60's error for an actor that cannot be unpickled; its exception has no type for that."""


@dataclass
class Worker:
    """Worker of the cluster.

    Attributes:
        agent: the actor on it.
        node: its machine's id in the cluster.
        gpus: ids of its GPUs.
        about: see `Agent.about`.
        report: the latest report on its process.
    """

    agent: Any
    node: str = ""
    gpus: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    _incomplete: dict[int, bytes] = field(init=False, default_factory=dict)

    def output(self) -> Iterator[tuple[int, bytes]]:
        """Yield the output of the latest report in complete lines, each part with 1 (stdout) or 2 (stderr).

        An incomplete line waits for its rest, or for the end of the process.
        """
        for stream, part in self.report.parts:
            lines, end, rest = (self._incomplete.pop(stream, b"") + part).rpartition(b"\n")
            if rest:
                self._incomplete[stream] = rest
            yield stream, lines + end
        if self.report.code is not None:
            yield from self._incomplete.items()
            self._incomplete = {}


class NoRoom(Exception):
    """Raised if the cluster has too little room; the message has the number of workers that fit."""


class Workers:
    """Start as many workers as a cluster has room for, within bounds.

    Args:
        cluster: the connection of this process.
        bundle: resource → amount that Ray reserves for each worker.
        lowest: fewest workers.
        highest: most workers.
        git: for the frozen code of each worker, see `deeplightning.launch.sealed.seal`.
    """

    def __init__(
        self,
        cluster: Connection,
        bundle: Mapping[str, float],
        lowest: int,
        highest: int,
        git: Mapping[str, str | None] | None = None,
    ):
        import ray

        self.ray, self.cluster = ray, cluster
        self.bundle, self.lowest, self.highest = dict(bundle), lowest, highest
        self.all: list[Worker] = []
        self.code, self.git = own_code_now(), git
        self._group: Any = None
        self._code_ref: Any = None
        self._has_requested = False  # machines of the cluster

    def __len__(self) -> int:
        return len(self.all)

    def start(self, first: str | None) -> None:
        """Reserve room for as many workers as possible, and start an agent on each.

        Args:
            first: id of the machine whose workers come first, after those of this machine.

        Raises:
            NoRoom: too few workers fit.
            SetupError: a worker lacks Deep Lightning, or has another version.
        """
        self._reserve()
        self._start_agents()
        here = socket.gethostname()
        self.all.sort(key=lambda w: (w.about["host"] != here, w.node != first, w.node))

    def request_machines(self, number: int) -> None:
        """Ask a cluster that can grow to keep room for this many workers until the next request."""
        from ray.autoscaler.sdk import request_resources

        if number or self._has_requested:  # a request replaces those of other programs
            self._has_requested = True
            with contextlib.suppress(Exception):  # a cluster of a fixed size may refuse the request
                request_resources(bundles=[self.bundle] * number)

    def send_code(self) -> list[tuple[list[str], str]]:
        """Send each worker the code of this launch, as it was when this object was created.

        Returns:
            For each worker the folders that it imports from, as paths here, and the folder of its frozen code.
        """
        if self._code_ref is None:
            self._code_ref = self.ray.put(self.code)
        found = []
        for worker in self.all:
            shared = worker.about["shared"]
            folders = [root for root in _roots() if root in shared or root in self.code.roots]
            found.append((folders, self.ray.get(worker.agent.unpack.remote(self._code_ref, shared, self.git))))
        return found

    def room_for_more(self) -> int:
        """Return how many more workers could start now."""
        from ray.util.placement_group import placement_group, remove_placement_group

        free = min(self._workers_that_fit(self.ray.available_resources()), self.highest - len(self))
        while free > 0:
            group = placement_group([self.bundle] * free, strategy="PACK")
            try:
                if group.wait(POLL_SECONDS):
                    return free
            finally:
                remove_placement_group(group)
            free //= 2  # the sum over machines may not fit; few attempts, since signals wait meanwhile
        return 0

    def release(self) -> None:
        """End all workers and release their resources."""
        from ray.util.placement_group import remove_placement_group

        pending = [worker.agent.clean_up.remote() for worker in self.all]
        if pending:
            with contextlib.suppress(Exception):
                self.ray.wait(pending, num_returns=len(pending), timeout=POLL_SECONDS)
        # Removing the group ends busy actors too, but Ray 2.60 does not end the processes that they have started.
        for worker in self.all:
            with contextlib.suppress(Exception):
                self.ray.kill(worker.agent)
        if self._group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
        self.all, self._group = [], None

    def _workers_that_fit(self, resources: Mapping[str, float]) -> int:
        needs = [(resources.get(name, 0), amount) for name, amount in self.bundle.items() if amount > 0]
        return min((int(capacity // amount) for capacity, amount in needs), default=self.highest)

    def _reserve(self) -> None:
        """Reserve room for all workers at once.

        Raises:
            NoRoom: fewer than `lowest` workers fit.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        capacity = sum(self._workers_that_fit(node["Resources"]) for node in self.ray.nodes() if node["Alive"])
        number, waited = min(capacity, self.highest), False
        while number >= self.lowest:
            group = placement_group([self.bundle] * number, strategy="PACK")
            if group.wait(SETTLE_SECONDS):
                self._group = group
                return
            remove_placement_group(group)
            free = self._workers_that_fit(self.ray.available_resources())  # others use the rest
            number, waited = (number - 1 if waited else min(number - 1, max(free, self.lowest))), True
        each = f"{self.bundle['CPU']:g} CPUs" + (" and a GPU" if "GPU" in self.bundle else "")
        requested = f"{self.lowest} worker{'s' * (self.lowest > 1)} with {each}" + " each" * (self.lowest > 1)
        raise NoRoom(f"the Ray cluster ({self.cluster.address}) has room for {capacity}, and the run needs {requested}")

    def _start_agents(self) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = self.ray.remote(_Actor)
        self.all = []
        for index in range(self._group.bundle_count):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            options: dict[str, Any] = {"num_cpus": self.bundle["CPU"], "num_gpus": self.bundle.get("GPU", 0)}
            self.all.append(Worker(remote.options(**options, scheduling_strategy=where, max_concurrency=4).remote()))
        folders = {name: os.stat(name).st_ino for name in {os.getcwd(), *_roots()}}  # noqa: PTH109, PTH116
        answers = [worker.agent.about.remote(folders) for worker in self.all]
        try:
            for worker, about in zip(self.all, self.ray.get(answers, timeout=START_SECONDS), strict=True):
                worker.about, worker.node, worker.gpus = about, about["node"], about["gpus"]
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.GetTimeoutError) as error:
            if NO_MODULE in str(error):
                message = (
                    f"a worker of the Ray cluster lacks the plug-in: pip install 'deeplightning[ray]=={__version__}'"
                )
                raise SetupError(Fault(message, "engine.launcher")) from error
            raise NoRoom(f"a worker of the Ray cluster did not start: {' '.join(str(error).split())[:200]}") from error
        others = {worker.about["version"] for worker in self.all} - {__version__}
        if others:
            message = f"Ray workers have Deep Lightning {', '.join(others)}, and this machine has {__version__}"
            raise SetupError(Fault(message, "engine.launcher"))


class _Actor(Agent):
    """Agent that also reports the node, the address and the GPUs of its worker."""

    def about(self, folders: Mapping[str, int]) -> dict[str, Any]:
        """Return the result of `Agent.about`, with `node`, `ip` and `gpus`."""
        import ray

        context = ray.get_runtime_context()
        found = {"node": context.get_node_id(), "ip": ray.util.get_node_ip_address()}
        return super().about(folders) | found | {"gpus": [str(gpu) for gpu in ray.get_gpu_ids()]}


def _roots() -> list[str]:
    """Return the absolute folders that this process imports from, except those of installed packages."""
    found: list[str] = []
    for entry in [*roots(), *sys.path]:
        path = original(os.path.abspath(entry))  # noqa: PTH100
        if not f"{path}{os.sep}".startswith(INSTALLED) and os.path.isdir(path) and path not in found:  # noqa: PTH112
            found.append(path)
    return found
