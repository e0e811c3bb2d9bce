"""The workers of a Ray cluster train a run: as many as there is room for, and again where one was lost.

Ray finds room for the workers, starts an agent on each (`deeplightning.launch.ray_agent`), and reports when one is
gone. An agent starts one process of the run, the same as on one machine: its rank is in its environment, and its
signals, its exit code and its main thread are its own.

Ray Train 2.60 does not replace this file. In a prototype, each of its workers started such a process and waited for it
(two busy CPU cores, November 2026, ours in brackets). Ctrl-C, SIGTERM and a change of size kill the processes by
SIGKILL, so no checkpoint is saved; the command exits with 1 (130, 143). `max_failures` also restarts a config error. An
error has one exception per rank, without order. An elastic run has no limit on its wait for room. The next processes
start 7 s after a lost process (2 s), and 64 s after a lost node (2 s). Two processes that do nothing take 15 s and 13
CPU s (3 s and 2 CPU s), and waiting for them takes 0.8 GB (0.2 GB). `ray.train.report` blocks until all ranks call it.
Ray Train would replace about 120 lines, all in `_Launch`; signals, output, causes and growing at the start of an epoch
would need a second channel beside it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from deeplightning.checks.trust import note_launched
from deeplightning.config.schema import Config
from deeplightning.engine.plan import effective_batch, note_asked, world_size
from deeplightning.faults import ConfigError, Fault, Notice, SetupError
from deeplightning.launch.backoff import Backoff
from deeplightning.launch.handover import Order
from deeplightning.launch.job import Job, Start
from deeplightning.launch.ray_agent import Agent, Heard, pack
from deeplightning.launch.ray_cluster import Connection, connect
from deeplightning.launch.storage import POOL
from deeplightning.own_code import INSTALLED, roots
from deeplightning.private.messages import Sentence, says
from deeplightning.process import failure, ranks
from deeplightning.process.identity import ATTEMPT, LAUNCH
from deeplightning.version import __version__

LOOK = 1.0  # seconds that one question to a worker may take
SETTLE = 5.0  # seconds in which Ray finds the resources that it has announced
BEGIN = 60.0  # seconds in which a worker's process has to be there
GRACE = ranks.LATE + 2 * ranks.SOON  # seconds that the others have to end by themselves when one has failed
MAKES_ROOM = 75  # as deeplightning.callbacks.pool has it, which imports torch

_CARRIED = (
    *("DEEPLIGHTNING_CACHE", "DEEPLIGHTNING_DEBUG", "DEEPLIGHTNING_TRACKING_WAIT", "DEEPLIGHTNING_TRIAL"),
    *("MLFLOW_", "HF_", "TORCH_", "NCCL_", "GLOO_", "OMP_", "GOMP_", "CUBLAS_", "PYTHONHASHSEED"),
    *("AWS_", "GOOGLE_APPLICATION_"),
)
"""What the names of variables begin with that the workers get."""


class Ray:
    """Trains on a Ray cluster, https://docs.ray.io: `engine.processes` workers with CPUs, or one for each GPU that
    `engine.gpus` asks for.

    When a worker is lost, all stop; up to `engine.max_restarts` times as many as there is room for start again, and go
    on in the same run, from its latest complete checkpoint. While there are fewer than asked for, the samples of an
    optimizer step stay the same by accumulation, where the numbers divide.

    Args:
        address: `HOST:PORT` of a cluster, `ray://HOST:PORT` of its client server, `auto`: that of RAY_ADDRESS or of
            `ray start` on this machine; null: the same, and where there is none, one of this launch's own, on this
            machine, as `local` always means.
        min_workers: with fewer it does not run; null: as many as the config asks for.
        max_workers: with more it does not run; null: as many as the config asks for.
        cpus_per_worker: CPUs that Ray keeps free for a worker.
        storage_path: where checkpoints are kept for workers that share no folder: an absolute path that all reach, or
            an address such as s3://BUCKET/FOLDER; null: they share the working directory.
        working_dir: working directory of the workers; `{node}` in it becomes the machine's name in the cluster; null:
            this command's.
        backoff: how to wait for room: `base_s` seconds, the next time `factor` times as long, after `max_tries` tries
            no more; null: 1 s, doubled, ten tries.
        resize_cooldown_s: seconds that a smaller number of workers trains at least, before it grows again at the start
            of an epoch.
        connect_timeout_s: seconds in which an address has to answer.
        init: further keyword arguments of `ray.init`, for a cluster of one's own.

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
        self.backoff, self.resize_cooldown_s = Backoff(backoff), resize_cooldown_s
        self.connect_timeout_s, self.init = connect_timeout_s, dict(init or {})

    def bounds(self, wanted: int) -> tuple[int, int]:
        """The least and the most workers, where a config asks for a number."""
        highest = self.max_workers or max(wanted, self.min_workers or 1)
        return self.min_workers or min(wanted, highest), highest

    def plan(self, job: Job) -> list[Start]:
        """What `run` would start."""
        engine = job.cfg.engine
        lowest, highest = self.bounds(world_size(engine))
        each = f"{self.cpus_per_worker:g} CPUs" + (" and a GPU" if asks_for_gpus(job.cfg) else "")
        at = {None: "RAY_ADDRESS's, this machine's, or its own", "local": "its own, on this machine"}
        cluster = at.get(self.address, self.address)
        range_ = f", from {lowest} to {highest}" if lowest != highest else ""
        variables = {"RANK": "*", "WORLD_SIZE": str(highest), "LOCAL_RANK": "*", "LOCAL_WORLD_SIZE": "*"}
        variables |= {"NODE_RANK": "*", "MASTER_ADDR": "*", "MASTER_PORT": "*", LAUNCH: "*", ATTEMPT: "*"}
        if self.storage_path is not None:
            variables[POOL] = json.dumps({"storage": self.storage_path})
        command = [sys.executable, "-m", "deeplightning", "worker"]
        return [Start(command, highest, f"workers of a Ray cluster ({cluster}), each with {each}{range_}", variables)]

    def run(self, job: Job) -> int:
        """Trains on the cluster.

        Returns:
            The exit code: 5 where a worker was lost and no restart is left, else that of the workers.

        Raises:
            ConfigError: what is asked for contradicts itself.
            SetupError: there is no Ray, no such cluster, or no room in it.
        """
        _, highest = self.bounds(world_size(job.cfg.engine))
        own = {"num_cpus": max(1, math.ceil(highest * self.cpus_per_worker)), **self.init}
        with connect(self.address, self.connect_timeout_s, **own) as cluster:
            return _Launch(self, job, cluster).see_through()


def asks_for_gpus(cfg: Config) -> bool:
    """Whether a worker needs a GPU."""
    return cfg.engine.gpus not in (None, 0, [])


def sized(cfg: Config, wanted: int, local: int, nodes: int) -> Config:
    """A config for so many workers on so many machines; where they are not those it asks for, an optimizer step sees
    the same samples by accumulation, if the numbers divide, and a notice says which.

    Args:
        wanted: as many workers as it asks for.
        local: workers on each machine.
    """
    engine = replace(cfg.engine, num_nodes=nodes)
    if asks_for_gpus(cfg):
        engine.gpus = local
    else:
        engine.processes = local
    made = replace(cfg, engine=engine, notices=list(cfg.notices or []))
    for name in ("num_nodes", "gpus", "processes"):
        if getattr(engine, name) != getattr(cfg.engine, name):
            note_asked(made, f"engine.{name}", getattr(cfg.engine, name))
    world, factor = local * nodes, cfg.train.accumulator_factor
    if world == wanted:
        return made
    from_start = cfg.train.accumulator_epoch == 0 or factor == 1
    if from_start and (factor * wanted) % world == 0:
        accumulates = factor * wanted // world
        made.train = replace(cfg.train, accumulator_factor=accumulates, accumulator_epoch=0)
        note_asked(made, "train.accumulator_factor", factor)
        why = f"{world} workers of {wanted}; the same samples a step"
        key, text = "train.accumulator_factor", f"train.accumulator_factor: {factor} → {accumulates} ({why})"
    else:
        was, is_now = cfg.data.batch_size * wanted * factor, effective_batch(made)
        key, text = "data.batch_size", f"{was} samples a step → {is_now} ({world} workers of {wanted})"
    made.notices.append(Notice(text, unasked=True, key=key))
    return made


@dataclass
class _Worker:
    """A worker of the cluster.

    Attributes:
        agent: the actor on it.
        node: its machine's id in the cluster.
        gpus: ids of its GPUs.
        about: see `Agent.about`.
        heard: its process's last words.
        rest: the beginning of a line that it has not ended.
    """

    agent: Any
    node: str = ""
    gpus: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    heard: Heard = field(default_factory=Heard)
    rest: dict[int, bytes] = field(default_factory=dict)


class _NoRoom(Exception):
    """The cluster has no room; the text says which it has."""


class _Launch:
    """One run on a cluster, from its first worker to its last."""

    def __init__(self, settings: Ray, job: Job, cluster: Connection):
        import ray

        self.ray, self.settings, self.job, self.cluster = ray, settings, job, cluster
        self.cfg, self.redact = job.cfg, job.cfg.redact
        self.gpus = asks_for_gpus(self.cfg)
        if self.cfg.engine.gpus == "auto":
            found = int(ray.cluster_resources().get("GPU", 0))
            self.gpus = found > 0
            self.cfg = replace(self.cfg, engine=replace(self.cfg.engine, gpus=found or None))
        self.wanted = world_size(self.cfg.engine)
        self.lowest, self.highest = settings.bounds(self.wanted)
        self.name, self.starts, self.restarts = f"ray-{secrets.token_hex(6)}", 0, 0
        self.folder: str | None = None  # the run's, where rank 0 was
        self.newest: str | None = None
        self.node: str | None = None  # where rank 0 was
        self.heard: list[int] = []  # a person's signals
        self.group: Any = None
        self.workers: list[_Worker] = []

    def tell(self, text: str) -> None:
        print(self.redact(text), file=sys.stderr, flush=True)

    # ---- from start to start

    def see_through(self) -> int:
        """Starts workers until the run has ended. Returns the exit code."""
        self._has_gpus()
        of = self.cfg.engine.max_restarts
        before = {number: signal.signal(number, self._hear) for number in failure.INTERRUPTED}
        try:
            while True:
                self._gather()
                if self.heard:
                    raise _Interrupted
                code, cause, reported = self._train()
                if code == MAKES_ROOM:
                    self._dismiss()
                    continue
                if code == 0 or self.heard or cause is None:
                    return failure.INTERRUPTED[signal.Signals(self.heard[0])] if self.heard and code else code
                if cause.lost and self.restarts < of:
                    self.restarts += 1
                    goes_on = (
                        "the run resumes from its latest complete checkpoint" if self.folder else "the run begins again"
                    )
                    self.tell(f"restart {self.restarts} of {of}: {cause}; {goes_on}")
                    self._dismiss()
                    continue
                self._say_end(cause, reported)
                return code
        except _Interrupted:
            return failure.INTERRUPTED[signal.Signals(self.heard[0])]
        finally:
            self._dismiss()
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.folder is not None:
                print(f"Artifact storage path: {self.folder}", flush=True)

    def _say_end(self, cause: failure.Cause, reported: bool) -> None:
        word = f"error [{cause.whose}]" if cause.whose else "error"
        if cause.lost:
            of = self.cfg.engine.max_restarts
            used = {0: "", 1: "; the restart is used up"}.get(of, f"; the {of} restarts are used up")
            kept = f"; the last checkpoint is {self.newest}" if self.newest else "; there is no checkpoint yet"
            hint = ", and train.resume_ckpt=auto resumes from it" if self.newest else ""
            self.tell(f"{word}: {cause.reason}{used}{kept}{hint}")
        elif not reported:
            self.tell(f"{word}: {cause.reason}")

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(number)

    # ---- room

    def _has_gpus(self) -> None:
        if not self.gpus:
            return
        there = self.ray.cluster_resources()
        if there.get("GPU", 0) < 1:
            cpus = f"{there.get('CPU', 0):g} CPUs"
            message = (
                f"asks for {self.wanted} GPUs, and the Ray cluster has {cpus} and no GPU; engine.gpus=null runs on them"
            )
            raise SetupError(Fault(message, "engine.gpus"))

    @property
    def _bundle(self) -> dict[str, float]:
        return {"CPU": self.settings.cpus_per_worker, **({"GPU": 1.0} if self.gpus else {})}

    def _fitting(self, resources: Mapping[str, float]) -> int:
        needs = [(resources.get(name, 0), much) for name, much in self._bundle.items() if much > 0]
        return min((int(there // much) for there, much in needs), default=self.highest)

    def _gather(self) -> None:
        """Gets as many workers as there is room for.

        Raises:
            SetupError: there are too few, whatever was waited for.
        """
        pauses = iter(self.settings.backoff)
        while True:
            try:
                self._reserve()
                self._meet()
                return
            except _NoRoom as error:
                self._dismiss()
                pause = next(pauses, None)
                if pause is None or (self.cluster.is_own and self.starts == 0):
                    raise SetupError(Fault(str(error), "engine.launcher")) from None
                self.tell(f"{error}; tries again in {pause:g} s")
                self._ask_for_machines()
                self._wait(pause)

    def _ask_for_machines(self) -> None:
        """Has a cluster that can grow do so."""
        from ray.autoscaler.sdk import request_resources

        with contextlib.suppress(Exception):  # one that cannot may say so
            request_resources(bundles=[self._bundle] * self.highest)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.heard:
                raise _Interrupted
            time.sleep(min(0.1, seconds))

    def _reserve(self) -> None:
        """Has Ray keep room for all workers at once.

        Raises:
            _NoRoom: for as few as may be it has none.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        there = sum(self._fitting(node["Resources"]) for node in self.ray.nodes() if node["Alive"])
        number, waited = min(there, self.highest), False
        while number >= self.lowest:
            group = placement_group([self._bundle] * number, strategy="PACK")
            if group.wait(SETTLE):
                self.group = group
                return
            remove_placement_group(group)
            free = self._fitting(self.ray.available_resources())  # what others use is not free
            number, waited = (number - 1 if waited else min(number - 1, max(free, self.lowest))), True
        each = f"{self.settings.cpus_per_worker:g} CPUs" + (" and a GPU" if self.gpus else "")
        asks = f"{self.lowest} worker{'s' * (self.lowest > 1)} with {each}" + " each" * (self.lowest > 1)
        raise _NoRoom(f"the Ray cluster ({self.cluster.address}) has room for {there}, and the run needs {asks}")

    def _meet(self) -> None:
        """Has an agent on each worker, and knows of them.

        Raises:
            _NoRoom: one is gone already.
            SetupError: one is of another version.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = self.ray.remote(_Actor)
        self.workers = []
        for index in range(self.group.bundle_count):
            where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
            options: dict[str, Any] = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
            self.workers.append(
                _Worker(remote.options(**options, scheduling_strategy=where, max_concurrency=4).remote())
            )
        folders = {name: os.stat(name).st_ino for name in {os.getcwd(), *_roots()}}  # noqa: PTH109, PTH116
        asked = [worker.agent.about.remote(folders) for worker in self.workers]
        try:
            for worker, about in zip(self.workers, self.ray.get(asked, timeout=BEGIN), strict=True):
                worker.about, worker.node, worker.gpus = about, about["node"], about["gpus"]
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.GetTimeoutError) as error:
            if says(error, Sentence.NO_MODULE_ON_WORKER):
                message = f"a worker of the Ray cluster has no Deep Lightning: install {__version__} there"
                raise SetupError(Fault(message, "engine.launcher")) from error
            raise _NoRoom(f"a worker of the Ray cluster did not start: {' '.join(str(error).split())[:200]}") from error
        others = {worker.about["version"] for worker in self.workers} - {__version__}
        if others:
            message = f"workers of the Ray cluster have Deep Lightning {', '.join(others)}, and here is {__version__}"
            raise SetupError(Fault(message, "engine.launcher"))
        here = socket.gethostname()
        self.workers.sort(key=lambda w: (w.about["host"] != here, w.node != self.node, w.node))

    # ---- one start

    def _train(self) -> tuple[int, failure.Cause | None, bool]:
        """Has the workers train. Returns exit code, cause, and whether a worker has printed it."""
        self._begin()
        began, asked_at, looked = time.monotonic(), None, time.monotonic()
        until: float | None = None
        sent = 0
        heard = {worker.agent.hear.remote(LOOK): number for number, worker in enumerate(self.workers)}
        ended: dict[int, failure.Cause | None] = {}
        while heard:
            done, _ = self.ray.wait(list(heard), num_returns=1, timeout=0.2)
            for ref in done:
                number = heard.pop(ref)
                worker = self.workers[number]
                try:
                    worker.heard = found = self.ray.get(ref)
                except self.ray.exceptions.RayError:  # of whatever kind: it does not answer
                    ended[number] = failure.Cause(
                        number, "a worker was lost: its machine or its CPU is gone", 5, lost=True
                    )
                    continue
                self._pass_on(number, found)
                if number == 0:
                    self.folder, self.newest = found.run or self.folder, found.newest or self.newest
                if found.code is None:
                    heard[worker.agent.hear.remote(LOOK)] = number
                else:
                    ended[number] = found.cause or (failure.end_of(number, found.code) if found.code else None)
            for signal_number in self.heard[sent:]:
                self._send(signal_number)
                sent += 1
                if sent > 1:
                    until = time.monotonic() + GRACE
            bad = [
                number
                for number in ended
                if ended[number] is not None and self.workers[number].heard.code != MAKES_ROOM
            ]
            if bad and until is None and not self.heard:
                until = time.monotonic() + GRACE
            if until is not None and time.monotonic() > until:
                break
            if asked_at is None and not ended and time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                if looked - began > self.settings.resize_cooldown_s and self._has_grown():
                    asked_at = looked
                    self.workers[0].agent.make_room.remote()
        return self._verdict(ended)

    def _verdict(self, ended: Mapping[int, failure.Cause | None]) -> tuple[int, failure.Cause | None, bool]:
        codes = {number: self.workers[number].heard.code for number in ended}
        reported = any(self.workers[number].heard.reported for number in ended)
        left = set(codes.values())  # who comes late to the end of the others ends as if by a signal
        if len(ended) == len(self.workers) and {MAKES_ROOM} <= left <= {MAKES_ROOM, 143} and not self.heard:
            return MAKES_ROOM, None, False
        causes = {number: cause for number, cause in ended.items() if cause is not None}
        # Where rank 0 has ended well, the run is done, and whoever was lost after that had nothing more to give.
        if not causes and len(ended) == len(self.workers):
            return 0, None, False
        if codes.get(0) == 0 and all(cause.lost for cause in causes.values()):
            return 0, None, False
        # A fault of the run comes before losses, which may follow from it; who was killed before who missed it.
        ordered = sorted(causes.values(), key=lambda c: (c.lost, (codes.get(c.rank) or 0) > 0))
        hangs = failure.Cause(0, "a worker was lost: it does not answer", 5, lost=True)
        cause = ordered[0] if ordered else hangs
        return cause.exit_code, cause, reported

    def _begin(self) -> None:
        world, counts = len(self.workers), dict[str, int]()
        for worker in self.workers:
            counts[worker.node] = counts.get(worker.node, 0) + 1
        # Machines with unlike numbers of workers: each worker counts as a machine.
        local = next(iter(counts.values())) if len(set(counts.values())) == 1 else 1
        cfg = sized(self.cfg, self.wanted, local, world // local)
        if self.starts:  # workers show notices at the first start alone
            for notice in (cfg.notices or [])[len(self.cfg.notices or []) :]:
                self.tell(f"warning: {notice.text}")
        first, self.node = self.workers[0].about, self.workers[0].node
        on_one = len({worker.about["host"] for worker in self.workers}) == 1
        common = {n: v for n, v in os.environ.items() if n.startswith(_CARRIED)}
        common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local)}
        common |= {"MASTER_ADDR": "127.0.0.1" if on_one else first["ip"], "MASTER_PORT": str(first["port"])}
        common |= {LAUNCH: self.name, ATTEMPT: str(self.starts)}
        common |= {POOL: json.dumps({"launch": self.name, "storage": self._storage()})}
        common.setdefault("OMP_NUM_THREADS", str(max(1, int(self.settings.cpus_per_worker))))
        here, roots, code = os.getcwd(), _roots(), None  # noqa: PTH109
        began = []
        for number, worker in enumerate(self.workers):
            rank = {"RANK": str(number), "LOCAL_RANK": str(number % local), "NODE_RANK": str(number // local)}
            if self.gpus:
                beside = [w for w in self.workers if w.node == worker.node] if local > 1 else [worker]
                rank["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for w in beside for gpu in w.gpus)
            theirs = [root for root in roots if root in worker.about["shared"]]
            if len(theirs) < len(roots):
                code = code or self.ray.put(pack([root for root in roots if root not in worker.about["shared"]]))
                theirs += self.ray.get(worker.agent.unpack.remote(code))
            folder = (self.settings.working_dir or here).replace("{node}", worker.node)
            if self.settings.working_dir is None and here not in worker.about["shared"]:
                self._may_be_elsewhere(cfg)
            order = Order(cfg, theirs, self.job.command[3:]).pack()
            environment = {**common, **rank, **cfg.engine.env}
            began.append(worker.agent.begin.remote(order, environment, folder, f"{self.name}-{self.starts}"))
        self.starts += 1
        try:
            failed = [reason for reason in self.ray.get(began, timeout=BEGIN) if reason]
        except self.ray.exceptions.RayError:
            return  # it is gone: that is found when it is heard
        if failed:
            message = f"a worker cannot start in its working directory: {failed[0]}"
            raise SetupError(Fault(message, "engine.launcher.params.working_dir"))

    def _may_be_elsewhere(self, cfg: Config) -> None:
        """Says what a run needs whose workers do not share this command's folder."""
        sharded = cfg.engine.backend is not None and cfg.engine.backend != "ddp"
        if self.settings.storage_path is not None and sharded:
            message = (
                f"{cfg.engine.backend} writes a checkpoint in pieces, on each worker: they need a folder they share"
            )
            raise ConfigError(Fault(message, "engine.launcher.params.storage_path"))

    def _storage(self) -> str | None:
        path = self.settings.storage_path
        return path if path is None or "://" in path else str(Path(path).expanduser().absolute())

    def _pass_on(self, number: int, heard: Heard) -> None:
        """Prints the output of a worker, whole lines at a time."""
        worker = self.workers[number]
        for stream, part in heard.parts:
            text = worker.rest.pop(stream, b"") + part
            lines, end, rest = text.rpartition(b"\n")
            if rest:
                worker.rest[stream] = rest
            self._print(stream, lines + end)
        if heard.code is not None:
            for stream, rest in worker.rest.items():
                self._print(stream, rest)
            worker.rest = {}

    def _print(self, stream: int, text: bytes) -> None:
        kept = []
        for line in text.splitlines(keepends=True):
            if stream == 1 and line.startswith(b"Artifact storage path: "):  # printed once, at the end
                self.folder = line.decode(errors="replace").partition(": ")[2].rstrip("\n")
                note_launched(self.folder)
            else:
                kept.append(line)
        to = sys.stdout if stream == 1 else sys.stderr
        to.write(b"".join(kept).decode(errors="replace"))
        to.flush()

    def _send(self, number: int) -> None:
        for worker in self.workers:
            worker.agent.signal.remote(number)

    def _has_grown(self) -> bool:
        """Whether there is room for more workers."""
        from ray.util.placement_group import placement_group, remove_placement_group

        free = min(self._fitting(self.ray.available_resources()), self.highest - len(self.workers))
        if free < 1:
            return False
        group = placement_group([self._bundle] * free, strategy="PACK")
        try:
            there = bool(group.wait(LOOK))
        finally:
            remove_placement_group(group)
        if there:
            more = f"{free} more worker{'s' * (free > 1)}"
            self.tell(
                f"there is room for {more}: the run continues with {len(self.workers) + free} from the next epoch"
            )
        return there

    def _dismiss(self) -> None:
        """Ends all workers and gives their room back."""
        from ray.util.placement_group import remove_placement_group

        left = [worker.agent.leave.remote() for worker in self.workers]
        if left:
            with contextlib.suppress(Exception):
                self.ray.wait(left, num_returns=len(left), timeout=LOOK)
        # Removing the group ends busy actors too, but Ray 2.60 then leaves the processes that they have started.
        for worker in self.workers:
            with contextlib.suppress(Exception):
                self.ray.kill(worker.agent)
        if self.group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self.group)
        self.workers, self.group = [], None


class _Interrupted(Exception):
    """A signal came while no worker ran."""


class _Actor(Agent):
    """An agent that knows its worker."""

    def about(self, folders: Mapping[str, int]) -> dict[str, Any]:
        """As of `Agent`, with `node`, `ip` and `gpus`."""
        import ray

        context = ray.get_runtime_context()
        found = {"node": context.get_node_id(), "ip": ray.util.get_node_ip_address()}
        return super().about(folders) | found | {"gpus": [str(gpu) for gpu in ray.get_gpu_ids()]}


def _roots() -> list[str]:
    """The folders that this process imports from, beside what is installed, absolute."""
    found: list[str] = []
    for entry in [*roots(), *sys.path]:
        path = os.path.abspath(entry)  # noqa: PTH100
        if not f"{path}{os.sep}".startswith(INSTALLED) and os.path.isdir(path) and path not in found:  # noqa: PTH112
            found.append(path)
    return found
