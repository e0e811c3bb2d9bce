"""`load_config` does not change the environment; launching a run applies the config's environment, in one place."""

import os
import sys
from pathlib import Path

import pytest

from deeplightning import init_module, load_config, own_code
from deeplightning.launch import apply_environment
from deeplightning.process.identity import DECIDED

BASE = Path(__file__).parents[2] / "configs" / "base.yaml"
DATA = """\
import os

from deeplightning.data.digits import Digits

AT_IMPORT = os.environ.get("OF_THE_CONFIG")


class Mine(Digits):
    of = "{name}"
"""


def state():
    """Return the state of this process that a config could change."""
    return dict(os.environ), list(sys.path), list(sys.meta_path), sorted(n for n in sys.modules if "mine" in n)


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Two configs in two folders, each beside its own module `mine` and with another `engine.env`."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mine.py").write_text(DATA.format(name=name))
        (folder / "cfg.yaml").write_text(
            f"_base_: {BASE}\nseed: null\ndata: {{module: {{type: mine.Mine}}}}\n"
            f"logger: {{params: {{tracking_uri: 'postgresql://me:tiger-{name}-42@host/db'}}}}\n"
            f"engine: {{gpus: null, env: {{OF_THE_CONFIG: {name}}}}}\n"
        )
    yield tmp_path / "one" / "cfg.yaml", tmp_path / "two" / "cfg.yaml"
    for name in [name for name in sys.modules if name.rpartition(".")[2] == "mine"]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(before)


def test_reading_a_config_changes_no_environment(two):
    """`load_config` changes neither variables nor `sys.meta_path`; `sys.path` gains the last config's folders only."""
    load_config(BASE)  # libraries set variables of their own when they are first imported
    variables, path, finders, _ = state()
    for config in two:
        load_config(config)
        assert dict(os.environ) == variables
        assert sys.meta_path == finders
        added = [entry for entry in sys.path if entry not in path]
        assert added == [str(Path.cwd()), str(config.parent)][-len(added) :]


def test_variables_of_a_config_are_there_when_its_code_is_imported(two):
    """The variables of `engine.env` are set while the config's code is imported, and are removed afterwards."""
    load_config(two[0])
    # A worker that ran other tests may have another `mine` on its path; then this one has a longer name.
    assert sys.modules[own_code.full_name("mine")].AT_IMPORT == "one"
    assert "OF_THE_CONFIG" not in os.environ


def test_two_configs_of_one_process_do_not_mix(two):
    """Each config builds the module of its own folder, whichever was loaded last, and sets its own variables."""
    first, second = map(load_config, two)
    assert first.seed != second.seed
    for cfg, name in ((first, "one"), (second, "two"), (first, "one")):
        assert init_module(cfg, "data").of == name
        assert os.environ["OF_THE_CONFIG"] == name
        assert os.environ["LOGGER_PARAMS_TRACKING_URI"] == f"me:tiger-{name}-42"


def test_launching_sets_the_environment_once(two, monkeypatch):
    """A launch exports variables, seed and import folders to child processes; a second launch changes nothing."""
    cfg = load_config(two[0])
    monkeypatch.delenv(DECIDED, raising=False)
    apply_environment(cfg)
    after = state()
    assert os.environ["OF_THE_CONFIG"] == "one"
    assert str(cfg.seed) in os.environ[DECIDED]
    assert str(two[0].parent) in os.environ["DEEPLIGHTNING_ROOTS"]
    apply_environment(cfg)
    assert state() == after
