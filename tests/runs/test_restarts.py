"""After the loss of a process all restart, up to the limit, and the run ends like an undisturbed one.

The launcher's processes are forked (see `forks`), except in one test, which starts them as a user does.
"""

import functools
import os
import random
import re
import signal
from types import SimpleNamespace

import commands
import pytest
from commands import real
from conftest import OWN, digest
from killing import FAULT, GOES_WRONG, KILLS, SETTINGS, SLEEPS, WRITING
from served import gone, wait_until
from storm.ended import end_of

from deeplightning.config.schema import Engine
from deeplightning.tracking.code import read_code

FORKED = "forks:main"

LOSSES = (
    GOES_WRONG
    + '''

if "PIDS" in os.environ:
    pathlib.Path(os.environ["PIDS"], f"{os.getpid()}").touch()


class Writes(pl.Callback):
    """Creates a file in each process."""

    def on_train_start(self, trainer, module):
        pathlib.Path(os.environ["FILES"], f"callback in rank {trainer.global_rank}").touch()


def fails():
    raise OSError("the device is not there")


def hook():
    """Records its call in a file, and gives the log another format."""
    start, rank = (os.environ.get(name, "-") for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    group = "there is a group" if torch.distributed.is_initialized() else "no group yet"
    file = pathlib.Path(os.environ["FILES"], f"start {start} of rank {rank}")
    file.write_text(f"{group}, {os.environ.get('FLAVOUR')}")
    for handler in logging.getLogger("deeplightning").handlers:
        handler.setFormatter(logging.Formatter("own format | %(levelname)s | %(message)s"))


def dies_early():
    """Kills its process in the first start, when the run folder has a config and nothing else yet."""
    real = os.replace

    def replace(source, target, **more):
        if str(target).endswith("environment.json") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        real(source, target, **more)

    os.replace = replace
'''
)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A working directory with user code."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "losses.py").write_text(LOSSES)
    (folder / "own.py").write_text(OWN)
    one_kill = 'os.environ.get("KILL", "-:0").split(":")'
    assert one_kill in KILLS
    one_each = 'os.environ["KILL"].split(",")[int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 3))].split(":")'
    (folder / "kills.py").write_text(KILLS.replace(one_kill, one_each))
    return folder


@pytest.fixture
def launch(command, tiny, here, tmp_path):
    """`launch(override, …)` starts a supervised run; afterwards no process and no temporary file of it remains."""
    temporary, pids = tmp_path / "tmp", tmp_path / "pids"
    temporary.mkdir()
    pids.mkdir()

    def start(*overrides, restarts=1, processes=2, **variables):
        engine = [f"engine.max_restarts={restarts}", f"engine.processes={processes}"]
        launcher = ["engine.launcher={type: deeplightning.launch.Local}"] if not restarts else []
        variables = {"TMPDIR": str(temporary), "PIDS": str(pids), "main": FORKED} | variables
        return command.start("train", tiny, *engine, *launcher, *overrides, cwd=here, **variables)

    yield start
    wait_until(lambda: all(gone(int(path.name)) for path in pids.iterdir()))
    # A killed process cannot remove multiprocessing's folders, and the file with which `tempfile` tests a folder.
    assert [path for path in temporary.iterdir() if not re.match(r"pymp-|[a-z0-9_]{8}$", path.name)] == []


def at(rank, what, when="0"):
    return f"train.callbacks=[{{type: losses.At, params: {{rank: {rank}, what: {what}, epoch: 1, when: '{when}'}}}}]"


def restarts_of(outcome):
    return re.findall(r"^restart .*", outcome.err, re.MULTILINE)


@pytest.fixture(scope="module")
def undisturbed(command, tiny, here, tracked):
    """`undisturbed(processes, backend)` is the weights' digest and the points of a run that loses no process."""

    @functools.cache
    def run(processes, backend):
        engine = [f"engine.processes={processes}", f"engine.backend={backend}", "engine.max_restarts=1"]
        done = command("train", tiny, *engine, cwd=here, main=FORKED, code=0)
        return digest(done.folder / "last.ckpt"), tracked(done.folder).series()

    return run


# ---- number of restarts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("restarts", "when", "code", "needed"),
    [(0, "0", 5, 0), (1, "0", 0, 1), (3, "0123", 5, 3)],
    ids=["0-one", "1-one", "3-every"],
)
def test_a_lost_process_is_started_again_as_often_as_allowed(
    restarts, when, code, needed, launch, tracked, undisturbed
):
    """Each restart prints a line. The run ends like an undisturbed one, or FAILED with the last checkpoint named."""
    victim = 1 if code == 0 else 0  # rank 0 reports the failure
    done = launch(at(victim, "kill", when), restarts=restarts).end(code=code)
    lines = restarts_of(done)
    assert len(lines) == needed
    for number, line in enumerate(lines, start=1):
        assert line.startswith(f"restart {number} of {restarts}: rank {victim}: a worker was lost: "), line
        assert line.endswith(f"resumes from {done.folder / 'last.ckpt'}")
    run = tracked(done.folder)
    assert run.tags.get("restarts", "0") == str(needed)
    if code == 0:
        assert run.status == "FINISHED"
        assert "failure" not in run.tags
        assert (digest(done.folder / "last.ckpt"), run.series()) == undisturbed(2, "null")
    else:
        assert run.status == "FAILED"
        assert run.tags["failure"].startswith("rank 0: a worker was lost")
        assert f"the last checkpoint is {done.folder / 'last.ckpt'}" in done.err
        assert len(re.findall("^error", done.err, re.MULTILINE)) == 1


KILL = "rank 1: a worker was lost: "
HANG = "rank 0: timed out after 12 s (engine.params.timeout); resumes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "what", "words"),
    [
        *((backend, "kill", KILL) for backend in ("fsdp", "deepspeed_stage_2", "deepspeed_stage_3")),
        *(("null", what, HANG) for what in ("sleep", "stop")),
    ],
)
def test_sharded_engines_and_hanging_processes_restart(backend, what, words, launch, tracked, undisturbed):
    """Each process loads its own shards; at the time limit all processes end, a stopped one by force."""
    limit = [] if what == "kill" else ["engine.params.timeout=12"]
    done = launch(f"engine.backend={backend}", *limit, at(1, what)).end(code=0)
    (line,) = restarts_of(done)
    assert line.startswith(f"restart 1 of 1: {words}"), done
    assert what != "sleep" or f"rank 1 is at losses.py:{SLEEPS}\n" in done.err
    assert (digest(done.folder / "last.ckpt"), tracked(done.folder).series()) == undisturbed(2, backend)


def test_an_edit_does_not_reach_a_restart(launch, tracked, undisturbed, here, tmp_path):
    """Restarted processes use the code and config of the first start, and so does the run's `code.zip`. Config and
    folder are printed once."""
    code, config = here / "edited.py", tmp_path / "more.yaml"
    code.write_text(LOSSES)
    config.write_text("train: {callbacks: [{type: edited.At, params: {rank: 1, what: edit}}]}\n")
    done = launch(config, "--show-config", EDITS=f"{code}{os.pathsep}{config}").end(code=0)
    assert len(restarts_of(done)) == 1
    assert [done.out.count(words) for words in ("\nseed: 7\n", "Artifact storage path: ")] == [1, 1]
    run = tracked(done.folder)
    assert (run.status, run.tags["restarts"], "failure" in run.tags) == ("FINISHED", "1", False)
    assert "this was edited" in code.read_text()
    assert "this was edited" in config.read_text()
    assert (digest(done.folder / "last.ckpt"), run.series()) == undisturbed(2, "null")
    kept = read_code(done.folder / "code.zip")
    assert kept.roots[0] == kept.working_directory == str(here)
    assert kept.names()["edited.py"] == LOSSES.encode()


def test_a_single_process_is_started_again_as_well(launch, tracked, undisturbed):
    """A single process that crashes is restarted, resumes, and ends like an undisturbed run."""
    done = launch(at(0, "crash"), processes=1).end(code=0)
    assert "restart 1 of 1: rank 0: a worker was lost: the process was killed by SIGSEGV; resumes" in done.err
    assert (digest(done.folder / "last.ckpt"), tracked(done.folder).series()) == undisturbed(1, "null")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("fault", f"losses.py:{FAULT}: KeyError: "),
        ("spoil", "train_loss is nan"),
        ("leave", "the process ended with exit code 7 without a message"),
    ],
)
def test_an_error_that_would_recur_is_not_restarted(what, words, launch):
    """An error of the code, a loss that is NaN and an exit without a message are reported once, without a restart."""
    done = launch(at(0, what), processes=1).end(code=5)
    assert restarts_of(done) == []
    assert words in done.err
    assert len(re.findall("^error", done.err, re.MULTILINE)) == 1


@pytest.mark.slow
def test_a_process_that_cannot_be_started_ends_the_launch(launch, tmp_path):
    """If the second process cannot be forked, the first one and the launcher end; the exit code is 3."""
    refuses = tmp_path / "refuses"
    refuses.touch()
    done = launch(at(1, "kill", "never"), REFUSES=str(refuses)).end(code=3)
    assert "engine.processes: the processes cannot be started: Resource temporarily unavailable" in done.err


# ---- the launching process


@pytest.mark.parametrize(
    ("number", "code", "processes"),
    [(signal.SIGTERM, 143, 2), pytest.param(signal.SIGINT, 130, 1, marks=pytest.mark.slow)],
)
def test_a_signal_to_the_launcher_ends_all_politely(number, code, processes, launch, tracked, tmp_path):
    """Each process finishes its batch, `last.ckpt` is saved, the run is KILLED, and no process is restarted."""
    go = tmp_path / "go"
    running = launch(f"train.callbacks=[{{type: own.Waits, params: {{until: '{go}'}}}}]", processes=processes)
    running.says("waits")
    running.signal(number)
    go.touch()
    killed = running.end(code=code)
    assert restarts_of(killed) == []
    name = signal.Signals(number).name
    assert re.findall("^error.*", killed.err, re.MULTILINE)[0].endswith(f"interrupted by {name}")
    assert tracked(killed.folder).status == "KILLED"
    assert (killed.folder / "last.ckpt").is_file()


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_processes_along(launch, tracked, undisturbed, tmp_path):
    """They notice it and end; the same command with `train.resume_ckpt=auto` resumes the same run."""
    go, named = tmp_path / "go", f"logger.params.experiment_name=killed-{tmp_path.name}"
    waits = f"{at(0, 'kill', 'never')[:-1]}, {{type: own.Waits, params: {{until: '{go}'}}}}]"
    running = launch(waits, named)
    out = running.says("waits")
    running.signal(signal.SIGKILL)
    assert running.end().code == -signal.SIGKILL
    go.touch()
    done = launch(waits, named, "train.resume_ckpt=auto").end(code=0)
    assert f"run folder {done.folder}" in out
    assert (digest(done.folder / "last.ckpt"), tracked(done.folder).series()) == undisturbed(2, "null")


# ---- the hook


def test_a_hook_is_called_in_every_process_and_after_every_restart(launch, tmp_path):
    """It is called before the process group exists, with the variables of `engine.env`; it may set the log's format."""
    files = tmp_path / "files"
    files.mkdir()
    callbacks = f"{at(1, 'kill')[:-1]}, {{type: losses.Writes}}]"
    done = launch("engine.setup_hook=losses.hook", "engine.env={FLAVOUR: bitter}", callbacks, FILES=str(files)).end(0)
    (line,) = restarts_of(done)
    assert line.startswith("restart 1 of 1: rank 1: a worker was lost: ")
    assert line.endswith(f"resumes from {done.folder / 'last.ckpt'}")
    calls = {path.name: path.read_text() for path in files.glob("start *")}
    assert calls == {f"start {start} of rank {rank}": "no group yet, bitter" for start in (0, 1) for rank in (0, 1)}
    for rank in (0, 1):
        lines = (done.folder / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert [line for line in lines if not line.startswith("own format | ")] == []
        assert lines
        assert (files / f"callback in rank {rank}").exists()
    assert not re.search("destroy_process_group|leaked", done.err)


# ---- the watchdog


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_watchdog_names_a_process_that_stands_still(processes, command, launch, tiny, here, tracked):
    """It reports the line of code; all processes end with exit code 5, or restart and resume if allowed."""
    watchdog = "{type: deeplightning.callbacks.watch.Watchdog, params: {seconds: 3}}"
    overrides = [f"{at(processes - 1, 'sleep')[:-1]}, {watchdog}]"]
    if processes == 1:
        done = command("train", tiny, *overrides, cwd=here, code=5)
        assert tracked(done.folder).status == "FAILED"
        assert re.search(r"^error .*no progress for 3 s$", done.err, re.MULTILINE)
    else:
        done = launch(*overrides).end(code=0)
        (line,) = restarts_of(done)
        assert "no progress for 3 s; resumes" in line
    assert f"rank {processes - 1} is at losses.py:{SLEEPS}\n" in done.err


# ---- as a user starts it


@pytest.mark.slow
def test_processes_that_are_not_forked_restart(tiny, here, tracked, undisturbed, tmp_path):
    """`python -m deeplightning train` restarts a killed process, and the run ends like an undisturbed one."""
    arguments = ["engine.max_restarts=1", at(0, "kill")]
    done = real("train", tiny, *arguments, cwd=here, TMPDIR=str(tmp_path), PIDS=str(tmp_path), code=0)
    assert len(restarts_of(done)) == 1
    run = tracked(done.folder)
    assert run.status == "FINISHED"
    assert (digest(done.folder / "last.ckpt"), run.series()) == undisturbed(1, "null")
    names = [path.name for path in tmp_path.iterdir()]
    assert [name for name in names if not name.isdecimal()] == []
    wait_until(lambda: all(gone(int(name)) for name in names))


# ---- errors

LAUNCHER = "engine.launcher={{type: deeplightning.launch.Local, params: {}}}".format
HOOK = "engine.setup_hook={}".format


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (LAUNCHER("{master_port: 70000}"), "master_port must be from 1 to 65535, not 70000"),
        (LAUNCHER("{port: 3}"), "has no param `port`"),
        (HOOK("losses.hok"), "losses has no `hok`. Did you mean losses.hook?"),
        (HOOK("losses.At"), "losses.At needs rank, what; it is called without arguments"),
        (HOOK("losses.alarm.hook"), "losses has no `alarm`"),
        (HOOK("hook"), "`hook` is not a MODULE.NAME"),
    ],
)
def test_an_invalid_launcher_or_hook_is_named(override, words, command, tiny, here):
    """The exit code is 2; the error has the key, what is allowed and the nearest name. `check` finds it for hooks."""
    failed = command("check" if "hook" in override else "train", tiny, override, cwd=here, code=2)
    assert words in failed.err
    assert override.partition("=")[0] in failed.err


def test_a_hook_that_fails_is_code_of_the_user(command, tiny, here):
    """The error has its file and exception; the exit code is 5."""
    failed = command("train", tiny, "engine.setup_hook=losses.fails", cwd=here, code=5)
    assert "losses.py:" in failed.err.splitlines()[-1]
    assert "the device is not there" in failed.err


def test_a_port_of_the_config_is_free_again_for_a_restart(tmp_path, monkeypatch):
    """The processes of each start use the same port, so the restarted run ends with exit code 0."""
    from deeplightning.launch import local

    words = ["/bin/sh", "-c", f"test -e {tmp_path}/again || {{ touch {tmp_path}/again; kill -9 $$; }}"]
    monkeypatch.setattr(local, "_command", lambda job: words)
    job = SimpleNamespace(cfg=SimpleNamespace(engine=Engine(max_restarts=1), redact=str))
    assert local.Local(master_port=commands.free_port())._supervise(job) == 0


@pytest.mark.parametrize("resumed", ["null", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_process_lost_while_its_run_is_opened_leaves_one_run(resumed, launch, store):
    """The run has a config but no launch id yet; the restart continues it, and makes no second run."""
    from mlflow.tracking import MlflowClient

    settings = [f"logger.params.experiment_name=opened-{resumed}", f"train.resume_ckpt={resumed}"]
    done = launch("engine.setup_hook=losses.dies_early", *settings, processes=1).end(code=0)
    assert len(restarts_of(done)) == 1
    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name(f"opened-{resumed}").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"]


# ---- kills at any instant


@pytest.mark.slow
def test_twenty_kills(launch, here, store, monkeypatch):
    """Killed at seeded events, one process or both, in one start or two, the run ends like an undisturbed one."""
    monkeypatch.setattr(commands, "LIMIT_SECONDS", 300)  # a launch starts up to three times
    draw = random.Random(8)
    expected, events = {}, {}
    for processes in (1, 2):
        name = f"undisturbed-{processes}"
        launch(*settings(name, processes), restarts=3, processes=processes, **variables(here, name)).end(code=0)
        expected[processes] = end_of(store, name)
        events[processes] = [(here / f"{name}.{rank}").read_text().splitlines() for rank in range(processes)]
    kinds = [WRITING, ("before replace",), ("in the validation",), ("at the end of epoch", "after the validation")]
    for number in range(20):
        processes, name = 1 + number % 2, f"restarts-{number}"
        victim = draw.choice(range(processes))
        own = events[processes][victim]
        places = [place for place, event in enumerate(own, 1) if event.startswith(kinds[number // 2 % 4])]
        first = draw.choice(places) if number < 8 and places else draw.randrange(1, len(own))
        others = "".join(map(str, set(range(processes)) - {victim})) if draw.random() < 0.3 else ""
        second = f"{draw.choice(range(processes))}:{draw.randrange(1, len(own) // 2)}" if number % 3 == 0 else "-:0"
        kills = variables(here, name) | {"KILL": f"{victim}{others}:{first},{second},-:0,-:0"}
        done = launch(*settings(name, processes), restarts=3, processes=processes, **kills).end()
        assert done.code == 0, (kills, done)
        assert end_of(store, name) == expected[processes], (kills, own[first - 1], done)


def settings(name, processes):
    return [
        *(setting for setting in SETTINGS if not setting.startswith("train.resume_ckpt")),
        f"logger.params.experiment_name={name}",
        f"data.batch_size={16 // processes}",
    ]


def variables(here, name):
    return {"EVENTS": str(here / name), "KILL": "-:0,-:0,-:0,-:0"}
