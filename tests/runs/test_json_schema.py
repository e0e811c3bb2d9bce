"""Editors complete and check a config with `configs/schema.json`, which `tools/json_schema.py` generates."""

import copy
import json
import re
import typing
from dataclasses import MISSING, is_dataclass
from pathlib import Path

import checks
import pytest
from click.testing import CliRunner
from json_schema import json_schema
from jsonschema import Draft7Validator, Draft202012Validator

from deeplightning.cli import cli
from deeplightning.config import schema
from deeplightning.config.allowed import sections
from deeplightning.config.schema import options_of
from deeplightning.config.target import is_installed
from deeplightning.config.tree import dump, line, parse, plain
from deeplightning.faults import UserError, not_installed

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*/*.yaml")])
SCHEMA = json_schema()
EDITOR = Draft202012Validator(SCHEMA)

MORE = """\
  scheduler: {type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.9}}
train:
  {num_epochs: 1, max_steps: 100, gradient_clip: {value: 1}, early_stop: {metric: val_loss}, limit_batches: {train: 1}}
"""
GOOD = f"seed: 7\n{checks.GOOD.partition('train:')[0]}{MORE}"


def read(text: str) -> typing.Any:
    return plain(parse(text, "config", []))


def changed(config: typing.Any, key: str, value: typing.Any) -> typing.Any:
    """Return the config with another value at a dotted key; `...` removes the key."""
    section = config = copy.deepcopy(config)
    *path, last = key.split(".")
    for name in path:
        if not isinstance(section.setdefault(name, {}), dict):
            section[name] = {}
        section = section[name]
    section.pop(last, None)
    if value is not ...:
        section[last] = value
    return config


def by_editor(config: typing.Any, judge: typing.Any = EDITOR) -> set[str]:
    """Return the dotted keys that an editor marks; an unknown key is itself marked, not its section."""
    found = set()
    for error in judge.iter_errors(config):
        at = ".".join(map(str, error.absolute_path))
        names = [""]
        if error.validator == "additionalProperties" and error.validator_value is False:
            names = [n for n in error.instance if n not in error.schema["properties"] and not n.startswith("~")]
        found |= {f"{at}.{name}".strip(".") for name in names}
    return found


def by_loader(config: typing.Any) -> set[str]:
    """Return the dotted keys in which the loader finds faults, without missing keys, which a base file may contain."""
    Path("c.yaml").write_text(dump(config))
    try:
        checks.load("c.yaml")
    except UserError as error:
        return {str(fault.key) for fault in error.faults if not fault.message.startswith("missing: ")}
    return set()


OF_LOADER = {
    "stages", "model.trainable", "engine.gpus", "train.val_every_n_epoch",
    "train.checkpoint.every_n_epochs", *(f"train.limit_batches.{stage}" for stage in ("train", "val", "test")),
}  # fmt: skip
"""Keys with gaps in their ranges, or with lists that must not be empty, which the editor does not check."""


def about(keys: set[str], key: str) -> set[str]:
    """Return the keys that are equal to this one, below it or above it."""
    return {k for k in keys if f"{k}.".startswith(f"{key}.") or f"{key}.".startswith(f"{k}.")}


def all_keys() -> typing.Iterator[tuple[str, typing.Any, typing.Any]]:
    """Yield every key of the schema with its field and type."""
    for path, cls in sections(schema.Config):
        hints = typing.get_type_hints(cls)
        for field in schema.keys(cls):
            yield f"{path}.{field.name}".lstrip("."), field, hints[field.name]


def values(field: typing.Any, hint: typing.Any) -> list[typing.Any]:
    """Return values of every type, and the key's literals, default, bounds and values beyond them."""
    found: list[typing.Any] = [None, True, 3, -1, 0, 0.5, 1.5, "val_loss", [], ["val_loss"], [1], {}, {"zzz": 1}]
    for option in options_of(hint):
        found += typing.get_args(option) if typing.get_origin(option) is typing.Literal else []
    default = schema.default_of(field)
    found += [] if default is MISSING or is_dataclass(default) else [default]
    low, high = field.metadata["low"], field.metadata["high"]
    found += [low, low - 1] if low is not None else []
    found += [high, high + 1] if high is not None else []
    return found


@pytest.mark.slow
def test_editor_and_loader_agree_on_every_key(here):
    """At each key, editor and loader find faults in the same values: of each type, unknown words, numbers out of range
    and unknown keys. Only the loader checks classes and their params."""
    good = read(GOOD)
    for key in ("model.network", "model.scheduler", "model.loss", "train.early_stop"):
        good = changed(good, key, ...)  # looking up their classes thousands of times would take half a minute
    assert by_editor(good) == by_loader(good) == set()
    differences = []
    for key, field, hint in all_keys():
        if field.name in ("type", "params") or key in ("data.loader", "engine.env"):
            continue  # their contents are checked by the class that takes them; a variable would be set here
        if key in ("engine.setup_hook", "tune.space"):
            continue  # a function that must exist; values that the rest of the config determines
        for value in values(field, hint):
            config = changed(good, key, value)
            editor, loader = about(by_editor(config), key), about(by_loader(config), key)
            # The editor marks an empty section, or one of several types, at its own key.
            if (
                bool(editor) > bool(loader)
                or (bool(editor) < bool(loader) and key not in OF_LOADER)
                or not all(about(loader, marked) for marked in editor)
            ):
                differences.append(f"{key}={value!r}: editor {editor}, loader {loader}")
    assert differences == []


@pytest.mark.parametrize(
    ("key", "value", "marked"),
    [
        ("model.loss", {"a": {"type": "torch.nn.MSELoss"}, "b": {"type": "torch.nn.L1Loss"}}, set()),
        ("model.network", {"encoder": {"type": "torch.nn.ReLU", "parms": {}}}, {"model.network.encoder.parms"}),
        ("model.loss", {"a": {"type": "torch.nn.MSELoss", "weight": "x"}}, {"model.loss.a.weight"}),
        ("train.callbacks", [{"type": "pytorch_lightning.callbacks.Timer"}], set()),
        ("logger.log_every_n_steps", {"per_epoch": 0}, {"logger.log_every_n_steps.per_epoch"}),
        ("engine.env", {"A": 1}, {"engine.env.A"}),
        ("engine.gpus", [0, 2], set()),
        ("train.val_every_n_epoch", 2.0, set()),
        ("train.gradient_clip.norm_type", float("inf"), set()),
    ],
)
def test_editor_and_loader_agree_on_targets_and_mappings(here, key, value, marked):
    """Editor and loader agree on named targets, lists of targets, and sections that may be numbers."""
    config = changed(read(GOOD), key, value)
    loader = by_loader(config)
    assert by_editor(config) | loader == marked | loader
    assert bool(marked) == bool(loader)


def test_a_reference_may_stand_at_every_key(here):
    """An editor accepts `${…}` at every key, since the loader resolves references before it checks values."""
    config = read(GOOD)
    keys = [key for key, _, _ in all_keys()]
    search = {"metric": "val_loss", "space": {"seed": {"int": [0, 9]}}}
    with_search = changed(config, "tune", search) if "tune" in keys else config
    for key in keys:
        for text in ("${a.b}", "???"):
            assert by_editor(changed(with_search, key, text)) == set(), (key, text)
    references = {
        "data.batch_size": "${seed}",
        "serve": "${oc.decode:'{port: 80}'}",
        "stages": ["${data.dataset}"],
        "data.dataset": "train",
        "engine.backend": "${oc.env:DEEPLIGHTNING_TEST_BACKEND,null}",
        "train.val_every_n_epoch": "${train.num_epochs}",
    }
    for key, value in references.items():
        config = changed(config, key, value)
    assert by_editor(config) == by_loader(config) == set()


def test_a_file_with_a_base_has_no_required_keys(here):
    """In a file with a base every key is optional and `~key` removes one; values are checked as usual."""
    Path("base.yaml").write_text(GOOD)
    parts: list[tuple[str, set[str]]] = [
        ("seed: 1", set()),
        ("model: {optimizer: {params: {lr: 1}}}", set()),
        ("model: {optimizer: null}", set()),
        ("~seed:", set()),
        ("train: {~max_steps: null, ~early_stop: null, num_epochs: 2}", set()),
        ("model: {~scheduler: null, network: {~params: null, type: torch.nn.ReLU}}", set()),
        ("train: {early_stop: {patience: 0}}", {"train.early_stop.patience"}),
        ("model: {optimiser: {}}", {"model.optimiser"}),
    ]
    for text, expected in parts:
        for bases in ("base.yaml", "[base.yaml]"):
            config = read(f"_base_: {bases}\n{text}")
            assert (by_editor(config), by_loader(config)) == (expected, expected), text
    assert by_editor(read(f"_base_:\n{GOOD}")) == set()
    assert by_editor({"_base_": 1}) == {"_base_"}


# ---- the committed file


@pytest.mark.skipif(not is_installed("deeplightning_tune"), reason=not_installed("tune"))
def test_the_committed_schema_is_that_of_the_code():
    """`python tools/json_schema.py >configs/schema.json` changes nothing; `deeplightning schema` prints the file."""
    committed = (ROOT / "configs" / "schema.json").read_text()
    assert json.dumps(SCHEMA, indent=2, ensure_ascii=False) + "\n" == committed
    printed = CliRunner().invoke(cli, ["schema"])
    assert (printed.exit_code, printed.stdout) == (0, committed)


def test_the_schema_is_valid_in_the_drafts_that_editors_read():
    """The schema is valid in draft 2020-12, and in draft 7, which older language servers assume for every schema."""
    Draft202012Validator.check_schema(SCHEMA)  # raises SchemaError
    Draft7Validator.check_schema(SCHEMA)


def test_every_key_is_documented():
    """Every key has a title, and a description with its type and default; examples and defaults are valid values."""
    for path, cls in sections(schema.Config):
        section = SCHEMA if not path else SCHEMA["$defs"][cls.__name__]
        for field in schema.keys(cls):
            key, shown = f"{path}.{field.name}".lstrip("."), section["properties"][field.name]
            assert (shown["title"], shown["description"].startswith(field.metadata["doc"])) == (key, True)
            value = schema.default_of(field)
            facts = dict(part.split(": ", 1) for part in shown["description"].split("\n\n")[1:])
            assert ("examples" in shown) == bool(field.metadata["example"])
            if value is not MISSING and not is_dataclass(value):
                assert shown["default"] == value
                assert (facts["Default"], "Type" in facts) == (line(value), True)
            elif value is MISSING:
                assert facts["Default"] == "none, it must be given"
            for value in [*shown.get("examples", []), *([shown["default"]] if "default" in shown else [])]:
                found = Draft202012Validator({**shown, "$defs": SCHEMA["$defs"]}).iter_errors(value)
                assert [error.message for error in found] == [], key


@pytest.mark.parametrize(
    "path", [*CONFIGS, *sorted(ROOT.glob("configs/*/*.yaml"))], ids=lambda path: str(path.relative_to(ROOT))
)
@pytest.mark.parametrize("draft", [Draft202012Validator, Draft7Validator])
def test_a_shipped_config_is_right_in_the_editor(path, draft):
    """The modeline of a config names the schema by a relative path, that of a group's file the section in it; the file
    is valid there."""
    (modeline,) = re.findall(r"^# yaml-language-server: \$schema=(\S+)$", path.read_text(), re.MULTILINE)
    file, _, section = modeline.partition("#")
    assert section == ("" if path in CONFIGS else f"/$defs/{path.parent.name.capitalize()}")
    assert (path.parent / file).resolve() == ROOT / "configs" / "schema.json"
    document = json.loads((path.parent / file).read_text())
    judge = draft({"$ref": f"#{section}", "$defs": document["$defs"]} if section else document)
    assert by_editor(read(path.read_text()), judge) == set()


@pytest.mark.parametrize("draft", [Draft202012Validator, Draft7Validator])
def test_planted_faults_are_marked_where_they_are(draft):
    """Unknown keys, wrong types, unknown words and numbers out of range are marked at their keys."""
    base = read((ROOT / "configs" / "base.yaml").read_text())
    planted = {
        "train.num_epoch": 3,
        "data.num_workers": "four",
        "engine.precision": 33,
        "serve.port": 70000,
        "stages": ["train", "tset"],
        "model.scheduler.call.interval": "batch",
        "logger.pictures": True,
        "engine.num_nodes": 0,
    }
    together = base
    for key, value in planted.items():
        marked = f"{key}.1" if key == "stages" else key
        assert by_editor(changed(base, key, value), draft(SCHEMA)) == {marked}
        together = changed(together, key, value)
    assert len(by_editor(together, draft(SCHEMA))) == len(planted)
