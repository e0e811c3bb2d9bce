"""`pkg://PACKAGE/PATH` may replace the path of a config: `deeplightning.config.packages`."""

import sys

import pytest

from deeplightning.config.examine import load_config
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.faults import ConfigError

TRAPPED = "raise RuntimeError('this package is imported')\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The working directory, with a space in its path, and an installed package `trapped` that must not be imported."""
    installed = tmp_path / "site"
    (installed / "trapped" / "conf" / "deep").mkdir(parents=True)
    (installed / "trapped" / "__init__.py").write_text(TRAPPED)
    (installed / "trapped" / "conf" / "a.yaml").write_text("_base_: deep/b.yaml\na: installed\n")
    (installed / "trapped" / "conf" / "deep" / "b.yaml").write_text("b: 2\n")
    (installed / "one_file.py").write_text(TRAPPED)
    monkeypatch.syspath_prepend(installed)
    folder = tmp_path / "an empty folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def error_of(path):
    with pytest.raises(ConfigError) as caught:
        read(path)
    (fault,) = caught.value.faults
    return str(fault)


def test_shipped_configs_are_reached_from_anywhere(here):
    """A shipped config can be a `_base_` or the config itself, may have one slash, as a Path does, and takes overrides;
    its own `_base_` is relative to it."""
    (here / "c.yaml").write_text("_base_: pkg://deeplightning/configs/digits_ddp.yaml\nseed: 7\n")
    cfg = load_config("c.yaml", ["train.num_epochs=2"])
    assert (cfg.seed, cfg.data.batch_size, cfg.train.num_epochs) == (7, 16, 2)
    for path in ("pkg://deeplightning/configs/base.yaml", "pkg:/deeplightning/configs/base.yaml"):
        assert load_config(path).data.batch_size == 32
    search = read("pkg://deeplightning/examples/search/search.yaml")
    assert {"tune", "seed"} <= search.root.value.keys()


def test_no_package_is_imported():
    """Files of a package are read, and none of its code is executed."""
    assert plain(read("pkg://trapped/conf/a.yaml").root) == {"a": "installed", "b": 2}
    assert "trapped" not in sys.modules


def test_an_address_means_what_is_installed(here):
    """A folder of that name in the working directory does not shadow it, not even Deep Lightning's."""
    for package, folder in (("trapped", "conf"), ("deeplightning", "configs")):
        (here / package / folder).mkdir(parents=True)
        for name in ("a.yaml", "base.yaml"):
            (here / package / folder / name).write_text("a: mine\n")
    (here / "c.yaml").write_text("_base_: pkg://trapped/conf/a.yaml\n")
    assert plain(read("c.yaml").root) == {"a": "installed", "b": 2}
    assert "a" not in read("pkg://deeplightning/configs/base.yaml").root.value


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("pkg://trapped/conf/aa.yaml", "the package `trapped` has no such file. Did you mean a.yaml?"),
        ("pkg://trapped/conf", "the package `trapped` has no such file"),
        ("pkg://no_such/a.yaml", "the package `no_such` is not installed. Install it"),
        ("pkg://one_file/a.yaml", "the package `one_file` is not installed"),
        ("pkg://trapped", "is not pkg://PACKAGE/PATH, such as pkg://deeplightning/configs/base.yaml"),
        ("pkg://trapped/conf/../../secret.yaml", "PATH has no `..`"),
        (f"pkg://trapped/{'x' * 300}", "the package `trapped` has no such file"),
    ],
)
def test_an_address_that_leads_nowhere_is_a_note(here, address, words):
    """The error has the package, the file and the nearest one, and for a `_base_` its line."""
    assert words in error_of(address)
    (here / "c.yaml").write_text(f"a: 1\n_base_: '{address}'\n")
    found = error_of("c.yaml")
    assert found.startswith("c.yaml:2:1: _base_: ")
    assert words in found


def test_a_missing_file_that_ships_is_named(here):
    """Outside a clone `configs/base.yaml` does not exist, and the error has its address; others are not guessed."""
    hint = "; the one that ships with Deep Lightning is pkg://deeplightning/configs/base.yaml"
    assert error_of("configs/base.yaml").endswith(hint)
    (here / "c.yaml").write_text("_base_: configs/base.yaml\n")
    assert error_of("c.yaml") == f"c.yaml:1:1: _base_: there is no file configs/base.yaml to build on{hint}"
    assert "ships" not in error_of("configs/no.yaml")
    assert "ships" not in error_of("base.yaml")
