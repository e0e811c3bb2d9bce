"""Train a run on a Ray cluster, on as many workers as it has room for, and restart them if one is lost.

Ray finds room for the workers, starts an agent on each (`deeplightning_ray.agent`), and reports when one is lost. An
agent starts one process of the run, as on one machine: its rank is in its environment, and it has its own signals,
exit code and main thread.

Ray Train 2.60 does not replace this file. In a prototype, each of its workers started such a process and waited for it
(two busy CPU cores, November 2026; ours in brackets). Ctrl-C, SIGTERM and a change of size kill the processes by
SIGKILL, so no checkpoint is saved; the command exits with 1 (130, 143). `max_failures` also restarts a config error. An
error has one exception per rank, without order. An elastic run has no limit on its wait for room. The next processes
start 7 s after a lost process (2 s), and 64 s after a lost node (2 s). Two processes that do nothing take 15 s and 13
CPU s (3 s and 2 CPU s), and waiting for them takes 0.8 GB (0.2 GB). `ray.train.report` blocks until all ranks call it.
Ray Train would replace about 120 lines, all in `Supervisor`; signals, output, causes and growing at the start of an
epoch would need a second channel beside it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deeplightning.config.machine import world_size
from deeplightning.config.own_runs import note_launched
from deeplightning.config.schema import Config
from deeplightning.faults import ConfigError, Fault, SetupError, count
from deeplightning.launch import Job
from deeplightning.own_code import SEALED
from deeplightning.process import failure, ranks
from deeplightning.process.identity import ATTEMPT, LAUNCH
from deeplightning.process.streams import INTERRUPTED
from deeplightning.process.terminal import say, say_path
from deeplightning.tracking.environment import git_state
from deeplightning_ray.cluster import Connection
from deeplightning_ray.resize import resize_config
from deeplightning_ray.storage import POOL, RESIZE_EXIT_CODE
from deeplightning_ray.worker_stdin import WorkerJob
from deeplightning_ray.workers import POLL_SECONDS, START_SECONDS, NoRoom, Worker, Workers

if TYPE_CHECKING:
    from deeplightning_ray.launcher import Ray

GRACE_SECONDS = ranks.SHUTDOWN_SECONDS + 2 * ranks.EXIT_SECONDS  # for the other workers to exit after one has failed

_PASSED_PREFIXES = (
    *("DEEPLIGHTNING_CACHE", "DEEPLIGHTNING_DEBUG", "DEEPLIGHTNING_TRACKING_WAIT", "DEEPLIGHTNING_TRIAL"),
    *("MLFLOW_", "HF_", "TORCH_", "NCCL_", "GLOO_", "OMP_", "GOMP_", "CUBLAS_", "PYTHONHASHSEED"),
    *("AWS_", "GOOGLE_APPLICATION_"),
)
"""Prefixes of the variables that are passed to the workers."""


class Supervisor:
    """Start the workers of a run, wait for their end, and restart them.

    Args:
        settings: the launcher.
    """

    def __init__(self, settings: Ray, job: Job, cluster: Connection):
        import ray

        self.ray, self.settings, self.job, self.cluster = ray, settings, job, cluster
        self.cfg, self.redact = job.cfg, job.cfg.redact
        self.gpus = bool(self.cfg.engine.gpus)
        if self.cfg.engine.gpus == "auto":
            found = int(ray.cluster_resources().get("GPU", 0))
            self.gpus = found > 0
            self.cfg = replace(self.cfg, engine=replace(self.cfg.engine, gpus=found or None))
        self.wanted = world_size(self.cfg.engine)
        bundle = {"CPU": settings.cpus_per_worker, **({"GPU": 1.0} if self.gpus else {})}
        if not any(bundle.values()):
            message = "0: Ray can reserve nothing for a worker without a GPU"
            raise ConfigError(Fault(message, "engine.launcher.params.cpus_per_worker"))
        self.workers = Workers(cluster, bundle, *settings.bounds(self.wanted), git_state())
        self.name, self.starts, self.restarts = f"ray-{secrets.token_hex(6)}", 0, 0
        self.folder: str | None = None  # of the run, on the machine of rank 0
        self.newest: Path | None = None
        self.node: str | None = None  # the machine of rank 0
        self.signals: list[int] = []  # received by this command

    def log(self, text: str) -> None:
        say(self.redact(text), err=True)

    def run(self) -> int:
        """Start workers until the run ends; return its exit code."""
        self._refuse_missing_gpus()
        limit = self.cfg.engine.max_restarts
        before = {n: signal.signal(n, lambda number, _: self.signals.append(number)) for n in INTERRUPTED}
        try:
            while True:
                self._start_workers()
                if self.signals:
                    raise _Interrupted
                code, cause, reported = self._train()
                if code == RESIZE_EXIT_CODE:
                    self.workers.release()
                    continue
                if code == 0 or self.signals or cause is None:
                    return INTERRUPTED[signal.Signals(self.signals[0])] if self.signals and code else code
                if cause.lost and self.restarts < limit:
                    self.restarts += 1
                    resumes = "resumes from its latest complete checkpoint" if self.folder else "begins again"
                    self.log(f"restart {self.restarts} of {limit}: {cause}; the run {resumes}")
                    self.workers.release()
                    continue
                self._log_cause(cause, reported)
                return code
        except _Interrupted:
            return INTERRUPTED[signal.Signals(self.signals[0])]
        finally:
            self.workers.release()
            self.workers.request_machines(0)
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.folder is not None:
                say_path(Path(self.folder), "Artifact storage path: ")

    def _log_cause(self, cause: failure.Cause, reported: bool) -> None:
        word = f"error [{cause.whose}]" if cause.whose else "error"
        if cause.lost:
            limit = self.cfg.engine.max_restarts
            used = {0: "", 1: "; the restart is used up"}.get(limit, f"; the {limit} restarts are used up")
            self.log(f"{word}: {cause.reason}{used}{failure.resume_hint(self.newest)}")
        elif not reported:
            self.log(f"{word}: {cause.reason}")

    def _refuse_missing_gpus(self) -> None:
        if not self.gpus:
            return
        resources = self.ray.cluster_resources()
        if resources.get("GPU", 0) < 1:
            cpus = f"{resources.get('CPU', 0):g} CPUs"
            message = (
                f"asks for {self.wanted} GPUs, and the Ray cluster has {cpus} and no GPU; engine.gpus=null runs on them"
            )
            raise SetupError(Fault(message, "engine.gpus"))

    def _start_workers(self) -> None:
        """Start as many workers as the cluster has room for, and wait for room as `backoff` allows.

        Raises:
            SetupError: too few workers fit after the last try.
        """
        retry_delays = iter(self.settings.backoff)
        while True:
            try:
                self.workers.start(self.node)
                return
            except NoRoom as error:
                self.workers.release()
                pause = next(retry_delays, None)
                if pause is None or (self.cluster.is_own and self.starts == 0):
                    raise SetupError(Fault(str(error), "engine.launcher")) from None
                self.log(f"{error}; tries again in {pause:g} s")
                self.workers.request_machines(self.workers.highest)
                self._wait(pause)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.signals:
                raise _Interrupted
            time.sleep(min(0.1, seconds))

    def _train(self) -> tuple[int, failure.Cause | None, bool]:
        """Train with these workers; return the exit code, the cause, and whether a worker has printed the cause."""
        self._start_processes()
        began = looked = time.monotonic()
        has_room = False  # whether rank 0 was notified that more workers can start
        until: float | None = None
        sent = 0
        workers = self.workers.all
        asked = {worker.agent.report.remote(POLL_SECONDS): number for number, worker in enumerate(workers)}
        ended: dict[int, failure.Cause | None] = {}
        while asked:
            done, _ = self.ray.wait(list(asked), num_returns=1, timeout=0.2)
            for ref in done:
                number = asked.pop(ref)
                worker = workers[number]
                try:
                    worker.report = found = self.ray.get(ref)
                except self.ray.exceptions.RayError:  # of any kind: the worker does not answer
                    ended[number] = failure.Cause(
                        number, "a worker was lost: its machine or its CPU is gone", 5, lost=True
                    )
                    continue
                self._print_output(worker)
                if number == 0:
                    self.folder, self.newest = found.run or self.folder, found.newest or self.newest
                if found.code is None:
                    asked[worker.agent.report.remote(POLL_SECONDS)] = number
                else:
                    ended[number] = found.cause or (failure.cause_of_exit(number, found.code) if found.code else None)
            for signal_number in self.signals[sent:]:
                self._send_signal(signal_number)
                sent += 1
                if sent > 1:
                    until = time.monotonic() + GRACE_SECONDS
            failed = any(cause and workers[number].report.code != RESIZE_EXIT_CODE for number, cause in ended.items())
            if failed and until is None and not self.signals:
                until = time.monotonic() + GRACE_SECONDS
            if until is not None and time.monotonic() > until:
                break
            if not has_room and not ended and time.monotonic() - looked > POLL_SECONDS:
                looked = time.monotonic()
                if looked - began > self.settings.resize_cooldown_s and (more := self.workers.room_for_more()):
                    total = len(workers) + more
                    room = f"there is room for {count(more, 'more worker')}"
                    self.log(f"{room}: the run continues with {total} from the next epoch")
                    has_room = True
                    workers[0].agent.make_room.remote()
        return self._outcome(ended)

    def _outcome(self, ended: Mapping[int, failure.Cause | None]) -> tuple[int, failure.Cause | None, bool]:
        reports = {number: self.workers.all[number].report for number in ended}
        codes = {number: report.code for number, report in reports.items()}
        reported = any(report.reported for report in reports.values())
        exit_codes = set(codes.values())  # a worker that notices the end of the others late exits as if by a signal
        if (
            len(ended) == len(self.workers)
            and {RESIZE_EXIT_CODE} <= exit_codes <= {RESIZE_EXIT_CODE, 143}
            and not self.signals
        ):
            return RESIZE_EXIT_CODE, None, False
        causes = {number: cause for number, cause in ended.items() if cause is not None}
        # If rank 0 has succeeded, the run is complete, and a later loss of a worker does not matter.
        if not causes and len(ended) == len(self.workers):
            return 0, None, False
        if codes.get(0) == 0 and all(cause.lost for cause in causes.values()):
            return 0, None, False
        # Errors of the run rank before losses, which they may cause; a killed worker ranks before those that lost it.
        ordered = sorted(causes.values(), key=lambda c: (c.lost, (codes.get(c.rank) or 0) > 0))
        hangs = failure.Cause(0, "a worker was lost: it does not answer", 5, lost=True)
        cause = ordered[0] if ordered else hangs
        return cause.exit_code, cause, reported

    def _start_processes(self) -> None:
        world, counts = len(self.workers), dict[str, int]()
        for worker in self.workers.all:
            counts[worker.node] = counts.get(worker.node, 0) + 1
        # Machines with different numbers of workers: each worker counts as a machine.
        local = next(iter(counts.values())) if len(set(counts.values())) == 1 else 1
        cfg = resize_config(self.cfg, self.wanted, local, world // local)
        if self.starts:  # workers show notices only at the first start
            for notice in (cfg.notices or [])[len(self.cfg.notices or []) :]:
                self.log(f"warning: {notice.text}")
        first, self.node = self.workers.all[0].about, self.workers.all[0].node
        on_one = len({worker.about["host"] for worker in self.workers.all}) == 1
        common = {n: v for n, v in os.environ.items() if n.startswith(_PASSED_PREFIXES)}
        common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local)}
        common |= {"MASTER_ADDR": "127.0.0.1" if on_one else first["ip"], "MASTER_PORT": str(first["port"])}
        common |= {LAUNCH: self.name, ATTEMPT: str(self.starts)}
        common |= {POOL: json.dumps({"launch": self.name, "storage": self._storage_address()})}
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
            packed = WorkerJob(cfg, roots, self.job.command[3:]).pack()
            environment = {**common, **rank, SEALED: sealed, **cfg.engine.env}
            began.append(worker.agent.begin.remote(packed, environment, folder, f"{self.name}-{self.starts}"))
        self.starts += 1
        try:
            failed = [reason for reason in self.ray.get(began, timeout=START_SECONDS) if reason]
        except self.ray.exceptions.RayError:
            return  # the worker is lost; its first report shows that
        if failed:
            message = f"a worker cannot start in its working directory: {failed[0]}"
            raise SetupError(Fault(message, "engine.launcher.params.working_dir"))

    def _refuse_sharded_files(self, cfg: Config) -> None:
        """Reject a run that needs a shared folder if the workers do not share that of this command."""
        sharded = cfg.engine.backend is not None and cfg.engine.backend != "ddp"
        if self.settings.storage_path is not None and sharded:
            message = (
                f"{cfg.engine.backend} writes a checkpoint in shards, one per worker: the workers need a shared folder"
            )
            raise ConfigError(Fault(message, "engine.launcher.params.storage_path"))

    def _storage_address(self) -> str | None:
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

    def _send_signal(self, number: int) -> None:
        for worker in self.workers.all:
            worker.agent.signal.remote(number)


class _Interrupted(Exception):
    """Raised on a signal while no worker runs."""
