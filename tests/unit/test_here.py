"""A command without a CONFIG uses `config.yaml` in the working directory."""

import pytest
from click.testing import CliRunner
from commands import python

from deeplightning.cli import cli
from deeplightning.cli.group import absolute

pytestmark = pytest.mark.usefixtures("here")

CONFIG = "_base_: pkg://deeplightning/configs/base.yaml\nseed: 7\n"


def run(*words):
    return CliRunner().invoke(cli, words)


@pytest.mark.parametrize("words", [(), ("data.batch_size=8",), ("~model.scheduler", "data.batch_size=8")])
def test_the_config_of_the_folder_is_taken(here, words):
    """The default applies also if only overrides or options are given."""
    (here / "config.yaml").write_text(CONFIG)
    printed = run("explain", *words).output
    assert "seed: 7 " in printed
    assert ("batch_size: 8" in printed) == ("data.batch_size=8" in words)
    assert run("check", "--format", "json", *words).exit_code == 0


def test_a_config_that_is_named_is_taken(here):
    """A named config is used, even if its name looks like an override; a missing one is an error."""
    (here / "config.yaml").write_text(CONFIG)
    (here / "a=b.yaml").write_text(CONFIG.replace("7", "8"))
    assert "seed: 8 " in run("explain", "a=b.yaml").output
    for missing in ("no.yaml", "~/no-such-folder/c.yaml"):
        assert "no such config file" in str(run("explain", missing).exception)


def test_elsewhere_a_config_must_be_named():
    """Without `config.yaml`, a command without CONFIG is an error."""
    done = run("train")
    assert done.exit_code == 2
    assert "Missing argument 'CONFIG'" in done.output
    assert "there is no such config file" in str(run("check", "data.batch_size=8").exception)
    assert "config.yaml of the" in run("train", "--help").output


def test_the_working_directory_is_no_place_for_modules(here):
    """Like `deeplightning`, `python -m deeplightning` imports nothing from the working directory until a config is
    read."""
    program = "import sys, deeplightning.__main__; print(*sys.path, sep=chr(10))"
    done = python("-c", program)
    assert done.returncode == 0
    assert {"", str(here)}.isdisjoint(done.stdout.split("\n")[:-1])


def test_a_home_folder_is_expanded_for_other_processes(here, monkeypatch):
    """`~` in the path of a config is expanded before a launcher passes it on."""
    monkeypatch.setenv("HOME", str(here))
    assert absolute(("~/c.yaml", "seed=1")) == (str(here / "c.yaml"), "seed=1")
