"""The names by which users reach this program: what the package offers, and the former paths of modules."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import deeplightning
from deeplightning import load_config
from deeplightning.config.moved import MOVED, present
from deeplightning.config.source import read

BASE = Path(__file__).parents[2] / "configs" / "base.yaml"


@pytest.mark.parametrize("name", deeplightning.__all__)
def test_each_public_name_is_there_and_has_a_docstring(name):
    """What `__all__` lists can be imported, and its docstring says what it is; the package's own names it too."""
    found = getattr(deeplightning, name)
    if name != "__version__":
        assert found.__doc__
        assert f"`{name}(" in deeplightning.__doc__


def test_an_unknown_name_is_an_attribute_error():
    """As any package answers, so that `hasattr` and `from deeplightning import X` work."""
    with pytest.raises(AttributeError, match="no attribute 'load_confg'"):
        deeplightning.load_confg  # noqa: B018


def test_the_package_alone_loads_nothing():
    """Importing it costs nothing: each public name imports its module when it is first used."""
    program = "import sys; before = set(sys.modules); import deeplightning; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"deeplightning", "deeplightning.version"}


def test_the_former_door_from_python_is_open():
    """`deeplightning.configure` offers what it did, the same objects."""
    from deeplightning import configure

    assert configure.load_config is load_config
    assert {getattr(deeplightning, name) is getattr(configure, name) for name in configure.__all__} == {True}


@pytest.mark.parametrize(("former", "path"), MOVED.items())
def test_a_former_path_means_the_present_one(former, path, tmp_path):
    """Where a config names a target or a reference by its former path; names of other modules are left alone."""
    assert present(f"{former}.Local") == f"{path}.Local"
    assert present(f"{former}_of_mine.Local") == f"{former}_of_mine.Local"
    file = tmp_path / "old.yaml"
    file.write_text(f"a: {{type: {former}.X, params: {{b: {{ref: {former}.y}}, c: {former}.z}}}}\n")
    root = read(file).root.value["a"].value
    assert root["type"].value == f"{path}.X"
    params = root["params"].value
    assert params["b"].value["ref"].value == f"{path}.y"
    assert params["c"].value == f"{former}.z"
    assert find_spec(path) is not None
    assert find_spec(former) is None


def test_a_launcher_of_an_older_config_is_known():
    """The whole way: a config with the former path of `Slurm` is checked and settled as with the present one."""
    from deeplightning.checks.examine import examine

    given = [
        f"engine.launcher.type={module}.Slurm" for module in ("deeplightning.engine.launch", "deeplightning.launch")
    ]
    reports = [examine(BASE, [override]) for override in given]
    assert [report.faults for report in reports] == [[], []]
    assert {report.config.engine.launcher.type for report in reports} == {"deeplightning.launch.Slurm"}
