"""If one of several processes fails, dies or hangs, all end; the first cause is reported once and fails the run."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from commands import LIMIT_SECONDS, environment, free_port, python
from conftest import OWN
from killing import FAULT, GOES_WRONG, SLEEPS

from deeplightning.process import rendezvous
from deeplightning.process import shared_folder as folders
from deeplightning.process.failure import Cause, first_cause, is_lost, record_cause
from deeplightning.process.shared_folder import shared_folder


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A working directory with user code that fails."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "faulty.py").write_text(GOES_WRONG)
    (folder / "own.py").write_text(OWN)
    return folder


def at(rank, what):
    return f"train.callbacks=[{{type: faulty.At, params: {{rank: {rank}, what: {what}}}}}]"


@pytest.fixture
def start(command, request, tiny, here):
    """`start(override, …)` starts a job of `ranks` processes; their shared folder is deleted after them.

    DeepSpeed is installed only if an override names it.
    """
    folders = []

    def run(*overrides, ranks=2, **variables):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} | variables
        folders.append(shared_folder(address))
        engine = (f"engine.processes={ranks}", "engine.backend=ddp")
        commands = request.getfixturevalue("jobs") if "deepspeed" in " ".join(overrides) else command
        return commands.start("train", tiny, *engine, *overrides, cwd=here, ranks=ranks, **address)

    yield run
    assert not any(folder.exists() for folder in folders)


@pytest.fixture
def failing(start):
    """`failing(override, …)` runs a job whose processes all end within a minute with the same exit code."""

    def run(*overrides, code, **variables):
        begun = time.monotonic()
        outcome = start(*overrides, **variables).end()
        assert time.monotonic() - begun < 60
        assert {each.code for each in outcome.ranks or [outcome]} == {code}, outcome
        return outcome

    return run


def one_error(outcome):
    """Return stderr of all processes, which has one error and at most one traceback."""
    err = "".join(each.err for each in outcome.ranks or [outcome])
    assert len(re.findall("^error", err, re.M)) == 1, outcome
    assert err.count("Traceback") <= 1, outcome
    return err


@pytest.mark.parametrize(
    ("rank", "ranks", "backend"),
    [
        (1, 2, "fsdp"),
        *(
            pytest.param(*of, marks=pytest.mark.slow)
            for of in ((0, 2, "ddp"), (2, 3, "ddp"), (1, 2, "deepspeed_stage_2"))
        ),
    ],
)
def test_a_fault_in_one_process_is_told_once_and_fails_the_run(rank, ranks, backend, failing, tracked):
    """The failed process prints the traceback; the run's failure reason has the line in the user's code."""
    failed = failing(at(rank, "fault"), f"engine.backend={backend}", ranks=ranks, code=5)
    assert f"error [rank {rank}]: faulty.py:{FAULT}: " in one_error(failed)
    assert "Traceback" in failed.ranks[rank].err
    run = tracked(failed.folder)
    assert run.status == "FAILED"
    named = f'rank {rank}: faulty.py:{FAULT}: KeyError: "a fault of the user\'s"'
    assert named in run.tags["failure"] or rank == 0
    assert "KeyError" in run.tags["failure"]


def test_a_cause_is_whole_whenever_it_is_read(tmp_path):
    """It is complete even while its process refines it and another process tries to record its own."""

    def refine(rank):
        for number in range(300):
            record_cause(tmp_path, Cause(rank, f"{number} " + "word " * 5000, 5), by=rank)

    assert record_cause(tmp_path, Cause(1, "first", 5), by=1)
    threads = [threading.Thread(target=refine, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    read = []
    while any(thread.is_alive() for thread in threads):
        read.append(first_cause(tmp_path))
    assert {None if cause is None else cause.rank for cause in read} == {1}
    assert first_cause(tmp_path).reason.startswith("299 ")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_an_error_of_gloo_is_a_lost_process_and_another_error_is_not():
    """After a timeout gloo also closes connections of parallel operations, with another message. The message of a
    loader's worker quotes paths and code, which may contain any word."""
    worker = 'Caught RuntimeError in DataLoader worker process 0.\n  File "/data/store/own.py", line 3\nRuntimeError: x'
    assert is_lost(RuntimeError("Application timeout caused pair closure"))
    assert not is_lost(RuntimeError("the pair of inputs does not fit"))
    assert not is_lost(RuntimeError(worker))


TIMED_OUT = """\
import os
import sys
from pathlib import Path

from deeplightning.process.ranks import Ranks

folder = Path(sys.argv[1])
(folder / "2.pid").write_text("1")
group = Ranks(0, folder)
print(group.cause_of(RuntimeError("Application timeout caused pair closure")), flush=True)
os._exit(0)
"""


def test_a_time_limit_is_known_whichever_operation_timed_out(tmp_path):
    """Of two waiting operations gloo reports the timeout for one, and closed connections for the other."""
    done = python("-c", TIMED_OUT, tmp_path)
    assert done.stdout == "rank 0: timed out (engine.params.timeout)\n", done.stderr


@pytest.mark.parametrize(
    ("rank", "what", "code", "words", "reason"),
    [
        ("null", "fault", 5, rf"faulty\.py:{FAULT}: ", "KeyError"),
        (1, "data", 3, r"\Aerror \[rank 1\]: a picture cannot be read\n\Z", r"rank 1: a picture cannot be read\Z"),
        (1, "spoil", 5, r"^error \[rank 1\]: train_loss is nan", "train_loss is nan"),
    ],
    ids=["an error of all", "an error with an exit code", "a loss of NaN"],
)
def test_an_error_ends_all_with_its_exit_code_and_is_told_once(rank, what, code, words, reason, failing, tracked):
    """The error names the rank, and has a traceback only if code failed; the run's failure tag has the reason."""
    failed = failing(at(rank, what), code=code)
    assert re.search(words, one_error(failed), re.MULTILINE)
    assert ("Traceback" in one_error(failed)) == (what == "fault")
    run = tracked(failed.folder)
    assert run.status == "FAILED"
    assert re.search(reason, run.tags["failure"])


def test_a_config_that_only_lightning_finds_wrong_is_told_once(failing):
    """Lightning's exception becomes an error with exit code 2, whichever process raised it first."""
    failed = failing("train.early_stop={metric: nosuch}", code=2)
    assert "train.early_stop.metric" in one_error(failed)


@pytest.mark.parametrize(
    ("rank", "ranks", "what", "code"),
    [
        (1, 2, "kill", -signal.SIGKILL),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in ((1, 2, "leave", 7), (0, 3, "kill", -signal.SIGKILL))),
    ],
)
def test_a_process_that_dies_without_a_word_ends_the_others(rank, ranks, what, code, start, tracked):
    """Without our launcher the others see only the closed connection; they end with exit code 5."""
    failed = start(at(rank, what), ranks=ranks).end()
    assert [each.code for each in failed.ranks] == [code if number == rank else 5 for number in range(ranks)]
    reporter = "[12]" if rank == 0 else "0"
    assert re.search(rf"^error \[rank {reporter}\]: a worker was lost", one_error(failed), re.MULTILINE)
    if rank == 1:
        run = tracked(failed.folder)
        assert run.status == "FAILED"
        assert "a worker was lost" in run.tags["failure"]


@pytest.mark.slow
def test_a_process_that_hangs_is_named_at_the_time_limit(failing, tracked):
    """The error has the time limit and its key, another line the process's position in the code; exit code 5."""
    failed = failing("engine.params.timeout=12", at(1, "sleep"), code=5)
    assert "timed out after 12 s (engine.params.timeout)" in one_error(failed)
    assert f"rank 1 is at faulty.py:{SLEEPS}" in one_error(failed)


# ---- signals


def test_a_signal_to_one_process_ends_all_politely(start, tracked, tmp_path):
    """All report the same signal, `last.ckpt` is saved, the run is KILLED. test_run.py has one process and Ctrl-C."""
    go = tmp_path / "go"
    running = start(f"train.callbacks=[{{type: own.Waits, params: {{until: '{go}'}}}}]")
    running.says("waits")
    running.signal(signal.SIGTERM)
    go.touch()
    killed = running.end(code=143)
    assert one_error(killed) == "error: interrupted by SIGTERM\n"
    run = tracked(killed.folder)
    assert (run.status, run.tags["failure"]) == ("KILLED", "Interrupted: interrupted by SIGTERM")
    assert (killed.folder / "last.ckpt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("signalled", "times"), [(0, 2), (1, 2), (0, 1)])
def test_a_second_signal_or_half_a_minute_ends_processes_that_wait_for_each_other(signalled, times, start, tracked):
    """One hangs and one is blocked in a collective: after two signals both end within seconds; the run is KILLED."""
    running = start(at(1, "sleep"))
    running.ranks[1].says("sleeps")
    for _ in range(times):
        time.sleep(1)
        running.signal(signal.SIGTERM, rank=signalled)
    begun = time.monotonic()
    killed = running.end()
    assert time.monotonic() - begun < 20 or times == 1
    assert {each.code for each in killed.ranks} == {143}, killed
    assert f"interrupted by SIGTERM{'; the batch was not done after 3' if times == 1 else ''}" in one_error(killed)
    assert tracked(killed.folder).status == "KILLED"


# ---- rendezvous


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_port_in_use_is_named_at_once(ranks, command, tiny, here):
    """The exit code is 3, both with and without a launcher of the user."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = ("engine.processes=2", "engine.backend=ddp")
        failed = command("train", tiny, *engine, cwd=here, ranks=ranks, MASTER_PORT=str(port))
    assert {each.code for each in failed.ranks or [failed]} == {3}, failed
    assert f"MASTER_PORT: port {port} is in use" in one_error(failed)


@pytest.mark.parametrize("port", ["many", "70000"])
def test_an_invalid_port_is_named(port, failing):
    """A port must be a whole number from 1 to 65535."""
    assert f"MASTER_PORT='{port}' is not a port" in one_error(failing(code=3, MASTER_PORT=port))


def test_an_address_that_is_not_known_is_named(failing):
    """The host name is resolved before the rendezvous."""
    failed = failing("engine.processes=2", code=3, ranks=1, MASTER_ADDR="nowhere.invalid")
    assert "MASTER_ADDR=nowhere.invalid" in one_error(failed)


def test_an_error_that_all_processes_find_is_reported_once(command, tiny, here):
    """Both processes find the error themselves; the second starts after the first has reported it."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "-2", "WORLD_SIZE": "2"}
    both = []
    for rank in "01":
        both.append(command.start("train", tiny, "engine.processes=2", cwd=here, LOCAL_RANK=rank, **address))
        if rank == "0":
            both[0].says("is not a port", "err")
    ended = [each.end() for each in both]
    assert [each.code for each in ended] == [3, 3], ended
    assert [each.err.count("is not a port") for each in ended] == [1, 0], ended
    assert not shared_folder(address).exists()


def test_two_processes_that_enter_at_once_both_stay(monkeypatch, tmp_path):
    """The first clears the folder of a previous launch, but keeps the entry of a process that enters meanwhile."""
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("MASTER_PORT", "29400")
    found = folders.enter(0)
    (found / "0.pid").write_text("")  # of a process that was killed
    second = threading.Thread(target=folders.enter, args=(1,))
    members = folders.members

    def slowly(folder):
        present = members(folder)
        if second.ident is None:
            second.start()
            second.join(0.3)
        return present

    monkeypatch.setattr(folders, "members", slowly)
    assert folders.enter(2) == found
    second.join()
    assert {path.name for path in found.glob("*.pid")} == {"1.pid", "2.pid"}


# ---- processes that Lightning's launcher starts


@pytest.fixture
def launched(tiny, here, tmp_path):
    """`launched(override, …)` starts a run of two processes; afterwards no process and no shared folder remains."""
    started = []

    def start(*overrides):
        command = [sys.executable, "-m", "deeplightning", "train", tiny, "engine.processes=2", "engine.backend=ddp"]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        variables = environment(TMPDIR=str(tmp_path))
        run = subprocess.Popen([*command, *overrides], cwd=here, env=variables, start_new_session=True, **output)
        started.append(run)
        return run

    yield start
    for run in started:
        assert ended(run.pid), "processes are still running"
    assert list(tmp_path.glob("deeplightning-ranks-*")) == []


def ended(group, seconds=20):
    """Return whether all processes of a group end."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    return False


def test_a_launched_process_that_is_killed(launched, tracked):
    """The error has the signal and the rank; the exit code is 5 and the run is FAILED."""
    run = launched(at(1, "kill"))
    out, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 5, err
    assert "error [rank 1]: a worker was lost: the process was killed by SIGKILL" in err
    assert len(re.findall("^error", err, re.M)) == 1
    assert re.search("; there is no checkpoint yet|last.ckpt, and train.resume_ckpt=auto resumes from it", err)
    tracked_run = tracked(folder(out))
    assert "rank 1: a worker was lost: the process was killed by SIGKILL" in tracked_run.tags["failure"]
    assert tracked_run.status == "FAILED"


LOCAL = "{type: deeplightning.launch.Local}"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["null", LOCAL])
def test_a_process_that_dies_after_its_work_fails_no_run(launcher, launched, tracked):
    """It aborts after its exit functions, so nothing of the run is lost; all ranks use the seed that rank 0 drew."""
    run = launched(at(1, "abort_late"), f"engine.launcher={launcher}", "seed=null")
    out, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 0, err
    assert launcher == LOCAL or out.count("seed: null → ") == 1
    assert tracked(folder(out)).status == "FINISHED"


@pytest.mark.slow
def test_the_launcher_that_is_killed_takes_the_others_along(launched):
    """The other processes end when the launcher is gone."""
    run = launched(at(0, "kill"))
    run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_launched_process_that_stands_still(launched, tracked):
    """A stopped process cannot report where it is; it is killed at the time limit."""
    run = launched("engine.params.timeout=20", at(1, "stop"))
    out, err = run.communicate(timeout=LIMIT_SECONDS)
    assert run.returncode == 5, err
    assert "error [rank 0]: timed out after 20 s" in err
    assert tracked(folder(out)).status == "FAILED"


def folder(out):
    return Path(out.splitlines()[-1].removeprefix("Artifact storage path: "))


KEPT = """\
import os, sys, time
from pathlib import Path
from deeplightning.process.ranks import Ranks
folder = Path(sys.argv[1])
group = Ranks(0, folder)
os.utime(folder, (0, 0))
while folder.stat().st_mtime == 0:
    time.sleep(0.1)
print("kept", flush=True)
os._exit(0)
"""


def test_the_folder_of_a_launch_does_not_age(tmp_path):
    """A cleaner of /tmp would remove it, and the processes would end."""
    assert python("-c", KEPT, tmp_path).stdout == "kept\n"


def test_the_name_of_rank_0_may_be_known_later(monkeypatch):
    """With a waiting time, rank 0 waits for its own name as the others do."""
    answers, real = iter([False, False]), socket.getaddrinfo

    def resolve(*given, **options):
        if next(answers, True):
            return real("127.0.0.1", *given[1:], **options)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", resolve)
    monkeypatch.setenv("DEEPLIGHTNING_MEET_SECONDS", "5")
    assert rendezvous._listen("127.0.0.1", 0, 1).port > 0


HANGS_AT_EXIT = """
import sys, threading
from pathlib import Path
from deeplightning.process.failure import Cause
from deeplightning.process.ranks import Ranks

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 does

group = Ranks(0, Path(sys.argv[1]))
group.record_cause(Cause(0, "x", 3))
threading.Thread.start = refuse
group._force_exit()
"""


def test_a_process_that_hangs_in_its_exit_functions_is_ended(tmp_path):
    """Python 3.12 cannot start the thread that ends the run then."""
    assert python("-c", HANGS_AT_EXIT, tmp_path).returncode == 3
