"""The names by which users reach this program: what the package offers."""

import subprocess
import sys

import pytest

import deeplightning


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
