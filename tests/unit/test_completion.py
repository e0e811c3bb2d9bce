"""What TAB offers behind `deeplightning VERB`: `deeplightning.cli.completion`, in the shells' own words."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class

from deeplightning.cli import cli
from deeplightning.tracking.sqlite import mlflow_is_known, open_directly
from deeplightning.tracking.store import locate

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "_DEEPLIGHTNING_COMPLETE"
CONFIG = """\
seed: 7
stages: [train]
data:
  module: {type: deeplightning.data.digits.Digits, params: {limit: 150}}
  batch_size: 16
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: completed.Network, params: {width: 3, first: {type: completed.Layer, params: {}}, parts: [{a: 1}]}}
  optimizer:
    encoder: {type: completed.Optimizer}
    decoder: {type: completed.Optimizer, params: {lr: 1}}
train: {num_epochs: 2, early_stop: {metric: val_loss}}
engine: {env: {COLOR: red}}
"""
OWN = """\
from typing import Literal

import torch

open("imported", "w").close()


class Layer:
    def __init__(self, bias: bool = True, size: int | None = None):
        pass


class Network(torch.nn.Module):
    def __init__(self, width: int, kind: Literal["wide", "deep"] = "wide", first=None, parts=()):
        pass


class Optimizer:
    def __init__(self, parameters, lr: float, nesterov: bool = False):
        pass
"""


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A working directory with a config and code of its own."""
    before, path = Path.cwd(), list(sys.path)
    folder = tmp_path_factory.mktemp("place")
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "completed.py").write_text(OWN)
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.path[:] = path


def offered(shell: str, words: str, number: int) -> list[str]:
    """The lines that a shell gets for its words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMP_WORDS", words)
        patch.setenv("COMP_CWORD", str(number))
        found = get_completion_class(shell)
        assert found is not None
        return found(cli, {}, "deeplightning", VARIABLE).complete().splitlines()


def words(last: str, *before: str) -> list[str]:
    """What bash is offered for the last word of `deeplightning train c.yaml …`, where words break at spaces only."""
    lines = offered("zsh", "\n".join(["deeplightning", "train", "c.yaml", *before, last]), 3 + len(before))
    assert set(lines[::3]) <= {"plain"}
    return [word.replace("\\:", ":") for word in lines[1::3]]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        # keys, a level at a time, without those that this version refuses
        ("", ["version=", "seed=", "stages=", "data.", "model.", "engine.", "train.", "test.", "logger.", "tune.",
              "tune=", "serve.", "resolvers."]),
        ("tra", ["train."]),
        ("data.b", ["data.batch_size="]),
        ("train.early", ["train.early_stop.", "train.early_stop="]),
        ("train.early_stop.m", ["train.early_stop.metric=", "train.early_stop.mode="]),
        ("logger.log_e", ["logger.log_every_n_steps.", "logger.log_every_n_steps="]),
        ("serve.max_", [f"serve.max_{name}=" for name in ("upload_mb", "pixels", "side", "batch", "queue", "wait")]),
        ("nothing", []),
        ("seed.", []),
        ("nothing.at.all", []),
        # what the config holds
        ("engine.env.", ["engine.env.COLOR="]),
        ("model.optimizer.", ["model.optimizer.encoder.", "model.optimizer.decoder."]),
        ("model.network.params.parts.0.", ["model.network.params.parts.0.a="]),
        # what a class takes: not its parameters that are ours, and without an import
        ("model.network.params.", ["model.network.params.width=", "model.network.params.kind=",
                                   "model.network.params.first.", "model.network.params.parts.",
                                   "model.network.params.parts="]),
        ("model.network.params.first.params.", ["model.network.params.first.params.bias=",
                                                "model.network.params.first.params.size="]),
        ("model.optimizer.decoder.params.", ["model.optimizer.decoder.params.lr=",
                                             "model.optimizer.decoder.params.nesterov="]),
        # values
        ("engine.backend=d", ["engine.backend=ddp", *(f"engine.backend=deepspeed_stage_{s}" for s in
                              ("1", "2", "3", "1_offload", "2_offload", "3_offload", "1_offload_nvme",
                               "2_offload_nvme", "3_offload_nvme"))]),
        ("engine.precision=", [f"engine.precision={word}" for word in
                               ("16", "32", "64", "bf16", "16-mixed", "16-true", "bf16-mixed", "bf16-true", "32-true",
                                "64-true")]),
        ("train.export=", ["train.export=true", "train.export=false"]),
        ("logger.progress=", [f"logger.progress={word}" for word in ("auto", "bar", "lines", "off")]),
        ("data.root=", []),
        ("data.root=n", ["data.root=null"]),
        ("model.network.params.kind=", ["model.network.params.kind=wide", "model.network.params.kind=deep"]),
        ("model.network.params.first.params.bias=t", ["model.network.params.first.params.bias=true"]),
        ("data.batch_size=", []),
        ("nothing=", []),
        # removal of what is there, appending to lists
        ("~train.", ["~train.num_epochs", "~train.early_stop", "~train.early_stop."]),
        ("~s", ["~seed", "~stages"]),
        ("+", ["+stages=", "+model.", "+engine.", "+train.", "+logger.", "+serve."]),
        ("+train.", ["+train.callbacks=", "+train.export="]),
        ("+model.network.params.", ["+model.network.params.parts="]),
    ],
)  # fmt: skip
def test_the_words_behind_a_config(last, expected):
    """Keys of the schema, of the config and of its classes, and values that can be told."""
    assert words(last) == expected
    assert not Path("imported").exists()


def test_an_override_counts_for_those_behind_it():
    """A class that an override names is the one whose params are offered."""
    assert words("model.network.params.b", "model.network.type=completed.Layer") == ["model.network.params.bias="]


def test_files_and_folders_are_offered_for_a_config(place):
    """YAML files by name, and a word for the shell to add folders."""
    (place / "more").mkdir()
    for name in ("a.yaml", "b.yml", "no.txt", ".hidden.yaml"):
        (place / "more" / name).touch()
    assert offered("bash", "deeplightning\ntrain\nmore/", 2) == ["plain,more/a.yaml", "plain,more/b.yml", "dir,more/"]
    assert offered("bash", "deeplightning\ncheck\nmore/b", 2) == ["plain,more/b.yml", "dir,more/b"]
    assert offered("bash", "deeplightning\ntrain\nc", 2) == ["plain,c.yaml", "dir,c"]
    assert offered("bash", "deeplightning\ntrain\nmissing/", 2) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["data.root="]),
        ("\0\1", ["data.root="]),
        ("[1]", ["data.root="]),
        ("_base_: c2.yaml", ["data.root="]),
        ("data: 5", ["data.root="]),
        ("data: ${oc.env:NOT_SET_ANYWHERE}", ["data.root="]),
        ("data: {module: {type: 5, params: 7}}", ["data.root="]),
        (None, ["data.root="]),
    ],
)
def test_a_broken_config_leaves_the_keys_of_the_schema(place, capfd, text, expected):
    """Nothing is said about it: TAB is no check."""
    file = place / "c2.yaml"
    file.unlink(missing_ok=True)
    if text is not None:
        file.write_text(text)
    line = "deeplightning\ntrain\nc2.yaml"
    assert offered("bash", f"{line}\ndata.ro", 3) == [f"plain,{word}" for word in expected]
    for last in (
        "data.module.params.x",
        "data.module.type.",
        "data.0.",
        "~",
        "+",
        "..",
        "=",
        "~=",
        "+.=",
        "data.root=${",
    ):
        offered("bash", f"{line}\n{last}", 3)
    assert capfd.readouterr() == ("", "")


def test_keys_alone_are_offered_where_no_value_follows():
    """For `explain`: sections and values, of the schema and of the config."""

    def found(*last):
        return offered("bash", "\n".join(["deeplightning", "explain", "c.yaml", *last]), 2 + len(last))

    assert found("se") == ["plain,seed", "plain,serve", "plain,serve."]
    assert found("data.b") == ["plain,data.batch_size"]
    assert found("model.network.params.first.params.") == [
        "plain,model.network.params.first.params.bias",
        "plain,model.network.params.first.params.size",
    ]
    assert found("seed", "train.num") == ["plain,train.num_epochs"]
    assert found("model.network.type=completed.Layer", "model.network.params.b") == ["plain,model.network.params.bias"]
    assert found("train.export=t") == ["plain,train.export=true"]
    assert found("~se") == ["plain,~seed"]
    assert found("nothing.") == []


@pytest.mark.skipif(not mlflow_is_known(), reason="no store is made or read directly with another version of MLflow")
def test_runs_are_offered_by_name(place, monkeypatch):
    """`last`, and each run's name, the newest first; its id where others have the same name. Without a store, and with
    one that is damaged, `last` and folders; a store is never made."""

    def found(verb, last=""):
        return offered("bash", f"deeplightning\n{verb}\n{last}", 2)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(place / "a store"))
    assert found("test") == ["plain,last", "dir,"]
    assert not (place / "a store").exists()
    store = locate(place / "a store")
    tracker = open_directly(store)
    names = ["SimpleCNN-a3f1", "twice", "twice", "a name; rm"]
    ids = [tracker.create_run(tracker.experiment("e"), name, {}).id for name in names]
    tracker.close()
    words = found("serve")
    assert words[0] == "plain,last"
    assert sorted(words[1:-1]) == sorted(["plain,SimpleCNN-a3f1", *(f"plain,{run}" for run in ids[1:])])
    for verb in ("predict", "export", "reproduce", "push", "diff", "bisect"):
        assert found(verb, "Simple") == ["plain,SimpleCNN-a3f1", "dir,Simple"]
    assert offered("bash", "deeplightning\ndiff\nlast\nSimple", 3)[0] == "plain,SimpleCNN-a3f1"
    assert offered("zsh", "deeplightning test Simple", 2)[2].startswith("running, 20")
    store.database.write_text("damaged")
    assert found("test") == ["plain,last", "dir,"]


# ---- shells


def test_bash_gets_what_follows_the_break_in_a_word():
    """Bash takes `a.b=c` for three words, and puts the answer in the place of the last."""
    line = "deeplightning\ntrain\nc.yaml\n"
    assert offered("bash", f"{line}engine.backend\n=\nf", 5) == ["plain,fsdp"]
    assert offered("bash", f"{line}train.export\n=", 4) == ["plain,true", "plain,false"]
    assert offered("bash", f"{line}train.export\n=\n", 5) == ["plain,true", "plain,false"]
    assert offered("bash", f"{line}seed\n=\n1\nengine.backend\n=\nf", 8) == ["plain,fsdp"]
    assert offered("bash", f"{line}engine.backend=f", 3) == ["plain,engine.backend=fsdp"]
    assert offered("bash", f"{line}data.b", 3) == ["plain,data.batch_size="]
    assert offered("bash", f"{line}seed\n=\n1\n", 6)[:1] == ["plain,version="]


def test_zsh_and_fish_get_the_sentence_of_a_key():
    """One line each, in the form of the shell."""
    assert offered("zsh", "deeplightning train c.yaml data.b", 3) == [
        "plain", "data.batch_size=", "samples per step and process; null: the data module's own"
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMP_CWORD", "data.b")
        patch.setenv("COMP_WORDS", "deeplightning train c.yaml data.b")
        fish = get_completion_class("fish")
        assert fish is not None
        answer = fish(cli, {}, "deeplightning", VARIABLE).complete()
    assert answer == "plain,data.batch_size=\tsamples per step and process; null: the data module's own"


@pytest.mark.run
def test_a_real_bash_completes_a_line(place):
    """Typed into an interactive bash: verbs, files, keys without a space behind them, values with one."""
    typed = place / "typed"
    lines = {
        "deeplightning tra\t": "deeplightning train ",
        "deeplightning train c.y\t": "deeplightning train c.yaml ",
        "deeplightning train c.yaml engine.back\t": "deeplightning train c.yaml engine.backend=",
        "deeplightning train c.yaml engine.backend=f\t": "deeplightning train c.yaml engine.backend=fsdp ",
        "deeplightning train c.yaml engi\tback\tf\tser\tpo\t80 ": (
            "deeplightning train c.yaml engine.backend=fsdp serve.port=80 "
        ),
        "deeplightning train c.yaml +tra\tca\t": "deeplightning train c.yaml +train.callbacks=",
        "deeplightning train c.yaml ~se\t": "deeplightning train c.yaml ~seed ",
        "deeplightning train c.yaml data.root=c.y\t": "deeplightning train c.yaml data.root=c.yaml ",
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "TERM": "dumb", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8", "HISTFILE": ""}
    master, slave = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=place, start_new_session=True,
    )  # fmt: skip
    os.close(slave)

    def type_(text: str) -> str:
        """Types a text, then a key that writes the line to a file and clears it."""
        typed.unlink(missing_ok=True)
        os.write(master, f"{text}\x07".encode())
        end = time.monotonic() + 60
        while not typed.exists():
            assert time.monotonic() < end, os.read(master, 10_000).decode()
            time.sleep(0.02)
        return typed.read_text()

    try:
        write = f"""printf %s "$READLINE_LINE" >{typed}.new; mv {typed}.new {typed}; READLINE_LINE="""
        os.write(master, f"""eval "$({VARIABLE}=bash_source deeplightning)"\n""".encode())
        os.write(master, f"""w() {{ {write}; }}; bind -x '"\\C-g": w'\n""".encode())
        type_("")
        assert {line: type_(line) for line in lines} == lines
    finally:
        bash.kill()
        bash.wait()
        os.close(master)


def test_completion_imports_nothing_heavy():
    """It answers while one waits, so it loads neither torch nor any of the other big libraries."""
    variables = {VARIABLE: "bash_complete", "COMP_WORDS": "deeplightning train c.yaml model.network.params.",
                 "COMP_CWORD": "3", "PYTHONPATH": str(ROOT)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "deeplightning"],
        env={**os.environ, **variables}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "model.network.params.width=" in done.stdout
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert loaded & {"torch", "pytorch_lightning", "mlflow", "numpy", "torchvision"} == set()


def test_files_and_overrides_follow_a_config(place):
    """A further config file is offered from its first letter on; overrides also behind `--config`."""
    assert words("c.") == ["c.yaml"]
    assert offered("bash", "deeplightning\ntrain\n--config\nc.yaml\ndata.ro", 4) == ["plain,data.root="]
    assert offered("bash", "deeplightning\ntrain\n--config\nc", 3) == ["plain,c.yaml", "dir,c"]
