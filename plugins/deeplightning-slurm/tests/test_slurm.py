"""Runs in Slurm: the real one, started here with two emulated nodes and no cgroups, and taken down at the end.

It needs root and Debian's `slurm-wlm` and `munge` (`apt-get install slurm-wlm munge`).
"""

import contextlib
import csv
import ctypes
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from commands import LIMIT_SECONDS, Outcome, environment, free_port
from conftest import digest

from deeplightning.config.examine import load_config
from deeplightning.config.own_runs import is_own
from deeplightning.config.target import is_installed
from deeplightning.faults import SetupError
from deeplightning.launch import Job, hooks_here
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.code import read_code

pytest.importorskip("deeplightning_slurm")

from deeplightning_slurm import Slurm, requeue
from deeplightning_slurm.batch_script import FOLDER, NUMBER, REQUEUE_FILE, after_tasks, seconds_of
from deeplightning_slurm.follow import Follower, log_of

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sh"))
LAUNCHER = "engine.launcher.type=Slurm"

CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
# A job that goes back into the queue waits a second longer than a credential lasts.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=5
MessageTimeout=20
LaunchParameters=use_interactive_step
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=5 GraceTime=20
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
PartitionName=gpu Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=5
"""

OWN = '''\
"""A user's own code, beside the config."""

import os
import pathlib
import signal
import time

import pytorch_lightning as pl


class Waits(pl.Callback):
    """Stops in the third batch of the second epoch until a file is there."""

    def __init__(self, until):
        self.until = pathlib.Path(until)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 2:
            print("waits", flush=True)
            longest = time.monotonic() + 600  # Slurm's tasks outlive tests that are killed
            while not self.until.exists():
                assert time.monotonic() < longest
                time.sleep(0.01)


class Dies(pl.Callback):
    """Rank 1 is killed in the third batch of the second epoch, the first time."""

    def __init__(self, times):
        self.times = pathlib.Path(times)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 2 and trainer.global_rank == 1 and not self.times.exists():
            self.times.touch()
            os.kill(os.getpid(), signal.SIGKILL)
'''


def dies_with_its_parent():
    """In a child: whatever becomes of the tests, no daemon of theirs stays (PR_SET_PDEATHSIG is 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Cluster:
    """A Slurm of two nodes on this machine."""

    def __init__(self, folder):
        self.folder, self.conf = folder, folder / "slurm.conf"
        self.daemons = []

    def up(self):
        folder = self.folder
        (folder / "state").mkdir()
        host = socket.gethostname().partition(".")[0]
        self.conf.write_text(CONF.format(host=host, folder=folder, ports=[free_port() for _ in range(4)]))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
        self.start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge.values())
        wait_for(lambda: (folder / "munge.socket").exists(), "munged")
        self.start("slurmctld", "-D", "-f", self.conf)
        for node in ("n1", "n2"):
            self.start("slurmd", "-D", "-f", self.conf, "-N", node)
        wait_for(lambda: "idle 2" in self.ask("sinfo", "-h", "-p", "main", "-o", "%T %D", check=False), "the nodes")

    @property
    def variables(self):
        return {"SLURM_CONF": str(self.conf), "MASTER_ADDR": "127.0.0.1"}

    def start(self, *command):
        with (self.folder / f"{command[0]}.{len(self.daemons)}.log").open("w") as log:
            path = shutil.which(command[0]) or f"/usr/sbin/{command[0]}"
            self.daemons.append(
                subprocess.Popen(
                    [path, *command[1:]],
                    stdout=log,
                    stderr=log,
                    env=environment(**self.variables),
                    preexec_fn=dies_with_its_parent,
                )
            )

    def ask(self, *command, check=True, cwd=None):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment(**self.variables),
            timeout=LIMIT_SECONDS,
            cwd=cwd or self.folder,
        )
        assert done.returncode == 0 or not check, (command, done.stdout, done.stderr)
        return done.stdout if check else done.stdout + done.stderr

    def about(self, job, check=True):
        """What Slurm knows of a job; without `check`, nothing where it knows no such job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", "-o", job, check=check)))

    def down(self):
        self.ask("scancel", "--user=root", "--full", "--signal=KILL", check=False)
        self.ask("scancel", "--user=root", check=False)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.ask("squeue", "-h", check=False).strip(), "the end of the jobs", 20)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


LONG = 4 * LIMIT_SECONDS  # seconds; processes that Slurm starts import all they need, once more after a requeue


def wait_for(happened, what, longest=LONG):
    until = time.monotonic() + longest
    while not (found := happened()):
        assert time.monotonic() < until, f"timed out after {what}"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def cluster():
    """The Slurm that this file's tests share."""
    names = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
    missing = [name for name in names if shutil.which(name) is None and not Path(f"/usr/sbin/{name}").exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge")
    if os.getuid() != 0:
        pytest.skip("Slurm's daemons start the processes of others: they need root")
    folder = Path(tempfile.mkdtemp(prefix="deeplightning-slurm-"))  # a socket's path must be short
    folder.chmod(0o755)
    made = Cluster(folder)
    try:
        made.up()
        yield made
    finally:
        if made.daemons:
            made.down()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory, tiny):
    """A working directory of jobs, with a config and own code beside it in a folder below."""
    folder = tmp_path_factory.mktemp("jobs") / "a place"
    (folder / "configs").mkdir(parents=True)
    shutil.copy(tiny, folder / "configs" / "tiny.yaml")
    (folder / "configs" / "mine.py").write_text(OWN)
    return folder


@pytest.fixture
def submit(cluster, work, command):
    """`submit(override, …)` is the command that submits and follows a job, just started."""

    def start(*overrides, config="configs/tiny.yaml", **variables):
        given = [LAUNCHER, "engine.launcher.params.master_addr=127.0.0.1", *overrides]
        return command.start("train", config, *given, cwd=work, **cluster.variables | variables)

    return start


def job_of(running):
    """The number of the job that a command has submitted."""
    found = wait_for(lambda: re.search(r"job (\d+) is submitted", running._read("err")) or ended(running), "the job")
    return found[1]


def ended(running):
    assert not running._read("code"), running.end()


def end_of(running):
    """How it ended, when it has."""
    wait_for(lambda: running._read("code"), "its end")
    return running.end()


def stands(running):
    """When rank 0 waits in its batch."""
    wait_for(lambda: "waits\n" in running._read("out"), "the batch")


# ---- without Slurm


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[03-04]",
}


def test_the_address_of_the_config_wins(command, tiny, place):
    """master_addr and master_port of the launcher hold for tasks that srun starts, too."""
    params = "engine.launcher.params={master_addr: 10.0.0.9, master_port: 4711}"
    planned = command(
        "plan", tiny, LAUNCHER, params, "engine.processes=2", cwd=place, **STEP | {"MASTER_ADDR": "n9"}, code=0
    )
    assert "MASTER_ADDR: 10.0.0.9\n" in planned.out
    assert "MASTER_PORT: '4711'\n" in planned.out


def test_plan_prints_the_script(command, tiny, place, tmp_path):
    """What would be handed to sbatch, with every option, and nothing is written; no Slurm is needed."""
    params = (
        "{partition: long, time: '1-00:00:00', mem: 4G, cpus_per_task: 3, account: us, constraint: a100, qos: high, "
        f"sbatch: {{mail_type: END, exclusive: true, requeue: false}}, setup: [module load x], folder: '{tmp_path}/s', "
        "python: apptainer exec i.sif python, master_port: 4711, warning: 60}"
    )
    given = (LAUNCHER, f"engine.launcher.params={params}", "engine.num_nodes=2", "engine.processes=2")
    planned = command("plan", tiny, *given, cwd=place, code=0)
    for option in (
        *("partition=long", "time=1-00:00:00", "mem=4G", "cpus-per-task=3", "account=us", "constraint=a100"),
        *("qos=high", "mail-type=END", "exclusive", "nodes=2", "ntasks-per-node=2", "signal=USR1@60"),
    ):
        assert f"#SBATCH --{option}\n" in planned.out.replace("'\n", "\n"), option
    assert "--requeue" not in planned.out
    for line in ("module load x", "export MASTER_PORT=4711", "apptainer exec i.sif python -m deeplightning train"):
        assert line in planned.out
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "variables", "code", "told"),
    [
        ([], {"PATH": "/nowhere"}, 3, "error: .*engine.launcher: `sbatch` is not installed here"),
        ([], {"SLURM_JOB_ID": "7"}, 3, "this command runs in Slurm job 7 and would.*srun deeplightning train"),
        (["engine.gpus=auto"], {}, 2, "engine.gpus: auto: a job needs a number of GPUs"),
    ],
)
def test_a_job_that_cannot_be_is_not_submitted(command, tiny, place, tmp_path, words, variables, code, told):
    """Without Slurm, in a batch script, which would submit a second job, or for all GPUs, which is no number: one note
    that names it, and nothing is left."""
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables
    folder = f"engine.launcher.params.folder={tmp_path}/s"
    refused = command("train", tiny, LAUNCHER, folder, *words, cwd=place, **variables, code=code)
    assert re.search(told, " ".join(refused.err.split())), refused
    assert not (tmp_path / "s").exists()


def test_a_missing_submitit_is_named_with_its_remedy(tiny, monkeypatch):
    """Where the extra is not installed: the command that installs it, exit code 3."""
    monkeypatch.setitem(sys.modules, "submitit.slurm.slurm", None)
    with pytest.raises(SetupError, match=r"pip install 'deeplightning\[slurm\]'"):
        Slurm().plan(Job(load_config(tiny), tiny))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"cpus_per_task": 0}, "cpus_per_task is 0"),
        ({"master_port": 70000}, "master_port is 70000"),
        ({"max_requeues": -1}, "max_requeues is -1"),
        ({"time": 2}, r"time is 2 \(120 s\), but .* 120 s before its end, so it would never train"),
        ({"time": "0:30", "warning": 40}, r"time is 0:30 \(30 s\)"),
    ],
)
def test_impossible_arguments_are_refused(params, words):
    """By the constructor, in words."""
    with pytest.raises(ValueError, match=words):
        Slurm(**params)


def test_times_are_read_as_sbatch_reads_them():
    """Every form of sbatch's manual, in seconds; no limit, and what is none of them, as None."""
    forms = {90: 5400, "1:30": 90, "1:30:05": 5405, "2-12": 216000, "2-12:30": 217800, "2-12:30:10": 217810}
    assert {form: seconds_of(form) for form in forms} == forms
    assert {seconds_of(form) for form in (0, "UNLIMITED", None, "soon")} == {None}
    assert Slurm(time=3).time == 3
    assert Slurm(time=1, sbatch={"signal": "TERM@10"}).time == 1


@pytest.fixture
def script(tmp_path):
    """`script(batches, code, …)` ends the tasks of a job with an exit code, after so many batches where they asked to
    go back into the queue; gives what the lines behind them did: exit code, stderr, and what Slurm was asked."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >>"{tmp_path}/asked"\n')
    (tmp_path / "scontrol").chmod(0o755)

    def end(batches, code, max_requeues=None, restarts=0):
        (tmp_path / "asked").unlink(missing_ok=True)
        if batches is not None:
            (tmp_path / "again").write_text(batches)
        place = [f"{FOLDER}={shlex.quote(str(tmp_path))}", f"{NUMBER}=7"]
        lines = [*place, f"(exit {code})", *after_tasks(restarts, max_requeues)]
        variables = {"DEEPLIGHTNING_REQUEUE": f"{tmp_path}/again"}
        env = os.environ | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)], env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
        return done.returncode, done.stderr, asked

    return end


def test_a_job_that_never_trains_is_not_started_for_ever(script):
    """Three starts in a row that trained nothing, killed before they could ask or not: the job ends with exit code 5
    and the reason; batches, a preemption or a file that somebody else made begin the count anew."""
    again = (0, "", "requeue 7\n")
    for batches in ("12", "preempted", ""):
        assert script(None, 138) == again
        assert script("0", 143) == again
        assert script(batches, 143) == again
    assert script("0", 143) == again
    assert script(None, 138) == again
    code, told, asked = script(None, 138)
    assert (code, asked) == (5, "")
    assert "error: the job started 3 times in a row without training a batch" in told
    assert "engine.launcher.params.time" in told


def test_requeues_have_a_limit(script):
    """`max_requeues: 2`: the third time the job ends with exit code 5, however much it has trained; a job that ends by
    itself keeps its exit code."""
    assert script("12", 143, 2) == (0, "", "requeue 7\n")
    assert script("12", 143, 2) == (0, "", "requeue 7\n")
    assert script(None, 4, 2) == (4, "", "")
    code, told, asked = script("12", 143, 2)
    assert (code, asked) == (5, "")
    assert "requeued 2 times, the limit set by engine.launcher.params.max_requeues" in told


def test_a_lost_worker_sends_the_job_back_as_often_as_asked(script):
    """A killed task, `engine.max_restarts` times; not one that somebody has ended, or that has failed."""
    assert script(None, 137) == (137, "", "")
    for code in (143, 2):
        assert script(None, code, restarts=1) == (code, "", "")
    assert script(None, 137, restarts=1) == (0, "a worker was lost (exit code 137); restart 1 of 1\n", "requeue 7\n")
    assert script(None, 137, restarts=1) == (137, "", "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_example_scripts_are_shell(script):
    """bash can read them, and each asks to be warned before its time is over."""
    subprocess.run(["bash", "-n", script], check=True, timeout=LIMIT_SECONDS)
    assert "#SBATCH --signal=USR1@" in script.read_text()


# ---- with Slurm, without training


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_takes_the_example_scripts(script, cluster):
    """`sbatch --test-only` finds nothing to refuse."""
    assert "to start at" in cluster.ask("sbatch", "--test-only", "--gres=none", script, check=False)


def test_an_impossible_partition_is_refused_in_slurms_words(submit):
    """Exit code 3, and what sbatch says, once."""
    refused = submit("engine.launcher.params.partition=nowhere").end(code=3)
    assert refused.err.count("nvalid partition name specified") == 1, refused
    assert "error: override engine.launcher" in refused.err or "engine.launcher: Slurm refuses the job" in refused.err


def test_a_job_that_waits_says_why_and_a_cancelled_one_is_told(submit, cluster, work):
    """The reason is said once; `scancel` ends the command with exit code 5 and the state."""
    running = submit("engine.launcher.params.sbatch.hold=true")
    job = job_of(running)
    wait_for(lambda: f"job {job} waits: JobHeldUser" in running._read("err"), "the reason")
    cluster.ask("scancel", job)
    outcome = end_of(running)
    assert outcome.code == 5
    assert outcome.err.count("waits: ") == 1, outcome
    assert f"error: job {job} ended as CANCELLED" in outcome.err


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_the_command_may_go_and_the_job_stays(sent, submit, cluster):
    """Ctrl-C says how to follow and how to end the job, which a closed shell leaves alone as well."""
    running = submit("engine.launcher.params.sbatch.hold=true")
    job = job_of(running)
    running.signal(sent)
    outcome = end_of(running)
    assert cluster.about(job)["JobState"] == "PENDING"
    cluster.ask("scancel", job)
    if sent == signal.SIGINT:
        assert outcome.code == 130
        assert f"scancel {job}" in outcome.err
        assert re.search(rf"tail -F .*{job}_0_log.out", outcome.err)


@pytest.mark.parametrize(("code", "told"), [(0, 0), (4, 4), pytest.param(137, 5, marks=pytest.mark.slow)])
def test_output_and_exit_code_of_a_job_are_passed_on(code, told, submit):
    """What the first task writes comes out here, on stdout and stderr as there; a killed one is a lost worker."""
    fake = f"sh -c 'echo said; echo error: shown >&2; echo Artifact storage path: /x; exit {code}'"
    outcome = submit(f'engine.launcher.params.python="{fake}"').end(code=told)
    assert outcome.out.splitlines() == ["said", "Artifact storage path: /x"]
    assert "error: shown" in outcome.err


def test_a_frozen_config_has_no_secrets(submit):
    """What came from the environment stands in the job's config by its name; the rest as it was submitted."""
    given = ("logger.params.tags={key: '${oc.env:THE_KEY}'}", "engine.launcher.params.python=/bin/true")
    given += ("engine.env.MY_API=hunter2-of-engine-env",)
    outcome = submit(*given, "data.batch_size=8", THE_KEY="hunter2").end(code=0)
    folder = Path(re.search("its config, script and logs are in (.*)", outcome.err)[1])
    frozen = (folder / "config.yaml").read_text()
    assert "key: ${oc.env:THE_KEY}" in frozen
    assert "MY_API: ${oc.env:MY_API}" in frozen
    assert "batch_size: 8" in frozen
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert folder / ".sealed" / "seal.json" in files
    assert not [path for path in files if b"hunter2" in path.read_bytes()]
    assert (folder / ".sealed").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_script_without_srun_is_one_process(cluster, work):
    """A batch script, and a shell of salloc, are told from the tasks that srun starts."""
    asked = (
        "from deeplightning.process.identity import identity; found = identity(); "
        "print(found and (found.rank, found.world, found.nodes, found.address))"
    )
    python = shlex.quote(sys.executable)
    script = f'#!/bin/bash\n{python} -c "{asked}"\nsrun {python} -c "{asked}" | sort\n'
    (work / "asks.sh").write_text(script)
    cluster.ask("sbatch", "--wait", "-N2", "--ntasks-per-node=1", "-o", "said", "asks.sh", cwd=work)
    expected = ["None", "(0, 2, 2, '127.0.0.1')", "(1, 2, 2, '127.0.0.1')"]
    assert (work / "said").read_text().splitlines() == expected
    shell = cluster.ask("salloc", "-Q", "-N1", "-n2", sys.executable, "-c", asked, cwd=work)
    assert shell.splitlines() == ["None"]


# ---- with Slurm and training


def srun(cluster, work, *words):
    """How `srun … deeplightning train` ended, as a person gives it."""
    options = [word for word in words if word.startswith("-")]
    overrides = [word for word in words if not word.startswith("-")]
    done = subprocess.run(
        ["srun", *options, sys.executable, "-m", "deeplightning", "train", "configs/tiny.yaml", *overrides],
        cwd=work,
        env=environment(**cluster.variables),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_srun_starts_the_processes_of_two_nodes(cluster, work, job, tracked):
    """`srun --nodes=2 --ntasks-per-node=1 deeplightning train` is one run of two processes, with the weights and losses
    of two processes on one machine."""
    done = srun(cluster, work, "--nodes=2", "--ntasks-per-node=1")
    assert done.code == 0, done
    assert len(re.findall("^Artifact storage path", done.out, re.M)) == 1
    folder = done.folder
    local = job("engine.backend=ddp").folder
    assert digest(folder / "last.ckpt") == digest(local / "last.ckpt")
    assert tracked(folder).series() == tracked(local).series()
    assert "num_nodes: 2" in (folder / "cfg.yaml").read_text()
    assert (folder / "logs" / "rank_1.log").exists()


@pytest.mark.slow
def test_srun_with_tasks_alone(cluster, work, job):
    """`srun -n 2` on one node, which Lightning's own support refuses, is a run of two processes."""
    done = srun(cluster, work, "-n2")
    assert done.code == 0, done
    assert digest(done.folder / "last.ckpt") == digest(job("engine.backend=ddp").folder / "last.ckpt")


@pytest.mark.slow
def test_sizes_that_contradict_are_told_with_both_numbers(cluster, work):
    """Three processes are asked for, and Slurm has started two: exit code 3."""
    done = srun(cluster, work, "-n2", "engine.processes=3")
    assert done.code == 3
    assert "requests 3 processes, but Slurm started 2" in done.err


@pytest.mark.slow
def test_a_submitted_job_is_followed_to_its_end(submit, cluster, work, job, tracked):
    """Own code beside the config reaches the tasks; editing config and code while the job waits changes nothing; the
    last line is the run's folder, and the run is that of two processes on one machine."""
    config = work / "configs" / "waiting.yaml"
    shutil.copy(work / "configs" / "tiny.yaml", config)
    go_on = work / "go on"
    go_on.touch()
    waits = f"train.callbacks=[{{type: mine.Waits, params: {{until: '{go_on}'}}}}]"
    running = submit("engine.num_nodes=2", "engine.launcher.params.sbatch.hold=true", waits, config=config)
    number = job_of(running)
    wait_for(lambda: "JobHeldUser" in running._read("err"), "the reason")
    config.write_text("nothing: at all\n")
    code = work / "configs" / "mine.py"
    code.write_text("raise SystemExit('this was edited')\n")
    cluster.ask("scontrol", "release", number)
    outcome = end_of(running)
    code.write_text(OWN)
    assert outcome.code == 0, outcome
    kept = read_code(outcome.folder / "code.zip")
    assert kept.names()["mine.py"] == OWN.encode()
    assert str(work / "configs") in kept.roots
    assert f"job {number} runs on n[1-2]" in outcome.err
    assert "waits" in outcome.out.splitlines()
    assert digest(outcome.folder / "last.ckpt") == digest(job("engine.backend=ddp").folder / "last.ckpt")
    assert tracked(outcome.folder).status == "FINISHED"


@pytest.mark.slow
def test_a_job_is_made_again_by_a_job(submit, cluster, work, command):
    """`reproduce` of a run that Slurm started submits another job, which comes to the same weights."""
    first = end_of(submit("engine.num_nodes=2"))
    assert first.code == 0, first
    again = end_of(command.start("reproduce", first.folder, cwd=work, **cluster.variables))
    assert again.code == 0, again
    assert "is submitted" in again.err
    assert "runs on n[1-2]" in again.err
    assert digest(again.folder / "last.ckpt") == digest(first.folder / "last.ckpt")


def goes_on(outcome, undisturbed, tracked):
    """One run, FINISHED, whose weights and losses are those of an undisturbed one."""
    assert outcome.code == 0, outcome
    paths = re.findall("^Artifact storage path: (.*)", outcome.out, re.M)
    assert len(set(paths)) == 1, outcome
    assert digest(outcome.folder / "last.ckpt") == digest(undisturbed / "last.ckpt")
    run = tracked(outcome.folder)
    assert run.status == "FINISHED"
    assert run.series() == tracked(undisturbed).series()


@pytest.mark.slow
def test_a_warned_job_goes_back_into_the_queue_and_goes_on(submit, cluster, job, tracked, tmp_path):
    """SIGUSR1 on every process of both nodes: one requeue, the same run, and an end that equals an undisturbed run's
    bit for bit."""
    waits = f"train.callbacks=[{{type: mine.Waits, params: {{until: '{tmp_path}/go'}}}}]"
    running = submit("engine.num_nodes=2", waits)
    stands(running)
    cluster.ask("scancel", "--signal=USR1", job_of(running))
    (tmp_path / "go").touch()
    outcome = end_of(running)
    assert cluster.about(job_of(running))["Restarts"] == "1"
    assert outcome.err.count("returns to the queue") == 1
    goes_on(outcome, job("engine.backend=ddp").folder, tracked)


@pytest.mark.slow
def test_a_job_whose_time_is_shorter_than_a_start_ends(submit, cluster):
    """Tasks that SIGUSR1 kills before they have begun: two requeues, then exit code 5 with what to change."""
    running = submit("engine.launcher.params.python=\"sh -c 'kill -USR1 $$'\"")
    outcome = end_of(running)
    assert outcome.code == 5, outcome
    assert cluster.about(job_of(running))["Restarts"] == "2"
    assert "error: the job started 3 times in a row without training a batch" in outcome.err


@pytest.mark.slow
def test_a_preempted_job_goes_on(submit, cluster, job, tracked, tmp_path):
    """A job of a partition that comes first takes the nodes away: SIGTERM, a checkpoint, back into the queue, and the
    run goes on when the nodes are free again."""
    waits = f"train.callbacks=[{{type: mine.Waits, params: {{until: '{tmp_path}/go'}}}}]"
    running = submit("engine.num_nodes=2", waits)
    stands(running)
    number = job_of(running)
    cluster.ask("sbatch", "-p", "urgent", "-N2", "-n4", "-o", "/dev/null", "--wrap", "true")
    wait_for(lambda: cluster.about(number)["PreemptTime"] != "None", "the preemption")
    (tmp_path / "go").touch()
    outcome = end_of(running)
    assert cluster.about(number)["Restarts"] == "1"
    goes_on(outcome, job("engine.backend=ddp").folder, tracked)


@pytest.mark.slow
def test_a_lost_worker_restarts_the_job(submit, cluster, job, tracked, tmp_path):
    """`engine.max_restarts: 1`: a rank killed with SIGKILL sends the job back into the queue."""
    dies = f"train.callbacks=[{{type: mine.Dies, params: {{times: '{tmp_path}/once'}}}}]"
    running = submit("engine.num_nodes=2", "engine.max_restarts=1", dies)
    outcome = end_of(running)
    assert cluster.about(job_of(running))["Restarts"] == "1"
    goes_on(outcome, job("engine.backend=ddp").folder, tracked)


@pytest.mark.slow
def test_a_single_task_starts_processes_and_goes_on(cluster, work, job, tracked, tmp_path):
    """A batch script with one task whose config asks for two processes: they are started on that node, and after
    SIGUSR1 the same run goes on."""
    script = f"""#!/bin/bash
#SBATCH --signal=USR1@60 --requeue --open-mode=append -n1 -c2 -o said.%j
srun {shlex.quote(sys.executable)} -m deeplightning train configs/tiny.yaml engine.processes=2 \
"train.callbacks=[{{type: mine.Waits, params: {{until: '{tmp_path}/go'}}}}]"
"""
    (work / "one.sh").write_text(script)
    number = cluster.ask("sbatch", "--parsable", "one.sh", cwd=work).strip()
    said = work / f"said.{number}"
    wait_for(lambda: said.exists() and "waits\n" in said.read_text(), "the batch")
    cluster.ask("scancel", "--signal=USR1", number)
    (tmp_path / "go").touch()
    # While it puts a job back into the queue, Slurm may say for a moment that there is no such job.
    wait_for(lambda: cluster.about(number, check=False).get("JobState") == "COMPLETED", "its end")
    assert cluster.about(number)["Restarts"] == "1"
    paths = re.findall("^Artifact storage path: (.*)", said.read_text(), re.M)
    assert len(paths) == 2
    assert len(set(paths)) == 1
    assert digest(Path(paths[0]) / "last.ckpt") == digest(job("engine.backend=ddp").folder / "last.ckpt")


def test_a_process_outside_of_a_job_has_no_hooks(monkeypatch):
    """SIGUSR1 and SIGUSR2 belong to the user there; a task of an array has the number of the array and its own."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert Slurm.hooks_here() is None
    assert [*hooks_here().signals] == []
    assert requeue.job_here(STEP) == "7"
    assert requeue.job_here(STEP | {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}) == "5_2"


@pytest.fixture
def hooks(monkeypatch, tmp_path):
    """The hooks of the launcher that has started this process: a task of job 7, whose script requeues it. Functions
    that are registered for the exit are in `hooks.at_exit`."""
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(REQUEUE_FILE, str(tmp_path / "again"))
    at_exit = []
    monkeypatch.setattr(requeue.atexit, "register", lambda *words: at_exit.append(words))
    found = hooks_here()
    found.at_exit = at_exit
    return found


@pytest.mark.parametrize(
    ("number", "preempt_time", "written"),
    [
        (signal.SIGUSR1, "None", "12"),
        (signal.SIGUSR2, "None", "12"),
        (signal.SIGTERM, "None", None),
        (signal.SIGTERM, "2026-11-27T10:00:00", "preempted"),
        (signal.SIGINT, "2026-11-27T10:00:00", None),
    ],
)
def test_a_signal_before_the_end_of_the_time_requeues_the_job(
    number, preempt_time, written, hooks, monkeypatch, tmp_path
):
    """Once, at the very end of the process: SIGUSR1, SIGUSR2, and SIGTERM where Slurm preempts the job."""
    assert [*hooks.signals] == [signal.SIGUSR1, signal.SIGUSR2]
    monkeypatch.setattr(requeue, "state_of", lambda job: {"JobState": "RUNNING", "PreemptTime": preempt_time})
    hooks.before_end(number, 12)
    hooks.before_end(number, 12)
    assert len(hooks.at_exit) == (written is not None)
    for function, *words in hooks.at_exit:
        function(*words)
    file = tmp_path / "again"
    assert (file.read_text() if file.exists() else None) == written


def test_a_run_that_a_job_has_started_is_own(tmp_path):
    """Where its folder is on this machine in the end: the first process prints its path."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text(f"seed: 1  # {tmp_path}\n")
    assert not is_own(run)
    log_of(tmp_path, "7").write_text(f"Artifact storage path: {run.path}\n")
    Follower("7", tmp_path)._echo(to_the_end=True)
    assert is_own(run)


# ---- searches as arrays


SPACE = """\
tune:
  metric: val_acc
  mode: max
  num_trials: 4
  parallel: 2
  space:
    model.optimizer.params.lr: {log_uniform: [1e-4, 0.1]}
"""


@pytest.fixture
def searching(cluster, work, command):
    """`searching(name, override, …)` is a search under Slurm, just started; with its log file."""
    if not is_installed("optuna"):
        pytest.skip("Optuna is not installed: pip install 'deeplightning[tune]'")
    config = work / "configs" / "search.yaml"
    config.write_text((work / "configs" / "tiny.yaml").read_text() + SPACE)

    def start(name, *overrides, launcher=LAUNCHER):
        given = [f"tune.name={name}", launcher, *overrides]
        return command.start("tune", "configs/search.yaml", *given, cwd=work, **cluster.variables)

    return start


def trials_of(outcome):
    assert outcome.code == 0, outcome
    with (outcome.folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def home_of(store, name):
    """The folder of a search."""
    return store / "searches" / "Default" / name


def queue(cluster):
    """Jobs and tasks in the queue, by number: their states."""
    listed = cluster.ask("squeue", "-h", "-r", "-o", "%i %T")
    return dict(line.split() for line in listed.splitlines())


@pytest.mark.slow
def test_a_search_is_one_array(searching, cluster, store):
    """Four trials, two at a time: four tasks of one array, none of them started before its trial is drawn, each a run
    with the results of a search without Slurm; the queue is empty in the end, and so is the note of the array."""
    running, seen = searching("array"), []
    while not running._read("code"):
        seen.append(queue(cluster))
        time.sleep(0.1)
    here = trials_of(end_of(searching("here", launcher="engine.launcher=null")))
    there = trials_of(running.end())
    figures = [key for key in here[0] if key.startswith("val_acc") or key.endswith("lr")]
    assert figures
    assert [[row[key] for key in figures] for row in there] == [[row[key] for key in figures] for row in here]
    arrays = {number.partition("_")[0] for states in seen for number in states}
    (array,) = arrays
    assert {number for states in seen for number in states} == {f"{array}_{task}" for task in range(4)}
    assert max(sum(state != "PENDING" for state in states.values()) for states in seen) <= 2
    assert not queue(cluster)
    assert not (home_of(store, "array") / "slurm-array").exists()


@pytest.mark.slow
def test_the_runs_of_a_grid_are_one_array(cluster, work, command):
    """`--multirun`: a task for each combination, with its own seed; the second command has nothing to submit."""
    shutil.copy(work / "configs" / "tiny.yaml", work / "configs" / "jobs.yaml")  # `tiny` has other grids in the store
    words = ("train", "configs/jobs.yaml", LAUNCHER, "seed=5,6", "--multirun", "--jobs", "2")
    outcome = end_of(command.start(*words, cwd=work, **cluster.variables))
    assert outcome.code == 0, outcome
    with (outcome.folder / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["state"], row["seed"]) for row in rows] == [("finished", "5"), ("finished", "6")]
    logs = [path.read_text() for path in (outcome.folder / "points").glob("*.log")]
    numbers = [re.search(r"job (\d+_\d) is submitted", text)[1].split("_") for text in logs]
    assert len({array for array, _ in numbers}) == 1
    assert {task for _, task in numbers} == {"0", "1"}
    again = end_of(command.start(*words, cwd=work, **cluster.variables))
    assert "2 of them finished before" in again.out
    assert not queue(cluster)


@pytest.mark.slow
def test_an_interrupted_search_leaves_no_job(searching, cluster, store, tmp_path):
    """Ctrl-C: the trials under way save and end, the held ones are cancelled; the same command finishes the search in
    the same runs."""
    waits = f"train.callbacks=[{{type: mine.Waits, params: {{until: '{tmp_path}/go'}}}}]"
    running = searching("interrupted-jobs", waits)
    wait_for(lambda: sum(state == "RUNNING" for state in queue(cluster).values()) == 2 or ended(running), "two trials")
    logs = home_of(store, "interrupted-jobs") / "trials"
    wait_for(lambda: all("waits" in (logs / f"trial-{n}.log").read_text() for n in (0, 1)) or ended(running), "batches")
    running.signal(signal.SIGINT)
    (tmp_path / "go").touch()
    outcome = end_of(running)
    assert outcome.code == 130, outcome
    assert not queue(cluster)
    again = end_of(searching("interrupted-jobs", waits))
    assert [row["state"] for row in trials_of(again)] == ["finished"] * 4
    assert again.out.count("(continues)") == 2


@pytest.mark.slow
def test_a_killed_search_ends_its_former_tasks(searching, cluster):
    """kill -9: held tasks stay in the queue, and take no machine; the same command ends them, and finishes."""
    running = searching("killed-jobs")
    wait_for(lambda: "RUNNING" in queue(cluster).values() or ended(running), "a trial")
    running.signal(signal.SIGKILL)
    wait_for(lambda: {*queue(cluster).values()} == {"PENDING"}, "the end of trials without a search", 120)
    former = {number.partition("_")[0] for number in queue(cluster)}
    again = searching("killed-jobs")
    wait_for(lambda: not former & {number.partition("_")[0] for number in queue(cluster)} or ended(again), "their end")
    assert len(trials_of(end_of(again))) == 4
    assert not queue(cluster)


def test_further_options_of_sbatch_win(command, tiny, place):
    """Over those of the launcher, also those whose value is 0."""
    params = "engine.launcher.params.sbatch={job-name: mine, mem: 0}"
    planned = command("plan", tiny, LAUNCHER, params, cwd=place, code=0)
    assert re.findall(r"--job-name=(\w+)", planned.out) == ["mine"]
    assert "#SBATCH --mem=0" in planned.out
