"""Define the launcher `Ray`: its arguments and its plan."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from deeplightning.config.machine import world_size
from deeplightning.launch import Job, ProcessHooks, Start
from deeplightning.process.identity import ATTEMPT, LAUNCH
from deeplightning_ray.agent import WORKER
from deeplightning_ray.cluster import connect
from deeplightning_ray.storage import POOL
from deeplightning_ray.supervise import Supervisor


def _retry_delays(params: Mapping[str, float] | None = None) -> list[float]:
    """Return the seconds to wait after each of `max_tries` tries except the last: `base_s`, then each time `factor`
    times as long.

    Args:
        params: values of `base_s`, `factor` and `max_tries`; the defaults are 1 s, 2 and 10.

    Raises:
        ValueError: a number is out of range, or a name is unknown.
    """
    defaults: dict[str, float] = {"base_s": 1.0, "factor": 2.0, "max_tries": 10}
    values = defaults | dict(params or {})
    if unknown := values.keys() - defaults.keys():
        raise ValueError(f"backoff takes {', '.join(defaults)}, not {', '.join(sorted(unknown))}")
    for name, low in zip(defaults, (0, 1, 1), strict=True):
        if isinstance(values[name], bool) or not values[name] >= low:
            raise ValueError(f"backoff.{name} must be at least {low}, not {values[name]}")
    return [values["base_s"] * values["factor"] ** number for number in range(int(values["max_tries"]) - 1)]


class Ray:
    """Train on a Ray cluster, https://docs.ray.io.

    There are `engine.processes` workers with CPUs, or one for each GPU that `engine.gpus` requests.

    When a worker is lost, all stop. Up to `engine.max_restarts` times, as many as the cluster has room for restart and
    resume the same run from its latest complete checkpoint. While there are fewer than requested, gradient
    accumulation keeps the number of samples of an optimizer step, if the numbers divide.

    Args:
        address: `HOST:PORT` of a cluster; `ray://HOST:PORT` of its client server; `auto`: the cluster of RAY_ADDRESS or
            of `ray start` on this machine; `local`: a new cluster on this machine for this launch; null: as `auto`, or
            as `local` if there is no cluster.
        min_workers: fewest workers to run with; null: as many as the config requests.
        max_workers: most workers to run with; null: as many as the config requests.
        cpus_per_worker: CPUs that Ray reserves for a worker.
        storage_path: where checkpoints are stored if the workers share no folder: an absolute path that all can access,
            or an address such as s3://BUCKET/FOLDER; null: they share the working directory.
        working_dir: working directory of the workers; `{node}` in it becomes the machine's name in the cluster; null:
            that of this command.
        backoff: how to wait for room: `base_s` seconds, each further time `factor` times as long, at most `max_tries`
            times; null: 1 s, doubled, ten tries.
        resize_cooldown_s: minimum seconds of training with fewer workers before their number grows again, at the start
            of an epoch.
        connect_timeout_s: seconds for an address to answer.
        init: additional keyword arguments of `ray.init`, for a local cluster.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        address: str | None = None,
        min_workers: int | None = None,
        max_workers: int | None = None,
        cpus_per_worker: float = 1,
        storage_path: str | None = None,
        working_dir: str | None = None,
        backoff: Mapping[str, float] | None = None,
        resize_cooldown_s: float = 30,
        connect_timeout_s: float = 10,
        init: Mapping[str, Any] | None = None,
    ):
        for name, workers in (("min_workers", min_workers), ("max_workers", max_workers)):
            if workers is not None and workers < 1:
                raise ValueError(f"{name} must be at least 1, not {workers}")
        if min_workers is not None and max_workers is not None and min_workers > max_workers:
            raise ValueError(f"min_workers ({min_workers}) must not be more than max_workers ({max_workers})")
        for name, number in (("resize_cooldown_s", resize_cooldown_s), ("cpus_per_worker", cpus_per_worker)):
            if not number >= 0:
                raise ValueError(f"{name} must be at least 0, not {number}")
        if not connect_timeout_s > 0:
            raise ValueError(f"connect_timeout_s must be more than 0, not {connect_timeout_s}")
        self.address, self.min_workers, self.max_workers = address, min_workers, max_workers
        self.cpus_per_worker, self.storage_path, self.working_dir = cpus_per_worker, storage_path, working_dir
        self.backoff, self.resize_cooldown_s = _retry_delays(backoff), resize_cooldown_s
        self.connect_timeout_s, self.init = connect_timeout_s, dict(init or {})

    def bounds(self, wanted: int) -> tuple[int, int]:
        """Return the fewest and the most workers for the number that a config requests."""
        highest = self.max_workers or max(wanted, self.min_workers or 1)
        return self.min_workers or min(wanted, highest), highest

    def plan(self, job: Job) -> list[Start]:
        """Return the processes that `run` would start."""
        engine = job.cfg.engine
        lowest, highest = self.bounds(world_size(engine))
        each = f"{self.cpus_per_worker:g} CPUs" + (" and a GPU" if job.cfg.engine.gpus else "")
        clusters = {None: "RAY_ADDRESS's, this machine's, or its own", "local": "its own, on this machine"}
        cluster = clusters.get(self.address, self.address)
        range_ = f", from {lowest} to {highest}" if lowest != highest else ""
        variables = {"RANK": "*", "WORLD_SIZE": str(highest), "LOCAL_RANK": "*", "LOCAL_WORLD_SIZE": "*"}
        variables |= {"NODE_RANK": "*", "MASTER_ADDR": "*", "MASTER_PORT": "*", LAUNCH: "*", ATTEMPT: "*"}
        if self.storage_path is not None:
            variables[POOL] = json.dumps({"storage": self.storage_path})
        command = [sys.executable, *WORKER]
        return [Start(command, highest, f"workers of a Ray cluster ({cluster}), each with {each}{range_}", variables)]

    def run(self, job: Job) -> int:
        """Train on the cluster.

        Returns:
            The exit code: 5 if a worker was lost and no restart is left, else that of the workers.

        Raises:
            ConfigError: the settings contradict each other.
            SetupError: there is no Ray, no such cluster, or no room in it.
        """
        _, highest = self.bounds(world_size(job.cfg.engine))
        cpus = None if job.cfg.engine.gpus == "auto" else max(1, math.ceil(highest * self.cpus_per_worker))
        own = {"num_cpus": cpus, **self.init}  # None: all of this machine, because its GPUs are not yet counted
        with connect(self.address, self.connect_timeout_s, **own) as cluster:
            return Supervisor(self, job, cluster).run()

    @staticmethod
    def hooks_here() -> ProcessHooks | None:
        """Return the hooks of a worker's process, or None if this process is not a worker."""
        if POOL not in os.environ:
            return None
        from deeplightning_ray.ray_elastic import WorkerHooks

        return WorkerHooks()
