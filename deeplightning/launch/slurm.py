"""A run as a job of Slurm: submitted by submitit, and followed to its end; or sent back into the queue from inside.

submitit writes the batch script and hands it to sbatch. What the tasks of the job run is `deeplightning train` with
frozen copies of config and code, so that nothing pickled is run, and no task needs submitit. submitit is imported only
where a job is submitted or planned.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import sys
import time as clock
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deeplightning.checks.trust import note_launched
from deeplightning.config.tree import dump
from deeplightning.engine.plan import local_size
from deeplightning.faults import ConfigError, Fault, RunError, SetupError
from deeplightning.launch.job import Job, Start
from deeplightning.launch.sealed import seal
from deeplightning.launch.slurm_array import Array, place_here
from deeplightning.launch.slurm_commands import ask, state_of, submit, there_is_slurm
from deeplightning.launch.slurm_script import AGAIN, FOLDER, NUMBER, VARIABLES, after_tasks, seconds_of
from deeplightning.own_code import ROOTS, SEALED, original_roots
from deeplightning.process import failure
from deeplightning.process.identity import LAUNCH, slurm_step
from deeplightning.process.terminal import say
from deeplightning.runfolder import make_private, permissions_of
from deeplightning.tracking.environment import git_answers

SILENT = 600.0  # seconds without any answer after which a job is no longer followed
LOOK = 0.25  # seconds between two looks at what a job has written
CANCELLED = 60.0  # seconds that an interrupted job has for its end
SELDOM = 15.0  # seconds at most between two questions about its state
WARNING = 120  # seconds before the end of its time in which a job saves a checkpoint and goes back into the queue

_SEAL = ".sealed"  # the folder of a job's code as it was submitted, see `deeplightning.tune.sealed.FOLDER`

WAITS = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
LIVES = WAITS | {"CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
"""States of a job, https://slurm.schedmd.com/squeue.html; in any other it has ended."""


class Slurm:
    """Submits `deeplightning train` as a job, and follows what its first process says until it ends.

    The job continues after Ctrl-C, and when the shell is closed. Its machines see the working directory and
    `folder`. The job has as many nodes as `engine.num_nodes`, and on each a task per GPU, or `engine.processes`.

    Args:
        partition, account, qos, constraint: as for sbatch.
        time: minutes, or in Slurm's words (`2-12:00:00`) how long the job may run; None: what the partition allows.
            Before that ends it saves a checkpoint, goes back into the queue, and continues in the same run.
        mem: of each node, as for sbatch: `16G`.
        cpus_per_task: cores for each process and its loader's workers; None: Slurm's default, mostly one.
        gpus_per_node: None: as many as tasks, where `engine.gpus` asks for some.
        tasks_per_node: needed where `engine.gpus` is auto.
        sbatch: further options of sbatch without their dashes; true for those without a value.
        srun: further words for srun.
        setup: lines of shell that the job runs before its tasks: modules, a virtual environment, variables.
        python: how a task starts Python, as a line of shell; None: as this command was. In a container:
            `apptainer exec image.sif python`.
        master_addr, master_port: where rank 0 listens; None: the job's first node, at a port derived from its number.
        warning: seconds before the end of `time` in which a checkpoint is to be saved.
        max_requeues: how often at most the job goes back into the queue before the end of its `time`; None: as often as
            it needs. It ends where it has trained no batch in three starts in a row: `time` is too short.
        name: of the job.
        folder: for config and code as they were submitted, the batch script and what the tasks write; one below it
            for each job.
    """

    def __init__(
        self,
        *,
        partition: str | None = None,
        time: str | int | None = None,
        mem: str | None = None,
        cpus_per_task: int | None = None,
        gpus_per_node: int | None = None,
        tasks_per_node: int | None = None,
        account: str | None = None,
        qos: str | None = None,
        constraint: str | None = None,
        sbatch: dict[str, Any] | None = None,
        srun: list[str] | None = None,
        setup: list[str] | None = None,
        python: str | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        warning: int = WARNING,
        max_requeues: int | None = None,
        name: str = "deeplightning",
        folder: str = "slurm",
    ):
        for option, number in {"cpus_per_task": cpus_per_task, "tasks_per_node": tasks_per_node}.items():
            if number is not None and number < 1:
                raise ValueError(f"{option} is {number}; a task needs at least 1")
        if master_port is not None and not 0 < master_port < 2**16:
            raise ValueError(f"master_port is {master_port}; a port is a number from 1 to 65535")
        if max_requeues is not None and max_requeues < 0:
            raise ValueError(f"max_requeues is {max_requeues}; it is a number of times, from 0 on, or null")
        seconds = None if "signal" in (sbatch or {}) else seconds_of((sbatch or {}).get("time", time))
        if seconds is not None and seconds <= warning:
            raise ValueError(
                f"time is {time}, {seconds} s, and {warning} s before its end the job saves and returns to the queue: "
                "it would never train. Give more time, or a smaller warning"
            )
        self.max_requeues = max_requeues
        self.partition, self.time, self.mem, self.name, self.folder = partition, time, mem, name, Path(folder)
        self.cpus_per_task, self.gpus_per_node, self.tasks_per_node = cpus_per_task, gpus_per_node, tasks_per_node
        self.account, self.qos, self.constraint, self.warning = account, qos, constraint, warning
        self.sbatch, self.srun, self.setup, self.python = sbatch or {}, srun or [], setup or [], python
        self.master_addr, self.master_port = master_addr, master_port

    def plan(self, job: Job) -> list[Start]:
        """The tasks of the job, and the batch script that starts them."""
        folder, nodes = self.new_folder(), job.cfg.engine.num_nodes
        where = "a node that Slurm gives" if nodes == 1 else f"each of {nodes} nodes that Slurm gives"
        command = [*self._python(), "-m", "deeplightning", "train", str(folder / "config.yaml")]
        return [Start(command, self._tasks(job), where, script=self.script(job, folder))]

    def run(self, job: Job) -> int:
        """Submits the job and follows it; see `deeplightning.launch.Launcher`.

        Raises:
            SetupError: there are no commands of Slurm here, or Slurm does not answer or refuses the job.
            RunError: the job was cancelled, lost its node, or ran out of time or memory.
        """
        there_is_slurm()
        inside = os.environ.get("SLURM_JOB_ID")
        if inside and not sys.stdin.isatty():
            message = (
                f"this is job {inside} of Slurm already, and would submit another: `srun deeplightning train …` starts "
                "a process in each of its tasks, `engine.launcher=null` one process, here"
            )
            raise SetupError(Fault(message, "engine.launcher"))
        place = place_here()
        folder = self.new_folder() if place is None else place.folder
        script = self.script(job, folder)
        try:
            make_private(folder, folder.parent)
            with permissions_of(folder):
                (folder / "config.yaml").write_text(_frozen(job))
            seal(folder / _SEAL, git=git_answers(job.cfg.redact))
        except OSError as error:
            message = f"{folder}: the job's folder cannot be written: {error.strerror}"
            raise SetupError(Fault(message, "engine.launcher.params.folder")) from error
        if place is not None:
            place.release()
            number = place.number
        else:
            with permissions_of(folder):
                number = submit(script, folder)
        following = _Following(number, folder)
        try:
            return following.to_its_end()
        except KeyboardInterrupt as error:
            if place is not None:  # nobody would hear it
                place.cancel()
                return following.to_its_cancelled_end()
            _say(f"job {number} continues without this command; follow it: tail -F {_quoted(_log(folder, number))}")
            _say(f"its state: squeue -j {number}; end it: scancel {number}")
            return getattr(error, "exit_code", 130)

    # ---- what is submitted

    def array(self, job: Job, trials: int, note: Path) -> Array:
        """The jobs of a search; see `Array`.

        Args:
            job: whose sizes all trials have.
            trials: how many are to come.
            note: a file that keeps the number of the array.
        """
        return Array(self.new_folder(), trials, note, lambda folder, places: self.script(job, folder, places))

    def new_folder(self) -> Path:
        """A name that no launch has, from the time."""
        base = self.folder.expanduser().absolute() / clock.strftime("%Y-%m-%d_%H-%M-%S")
        number, folder = 1, base
        while folder.exists():
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
        return folder

    def _tasks(self, job: Job) -> int:
        """Of each node."""
        if self.tasks_per_node is not None:
            return self.tasks_per_node
        if job.cfg.engine.gpus == "auto":
            message = "auto: a job asks for a number of GPUs; give it here, or as tasks_per_node of engine.launcher"
            raise ConfigError(Fault(message, "engine.gpus"))
        return local_size(job.cfg.engine)

    def _python(self) -> list[str]:
        return shlex.split(self.python) if self.python else [sys.executable]

    def script(self, job: Job, folder: Path, places: int | None = None) -> str:
        """The batch script, as submitit makes it.

        Args:
            folder: of the job, or of all tasks of the array.
            places: tasks of the array, which wait until they are released; None: one job.

        Raises:
            SetupError: submitit is not installed.
        """
        try:
            from submitit.slurm.slurm import SlurmExecutor
        except ImportError as error:
            message = f"submitting a job needs the package submitit: pip install 'deeplightning[slurm]' ({error})"
            raise SetupError(Fault(message, "engine.launcher")) from error

        words = " ".join(word if word.isidentifier() else _quoted(word) for word in self._python())
        command = f'{words} -m deeplightning train "${FOLDER}/config.yaml"'

        class Executor(SlurmExecutor):
            """Of a command where submitit would run a pickled function; by a private method of submitit 1.5, whose
            public ones let nobody see the script, or what a command says before it has ended."""

            @classmethod
            def affinity(cls) -> int:
                return 2  # a script can be planned where there is no Slurm

            @property
            def script(self) -> str:
                return self._make_submission_file_text(command, "")

        executor = Executor(folder if places is None else folder / "%a")
        engine, tasks = job.cfg.engine, self._tasks(job)
        gpus = tasks if self.gpus_per_node is None and engine.gpus is not None else self.gpus_per_node
        more: dict[str, object] = {"signal": f"USR1@{self.warning}", "requeue": True}
        more |= {option.replace("_", "-"): value for option, value in self.sbatch.items()}
        more |= {"hold": True} if places is not None else {}
        cpus = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []  # srun forgets sbatch's
        executor.update_parameters(
            job_name=self.name,
            partition=self.partition,
            time=self.time,
            mem=self.mem,
            nodes=engine.num_nodes,
            ntasks_per_node=tasks,
            cpus_per_task=self.cpus_per_task,
            gpus_per_node=gpus,
            account=self.account,
            qos=self.qos,
            constraint=self.constraint,
            wckey=None,
            srun_args=["--open-mode=append", *cpus, *self.srun],
            setup=[*self._variables(folder, is_array=places is not None), *self.setup],
            teardown=after_tasks(engine.max_restarts, self.max_requeues),
            additional_parameters={option: value for option, value in more.items() if value not in (None, False)},
        )
        if places is not None:
            executor.parameters |= {"map_count": places, "array_parallelism": places}
        return executor.script

    def _variables(self, folder: Path, is_array: bool) -> list[str]:
        """Lines of shell that tell the tasks what the frozen config cannot."""
        lines = ["trap : TERM  # the tasks get it too; what is behind them must be reached"]
        if is_array:
            lines += [f"{NUMBER}=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"]
            lines += [f"{FOLDER}={_quoted(folder)}/$SLURM_ARRAY_TASK_ID", f'. "${FOLDER}/{VARIABLES}"']
        else:
            lines += [f"{NUMBER}=$SLURM_JOB_ID", f"{FOLDER}={_quoted(folder)}"]
        lines += [f'export {LAUNCH}="slurm-$SLURM_JOB_ID"', f'export {AGAIN}="${FOLDER}/again"']
        if self.master_addr is not None:
            lines.append(f"export MASTER_ADDR={_quoted(self.master_addr)}")
        if self.master_port is not None:
            lines.append(f"export MASTER_PORT={self.master_port}")
        lines.append(f"export {ROOTS}={_quoted(json.dumps(original_roots()))}")  # the copy of the config lies elsewhere
        lines.append(f'export {SEALED}="${FOLDER}/{_SEAL}"')
        return lines


def _frozen(job: Job) -> str:
    """The config as it is now, for tasks that may start hours later; what came from the environment is not in it."""
    settings = job.cfg.public()
    if isinstance(job.cfg.engine.gpus, list):
        settings["engine"]["gpus"] = len(job.cfg.engine.gpus)  # a job counts those that it was given from 0
    return dump(settings)


# ---- following


class _Following:
    """What a job's first process writes comes out here as it is written, until the job has ended."""

    def __init__(self, number: str, folder: Path):
        self.number, self.folder = number, folder
        self._out, self._err = _Tail(_log(folder, number)), _Tail(_log(folder, number, kind="err"))
        self._said = ""
        self._due, self._pause = 0.0, 1.0
        self._silent_since: float | None = None

    def to_its_end(self) -> int:
        """The exit code of the job.

        Raises:
            RunError: it did not end by itself.
            SetupError: Slurm knows nothing of it, or has not answered for long.
        """
        _say(f"job {self.number} is submitted; its config, script and logs are in {self.folder}")
        while True:
            ended = self._state()
            self._echo(to_the_end=ended is not None)
            if ended is not None:
                return self._verdict(ended)
            clock.sleep(LOOK)

    def to_its_cancelled_end(self) -> int:
        """The exit code of an interrupted job, when it has ended or `CANCELLED` seconds have passed."""
        self._due, self._pause, until = 0.0, 1.0, clock.monotonic() + CANCELLED
        while clock.monotonic() < until and (self._state() is None):
            self._echo(to_the_end=False)
            clock.sleep(LOOK)
        self._echo(to_the_end=True)
        return 130

    def _echo(self, to_the_end: bool) -> None:
        for tail, stream in ((self._err, sys.stderr), (self._out, sys.stdout)):
            if text := tail.more(to_the_end):
                stream.write(text)
                stream.flush()
                if re.search(r"Artifact storage path|^(error|srun|slurmstepd)", text, re.MULTILINE):
                    self._due, self._pause = 0.0, 1.0  # the end is near
                for folder in re.findall(r"^Artifact storage path: (.+)", text, re.MULTILINE):
                    note_launched(folder)

    def _state(self) -> dict[str, str] | None:
        """What Slurm says of the job when it has ended; None: it lives, or it is too early to ask again."""
        if clock.monotonic() < self._due:
            return None
        try:
            found = state_of(self.number)
        except TimeoutError as error:
            self._silent_since = self._silent_since or clock.monotonic()
            if clock.monotonic() - self._silent_since > SILENT:
                message = f"Slurm has not answered for {SILENT:.0f} s: {error}; job {self.number} may continue"
                raise SetupError(f"{message}: tail -F {_log(self.folder, self.number)}") from error
            self._tell(f"Slurm does not answer, which does not concern the job: {error}")
            found = {"JobState": "RUNNING"}
        else:
            self._silent_since = None
        if found is None:
            where = f"what it wrote is in {self.folder}"
            raise SetupError(f"Slurm no longer knows job {self.number}: how it ended is unknown; {where}")
        self._due = clock.monotonic() + self._pause
        self._pause = min(SELDOM, 1.5 * self._pause)
        state = found["JobState"]
        if state in WAITS:
            again = f" (restart {found['Restarts']})" if found.get("Restarts", "0") != "0" else ""
            reason = found.get("Reason", "None").replace("_", " ")
            if reason != "None":  # at first Slurm has none
                self._tell(f"job {self.number} waits{again}: {reason}")
        elif state == "RUNNING" and self._silent_since is None:
            self._tell(f"job {self.number} runs on {found.get('NodeList', 'its nodes')}")
        return None if state in LIVES else found

    def _tell(self, words: str) -> None:
        if words != self._said:
            self._said, self._pause = words, 1.0
            _say(words)

    def _verdict(self, found: Mapping[str, str]) -> int:
        state, (code, _, number) = found["JobState"], found.get("ExitCode", "0:0").partition(":")
        if state == "COMPLETED":
            return 0
        self._tell_of_others()
        where = f"its logs are in {self.folder}"
        if state == "FAILED" and int(code):
            _say(f"job {self.number} failed with exit code {code}; {where}")
            killed = int(code) > 128 and int(code) not in failure.INTERRUPTED.values()
            return 5 if killed else int(code)
        why = f" (signal {number})" if number not in ("", "0", "15") else ""
        raise RunError(f"job {self.number} ended as {state}{why}, after {found.get('RunTime', 'some time')}; {where}")

    def _tell_of_others(self) -> None:
        """The errors that processes beside the first have printed."""
        paths = self.folder.glob(f"{self.number}_*_log.err")
        for path in sorted(paths, key=lambda path: int(path.name.split("_")[-2])):
            text = path.read_text(errors="replace")
            if path != self._err.path and (found := re.search(r"^(error|Traceback)", text, re.MULTILINE)):
                sys.stderr.write(text[found.start() :])
        sys.stderr.flush()


class _Tail:
    """A file that grows, or is not there yet."""

    def __init__(self, path: Path):
        self.path, self._read = path, 0

    def more(self, to_the_end: bool) -> str:
        """The lines that were added since this was asked last; with `to_the_end` the last one may be broken off."""
        try:
            with self.path.open("rb") as file:
                self._read = min(self._read, os.fstat(file.fileno()).st_size)
                file.seek(self._read)
                added = file.read()
        except OSError:
            return ""
        whole = added if to_the_end else added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace")


def _log(folder: Path, number: str, rank: int = 0, kind: str = "out") -> Path:
    """Where submitit has a task write."""
    return folder / f"{number}_{rank}_log.{kind}"


def _say(words: str) -> None:
    say(words, err=True)


def _quoted(word: object) -> str:
    return shlex.quote(str(word))


# ---- from inside a job


def job_here(environment: Mapping[str, str] | None = None) -> str | None:
    """The number of the job that this process is a task of, or was started by one; None: it is in no step of one."""
    environment = os.environ if environment is None else environment
    if (step := slurm_step(environment)) is None:
        return None
    if array := environment.get("SLURM_ARRAY_JOB_ID"):  # which the last of its tasks has as its own number
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return step.removeprefix("slurm-").partition(".")[0]


def is_preempted(number: str) -> bool:
    """Whether Slurm takes the machines of a job away for another; False also where it does not say."""
    try:
        return (state_of(number) or {}).get("PreemptTime", "None") != "None"
    except TimeoutError:
        return False


def requeue_at_exit(number: str, done: int | str) -> None:
    """Has this process, as its very last act, send its job back into the queue, or have the batch script do so.

    It ends all of the job's processes. However often it is asked, that is done once.

    Args:
        done: since this start; see `AGAIN`.
    """
    global _job_to_requeue
    if _job_to_requeue is None:
        atexit.register(_requeue, number, done)
    _job_to_requeue = number


_job_to_requeue: str | None = None


def _requeue(number: str, done: int | str) -> None:
    _say(f"job {number} returns to the queue and resumes when Slurm restarts it")
    if file := os.environ.get(AGAIN):
        Path(file).write_text(str(done))
        return
    code, words = ask("scontrol", "requeue", number)
    if code != 0:
        hint = "`train.resume_ckpt=auto` resumes from last.ckpt"
        _say(f"error: Slurm does not start job {number} again: {words or f'exit code {code}'}; {hint}")
