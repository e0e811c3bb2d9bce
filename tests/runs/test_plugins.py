"""Entry points of installed packages (`deeplightning.config.plugins`): verbs, short names, launchers, sections."""

import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import python

from deeplightning.callbacks.signals import Signals
from deeplightning.cli import cli
from deeplightning.cli.exit_codes import run_verb
from deeplightning.config.examine import examine, load_config
from deeplightning.config.explain import explain
from deeplightning.config.schema import Engine, Target
from deeplightning.config.source import read
from deeplightning.config.target import find
from deeplightning.config.tree import plain
from deeplightning.dry_run.try_config import dry_run
from deeplightning.faults import PLUGINS, SetupError, no_module
from deeplightning.launch import Job, array_of, hooks_here
from deeplightning.process.streams import Interrupted

ROOT = Path(__file__).parents[2]
BASE = ROOT / "configs" / "base.yaml"

MODULE = """\
import os
import signal
from dataclasses import dataclass

import click
from deeplightning.launch import ProcessHooks
from torch import nn

from deeplightning.config.schema import PluginSection, key
from deeplightning.faults import Fault

@click.command()
@click.argument("name")
def greet(name):
    "Greet somebody."
    click.echo(f"hello {name}")

NO_VERB = 3

@dataclass
class Cards(PluginSection):
    "Cards that the run sends."

    people: list[str] = key("who gets one", list)
    metric: str | None = key("what is on it", None)

    def check(self, report, examine):
        if "Bob" in self.people:
            report.add(Fault("Bob wants none", "cards.people"))
        if examine(["data.batch_size=0"]).faults:
            report.add(Fault("the config was examined", "cards.people"))

class Tiny(nn.Sequential):
    def __init__(self, num_classes: int):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))

class Echo:
    def __init__(self, code: int = 0):
        self.code = code

    def plan(self, job):
        return []

    def run(self, job):
        print("echo", job.config.name, *job.overrides)
        return self.code

    def trial_jobs(self, job, trials, note):
        return (trials, note)

    @staticmethod
    def hooks_here():
        return Hooks() if "ECHOES" in os.environ else None

class Hooks(ProcessHooks):
    signals = (signal.SIGUSR2,)

    def before_end(self, signal, batches):
        print("ends by", signal.name, "after", batches)
"""

ENTRIES = """\
[deeplightning.verbs]
greet = greetings:greet
train = greetings:greet
broken = greetings.missing:greet
number = greetings:NO_VERB

[deeplightning.targets]
Tiny = greetings:Tiny
SGD = greetings:Tiny

[deeplightning.schema]
cards = greetings:Cards
data = greetings:Cards
[deeplightning.launchers]
Echo = greetings:Echo
Local = greetings:Echo
"""


def write_distribution(folder, name, entries):
    """Write the metadata of an installed package."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with an installed package that adds entry points of each kind."""
    folder = tmp_path_factory.mktemp("site packages")
    (folder / "greetings.py").write_text(MODULE)
    write_distribution(folder, "greetings", ENTRIES)
    return folder


@pytest.fixture
def command(installed, monkeypatch):
    """`command(word, …)` returns exit code, stdout and stderr of `deeplightning WORD …` with the package installed."""
    monkeypatch.setenv("PYTHONPATH", str(installed))

    def run(*arguments):
        done = python("-m", "deeplightning", *arguments, cwd=installed)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def imported(installed, monkeypatch):
    """The package is installed for this process."""
    monkeypatch.syspath_prepend(str(installed))


@pytest.fixture
def called(imported, answer):
    """`called(word, …)` does the same as `command` in this process."""
    return answer


def test_an_installed_package_adds_a_verb(command, called):
    """The verb has its help and arguments; it does not replace one of the core."""
    assert command("greet", "Ada") == (0, "hello Ada\n", "")
    assert "Greet somebody." in called("greet", "--help")[1]
    assert "Run the stages of CONFIG" in called("train", "--help")[1]


def test_a_verb_that_cannot_be_used_names_its_package(command, called):
    """A verb that cannot be imported, or is not a command, is an error with its package."""
    code, _, err = command("broken")
    assert code == 3
    assert "broken, which the installed package greetings adds, cannot be imported: No module named" in err
    code, _, err = called("number")
    assert code == 2
    assert "the verb number of an installed package is not a click.Command: 3" in err
    code, _, err = command("unknown")
    assert (code, "No such command 'unknown'" in err) == (2, True)


def test_an_installed_package_adds_a_short_name(imported):
    """Config checks resolve the short name to its full name; it does not replace a short name of torch."""
    network, optimizer = "{type: Tiny, params: {num_classes: 10}}", "{type: SGD, params: {lr: 0.1}}"
    overrides = [f"model.network={network}", f"model.optimizer={optimizer}"]
    model = plain(read(BASE, overrides).root)["model"]
    assert (model["network"]["type"], model["optimizer"]["type"]) == ("greetings.Tiny", "torch.optim.SGD")
    assert examine(BASE, overrides).faults == []
    (fault,) = examine(BASE, [overrides[0].replace("num_classes", "classes")]).faults[:1]
    assert "greetings.Tiny" in fault.message


def test_an_installed_package_adds_a_section(imported):
    """Keys of the section are checked like those of the core, then by its `check`; a config without it has no key."""
    report = examine(BASE, ["cards.people=[Ada]"])
    assert [(str(f.key), f.message) for f in report.faults] == [("cards.people", "the config was examined")]
    assert report.config.cards.people == report.config["cards"]["people"] == ["Ada"]
    assert report.config.public()["cards"] == {"people": ["Ada"], "metric": None}
    again = pickle.loads(pickle.dumps(report.config))
    assert (again.cards, again.to_dict()) == (report.config.cards, report.config.to_dict())
    faults = "\n".join(map(str, examine(BASE, ["cards={people: [Bob], poeple: [], metric: no}"]).faults))
    for message in ("Bob wants none", "Did you mean people?", "no metric `no` is logged"):
        assert message in faults
    (fault,) = examine(BASE, ["crads={}"]).faults
    assert "Did you mean cards?" in fault.message
    config = examine(BASE).config
    assert (config.get("cards"), "cards" in config, config.data.batch_size) == (None, False, 32)


def test_an_added_section_is_described(called):
    """`explain` shows the documentation and the default of its keys."""
    code, out, _ = called("explain", str(BASE), "cards.people")
    assert (code, "who gets one" in out, "nothing; the default applies" in out) == (0, True, True)


def test_two_packages_with_one_name_are_refused(imported, monkeypatch, tmp_path):
    """A short name that two packages add is ambiguous; the error names both classes."""
    write_distribution(tmp_path, "others", "[deeplightning.targets]\nTiny = others:Tiny\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (fault,) = read(BASE, ["model.network.type=Tiny"]).faults
    assert "`Tiny` is ambiguous: greetings.Tiny, others.Tiny" in fault.message


def test_an_installed_package_adds_a_launcher(called):
    """The config uses its short name and params; the command has its exit code. It does not replace `Local`."""
    arguments = ("train", str(BASE), "engine.launcher={type: Echo, params: {code: 7}}", "engine.processes=2")
    assert called(*arguments)[:2] == (7, f"echo base.yaml {' '.join(arguments[2:])}\n")
    code, _, err = called("check", str(BASE), "engine.launcher={type: Echo, params: {size: 7}}")
    assert (code, "greetings.Echo" in err, "size" in err) == (2, True, True)
    code, _, err = called("check", str(BASE), "engine.launcher.type=echo")
    assert code == 2
    assert "engine.launcher.type: there is no launcher `echo`. Did you mean Echo?" in err
    code, out, _ = called("explain", str(BASE), "engine.launcher.type=Local", "engine.launcher.type")
    assert (code, "deeplightning.launch.Local" in out) == (0, True)


@pytest.mark.parametrize(
    ("launcher", "trials", "swept", "has"),
    [
        ("greetings.Echo", 3, ["seed", "engineer.x"], True),
        ("greetings.Echo", 1, ["seed"], False),
        ("greetings.Echo", 3, ["engine.num_nodes"], False),
        ("deeplightning.launch.Local", 3, ["seed"], False),
    ],
)
def test_a_launcher_may_start_the_trials_of_a_search(launcher, trials, swept, has, imported, tmp_path):
    """A launcher with `trial_jobs` starts several trials of the same engine; otherwise trials start one by one."""
    cfg = SimpleNamespace(engine=Engine(launcher=Target(type=launcher)))
    found = array_of(Job(cfg, tmp_path / "c.yaml"), trials, swept, tmp_path / "note")
    assert found == ((trials, tmp_path / "note") if has else None)


def test_a_launcher_hears_of_signals_in_its_processes(imported, monkeypatch, capsys):
    """A process that a launcher started handles the signals of its hooks; any other process has no hooks."""
    monkeypatch.setenv("ECHOES", "1")
    assert [*hooks_here().signals] == []
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    callback = Signals(hooks_here())
    before = signal.getsignal(signal.SIGUSR2)
    callback._begin()
    try:
        callback._batches = 5
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGTERM)  # a queue sends it after its warning
        with pytest.raises(Interrupted, match="SIGUSR2"):
            callback.on_validation_batch_end(SimpleNamespace(world_size=1, state=SimpleNamespace(fn="validate")))
        callback._restore()
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN  # repeated while the checkpoint is saved
    finally:
        callback._restore()
        signal.signal(signal.SIGUSR2, before)
    assert capsys.readouterr().out == "ends by SIGUSR2 after 5\n"


@pytest.fixture
def without_plugins(monkeypatch):
    """No package adds entry points."""
    monkeypatch.setattr("deeplightning.config.plugins.entry_points", lambda **_: [])


@pytest.mark.parametrize(
    ("plugin", "name"), [(plugin, name.rpartition(".")[2]) for plugin, names in PLUGINS.items() for name in names]
)
def test_a_plugin_that_is_not_installed_is_named(plugin, name, without_plugins, capsys, monkeypatch):
    """Its verb, short name, section or module is one error with the install command and exit code 3, in `check` too."""
    message = f"`{plugin}` is a plug-in: pip install 'deeplightning[{plugin}]'"
    if name.endswith(":"):
        (fault,) = examine(BASE, [f"{name[:-1]}={{a: 1}}"]).faults
        assert (fault.message, fault.exit_code, fault.key) == (message, 3, name[:-1])
        assert fault.place == f"override {name[:-1]}={{a: 1}}"
        assert examine(BASE, [f"{name[:-1]}=null"]).faults == []
        with pytest.raises(SetupError, match=re.escape(message)):
            explain(examine(BASE), f"{name[:-1]}.a")
        return
    if name.islower():
        monkeypatch.setattr(sys, "argv", ["deeplightning", name, "x", "y"])
        assert run_verb(cli) == 3
        assert capsys.readouterr().err == f"error: {message}\n"
        return
    key = {"Shards": "data.module", "Encoder": "model.network"}.get(name, "engine.launcher")
    for word in {name, plugin} if key == "engine.launcher" else {name}:
        faults = [fault for fault in examine(BASE, [f"{key}={{type: {word}}}"]).faults if fault.key == f"{key}.type"]
        assert [(fault.message, fault.exit_code) for fault in faults] == [(message, 3)]
        assert all(str(fault.place).startswith(f"override {key}") for fault in faults)
    assert str(no_module(f"deeplightning_{plugin}", "", [])) == message


@pytest.mark.parametrize(
    ("key", "former", "name"),
    [
        ("data.module", "deeplightning.data.shards.Shards", "deeplightning_shards.Shards"),
        ("model.network", "deeplightning.model.hugging_face.Encoder", "deeplightning_hub.encoder.Encoder"),
        ("engine.launcher", "deeplightning.launch.Slurm", "deeplightning_slurm.Slurm"),
        ("engine.launcher", "deeplightning.launch.slurm.Slurm", "deeplightning_slurm.Slurm"),
        ("engine.launcher", "deeplightning.launch.ray.Ray", "deeplightning_ray.Ray"),
    ],
)
def test_the_former_name_of_a_target_is_refused_with_the_new_one(key, former, name):
    """The check and the import of a class that moved into a plug-in give the same error."""
    message = f"`{former}` is called {name} here."
    faults = examine(BASE, [f"{key}={{type: {former}}}"]).faults
    assert [(fault.message, fault.key, fault.exit_code) for fault in faults] == [(message, f"{key}.type", 2)]
    with pytest.raises(ValueError, match=re.escape(message)):
        find(former)


OWN = """\
import torch
from deeplightning.task.img_classif import ImageClassification


class Gathers(ImageClassification):
    def training_step(self, batch, batch_idx):
        torch.distributed.barrier()
        return super().training_step(batch, batch_idx)
"""


@pytest.mark.parametrize(
    ("key", "overrides"),
    [("engine.processes", ["engine.processes=2", "model.module.type=own_gathers.Gathers"]), ("engine.gpus", [])],
)
def test_a_dry_run_without_its_plugin_names_what_it_skips(key, overrides, without_plugins, tmp_path, monkeypatch):
    """Code that needs a GPU or a process group is reported as not tried, since one process on the CPU has neither."""
    (tmp_path / "own_gathers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    cfg = load_config(BASE, [*overrides, "train.num_epochs=1"])
    if key == "engine.gpus":
        cfg.engine.gpus = [0]
    faults, untried = dry_run(cfg)
    message = "tried in one process on the CPU only; `plan` is a plug-in: pip install 'deeplightning[plan]'"
    assert faults == []
    assert (key, message) in [(note.key, note.message) for note in untried]


PLUGIN = ROOT / "examples" / "plugin"
CONFIG = "pkg://stripes/configs/stripes.yaml"


@pytest.fixture(scope="module")
def at_home(tmp_path_factory):
    """`at_home(module, …)` runs a module in an empty folder with the example package installed."""
    top = tmp_path_factory.mktemp("plugin")
    source, place, packages = top / "source", top / "an empty folder", top / "site packages"
    shutil.copytree(PLUGIN, source)  # a build leaves files beside its source
    place.mkdir()
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation"]
    subprocess.run([*uv, "--python", sys.executable, "--target", packages, source], check=True, timeout=120)

    def run(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(packages))
            return python("-m", *arguments, cwd=place)

    return run


@pytest.mark.slow
def test_its_config_trains_by_short_names_and_answers(at_home):
    """The commands of the README work, and the run records the full names."""
    done = at_home("deeplightning", "train", CONFIG, "logger.pictures=null")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1].partition(": ")[2])
    written = (folder / "cfg.yaml").read_text()
    assert "type: stripes.data.Stripes" in written
    assert "type: stripes.network.StripeNet" in written

    drawn = at_home("deeplightning", "stripes", "rising.png", "--direction", "rising")
    assert (drawn.returncode, drawn.stderr) == (0, "")
    answer = at_home("deeplightning", "predict", "last", "rising.png")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[1].startswith("rising.png,1,rising,")


def test_a_misspelled_parameter_is_named(at_home):
    """The check compares params with the classes of the package."""
    done = at_home("deeplightning", "check", CONFIG, "model.network.params.filter=3")
    assert done.returncode == 2
    assert "filters" in done.stderr


@pytest.mark.slow
def test_its_own_tests_pass(at_home):
    """The tests that the example package ships pass."""
    done = at_home("pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN / "tests"))
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


def test_without_the_package_the_names_are_refused(tmp_path):
    """A short name of a package that is not installed is an error."""
    done = python("-m", "deeplightning", "check", PLUGIN / "stripes" / "configs" / "stripes.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "Stripes" in done.stderr
