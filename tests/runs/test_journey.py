"""The complete journey: a config is trained, tracked, tested, exported and served by the commands of a user."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from checks import write_mnist
from commands import real
from conftest import digest
from sklearn.datasets import load_digits
from tiny import SEED, csv_rows

from deeplightning.config.tree import parse, plain

ROOT = Path(__file__).parents[2]
BASE = ROOT / "configs" / "base.yaml"


@pytest.fixture(scope="module")
def base(store, place):
    """`configs/base.yaml` for two epochs, in a new process."""
    env = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.2"}
    return real("train", BASE, "train.num_epochs=2", f"logger.params.tracking_uri={store}", cwd=place, **env, code=0)


PICTURES = [
    *("val_confusion_matrix", "val_classes", "val_predictions"),
    *("test_confusion_matrix", "test_classes", "test_reliability"),
]


def test_every_file_of_a_run_is_in_the_printed_folder(base, store):
    """The only files of a run are config, weights, log, pictures, results and bundle, in the folder that it prints."""
    written = {str(path.relative_to(base.folder)) for path in base.folder.rglob("*") if path.is_file()}
    assert base.folder.is_relative_to(store)
    assert written == {
        *("cfg.yaml", "environment.json", "code.zip", "metrics.jsonl", ".metrics.sent"),
        *("last.ckpt", "best.ckpt", "best.json", "logs/rank_0.log", "samples.npz"),
        *("test_results.json", "test_predictions.csv", "test_mistakes.json", "places.json", "report.html"),
        *(f"{name}.{ending}" for name in PICTURES for ending in ("svg", "png")),
        *("bundle/model.onnx", "bundle/weights.safetensors", "bundle/bundle.json"),
    }


def test_the_start_the_epochs_and_the_end_are_printed(base):
    """A run prints a table of at most fourteen lines, a line per epoch, the best epoch, the duration and the results,
    without colour; its log contains them too."""
    start = next(number for number, line in enumerate(base.out.splitlines()) if line.startswith("first loss"))
    assert 8 <= start <= 14, base
    for text in ("14,538 parameters (0.015 M)", "1,439 training, 179 validation samples"):
        assert text in base.out
    for text in ("epoch 1 of 2  train_acc", "epoch 2 of 2  train_acc", "best       val_acc", "duration", "results"):
        assert text in base.out
    assert len(re.findall(r"^epoch \d of 2  .*  \(\d+\.\d s, [\d,.]+ samples/s\)$", base.out, re.M)) == 2
    assert "32 samples a step" in base.out
    assert "\x1b" not in base.out + base.err
    assert base.err == ""
    log = (base.folder / "logs" / "rank_0.log").read_text()
    assert "epoch 2 of 2" in log
    assert "first loss" in log


def test_predictions_are_in_data_order_and_agree_with_the_results(base):
    """`test_predictions.csv` has a row per test sample in data order; the share of correct rows is `test_acc`."""
    found = csv_rows(base.folder / "test_predictions.csv")
    assert [int(row["index"]) for row in found] == list(range(179))
    right = sum(row["label"] == row["predicted_class"] for row in found)
    results = json.loads((base.folder / "test_results.json").read_text())
    assert results["test_acc"] == pytest.approx(right / 179, abs=1e-7)
    assert set(results) == {"test_acc", "test_loss"}


def test_the_run_is_tracked_completely(base, tracked):
    """A run is FINISHED in the tracker, with the config as params, metrics from step 0 on, and tags of its origin."""
    run = tracked(base.folder)
    assert run.status == "FINISHED"
    assert run.params["model/optimizer/params/lr"] == "0.003"
    assert run.params["train/num_epochs"] == "2"
    series = run.series()
    assert {"train_acc", "val_loss", "train_loss_epoch"} <= set(series)
    for name in ("train_loss", "lr"):
        assert [step for step, _ in series[name]] == list(range(0, 90, 10))
    for name in ("val_acc", "train_acc_epoch"):
        assert [step for step, _ in series[name]] == [44, 89]
    assert series["test_acc"][0][1] == json.loads((base.folder / "test_results.json").read_text())["test_acc"]
    assert not [name for name in series if name.endswith("_step")]
    assert [name for name in run.metrics if name.startswith("system/")]
    assert " train " in run.tags["command"]
    assert "configs/base.yaml" in run.tags["command"]
    environment = json.loads((base.folder / "environment.json").read_text())
    assert run.tags.get("git_commit") == (environment.get("git") or {}).get("commit")
    assert "torch 2" in run.tags["versions"]


def test_a_saved_config_is_the_config(base, command, place):
    """`explain` of a run's `cfg.yaml` prints the same config, and every value comes from this file."""
    saved = base.folder / "cfg.yaml"
    explained = command("explain", saved, cwd=place).out
    assert plain(parse(explained, "explained", [])) == plain(parse(saved.read_text(), "saved", []))
    assert explained.count(f"# {saved}:") == len(explained.splitlines()) - explained.count(":\n")
    assert yaml.safe_load(saved.read_text())["engine"]["num_nodes"] == 1


def test_a_saved_config_trains_to_the_same_bits(base, command, place, tracked):
    """A run from the `cfg.yaml` of another is a new run with identical metrics, weights and predictions."""
    again = command("train", base.folder / "cfg.yaml", cwd=place, code=0)
    assert again.folder != base.folder
    assert tracked(again.folder).series() == tracked(base.folder).series()
    for name in ("last.ckpt", "best.ckpt"):
        assert digest(again.folder / name) == digest(base.folder / name)
    for name in ("bundle/weights.safetensors", "test_predictions.csv"):
        assert (again.folder / name).read_bytes() == (base.folder / name).read_bytes()


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    """scikit-learn's digits as MNIST's four files, 28 x 28."""
    digits = load_digits()
    images = np.kron(digits.images * 255 / 16, np.ones((1, 3, 3)))  # (N, 24, 24)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    return write_mnist(tmp_path_factory.mktemp("mnist"), images, digits.target, 1500)


def test_the_seed_configuration_runs_as_it_is(mnist, command, place, store, tracked, tmp_path):
    """The first config of the project trains with `engine.gpus=null`, tracked under the experiment Default."""
    (tmp_path / "seed.yaml").write_text(SEED)
    overrides = ["engine.gpus=null", f"data.root={mnist}", f"logger.params.tracking_uri={store}", "train.num_epochs=4"]
    done = command("train", tmp_path / "seed.yaml", *overrides, cwd=place, code=0)
    assert "SimpleCNN: 28,938 parameters (0.029 M)" in done.out
    assert "warning: engine.backend: deepspeed_stage_3" in done.err
    run = tracked(done.folder)
    assert run.status == "FINISHED"
    assert run.metrics["val_acc"] > 0.5
    assert done.folder.parent.parent == store / "0"
    assert {"train_loss", "train_acc", "val_loss", "val_acc", "lr"} <= set(run.series())


@pytest.mark.slow
def test_the_seed_configuration_runs_over_two_processes(mnist, jobs, place, store, tracked, serving, tmp_path):
    """Under DeepSpeed's stage 3 it resumes, ends with the loss of one process, is exported, and is served."""
    (tmp_path / "seed.yaml").write_text(SEED)
    settings = ["engine.gpus=null", f"data.root={mnist}", f"logger.params.tracking_uri={store}", "train.export=false"]

    def train(*overrides, ranks=2):
        spread = [f"engine.processes={ranks}", f"data.batch_size={512 // ranks}"]
        return jobs("train", tmp_path / "seed.yaml", *settings, *spread, *overrides, cwd=place, ranks=ranks, code=0)

    first = train("train.num_epochs=1")
    assert "backend: deepspeed_stage_3" in (first.folder / "cfg.yaml").read_text()
    done = train("train.num_epochs=2", f"train.resume_ckpt='{first.folder}'")
    expected = tracked(train("train.num_epochs=2", ranks=1).folder).metrics["val_loss"]
    assert tracked(done.folder).metrics["val_loss"] == pytest.approx(expected, abs=1e-3)

    jobs("export", done.folder, cwd=place, code=0)
    picture = ROOT / "examples" / "digits" / "3.png"
    (predicted,) = csv.DictReader(jobs("predict", done.folder, picture, cwd=place).out.splitlines())
    answer = serving(done.folder).ask("POST", "/predict", picture.read_bytes())[1]
    assert (answer["predicted_class"], answer["label"]) == (predicted["predicted_class"], predicted["predicted_label"])
    expected = float(predicted["predicted_probability"])
    assert float(answer["predicted_probability"]) == pytest.approx(expected, abs=1e-5)
