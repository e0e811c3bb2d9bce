"""Plausible but problematic configs work, or are refused in one message that has the remedy."""

import urllib.error
from types import SimpleNamespace

import pytest
import torch
from tiny import csv_rows

from deeplightning.config.examine import examine
from deeplightning.config.schema import Target
from deeplightning.config.target import build, is_installed
from deeplightning.faults import SetupError, not_installed

LOSS = "torch.nn.CrossEntropyLoss"


# ---- construction


@pytest.mark.parametrize(("name", "hint"), [("LearningRateFinder", "lr CONFIG"), ("own_finder.Often", "batch CONFIG")])
def test_callbacks_that_change_hyperparameters_are_refused(tiny, tmp_path, monkeypatch, name, hint):
    """Callbacks that search for a learning rate or batch size are refused, with the command to run first."""
    own = "from pytorch_lightning.callbacks import BatchSizeFinder\n\n\nclass Often(BatchSizeFinder):\n    pass\n"
    (tmp_path / "own_finder.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    path = name if "." in name else f"pytorch_lightning.callbacks.{name}"
    for importing in (False, True):
        (fault,) = examine(tiny, [f"train.callbacks=[{{type: {path}}}]"], importing=importing).faults
        assert (fault.key, fault.exit_code) == ("train.callbacks.0.type", 2)
        assert f"deeplightning {hint}" in fault.message


def test_a_list_of_numbers_is_a_tensor_where_one_is_asked_for():
    """Class weights given as a list have the effect of the same tensor; a param that takes a list is unchanged."""
    loss = build(Target(type=LOSS, params={"weight": [1, 2, 0.5]}))
    expected = torch.nn.CrossEntropyLoss(weight=torch.tensor([1, 2, 0.5]))
    logits, labels = torch.tensor([[0.1, 0.9, -1.0], [2.0, 0.0, 1.0]]), torch.tensor([1, 2])
    assert loss.weight.dtype == torch.float32
    assert torch.equal(loss(logits, labels), expected(logits, labels))
    adam = Target(type="torch.optim.Adam", params={"lr": 0.1, "betas": [0.9, 0.99]})
    assert build(adam, [torch.nn.Parameter(logits)]).defaults["betas"] == (0.9, 0.99)


def test_weights_that_cannot_be_downloaded_have_a_remedy(monkeypatch, tmp_path):
    """Weights that cannot be downloaded are an environment error (exit code 3), and the message has the remedy."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def refuse(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("torch.hub.urlopen", refuse)
    target = Target(type="torchvision.models.squeezenet1_1", params={"weights": "DEFAULT"})
    target.place, target.name = "c.yaml:7:12", "model.network"
    with pytest.raises(SetupError) as caught:
        build(target)
    (fault,) = caught.value.faults
    assert (caught.value.exit_code, fault.place, fault.key) == (3, "c.yaml:7:12", "model.network")
    for message in ("no route to host", "Connect the machine, or copy them"):
        assert message in fault.message


# ---- data

ROWS = """\
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from deeplightning.task.img_classif import ImageClassification


class Rows(pl.LightningDataModule):
    class_names = ["a", "b", "c"]

    def __init__(self, cfg, like):
        super().__init__()
        self.like = {
            "int32": torch.arange(24, dtype=torch.int32) % 3, "float": torch.arange(24) % 3 + 0.5,
            "column": torch.arange(24)[:, None] % 3, "many": torch.arange(24) % 4, "negative": torch.arange(24) % 3 - 1,
        }[like]

    def train_dataloader(self):
        rows = [{"input": torch.ones(4), "label": label, "target": torch.ones(())} for label in self.like]
        return DataLoader(rows, batch_size=8)

    val_dataloader = test_dataloader = train_dataloader


class Shown(Rows):
    def example_batch(self, size):
        return next(iter(self.train_dataloader()))


class Cut(Shown):
    def train_dataloader(self):
        from deeplightning.data.data_errors import DataError

        raise DataError("labels.csv has no column `size`")


class Needy(Shown):
    def train_dataloader(self):
        import skimage


def net(kind):
    if kind == "lookup":
        return {}["vocabulary"]
    if kind == "file":
        return open("/nowhere/vocabulary.txt")
    raise RuntimeError("install the library")


class Slips(ImageClassification):
    def training_step(self, batch, batch_idx):
        return self.cfg.no_such_section
"""

BUILT = "model.network={{type: own_rows.net, params: {{kind: {}}}}}"

CLASSES = ["model.module.type=deeplightning.task.classes.Classification", "train.num_epochs=1"]
CLASSES += ["model.network={type: torch.nn.Linear, params: {in_features: 4, out_features: 3}}"]


@pytest.fixture(scope="module")
def rows(command, tiny, tmp_path_factory):
    """`rows(like, override, …)` trains with labels of a kind."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "own_rows.py").write_text(ROWS)

    def run(like, *overrides):
        data = f"data.module={{type: own_rows.Rows, params: {{like: {like}}}}}"
        return command("train", tiny, data, *CLASSES, *overrides, cwd=folder)

    run.cwd = folder
    return run


def test_a_run_about_rows_trains_and_is_not_served(rows, command, tracked):
    """The base class Classification trains on rows with integer labels; `serve` and `export` refuse in one message."""
    folder = rows("int32").folder
    assert tracked(folder).status == "FINISHED"
    for verb in ("serve", "export"):
        outcome = command(verb, folder, cwd=rows.cwd)
        assert (outcome.code, outcome.err.count("error: ")) == (4, 1), outcome
        assert f"{folder}: a server must know how inputs are prepared, and deeplightning.task.classes." in outcome.err
        assert "Traceback" not in outcome.err


METRIC = "model.metrics={{acc: {{type: torchmetrics.classification.{}}}}}"
AUGMENT = "data.module.params.augment=[{{type: torchvision.transforms.v2.{}}}]"
SHOWN = "data.module={{type: own_rows.{}, params: {{like: {}}}}}"


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        ([CLASSES[0]], 2, "data.digits.Digits gives batches of the form dict (image: uint8 ("),
        ([METRIC.format("MulticlassAccuracy, params: {num_classes: 5}")], 2, "`preds.shape[1]` should be equal to"),
        ([AUGMENT.format("RandomCrop, params: {size: 30}")], 2, "Required crop size (30, 30) is larger than input"),
        ([SHOWN.format("Shown", "many"), *CLASSES], 3, "the data holds label 3, the network has 3 outputs"),
        ([SHOWN.format("Shown", "negative"), *CLASSES], 3, "the data holds label -1, the network has 3 outputs (label"),
        ([SHOWN.format("Shown", "float"), *CLASSES], 3, "the labels of a batch are float32 (8,), not whole numbers"),
        ([SHOWN.format("Shown", "column"), *CLASSES], 3, "the labels of a batch are int64 (8, 1), not whole numbers"),
        ([SHOWN.format("Cut", "int32"), *CLASSES], 3, "labels.csv has no column `size`"),
        ([SHOWN.format("Needy", "int32"), *CLASSES], 3, "needs skimage, which is not installed here (own_rows.py:39)"),
        ([BUILT.format("lookup")], 2, "own_rows.net cannot be built: KeyError: 'vocabulary' (own_rows.py:44)"),
        ([BUILT.format("file")], 3, "own_rows.net cannot be built: FileNotFoundError: [Errno 2] No such file"),
        ([BUILT.format("else")], 2, "own_rows.net cannot be built: RuntimeError: install the library (own_rows.py"),
    ],
)
def test_a_fault_has_one_exit_code(rows, command, tiny, overrides, code, message):
    """A dry run and a training have the same exit code: 2 if parts of a config do not fit, 3 if the data are wrong."""
    for verb in (["check", "--dry-run"], ["train"]):
        outcome = command(*verb, tiny, *overrides, cwd=rows.cwd)
        assert (outcome.code, outcome.err.count("error: ")) == (code, 1), outcome
        assert message in outcome.err
        assert "Traceback" not in outcome.err


def test_a_slip_in_a_step_of_own_code_has_one_exit_code(rows, command, tiny):
    """A bug in user code is exit code 5 in a dry run and in a training, which shows the traceback."""
    for verb, message in (("check --dry-run", "own_rows.Slips fails in the training step: "), ("train", "Traceback")):
        outcome = command(*verb.split(), tiny, "model.module.type=own_rows.Slips", cwd=rows.cwd, code=5)
        assert message in outcome.err


# ---- tracking


def test_mlflow_run_in_a_folder_with_a_blank(train, tmp_path):
    """A run joins the one that `mlflow run` opened, although MLflow passes %20 in its URI; no folder appears."""
    from mlflow.tracking import MlflowClient
    from mlflow.utils.file_utils import path_to_local_sqlite_uri

    clone = tmp_path / "my clone"
    clone.mkdir()
    client = MlflowClient(f"sqlite:///{clone}/mlflow.db")
    run = client.create_run("0").info.run_id
    uri = path_to_local_sqlite_uri(clone / "mlflow.db")
    assert "my%20clone" in uri
    done = train("train.num_epochs=1", MLFLOW_RUN_ID=run, MLFLOW_TRACKING_URI=uri)
    assert done.folder.parent.name == run
    assert client.get_run(run).info.status == "FINISHED"
    assert list(tmp_path.iterdir()) == [clone]


# ---- failures


@pytest.mark.skipif(not is_installed("deeplightning_tune"), reason=not_installed("tune"))
def test_a_failed_trial_has_its_run_in_the_table(command, tiny, tracked, tmp_path):
    """trials.csv contains the id of a trial's run that fails before its first step."""
    (tmp_path / "own_data.py").write_text(
        "from deeplightning.data.digits import Digits\n\n\n"
        "class Raises(Digits):\n"
        "    def train_dataloader(self):\n"
        "        raise KeyError('no batches')\n"
    )
    search = "tune={metric: val_acc, mode: max, num_trials: 1, space: {train.max_steps: {int: [1, 2]}}}"
    outcome = command("tune", tiny, "data.module.type=own_data.Raises", search, cwd=tmp_path)
    (row,) = csv_rows(outcome.folder / "trials.csv")
    assert (row["state"], "no batches" in row["failure"]) == ("failed", True)
    found = tracked(outcome.folder).client.get_run(row["run"])
    assert found.info.status == "FAILED"


def test_a_slip_in_an_own_transform_is_no_fault_of_the_config():
    """A bug in a user's transform is not reported as a config fault, even if a transform of torchvision called it."""
    from torchvision.transforms import Compose

    from deeplightning.config.schema import Config
    from deeplightning.run.train import _part_fault

    with pytest.raises(IndexError) as raised:
        Compose([lambda image: image[5]])([1])
    assert _part_fault(raised.value, SimpleNamespace(cfg=object.__new__(Config))) is None
