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

import json
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from deeplightning.checks.trust import note_launched
from deeplightning.config.schema import Config
from deeplightning.engine.plan import asks_for_gpus, sized, world_size
from deeplightning.faults import ConfigError, Fault, SetupError
from deeplightning.launch.backoff import Backoff
from deeplightning.launch.handover import Order
from deeplightning.launch.job import Job, Start
from deeplightning.launch.ray_cluster import Connection, connect
from deeplightning.launch.ray_workers import POLL, START, NoRoom, Worker, Workers
from deeplightning.launch.storage import POOL
from deeplightning.own_code import SEALED
from deeplightning.process import failure, ranks
from deeplightning.process.identity import ATTEMPT, LAUNCH
from deeplightning.process.terminal import say, say_path
from deeplightning.tracking.environment import git_answers

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
            return _Launch(self, job, cluster).run()


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
        bundle = {"CPU": settings.cpus_per_worker, **({"GPU": 1.0} if self.gpus else {})}
        self.workers = Workers(cluster, bundle, *settings.bounds(self.wanted), git_answers(self.redact))
        self.name, self.starts, self.restarts = f"ray-{secrets.token_hex(6)}", 0, 0
        self.folder: str | None = None  # the run's, where rank 0 was
        self.newest: str | None = None
        self.node: str | None = None  # where rank 0 was
        self.signals: list[int] = []  # that a person has sent

    def log(self, text: str) -> None:
        say(self.redact(text), err=True)

    # ---- from one start to the next

    def run(self) -> int:
        """Starts workers until the run has ended. Returns the exit code."""
        self._refuse_missing_gpus()
        of = self.cfg.engine.max_restarts
        before = {number: signal.signal(number, self._note_signal) for number in failure.INTERRUPTED}
        try:
            while True:
                self._start_workers()
                if self.signals:
                    raise _Interrupted
                code, cause, reported = self._train()
                if code == MAKES_ROOM:
                    self.workers.release()
                    continue
                if code == 0 or self.signals or cause is None:
                    return failure.INTERRUPTED[signal.Signals(self.signals[0])] if self.signals and code else code
                if cause.lost and self.restarts < of:
                    self.restarts += 1
                    resumes = "resumes from its latest complete checkpoint" if self.folder else "begins again"
                    self.log(f"restart {self.restarts} of {of}: {cause}; the run {resumes}")
                    self.workers.release()
                    continue
                self._log_cause(cause, reported)
                return code
        except _Interrupted:
            return failure.INTERRUPTED[signal.Signals(self.signals[0])]
        finally:
            self.workers.release()
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.folder is not None:
                say_path(Path(self.folder), "Artifact storage path: ")

    def _log_cause(self, cause: failure.Cause, reported: bool) -> None:
        word = f"error [{cause.whose}]" if cause.whose else "error"
        if cause.lost:
            of = self.cfg.engine.max_restarts
            used = {0: "", 1: "; the restart is used up"}.get(of, f"; the {of} restarts are used up")
            kept = f"; the last checkpoint is {self.newest}" if self.newest else "; there is no checkpoint yet"
            hint = ", and train.resume_ckpt=auto resumes from it" if self.newest else ""
            self.log(f"{word}: {cause.reason}{used}{kept}{hint}")
        elif not reported:
            self.log(f"{word}: {cause.reason}")

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)

    # ---- room

    def _refuse_missing_gpus(self) -> None:
        if not self.gpus:
            return
        there = self.ray.cluster_resources()
        if there.get("GPU", 0) < 1:
            cpus = f"{there.get('CPU', 0):g} CPUs"
            message = (
                f"asks for {self.wanted} GPUs, and the Ray cluster has {cpus} and no GPU; engine.gpus=null runs on them"
            )
            raise SetupError(Fault(message, "engine.gpus"))

    def _start_workers(self) -> None:
        """Starts as many workers as there is room for, and waits for room as `backoff` allows.

        Raises:
            SetupError: there are still too few.
        """
        pauses = iter(self.settings.backoff)
        while True:
            try:
                self.workers.start(self.node)
                return
            except NoRoom as error:
                self.workers.release()
                pause = next(pauses, None)
                if pause is None or (self.cluster.is_own and self.starts == 0):
                    raise SetupError(Fault(str(error), "engine.launcher")) from None
                self.log(f"{error}; tries again in {pause:g} s")
                self.workers.request_machines()
                self._wait(pause)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.signals:
                raise _Interrupted
            time.sleep(min(0.1, seconds))

    # ---- one start

    def _train(self) -> tuple[int, failure.Cause | None, bool]:
        """Has the workers train. Returns exit code, cause, and whether a worker has printed it."""
        self._start_processes()
        began = looked = time.monotonic()
        has_room = False  # rank 0 knows that there is room for more workers
        until: float | None = None
        sent = 0
        workers = self.workers.all
        asked = {worker.agent.report.remote(POLL): number for number, worker in enumerate(workers)}
        ended: dict[int, failure.Cause | None] = {}
        while asked:
            done, _ = self.ray.wait(list(asked), num_returns=1, timeout=0.2)
            for ref in done:
                number = asked.pop(ref)
                worker = workers[number]
                try:
                    worker.report = found = self.ray.get(ref)
                except self.ray.exceptions.RayError:  # of whatever kind: it does not answer
                    ended[number] = failure.Cause(
                        number, "a worker was lost: its machine or its CPU is gone", 5, lost=True
                    )
                    continue
                self._print_output(worker)
                if number == 0:
                    self.folder, self.newest = found.run or self.folder, found.newest or self.newest
                if found.code is None:
                    asked[worker.agent.report.remote(POLL)] = number
                else:
                    ended[number] = found.cause or (failure.end_of(number, found.code) if found.code else None)
            for signal_number in self.signals[sent:]:
                self._send(signal_number)
                sent += 1
                if sent > 1:
                    until = time.monotonic() + GRACE
            failed = any(cause and workers[number].report.code != MAKES_ROOM for number, cause in ended.items())
            if failed and until is None and not self.signals:
                until = time.monotonic() + GRACE
            if until is not None and time.monotonic() > until:
                break
            if not has_room and not ended and time.monotonic() - looked > POLL:
                looked = time.monotonic()
                if looked - began > self.settings.resize_cooldown_s and (more := self.workers.room_for_more()):
                    total = len(workers) + more
                    more_workers = f"{more} more worker{'s' * (more > 1)}"
                    self.log(f"there is room for {more_workers}: the run continues with {total} from the next epoch")
                    has_room = True
                    workers[0].agent.make_room.remote()
        return self._verdict(ended)

    def _verdict(self, ended: Mapping[int, failure.Cause | None]) -> tuple[int, failure.Cause | None, bool]:
        reports = {number: self.workers.all[number].report for number in ended}
        codes = {number: report.code for number, report in reports.items()}
        reported = any(report.reported for report in reports.values())
        left = set(codes.values())  # who comes late to the end of the others ends as if by a signal
        if len(ended) == len(self.workers) and {MAKES_ROOM} <= left <= {MAKES_ROOM, 143} and not self.signals:
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

    def _start_processes(self) -> None:
        world, counts = len(self.workers), dict[str, int]()
        for worker in self.workers.all:
            counts[worker.node] = counts.get(worker.node, 0) + 1
        # Machines with unlike numbers of workers: each worker counts as a machine.
        local = next(iter(counts.values())) if len(set(counts.values())) == 1 else 1
        cfg = sized(self.cfg, self.wanted, local, world // local)
        if self.starts:  # workers show notices at the first start alone
            for notice in (cfg.notices or [])[len(self.cfg.notices or []) :]:
                self.log(f"warning: {notice.text}")
        first, self.node = self.workers.all[0].about, self.workers.all[0].node
        on_one = len({worker.about["host"] for worker in self.workers.all}) == 1
        common = {n: v for n, v in os.environ.items() if n.startswith(_CARRIED)}
        common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local)}
        common |= {"MASTER_ADDR": "127.0.0.1" if on_one else first["ip"], "MASTER_PORT": str(first["port"])}
        common |= {LAUNCH: self.name, ATTEMPT: str(self.starts)}
        common |= {POOL: json.dumps({"launch": self.name, "storage": self._storage()})}
        common.setdefault("OMP_NUM_THREADS", str(max(1, int(self.settings.cpus_per_worker))))
        here, began = os.getcwd(), []  # noqa: PTH109
        sent = self.workers.send_code()
        for number, (worker, (roots, sealed)) in enumerate(zip(self.workers.all, sent, strict=True)):
            rank = {"RANK": str(number), "LOCAL_RANK": str(number % local), "NODE_RANK": str(number // local)}
            if self.gpus:
                beside = [w for w in self.workers.all if w.node == worker.node] if local > 1 else [worker]
                rank["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for w in beside for gpu in w.gpus)
            folder = (self.settings.working_dir or here).replace("{node}", worker.node)
            if self.settings.working_dir is None and here not in worker.about["shared"]:
                self._refuse_sharded_files(cfg)
            order = Order(cfg, roots, self.job.command[3:]).pack()
            environment = {**common, **rank, SEALED: sealed, **cfg.engine.env}
            began.append(worker.agent.begin.remote(order, environment, folder, f"{self.name}-{self.starts}"))
        self.starts += 1
        try:
            failed = [reason for reason in self.ray.get(began, timeout=START) if reason]
        except self.ray.exceptions.RayError:
            return  # it is gone: the first report shows it
        if failed:
            message = f"a worker cannot start in its working directory: {failed[0]}"
            raise SetupError(Fault(message, "engine.launcher.params.working_dir"))

    def _refuse_sharded_files(self, cfg: Config) -> None:
        """Refuses a run that needs a shared folder where workers do not share this command's."""
        sharded = cfg.engine.backend is not None and cfg.engine.backend != "ddp"
        if self.settings.storage_path is not None and sharded:
            message = (
                f"{cfg.engine.backend} writes a checkpoint in pieces, on each worker: they need a folder they share"
            )
            raise ConfigError(Fault(message, "engine.launcher.params.storage_path"))

    def _storage(self) -> str | None:
        path = self.settings.storage_path
        return path if path is None or "://" in path else str(Path(path).expanduser().absolute())

    def _print_output(self, worker: Worker) -> None:
        for stream, text in worker.output():
            self._print(stream, text)

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
        for worker in self.workers.all:
            worker.agent.signal.remote(number)


class _Interrupted(Exception):
    """A signal came while no worker ran."""
