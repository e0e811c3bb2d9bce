"""A folder of own code in which other folders have data, or modules without `__init__.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deeplightning import own_code

ROOT = Path(__file__).parents[2]
DATA = ("z3", "empty", "pictures/of/cats", "cached/__pycache__")
CODE = ("mine", "far/away/down")
NAMES = ["z3", "empty", "pictures", "cached", "mine", "far", "absent"]
PROGRAM = f"""
import importlib, multiprocessing, sys
from importlib.util import find_spec
from pathlib import Path
import deeplightning.__main__  # as the main module of a run's processes

def found(queue=None):
    names = [name for name in {NAMES} if find_spec(name) is not None]
    for name in {NAMES}:
        try:
            importlib.import_module(name)
        except ImportError:
            assert name not in names
    queue.put(names) if queue else print(*names)

if __name__ == "__main__":
    from deeplightning.own_code import add_import_roots
    add_import_roots(Path("code"))
    found()
    multiprocessing.set_start_method("spawn")
    process = multiprocessing.Process(target=found, args=(queue := multiprocessing.Queue(),))
    process.start()
    print(*queue.get(timeout=60))
    process.join()
"""


@pytest.fixture
def folder(tmp_path):
    """A folder of own code."""
    for name in (*DATA, *CODE):
        (tmp_path / "code" / name).mkdir(parents=True)
        (tmp_path / "code" / name / "notes.txt").write_text("")
        (tmp_path / "code" / name / ".hidden.py").write_text("")
    for name in CODE:
        (tmp_path / "code" / name / "part.py").write_text("HERE = True\n")
    for name in DATA:
        (tmp_path / "code" / name / ".hidden.py").unlink()
    (tmp_path / "code" / "cached" / "__pycache__" / "gone.cpython-311.pyc").write_bytes(b"")
    return tmp_path / "code"


@pytest.mark.parametrize("earlier", [[], ["code"], ["code/", "."]])
def test_a_folder_without_python_files_is_no_package(folder, earlier):
    """For nobody, in a process that has own code and in those that it starts, wherever the folder of own code stands in
    `sys.path`; a folder with a Python file in or below it is one."""
    (folder.parent / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(ROOT), *(str(folder.parent / entry) for entry in earlier)])
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": path, own_code.ROOTS: json.dumps([str(folder)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["mine far"] * 2, done


def test_the_working_directory_is_no_place_for_modules(folder):
    """`python -m deeplightning` imports nothing from it, as `deeplightning` does, until a config is read."""
    program = "import sys, deeplightning.__main__; print(*sys.path, sep=chr(10))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"", str(folder)}.isdisjoint(done.stdout.split("\n")[:-1])


def test_a_folder_is_a_package_once_it_has_a_module(folder, monkeypatch):
    """A module that is written after the folder was looked up is found; and a config can name it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    former = own_code.added_roots()
    try:
        own_code.use_import_roots(folder)
        assert own_code.top_level("z3") is None
        (folder / "z3" / "part.py").write_text("")
        own_code.use_import_roots(folder)
        found = own_code.top_level("z3")
        assert found is not None
        assert list(found.submodule_search_locations or ()) == [str(folder / "z3")]
    finally:
        own_code.use_import_roots(*former)
