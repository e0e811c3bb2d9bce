"""`deeplightning configs`: the list of what ships, and copies that work where they are put."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from deeplightning.checks.examine import examine
from deeplightning.cli import cli
from deeplightning.cli.shipped import names
from deeplightning.config.packages import HOME, shipped
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.faults import ConfigError, SetupError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    place = tmp_path / "an empty folder"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def run(*words):
    """What the command prints."""
    done = CliRunner().invoke(cli, ["configs", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_each_config_has_a_line():
    """Its name and a sentence, in the order in which one reads them."""
    lines = run().splitlines()
    assert [line.split()[0] for line in lines] == names()
    assert lines[0].split(maxsplit=1) == [
        "base",
        "scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, split 80/10/10.",
    ]
    assert [line for line in lines if len(line.split()) < 4] == []


def test_a_copy_means_what_the_original_means(here):
    """Every config, wherever it is put: the same values, no word of a clone, and its own modules beside it."""
    for name, address in zip(names(), shipped(), strict=True):
        folder = here / "copies" / name
        folder.mkdir(parents=True)
        written = [Path(path) for path in run(name, "--to", str(folder)).splitlines()]
        assert written[0] == folder / f"{Path(name).name}.yaml"
        assert plain(read(written[0]).root) == plain(read(address).root)
        text = written[0].read_text()
        assert "train.sh" not in text
        assert "../" not in text
        assert text.count(f"\n# yaml-language-server: $schema={(HOME / 'configs' / 'schema.json').as_uri()}\n") == 1
        assert text.startswith(("# deeplightning train ", "# deeplightning tune ")) or "search" in name, text
    assert examine("copies/examples/own_code/even_or_odd/even_or_odd.yaml", []).faults == []


def test_what_is_printed_is_what_is_copied(here):
    """`configs NAME >mine.yaml` is a config too; the ways to write a name are alike."""
    printed = run("digits_ddp")
    assert "\n_base_: pkg://deeplightning/configs/base.yaml\n" in printed
    run("digits_ddp", "--to", "digits_ddp.yaml")
    assert (here / "digits_ddp.yaml").read_text() == printed
    for name in ("digits_ddp.yaml", "configs/digits_ddp.yaml", "pkg://deeplightning/configs/digits_ddp.yaml"):
        assert run(name) == printed


def test_nothing_is_overwritten(here):
    """Neither the file nor a module beside it; then nothing is written at all."""
    (here / "own_task.py").write_text("mine")
    with pytest.raises(SetupError, match=r"own_task.py: already there and not overwritten"):
        run("examples/own_code/even_or_odd", "--to", "c.yaml")
    assert [path.name for path in here.iterdir()] == ["own_task.py"]
    with pytest.raises(SetupError, match=r"no/c.yaml cannot be written: No such file or directory"):
        run("base", "--to", "no/c.yaml")
    (here / "c.yaml").symlink_to("nowhere")
    with pytest.raises(SetupError, match=r"c.yaml: already there"):
        run("base", "--to", "c.yaml")


def test_a_name_that_does_not_ship_is_a_note():
    """With the nearest one, else with all; nothing outside the shipped folders is reached."""
    with pytest.raises(ConfigError, match=r"mnits: no config of this name .* Did you mean mnist\?"):
        run("mnits")
    for name in ("no such thing at all", "../pyproject", "/etc/hostname"):
        with pytest.raises(ConfigError, match=r"with Deep Lightning.*`deeplightning configs` lists all"):
            run(name)
    assert CliRunner().invoke(cli, ["configs", "--to", "x"]).exit_code == 2


@pytest.mark.parametrize("data", ["digits", "mnist", "cifar10", "image_folder"])
def test_the_shipped_options_of_groups_fit_each_other(here, data):
    """Each network goes with each set of data, on the command line and in `_base_`, outside a clone."""
    (here / "mine.yaml").write_text(
        f"_base_: ['pkg://deeplightning/configs/images.yaml', {{model: vit}}, {{data: {data}}}]\n"
    )
    assert sorted(path.stem for path in (HOME / "configs" / "model").glob("*.yaml")) == ["cnn", "resnet18", "vit"]
    for model, network in (("cnn", "SimpleCNN"), ("resnet18", "ResNet18"), ("vit", "ViT")):
        for words in (
            ["mine.yaml", [f"model={model}"]],
            ["pkg://deeplightning/configs/images.yaml", [f"model={model}", f"data={data}"]],
        ):
            found = examine(words[0], [*words[1], "data.root=."])
            assert found.faults == []
            assert found.config.model.network.type.endswith(f".{network}")
