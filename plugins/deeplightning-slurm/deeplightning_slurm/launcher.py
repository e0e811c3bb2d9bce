"""Submit a run as a job of Slurm, and follow it to its end.

submitit writes the batch script. The tasks of the job run `deeplightning train` with frozen copies of config and code:
nothing is unpickled, and no task needs submitit. submitit is imported only where a job is submitted or planned.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time as clock
from pathlib import Path
from typing import Any

from deeplightning.config.machine import local_size
from deeplightning.config.tree import dump
from deeplightning.faults import ConfigError, Fault, SetupError
from deeplightning.launch import Job, Start
from deeplightning.launch.sealed import seal
from deeplightning.own_code import ROOTS, SEALED, original_roots
from deeplightning.process.identity import LAUNCH
from deeplightning.process.terminal import say
from deeplightning.runfolder import make_private
from deeplightning.tracking.environment import git_state
from deeplightning_slurm.batch_script import FOLDER, NUMBER, REQUEUE_FILE, VARIABLES, after_tasks, seconds_of
from deeplightning_slurm.commands import check_slurm, submit
from deeplightning_slurm.follow import Follower, log_of
from deeplightning_slurm.requeue import JobHooks, job_here
from deeplightning_slurm.trial_array import TrialArray, task_here

WARNING_SECONDS = 120  # before the end of its time, a job saves a checkpoint and is requeued

_CODE_FOLDER = ".sealed"  # holds a job's frozen code, see `deeplightning.sweep.frozen_code.FOLDER`


class Slurm:
    """Submit `deeplightning train` as a job, and print what its first process writes until it ends.

    The job continues after Ctrl-C, and when the shell is closed. Its machines must see the working directory and
    `folder`. The job has as many nodes as `engine.num_nodes`, and on each a task per GPU, or `engine.processes`.

    Args:
        partition, account, qos, constraint: as for sbatch.
        time: how long the job may run, in minutes or in Slurm's notation (`2-12:00:00`); None: the partition's limit.
            Shortly before that, it saves a checkpoint, is requeued, and resumes the same run.
        mem: memory of each node, as for sbatch: `16G`.
        cpus_per_task: cores for each process and its loader's workers; None: Slurm's default, usually one.
        gpus_per_node: GPUs of each node; None: one for each task if `engine.gpus` is set.
        tasks_per_node: tasks on each node; required if `engine.gpus` is auto.
        sbatch: further options of sbatch without their dashes; true for those without a value.
        srun: further arguments of srun.
        setup: shell lines that the job runs before its tasks: modules, a virtual environment, variables.
        python: the command that starts Python in a task; None: the Python of this process. In a container:
            `apptainer exec image.sif python`.
        master_addr, master_port: where rank 0 listens; None: the job's first node, at a port derived from its number.
        warning: seconds before the end of `time` at which a checkpoint is saved.
        max_requeues: maximum number of requeues; None: no limit. The job ends after three starts in a row without a
            trained batch, because `time` is too short.
        name: name of the job.
        folder: contains a folder for each job, with frozen config and code, the batch script and the tasks' output.
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
        warning: int = WARNING_SECONDS,
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
            raise ValueError(f"max_requeues is {max_requeues}; it must be at least 0, or null")
        seconds = None if "signal" in (sbatch or {}) else seconds_of(limit := (sbatch or {}).get("time", time))
        if seconds is not None and seconds <= warning:
            raise ValueError(
                f"time is {limit} ({seconds} s), but the job saves and is requeued {warning} s before its end, so it "
                "would never train. Increase time, or reduce warning"
            )
        self.max_requeues = max_requeues
        self.partition, self.time, self.mem, self.name, self.folder = partition, time, mem, name, Path(folder)
        self.cpus_per_task, self.gpus_per_node, self.tasks_per_node = cpus_per_task, gpus_per_node, tasks_per_node
        self.account, self.qos, self.constraint, self.warning = account, qos, constraint, warning
        self.sbatch, self.srun, self.setup = sbatch or {}, srun or [], setup or []
        self.python = shlex.split(python) if python else [sys.executable]
        self.master_addr, self.master_port = master_addr, master_port

    def plan(self, job: Job) -> list[Start]:
        """Return the tasks of the job, and the batch script that starts them."""
        folder, nodes = self.new_folder(), job.cfg.engine.num_nodes
        where = "a node allocated by Slurm" if nodes == 1 else f"each of {nodes} nodes allocated by Slurm"
        command = [*self.python, "-m", "deeplightning", "train", str(folder / "config.yaml")]
        return [Start(command, self._tasks(job), where, script=self.script(job, folder))]

    def run(self, job: Job) -> int:
        """Submit the job and follow it; see `deeplightning.launch.Launcher`.

        Raises:
            SetupError: Slurm is not installed here, does not answer or refuses the job.
            RunError: the job was cancelled, lost its node, or ran out of time or memory.
        """
        check_slurm()
        outer_job, task = os.environ.get("SLURM_JOB_ID"), task_here()
        if outer_job and task is None and not sys.stdin.isatty():
            message = (
                f"this command runs in Slurm job {outer_job} and would submit another: `srun deeplightning train …` "
                "starts a process in each task, `engine.launcher=null` one process here"
            )
            raise SetupError(Fault(message, "engine.launcher"))
        folder = self.new_folder() if task is None else task.folder
        script = self.script(job, folder)
        try:
            make_private(folder, folder.parent)
            (folder / "config.yaml").write_text(_frozen_config(job), encoding="utf-8")
            seal(folder / _CODE_FOLDER, git=git_state())
        except OSError as error:
            message = f"{folder}: the job's folder cannot be written: {error.strerror}"
            raise SetupError(Fault(message, "engine.launcher.params.folder")) from error
        if task is not None:
            task.release()
            number = task.number
        else:
            number = submit(script, folder)
        follower = Follower(number, folder)
        try:
            return follower.follow()
        except KeyboardInterrupt as error:
            if task is not None:  # the user follows the search, not this job
                task.cancel()
                return follower.follow_cancelled()
            log = _quoted(log_of(folder, number))
            say(f"job {number} continues without this command; follow it: tail -F {log}", err=True)
            say(f"its state: squeue -j {number}; end it: scancel {number}", err=True)
            return getattr(error, "exit_code", 130)

    # ---- the submitted script

    def trial_jobs(self, job: Job, trials: int, note: Path) -> TrialArray:
        """Return the array of a search whose trials have the size of `job`; see `TrialArray`."""
        return TrialArray(self.new_folder(), trials, note, lambda folder, tasks: self.script(job, folder, tasks))

    @staticmethod
    def hooks_here() -> JobHooks | None:
        """Return the hooks of this process in its Slurm job, or None outside a job."""
        number = job_here()
        return None if number is None else JobHooks(number)

    def new_folder(self) -> Path:
        """Return the path of a new folder, named by the current time; several commands may need one at once."""
        name = f"{clock.strftime('%Y-%m-%d_%H-%M-%S')}_{os.urandom(3).hex()}"
        return self.folder.expanduser().absolute() / name

    def _tasks(self, job: Job) -> int:
        """Return the number of tasks on each node."""
        if self.tasks_per_node is not None:
            return self.tasks_per_node
        if job.cfg.engine.gpus == "auto":
            message = "auto: a job needs a number of GPUs; set it here, or set tasks_per_node of engine.launcher"
            raise ConfigError(Fault(message, "engine.gpus"))
        return local_size(job.cfg.engine)

    def script(self, job: Job, folder: Path, array: int | None = None) -> str:
        """Return the batch script that submitit generates.

        Args:
            folder: folder of the job, or of all tasks of the array.
            array: number of tasks of the array, which are held until they are released; None: one job.

        Raises:
            SetupError: submitit is not installed.
        """
        try:
            from submitit.slurm.slurm import SlurmExecutor
        except ImportError as error:
            message = f"submitting a job needs the package submitit: pip install 'deeplightning[slurm]' ({error})"
            raise SetupError(Fault(message, "engine.launcher")) from error

        python = " ".join(word if word.isidentifier() else _quoted(word) for word in self.python)
        command = f'{python} -m deeplightning train "${FOLDER}/config.yaml"'

        class Executor(SlurmExecutor):
            """Generate the script of a command; submitit itself would run a pickled function.

            Uses a private method of submitit 1.5, since no public one returns the script, or the output of a running
            command. If a release moves the method, submission fails.
            """

            @classmethod
            def affinity(cls) -> int:
                return 2  # `plan` generates a script without Slurm, too

            @property
            def script(self) -> str:
                return self._make_submission_file_text(command, "")

        executor = Executor(folder if array is None else folder / "%a")
        engine, tasks = job.cfg.engine, self._tasks(job)
        gpus = tasks if self.gpus_per_node is None and engine.gpus is not None else self.gpus_per_node
        options: dict[str, object] = {"signal": f"USR1@{self.warning}", "requeue": True}
        options |= {option.replace("-", "_"): value for option, value in self.sbatch.items()}  # submitit's own names
        options |= {"hold": True} if array is not None else {}
        cpus = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []  # srun does not inherit sbatch's
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
            srun_args=["--open-mode=append", "--export=ALL", *cpus, *self.srun],  # also after sbatch's --export=NONE
            setup=[*self._variables(folder, is_array=array is not None), *self.setup],
            teardown=after_tasks(engine.max_restarts, self.max_requeues),
            additional_parameters={option: v for option, v in options.items() if v is not None and v is not False},
        )
        if array is not None:
            executor.parameters |= {"map_count": array, "array_parallelism": array}
        return executor.script

    def _variables(self, folder: Path, is_array: bool) -> list[str]:
        """Return shell lines that set what the frozen config does not contain."""
        lines = ["trap : TERM  # the tasks get it too; the lines after them must still run"]
        if is_array:
            lines += [f"{NUMBER}=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"]
            lines += [f"{FOLDER}={_quoted(folder)}/$SLURM_ARRAY_TASK_ID", f'. "${FOLDER}/{VARIABLES}"']
        else:
            lines += [f"{NUMBER}=$SLURM_JOB_ID", f"{FOLDER}={_quoted(folder)}"]
        lines += [f'export {LAUNCH}="slurm-$SLURM_JOB_ID"', f'export {REQUEUE_FILE}="${FOLDER}/again"']
        lines += [f'rm -rf "${REQUEUE_FILE}.causes"; mkdir "${REQUEUE_FILE}.causes"']
        if self.master_addr is not None:
            lines.append(f"export MASTER_ADDR={_quoted(self.master_addr)}")
        if self.master_port is not None:
            lines.append(f"export MASTER_PORT={self.master_port}")
        # The config's copy is in another folder.
        lines.append(f"export {ROOTS}={_quoted(json.dumps(original_roots()))}")
        return [*lines, f'export {SEALED}="${FOLDER}/{_CODE_FOLDER}"']


def _frozen_config(job: Job) -> str:
    """Return the config for tasks that may start hours later, without values from the environment."""
    settings = job.cfg.public()
    if isinstance(job.cfg.engine.gpus, list):
        settings["engine"]["gpus"] = len(job.cfg.engine.gpus)  # a job numbers its GPUs from 0
    return dump(settings)


def _quoted(word: object) -> str:
    return shlex.quote(str(word))
