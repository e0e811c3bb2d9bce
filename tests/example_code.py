"""Load or copy the code of the examples, for tests."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def module_of(path: str) -> ModuleType:
    """Import a file below `examples/`; `sys.path` and `sys.modules` stay as they are."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_code(example: str, folder: Path) -> None:
    """Copy the Python files of an example into a folder."""
    for path in (EXAMPLES / example).glob("*.py"):
        shutil.copy(path, folder)
