"""What a config is composed of: files laid over each other on the command line."""

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
    """A working directory with a space in its name, and configs that build on the shipped one."""
    folder = tmp_path / "my experiments"
    (folder / "lr=0.1").mkdir(parents=True)
    monkeypatch.chdir(folder)
    Path("a.yaml").write_text(
        f"_base_: '{ROOT}/configs/base.yaml'\nseed: 1\ndata: {{batch_size: 8, dataset: digits}}\n"
    )
    Path("b.yaml").write_text("seed: 2\ndata: {~dataset: null, batch_size: 16}\n")
    Path("lr=0.1/c.yaml").write_text("seed: 3\n")
    return folder


def test_a_later_file_lies_over_an_earlier_one():
    """As if each built on the one before; overrides come last, wherever they are written; a removed key is gone."""
    source = read("a.yaml", ["b.yaml", "data.batch_size=4", "lr=0.1/c.yaml"])
    found = plain(source.root)
    assert (found["seed"], found["data"]["batch_size"], "dataset" in found["data"]) == (3, 4, False)
    assert found["train"]["num_epochs"] == 15
    assert [folder.name for folder in source.folders] == ["my experiments", "lr=0.1", "configs"]


def test_every_verb_takes_several_files(answer):
    """Words or `--config`, whatever stands first; a KEY of `explain` is no file."""
    code, out, _ = answer("explain", "a.yaml", "b.yaml", "seed")
    assert code == 0
    assert out.splitlines()[4:] == ["  set by      b.yaml:1:1"]
    by_option = answer("explain", "data.batch_size=4", "--config", "a.yaml", "seed", "--config=b.yaml")
    assert by_option == (code, out, "")
    assert answer("check", "--config", "a.yaml", "b.yaml")[0] == 0


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["check"], "Missing argument 'CONFIG'"),
        (["check", "a.yaml", "d.yaml"], "d.yaml: there is no such config file"),
        (["check", "a.yaml", "lr=0.1"], "override lr=0.1: lr: unknown key"),
        (["check", "a.yaml", "seed"], "override seed: an override is key=value, ~key (remove), or +list=[x] (append)"),
        (["check", "--config", "a.yaml", "--config", "plain"], "a config file must end in .yaml or .yml"),
        (["serve", ".", "b.yaml"], "a config file cannot override that of a run; give its keys as key=value"),
    ],
)
def test_a_word_that_is_no_config_is_named(answer, words, note):
    """Exit code 2, with what is allowed."""
    Path("plain").write_text("seed: 4\n")
    code, out, err = answer(*words)
    assert (code, out) == (2, "")
    assert note in err


# ---- option groups


@pytest.fixture
def groups(place):
    """Configs with the groups `model`, `model/optimizer` and `data`, in folders beside them."""
    files = {
        "base.yaml": "_base_: {model: small}\nseed: 1\n"
        + (ROOT / "configs/base.yaml").read_text().split("seed: 42")[1],
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
    }
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def values(path: str, *overrides: str) -> tuple:
    """Batch size, channels, smoothing, optimizer and rate of a config."""
    source = read(path, [*overrides])
    assert source.faults == []
    root = plain(source.root)
    model = root["model"]
    params = model["optimizer"]["params"]
    return (
        root["data"]["batch_size"],
        model["network"]["params"]["num_channels"],
        (model["loss"].get("params") or {}).get("label_smoothing"),
        model["optimizer"]["type"].rpartition(".")[2],
        params["lr"],
    )


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["base.yaml"], (32, 1, None, "Adam", 0.003)),  # the file lies over its options
        (["base.yaml", "model=wide"], (32, 1, 0.1, "Adam", 0.003)),
        (["twice.yaml"], (32, 3, 0.1, "Adam", 0.1)),  # the outer file chooses, where it stands
        (["twice.yaml", "model/optimizer=sgd"], (32, 3, 0.1, "SGD", 0.003)),
        (["sub/top.yaml"], (5, 1, None, "Adam", 0.003)),  # beside the config before beside its base
        (["sub/top.yaml", "data=null"], (32, 1, None, "Adam", 0.003)),
        (["base.yaml", "sub/top.yaml", "data.batch_size=7"], (7, 1, None, "Adam", 0.003)),
        (["twice.yaml", "model=[wide, small]"], (32, 1, 0.1, "Adam", 0.1)),
    ],
)
def test_an_option_lies_under_the_key_of_its_group(words, expected):
    """Its content is placed under the key, over the files before it in `_base_`; the command line chooses another."""
    assert values(*words) == expected


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["model=smal"], "override model=smal: model: the group has no option `smal`. Did you mean small? There are: "
         "cnn, resnet18, round, small, vit, wide"),
        (["data=few"], "override data=few: data: must be a mapping of module, batch_size,"),
        (["model/optimiser=sgd"], "override model/optimiser=sgd: model/optimiser: unknown key."),
        (["bad.yaml"], "bad.yaml:1:10: _base_: `override model` is not an option group"),
        (["none.yaml"], "the group has no option `x`. There are: none"),
        (["kind.yaml"], "kind.yaml:1:10: _base_: a `_base_` is the path of a file, not a mapping; an"),
        (["hydra.yaml"], "data/hydra.yaml: `@package` is Hydra's and has no effect: this file is placed under `data`"),
        (["circle.yaml"], "`_base_` is circular"),
    ],
)  # fmt: skip
def test_an_option_that_is_not_there_is_named(answer, words, note):
    """Exit code 2, with the place that chose, the nearest and the list."""
    Path("bad.yaml").write_text("_base_: {override model: small}\n")
    Path("none.yaml").write_text("_base_: {nothing: x}\n")
    Path("kind.yaml").write_text("_base_: {data: true}\n")
    Path("hydra.yaml").write_text("_base_: [base.yaml, {data: hydra}]\n")
    Path("model/round.yaml").write_text("_base_: ../circle.yaml\n")
    Path("circle.yaml").write_text("_base_: {model: round}\n")
    code, out, err = answer("check", "base.yaml", *words)
    assert (code, out) == (2, "")
    assert note in err


@pytest.mark.usefixtures("groups")
def test_options_are_explained_and_offered(answer, monkeypatch):
    """`explain` has the file and line of a value and the group around it."""
    code, out, _ = answer("explain", "base.yaml", "model=wide", "model.loss.params.label_smoothing")
    assert code == 0
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
    """The JSON Schema takes files and groups of options."""
    schema = jsonschema.Draft202012Validator(json_schema())
    assert schema.is_valid(yaml.safe_load(f"_base_: {base}")) == is_right
