"""Regression metrics equal scikit-learn's on one process and two; functions of the config make data modules."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_squared_error, root_mean_squared_error
from tiny import csv_rows

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "linear_regression" / "linear_regression.yaml"
ONE = "model.network.params.out_features=1"
SETS = '''
"""Data modules that functions make."""

import pytorch_lightning as pl
import torch
from torch.utils.data import Dataset

from deeplightning.data.of_datasets import OfDatasets


class Rows(Dataset):
    """Two inputs, and `targets` numbers that depend on them plus noise."""

    def __init__(self, size, targets=1, seed=0):
        random = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(size, 2, generator=random)
        self.size = torch.randint(1, 9, (size,), generator=random)
        mixed = self.inputs @ torch.randn(2, targets, generator=torch.Generator().manual_seed(1))
        self.targets = mixed + torch.randn(size, targets, generator=random) * torch.arange(1, targets + 1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, position):
        return {"input": self.inputs[position], "target": self.targets[position]}


def ours(cfg, size=67, targets=2, held_out=True):
    val = Rows(29, targets, seed=2) if held_out else None
    return OfDatasets(cfg, Rows(size, targets), val, Rows(29, targets, seed=2) if held_out else None)


def lightnings(cfg):
    """Lightning's own data module of one data set, with its own batch size."""
    return pl.LightningDataModule.from_datasets(Rows(64), batch_size=4)


def deep():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Unflatten(1, (1, 2)))


def pairs(cfg):
    return OfDatasets(cfg, torch.utils.data.TensorDataset(torch.ones(20, 2), torch.ones(20)))
'''
CONFIG = """\
seed: 3
data: {module: {type: sets.ours}, batch_size: 8}
model:
  module: {type: deeplightning.task.regression.Regression}
  network: {type: torch.nn.Linear, params: {in_features: 2, out_features: 2}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05}}
  loss: {type: torch.nn.MSELoss}
train: {num_epochs: 2, export: false}
logger: {params: {tracking_uri: STORE, system_metrics: false}, log_every_n_steps: 1}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory, store):
    folder = tmp_path_factory.mktemp("regression")
    (folder / "sets.py").write_text(SETS)
    (folder / "c.yaml").write_text(CONFIG.replace("STORE", str(store)))
    return folder / "c.yaml"


@pytest.fixture(scope="module")
def regress(command, config):
    """`regress(override, …)` trains; `code` is the expected exit code of all processes."""

    def run(*overrides, code=0, ranks=1, verb="train"):
        return command(verb, config, f"engine.processes={ranks}", *overrides, cwd=config.parent, ranks=ranks, code=code)

    return run


@pytest.fixture(scope="module")
def tested(regress):
    """Folders of runs of one process and of two, with a test set of 29 samples."""
    return {n: regress("stages=[train,test]", f"data.batch_size={8 // n}", ranks=n).folder for n in (1, 2)}


def predicted(folder):
    rows = csv_rows(folder / "test_predictions.csv")
    columns = ([[float(row[f"{name}_{n}"]) for n in (0, 1)] for row in rows] for name in ("target", "prediction"))
    return [int(row["index"]) for row in rows], *columns


def test_errors_are_those_of_scikit_learn(tested, tracked):
    """They hold for 29 predictions of two targets on one process and two; both runs have the same error curves."""
    for folder in tested.values():
        results = json.loads((folder / "test_results.json").read_text())
        index, truth, given = predicted(folder)
        assert index == list(range(29))
        assert results["test_mse"] == pytest.approx(mean_squared_error(truth, given), rel=1e-5)
        assert results["test_rmse"] == pytest.approx(root_mean_squared_error(truth, given), rel=1e-5)
        assert results["test_loss"] == pytest.approx(results["test_mse"], rel=1e-5)
    one, two = (tracked(tested[n]).series() for n in (1, 2))
    for name in ("val_mse", "val_rmse", "train_mse", "train_rmse_epoch"):
        assert [s for s, _ in two[name]] == [s for s, _ in one[name]], name
        assert [v for _, v in two[name]] == pytest.approx([v for _, v in one[name]], rel=1e-5), name


@pytest.mark.parametrize("precision", [pytest.param("32", marks=pytest.mark.slow), "bf16"])
def test_one_row_may_be_all_that_validates(precision, command, tmp_path, store):
    """With ten rows one row validates, and the half width of the interval is the error of that row; also in bf16, where
    the numbers next to 200,000 are 1,024 away."""
    rows = "".join(f"{n / 7:.3f},{200000 + n * n % 5 * 1000}.5\n" for n in range(10))
    (tmp_path / "t.csv").write_text(f"x,y\n{rows}")
    command("init", "p", "--kind", "regression", "--data", "t.csv", cwd=tmp_path, code=0)
    words = ("train.num_epochs=1", "train.checkpoint.monitor=val_rmse", f"logger.params.tracking_uri={store}")
    done = command("train", *words, f"engine.precision={precision}", cwd=tmp_path / "p", code=0)
    content = torch.load(done.folder / "last.ckpt", weights_only=True)
    error = json.loads((done.folder / "best.json").read_text())["value"]
    assert content["regression"]["half_widths"] == [pytest.approx(error, rel=1e-5)]


def test_a_process_may_have_no_row_to_validate(regress):
    """29 rows in batches of 7 leave one of two processes without a row at the end; the intervals are those of one."""
    widths = []
    for ranks in (1, 2):
        folder = regress(f"data.batch_size={14 // ranks}", ranks=ranks).folder
        widths.append(torch.load(folder / "last.ckpt", weights_only=True)["regression"]["half_widths"])
    assert widths[1] == pytest.approx(widths[0], rel=1e-4)


def test_a_process_may_have_no_row_at_all(regress, tracked):
    """One training row on two processes: the errors of two targets are those of one process."""
    words = ("data.module.params={size: 1}", "train.num_epochs=1")
    one = regress(*words).folder
    two = regress(*words, "engine.params={timeout: 30}", ranks=2).folder
    for name in ("train_mse_epoch", "train_rmse_epoch"):
        assert tracked(two).metrics[name] == pytest.approx(tracked(one).metrics[name], rel=1e-5)


@pytest.mark.parametrize("name", ["PearsonCorrCoef", pytest.param("SpearmanCorrCoef", marks=pytest.mark.slow)])
def test_a_correlation_survives_a_resume_inside_an_epoch(name, regress):
    """Two processes resume after three of five steps with a metric whose states cannot be added, or are lists."""
    metric = f"model.metrics={{r: {{type: torchmetrics.{name}}}}}"
    settings = ("data.module.params={targets: 1}", ONE, metric, "data.batch_size=7", "train.num_epochs=1")
    part = regress(*settings, "train.max_steps=3", ranks=2)
    whole = regress(*settings, f"train.resume_ckpt='{part.folder}'", "engine.params={timeout: 30}", ranks=2)
    assert torch.load(whole.folder / "last.ckpt", weights_only=True)["global_step"] == 5


def test_one_number_for_each_sample_may_stand_in_a_column(regress):
    """Outputs (B, 1) and targets (B, 1) are not broadcast, and the predictions file has one column for each."""
    outcome = regress("data.module.params={targets: 1}", ONE, "stages=[train,test]")
    header = (outcome.folder / "test_predictions.csv").read_text().splitlines()[0]
    assert header == "index,prediction,target"
    assert "warning" not in outcome.err


@pytest.mark.parametrize(
    ("overrides", "verb", "words"),
    [
        (["model.network.params.out_features=3"], "train", "gives 3 number(s) for each sample, the data have 2"),
        (["model.network.params.in_features=5", "--dry-run"], "check", "does not take the data's inputs (5, 2)"),
        (["model.network={type: sets.deep}", "--dry-run"], "check", "gives (5, 1, 2)"),
        (["train.checkpoint.monitor=val_acc"], "check", "no metric `val_acc`"),
        (["data.module.params={size: 0}"], "train", "error: sets.ours has no training batch: there are 0 samples"),
    ],
)
def test_what_does_not_fit_is_named(overrides, verb, words, regress):
    """A network, a metric and a data module that do not fit are reported as one error with exit code 2."""
    assert words in regress(*overrides, verb=verb, code=2).err


def test_a_function_gives_one_set_and_lightnings_own_data_module(regress, tracked):
    """`LightningDataModule.from_datasets` of a training set alone trains without validation; the start shows the batch
    size of its loader instead of `data.batch_size`."""
    outcome = regress("data.module.type=sets.lightnings", "train.num_epochs=1", ONE)
    assert "batch      4 samples a step: 4 per process\n" in outcome.out
    assert "1 epoch; 16 steps\n" in outcome.out
    metrics = tracked(outcome.folder).metrics
    assert metrics["train_loss_epoch"] > 0
    assert not [name for name in metrics if name.startswith("val_")]


def test_a_stage_without_its_data_is_told(regress, tested):
    """`stages: [validate]` without a validation set ends with exit code 2."""
    without = ["data.module.params={held_out: false}", f"test.ckpt='{tested[1] / 'last.ckpt'}'"]
    assert "stages: no validation data" in regress(*without, "stages=[validate]", code=2).err


def test_folds_are_taken_from_the_training_set(regress, tracked):
    """Without a validation set, `num_splits` takes one from the training set: 13 of 67 samples."""
    outcome = regress("data.module.params={held_out: false}", "data.num_splits=5", "data.fold=1")
    assert "ours: 54 training, 13 validation samples" in outcome.out
    assert tracked(outcome.folder).metrics["val_mse"] > 0


def test_the_order_may_come_from_a_sampler_by_a_column_of_the_set(regress):
    """`data.sampler` sorts by the column `size` of the user's data set; a sample may also be a pair."""
    sampler = "deeplightning.data.samplers.BucketedDistributedSampler"
    params = "{buckets: 2, sort_key: size, min_samples_per_bucket: 30}"
    regress(f"data.sampler={{type: {sampler}, params: {params}}}")
    pairs = regress("data.module.type=sets.pairs", ONE, "train.checkpoint.monitor=null")
    assert "pairs: 20 training" in pairs.out


def test_the_line_is_found(command, store, tmp_path):
    """The example's three epochs reach the error of the noise, and the slopes and intercept of the data."""
    outcome = command("train", EXAMPLE, f"logger.params.tracking_uri={store}", cwd=tmp_path, code=0)
    assert json.loads((outcome.folder / "test_results.json").read_text())["test_loss"] < 0.02
    found = torch.load(outcome.folder / "last.ckpt", weights_only=True)["state_dict"]
    assert found["network.weight"][0].tolist() == pytest.approx([2.0, -1.0, 0.5], abs=0.05)
    assert float(found["network.bias"]) == pytest.approx(5.0, abs=0.05)


def test_a_checkpoint_keeps_the_scale_of_its_targets(command, store, tmp_path):
    """A test beside another training file gives the predictions of the run."""
    x = np.random.default_rng(0).normal(size=(200, 2))
    for name, factor in (("a", 1), ("b", 10), ("t", 1)):
        np.savez(tmp_path / f"{name}.npz", x=x, y=factor * x.sum(1) + factor)
    data = "type: deeplightning.data.arrays.ArrayData, params: {train: a.npz, test: t.npz, normalise: false}"
    text = CONFIG.replace("STORE", str(store)).replace("out_features: 2", "out_features: 1")
    was = "{module: {type: sets.ours}, batch_size: 8}"
    assert was in text
    (tmp_path / "c.yaml").write_text(text.replace(was, f"{{root: ., module: {{{data}}}, batch_size: 8}}"))
    run = command("train", "c.yaml", "stages=[train,test]", cwd=tmp_path, code=0).folder
    first = csv_rows(run / "test_predictions.csv")
    command("test", run, "data.module.params.train=b.npz", cwd=tmp_path, code=0)
    assert csv_rows(run / "test_predictions.csv") == first
