"""A verb without a CONFIG takes `config.yaml` of the working directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from deeplightning.cli import cli

pytestmark = pytest.mark.usefixtures("here")

CONFIG = "_base_: pkg://deeplightning/configs/base.yaml\nseed: 7\n"


def run(*words):
    return CliRunner().invoke(cli, words)


@pytest.mark.parametrize("words", [(), ("data.batch_size=8",), ("~model.scheduler", "data.batch_size=8")])
def test_the_config_of_the_folder_is_taken(here, words):
    """Also where overrides or options are all that is given."""
    (here / "config.yaml").write_text(CONFIG)
    printed = run("explain", *words).output
    assert "seed: 7 " in printed
    assert ("batch_size: 8" in printed) == ("data.batch_size=8" in words)
    assert run("check", "--format", "json", *words).exit_code == 0


def test_a_config_that_is_named_is_taken(here):
    """Whatever its name looks like; and one that is missing stays an error."""
    (here / "config.yaml").write_text(CONFIG)
    (here / "a=b.yaml").write_text(CONFIG.replace("7", "8"))
    assert "seed: 8 " in run("explain", "a=b.yaml").output
    (here / "sub").mkdir()
    (here / "sub" / "c.yaml").write_text(CONFIG.replace("7", "9"))
    assert "seed: 9 " in run("explain", "sub/c.yaml").output
    for missing in ("no.yaml", "~/no-such-folder/c.yaml"):
        assert "no such config file" in str(run("explain", missing).exception)


def test_elsewhere_a_config_must_be_named():
    """Nothing else is guessed."""
    done = run("train")
    assert done.exit_code == 2
    assert "Missing argument 'CONFIG'" in done.output
    assert "there is no such config file" in str(run("check", "data.batch_size=8").exception)
    assert "config.yaml of the" in run("train", "--help").output


def test_the_working_directory_is_no_place_for_modules(here):
    """`python -m deeplightning` imports nothing from it, as `deeplightning` does, until a config is read."""
    program = "import sys, deeplightning.__main__; print(*sys.path, sep=chr(10))"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert {"", str(here)}.isdisjoint(done.stdout.split("\n")[:-1])
