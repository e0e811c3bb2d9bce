"""Canaries for the private names of other libraries: each exists with the expected signature and behaviour.

A failing test names the one that a release has moved; `deeplightning/private/` says what depends on it.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import os
import pkgutil
import signal
import sqlite3
from pathlib import Path
from types import ModuleType

import pytest
import pytorch_lightning as pl
import torch
from commands import python
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import CatMetric, MeanMetric

import deeplightning.private
from deeplightning.private import deepspeed, lightning, mlflow, omegaconf
from deeplightning.private import torch as torchs
from deeplightning.tracking.entities import Run

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = ROOT / "deeplightning" / "private"
FILES = sorted([*ROOT.glob("deeplightning/**/*.py")])
DOCUMENTED = {
    "os._exit",
    "sys._getframe",
    "sys._current_frames",
    "getattr(outputs, '_fields', ())",  # of a named tuple
    "getattr(batch, '_fields', ())",
    "batch._asdict",
}
"""Names of the standard library that begin with an underscore and are public."""


# ---- private names are used in one place


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, classes, and attributes that it sets."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _foreign(tree: ast.AST) -> list[str]:
    """Return the private names of other libraries in a file, except those that a class inherits."""
    found, own = [], _own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("deeplightning", "serve")):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"from {node.module} import {part}" for part in parts if _is_private(part)]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if any(map(_is_private, a.name.split(".")))]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = ast.unparse(node.value)
            inherited = owner in ("self", "cls", "super()")
            if not inherited and node.attr not in own and f"{owner}.{node.attr}" not in DOCUMENTED:
                found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            owner, name = node.args[0], node.args[1]
            if isinstance(name, ast.Constant) and _is_private(name.value) and ast.unparse(owner) != "self":
                found += {ast.unparse(node)} - DOCUMENTED
    return found


def test_private_names_have_one_place():
    """No file outside `deeplightning/private/` uses a private name of a library, except in a class that inherits it."""
    outside = [file for file in (*FILES, *ROOT.glob("serve/*.py")) if PRIVATE not in file.parents]
    found = {str(file.relative_to(ROOT)): _foreign(ast.parse(file.read_text())) for file in outside}
    assert {file: names for file, names in found.items() if names} == {}


def _modules() -> list[ModuleType]:
    names = [module.name for module in pkgutil.iter_modules(deeplightning.private.__path__)]
    return [importlib.import_module(f"deeplightning.private.{name}") for name in names]


def _load(path: str) -> type:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _source(cls: type) -> str:
    with_source = (base for base in cls.__mro__ if base.__module__ not in ("builtins", "typing"))
    return "".join(map(inspect.getsource, with_source))


def _has(cls: type, name: str) -> bool:
    """Return whether a class has an attribute, or sets it on its instances."""
    return hasattr(cls, name) or f"self.{name} " in _source(cls)


INHERITED = {path: names for module in _modules() for path, names in getattr(module, "INHERITED", {}).items()}


@pytest.mark.parametrize("path", INHERITED)
def test_what_a_class_of_ours_inherits_is_there(path):
    """Each private name that a class of ours overrides, sets or calls exists in its base class."""
    cls = _load(path)
    assert [name for name in INHERITED[path] if not _has(cls, name)] == []


def _inherited(file: Path) -> set[tuple[str, str]]:
    """Return pairs of library class and private name that the classes in a file use from their base classes."""
    tree, found = ast.parse(file.read_text()), set()
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } | {"nn": "torch.nn", "pl": "pytorch_lightning"}
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        used = {node.name for node in ast.walk(cls) if isinstance(node, ast.FunctionDef)}
        used |= {
            node.attr
            for node in ast.walk(cls)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()")
        }
        for base in map(ast.unparse, cls.bases):
            first, _, rest = base.partition(".")
            path = ".".join(part for part in (imported.get(first, first), rest) if part)
            if base == "subprocess_launcher()":
                path = "pytorch_lightning.strategies.launchers.subprocess_script._SubprocessScriptLauncher"
            library = path.partition(".")[0]
            if library not in ("torch", "pytorch_lightning", "lightning_fabric", "deepspeed", "torchmetrics"):
                continue
            found |= {(path, name) for name in used if _is_private(name) and _has(_load(path), name)}
    return found


def test_the_list_of_what_is_inherited_is_complete():
    """`INHERITED` lists exactly the names that the sources use."""
    used = set().union(*map(_inherited, FILES))
    resolved = {(_load(path).__qualname__, name) for path, name in used}
    listed = {(_load(path).__qualname__, name) for path, names in INHERITED.items() for name in names}
    own = {("LightningModule", "_compiled")}  # our attribute; Lightning's `_compiler_ctx` begins alike
    assert resolved - own == listed


# ---- Lightning


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.line(batch).square().mean()
        self.log("loss", loss)
        return loss

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Points(pl.Callback):
    """Records the values that are due to be logged when a step ends."""

    def __init__(self):
        self.due = []

    def on_train_batch_end(self, trainer, *_):
        due, values = (lightning.values_to_log(trainer, now=now) for now in (False, True))
        self.due.append((lightning.logged_steps(trainer), due is not None, set(values)))


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def _loader() -> DataLoader:
    return DataLoader(torch.ones(6, 2), batch_size=2)


def _fit(callback: pl.Callback, module=None, loader=None, **options) -> pl.Trainer:
    """Train with a callback; return the trainer."""
    options = {"logger": False, "max_epochs": 1} | QUIET | options
    trainer = pl.Trainer(accelerator="cpu", callbacks=[callback], **options)
    trainer.fit(module or Line(), loader or _loader(), _loader())
    return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer after three steps, and the records of its callback."""
    points = Points()
    logger = pl.loggers.CSVLogger(tmp_path_factory.mktemp("logs"))
    return _fit(points, logger=logger, log_every_n_steps=2), points


def test_the_training_loader_is_made_again(trained):
    """`setup_data` fills `_combined_loader` of the fit loop if it is None."""
    loop = trained[0].fit_loop
    before = loop._combined_loader
    assert before is not None
    lightning.forget_train_loader(trained[0])
    loop.setup_data()
    assert loop._combined_loader not in (None, before)


def test_a_training_starts_afresh():
    """Lightning asks once for the checkpoint of a training and gets none."""
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    lightning.start_afresh(trainer)
    connector = trainer._checkpoint_connector
    assert connector._select_ckpt_path("fit", None, model_provided=True, model_connected=True) is None
    assert connector._select_ckpt_path.__func__ is type(connector)._select_ckpt_path


def test_a_metric_that_gathers_items_is_found():
    """States in lists that are concatenated, or tensors, are gathered whole."""
    gathers = MeanMetric()
    gathers.add_state("boxes", default=[], dist_reduce_fx=None)
    whole = [CatMetric(), MeanMetric()]
    assert torchs.metric_by_item(torch.nn.ModuleList(whole)) is None
    assert torchs.metric_by_item(torch.nn.ModuleList([*whole, gathers])) == "MeanMetric"


def test_an_epoch_begins_again():
    """The loader creates a new iterator after the hooks of the epoch's start; its first batch is read next, and its
    sampler has the current epoch."""
    events = []

    class Again(pl.Callback):
        def on_train_start(self, trainer, module):
            lightning.before_batches(trainer, self._begin, lambda _: events.append("validation"))

        def on_train_epoch_start(self, trainer, module):
            trainer.train_dataloader.sampler.set_epoch(7)
            events.append("hook")

        def _begin(self, trainer):
            lightning.restart_epoch(trainer, skip=(), new_iterator=True)

    class Loader(DataLoader):
        def __iter__(self):
            events.append("iterator")
            return super().__iter__()

    data = torch.zeros(4, 2)
    loader = Loader(data, sampler=DistributedSampler(data, num_replicas=1, rank=0))
    trainer = _fit(Again(), loader=loader)
    assert (events, trainer.global_step) == (["iterator", "hook", "iterator", "validation"], 4)
    assert loader.sampler.epoch == 0


def test_the_sanity_check_follows_all_hooks_and_draws_no_number_of_the_training():
    """The trainer calls `_run_sanity_check` after `on_fit_start` of the module, and restores random numbers."""
    drawn, seen = [], []

    class Draws(pl.Callback):
        def on_train_start(self, trainer, module):
            drawn.append(torch.rand(1))

    class Loads(Draws):
        def on_fit_start(self, trainer, module):
            lightning.before_sanity_check(trainer, lambda: seen.append(("ours", torch.rand(1))[0]))

    class Module(Line):
        def on_fit_start(self):
            seen.append("module")

    for callback in (Loads(), Draws()):
        torch.manual_seed(3)
        _fit(callback, Module())
    assert seen == ["module", "ours", "module"]
    assert drawn[0] == drawn[1]


def test_a_loader_begins_again_inside_an_epoch():
    """Before the shorter of two loaders restarts, the function gets its number and that of the batch."""
    restarts = []

    class Again(pl.Callback):
        def on_train_start(self, trainer, module):
            lightning.before_batches(trainer, self._begin)

        def _begin(self, trainer):
            lightning.before_cycles(trainer, lambda *numbers: restarts.append(numbers))

    class Two(Line):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)

    trainer = _fit(Again(), Two(), [DataLoader(torch.zeros(5, 2)), DataLoader(torch.zeros(2, 2))], max_epochs=2)
    assert (restarts, trainer.global_step) == ([(1, 2), (1, 4)] * 2, 10)


def test_the_end_of_a_stream_is_found_by_reading_ahead():
    """The fit loop has `_data_fetcher` with `length`, `done`, `iterator`, `batches` and `reset`."""
    seen = []

    class Look(pl.Callback):
        def on_train_start(self, trainer, *_):
            assert lightning.read_ahead(trainer)

        def on_train_batch_start(self, trainer, *_):
            seen.append((trainer.current_epoch, trainer.fit_loop._data_fetcher.length, trainer.is_last_batch))

    _fit(Look(), max_epochs=2)
    batches = len(_loader())
    assert seen == [(epoch, None, number == batches - 1) for epoch in range(2) for number in range(batches)]


def test_a_validation_is_restarted(trained):
    """`_restart_stage` makes the validation loop restart."""
    loop = trained[0].fit_loop.epoch_loop.val_loop
    assert not loop.restarted_mid_evaluation
    lightning.restart_validation(trained[0])
    assert loop.restarted_mid_evaluation
    loop.reset_restart_stage()
    assert not loop.restarted_mid_evaluation


def test_steps_and_values_that_are_about_to_be_logged_are_known(trained):
    """The loop has `_batches_that_stepped`, the trainer `_logger_connector` with `metrics` and `should_update_logs`,
    the validation loop `_seen_batches_per_dataloader`."""
    trainer, points = trained
    assert points.due == [(0, False, {"loss"}), (1, True, {"loss"}), (2, False, {"loss"})]
    assert lightning.logged_steps(trainer) == trainer.global_step == 3
    lightning.add_logged_steps(trainer, 2)
    assert lightning.logged_steps(trainer) == 5
    lightning.add_logged_steps(trainer, -2)
    assert lightning.validated_batches(trainer) == {0: len(_loader())}


def test_what_lightning_adds_up_over_an_epoch_is_known_and_can_be_continued(trained):
    """Means by batch size and maxima continue after a merge as if all values had been logged in one run."""
    trainer = trained[0]
    results = trainer.fit_loop.epoch_loop._results
    results.clear()

    def log(value, size):
        for name, reduce in (("mean", torch.mean), ("most", torch.max)):
            results.log("training_step", name, torch.tensor(value), reduce_fx=reduce, batch_size=size)

    log(1.0, 3)
    log(4.0, 1)
    saved = lightning.logged_means(trainer)
    results.clear()
    log(2.0, 4)
    lightning.add_to_logged_means(trainer, saved)
    assert saved == {}
    assert [float(result.compute()) for result in results.values()] == [15 / 8, 4.0]
    results.clear()


def test_hyperparameters_that_are_logged_are_replaced():
    """The logged hyperparameters change; those that the module saved stay."""

    class Saves(pl.LightningModule):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters()

    module = Saves(3)
    lightning.set_logged_hyperparameters(module, {"depth": 4})
    assert (module.hparams_initial, module.hparams) == ({"depth": 4}, {"width": 3})


@pytest.mark.parametrize("keeps", [True, False])
def test_lightning_leaves_signals_alone(keeps):
    """`register_signal_handlers` of `_signal_connector` would take over SIGTERM while a stage runs."""
    seen = []

    class Look(pl.Callback):
        def setup(self, trainer, *_, **__):
            if keeps:
                lightning.keep_signals(trainer)

        def on_train_start(self, *_):
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    _fit(Look(), max_steps=1)
    assert (seen == [before]) is keeps
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_batch_waits_for_signals_of_lightning(monkeypatch):
    """`_broadcast_sigterm_tensor` of the training loop would read a number of the GPU before each batch."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    loop = trainer.fit_loop.epoch_loop
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(type(loop).advance)
    lightning.keep_signals(trainer)
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a flag is sent"))
    assert loop._broadcast_sigterm_tensor() is None


def test_the_launcher_of_a_strategy_can_be_replaced():
    """`launcher` returns `_launcher`; `_SubprocessScriptLauncher` has the expected arguments and attributes."""
    strategy = pl.strategies.DDPStrategy()
    lightning.set_launcher(strategy, "ours")
    assert strategy.launcher == "ours"
    launcher = lightning.subprocess_launcher()
    assert [*inspect.signature(launcher).parameters] == ["cluster_environment", "num_processes", "num_nodes"]
    assert launcher("environment", 2, 1).procs == []


def test_threads_are_shared(monkeypatch):
    """`_set_num_threads_if_needed` keeps a number of threads that is set, and otherwise divides the cores."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    lightning.share_threads(10_000)
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (before, "3")
    monkeypatch.delenv("OMP_NUM_THREADS")
    try:
        lightning.share_threads(10_000)
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (1, "1")
    finally:
        torch.set_num_threads(before)


def test_lightnings_logger_tells_whether_it_has_a_run(tmp_path):
    """`_initialized` shows whether the logger has created a run."""
    logger = pl.loggers.MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", artifact_location=str(tmp_path))
    assert not lightning.has_run(logger)
    assert logger.run_id
    assert lightning.has_run(logger)


# ---- torch


def test_storages_are_told_apart():
    """Views of a tensor share `_cdata` of the storage; copies do not."""
    tensor = torch.ones(4)
    assert torchs.storage_id(tensor) == torchs.storage_id(tensor[1:]) == torchs.storage_id(tensor.view(2, 2))
    assert torchs.storage_id(tensor) != torchs.storage_id(tensor.clone())
    assert torchs.storage_id(torch.empty(0)) != torchs.storage_id(torch.empty(0)) or torch.empty(0).data_ptr() == 0


def test_buffers_that_are_not_saved_are_told_apart():
    """`_non_persistent_buffers_set` of a module has its own buffers, not those of submodules."""
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.register_buffer("seen", torch.ones(2), persistent=False)
    module.register_buffer("saved", torch.ones(2))
    assert list(torchs.non_persistent_buffers(module)) == ["seen"]
    assert torchs.non_persistent_buffers(module[0]) == {}


def test_tensors_of_a_module_are_replaced():
    """`_apply` of a module replaces parameters and buffers, also those of its submodules."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    torchs.apply(module, torch.zeros_like)
    assert all(not tensor.any() for tensor in (*module.parameters(), *module.buffers()))


def test_metrics_keep_their_precision():
    """`to` calls `_apply` of `nn.ModuleDict`."""
    from deeplightning.task.metrics import Accuracy, FixedDtypeDict, SampleMean

    metrics = FixedDtypeDict({"acc": Accuracy(), "loss": SampleMean()})
    before = {name: state.dtype for metric in metrics.values() for name, state in metric.metric_state.items()}
    metrics.to(torch.bfloat16).half()
    after = {name: state.dtype for metric in metrics.values() for name, state in metric.metric_state.items()}
    assert before == after


# ---- other libraries


def test_stores_of_a_scheme_are_opened_by_a_function_of_ours(tmp_path):
    """`_tracking_store_registry` of MLflow opens stores with our function, tested in a separate process."""
    program = (
        "from deeplightning.private.mlflow import register_store\n"
        "def build(store_uri=None, artifact_uri=None):\n    raise SystemExit(f'ours: {store_uri}')\n"
        "register_store('sqlite', build)\n"
        "import mlflow\nmlflow.set_tracking_uri('sqlite:///there.db')\nmlflow.search_experiments()\n"
    )
    done = python("-c", program, cwd=tmp_path)
    assert done.stderr.strip().splitlines()[-1] == "ours: sqlite:///there.db"


def test_a_run_with_a_known_id_is_added_as_the_client_adds_it(tmp_path):
    """Every column and tag equals those of a run that the client creates, except for the id and what depends on it."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    tags = {"mlflow.runName": "a", "mlflow.user": "b", "c": "d"}
    one = client.create_run("0", start_time=5, tags=tags, run_name="a").info.run_id
    folder = client.get_run(one).info.artifact_uri
    other = "0" * 32
    run = Run(other, "0", "RUNNING", 5, folder.replace(one, other), True, {}, tags)
    store = SqlAlchemyStore(uri, str(tmp_path))
    mlflow.add_run(store, run)
    mlflow.add_run(store, run)  # an existing run stays
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        rows = {row[0]: row[1:] for row in database.execute("SELECT * FROM runs")}
        assert sorted(rows) == sorted((one, other))
        theirs, ours = (str(rows[id]).replace(id, "ID") for id in (one, other))
        assert ours == theirs
        kept = {id: set(database.execute("SELECT key, value FROM tags WHERE run_uuid = ?", [id])) for id in rows}
    assert kept[one] == kept[other] == set(tags.items())


def test_torchmetrics_imports_matplotlib_lazily():
    """`_MATPLOTLIB_AVAILABLE` determines what the plot module defines, and a plot first calls
    `_error_on_missing_matplotlib`. Without the former, start-up is slower; without the latter, a plot fails."""
    from torchmetrics.utilities import imports, plot

    assert imports._MATPLOTLIB_AVAILABLE
    assert callable(plot._error_on_missing_matplotlib)
    assert inspect.getsource(plot).count("    _error_on_missing_matplotlib()\n") >= 3


def test_a_database_gets_the_latest_schema(tmp_path):
    """`_get_latest_schema_revision`, `_upgrade_db` and `create_sqlalchemy_engine` of MLflow migrate a database."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    MlflowClient(uri).search_experiments()  # creates it
    mlflow.upgrade_database(uri)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == (mlflow.latest_schema(),)


def test_deepspeed_knows_what_is_left_out():
    """DeepSpeed has the operator `deepspeed_shm_comm`, and sets `_hp_mapping` of a parameter."""
    pytest.importorskip("deepspeed")
    from deepspeed.ops import __compatible_ops__ as operators
    from deepspeed.utils import mixed_precision_linkage

    fragments = importlib.import_module("deepspeed.utils.tensor_fragment")
    assert "deepspeed_shm_comm" in operators
    deepspeed.skip_shared_memory_sums()
    assert operators["deepspeed_shm_comm"] is False
    assert "param._hp_mapping = " in inspect.getsource(mixed_precision_linkage) + inspect.getsource(fragments)
    fields = fragments.tensor_fragment.__dataclass_fields__
    assert {"lp_fragment_address", "hp_fragment_address"} <= fields.keys()
    assert {"start", "numel"} <= fragments.fragment_address.__dataclass_fields__.keys()


def test_exit_functions_are_the_childs_own():
    """`_clear` and `_run_exitfuncs` of `atexit` unregister and run exit functions."""
    program = (
        "import atexit, os\n"
        "from deeplightning.private.python import forget_exit_functions, run_exit_functions\n"
        "atexit.register(print, 'of the parent')\nforget_exit_functions()\n"
        "atexit.register(print, 'its own', flush=True)\nrun_exit_functions()\nos._exit(0)\n"
    )
    done = python("-c", program)
    assert (done.stdout, done.stderr) == ("its own\n", "")


def test_a_spawned_process_imports_a_module_first(tmp_path):
    """`_config` of `multiprocessing`'s processes is unpickled before a process's arguments."""
    (tmp_path / "early.py").write_text("import sys\n\nsys.modules['work'] = sys\n\n\ndef function(): ...\n")
    (tmp_path / "main.py").write_text(
        "import multiprocessing, sys, types\n"
        "from deeplightning.private.python import import_in_spawned\n"
        "if __name__ == '__main__':\n"
        "    import early\n"
        "    import_in_spawned(early.function)\n"
        "    sys.modules['work'] = work = types.ModuleType('work')\n"
        "    work.getrecursionlimit = sys.getrecursionlimit\n"
        "    exec('def exc_info(): ...', vars(work))\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work.exc_info)\n"
        "    child.start(); child.join(); sys.exit(child.exitcode)\n"
    )
    done = python("main.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_mlflow_tells_whether_autolog_is_on():
    """`autologging_is_disabled` of MLflow tells whether autolog is on."""
    program = (
        "import mlflow, mlflow.pytorch, pytorch_lightning\n"
        "from deeplightning.private.mlflow import autologs\n"
        "print(autologs())\nmlflow.autolog(silent=True)\nprint(autologs())\n"
        "mlflow.autolog(disable=True, silent=True)\nprint(autologs())\n"
    )
    done = python("-c", program)
    assert done.stdout.split() == ["False", "True", "False"], done.stderr


def test_a_text_becomes_a_tree_by_name_of_rule_and_mode():
    """`grammar_parser.parse` takes text, rule and mode; the tree of a value contains a text, and the text its parts."""
    assert [*inspect.signature(omegaconf.tree_of).parameters] == ["value", "parser_rule", "lexer_mode"]
    assert omegaconf.parse("x${a}").getChild(0).getChildCount() == 2
    with pytest.raises(omegaconf.Malformed):
        omegaconf.parse("${")


def test_a_tree_is_visited_with_what_the_caller_looks_up():
    """`GrammarVisitor` passes keys (dots, parts) and calls (name, values, sources) to callbacks, nested ones too."""
    finds, calls = [], []
    found = omegaconf.Evaluation(
        lambda dots, parts: finds.append((dots, parts)) or "B",
        lambda name, values, texts: calls.append((name, values, [text() for text in texts])) or "d",
    )
    assert found.value(omegaconf.parse("${..a[${c}].e} ${f.g: 1.10, [x, ${h}]}")) == "B d"
    assert finds == [(0, ("c",)), (2, ("a", "B", "e")), (0, ("h",))]
    assert calls == [("f.g", (1.1, ["x", "B"]), ["1.10", "[x, ${h}]"])]
    assert found.value(omegaconf.parse("{1: '2', x: null}", argument=True)) == {1: "2", "x": None}
