"""A config is composed of several files and option groups, named on the command line or in `_base_`."""

from pathlib import Path

import jsonschema
import pytest
import yaml
from json_schema import json_schema

from deeplightning.config.source import read
from deeplightning.config.tree import plain

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working directory with a space in its name, and configs that build on a shipped one."""
    folder = tmp_path / "my experiments"
    (folder / "lr=0.1").mkdir(parents=True)
    monkeypatch.chdir(folder)
    first = f"_base_: '{ROOT}/configs/base.yaml'\nseed: 1\ndata: {{batch_size: 8, dataset: digits}}\n"
    Path("a.yaml").write_text(first)
    Path("b.yaml").write_text("seed: 2\ndata: {~dataset: null, batch_size: 16}\n")
    Path("lr=0.1/c.yaml").write_text("seed: 3\n")
    return folder


def test_a_later_file_overrides_an_earlier_one():
    """Each file overrides those before it and may remove their keys; key=value overrides apply last, wherever they
    are written."""
    source = read("a.yaml", ["b.yaml", "data.batch_size=4", "lr=0.1/c.yaml"])
    found = plain(source.root)
    assert (found["seed"], found["data"]["batch_size"], "dataset" in found["data"]) == (3, 4, False)
    assert found["train"]["num_epochs"] == 15
    assert [folder.name for folder in source.folders] == ["my experiments", "lr=0.1", "configs"]


def test_every_verb_takes_several_files(answer):
    """Files are arguments or `--config` options in any order; a KEY of `explain` is not a file."""
    code, out, _ = answer("explain", "a.yaml", "b.yaml", "seed")
    assert code == 0
    assert out.splitlines()[4:] == ["  set by      b.yaml:1:1"]
    by_option = answer("explain", "data.batch_size=4", "--config", "a.yaml", "seed", "--config=b.yaml")
    assert by_option == (code, out, "")
    assert answer("check", "--config", "a.yaml", "b.yaml")[0] == 0


# ---- option groups


@pytest.fixture
def groups(place):
    """Configs with the groups `model`, `model/optimizer` and `data`, in folders beside them."""
    shipped = (ROOT / "configs/base.yaml").read_text().split("seed: 42")[1]
    files = {
        "base.yaml": f"_base_: {{model: small}}\nseed: 1\n{shipped}",
        "model/small.yaml": "_base_: {optimizer: adam}\nnetwork: {params: {num_channels: 1}}\n",
        "model/wide.yaml": "_base_: small.yaml\nnetwork: {params: {num_channels: 3}}\n"
        "loss: {params: {label_smoothing: 0.1}}\n",
        "model/optimizer/adam.yaml": "type: torch.optim.Adam\nparams: {lr: 0.1}\n",
        "model/optimizer/sgd.yaml": "type: torch.optim.SGD\n",
        "data/few.yaml": "batch_size: 4\n",
        "data/hydra.yaml": "# @package _global_\nseed: 3\n",
        "sub/top.yaml": "_base_: [../base.yaml, {data: few}]\n",
        "sub/data/few.yaml": "batch_size: 5\n",
        "twice.yaml": "_base_: [base.yaml, {model: wide}]\n",
        "both.yaml": "_base_: [base.yaml, {model: wide, model/optimizer: sgd}]\n",
        "listed.yaml": "_base_: [base.yaml, {model: wide}, {model/optimizer: sgd}]\n",
    }
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def values(path: str, *overrides: str) -> tuple:
    """Return batch size, channels, smoothing, optimizer and learning rate of a config."""
    source = read(path, [*overrides])
    assert source.faults == []
    root = plain(source.root)
    network, optimizer, loss = (root["model"][name] for name in ("network", "optimizer", "loss"))
    smoothing = (loss.get("params") or {}).get("label_smoothing")
    size, channels = root["data"]["batch_size"], network["params"]["num_channels"]
    return size, channels, smoothing, optimizer["type"].rpartition(".")[2], optimizer["params"]["lr"]


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["base.yaml"], (32, 1, None, "Adam", 0.003)),  # the file overrides its options
        (["base.yaml", "model=wide"], (32, 1, 0.1, "Adam", 0.003)),
        (["twice.yaml"], (32, 3, 0.1, "Adam", 0.1)),  # the outer file's choice
        (["twice.yaml", "model/optimizer=sgd"], (32, 3, 0.1, "SGD", 0.003)),
        (["both.yaml"], (32, 3, 0.1, "SGD", 0.003)),  # its own choice, not that of its option
        (["listed.yaml"], (32, 3, 0.1, "SGD", 0.003)),
        (["sub/top.yaml"], (5, 1, None, "Adam", 0.003)),  # beside the config, not beside its base
        (["sub/top.yaml", "data=null"], (32, 1, None, "Adam", 0.003)),
        (["base.yaml", "sub/top.yaml", "data.batch_size=7"], (7, 1, None, "Adam", 0.003)),
        (["twice.yaml", "model=[wide, small]"], (32, 1, 0.1, "Adam", 0.1)),
    ],
)
def test_an_option_is_placed_under_the_key_of_its_group(words, expected):
    """An option sets the group's key and overrides the files before it in `_base_`; the command line may choose
    another option."""
    assert values(*words) == expected


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("check", "Missing argument 'CONFIG'"),
        ("check base.yaml d.yaml", "d.yaml: there is no such config file"),
        ("check base.yaml lr=0.1", "override lr=0.1: lr: unknown key"),
        ("check base.yaml seed", "override seed: an override is key=value, ~key (remove), or +list=[x] (append)"),
        ("check --config base.yaml --config plain", "a config file must end in .yaml or .yml"),
        ("serve . b.yaml", "a config file cannot override that of a run; give its keys as key=value"),
        # option groups
        ("check base.yaml model=smal", "override model=smal: model: the group has no option `smal`. Did you mean "
         "small? There are: cnn, resnet18, round, small, vit, wide"),
        ("check base.yaml data=few", "override data=few: data: must be a mapping of module, batch_size,"),
        ("check base.yaml model/optimiser=sgd", "override model/optimiser=sgd: model/optimiser: unknown key."),
        ("check base.yaml bad.yaml", "bad.yaml:1:10: _base_: `override model` is not an option group"),
        ("check base.yaml none.yaml", "the group has no option `x`. There are: none"),
        ("check base.yaml kind.yaml", "kind.yaml:1:10: _base_: a `_base_` is the path of a file, not a mapping; an"),
        ("check base.yaml hydra.yaml",
         "data/hydra.yaml: `@package` is Hydra's and has no effect: this file is placed under `data`"),
        ("check base.yaml circle.yaml", "`_base_` is circular"),
    ],
)  # fmt: skip
def test_a_wrong_file_override_or_option_is_named(answer, words, note):
    """The command exits with code 2 and says what is allowed; for an unknown option, which is the nearest and which
    exist."""
    Path("plain").write_text("seed: 4\n")
    Path("bad.yaml").write_text("_base_: {override model: small}\n")
    Path("none.yaml").write_text("_base_: {nothing: x}\n")
    Path("kind.yaml").write_text("_base_: {data: true}\n")
    Path("hydra.yaml").write_text("_base_: [base.yaml, {data: hydra}]\n")
    Path("model/round.yaml").write_text("_base_: ../circle.yaml\n")
    Path("circle.yaml").write_text("_base_: {model: round}\n")
    code, out, err = answer(*words.split())
    assert (code, out) == (2, "")
    assert note in err


@pytest.mark.usefixtures("groups")
def test_explain_shows_the_option_that_sets_a_value(answer):
    """`explain` shows the file and line of a value, the chosen option and the available ones."""
    _, out, _ = answer("explain", "base.yaml", "model=wide", "model.loss.params.label_smoothing")
    assert "  set by      model/wide.yaml:3:17\n" in out
    assert "  option      model=wide  # override model=wide; available: cnn, resnet18, small, vit, wide\n" in out


@pytest.mark.parametrize(
    ("base", "is_right"),
    [
        ("{model: resnet18}", True),
        ("[base.yaml, {model: resnet18, model/optimizer: adam}, {data: null}, {model: [a, b]}]", True),
        ("{/model: a}", False),
        ("[3]", False),
    ],
)
def test_an_editor_knows_groups(base, is_right):
    """The JSON Schema accepts files and option groups in `_base_`."""
    schema = jsonschema.Draft202012Validator(json_schema())
    assert schema.is_valid(yaml.safe_load(f"_base_: {base}")) == is_right


@pytest.mark.usefixtures("groups")
def test_a_mapping_replaces_the_section_of_a_group():
    """It does so also if the same command chooses an option."""
    source = read("base.yaml", ["model=wide", "model={module: {type: a.B}}"])
    assert plain(source.root)["model"] == {"module": {"type": "a.B"}}
