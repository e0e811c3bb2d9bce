"""A run folder from somebody else is data: whatever its config names, only networks of known classes are built."""

import importlib
import json
import os
import pkgutil
import shutil
import sys
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest

from deeplightning import model
from deeplightning.checks import trust
from deeplightning.checks.trust import admit, is_own, is_own_code
from deeplightning.cli.deploy import command as command_of
from deeplightning.config.source import read
from deeplightning.config.tree import dump, plain
from deeplightning.faults import CheckpointError
from deeplightning.launch import ray, slurm
from deeplightning.reproduce.past import _stores_around
from deeplightning.run.load import trained_task
from deeplightning.runfolder import RunFolder
from deeplightning.torch_server import Checkpoint

ROOT = Path(__file__).parents[2]
DIGIT = min((ROOT / "examples" / "digits").glob("*.png"))
VERBS = ["serve", "test", "predict", "export"]

IMPORTED = {
    *("deeplightning", "serve", "click", "yaml", "numpy", "PIL"),
    *("omegaconf", "attr"),  # what reads `${…}`, and what that imports
    *(
        "onnx",
        "onnx_ir",
        "onnxruntime",
        "ml_dtypes",
        "safetensors",
        "google",
    ),  # for `export`, before it reads the config
    *sys.stdlib_module_names,
}
"""What a verb may import before it refuses a config. torch and Lightning are there already: none of their further
modules is imported."""

APPLY = {
    "type": "torch.nn.Module.apply",
    "params": {
        "self": {"type": "torch.nn.ParameterList", "params": {"values": ["touch", "PWNED"]}},
        "fn": {"ref": "torch.utils.collect_env.run"},
    },
}
TOUCH = {"type": "torch.os.system", "params": {"command": "touch PWNED"}}
CLASSES = "model.network.params.num_classes"
LAYERS = "model.network.params.layers"
HOSTILE = {
    "the method of a class": (CLASSES, APPLY, f"{CLASSES}.type", "torch.nn.Module.apply, which is torch.nn.modules."),
    "functools.partial": (
        CLASSES,
        {"type": "functools.partial", "params": {"func": {"ref": "os.system"}}},
        f"{CLASSES}.type",
        "functools.partial",
    ),
    "torch.hub.load": (
        "model.network",
        {"type": "torch.hub.load", "params": {"repo_or_dir": ".", "model": "pwned", "source": "local"}},
        "model.network.type",
        "torch.hub.load",
    ),
    "torch.load": (
        CLASSES,
        {"type": "torch.load", "params": {"f": "evil.pt", "weights_only": False}},
        f"{CLASSES}.type",
        "torch.load",
    ),
    "a dataset that is downloaded": (
        "data.module",
        {
            "type": "deeplightning.data.of_datasets.OfDatasets",
            "params": {"test": {"type": "torchvision.datasets.FakeData", "params": {"root": ".", "download": True}}},
        },
        "data.module.params.test.type",
        "torchvision.datasets.FakeData",
    ),
    "builtins": (
        CLASSES,
        {"type": "builtins.exec", "params": {"source": "open('PWNED', 'w')"}},
        f"{CLASSES}.type",
        "builtins.exec",
    ),
    "os through a re-export": (CLASSES, TOUCH, f"{CLASSES}.type", "torch.os.system, which is posix.system,"),
    "os through a module that may be named": (
        CLASSES,
        {"type": "deeplightning.model.transformer.nn.modules.module.torch.os.system", "params": {"command": "true"}},
        f"{CLASSES}.type",
        "which is posix.system,",
    ),
    "a compiler": (
        CLASSES,
        {"type": "torch.utils.cpp_extension.load", "params": {"name": "pwned", "sources": ["pwned.cpp"]}},
        f"{CLASSES}.type",
        "torch.utils.cpp_extension.load",
    ),
    "a reference in a list": (LAYERS, [1, {"ref": "torch.os.system"}], f"{LAYERS}.1.ref", "no `ref` is allowed"),
    "a target in the optimizer's params": (
        "model.optimizer.params.lr",
        TOUCH,
        "model.optimizer.params.lr.type",
        "torch.os.system",
    ),
    "a data module of somebody's": (
        "data.module",
        {"type": "pwned.Data"},
        "data.module.type",
        "defined in deeplightning.data is allowed",
    ),
    "a function of ours": (
        "model.network",
        {"type": "deeplightning.config.target.build", "params": {"target": TOUCH}},
        "model.network.type",
        "deeplightning.config.target.build",
    ),
    "a program of ours": (
        "model.network",
        {"type": "deeplightning.__main__.main"},
        "model.network.type",
        "deeplightning.__main__.main",
    ),
    "a function that downloads weights": (
        "model.network",
        {"type": "torchvision.models.resnet18", "params": {"weights": "DEFAULT"}},
        "model.network.type",
        "torchvision.models.resnet18, which is",
    ),
    "a network whose backbone's weights are downloaded": (
        "model.network",
        {"type": "torchvision.models.detection.fasterrcnn_resnet50_fpn"},
        "model.network.type",
        "that builds one without weights, with plain values",
    ),
    "weights by the older word": (
        "model.network",
        {"type": "torchvision.models.resnet18", "params": {"pretrained": True}},
        "model.network.type",
        "that builds one without weights, with plain values",
    ),
    "a function of torchvision's that builds what is named": (
        "model.network",
        {"type": "torchvision.models.get_model", "params": {"name": "resnet18", "weights": "DEFAULT"}},
        "model.network.type",
        "torchvision.models.get_model",
    ),
    "an environment variable": (
        "model.network.params.image_size",
        "${oc.decode:${oc.env:HOME}}",
        "model.network.params.image_size",
        "only plain values are allowed. If you trust it: --allow oc.env",
    ),
    "an own logger": ("logger.type", "pwned.Logger", "logger.type", "--allow pwned"),
    "an own callback": (
        "train.callbacks",
        [{"type": "pwned.Callback"}],
        "train.callbacks.0.type",
        "pwned.Callback would be imported",
    ),
}


@pytest.fixture(scope="module")
def run(train):
    """A run of one's own."""
    return RunFolder(train("train.export=true").folder)


def foreign(run, folder, **changes):
    """A copy of a run without its bundle, whose config says something else: by key, with `__` for its dots."""
    copy = RunFolder(shutil.copytree(run.path, folder, ignore=shutil.ignore_patterns("bundle")))
    settings = plain(read(copy.config).root)
    for key, value in ({"seed": 8} | changes).items():
        *path, last = key.replace("__", ".").split(".")
        section = settings
        for part in path:
            section = section[part]
        section[last] = value
    copy.config.write_text(dump(settings))
    return copy


def watched(command, cwd, verb, folder, *more):
    """How a verb ended under an audit hook, and what it did, by kind."""
    file = cwd / "watched.json"
    outcome = command(verb, folder, *more, cwd=cwd, main="watched:main", WATCHED=str(file))
    seen = {"writes": [], "starts": [], "connects": [], "imports": []}
    for kind, what in json.loads(file.read_text()):
        seen[kind].append(what)
    file.unlink()
    return outcome, seen


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_executes_nothing(name, run, tmp_path, command):
    """Serve, test, predict and export: exit 4 with key and rule; an audit hook sees no file opened for writing, no
    process, no connection, and no module outside of the list."""
    key, value, told, words = HOSTILE[name]
    work = tmp_path / "work"
    work.mkdir()
    (work / "pwned.py").write_text("open('PWNED', 'w')\n")
    (work / "hubconf.py").write_text("open('PWNED', 'w')\n")
    copy = foreign(run, tmp_path / "copy", **{key: value})
    (copy.path / "pwned.py").write_text("open('PWNED', 'w')\n")
    before = sorted(copy.path.rglob("*"))
    for verb in VERBS:
        outcome, seen = watched(command, work, verb, copy.path)
        assert outcome.code == 4, (verb, str(outcome))
        assert f"{told}: " in outcome.err, (verb, outcome.err)
        assert words in outcome.err, (verb, outcome.err)
        written = [path for path in seen["writes"] if path != os.devnull]
        assert written == seen["starts"] == seen["connects"] == [], verb
        assert {module for module in seen["imports"] if module.partition(".")[0] not in IMPORTED} == set(), verb
        assert {path.name for path in work.iterdir()} == {"pwned.py", "hubconf.py"}, verb
        assert sorted(copy.path.rglob("*")) == before, verb
    outcome, _ = watched(command, work, "predict", copy.path, DIGIT)
    assert (outcome.code, outcome.out) == (4, ""), str(outcome)


def test_the_server_of_torch_asks_too(run, tmp_path, monkeypatch):
    """Started by hand it holds the same gate."""
    monkeypatch.chdir(tmp_path)
    copy = foreign(run, tmp_path / "copy", **{CLASSES: APPLY})
    with pytest.raises(CheckpointError, match=f"{CLASSES}.type: to serve this run"):
        Checkpoint.open(copy)
    assert not (tmp_path / "PWNED").exists()


def test_the_tracker_that_a_hostile_config_names_is_not_asked(run, tmp_path, command):
    """`diff` reads a foreign run where it lies: no connection, no file of a store elsewhere is opened."""
    folder = tmp_path / "0" / run.path.parent.name / "artifacts"
    folder.parent.mkdir(parents=True)
    copy = foreign(run, folder, **{"logger.params": {"tracking_uri": "http://127.0.0.1:9"}})
    outcome, seen = watched(command, tmp_path, "diff", copy.path, run.path)
    assert outcome.code == 0, outcome
    assert seen["connects"] == []
    assert "http://127.0.0.1:9" not in [store.shown for store in _stores_around(copy)]
    trust.note_own(copy.config)
    assert "http://127.0.0.1:9" in [store.shown for store in _stores_around(copy)]


# ---- one's own


def test_an_own_run_is_never_asked_about(train, place, command, tmp_path):
    """Own code in network and callback: tested, exported and served without a word, also from a copied folder."""
    network = "model.network={type: own.network, params: {width: 8}}"
    folder = train("~model.network", network, "train.export=false").folder
    copy = shutil.copytree(folder, tmp_path / "copied")
    for path in (folder, copy):
        for verb in ("export", "test", "predict"):
            outcome = command(verb, path, cwd=place)
            assert outcome.code == 0, outcome
            assert "not made here" not in outcome.err
    assert RunFolder(copy).bundle_card.is_file()
    moved = command("export", copy, cwd=place, XDG_STATE_HOME=str(tmp_path / "another machine"))
    assert moved.code == 4, moved
    assert "model.network.type: to export this run, own.network would be imported" in moved.err
    allowed = command("export", copy, "--allow=own", cwd=place, XDG_STATE_HOME=str(tmp_path / "another machine"))
    assert allowed.code == 0, allowed


def test_a_changed_config_is_foreign(run, tmp_path):
    """One byte more and the folder is nobody's; the digest is of the bytes."""
    copy = RunFolder(shutil.copytree(run.path, tmp_path / "copy"))
    assert is_own(copy)
    copy.config.write_text(copy.config.read_text() + "\n")
    assert not is_own(copy)


def test_a_run_that_a_launcher_started_elsewhere_is_own(run, tmp_path, capsys):
    """Where its folder lies here in the end: Slurm's and Ray's first process say where."""
    one, other = (foreign(run, tmp_path / name, seed=seed) for name, seed in (("one", 11), ("other", 12)))
    assert not is_own(one)
    slurm._log(tmp_path, "7").write_text(f"Artifact storage path: {one.path}\n")
    slurm._Following("7", tmp_path)._echo(to_the_end=True)
    ray._Launch._print(SimpleNamespace(folder=None), 1, f"Artifact storage path: {other.path}\n".encode())
    assert is_own_code(one)
    assert is_own_code(other)
    ray._Launch._print(SimpleNamespace(folder=None), 1, b"Artifact storage path: /of/another/machine\n")


def test_a_register_that_others_may_write_counts_for_nothing(run, tmp_path, monkeypatch):
    """Else another user could declare folders to be one's own. What cannot be written is said once, and no fault."""
    register = tmp_path / "state" / "deeplightning" / "own"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_noted", set())
    trust.note_own(run.config)
    trust._noted.clear()
    assert is_own(run)
    assert register.stat().st_mode & 0o777 == 0o700
    register.chmod(0o722)
    assert not is_own(run)
    monkeypatch.setenv("XDG_STATE_HOME", str(DIGIT))
    trust.note_own(run.config)
    assert is_own(run)


# ---- somebody else's, without own code


def test_a_foreign_run_of_known_classes_is_used_without_leave(run, tmp_path, command):
    """Its bundle is that of the original. Its results go into a new run of the store in use here; its tracker, hook,
    callbacks and variables are not taken, and nothing of them is resolved."""
    marks = {
        "engine.setup_hook": "pwned.hook",
        "engine.env": {"PWNED": "${oc.env:HOME}"},
        "logger.params": {"tracking_uri": "http://127.0.0.1:9/${oc.env:HOME}"},
        "model.init_from": "${oc.env:HOME}/weights.pth",
    }
    copy = foreign(run, tmp_path / "copy", **marks)
    (tmp_path / "pwned.py").write_text("raise SystemExit('imported')")
    exported = command("export", copy.path, cwd=tmp_path)
    assert exported.code == 0, exported
    assert copy.bundle_weights.read_bytes() == run.bundle_weights.read_bytes()
    tested = command("test", copy.path, cwd=tmp_path)
    assert tested.code == 0, tested
    assert tested.folder.is_relative_to(tmp_path / "mlruns")
    named = command("predict", copy.path, DIGIT, cwd=tmp_path)
    assert named.code == 0, named


def test_nothing_is_imported_out_of_a_run_folder(run, tmp_path):
    """A module beside `cfg.yaml` does not stand in for one that some library would like to have."""
    copy = foreign(run, tmp_path / "copy")
    trained_task(copy)
    assert str(copy.path) not in sys.path


def test_a_foreign_config_does_not_open_the_machine(run, tmp_path, capsys):
    """Neither its host nor a variable reaches the server, with a bundle or without."""
    copy = foreign(run, tmp_path / "copy", serve__host="0.0.0.0")
    shutil.copytree(run.bundle, copy.bundle)
    assert command_of(str(copy.path))[5:] == []
    assert "serve.host 0.0.0.0 of " in capsys.readouterr().err
    assert command_of(str(copy.path), ["serve.host='::1'"])[5:] == ["--host=::1"]
    other = foreign(run, tmp_path / "other", serve__host="${oc.env:HOME}")
    shutil.copytree(run.bundle, other.bundle)
    with pytest.raises(CheckpointError, match=r"serve\.host: the config of this run, which was not made here by you"):
        command_of(str(other.path))


def test_what_a_rule_allows_is_what_our_configs_name(run, tmp_path):
    """Every module of ours, torch's layers and optimizers, torchvision's networks and transforms."""
    augment = [{"type": "torchvision.transforms.v2.RandomHorizontalFlip", "params": {"p": 0.5}}]
    changes = {
        "model.network": {"type": "torch.nn.Sequential"},
        "model.loss": {"type": "deeplightning.loss.vae.DiscreteVAELoss"},
        "model.optimizer": {"type": "torch.optim.AdamW", "params": {"lr": 0.1}},
        "model.scheduler": {"type": "torch.optim.lr_scheduler.ReduceLROnPlateau"},
        "data.module.params.augment": augment,
    }
    assert "~engine" in admit(foreign(run, tmp_path / "copy", **changes))


@pytest.mark.parametrize(
    ("network", "params"),
    [
        ("deeplightning.model.resnet.ResNet18", {"num_classes": 10, "num_channels": 1}),
        ("torchvision.models.resnet18", {"num_classes": 10}),
        ("torchvision.models.resnet18", {"num_classes": 10, "weights": None}),
        ("torchvision.models.detection.fasterrcnn_resnet50_fpn", {"weights": None, "weights_backbone": None}),
    ],
)
def test_a_network_that_a_function_makes_is_built_without_leave(network, params, run, tmp_path):
    """Ours, and those of torchvision's list, as long as no weights are downloaded."""
    assert "~engine" in admit(foreign(run, tmp_path / "copy", **{"model.network": {"type": network, "params": params}}))


def test_every_public_function_beside_our_networks_makes_one():
    """A foreign config may call them: another one has to be private, or to stand elsewhere."""
    names = [module.name for module in pkgutil.iter_modules(model.__path__, "deeplightning.model.")]
    functions = {
        found.__name__
        for module in map(importlib.import_module, names)
        for found in vars(module).values()
        if isinstance(found, FunctionType) and found.__module__ == module.__name__ and found.__name__[0] != "_"
    }
    resnets = {*("ResNet18", "ResNet34", "ResNet50", "ResNet101", "ResNet152")}
    assert functions == {*resnets, "ResNeXt50", "ResNeXt101", "WideResNet50", "WideResNet101"}


def test_a_foreign_config_names_no_folder_to_write_to(run, tmp_path):
    """The cache of decoded images stays where the user has it."""
    images = {"type": "deeplightning.data.image_folder.ImageFolder", "params": {"cache": "/somewhere"}}
    overrides = admit(foreign(run, tmp_path / "copy", **{"data.module": images}))
    assert "data.module.params.cache=true" in overrides
