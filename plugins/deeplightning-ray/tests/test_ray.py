"""A run on a Ray cluster equals a local one, and resumes when workers are lost, removed and added."""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
import yaml
from conftest import digest, weights

from deeplightning.callbacks.record import Resumption
from deeplightning.config.examine import load_config
from deeplightning.config.own_runs import is_own
from deeplightning.config.schema import Engine
from deeplightning.faults import CheckpointError, ConfigError, SetupError
from deeplightning.launch import Job, hooks_here
from deeplightning.own_code import SEAL
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.code import Code, read_code

pytest.importorskip("deeplightning_ray")

from deeplightning_ray import Ray, launcher, worker_stdin
from deeplightning_ray import cluster as ray_cluster
from deeplightning_ray import workers as ray_workers
from deeplightning_ray.agent import Agent
from deeplightning_ray.resize import resize_config
from deeplightning_ray.storage import CARD, POOL, Storage
from deeplightning_ray.supervise import Supervisor

LAUNCHER = "engine.launcher={type: Ray, params: {address: ADDRESS, MORE}}"
SMALL = "init: {object_store_memory: 80_000_000}"
ALONE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'deeplightning[ray]'"
)

OWN = '''\
"""User code in the working directory of the command."""

import os
import pathlib
import signal
import time

import pytorch_lightning as pl


class Notes(pl.Callback):
    """Records each epoch in its first batch, with the number of workers; may die or wait in the third batch.

    `dies` is {epoch: rank}: that rank kills itself in that epoch, once. `waits` is a list of epochs: rank 0 waits until
    the folder has a file `go-EPOCH`. With `edits` it overwrites this code before it dies.
    """

    def __init__(self, folder, dies={}, waits=(), edits=False):
        self.edits = edits
        self.folder, self.dies, self.waits = pathlib.Path(folder), {int(k): v for k, v in dies.items()}, waits

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        epoch, mark = trainer.current_epoch, self.folder / f"died-{trainer.current_epoch}"
        if batch_idx == 0 and trainer.is_global_zero:
            with (self.folder / "epochs").open("a") as file:
                file.write(f"{epoch} {trainer.world_size} {trainer.accumulate_grad_batches}\\n")
        if batch_idx != 2:
            return
        if self.dies.get(epoch) == trainer.global_rank and not mark.exists():
            mark.touch()
            if self.edits:
                pathlib.Path("notes_of.py").write_text("this was edited\\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if epoch in self.waits and trainer.is_global_zero:
            print(f"waits in epoch {epoch}, process {os.getpid()}", flush=True)
            while not (self.folder / f"go-{epoch}").exists():
                time.sleep(0.02)


def hook():
    with open(os.environ["HOOKS"], "a") as file:
        file.write(f"{os.environ['RANK']} {os.environ['OF_ALL']}\\n")
'''


class Cluster:
    """Cluster of one CPU, to which a second one can be added."""

    def __init__(self):
        program = [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))]
        pipe = subprocess.PIPE
        environment = commands.environment(**ALONE)
        self.process = subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        self.address = self._line()
        assert ":" in self.address, self.process.communicate()

    def _line(self):
        return self.process.stdout.readline().strip()

    def say(self, word):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self._line() == word

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    made.say("add")
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def _patient():
    """Set a limit for workers, each of which imports everything in a new process on a busy machine."""
    before, commands.LIMIT_SECONDS = commands.LIMIT_SECONDS, 280
    yield
    commands.LIMIT_SECONDS = before


@pytest.fixture
def work(tmp_path):
    """Working directory with user code."""
    folder = tmp_path / "a place"
    folder.mkdir()
    (folder / "notes_of.py").write_text(OWN)
    return folder


def on(address, *more):
    return LAUNCHER.replace("ADDRESS", address).replace("MORE", ", ".join(more))


def notes(folder, **params):
    return f"train.callbacks=[{{type: notes_of.Notes, params: {json.dumps({'folder': str(folder), **params})}}}]"


def epochs(folder):
    """Return (epoch, workers, accumulated batches) of each epoch that has begun, in order."""
    return [tuple(map(int, line.split())) for line in (folder / "epochs").read_text().splitlines()]


def of_launch(name):
    """Return the processes of a launch, by their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"DEEPLIGHTNING_LAUNCH={name}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


@needs_ray
def test_the_cluster_file_of_the_example_is_one():
    """Ray's validation, which `ray up` uses, accepts examples/ray/cluster.yml."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    found = yaml.safe_load((Path(__file__).parents[3] / "examples" / "ray" / "cluster.yml").read_text())
    assert validate_config(prepare_config(found)) is None  # raises ValidationError for an error


# ---- a run in a separate cluster


@needs_ray
def test_two_workers_learn_what_two_processes_learn(command, job, tiny, work, tracked, tmp_path):
    """Two workers of a new local cluster train bit-identical weights to two local processes, in one FINISHED run. Each
    worker has the user's code, variables and hook; the secret appears nowhere, and nothing of Ray remains."""
    home = tmp_path / "home"
    home.mkdir()
    arguments = ["train.num_epochs=2", notes(tmp_path), "engine.setup_hook=notes_of.hook"]
    arguments += ["engine.env={OF_ALL: yes, HOOKS: '${oc.env:HOOKS}'}", "logger.params.tags={key: '${oc.env:SECRET}'}"]
    ray = on("local", SMALL)
    variables = {"HOOKS": str(tmp_path / "hooks"), "SECRET": "open sesame", "HOME": str(home)}
    done = command("train", tiny, "engine.processes=2", ray, *arguments, cwd=work, **variables, code=0)
    assert digest(done.folder / "last.ckpt") == digest(job("train.num_epochs=2").folder / "last.ckpt")
    assert tracked(done.folder).status == "FINISHED"
    assert epochs(tmp_path) == [(0, 2, 1), (1, 2, 1)]
    assert sorted((tmp_path / "hooks").read_text().split("\n")[:2]) == ["0 yes", "1 yes"]
    assert "open sesame" not in done.out + done.err + (done.folder / "cfg.yaml").read_text()
    assert "(pid=" not in done.out + done.err
    assert "ray" not in done.err.lower(), done.err
    assert not list(home.glob("*"))
    assert not list(home.glob(".ray*"))
    assert not [path for path in Path(tempfile.gettempdir()).glob("dl-ray-*") if path.stat().st_mtime > _STARTED]
    launch = json.loads((done.folder / "environment.json").read_text())["launch"]
    assert launch.startswith("ray-")
    assert of_launch(launch) == []


_STARTED = time.time()


# ---- before anything runs


def test_an_address_that_does_not_answer_is_named(command, tiny, work):
    """An address without a listener, and an invalid one, end with exit code 3 and an error that names it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            done = command("train", tiny, on(f"'{address}'"), cwd=work, code=3)
            assert f"engine.launcher.params.address: the Ray cluster at {address} does not answer" in done.err
            assert "Traceback" not in done.err
    done = command("train", tiny, on("nowhere"), cwd=work, code=3)
    assert "'nowhere' is not an address: HOST:PORT, ray://HOST:PORT, auto, or null" in done.err


def test_auto_without_a_cluster_is_an_error(monkeypatch, tmp_path):
    """`auto` without a known cluster is an error; null then starts a local cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "CURRENT", tmp_path / "none")
    with pytest.raises(SetupError, match="there is no cluster: RAY_ADDRESS is not set"):
        ray_cluster._find("auto")
    assert ray_cluster._find(None) is None
    with socket.socket() as left:
        left.bind(("127.0.0.1", 0))
        (tmp_path / "none").write_text(f"127.0.0.1:{left.getsockname()[1]}\n")
        assert ray_cluster._find(None) is None  # the file of a cluster that has ended
        left.listen()
        assert ray_cluster._find("auto") == f"127.0.0.1:{left.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        assert ray_cluster._find(None) == f"127.0.0.1:{left.getsockname()[1]}"


@pytest.mark.parametrize("how", ["of another user", "group", "everybody", "link"])
def test_the_note_of_another_user_names_no_cluster(how, monkeypatch, tmp_path, caplog):
    """An address file that other users may write is ignored, because a driver sends its code and variables there."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    note, fstat = tmp_path / "note", os.fstat
    monkeypatch.setattr(ray_cluster, "CURRENT", note)
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        note.write_text(f"127.0.0.1:{theirs.getsockname()[1]}\n")
        if how == "of another user":
            foreign = os.stat_result((*note.stat()[:4], os.geteuid() + 1, *note.stat()[5:]))
            stat = lambda file: foreign if fstat(file).st_ino == foreign.st_ino else fstat(file)  # noqa: E731
            monkeypatch.setattr(os, "fstat", stat)
        elif how == "link":
            note.symlink_to(note.rename(tmp_path / "theirs"))
        else:
            note.chmod(0o664 if how == "group" else 0o646)
        assert ray_cluster._find(None) is None
        with pytest.raises(SetupError, match="there is no cluster"):
            ray_cluster._find("auto")
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.accept()
    if how != "link":
        assert f"{note} could have been written by another user" in caplog.text


def test_a_missing_ray_is_named_with_the_command_that_installs_it(monkeypatch):
    """The error has the install command, and the exit code is 3."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError) as raised, ray_cluster.connect("local"):
        pass
    assert "pip install 'deeplightning[ray]'" in str(raised.value)
    assert raised.value.exit_code == 3


def test_plan_shows_the_workers_and_starts_nothing(command, tiny, work):
    """`plan` prints the command, number and variables of the workers; `check` and `plan` need no cluster."""
    ray = on("'ray://head:10001'", "min_workers: 1", "storage_path: /checkpoints")
    done = command("plan", tiny, "engine.processes=3", ray, cwd=work, code=0)
    [start] = yaml.safe_load(done.out)
    assert start["times"] == 3
    assert start["command"][1:] == ["-P", "-m", "deeplightning_ray.worker"]
    assert start["where"] == "workers of a Ray cluster (ray://head:10001), each with 1 CPUs, from 1 to 3"
    assert start["environment"]["WORLD_SIZE"] == "3"
    assert json.loads(start["environment"]["DEEPLIGHTNING_POOL"]) == {"storage": "/checkpoints"}
    assert command("check", tiny, "engine.gpus=2", ray, cwd=work).code == 0


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"min_workers": 3, "max_workers": 2}, "min_workers (3) must not be more than max_workers (2)"),
        ({"min_workers": 0}, "min_workers must be at least 1, not 0"),
        ({"backoff": {"base": 1}}, "backoff takes base_s, factor, max_tries, not base"),
        ({"resize_cooldown_s": -1}, "resize_cooldown_s must be at least 0, not -1"),
    ],
)
def test_impossible_numbers_are_refused(params, words):
    """The constructor raises ValueError with the param and its bound."""
    with pytest.raises(ValueError, match=re.escape(words)):
        Ray(**params)


@pytest.fixture(scope="module")
def three(tiny):
    """The tiny config for three processes."""
    return load_config(tiny, ["engine.processes=3", "data.batch_size=16"])


@pytest.mark.parametrize(
    ("factor", "workers", "accumulates", "words"),
    [
        (1, 3, 1, None),
        (1, 1, 3, "train.accumulator_factor: 1 → 3 (1 workers of 3; the same samples a step)"),
        (2, 2, 3, "train.accumulator_factor: 2 → 3 (2 workers of 3; the same samples a step)"),
        (1, 2, 1, "48 samples a step → 32 samples a step: 16 per process x 2 processes (2 workers of 3)"),
    ],
)
def test_fewer_workers_keep_the_samples_of_a_step_where_the_numbers_divide(three, factor, workers, accumulates, words):
    """Accumulation keeps the global batch if the numbers divide; otherwise a notice has both sizes."""
    cfg = dataclasses.replace(three, train=dataclasses.replace(three.train, accumulator_factor=factor))
    made = resize_config(cfg, 3, workers, 1)
    assert (made.engine.processes, made.engine.num_nodes, made.train.accumulator_factor) == (workers, 1, accumulates)
    assert [notice.text for notice in made.notices if "of 3" in notice.text] == ([words] if words else [])
    assert (cfg.engine.processes, cfg.train.accumulator_factor) == (3, factor)


def test_a_storage_gives_back_what_was_put(tmp_path):
    """Another machine fetches the files with their times; changed files are stored again, deleted files are removed,
    and the newest run of the experiment is found without the name of its launch."""
    here, there = tmp_path / "here", tmp_path / "there"
    folder = here / "0" / "abc" / "artifacts"
    folder.mkdir(parents=True)
    (folder / "cfg.yaml").write_text("seed: 1\n")
    (folder / "last.ckpt").write_bytes(b"first")
    (folder / "epoch=0-step=5.ckpt").write_bytes(b"kept")
    storage = Storage(str(tmp_path / "storage"), "ray-1", "Default", here)
    storage.put(folder)
    (folder / "last.ckpt").write_bytes(b"second, longer")
    (folder / "epoch=0-step=5.ckpt").unlink()
    (folder / "results.json").write_text("{}")
    storage.put(folder)
    other = Storage(str(tmp_path / "storage"), "ray-1", "Default", there)
    found = other.fetch()
    assert found == there / "0" / "abc" / "artifacts"
    fetched = {path.name: path.read_bytes() for path in found.iterdir()}
    assert fetched == {"cfg.yaml": b"seed: 1\n", "last.ckpt": b"second, longer"}
    assert (found / "last.ckpt").stat().st_mtime_ns == (folder / "last.ckpt").stat().st_mtime_ns
    storage.put(folder, everything=True)
    assert (tmp_path / "storage" / "ray-1" / "results.json").exists()
    assert not (tmp_path / "storage" / "ray-1" / "epoch=0-step=5.ckpt").exists()
    assert Storage(str(tmp_path / "storage"), "ray-2", "Default", there).fetch() is None
    assert Storage(str(tmp_path / "storage"), "ray-2", "Default", there).fetch("newest") == found
    assert Storage(str(tmp_path / "storage"), "ray-2", "Other", there).fetch("newest") is None
    assert Storage(str(tmp_path / "empty"), "ray-2", "Default", there).fetch("newest") is None


def test_a_storage_with_a_wrong_card_or_address_is_rejected(tmp_path):
    """A damaged card, one with paths outside of the folder, and an unknown kind of address are errors."""
    storage = Storage(str(tmp_path / "storage"), "ray-1", "Default", tmp_path / "root")
    (tmp_path / "storage" / "ray-1").mkdir(parents=True)
    card = tmp_path / "storage" / "ray-1" / CARD
    outside = [("../out", {}), (".", {"net.py": [1, 1]}), ("src", {"net.py": [1, 1]})]
    for inside, files in (*outside, ("0/a/artifacts", {"../../../../out": [1, 1]})):
        card.write_text(json.dumps({"experiment": "Default", "inside": inside, "files": files}))
        with pytest.raises(CheckpointError, match="leads out of"):
            storage.fetch()
    card.write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        storage.fetch()
    with pytest.raises(SetupError, match="'what://x/y' is not a storage"):
        Storage("what://x/y", "ray-1", "Default", tmp_path).fetch()


# ---- workers that are lost, removed and added


@needs_ray
def test_a_killed_worker_leaves_no_trace_in_the_weights(command, job, tiny, work, tracked, tmp_path, cluster):
    """If one of two workers is killed within an epoch, after the code was edited, all restart once with the code of the
    first start from the latest checkpoint; the same run ends FINISHED with the weights of an undisturbed one."""
    checkpoint = "train.checkpoint={every_n_epochs: 1, every_n_steps: 2}"
    arguments = ["train.num_epochs=3", checkpoint, "engine.processes=2", notes(tmp_path, dies={1: 1}, edits=True)]
    ray = on(f"'{cluster.address}'")
    done = command("train", tiny, ray, "engine.max_restarts=1", *arguments, cwd=work, **ALONE, code=0)
    assert "restart 1 of 1: rank 1: a worker was lost: the process was killed by SIGKILL" in done.err
    assert done.err.count("restart ") == 1
    assert done.out.count("Artifact storage path: ") == 1
    assert "(step 6, epoch 2)" in done.out, done
    assert tracked(done.folder).status == "FINISHED"
    assert digest(done.folder / "last.ckpt") == digest(job("train.num_epochs=3", checkpoint).folder / "last.ckpt")
    assert (work / "notes_of.py").read_text() == "this was edited\n"
    assert read_code(done.folder / "code.zip").names() == {"notes_of.py": OWN.encode()}


@needs_ray
def test_without_restarts_a_lost_worker_ends_the_run(command, tiny, work, tracked, tmp_path, cluster):
    """With `max_restarts: 0` the exit code is 5, the error names the last checkpoint, and the last line is the run's
    folder even if rank 0, which prints it, was killed."""
    arguments = ["train.num_epochs=3", "engine.processes=2", notes(tmp_path, dies={1: 0})]
    done = command("train", tiny, on(f"'{cluster.address}'"), *arguments, cwd=work, **ALONE, code=5)
    assert "error [rank 0]: a worker was lost: the process was killed by SIGKILL" in done.err
    assert f"the last checkpoint is {done.folder / 'last.ckpt'}, and train.resume_ckpt=auto resumes from it" in done.err
    assert epochs(tmp_path) == [(0, 2, 1), (1, 2, 1)]


@needs_ray
def test_a_pool_shrinks_and_grows(command, tiny, work, tracked, tmp_path, cluster):
    """If a CPU is removed in the second epoch, one worker resumes from the last checkpoint and accumulates two batches;
    once it is added again, two workers start the next epoch. It is one run, and it does not read the config again."""
    more = ["min_workers: 1", "resize_cooldown_s: 0", "backoff: {base_s: 0.2}"]
    arguments = ["train.num_epochs=4", "engine.processes=2", "engine.max_restarts=1", notes(tmp_path, waits=[1, 2])]
    config = work / "config.yaml"
    config.write_text(tiny.read_text())
    running = command.start("train", config, on(f"'{cluster.address}'", *more), *arguments, cwd=work, **ALONE)
    running.says("waits in epoch 1")
    config.unlink()
    cluster.say("remove")
    (tmp_path / "go-1").touch()
    running.says("waits in epoch 2")
    cluster.say("add")
    running.says("there is room for 1 more worker", "err")
    (tmp_path / "go-2").touch()
    done = running.end(code=0)
    assert epochs(tmp_path) == [(0, 2, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (3, 2, 1)], done
    assert "the run continues with 2 from the next epoch" in done.err
    assert "train.accumulator_factor: 1 → 2 (1 workers of 2; the same samples a step)" in done.err
    assert "32 samples a step: 16 per process x 2 batches accumulated" in done.out
    run = tracked(done.folder)
    assert run.status == "FINISHED"
    assert [step for step, _ in run.series()["val_loss"]] == [4, 9, 14, 19]
    assert weights(done.folder / "last.ckpt")


@needs_ray
def test_workers_without_a_shared_folder_resume_through_the_storage(command, job, tiny, work, tmp_path, cluster):
    """Each worker has a separate folder, and only `storage_path` is shared. After a loss the other rank fetches the
    checkpoint; after the second loss a launch in new folders resumes with `resume_ckpt: auto`, to the weights of an
    undisturbed run."""
    storage = tmp_path / "storage"

    def launch(name, code, *more):
        params = [f"working_dir: '{tmp_path}/{name}-{{node}}'", f"storage_path: '{storage}'"]
        arguments = ["train.num_epochs=4", "engine.processes=2", "engine.max_restarts=1", *more]
        arguments += ["logger.params.tracking_uri=mlruns", notes(tmp_path, dies={1: 1, 2: 0})]
        return command("train", tiny, on(f"'{cluster.address}'", *params), *arguments, cwd=work, **ALONE, code=code)

    first = launch("one", 5)
    assert len([*tmp_path.glob("one-*")]) == 2
    assert first.folder in tmp_path.glob("one-*/mlruns/*/*/artifacts")
    shutil.rmtree(first.folder)
    second = launch("two", 0, "train.resume_ckpt=auto")
    assert "two-" in str(second.folder)
    assert epochs(tmp_path) == [(0, 2, 1), (1, 2, 1), (1, 2, 1), (2, 2, 1), (2, 2, 1), (3, 2, 1)]
    assert digest(second.folder / "last.ckpt") == digest(job("train.num_epochs=4").folder / "last.ckpt")
    assert len([*storage.glob("*/last.ckpt")]) == 2


@needs_ray
def test_ctrl_c_saves_and_ends_the_run(command, tiny, work, tracked, tmp_path, cluster):
    """SIGINT to the command finishes the batch and saves a checkpoint; the run is KILLED, the exit code 130, and no
    worker remains."""
    arguments = ["train.num_epochs=100", "engine.processes=2", notes(tmp_path, waits=[1])]
    running = command.start("train", tiny, on(f"'{cluster.address}'"), *arguments, cwd=work, **ALONE)
    running.says("waits in epoch 1")
    running.signal(signal.SIGINT)
    (tmp_path / "go-1").touch()
    done = running.end(code=130)
    assert "interrupted by SIGINT" in done.err
    assert tracked(done.folder).status == "KILLED"
    import torch

    assert 5 < torch.load(done.folder / "last.ckpt", weights_only=True)["global_step"] < 500
    launch = json.loads((done.folder / "environment.json").read_text())["launch"]
    commands.wait_for(lambda: not of_launch(launch), "the end of the workers")


@needs_ray
def test_a_killed_driver_takes_its_workers_along_and_auto_goes_on(command, job, tiny, work, tracked, tmp_path):
    """If the command is killed, its workers end. The same command with `train.resume_ckpt=auto` resumes the run, to the
    weights of an undisturbed one."""
    arguments = ["train.num_epochs=3", "engine.processes=2", "train.resume_ckpt=auto", notes(tmp_path, waits=[1])]
    arguments += ["logger.params.experiment_name=driver"]
    running = command.start("train", tiny, on("local", SMALL), *arguments, cwd=work)
    worker = int(running.says("waits in epoch 1").rpartition("process ")[2].split()[0])
    running.signal(signal.SIGKILL)
    commands.wait_for(lambda: not Path(f"/proc/{worker}").exists(), "the end of a worker")
    assert running.end().code == -signal.SIGKILL
    (tmp_path / "go-1").touch()
    done = command("train", tiny, on("local", SMALL), *arguments, cwd=work, code=0)
    assert epochs(tmp_path) == [(0, 2, 1), (1, 2, 1), (1, 2, 1), (2, 2, 1)]
    assert tracked(done.folder).status == "FINISHED"
    assert digest(done.folder / "last.ckpt") == digest(job("train.num_epochs=3").folder / "last.ckpt")


# ---- what a cluster lacks


@needs_ray
def test_a_cluster_without_gpus_is_reported(command, tiny, work, cluster):
    """`engine.gpus` on such a cluster ends with exit code 3 and the resources of the cluster."""
    done = command("train", tiny, "engine.gpus=1", on(f"'{cluster.address}'"), cwd=work, **ALONE, code=3)
    assert "engine.gpus: asks for 1 GPUs, and the Ray cluster has 2 CPUs and no GPU" in done.err


@needs_ray
def test_too_few_cpus_are_waited_for_with_doubling_pauses(command, tiny, work, cluster):
    """Each pause is twice as long, and the last try ends with exit code 3."""
    params = ["backoff: {base_s: 0.2, factor: 2, max_tries: 4}"]
    done = command("train", tiny, "engine.processes=3", on(f"'{cluster.address}'", *params), cwd=work, **ALONE, code=3)
    lines = [line for line in done.err.splitlines() if "has room for 2, and the run needs 3 workers" in line]
    assert [line.rpartition("; tries again in ")[2] for line in lines[:-1]] == ["0.2 s", "0.4 s", "0.8 s"]
    assert lines[-1].startswith("error: ")


@needs_ray
def test_an_address_of_another_program_is_an_error(command, tiny, work):
    """It ends with exit code 3 after the timeout instead of hanging."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        done = command("train", tiny, on(f"'{address}'", "connect_timeout_s: 1"), cwd=work, **ALONE, code=3)
    assert address in done.err
    assert "Traceback" not in done.err


@needs_ray
def test_each_worker_gets_the_code_once_sealed(monkeypatch):
    """All workers get the code of the start of the launch, also after a restart, and import from the folders that they
    share with this machine and from the folder with that code."""
    sent = []

    def unpack(code, shared, git):
        sent.append((code.files, shared))
        return f"/seal/{len(sent)}"

    sealed = Code(roots=["/a"], files={(0, "own.py"): b"VALUE = 1"})
    monkeypatch.setattr(ray_workers, "_roots", lambda: ["/a", "/b"])
    monkeypatch.setattr(ray_workers, "own_code_now", lambda: sealed)
    workers = ray_workers.Workers(ray_cluster.Connection("of no one", True), {"CPU": 1}, 1, 4)
    workers.ray = SimpleNamespace(put=lambda code: code, get=lambda found: found)
    agent = SimpleNamespace(unpack=SimpleNamespace(remote=unpack))
    workers.all = [ray_workers.Worker(agent, about={"shared": folders}) for folders in (["/b"], ["/a"], [])]
    expected = [(["/a", "/b"], "/seal/1"), (["/a"], "/seal/2"), (["/a"], "/seal/3")]
    assert workers.send_code() == expected
    monkeypatch.setattr(ray_workers, "own_code_now", lambda: pytest.fail("sealed again"))
    assert [folders for folders, _ in workers.send_code()] == [folders for folders, _ in expected]
    assert sent == [(sealed.files, shared) for shared in (["/b"], ["/a"], [])] * 2


def test_a_worker_has_the_code_and_the_files_beside_it(tmp_path):
    """An agent unpacks the code into a folder with mode 700, and links the other files if the worker shares the
    original folder; `clean_up` removes it."""
    (tmp_path / "code" / "data").mkdir(parents=True)
    (tmp_path / "code" / "data" / "words.bin").write_bytes(b"words")
    files = {(0, "of_a_user/inner.py"): b"X = 1\n", (0, "beside.py"): b"Y = 2\n"}
    code = Code(roots=[str(tmp_path / "code")], files=files)
    for shared, expected in (([], {"of_a_user", "beside.py"}), (code.roots, {"of_a_user", "beside.py", "data"})):
        agent = Agent()
        seal = Path(agent.unpack(code, shared))
        [root] = json.loads((seal / SEAL).read_text())["roots"].values()
        assert {path.name for path in (seal / root).iterdir()} == expected
        assert (seal / root / "of_a_user" / "inner.py").read_text() == "X = 1\n"
        assert seal.stat().st_mode & 0o777 == 0o700
        agent.clean_up()
        assert not seal.exists()
    assert os.environ.get("DEEPLIGHTNING_POOL") is None


def test_a_worker_that_nobody_sends_a_config_says_so(monkeypatch):
    """The module, run by hand with an empty stdin, ends with an error that names the launcher."""
    with open(os.devnull) as nothing:  # noqa: PTH123
        monkeypatch.setattr(worker_stdin, "_STDIN", nothing.fileno())
        with pytest.raises(SetupError, match="is started by the launcher `Ray`"):
            worker_stdin.receive()


def test_a_run_that_a_worker_has_made_is_own(tmp_path):
    """A run whose folder the output of the first worker names counts as one of this user."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text(f"seed: 1  # {tmp_path}\n")
    assert not is_own(run)
    Supervisor._print(SimpleNamespace(folder=None), 1, f"Artifact storage path: {run.path}\n".encode())
    assert is_own(run)


def test_a_worker_adds_its_callback_and_copies_files(monkeypatch, tmp_path):
    """The launcher's hooks apply only to processes that it has started."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert hooks_here().copies_files is False
    monkeypatch.setenv(POOL, '{"launch": "ray-1", "storage": null}')
    hooks = hooks_here()
    assert hooks.copies_files
    [callback] = hooks.callbacks(None, None, None)
    assert type(callback).__name__ == "ElasticWorkers"
    assert callback.storage is None
    file = tmp_path / "last.ckpt"
    file.write_bytes(b"four")
    named = Resumption(checkpoint=file).fingerprint
    assert named == f"last.ckpt of 4 bytes, written at {file.stat().st_mtime_ns} ns"


def test_the_parameters_of_the_launcher_have_the_names_of_older_systems():
    """The param that the manual gives for `num_cpus_per_worker` exists."""
    migrate = pytest.importorskip("deeplightning_migrate")
    page = Path(migrate.__file__).parent / "docs" / "words.md"
    (name,) = re.findall(r"\| `num_cpus_per_worker` \| `engine\.launcher\.params\.(\w+)` \|", page.read_text())
    assert name in inspect.signature(Ray).parameters


ON_RAY = """\
import os, sys
sys.path.insert(0, sys.argv[1])
import ray
os.environ["PYTHONPATH"] = ""
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
from only_here import Agent
try:
    ray.get(ray.remote(Agent).remote().about.remote(), timeout=60)
except ray.exceptions.RayActorError as error:
    print(error)
"""


@needs_ray
@pytest.mark.slow
def test_an_actor_of_ray_says_that_its_module_is_missing(tmp_path):
    """Canary: Ray's error for an actor whose module is missing contains the text that the launcher looks for."""
    (tmp_path / "only_here.py").write_text("class Agent:\n    def about(self):\n        return 1\n")
    env = os.environ | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "TMPDIR": "/tmp"}
    program = [sys.executable, "-c", ON_RAY, str(tmp_path)]
    done = subprocess.run(program, env=env, cwd=Path.cwd().root, capture_output=True, text=True, timeout=180)
    assert ray_workers.NO_MODULE in done.stdout, done


def test_a_local_cluster_for_all_gpus_has_all_cpus(monkeypatch):
    """Each GPU, of an unknown number, needs the CPUs of a worker."""
    seen = {}
    monkeypatch.setattr(launcher, "connect", lambda *_, **own: seen.update(own) or contextlib.nullcontext())
    monkeypatch.setattr(launcher, "Supervisor", lambda *_: SimpleNamespace(run=lambda: 0))
    for gpus, cpus in (("auto", None), (3, 3)):
        Ray("local").run(SimpleNamespace(cfg=SimpleNamespace(engine=Engine(gpus=gpus))))
        assert seen["num_cpus"] == cpus


@needs_ray
def test_workers_that_need_nothing_are_refused(tiny):
    """`cpus_per_worker: 0` without GPUs is rejected, because Ray would reserve nothing."""
    with pytest.raises(ConfigError, match="cpus_per_worker: 0"):
        Supervisor(Ray(cpus_per_worker=0), Job(load_config(tiny), tiny), ray_cluster.Connection("of no one", True))


@needs_ray
def test_a_request_for_machines_is_withdrawn(monkeypatch):
    """Ray keeps a request, and the machines, until the next one; without a request none is made."""
    from ray.autoscaler import sdk

    asked = []
    monkeypatch.setattr(sdk, "request_resources", lambda bundles: asked.append(len(bundles)))
    monkeypatch.setattr(ray_workers, "own_code_now", lambda: None)
    workers = ray_workers.Workers(ray_cluster.Connection("of no one", False), {"CPU": 1}, 1, 4)
    for number in (0, 4, 0):
        workers.request_machines(number)
    assert asked == [4, 0]


@needs_ray
def test_room_that_is_spread_over_machines_is_found(monkeypatch):
    """Ray adds the free CPUs of all machines, and a worker needs one machine."""
    groups = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(groups, "placement_group", lambda b, strategy: SimpleNamespace(wait=lambda _: len(b) < 2))
    monkeypatch.setattr(groups, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(ray_workers, "own_code_now", lambda: None)
    workers = ray_workers.Workers(ray_cluster.Connection("of no one", False), {"CPU": 4}, 1, 3)
    workers.ray = SimpleNamespace(available_resources=lambda: {"CPU": 12})
    assert workers.room_for_more() == 1
