"""Fixtures that the tests share: a working directory with user code, a tracking store, and `deeplightning` to call.

Runs are configured by `TINY` and overrides. This module imports nothing slow: every worker and every small test file
loads it.
"""

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two spinning threads beside a busy neighbour are slower than one
import pytest
from commands import DEEPSPEED, Commands, Outcome
from tiny import OWN, TINY, digest, weights

__all__ = ["OWN", "TINY", "digest", "weights"]  # most tests import them from here

pytest_plugins = ["hangs", "leftovers"]


def pytest_configure() -> None:
    """Create the state folder, which records the runs of this user. It is not created at import, since a test may
    import this module again."""
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="deeplightning-state-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start three workers for two cores: tests wait for disks and other processes a fifth of their time."""
    return (3 * (os.cpu_count() or 1) + 1) // 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that train or start `deeplightning` through a fixture as `run`, and those of plug-ins also as `slow`:
    only `bash test.sh --all` runs them. Workers get the slowest files first, so that none runs alone at the end."""
    costs: Counter[Path] = Counter()  # per file: estimated tenths of a second
    for item in items:
        used = {*getattr(item, "fixturenames", ())}
        if {"command", "jobs", "fit"} & used:  # `train` and `job` use the first two
            item.add_marker(pytest.mark.run)
            if "plugins" in item.path.parts:
                item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") is None:
            costs[item.path] += 40 if {"job", "jobs"} & used else 10 if item.get_closest_marker("run") else 1
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (-costs[item.path], item.path))


def pytest_collection_finish() -> None:
    """Exclude the objects created by the collection of tests from garbage collection, here and in forks."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Include them again: Triton's bindings print a page about objects that still exist at exit."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def log_levels():
    """Restore after each module the levels of the root logger and ours, which a training in this process changes."""
    loggers = [logging.getLogger(), logging.getLogger("deeplightning")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def packed_code() -> Iterator[None]:
    """Exclude the two hundred imported modules of tests from the code that a run in this process packs: reading them
    takes two seconds per run."""
    from deeplightning.tracking import code

    root, is_installed = Path(__file__).parent, code._is_installed
    ours = (__file__, *(f"{root / folder}{os.sep}" for folder in ("benchmarks", "tests", "tools")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "_is_installed", lambda file: file.startswith(ours) or is_installed(file))
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Working directory of a test, and an import root; modules imported from it are unloaded afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = {*sys.modules}
    yield tmp_path
    for name in sorted({*sys.modules} - before, reverse=True):  # submodules first: their lookup needs the package
        spec = getattr(sys.modules[name], "__spec__", None)
        folders = getattr(spec, "submodule_search_locations", None) or ()  # a folder without `__init__.py` has no file
        if any(str(place).startswith(str(tmp_path)) for place in (getattr(spec, "origin", None), *folders)):
            del sys.modules[name]


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the caller's MLflow variables, and use a separate state folder."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Working directory of the commands; asserts that they create no file in it."""
    folder = tmp_path_factory.mktemp("work") / "a place"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    before = {*folder.iterdir(), folder / "__pycache__"}
    yield folder
    assert set(folder.iterdir()) <= before


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tracking store of all runs; creating one takes two seconds."""
    return tmp_path_factory.mktemp("store") / "mlruns"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """Config that trains in a fraction of a second."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY.replace("STORE", str(store)))
    return path


def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of this test session, which its workers share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """`command(VERB, …, cwd=…)` runs `deeplightning VERB …` and returns its Outcome."""
    commands = Commands(tmp_path_factory.mktemp("commands"), shared(tmp_path_factory) / "commands")
    commands("--help", cwd=commands.folder)  # returns when the server has imported everything
    yield commands
    commands.close()


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """`answer(word, …)` runs `deeplightning WORD …` in this process; returns exit code, stdout and stderr."""
    from deeplightning.cli import cli
    from deeplightning.cli.exit_codes import run_verb

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["deeplightning", *words])
        return run_verb(cli), *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def train(command: Commands, tiny: Path, place: Path) -> Any:
    """`train(override, …)` runs the tiny config; `code` is the expected exit code."""

    def run(*overrides: str, code: int = 0, **variables: str) -> Outcome:
        return command("train", tiny, *overrides, cwd=place, code=code, **variables)

    return run


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory, command: Commands) -> Iterator[Commands]:
    """`jobs(VERB, …, cwd=…, ranks=2)` is `command` with DeepSpeed preloaded, whose import takes seconds."""
    commands = Commands(tmp_path_factory.mktemp("jobs"), shared(tmp_path_factory) / "jobs", command, DEEPSPEED)
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def job(request: pytest.FixtureRequest, command: Commands, tiny: Path, place: Path) -> Any:
    """`job(override, …)` runs the tiny config with `ranks` processes; one rank is a plain run.

    `code` is the expected exit code of all. DeepSpeed is preloaded if an override names it.
    """

    def run(*overrides: str, ranks: int = 2, code: int = 0, **variables: str) -> Outcome:
        deepspeed = any("deepspeed" in override for override in overrides)
        start = request.getfixturevalue("jobs") if deepspeed else command
        return start(
            "train", tiny, f"engine.processes={ranks}", *overrides, cwd=place, ranks=ranks, code=code, **variables
        )

    return run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a run that classifies red, green and blue pictures."""
    from served import colour_run

    return colour_run(tmp_path_factory.mktemp("a run"))


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Any]:
    """`serving(folder, argument, …)` starts the prediction server of a run; it is killed after the test."""
    from served import Server

    servers: list[Server] = []

    def started(folder: Path, *arguments: str, **options: Any) -> Server:
        servers.append(Server(folder, tmp_path / f"errors {len(servers)}", *arguments, **options))
        return servers[-1]

    yield started
    for server in servers:
        server.stop(signal.SIGKILL)


@pytest.fixture(scope="session")
def tracked(store: Path) -> Any:
    """`tracked(folder)` reads a run from the tracking store."""
    from mlflow.tracking import MlflowClient

    class Tracked:
        def __init__(self, folder: Path):
            self.client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
            self.id = folder.parent.name
            run = self.client.get_run(self.id)
            self.status, self.params, self.tags = run.info.status, run.data.params, run.data.tags
            self.metrics = run.data.metrics

        def series(self) -> dict[str, list[tuple[int, float]]]:
            """Return steps and values of each metric except system metrics."""
            names = sorted(name for name in self.metrics if not name.startswith("system/"))
            return {n: [(p.step, p.value) for p in self.client.get_metric_history(self.id, n)] for n in names}

    return Tracked


@pytest.fixture
def fit(tiny: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`fit(override, …)` trains the tiny config in this process and returns a Fitted.

    `task` and `data` build a module from the config, instead of the class that the config names.
    """
    from fitted import Fitted, Recorder

    from deeplightning.callbacks import callback_of
    from deeplightning.callbacks.record import Record
    from deeplightning.config.examine import load_config
    from deeplightning.run.assemble import init_module, init_trainer

    monkeypatch.chdir(place)
    logger = f"logger={{type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{tmp_path}', name: runs}}}}"
    plain = ["~logger", logger, "logger.pictures=null", "logger.per_rank_files=false", "logger.log_every_n_steps=1"]

    def run(*overrides: str, task: Any = None, data: Any = None) -> Fitted:
        cfg = load_config(tiny, [*plain, *overrides])
        task = init_module(cfg, "model") if task is None else task(cfg)
        data = init_module(cfg, "data") if data is None else data(cfg)
        trainer, seen = init_trainer(cfg), Recorder()
        trainer.callbacks.append(seen)
        trainer.fit(task, data)
        return Fitted(trainer, task, data, seen, callback_of(trainer, Record).folder.path)

    return run
