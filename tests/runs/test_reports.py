"""A training writes figures and a report; `deeplightning report` writes the report again."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from deeplightning.runfolder import RunFolder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory with a space in its name, and images of two classes."""
    folder = tmp_path_factory.mktemp("a place")
    random = np.random.default_rng(0)
    for name, low in (("<b>dark", 0), ("light", 60)):
        (folder / "data" / name).mkdir(parents=True)
        for number in range(40):
            pixels = random.integers(low, low + 150, (8, 8), np.uint8)
            Image.fromarray(pixels).save(folder / "data" / name / f"{number:02}.png")
    return folder


CONFIG = """\
seed: 1
stages: [train, test]
data:
  root: data
  module: {type: deeplightning.data.image_folder.ImageFolder, params: {image_size: 8, mode: L, cache: false}}
  batch_size: 16
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 2, num_channels: 1, image_size: 8}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.01}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 3, export: false, checkpoint: {monitor: val_loss, mode: min}}
logger: {params: {tracking_uri: STORE, system_metrics: false}, log_every_n_steps: 2}
"""


@pytest.fixture(scope="module")
def run(command, place):
    (place / "c.yaml").write_text(CONFIG.replace("STORE", str(place / "runs")))
    return command("train", "c.yaml", "model.optimizer.params.momentum=0.5", cwd=place, code=0)


def test_a_run_leaves_its_pictures_and_its_report(run):
    """Figures are SVG and PNG; mistakes have their file names; each config value has its source. HTML is escaped."""
    folder = RunFolder(run.folder)
    names = ["val_confusion_matrix", "val_classes", "val_predictions"]
    names += [f"test_{name}" for name in ("confusion_matrix", "classes", "reliability", "roc")]
    assert [n for n in names for ending in (".svg", ".png") if not (folder.path / f"{n}{ending}").is_file()] == []
    kept = json.loads(folder.mistakes("test").read_text())
    assert kept["classes"] == ["<b>dark", "light"]
    probabilities = [one["probability"] for one in kept["mistakes"]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert [one["name"] for one in kept["mistakes"] if not one["name"].endswith(".png")] == []
    places = json.loads(folder.places.read_text())
    assert places["model.optimizer.params.momentum"] == "command line"
    assert places["seed"] == "c.yaml:1:1"
    content = folder.report.read_text()
    assert "<b>dark" not in content
    assert "&lt;b&gt;dark" in content
    assert "c.yaml:1:1" in content.replace("<wbr>", "")


def test_the_report_is_made_again(run, command, place):
    """`report RUN` writes it into the run folder, `--out` to another file; `last` is the newest run."""
    done = command("report", run.folder, cwd=place)
    assert (done.code, done.out.splitlines()[-1]) == (0, str(RunFolder(run.folder).report))
    done = command("report", "last", "--out", "own report.html", cwd=place, MLFLOW_TRACKING_URI=str(place / "runs"))
    assert (done.code, done.out.splitlines()[-1]) == (0, str(place / "own report.html"))
    assert "finished" in (place / "own report.html").read_text()


def test_a_foreign_run_is_left_as_it_is(run, command, place, tmp_path):
    """The report of a run of another user is written into the working directory, not into the run folder."""
    foreign = shutil.copytree(run.folder, tmp_path / "foreign")
    with (foreign / "cfg.yaml").open("a") as config:
        config.write("\n# from elsewhere\n")
    (foreign / "report.html").unlink()
    before = sorted(foreign.rglob("*"))
    (tmp_path / "here").mkdir()
    done = command("report", foreign, cwd=tmp_path / "here")
    assert (done.code, done.out.splitlines()[-1]) == (0, str(tmp_path / "here" / "report.html")), done
    assert sorted(foreign.rglob("*")) == before


def test_without_pictures_there_is_no_report(run, command, place):
    """`logger.pictures=null` draws no figure and no report; `report` draws both later, from the files of the run."""
    done = command("train", "c.yaml", "logger.pictures=null", "train.num_epochs=2", cwd=place, code=0)
    assert [path.name for path in done.folder.iterdir() if path.suffix in (".png", ".svg", ".html")] == []
    assert command("report", done.folder, cwd=place).code == 0
    assert (done.folder / "test_confusion_matrix.png").is_file()
