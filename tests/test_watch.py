"""Callbacks for whoever wants to look closer: what they say equals what is computed another way."""

import json
import re

import pytest
from conftest import weights

WATCH = "deeplightning.callbacks.watch"


@pytest.fixture(scope="module")
def watched(train):
    """One run with all of them: 135 samples, 9 batches, accumulated by 2, every step logged."""
    names = ("SyncedLoss", "ListParameters", "GradientNorms", "Timings", "SmoothedLoss")
    targets = ", ".join(f"{{type: {WATCH}.{name}}}" for name in names)
    return train(
        f"train.callbacks=[{targets}]",
        "train.accumulator_factor=2",
        "logger.log_every_n_steps=1",
        "logger.histograms=2",
    )


def test_a_line_per_optimizer_step(watched):
    """SyncedLoss writes each step once: five an epoch, the tail of an odd batch included."""
    steps = re.findall(r"^loss step (\d+): (\d+\.\d+)$", watched.out, re.M)
    assert [int(step) for step, _ in steps] == list(range(10))
    assert float(steps[0][1]) == pytest.approx(2.3, abs=0.3)


def test_parameters_are_listed(watched):
    """ListParameters names each trainable tensor, its shape, device and type."""
    assert "network.classifier.weight (10, 128) cpu float32" in watched.out.splitlines()
    assert sum(line.endswith("cpu float32") for line in watched.out.splitlines()) == 6


def test_the_smoothed_loss_starts_anew_each_epoch(train, tracked):
    """`train_loss_ema` equals the recurrence over the logged losses, and the first of an epoch is raw."""
    callback = f"train.callbacks=[{{type: {WATCH}.SmoothedLoss, params: {{weight: 0.25}}}}]"
    series = tracked(train(callback, "logger.log_every_n_steps=1").folder).series()
    losses, smoothed = dict(series["train_loss"]), dict(series["train_loss_ema"])
    expected = {}
    for step, loss in losses.items():
        expected[step] = loss if step % 9 == 0 else 0.25 * loss + 0.75 * expected[step - 1]
    assert smoothed == pytest.approx(expected, rel=1e-5)


def test_gradient_norms_and_timings_are_numbers_in_the_tracker(watched, tracked):
    """GradientNorms logs each tensor's norm and that of all; Timings seconds and batches."""
    series = tracked(watched.folder).series()
    parts = [dict(points)[0] for name, points in series.items() if name.startswith("grad_norm/")]
    assert len(parts) == 6
    assert dict(series["grad_norm"])[0] == pytest.approx(sum(p * p for p in parts) ** 0.5, rel=1e-5)
    assert all(
        0 < data <= whole for (_, whole), (_, data) in zip(series["batch_time"], series["data_time"], strict=True)
    )
    assert series["batches"][-1][1] == 18


def test_histograms_hold_every_weight_and_gradient(watched):
    """`logger.histograms: 2` leaves, after the second epoch, the bins and a picture of each tensor and its gradient."""
    folder = watched.folder / "histograms"
    assert [path.name for path in folder.iterdir()] == ["epoch_1"]
    tensors = weights(watched.folder / "last.ckpt")
    found = {path.stem for path in (folder / "epoch_1").glob("*.png")}
    assert found == {*tensors, *(f"{name}.grad" for name in tensors)}
    bins = json.loads((folder / "epoch_1" / "network.classifier.weight.json").read_text())
    assert sum(bins["counts"]) == 1280
    assert bins["edges"][0] == pytest.approx(float(tensors["network.classifier.weight"].min()))


def test_a_weight_that_is_no_share_is_refused(train):
    """SmoothedLoss takes a weight above 0 and at most 1."""
    outcome = train(f"train.callbacks=[{{type: {WATCH}.SmoothedLoss, params: {{weight: 2}}}}]", code=2)
    assert "weight must be above 0 and at most 1, not 2" in outcome.err
