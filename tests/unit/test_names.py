"""The public names of the package."""

import sys

import pytest
from commands import python

import deeplightning


@pytest.mark.parametrize("name", deeplightning.__all__)
def test_each_public_name_is_there_and_has_a_docstring(name):
    """Each name in `__all__` can be imported, has a docstring, and occurs in the docstring of the package."""
    found = getattr(deeplightning, name)
    if name != "__version__":
        assert found.__doc__
        assert f"`{name}(" in deeplightning.__doc__


def test_an_unknown_name_is_an_attribute_error():
    """An unknown name raises AttributeError, on which `hasattr` and `from deeplightning import X` rely."""
    with pytest.raises(AttributeError, match="no attribute 'load_confg'"):
        deeplightning.load_confg  # noqa: B018


def test_the_package_alone_loads_nothing():
    """Importing the package imports no other module; each public name imports its module on first use."""
    program = "import sys; before = set(sys.modules); import deeplightning; print(*set(sys.modules) - before)"
    names = python("-c", program).stdout.split()
    loaded = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"deeplightning", "deeplightning.version"}
