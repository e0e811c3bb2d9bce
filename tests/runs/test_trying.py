"""Ways to try a training out: `train.overfit` learns the same batches again and again, `train.fast` runs one batch of
each stage and keeps no weights."""

import torch
from conftest import digest


def test_overfit_trains_and_validates_on_the_same_batches(train, tmp_path):
    """Two batches of 16, the first of the training set's order, in each of three epochs; and in validation."""
    writes = f"train.callbacks=[{{type: own.Batches, params: {{file: '{tmp_path / 'seen.pt'}'}}}}]"

    def seen(*overrides):
        run = train(*overrides, writes)
        return run, {s: [i.tolist() for i in found] for s, found in torch.load(tmp_path / "seen.pt").items()}

    run, found = seen("train.overfit=2", "train.num_epochs=3")
    first = seen("train.max_steps=2")[1]["train"]
    assert found == {"train": first * 3, "val": first * 3}
    assert first[0] != first[1]
    assert "overfit    2 batches of the training set, for training and validation" in run.out


def test_an_overfitted_run_resumes_bit_for_bit(train):
    """Inside an epoch of three batches, as any other run does."""
    settings = ["train.overfit=3", "train.num_epochs=4", "model.network={type: own.Dropout}"]
    half = train(*settings, "train.max_steps=5")
    resumed = train(*settings, f"train.resume_ckpt='{half.folder}'")
    assert "will not end bit for bit" not in resumed.err
    assert digest(resumed.folder / "last.ckpt") == digest(train(*settings).folder / "last.ckpt")


def test_overfit_takes_what_there_is_and_shares_it_out(job):
    """Of more batches than the set has, all; under ddp each process learns its own share."""
    run = job("train.overfit=20", "train.num_epochs=1", "engine.backend=ddp")
    assert "overfit    5 batches of the training set, which has no more" in run.out


def test_a_fast_run_tries_each_stage_and_keeps_no_weights(train, tracked):
    """One batch of training, validation and test, whatever lengths the config has; the run is tagged `fast`, has its
    metrics and neither a checkpoint nor a bundle."""
    run = train(
        "train.fast=true",
        "stages=[train, test]",
        "train.export=true",
        "train.val_every_n_epoch=2",
        "train.checkpoint.monitor=val_acc",
        "train.accumulator_factor=4",
        "model.scheduler={type: torch.optim.lr_scheduler.OneCycleLR, params: {max_lr: 0.1, total_steps: auto}, "
        "call: {interval: step}}",
    )
    assert list(run.folder.rglob("*.ckpt")) == []
    assert not (run.folder / "bundle").exists()
    assert not (run.folder / "best.json").exists()
    found = tracked(run.folder)
    assert (found.status, found.tags["fast"]) == ("FINISHED", "true")
    assert {"train_loss", "val_acc", "test_acc"} <= found.metrics.keys()
    assert "fast       one batch of each stage; no checkpoint and no bundle is written" in run.out
    assert "; 1 step" in run.out
    rows = (run.folder / "test_predictions.csv").read_text().splitlines()
    assert len(rows) == 17
