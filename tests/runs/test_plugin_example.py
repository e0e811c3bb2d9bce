"""examples/plugin as a user has it: installed, away from the clone, used by name."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import python

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "plugin"
CONFIG = "pkg://stripes/configs/stripes.yaml"


@pytest.fixture(scope="module")
def at_home(tmp_path_factory):
    """`at_home(words)` runs a program in an empty folder where the package is installed."""
    top = tmp_path_factory.mktemp("plugin")
    source, place, packages = top / "source", top / "an empty folder", top / "site packages"
    shutil.copytree(PLUGIN, source)  # a build leaves files beside its source
    place.mkdir()
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation"]
    subprocess.run([*uv, "--python", sys.executable, "--target", packages, source], check=True, timeout=120)

    def run(*words):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(packages))
            return python("-m", *words, cwd=place)

    return run


@pytest.mark.slow
def test_its_config_trains_by_short_names_and_answers(at_home):
    """As its README says; the run keeps the full names."""
    done = at_home("deeplightning", "train", CONFIG, "logger.pictures=null")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1].partition(": ")[2])
    written = (folder / "cfg.yaml").read_text()
    assert "type: stripes.data.Stripes" in written
    assert "type: stripes.network.StripeNet" in written

    drawn = at_home("deeplightning", "stripes", "rising.png", "--direction", "rising")
    assert (drawn.returncode, drawn.stderr) == (0, "")
    answer = at_home("deeplightning", "predict", "last", "rising.png")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[1].startswith("rising.png,1,rising,")


def test_a_misspelled_parameter_is_named(at_home):
    done = at_home("deeplightning", "check", CONFIG, "model.network.params.filter=3")
    assert done.returncode == 2
    assert "filters" in done.stderr


@pytest.mark.slow
def test_its_own_tests_pass(at_home):
    done = at_home("pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN / "tests"))
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


def test_without_the_package_the_names_are_refused(tmp_path):
    """A short name that nothing brings."""
    done = python("-m", "deeplightning", "check", PLUGIN / "stripes" / "configs" / "stripes.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "Stripes" in done.stderr
