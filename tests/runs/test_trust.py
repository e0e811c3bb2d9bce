"""A run folder of somebody else is data: whatever its config names, only known classes are built from it."""

import importlib
import json
import os
import pkgutil
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import get_type_hints

import pytest
import torch

from deeplightning import load_run, model
from deeplightning.cli.deploy import command as command_of
from deeplightning.config import own_runs
from deeplightning.config.examine import check
from deeplightning.config.own_runs import is_own
from deeplightning.config.source import read
from deeplightning.config.tree import dump, plain
from deeplightning.config.trust import refuse_links, run_config
from deeplightning.faults import PLUGINS, CheckpointError, ConfigError, plugin_of
from deeplightning.own_code import INSTALLED
from deeplightning.run.load import CPU_OVERRIDES, trained_task
from deeplightning.run.load import load_run as load_config_of
from deeplightning.runfolder import RunFolder
from deeplightning.torch_server import Checkpoint

ROOT = Path(__file__).parents[2]
DIGIT = min((ROOT / "examples" / "digits").glob("*.png"))
VERBS = ["serve", "test", "predict", "export"]

IMPORTED = {
    *(f"deeplightning_{plugin}" for plugin in PLUGINS),
    *("deeplightning", "serve", "click", "yaml", "numpy", "PIL"),
    *("omegaconf", "attr"),  # OmegaConf reads `${…}`
    *("onnx", "onnx_ir", "onnxruntime", "ml_dtypes", "safetensors", "google"),  # `export`, before it reads the config
    *sys.stdlib_module_names,
}
"""What a verb may import before it refuses a config. torch and Lightning are imported before: no further module of
theirs may be imported."""


def target(type_name, **params):
    return {"type": type_name, "params": params}


APPLY = target(
    "torch.nn.Module.apply",
    self=target("torch.nn.ParameterList", values=["touch", "PWNED"]),
    fn={"ref": "torch.utils.collect_env.run"},
)
TOUCH = target("torch.os.system", command="touch PWNED")
PARTIAL = target("functools.partial", func={"ref": "os.system"})
FAKE = target("torchvision.datasets.FakeData", root=".", download=True)
DOWNLOADED = target("deeplightning.data.of_datasets.OfDatasets", test=FAKE)
RESNET, BACKBONE = "torchvision.models.resnet18", "torchvision.models.detection.fasterrcnn_resnet50_fpn"
BY_NAME = target("torchvision.models.get_model", name="resnet18", weights="DEFAULT")
REEXPORT = target("deeplightning.model.transformer.nn.modules.module.torch.os.system", command="true")
BUILD = target("deeplightning.config.target.build", target=TOUCH)
NETWORK, CLASSES, LAYERS = "model.network", "model.network.params.num_classes", "model.network.params.layers"
EXEC = target("builtins.exec", source="open('PWNED', 'w')")
HUB = target("torch.hub.load", repo_or_dir=".", model="pwned", source="local")
COMPILER = target("torch.utils.cpp_extension.load", name="pwned", sources=["pwned.cpp"])
HOSTILE = {
    "the method of a class": (CLASSES, APPLY, ".type", "torch.nn.Module.apply, which is torch.nn.modules."),
    "functools.partial": (CLASSES, PARTIAL, ".type", "functools.partial"),
    "torch.hub.load": (NETWORK, HUB, ".type", "torch.hub.load"),
    "torch.load": (CLASSES, target("torch.load", f="evil.pt", weights_only=False), ".type", "torch.load"),
    "a dataset that is downloaded": ("data.module", DOWNLOADED, ".params.test.type", "torchvision.datasets.FakeData"),
    "builtins": (CLASSES, EXEC, ".type", "builtins.exec"),
    "os through a re-export": (CLASSES, TOUCH, ".type", "torch.os.system would be imported"),
    "os through an allowed module": (
        *(CLASSES, REEXPORT, ".type"),
        "torch.os.system, which is posix.system, would be imported",
    ),
    "a compiler": (CLASSES, COMPILER, ".type", "torch.utils.cpp_extension.load"),
    "a reference in a list": (LAYERS, [1, {"ref": "torch.os.system"}], ".1.ref", "no `ref` is allowed"),
    "a target in the optimizer's params": ("model.optimizer.params.lr", TOUCH, ".type", "torch.os.system"),
    "an own data module": ("data.module", {"type": "pwned.Data"}, ".type", "defined in deeplightning.data is allowed"),
    "a function of ours": (NETWORK, BUILD, ".type", "deeplightning.config.target.build"),
    "a program of ours": (NETWORK, {"type": "deeplightning.__main__.main"}, ".type", "deeplightning.__main__.main"),
    "a function that returns a network": (
        NETWORK,
        target(RESNET, num_classes=10),
        *(".type", f"{RESNET}, which is torchvision.models.resnet.resnet18, would be imported"),
    ),
    "a function that downloads weights": (NETWORK, target(RESNET, weights="DEFAULT"), ".type", f"{RESNET}, which is"),
    "a network that downloads the weights of its backbone": (NETWORK, {"type": BACKBONE}, ".type", BACKBONE),
    "a function of torchvision that builds by name": (NETWORK, BY_NAME, ".type", "torchvision.models.get_model"),
    "a mapping with more than a target": (CLASSES, {**TOUCH, "z": 1}, ".type", "torch.os.system"),
    "an own network": (NETWORK, {"type": "pwned.Net"}, ".type", "pwned.Net would be imported"),
    "an own optimizer": ("model.optimizer.type", "pwned.SGD", "", "pwned.SGD would be imported"),
    "an own logger": ("logger.type", "pwned.Logger", "", "--allow pwned"),
    "an own callback": ("train.callbacks", [{"type": "pwned.Callback"}], ".0.type", "pwned.Callback would be imported"),
}
"""By title: the key that is changed, its value, the rest of the key in the error, and words of the error."""


@pytest.fixture(scope="module")
def run(train):
    """A run of this user."""
    return RunFolder(train("train.export=true").folder)


def foreign(run, folder, **changes):
    """Copy a run without its bundle, and change values of its config, given by key with `__` for dots."""
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


def watched(command, cwd, *lines, **variables):
    """Run verbs in one process under an audit hook; return command line, outcome and events by kind of each."""
    file = cwd.parent / "watched.json"
    words = json.dumps([[str(word) for word in line] for line in lines])
    outcome = command("", cwd=cwd, main="watched:each", WATCHED=str(file), WORDS=words, **variables)
    done = json.loads(file.read_text()) if file.exists() else []
    assert len(done) == len(lines), outcome
    file.unlink()
    return [(line, one, _by_kind(one["seen"])) for line, one in zip(lines, done, strict=True)]


def _by_kind(events):
    kinds = ("writes", "reads", "starts", "connects", "imports", "variables")
    return {kind: [what for of, what in events if of == kind] for kind in kinds}


def assert_refused(line, one, seen):
    """Assert exit code 4 without a written file, a started process, a connection or an import of another module."""
    assert (one["code"], one["out"]) == (4, ""), (line, one["err"])
    written = [path for path in seen["writes"] if path != os.devnull]
    assert written == seen["starts"] == seen["connects"] == [], line
    assert {module for module in seen["imports"] if module.partition(".")[0] not in IMPORTED} == set(), line


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_executes_nothing(name, run, tmp_path, command):
    """Every verb refuses the config with exit code 4, key and rule, and an audit hook records nothing else."""
    key, value, rest, words = HOSTILE[name]
    work = tmp_path / "work"
    work.mkdir()
    (work / "pwned.py").write_text("open('PWNED', 'w')\n")
    (work / "hubconf.py").write_text("open('PWNED', 'w')\n")
    copy = foreign(run, tmp_path / "copy", **{key: value})
    (copy.path / "pwned.py").write_text("open('PWNED', 'w')\n")
    before = sorted(copy.path.rglob("*"))
    lines = [*([verb, copy.path] for verb in VERBS), ["predict", copy.path, DIGIT]]
    for line, one, seen in watched(command, work, *lines):
        assert_refused(line, one, seen)
        assert f"{key}{rest}: " in one["err"], (line, one["err"])
        assert words in one["err"], (line, one["err"])
    assert {path.name for path in work.iterdir()} == {"pwned.py", "hubconf.py"}
    assert sorted(copy.path.rglob("*")) == before


SECRET = "hunter-seventy-seven"
LOSS = "type: torch.nn.CrossEntropyLoss"
BEYOND_PLAIN = {
    "a choice": lambda text: text.replace(LOSS, "type: ${oc.select:tune.safe,sympy.sympify}"),
    "a choice inside a choice": lambda text: text.replace(LOSS, "type: ${oc.select:${oc.select:a,b},pwned.Loss}"),
    "a part of a name": lambda text: text.replace(LOSS, "type: torch.nn.${stages.0}"),
    "a value of its own section": lambda text: text.replace(LOSS, "type: ${.params.name}"),
    "a mapping made of text": lambda text: text.replace(LOSS, "type: '${oc.create:{type: pwned.Loss}}'"),
    "the keys of a mapping": lambda text: text.replace("loader: {}", "loader: ${oc.dict.keys:tune}"),
    "the values of a mapping": lambda text: text + "more: ${oc.dict.values:tune}\n",
    "decoded text": lambda text: text + "more: \"${oc.decode:'{type: pwned.Loss}'}\"\n",
    "a variable": lambda text: text + "more: ${oc.env:MY_VALUE}\n",
    "a variable or else a text": lambda text: text + "more: ${oc.env:MY_VALUE,none}\n",
    "a variable in a list of lists": lambda text: text + "more: [[1, ['${oc.env:MY_VALUE}']]]\n",
    "a variable in a section that is not taken": lambda text: text.replace("env: {}", "env: {A: '${oc.env:MY_VALUE}'}"),
    "a variable in a key": lambda text: text + "'${oc.env:MY_VALUE}': 1\n",
    "a variable behind escapes": lambda text: text + 'more: "\\x24{oc.env:MY_VALUE}"\n',
    "a variable in a block": lambda text: text + "more: |\n  ${oc.env:MY_VALUE}\n",
    "a variable by an anchor": lambda text: text + "more: &a ${oc.env:MY_VALUE}\nless: *a\n",
    "an outdated key": lambda text: text + "more: ${oc.deprecated:seed}\n",
    "a resolver of its own": lambda text: text + "more: ${mine:1}\n",
    "a base at an address": lambda text: "_base_: http://127.0.0.1:9/base.yaml\n" + text,
    "a base of this machine": lambda text: "_base_: /etc/passwd\n" + text,
    "a base of a package": lambda text: "_base_: pkg://pwned/base.yaml\n" + text,
    "an option": lambda text: "_base_: [{model: resnet}]\n" + text,
    "a base inside a section": lambda text: text.replace("data:\n", "data:\n  _base_: other.yaml\n", 1),
    "an object of Python": lambda text: text + "more: !!python/object/apply:os.system [touch PWNED]\n",
    "a tag that says what it is": lambda text: text.replace("seed: 7", "seed: !!int '7'"),
    "a tag of its own": lambda text: "%TAG !e! tag:pwned,2026:\n---\n" + text + "more: !e!x 1\n",
}
"""Values of a foreign config that are not plain: how each changes the text of the config."""
BY_ALL = ("a choice", "a variable", "a base at an address", "an object of Python")
"""Tested with every verb; the others are tested with one verb of each way to read a config."""


def verbs_of(folder, own):
    """Return the command line of each verb that takes a run, except those of plug-ins that are not installed."""
    lines = [
        *(["predict", folder, str(DIGIT)], ["serve", folder], ["diff", own, folder], ["test", folder, "seed=4"]),
        *(["predict", folder], ["export", folder], ["compare", own, folder], ["reproduce", folder]),
        *(["bisect", own, folder], ["report", folder]),
    ]
    return [line for line in lines if not (plugin := plugin_of(line[0])) or find_spec(f"deeplightning_{plugin}")]


@pytest.mark.parametrize("name", BEYOND_PLAIN)
def test_a_foreign_config_is_plain_or_refused(name, run, tmp_path, command):
    """Every verb and `load_run` refuse values that are not plain with file and line, and execute and read nothing."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "pwned.py").write_text("open('PWNED', 'w')\n")
    copies = [tmp_path / "with", tmp_path / "without"]
    for copy, left_out in zip(copies, ((), ("bundle",)), strict=True):
        shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns(*left_out))
        text = BEYOND_PLAIN[name](run.config.read_text())
        assert text != run.config.read_text()
        (copy / "cfg.yaml").write_text(text)
    verbs = 10 if name in BY_ALL else 4
    lines = [line for copy in copies for line in verbs_of(str(copy), str(run.path))[:verbs]]
    archives = [path for path in sys.path if path.endswith(".zip")]  # of the interpreter, searched for entry points
    allowed = (*copies, run.path, *INSTALLED, *archives, ROOT, "/usr", "/etc/ld", "/proc", "/sys", "/dev")
    for line, one, seen in watched(command, work, *lines, MY_VALUE=SECRET, HOME=str(work)):
        assert_refused(line, one, seen)
        assert SECRET not in one["err"], line
        assert "not made here by you, and its config has " in one["err"], (line, one["err"])
        assert "cfg.yaml:" in one["err"], line
        if line[0] != "serve":  # which copies the complete environment for the server
            assert "MY_VALUE" not in seen["variables"], line
        assert [path for path in seen["reads"] if not path.startswith(tuple(map(str, allowed)))] == [], line
    assert sorted(path.name for path in work.iterdir()) == ["pwned.py"]
    with pytest.raises(CheckpointError, match="not made here by you, and its config has "):
        load_run(copies[0])


def test_the_tree_that_is_admitted_is_the_tree_that_is_built(run, tmp_path, monkeypatch):
    """Overrides and variables are resolved before names are checked; later changes of the file have no effect."""
    named = "model.loss.type: to use this run, sympy.sympify"
    copy = foreign(run, tmp_path / "copy", model__loss={"type": "torch.nn.CrossEntropyLoss"}, more=1)
    with pytest.raises(CheckpointError, match=named):
        check(run_config(copy), ["model.loss.type=sympy.sympify"])
    with pytest.raises(CheckpointError, match=r"model\.loss: .* has the reference '\$\{model\.network\}'"):
        check(run_config(copy), ["model.loss=${model.network}"])
    monkeypatch.setenv("LOSS", "sympy.sympify")
    with pytest.raises(CheckpointError, match=r"the reference '\$\{oc\.env:LOSS\}'\. .* --allow oc\.env"):
        check(run_config(copy, verb="test"), ["model.loss.type=${oc.env:LOSS}"])
    with pytest.raises(CheckpointError, match=named):
        check(run_config(copy, ["oc.env"]), ["model.loss.type=${oc.env:LOSS}"])
    config = run_config(copy)
    copy.config.write_text(copy.config.read_text().replace("torch.nn.CrossEntropyLoss", "${oc.env:LOSS}"))
    assert "model.loss" not in [fault.key for fault in check(config).faults]
    with pytest.raises(CheckpointError, match=named):
        load_config_of(copy, [], "use", allow=["oc.env"])
    monkeypatch.setenv("LOSS", "torch.nn.CrossEntropyLoss")
    assert load_config_of(copy, CPU_OVERRIDES, "use", allow=["oc.env"]).model.loss.type == "torch.nn.CrossEntropyLoss"
    with pytest.raises(CheckpointError, match=r"cfg\.yaml:\d+:\d+: .* has the reference '\$\{oc\.env:LOSS\}'"):
        run_config(copy, ["torch"])


def test_a_link_out_of_a_foreign_run_is_not_followed(run, tmp_path, command):
    """A link from the results or the bundle of a foreign run to a file of this machine ends a verb with exit code 4."""
    secret = tmp_path / "secret.json"
    secret.write_text('{"test_loss": 77.77}')
    for name in ("test_results.json", "bundle/notes.json"):
        copy = foreign(run, tmp_path / name.partition("/")[0])
        copy.bundle.mkdir()
        (copy.path / name).unlink(missing_ok=True)
        (copy.path / name).symlink_to(secret)
        for words in (["diff", run.path, copy.path], ["report", copy.path], ["export", copy.path]):
            outcome = command(*words, cwd=tmp_path, code=4)
            assert f"{name}: this link leads out of the folder of a run" in outcome.err
            assert "77.77" not in str(outcome)
    (copy.path / name).unlink()
    (copy.path / "inside.json").symlink_to("best.json")
    assert command("export", copy.path, cwd=tmp_path).code == 0


def test_the_server_of_torch_applies_the_same_rules(run, tmp_path, monkeypatch):
    """The torch server refuses a hostile run even if it is started directly."""
    monkeypatch.chdir(tmp_path)
    copy = foreign(run, tmp_path / "copy", **{CLASSES: APPLY})
    with pytest.raises(CheckpointError, match=f"{CLASSES}.type: to serve this run"):
        Checkpoint.open(copy)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("part", ["params", "groups"])
def test_a_checkpoint_that_training_resumes_from_names_nothing_to_be_built(part, run, tiny, tmp_path, command):
    """A target among the optimizer's values in a checkpoint is neither imported nor called."""
    work = tmp_path / "work"
    work.mkdir()
    touch = {"type": "sympy.sympify", "params": {"a": f"open({str(tmp_path / 'PWNED')!r}, 'w')"}}
    checkpoint = torch.load(run.last, weights_only=True)
    optimizer = checkpoint["config"]["model"]["optimizer"]
    optimizer[part] = {**optimizer["params"], "lr": touch} if part == "params" else [{"match": ".*", "lr": touch}]
    torch.save(checkpoint, tmp_path / "last.ckpt")
    resume = f"train.resume_ckpt='{tmp_path / 'last.ckpt'}'"
    ((_, one, seen),) = watched(command, work, ["train", tiny, resume, "train.num_epochs=3"])
    assert not (tmp_path / "PWNED").exists(), one
    assert "sympy.core.sympify" not in seen["imports"], one
    assert "Traceback" not in one["err"], one


def test_the_tracker_that_a_hostile_config_names_is_not_asked(run, tmp_path, command):
    """`diff` reads a foreign run from its folder: it opens no connection to the tracker in its config."""
    folder = tmp_path / "0" / run.path.parent.name / "artifacts"
    folder.parent.mkdir(parents=True)
    copy = foreign(run, folder, **{"logger.params": {"tracking_uri": "http://127.0.0.1:9"}})
    ((_, one, seen),) = watched(command, tmp_path, ["diff", copy.path, run.path])
    assert one["code"] == 0, one
    assert seen["connects"] == []


# ---- own runs


@pytest.mark.slow
def test_an_own_run_is_never_asked_about(train, place, command, tmp_path):
    """An own run with own code, also copied, needs no permission; on another machine it needs `--allow`."""
    network = "model.network={type: own.network, params: {width: 8}}"
    folder = train("~model.network", network, "train.export=false").folder
    copy = shutil.copytree(folder, tmp_path / "copied")
    for path in (folder, copy):
        for verb in ("export", "test", "predict"):
            outcome = command(verb, path, cwd=place, code=0)
            assert "not made here" not in outcome.err
    assert RunFolder(copy).bundle_card.is_file()
    elsewhere = str(tmp_path / "another machine")
    moved = command("export", copy, cwd=place, XDG_STATE_HOME=elsewhere, code=4)
    assert "model.network.type: to export this run, own.network would be imported" in moved.err
    command("export", copy, "--allow=own", cwd=place, XDG_STATE_HOME=elsewhere, code=0)


def test_a_register_that_others_may_write_counts_for_nothing(run, tmp_path, monkeypatch):
    """A register of own runs that others may write is ignored, and it does not match a changed config."""
    register = tmp_path / "state" / "deeplightning" / "own"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(own_runs, "_noted", set())
    own_runs.note_own(run.config)
    own_runs._noted.clear()
    assert is_own(run)
    assert register.stat().st_mode & 0o777 == 0o700
    copy = RunFolder(shutil.copytree(run.path, tmp_path / "copy"))
    assert is_own(copy)
    copy.config.write_text(copy.config.read_text() + "\n")  # the digest is of the bytes
    assert not is_own(copy)
    register.chmod(0o722)
    assert not is_own(run)
    monkeypatch.setenv("XDG_STATE_HOME", str(DIGIT))
    own_runs.note_own(run.config)
    assert is_own(run)


# ---- foreign runs without own code


def test_a_foreign_run_of_known_classes_is_used_without_leave(run, tmp_path, command):
    """A foreign run of known classes is exported and tested without its tracker, hook, environment and init_from."""
    marks = {
        "engine.setup_hook": "pwned.hook",
        "engine.env": {"PWNED": "1"},
        "logger.params": {"tracking_uri": "http://127.0.0.1:9/"},
        "model.init_from": "/nowhere/weights.pth",
    }
    copy = foreign(run, tmp_path / "copy", **marks)
    (tmp_path / "pwned.py").write_text("raise SystemExit('imported')")
    command("export", copy.path, cwd=tmp_path, code=0)
    assert copy.bundle_weights.read_bytes() == run.bundle_weights.read_bytes()
    tested = command("test", copy.path, cwd=tmp_path, code=0)
    assert tested.folder.is_relative_to(tmp_path / "mlruns")
    command("predict", copy.path, DIGIT, cwd=tmp_path, code=0)
    trained_task(copy)
    assert str(copy.path) not in sys.path  # a module next to `cfg.yaml` cannot shadow a library


def test_a_foreign_config_does_not_open_the_machine(run, tmp_path, capsys):
    """The host of a foreign config is ignored, and a variable for the key is refused; overrides of the user count."""
    copy = foreign(run, tmp_path / "copy", serve__host="0.0.0.0")
    shutil.copytree(run.bundle, copy.bundle)
    assert command_of(str(copy.path))[5:] == []
    assert "serve.host 0.0.0.0 of " in capsys.readouterr().err
    assert command_of(str(copy.path), ["serve.host='::1'"])[5:] == ["--host=::1"]
    other = foreign(run, tmp_path / "other", serve__api_key_env="HOME")
    shutil.copytree(run.bundle, other.bundle)
    with pytest.raises(CheckpointError, match=r"serve\.api_key_env: this run was not made here by you, and its config"):
        command_of(str(other.path))
    assert command_of(str(other.path), ["serve.api_key_env=null"])[5:] == []
    assert command_of(str(other.path), ["serve.api_key_env=HOME"])[5:] == ["--api-key-env=HOME"]


def test_what_a_rule_allows_is_what_our_configs_name(run, tmp_path):
    """A foreign config may name our modules, torch's layers and optimizers, and torchvision's transforms."""
    augment = [{"type": "torchvision.transforms.v2.RandomHorizontalFlip", "params": {"p": 0.5}}]
    changes = {
        "model.network": {"type": "torch.nn.Sequential"},
        "model.loss": {"type": "torch.nn.MSELoss"},
        "model.optimizer": {"type": "torch.optim.AdamW", "params": {"lr": 0.1}},
        "model.scheduler": {"type": "torch.optim.lr_scheduler.ReduceLROnPlateau"},
        "data.module.params.augment": augment,
    }
    report = check(run_config(foreign(run, tmp_path / "copy", **changes)))
    assert report.source.root.value["model"].value["network"].value["type"].value == "torch.nn.Sequential"


def test_each_of_our_networks_is_a_class(run, tmp_path):
    """No public function returns a network, so a foreign config may name each of our networks without permission."""
    names = [module.name for module in pkgutil.iter_modules(model.__path__, "deeplightning.model.")]
    functions = {
        found.__name__: found
        for module in map(importlib.import_module, names)
        for found in vars(module).values()
        if isinstance(found, FunctionType) and found.__module__ == module.__name__ and found.__name__[0] != "_"
    }
    given = {name: get_type_hints(found)["return"] for name, found in functions.items()}
    assert not [name for name, of in given.items() if isinstance(of, type) and issubclass(of, torch.nn.Module)]
    network = {"type": "deeplightning.model.resnet.ResNet18", "params": {"num_classes": 10, "num_channels": 1}}
    assert check(run_config(foreign(run, tmp_path / "copy", **{"model.network": network}))).faults == []


def test_a_foreign_config_neither_writes_elsewhere_nor_fetches_data(run, tmp_path):
    """Cache folder, download and URL of a foreign config are ignored; overrides of the user count."""
    images = {"type": "deeplightning.data.mnist.MNIST", "params": {"cache": "/somewhere", "download": True}}
    changes = {"data.module": images, "data.root": "http://127.0.0.1:9/data"}
    config = run_config(foreign(run, tmp_path / "copy", **changes))
    data = check(config).config.data
    assert (data.module.params, data.root) == ({"cache": True, "download": False}, None)
    data = check(config, ["data.module.params.download=true", "data.root=/mine"]).config.data
    assert (data.module.params["download"], data.root) == (True, "/mine")


def test_a_link_to_itself_in_a_foreign_run_is_accepted(run, tmp_path):
    """A link to itself, for which `Path.resolve` raises up to Python 3.12, is accepted; a link out is not."""
    copy = foreign(run, tmp_path / "circle")
    (copy.path / "loop").symlink_to("loop")
    refuse_links(copy)
    (copy.path / "out").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="out: this link leads out of the folder"):
        refuse_links(copy)


def test_an_unknown_key_of_a_foreign_config_names_no_further_file(run, tmp_path, monkeypatch):
    """A key that looks like a file in the home directory is an unknown key; the file is not merged."""
    monkeypatch.setenv("HOME", str(tmp_path))
    copy = foreign(run, tmp_path / "copy")
    settings = plain(read(copy.config).root) | {"/copy/more.yaml": None}
    del settings["train"]["callbacks"]
    copy.config.write_text(dump(settings))
    evil = target("torch.hub.load", repo_or_dir=str(tmp_path), model="m", source="local")
    (copy.path / "more.yaml").write_text(dump({"~/copy/more.yaml": None, "train": {"callbacks": [evil]}}))
    with pytest.raises(ConfigError, match="unknown key"):
        load_config_of(copy, [], "test")


def test_damaged_samples_are_refused(run, tmp_path, command):
    """`export` refuses samples that cannot be read with exit code 4."""
    copy = foreign(run, tmp_path / "copy")
    copy.samples.write_bytes(copy.samples.read_bytes()[:-100])
    assert "samples.npz cannot be read" in command("export", copy.path, cwd=tmp_path, code=4).err


def test_a_user_without_a_home_has_no_register(run, monkeypatch, caplog):
    """Without a home the run is not registered, which is a warning."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # so pathlib finds no home
    monkeypatch.setattr(own_runs, "_noted", set())
    own_runs.note_own(run.config)
    assert "commands ask before they import the code of this one" in caplog.text
    own_runs._noted.clear()
    assert not is_own(run)
