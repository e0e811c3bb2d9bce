"""The example notebooks run in a real kernel."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def working_directory(monkeypatch, tmp_path):
    """An empty working directory; the kernel writes nothing into the user's home."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "PYTEST_"))]:
        monkeypatch.delenv(name)
    place = tmp_path / "a notebook"
    place.mkdir()
    monkeypatch.chdir(place)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    """Every cell runs, in order, and the curves of a run are shown; the file contains no outputs."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": os.getcwd()}}).execute()  # noqa: PTH109
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    text = "".join(output.text for cell in cells for output in cell.outputs if output.output_type == "stream")
    assert "epoch 1 of" in text
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
