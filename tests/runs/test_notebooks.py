"""The notebooks of the examples run in a real kernel, which an interruption leaves alive."""

import os
from pathlib import Path

import nbformat
import pytest
from conftest import TINY
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """A kernel in a folder of its own, which keeps nothing in the user's home."""
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
    """Every cell, in order; the file holds no outputs; a run shows its curves."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": os.getcwd()}}).execute()  # noqa: PTH109
    shown = [output for cell in cells for output in cell.outputs if "text/html" in output.get("data", {})]
    assert any("data:image/png" in output["data"]["text/html"] for output in shown)
    text = "".join(output.text for cell in cells for output in cell.outputs if output.output_type == "stream")
    assert "epoch 1 of" in text
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]


@pytest.mark.slow
def test_an_interrupted_cell_ends_the_run_and_leaves_the_kernel_alive(tmp_path):
    """As Ctrl-C does: the run saves a checkpoint, the cell ends with KeyboardInterrupt, and the next cell runs."""
    Path("c.yaml").write_text(TINY.replace("STORE", str(tmp_path / "runs")))
    manager, client = start_new_kernel(kernel_name="python3")
    outputs: list[str] = []
    interrupted = False

    def hear(message):
        nonlocal interrupted
        outputs.append(message["content"].get("text", ""))
        if not interrupted and "epoch 2 of" in "".join(outputs):
            interrupted = True
            manager.interrupt_kernel()

    try:
        code = "import deeplightning as dl\ndl.train('c.yaml', ['train.num_epochs=100000'])"
        reply = client.execute_interactive(code, output_hook=hear, timeout=120)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        said: list[str] = []
        client.execute_interactive(
            "print(dl.load_run(FOLDER).status)".replace("FOLDER", repr(str(folder_of(tmp_path)))),
            output_hook=lambda message: said.append(message["content"].get("text", "")),
            timeout=60,
        )
        assert "KILLED\n" in said
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert (folder_of(tmp_path) / "last.ckpt").is_file()


def folder_of(place):
    """That of the one run of a store."""
    (folder,) = (place / "runs").glob("*/*/artifacts")
    return folder
