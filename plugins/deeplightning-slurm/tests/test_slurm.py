"""Runs in a real Slurm, which is started with two emulated nodes and no cgroups, and stopped at the end.

This needs root and Debian's `slurm-wlm` and `munge` (`apt-get install slurm-wlm munge`).
"""

import contextlib
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

import commands
import pytest
from commands import LIMIT_SECONDS, Outcome, environment, free_port
from conftest import digest
from tiny import csv_rows

from deeplightning.config.examine import load_config
from deeplightning.config.own_runs import is_own
from deeplightning.config.target import is_installed
from deeplightning.faults import SetupError
from deeplightning.launch import Job, hooks_here
from deeplightning.process.failure import Cause, record_cause
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
# A requeued job waits a second longer than a credential lasts.
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
"""User code beside the config."""

import os
import pathlib
import signal
import time

import pytorch_lightning as pl


class Waits(pl.Callback):
    """Waits in the third batch of the second epoch until a file exists."""

    def __init__(self, until):
        self.until = pathlib.Path(until)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 2:
            print("waits", flush=True)
            longest = time.monotonic() + 600  # Slurm's tasks survive killed tests
            while not self.until.exists():
                assert time.monotonic() < longest
                time.sleep(0.01)


class Dies(pl.Callback):
    """Kills rank 1 in the third batch of the second epoch, once."""

    def __init__(self, times):
        self.times = pathlib.Path(times)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 2 and trainer.global_rank == 1 and not self.times.exists():
            self.times.touch()
            os.kill(os.getpid(), signal.SIGKILL)
'''


def dies_with_its_parent():
    """Kill this child when the tests end, in any way (PR_SET_PDEATHSIG is 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Cluster:
    """Slurm with two nodes on this machine."""

    def __init__(self, folder):
        self.folder, self.conf, self.daemons = folder, folder / "slurm.conf", []

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
            program = [shutil.which(command[0]) or f"/usr/sbin/{command[0]}", *command[1:]]
            options = {"env": environment(**self.variables), "preexec_fn": dies_with_its_parent}
            self.daemons.append(subprocess.Popen(program, stdout=log, stderr=log, **options))

    def ask(self, *command, check=True, cwd=None):
        options = {"cwd": cwd or self.folder, "env": environment(**self.variables), "timeout": LIMIT_SECONDS}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        assert done.returncode == 0 or not check, (command, done.stdout, done.stderr)
        return done.stdout if check else done.stdout + done.stderr

    def about(self, job, check=True):
        """Return the properties of a job; without `check`, {} for an unknown job."""
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


LONG_SECONDS = 4 * LIMIT_SECONDS  # processes that Slurm starts import everything, and again after a requeue


def wait_for(happened, what, seconds=LONG_SECONDS):
    return commands.wait_for(happened, what, seconds)


@pytest.fixture(scope="module")
def cluster():
    """Slurm, shared by the tests of this file."""
    names = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
    missing = [name for name in names if shutil.which(name) is None and not Path(f"/usr/sbin/{name}").exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge")
    if os.getuid() != 0:
        pytest.skip("Slurm's daemons start processes of other users, which requires root")
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
    """Working directory of jobs; config and user code are in its folder `configs`."""
    folder = tmp_path_factory.mktemp("jobs") / "a place"
    (folder / "configs").mkdir(parents=True)
    shutil.copy(tiny, folder / "configs" / "tiny.yaml")
    (folder / "configs" / "mine.py").write_text(OWN)
    return folder


@pytest.fixture
def submit(cluster, work, command):
    """`submit(override, …)` starts a command that submits and follows a job."""

    def start(*overrides, config="configs/tiny.yaml", **variables):
        given = [LAUNCHER, "engine.launcher.params.master_addr=127.0.0.1", *overrides]
        return command.start("train", config, *given, cwd=work, **cluster.variables | variables)

    return start


@pytest.fixture(scope="module")
def local(job):
    """Folder of the run of two local processes."""
    return job("engine.backend=ddp").folder


def job_of(running):
    """Return the number of the job that a command has submitted."""
    submitted = r"job (\d+) is submitted"
    return wait_for(lambda: re.search(submitted, running._read("err")) or fail_if_ended(running), "the job")[1]


def fail_if_ended(running):
    assert not running._read("code"), running.end()


def end_of(running, code=None):
    """Wait for the end of a command, longer than `Running.end`; return its outcome, whose exit code must be `code`."""
    running.ended(LONG_SECONDS)
    return running.end(code)


def wait_for_batch(running):
    """Wait until rank 0 waits in its batch."""
    wait_for(lambda: "waits\n" in running._read("out"), "the batch")


# ---- without Slurm


STEP = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "3", "LOCALID": "1", "NODEID": "1", "STEP_NUM_TASKS": "4"}
STEP |= {"STEP_NUM_NODES": "2", "STEP_TASKS_PER_NODE": "2(x2)", "STEP_NODELIST": "n[03-04]"}
STEP = {f"SLURM_{name}": value for name, value in STEP.items()}


def test_the_address_of_the_config_wins(command, tiny, place):
    """The launcher's master_addr and master_port also apply to tasks that srun starts."""
    words = ["engine.launcher.params={master_addr: 10.0.0.9, master_port: 4711}", "engine.processes=2"]
    planned = command("plan", tiny, LAUNCHER, *words, cwd=place, **STEP | {"MASTER_ADDR": "n9"}, code=0)
    assert "MASTER_ADDR: 10.0.0.9\n" in planned.out
    assert "MASTER_PORT: '4711'\n" in planned.out


def test_plan_prints_the_script(command, tiny, place, tmp_path):
    """`plan` prints the script for sbatch with every option; it writes nothing and does not need Slurm."""
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
    lines = ["module load x", "export MASTER_PORT=4711", "apptainer exec i.sif python -m deeplightning train"]
    for line in (*lines, 'mkdir "$DEEPLIGHTNING_REQUEUE.causes"'):
        assert line in planned.out
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "variables", "code", "message"),
    [
        ([], {"PATH": "/nowhere"}, 3, "error: .*engine.launcher: `sbatch` is not installed here"),
        ([], {"SLURM_JOB_ID": "7"}, 3, "this command runs in Slurm job 7 and would.*srun deeplightning train"),
        (["engine.gpus=auto"], {}, 2, "engine.gpus: auto: a job needs a number of GPUs"),
    ],
)
def test_an_impossible_job_is_not_submitted(command, tiny, place, tmp_path, words, variables, code, message):
    """Missing Slurm, a surrounding job and `gpus: auto` are reported, and no file is written."""
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | variables
    folder = f"engine.launcher.params.folder={tmp_path}/s"
    refused = command("train", tiny, LAUNCHER, folder, *words, cwd=place, **variables, code=code)
    assert re.search(message, " ".join(refused.err.split())), refused
    assert not (tmp_path / "s").exists()


def test_a_missing_submitit_is_named_with_its_remedy(tiny, monkeypatch):
    """Without submitit the error has the command that installs the extra `slurm`."""
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
    """The constructor raises ValueError with the param and its value."""
    with pytest.raises(ValueError, match=words):
        Slurm(**params)


def test_jobs_of_the_same_second_have_their_own_folders(monkeypatch):
    """Two commands that submit in the same second do not share a folder."""
    monkeypatch.setattr("deeplightning_slurm.launcher.clock.strftime", lambda _: "2026-11-30_10-00-00")
    assert len({Slurm().new_folder() for _ in range(2)}) == 2


def test_times_are_read_as_sbatch_reads_them():
    """Every format of sbatch's manual is converted to seconds; no limit and an unknown format give None."""
    forms = {90: 5400, "1:30": 90, "1:30:05": 5405, "2-12": 216000, "2-12:30": 217800, "2-12:30:10": 217810}
    assert {form: seconds_of(form) for form in forms} == forms
    assert {seconds_of(form) for form in (0, "UNLIMITED", None, "soon")} == {None}
    assert Slurm(time=3).time == 3
    assert Slurm(time=1, sbatch={"signal": "TERM@10"}).time == 1


@pytest.fixture
def script(tmp_path):
    """`script(batches, code, …)` runs the end of a job's script after its tasks ended with an exit code, left `causes`
    and, if `batches` is not None, asked for a requeue after so many batches; returns exit code, stderr and scontrol
    calls."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >>"{tmp_path}/asked"\n')
    (tmp_path / "scontrol").chmod(0o755)

    def end(batches, code, max_requeues=None, restarts=0, causes=()):
        (tmp_path / "asked").unlink(missing_ok=True)
        (tmp_path / "again.causes").mkdir(exist_ok=True)
        for cause in causes:
            (tmp_path / "again.causes" / cause).touch()
        if batches is not None:
            (tmp_path / "again").write_text(batches)
        place = [f"{FOLDER}={shlex.quote(str(tmp_path))}", f"{NUMBER}=7"]
        lines = [*place, f"(exit {code})", *after_tasks(restarts, max_requeues)]
        variables = {"DEEPLIGHTNING_REQUEUE": f"{tmp_path}/again"}
        env = os.environ | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        program = ["bash", "-c", "\n".join(lines)]
        done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
        return done.returncode, done.stderr, asked

    return end


def test_a_job_that_never_trains_is_not_started_for_ever(script):
    """After three starts in a row without a batch the job ends with exit code 5 and the reason; a trained batch, a
    preemption or an empty file resets the count."""
    again = (0, "", "requeue 7\n")
    for batches in ("12", "preempted", ""):
        assert script(None, 138) == again
        assert script("0", 143) == again
        assert script(batches, 143) == again
    assert script("0", 143) == again
    assert script(None, 138) == again
    code, err, asked = script(None, 138)
    assert (code, asked) == (5, "")
    assert "error: the job started 3 times in a row without training a batch" in err
    assert "engine.launcher.params.time" in err


def test_requeues_have_a_limit(script):
    """With `max_requeues: 2` the third requeue is refused with exit code 5; a job that ends by itself keeps its exit
    code."""
    assert script("12", 143, 2) == (0, "", "requeue 7\n")
    assert script("12", 143, 2) == (0, "", "requeue 7\n")
    assert script(None, 4, 2) == (4, "", "")
    code, err, asked = script("12", 143, 2)
    assert (code, asked) == (5, "")
    assert "requeued 2 times, the limit set by engine.launcher.params.max_requeues" in err


def test_a_lost_worker_sends_the_job_back_as_often_as_asked(script):
    """`engine.max_restarts` requeues a job with a killed task, but not with one that was terminated or that failed."""
    assert script(None, 137) == (137, "", "")
    for code in (143, 2):
        assert script(None, code, restarts=1) == (code, "", "")
    assert script(None, 137, restarts=1) == (0, "a worker was lost (exit code 137); restart 1 of 1\n", "requeue 7\n")
    assert script(None, 137, restarts=1) == (137, "", "")


@pytest.mark.parametrize(
    ("code", "causes", "restarts"),
    [
        (5, ["lost"], True),  # a hang
        (5, [], False),  # a single process
        (5, ["error"], False),
        (5, ["error", "lost"], False),  # the other node only lost the connection
        (134, ["error", "lost"], False),
        (134, ["lost"], True),
        (137, ["error"], True),
        (143, ["lost"], False),
        (50, ["lost"], False),
    ],
)
def test_an_error_of_the_run_does_not_send_the_job_back(code, causes, restarts, script):
    """`engine.max_restarts` requeues after exit code 5 only if some node lost a process and none had an error."""
    done, _, asked = script(None, code, restarts=1, causes=causes)
    assert (done, asked) == ((0, "requeue 7\n") if restarts else (code, ""))


def test_each_node_leaves_its_first_cause_to_the_script(tmp_path, monkeypatch):
    """The file is `error` if the run is the cause, else `lost`. No file is written without the script's folder."""
    monkeypatch.setenv(REQUEUE_FILE, str(tmp_path / "again"))
    for name in ("n1", "n2", "n3"):
        (tmp_path / name).mkdir()
    assert record_cause(tmp_path / "n1", Cause(0, "a.py:1: ValueError", 5))
    causes = tmp_path / "again.causes"
    assert not causes.exists()
    causes.mkdir()
    assert record_cause(tmp_path / "n2", Cause(1, "timed out", 5, lost=True))
    assert not record_cause(tmp_path / "n2", Cause(2, "a.py:1: ValueError", 5))
    assert [path.name for path in causes.iterdir()] == ["lost"]
    assert record_cause(tmp_path / "n3", Cause(3, "a.py:1: ValueError", 5))
    assert {path.name for path in causes.iterdir()} == {"lost", "error"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_example_scripts_are_shell(script):
    """bash can parse them, and each requests a signal before its time limit."""
    subprocess.run(["bash", "-n", script], check=True, timeout=LIMIT_SECONDS)
    assert "#SBATCH --signal=USR1@" in script.read_text()


# ---- with Slurm, without training


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_takes_the_example_scripts(script, cluster):
    """`sbatch --test-only` accepts them."""
    assert "to start at" in cluster.ask("sbatch", "--test-only", "--gres=none", script, check=False)


def test_an_impossible_partition_is_refused_in_slurms_words(submit):
    """The exit code is 3, and the message of sbatch appears once."""
    refused = submit("engine.launcher.params.partition=nowhere").end(code=3)
    assert refused.err.count("nvalid partition name specified") == 1, refused
    assert "error: override engine.launcher" in refused.err or "engine.launcher: Slurm refuses the job" in refused.err


def test_the_reason_of_a_waiting_job_and_a_cancelled_job_are_reported(submit, cluster, work):
    """The reason is printed once; after `scancel` the command ends with exit code 5 and the state."""
    running = submit("engine.launcher.params.sbatch.hold=true")
    job = job_of(running)
    wait_for(lambda: f"job {job} waits: JobHeldUser" in running._read("err"), "the reason")
    cluster.ask("scancel", job)
    outcome = end_of(running, code=5)
    assert outcome.err.count("waits: ") == 1, outcome
    assert f"error: job {job} ended as CANCELLED" in outcome.err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGHUP])
def test_the_command_may_go_and_the_job_stays(sent, submit, cluster):
    """The job survives SIGINT, after which the command prints how to follow and end it, and SIGHUP."""
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


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (4, 4), (137, 5)])
def test_output_and_exit_code_of_a_job_are_passed_on(code, expected, submit):
    """The command prints stdout and stderr of the first task; a killed task is a lost worker (5)."""
    fake = f"sh -c 'echo said; echo error: shown >&2; echo Artifact storage path: /x; exit {code}'"
    outcome = submit(f'engine.launcher.params.python="{fake}"').end(code=expected)
    assert outcome.out.splitlines() == ["said", "Artifact storage path: /x"]
    assert "error: shown" in outcome.err


def test_a_frozen_config_has_no_secrets(submit):
    """Values of the environment are references in the job's config, and no file contains them; other overrides are
    resolved."""
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
    """Only tasks that srun starts have a rank, not a batch script or a shell of salloc."""
    asked = "from deeplightning.process.identity import identity; found = identity(); "
    asked += "print(found and (found.rank, found.world, found.nodes, found.address))"
    python = shlex.quote(sys.executable)
    script = f'#!/bin/bash\n{python} -c "{asked}"\nsrun {python} -c "{asked}" | sort\n'
    (work / "asks.sh").write_text(script)
    cluster.ask("sbatch", "--wait", "-N2", "--ntasks-per-node=1", "-o", "ranks", "asks.sh", cwd=work)
    expected = ["None", "(0, 2, 2, '127.0.0.1')", "(1, 2, 2, '127.0.0.1')"]
    assert (work / "ranks").read_text().splitlines() == expected
    shell = cluster.ask("salloc", "-Q", "-N1", "-n2", sys.executable, "-c", asked, cwd=work)
    assert shell.splitlines() == ["None"]


# ---- with Slurm and training


def srun(cluster, work, *words, code=0):
    """Run `srun … deeplightning train`; return its outcome, whose exit code must be `code`."""
    options = [word for word in words if word.startswith("-")]
    overrides = [word for word in words if not word.startswith("-")]
    words = ["srun", *options, sys.executable, "-m", "deeplightning", "train", "configs/tiny.yaml", *overrides]
    env = environment(**cluster.variables)
    done = subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, timeout=LONG_SECONDS)
    assert done.returncode == code, (done.stdout, done.stderr)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_srun_starts_the_processes_of_two_nodes(cluster, work, local, tracked):
    """`srun --nodes=2 --ntasks-per-node=1 deeplightning train` is one run, with the weights and losses of two processes
    on one machine."""
    done = srun(cluster, work, "--nodes=2", "--ntasks-per-node=1")
    assert len(re.findall("^Artifact storage path", done.out, re.M)) == 1
    folder = done.folder
    assert digest(folder / "last.ckpt") == digest(local / "last.ckpt")
    assert tracked(folder).series() == tracked(local).series()
    assert "num_nodes: 2" in (folder / "cfg.yaml").read_text()
    assert (folder / "logs" / "rank_1.log").exists()


def test_srun_with_tasks_alone(cluster, work, local):
    """`srun -n 2` on one node, which Lightning rejects, is a run of two processes."""
    done = srun(cluster, work, "-n2")
    assert digest(done.folder / "last.ckpt") == digest(local / "last.ckpt")


@pytest.mark.slow
def test_contradicting_sizes_are_reported_with_both_numbers(cluster, work):
    """A config with three processes for two tasks of Slurm ends with exit code 3."""
    done = srun(cluster, work, "-n2", "engine.processes=3", code=3)
    assert "requests 3 processes, but Slurm started 2" in done.err


def test_a_submitted_job_is_followed_to_its_end(submit, cluster, work, local, tracked):
    """Tasks import user code beside the config; edits of config and code while the job waits have no effect. The last
    line is the run's folder, and the weights are those of two processes on one machine."""
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
    assert digest(outcome.folder / "last.ckpt") == digest(local / "last.ckpt")
    assert tracked(outcome.folder).status == "FINISHED"


def test_a_job_is_made_again_by_a_job(submit, cluster, work, command):
    """`reproduce` of a run in Slurm submits another job, which trains the same weights."""
    first = end_of(submit("engine.num_nodes=2"), code=0)
    again = end_of(command.start("reproduce", first.folder, cwd=work, **cluster.variables), code=0)
    assert "is submitted" in again.err
    assert "runs on n[1-2]" in again.err
    assert digest(again.folder / "last.ckpt") == digest(first.folder / "last.ckpt")


def assert_resumed(outcome, undisturbed, tracked):
    """Assert that there is one FINISHED run with the weights and losses of an undisturbed one."""
    assert outcome.code == 0, outcome
    paths = re.findall("^Artifact storage path: (.*)", outcome.out, re.M)
    assert len(set(paths)) == 1, outcome
    assert digest(outcome.folder / "last.ckpt") == digest(undisturbed / "last.ckpt")
    run = tracked(outcome.folder)
    assert run.status == "FINISHED"
    assert run.series() == tracked(undisturbed).series()


def test_a_job_that_nears_its_time_limit_is_requeued_and_resumes(submit, cluster, local, tracked, tmp_path):
    """SIGUSR1 to every process of both nodes requeues the job once; the run resumes to bit-identical weights."""
    waits = f"train.callbacks=[{{type: mine.Waits, params: {{until: '{tmp_path}/go'}}}}]"
    running = submit("engine.num_nodes=2", waits)
    wait_for_batch(running)
    cluster.ask("scancel", "--signal=USR1", job_of(running))
    (tmp_path / "go").touch()
    outcome = end_of(running)
    assert cluster.about(job_of(running))["Restarts"] == "1"
    assert outcome.err.count("returns to the queue") == 1
    assert_resumed(outcome, local, tracked)


def test_a_job_whose_time_is_shorter_than_a_start_ends(submit, cluster):
    """If SIGUSR1 kills the tasks before they start, two requeues are followed by exit code 5 with the reason."""
    running = submit("engine.launcher.params.python=\"sh -c 'kill -USR1 $$'\"")
    outcome = end_of(running, code=5)
    assert cluster.about(job_of(running))["Restarts"] == "2"
    assert "error: the job started 3 times in a row without training a batch" in outcome.err


def test_a_preempted_job_resumes(submit, cluster, local, tracked, tmp_path):
    """A job of a partition with priority preempts the run, which saves a checkpoint, is requeued, and resumes."""
    waits = f"train.callbacks=[{{type: mine.Waits, params: {{until: '{tmp_path}/go'}}}}]"
    running = submit("engine.num_nodes=2", waits)
    wait_for_batch(running)
    number = job_of(running)
    cluster.ask("sbatch", "-p", "urgent", "-N2", "-n4", "-o", "/dev/null", "--wrap", "true")
    wait_for(lambda: cluster.about(number)["PreemptTime"] != "None", "the preemption")
    (tmp_path / "go").touch()
    outcome = end_of(running)
    assert cluster.about(number)["Restarts"] == "1"
    assert_resumed(outcome, local, tracked)


def test_a_lost_worker_restarts_the_job(submit, cluster, local, tracked, tmp_path):
    """With `engine.max_restarts: 1` a killed rank requeues the job."""
    dies = f"train.callbacks=[{{type: mine.Dies, params: {{times: '{tmp_path}/once'}}}}]"
    running = submit("engine.num_nodes=2", "engine.max_restarts=1", dies)
    outcome = end_of(running)
    assert cluster.about(job_of(running))["Restarts"] == "1"
    assert_resumed(outcome, local, tracked)


def test_an_error_of_the_run_does_not_restart_the_job(submit, cluster, tmp_path):
    """With `engine.max_restarts: 1` an exception in one rank's user code ends the job with exit code 5."""
    raises = f"train.callbacks=[{{type: mine.Dies, params: {{times: '{tmp_path}/no folder/once'}}}}]"
    running = submit("engine.num_nodes=2", "engine.max_restarts=1", raises)
    outcome = end_of(running, code=5)
    assert cluster.about(job_of(running))["Restarts"] == "0"
    assert "FileNotFoundError" in outcome.err


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_single_task_starts_processes_and_resumes(restarts, cluster, work, local, tmp_path):
    """A batch script with one task starts the two processes of its config; after SIGUSR1 the run resumes."""
    script = f"""#!/bin/bash
#SBATCH --signal=USR1@60 --requeue --open-mode=append -n1 -c2 -o out.%j
srun {shlex.quote(sys.executable)} -m deeplightning train configs/tiny.yaml engine.processes=2 \
engine.max_restarts={restarts} "train.callbacks=[{{type: mine.Waits, params: {{until: '{tmp_path}/go'}}}}]"
"""
    (work / "one.sh").write_text(script)
    number = cluster.ask("sbatch", "--parsable", "one.sh", cwd=work).strip()
    out = work / f"out.{number}"
    wait_for(lambda: out.exists() and "waits\n" in out.read_text(), "the batch")
    cluster.ask("scancel", "--signal=USR1", number)
    (tmp_path / "go").touch()
    # While it requeues a job, Slurm may report for a moment that there is no such job.
    wait_for(lambda: cluster.about(number, check=False).get("JobState") == "COMPLETED", "its end")
    assert cluster.about(number)["Restarts"] == "1"
    paths = re.findall("^Artifact storage path: (.*)", out.read_text(), re.M)
    assert (len(paths), len(set(paths))) == (2, 1)
    assert digest(Path(paths[0]) / "last.ckpt") == digest(local / "last.ckpt")


def test_a_process_outside_of_a_job_has_no_hooks(monkeypatch):
    """SIGUSR1 and SIGUSR2 are left to the user. A task of an array is identified by the array's and its own number."""
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
    """Hooks of the launcher in a task of job 7, whose script requeues it; `hooks.at_exit` has its exit functions."""
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
    """SIGUSR1, SIGUSR2, and SIGTERM of a preemption request one requeue, at the exit of the process."""
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
    """A run whose folder the first process prints counts as one of this user."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text(f"seed: 1  # {tmp_path}\n")
    forged = f"warning: Skipped 1 image: /data/x\nArtifact storage path: {run.path}\n.png\n"
    log_of(tmp_path, "7", kind="err").write_text(forged)
    Follower("7", tmp_path)._echo(to_the_end=True)
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
    """`searching(name, override, …)` starts a search under Slurm."""
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
    return csv_rows(outcome.folder / "trials.csv")


def home_of(store, name):
    """Return the folder of a search."""
    return store / "searches" / "Default" / name


def queue(cluster):
    """Return the states of the jobs and tasks in the queue by number."""
    listed = cluster.ask("squeue", "-h", "-r", "-o", "%i %T")
    return dict(line.split() for line in listed.splitlines())


def test_a_search_is_one_array(searching, cluster, store):
    """Four trials, two at a time, are four tasks of one array with the results of a search without Slurm. No task runs
    before its trial is drawn; at the end the queue is empty and the record of the array is removed."""
    running, seen = searching("array"), []
    while not running._read("code"):
        seen.append(queue(cluster))
        time.sleep(0.1)
    here = trials_of(end_of(searching("here", launcher="engine.launcher=null")))
    there = trials_of(running.end())
    figures = [key for key in here[0] if key.startswith("val_acc") or key.endswith("lr")]
    assert figures
    assert [[row[key] for key in figures] for row in there] == [[row[key] for key in figures] for row in here]
    (array,) = {number.partition("_")[0] for states in seen for number in states}
    assert {number for states in seen for number in states} == {f"{array}_{task}" for task in range(4)}
    assert max(sum(state != "PENDING" for state in states.values()) for states in seen) <= 2
    assert not queue(cluster)
    assert not (home_of(store, "array") / "slurm-array").exists()


def test_the_runs_of_a_grid_are_one_array(cluster, work, command):
    """`--multirun` has one task per combination; a second command submits nothing."""
    shutil.copy(work / "configs" / "tiny.yaml", work / "configs" / "jobs.yaml")  # `tiny` has other grids in the store
    words = ("train", "configs/jobs.yaml", LAUNCHER, "seed=5,6", "--multirun", "--jobs", "2")
    outcome = end_of(command.start(*words, cwd=work, **cluster.variables), code=0)
    rows = csv_rows(outcome.folder / "runs.csv")
    assert [(row["state"], row["seed"]) for row in rows] == [("finished", "5"), ("finished", "6")]
    logs = [path.read_text() for path in (outcome.folder / "points").glob("*.log")]
    numbers = [re.search(r"job (\d+_\d) is submitted", text)[1].split("_") for text in logs]
    assert len({array for array, _ in numbers}) == 1
    assert {task for _, task in numbers} == {"0", "1"}
    again = end_of(command.start(*words, cwd=work, **cluster.variables))
    assert "2 of them finished before" in again.out
    assert not queue(cluster)


def test_an_interrupted_search_leaves_no_job(searching, cluster, store, tmp_path):
    """On SIGINT running trials save and end, held ones are cancelled; the same command resumes these runs and finishes
    the search."""
    waits = f"train.callbacks=[{{type: mine.Waits, params: {{until: '{tmp_path}/go'}}}}]"
    running = searching("interrupted-jobs", waits)
    wait_for(lambda: [*queue(cluster).values()].count("RUNNING") == 2 or fail_if_ended(running), "two trials")
    logs = [home_of(store, "interrupted-jobs") / "trials" / f"trial-{number}.log" for number in (0, 1)]
    wait_for(lambda: all("waits" in log.read_text() for log in logs) or fail_if_ended(running), "batches")
    running.signal(signal.SIGINT)
    (tmp_path / "go").touch()
    end_of(running, code=130)
    assert not queue(cluster)
    again = end_of(searching("interrupted-jobs", waits))
    assert [row["state"] for row in trials_of(again)] == ["finished"] * 4
    assert again.out.count("(continues)") == 2


def test_a_killed_search_ends_its_former_tasks(searching, cluster):
    """After SIGKILL held tasks stay in the queue without using a node; the same command ends them, and finishes."""
    running = searching("killed-jobs")
    wait_for(lambda: "RUNNING" in queue(cluster).values() or fail_if_ended(running), "a trial")
    running.signal(signal.SIGKILL)
    wait_for(lambda: {*queue(cluster).values()} == {"PENDING"}, "the end of trials without a search", 120)
    former = {number.partition("_")[0] for number in queue(cluster)}
    again = searching("killed-jobs")
    arrays = lambda: {number.partition("_")[0] for number in queue(cluster)}  # noqa: E731
    wait_for(lambda: not former & arrays() or fail_if_ended(again), "their end")
    assert len(trials_of(end_of(again))) == 4
    assert not queue(cluster)


def test_further_options_of_sbatch_win(command, tiny, place):
    """Options in `sbatch` override those of the launcher, and a value of 0 is kept."""
    params = "engine.launcher.params.sbatch={job-name: mine, mem: 0}"
    planned = command("plan", tiny, LAUNCHER, params, cwd=place, code=0)
    assert re.findall(r"--job-name=(\w+)", planned.out) == ["mine"]
    assert "#SBATCH --mem=0" in planned.out


def test_tasks_get_the_variables_of_the_script(command, tiny, place):
    """sbatch's `--export=NONE` would apply to srun too, through SLURM_EXPORT_ENV."""
    planned = command("plan", tiny, LAUNCHER, "engine.launcher.params.sbatch={export: NONE}", cwd=place, code=0)
    assert "#SBATCH --export=NONE" in planned.out
    assert "--export=ALL" in planned.out
