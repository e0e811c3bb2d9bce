"""`explain` shows where each value of a config was set: `deeplightning.config.explain`."""

import importlib.util
import io
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from deeplightning.config.examine import examine
from deeplightning.config.explain import explain, line, origin
from deeplightning.config.source import read
from deeplightning.config.tree import dump, leaves, plain
from deeplightning.faults import ConfigError
from deeplightning.process.terminal import show

LAYERS = {
    "ground.yaml": """\
seed: 1
data:
  module: {type: deeplightning.data.digits.Digits, params: {augment: [{type: torch.nn.Dropout}, {type: torch.nn.ReLU}]}}
  batch_size: 8
  root: &here "a folder"
model:
  module:
    type: deeplightning.task.img_classif.ImageClassification
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.1, momentum: 0.9}}
  scheduler: {type: torch.optim.lr_scheduler.StepLR, params: {step_size: 2}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 1, limit_batches: {train: 2, val: 2, test: 2}}
""",
    "middle.yaml": """\
_base_: ground.yaml
seed: 2
data:
  batch_size: 16
  dataset: named
model:
  optimizer:
    params:
      lr: 0.2
      weight_decay: "${model.optimizer.params.lr}"
  ~scheduler: null
  loss:
    params: {label_smoothing: 0.1}
""",
    "other.yaml": """\
train:
  num_epochs: 2
  callbacks:
    - {type: pytorch_lightning.callbacks.Timer, params: {interval: epoch}}
logger:
  params: {experiment_name: "of ${data.dataset}"}
""",
    "top.yaml": """\
_base_: [middle.yaml, other.yaml]
seed: 3
stages:
  - train
  - test
data: {num_workers: 0, "num_splits": 5}
model:
  optimizer: {params: {momentum: 0.8}}
  trainable: ["bias", weight]
train:
  limit_batches: {train: 3}
""",
}  # fmt: skip
OVERRIDES = [
    "data.fold=2",
    "model.optimizer.params.lr=0.3",
    "+train.callbacks=[{type: pytorch_lightning.callbacks.Timer}]",
]


@pytest.fixture
def layered(tmp_path, monkeypatch):
    """The report of a config of four files and three overrides."""
    monkeypatch.chdir(tmp_path)
    for name, text in LAYERS.items():
        Path(name).write_text(text)
    report = examine("top.yaml", OVERRIDES)
    assert report.faults == []
    return report


def edited(place: str, overrides: list[str]) -> list[str]:
    """Replace the value at a position in its file, or in an override; return the overrides."""
    if place.startswith("override "):
        text = place.removeprefix("override ")
        changed = re.sub(r"(=|type: |interval: )[^\[{}\],]+", r"\1edited", text)
        assert changed != text
        return [changed if override == text else override for override in overrides]
    name, row, column = place.rsplit(":", 2)
    lines = Path(name).read_text().splitlines(keepends=True)
    text, start = lines[int(row) - 1], int(column) - 1
    # At the position is a key and its value, or an item of a list.
    found = re.compile(r"""((?:"\w+"|\w+):\s*)?(?:&\w+ )?("[^"]*"|[^,{}\[\]\n]+)""").match(text, start)
    assert found, (place, text)
    lines[int(row) - 1] = text[: found.start(2)] + "edited" + text[found.end(2) :]
    Path(name).write_text("".join(lines))
    return overrides


def test_editing_the_place_that_is_named_changes_the_value(layered):
    """The position that is shown for a leaf is right: editing it changes the value, in each of four files and in
    overrides, through references too."""
    before = {path: entry.value for path, entry in leaves(layered.source.root)}
    places = {path: origin(layered, path).partition(", from ")[0] for path in before}
    assert {place.partition(":")[0] for place in places.values() if "override" not in place} == set(LAYERS)
    assert sum("override" in place for place in places.values()) == 3
    for path, place in places.items():
        for name, text in LAYERS.items():
            Path(name).write_text(text)
        tree = plain(read("top.yaml", edited(place, OVERRIDES)).root)
        for name in path:
            tree = tree[name]
        assert tree != before[path], f"{path} at {place}"
        assert "edited" in str(tree)


def test_the_whole_is_the_config_with_a_place_beside_each_value(layered):
    """The output loads as the same config; each value is annotated with file, line and column, an override, or
    `default`."""
    text = explain(layered)
    rows = text.splitlines()
    assert "seed: 3                                                   # top.yaml:2:1" in rows
    assert "  batch_size: 16                                          # middle.yaml:4:3" in rows
    assert "  fold: 2                                                 # override data.fold=2" in rows
    assert "  scheduler: null                                         # default" in rows
    assert [r for r in rows if "weight_decay: 0.3" in r and "middle.yaml:10:7, from ${model.optimizer.params.lr}" in r]
    assert [row for row in rows if "#" not in row and not row.rstrip().endswith(":")] == []
    Path("again.yaml").write_text(text)
    again = examine("again.yaml")
    assert again.config == layered.config
    assert dump(again.config.public()) == dump(layered.config.public())


ABOUT = {
    "seed": """\
seed: 3
  type        a whole number or null, at least 0, at most 4294967295
  meaning     seeds all random number generators; null: drawn and recorded
  default     42
  set by      top.yaml:2:1
""",
    "model.optimizer.params.lr": """\
model.optimizer.params.lr: 0.3
  type        FLOAT
  default     0.001
  taken by    torch.optim.SGD
  set by      override model.optimizer.params.lr=0.3
""",
    "model.scheduler": """\
model.scheduler: null
  type        a target {type: MODULE.CLASS, params: {…}} or a mapping of names or null
  meaning     the schedule of the learning rate
  default     null
  set by      default
""",
    "train.gradient_clip.value": """\
train.gradient_clip.value: not set
  type        a number, at least 0
  meaning     …
  default     none, it must be given
  set by      nothing; the default applies
""",
    "model.optimizer.params.dampening": """\
model.optimizer.params.dampening: not set
  type        float
  default     0
  taken by    torch.optim.SGD
  set by      nothing; the default applies
""",
    "train.callbacks.0.params.duration": """\
train.callbacks.0.params.duration: not set
  type        …
  default     null
  taken by    pytorch_lightning.callbacks.Timer
  set by      nothing; the default applies
""",
}  # fmt: skip


@pytest.mark.parametrize("key", ABOUT)
def test_one_key_is_explained_in_full(key, layered):
    """For one key, `explain` shows value, type, meaning, default, and where it was set. An unset key, also of a section
    that is null or of a class's params, has its documentation and default."""
    text = explain(layered, key)
    torch = Path(importlib.util.find_spec("torch").origin).parent
    (spelled,) = re.findall(r" lr: (.*?) = ", (torch / "optim/sgd.py").read_text())[:1]  # releases of torch differ
    expected = re.escape(ABOUT[key].replace("FLOAT", spelled)).replace("…", ".*")
    assert re.fullmatch(expected, text), text


def test_a_section_is_explained_key_by_key(layered):
    """A section has one annotated line per value, as in the complete config."""
    assert [re.split(" +# ", row) for row in explain(layered, "model.optimizer.params").splitlines()] == [
        ["lr: 0.3", "override model.optimizer.params.lr=0.3"],
        ["momentum: 0.8", "top.yaml:8:24"],
        ["weight_decay: 0.3", "middle.yaml:10:7, from ${model.optimizer.params.lr}"],
    ]


def test_a_section_that_is_overridden_as_a_whole_sets_what_is_in_it(layered):
    """If an override sets a section, `explain` names it for each value of the section."""
    report = examine("top.yaml", ["model.optimizer={type: torch.optim.Adam, params: {lr: 0.5}}"])
    assert explain(report, "model.optimizer.params.lr").splitlines()[-1].startswith("  set by      override model.opt")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("data.batchsize", "data has no key `batchsize`. Did you mean data.batch_size? Known here: module,"),
        ("optimizer", "there is no key `optimizer`. Did you mean model.optimizer?"),
        ("train.callbacks.7.type", "train.callbacks has no key `7`."),
        ("model.optimizer.params.momentm", "model.optimizer.params has no key `momentm`. Did you mean"),
        ("model.scheduler.params.gamma", "model.scheduler is null; `params.gamma` applies once it is set"),
        ("..", "there is no key ``."),
    ],
)
def test_an_unknown_key_is_an_error_with_a_suggestion(key, words, layered):
    """The error lists the known keys and suggests the nearest."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        explain(layered, key)


def test_a_value_that_the_machine_changed_is_explained(layered):
    """`explain` shows where the value was set, the effective value, and the reason for the change."""
    report = examine("top.yaml", ["engine.backend=horovod"])
    assert explain(report, "engine.backend").splitlines()[-1] == (
        "  set by      override engine.backend=horovod; then ddp → null (there is one process and no GPU)"
    )


def test_what_came_from_the_environment_is_shown_as_it_was_written(layered, monkeypatch):
    """`explain` shows the reference to a variable, not the variable's value."""
    monkeypatch.setenv("SOME_TOKEN", "s3cr3t-token")
    report = examine("top.yaml", ["data.root=${oc.env:SOME_TOKEN}", "data.dataset=${data.root}", "data.dataset=named"])
    for key in ("", "data", "data.root", "data.dataset"):
        assert "s3cr3t" not in explain(report, key)


@pytest.mark.parametrize("text", ["two\nlines", "#no comment", "a: b", "\x1b[31m", "- x", "ünï", "", "{", "'\"", "1e3"])
def test_every_value_is_one_line_of_yaml(text):
    """Any text is printed as one line of YAML without control characters."""
    written = line({"key": text})
    assert {"\n", "\x1b"}.isdisjoint(written)
    assert yaml.safe_load(line(text)) == text
    assert yaml.safe_load(written) == {"key": text}


def test_colours_are_for_terminals():
    """On a terminal the text is coloured."""
    leader, follower = os.openpty()
    child = os.fork()
    if child == 0:
        os.environ["TERM"] = "xterm-256color"
        sys.stdout = os.fdopen(follower, "w")
        show("seed: 3  # top.yaml:2:1\n")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    os.close(follower)
    assert b"\x1b[" in os.read(leader, 1000)
    os.close(leader)


def test_a_secret_in_an_override_is_not_shown(layered):
    """A secret from an override is shown neither in the complete config nor for its key."""
    key, secret = "data.module.params.db_password", "q9w8e7r6t5y4"
    report = examine("top.yaml", [*OVERRIDES, f"{key}={secret}"])
    assert secret not in explain(report) + explain(report, key)
    assert f"override {key}=${{oc.env:DATA_MODULE_PARAMS_DB_PASSWORD}}" in explain(report, key)


def test_a_terminal_gets_whole_lines(monkeypatch):
    """A line that is longer than the terminal has no line end inside, so that it can be copied."""
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    show(f"seed: 7{' ' * 49}  # configs/a/long/folder/base.yaml:12:5; set by nobody\n")
    assert len(re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()) == 1
