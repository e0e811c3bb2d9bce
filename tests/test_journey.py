"""The whole journey: a config is trained, tracked, tested, exported, served and asked, by the commands of a user."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from commands import real
from conftest import digest

ROOT = Path(__file__).parents[1]
BASE = ROOT / "configs" / "base.yaml"


@pytest.fixture(scope="module")
def base(store, place):
    """`configs/base.yaml` for two epochs, in a fresh process."""
    outcome = real("train", BASE, "train.num_epochs=2", f"logger.params.tracking_uri={store}", cwd=place)
    assert outcome.code == 0, outcome
    return outcome


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_everything_a_run_leaves_lies_in_the_folder_of_the_last_line(base, store):
    """A run leaves its config, weights, environment, log, pictures, results, predictions and bundle, and nothing else
    of its own anywhere."""
    left = {str(path.relative_to(base.folder)) for path in base.folder.rglob("*") if path.is_file()}
    assert base.folder.is_relative_to(store)
    assert left == {
        *("cfg.yaml", "environment.json", "last.ckpt", "best.ckpt", "best.json", "logs/rank_0.log", "samples.npz"),
        *("val_confusion_matrix.png", "val_predictions.png", "test_results.json", "test_predictions.csv"),
        *("bundle/model.onnx", "bundle/weights.safetensors", "bundle/bundle.json"),
    } | (left & {"git.diff"})


def test_the_start_the_epochs_and_the_end_are_told(base):
    """The config, a table, a line per epoch, the best, the duration and the results are printed, without colour."""
    for text in ("total_steps: auto", "14,538 parameters (0.015 M)", "1,439 training, 179 validation samples"):
        assert text in base.out
    for text in ("epoch 1 of 2  train_acc", "epoch 2 of 2  train_acc", "best       val_acc", "duration", "results"):
        assert text in base.out
    assert "32 samples a step" in base.out
    assert "\x1b" not in base.out + base.err
    assert base.err == ""
    said = (base.folder / "logs" / "rank_0.log").read_text()
    assert "epoch 2 of 2" in said
    assert "first loss" in said


def test_predictions_are_in_data_order_and_agree_with_the_results(base):
    """There is a row per test sample, in data order, and their share of right ones is `test_acc`."""
    found = rows(base.folder / "test_predictions.csv")
    assert [int(row["index"]) for row in found] == list(range(179))
    right = sum(row["label"] == row["predicted_class"] for row in found)
    results = json.loads((base.folder / "test_results.json").read_text())
    assert results["test_acc"] == pytest.approx(right / 179, abs=1e-7)
    assert set(results) == {"test_acc", "test_loss"}


def test_the_run_is_tracked_whole(base, tracked):
    """One finished run with the config as parameters, the metrics by their names from step 0 on, and where it came
    from."""
    run = tracked(base.folder)
    assert run.status == "FINISHED"
    assert run.params["model/optimizer/params/lr"] == "0.003"
    assert run.params["train/num_epochs"] == "2"
    series = run.series()
    assert {"train_loss", "train_acc", "val_loss", "val_acc", "lr", "train_loss_epoch", "train_acc_epoch"} <= set(
        series
    )
    assert [step for step, _ in series["train_loss"]] == list(range(0, 90, 10))
    assert [step for step, _ in series["lr"]] == list(range(0, 90, 10))
    assert [step for step, _ in series["val_acc"]] == [44, 89]
    assert [step for step, _ in series["train_acc_epoch"]] == [44, 89]
    assert series["test_acc"][0][1] == json.loads((base.folder / "test_results.json").read_text())["test_acc"]
    assert not [name for name in series if name.endswith("_step")]
    assert [name for name in run.metrics if name.startswith("system/")]
    assert "train configs" in run.tags["command"] or "train /" in run.tags["command"]
    environment = json.loads((base.folder / "environment.json").read_text())
    assert run.tags.get("git_commit") == (environment.get("git") or {}).get("commit")
    assert "torch 2" in run.tags["versions"]


def test_a_saved_config_is_the_config(base, command, place):
    """`cfg.yaml` passes `check`, and `explain` prints it as it is."""
    saved = base.folder / "cfg.yaml"
    assert command("check", saved, cwd=place).code == 0
    explained = command("explain", saved, cwd=place)
    assert explained.out.rstrip("\n") + "\n" == saved.read_text()
    assert yaml.safe_load(saved.read_text())["engine"]["num_nodes"] == 1


def test_a_saved_config_trains_to_the_same_bits(base, command, place, tracked):
    """The same run again from its `cfg.yaml`: a new run with identical metrics and identical weights."""
    again = command("train", base.folder / "cfg.yaml", cwd=place)
    assert again.code == 0, again
    assert again.folder != base.folder
    assert tracked(again.folder).series() == tracked(base.folder).series()
    for name in ("last.ckpt", "best.ckpt"):
        assert digest(again.folder / name) == digest(base.folder / name)
    for name in ("bundle/weights.safetensors", "test_predictions.csv"):
        assert (again.folder / name).read_bytes() == (base.folder / name).read_bytes()
