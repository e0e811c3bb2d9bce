"""The example of custom callbacks: what they log equals references that are computed differently."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import weights

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_callbacks" / "watching.py"


@pytest.fixture(autouse=True, scope="module")
def watching(tiny):
    """The example's module, copied next to the config; this process imports it from the example."""
    shutil.copy(EXAMPLE, tiny.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE.parent)
        import watching

        yield watching
    del sys.modules["watching"]
    (tiny.parent / EXAMPLE.name).unlink()


@pytest.fixture(scope="module")
def watched(train):
    """A run with all callbacks: nine batches an epoch, accumulated by two, every step logged."""
    names = ("SyncedLoss", "ListParameters", "GradientNorms", "Timings", "SmoothedLoss", "ProgressLines")
    targets = ", ".join(f"{{type: watching.{name}}}" for name in names)
    logged = ["logger.log_every_n_steps=1", "logger.histograms=2", "logger.progress=off"]
    return train(f"train.callbacks=[{targets}]", "train.accumulator_factor=2", *logged)


def test_steps_and_parameters_are_listed(watched):
    """SyncedLoss prints each of five steps an epoch once, with the last odd batch; ListParameters prints each trainable
    tensor with shape, device and type."""
    steps = re.findall(r"^loss step (\d+): (\d+\.\d+)$", watched.out, re.M)
    assert [int(step) for step, _ in steps] == list(range(10))
    assert float(steps[0][1]) == pytest.approx(2.3, abs=0.3)
    assert "network.classifier.weight (10, 128) cpu float32" in watched.out.splitlines()
    assert sum(line.endswith("cpu float32") for line in watched.out.splitlines()) == 6


def test_the_smoothed_loss_starts_anew_each_epoch(fit, watching):
    """`train_loss_ema` is the exponential average of the losses of an epoch; its weight must be above 0, at most 1."""
    with pytest.raises(ValueError, match="weight must be above 0 and at most 1, not 2"):
        watching.SmoothedLoss(weight=2)
    fitted = fit("train.callbacks=[{type: watching.SmoothedLoss, params: {weight: 0.25}}]")
    losses, smoothed = dict(fitted.series("train_loss")), dict(fitted.series("train_loss_ema"))
    expected = {}
    for step, loss in losses.items():
        expected[step] = loss if step % 9 == 0 else 0.25 * loss + 0.75 * expected[step - 1]
    assert smoothed == pytest.approx(expected, rel=1e-5)


def test_gradient_norms_and_timings_are_numbers_in_the_tracker(watched, tracked):
    """GradientNorms logs the norm of each tensor and of all; Timings logs seconds and batches."""
    series = tracked(watched.folder).series()
    parts = [dict(points)[0] for name, points in series.items() if name.startswith("grad_norm/")]
    assert len(parts) == 6
    assert dict(series["grad_norm"])[0] == pytest.approx(sum(p * p for p in parts) ** 0.5, rel=1e-5)
    times = zip(series["batch_time"], series["data_time"], strict=True)
    assert all(0 < data <= batch for (_, batch), (_, data) in times)
    assert series["batches"][-1][1] == 18


def test_timings_count_what_each_part_takes(watching, monkeypatch):
    """Timings separates loading and training: by a fake clock a batch loads for one second and trains for two."""
    clock = iter([0.0, 1.0, 3.0, 4.0, 6.0])
    monkeypatch.setattr(watching.time, "perf_counter", lambda: next(clock))
    logged = {}
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(total_batch_idx=1))
    module = SimpleNamespace(log_dict=logged.update)
    timings = watching.Timings()
    timings.on_train_start(trainer, module)
    for batch in range(2):
        trainer.log_every_n_steps = 1 if batch else sys.maxsize
        timings.on_train_batch_start(trainer, module)
        timings.on_train_batch_end(trainer, module)
    assert logged == {"batch_time": 3.0, "data_time": 1.0, "batches": 2.0}


@pytest.mark.parametrize(("batches", "lines"), [(20, 10), (25, 10), (16, 10), (15, 15), (9, 9)])
def test_progress_is_a_line_each_tenth(batches, lines, watching, caplog):
    """ProgressLines logs about ten batches an epoch, always with the last, on the configured ranks only."""
    caplog.set_level("INFO")
    progress = watching.ProgressLines()
    trainer = SimpleNamespace(num_training_batches=batches, current_epoch=1, global_rank=0, accumulate_grad_batches=1)
    trainer.lightning_module = SimpleNamespace(automatic_optimization=True)
    for batch in range(batches):
        progress.on_train_batch_end(trainer, None, torch.tensor(0.5), None, batch)
    assert len(caplog.messages) == lines
    assert caplog.messages[-1] == f"epoch 2, batch {batches} of {batches} (100 %): train_loss 0.5000"
    trainer.global_rank = 1
    progress.on_train_batch_end(trainer, None, torch.tensor(0.5), None, batches - 1)
    assert len(caplog.messages) == lines


def test_a_run_writes_its_progress_as_lines(watched):
    """ProgressLines in `train.callbacks` writes a line for each of nine batches to the terminal and the rank's file."""
    lines = re.findall(r"^epoch (\d), batch (\d) of 9 \(\d+ %\): train_loss \d\.\d{4}$", watched.out, re.M)
    assert lines == [(str(epoch), str(batch)) for epoch in (1, 2) for batch in range(1, 10)]
    assert (watched.folder / "logs" / "rank_0.log").read_text().count(" of 9 (") == 18


@pytest.mark.slow
def test_the_loss_of_a_step_is_the_mean_over_batches_and_processes(job, fit):
    """SyncedLoss prints one line per step: with two processes and four batches a step, the mean of eight losses, which
    equals that of one process with four batches of twice the size. It prints on the configured ranks, or on none."""
    still = ["model.optimizer.params.lr=0.0", "train.num_epochs=1", "data.batch_size=4"]
    synced = "{type: watching.SyncedLoss, params: {prefix: NAME, ranks: RANKS}}"
    both, none = (synced.replace("NAME", n).replace("RANKS", r) for n, r in (("both", "[0, 1]"), ("none", "[]")))
    outcome = job(*still, f"train.callbacks=[{both}, {none}]", "train.accumulator_factor=4", "logger.ranks=[0, 1]")
    line = r"^\[rank {}\] both step (\d+): (\d+\.\d+)$"
    lines = [re.findall(line.format(number), rank.out, re.M) for number, rank in enumerate(outcome.ranks)]
    assert lines[0] == lines[1]
    assert [step for step, _ in lines[0]] == [str(step) for step in range(5)]  # 17 batches by fours
    assert not any("none step" in rank.out for rank in outcome.ranks)
    losses = fit(*still, "data.batch_size=8").series("train_loss")  # over the batches of both processes
    assert float(lines[0][0][1]) == pytest.approx(sum(value for _, value in losses[:4]) / 4, abs=1e-5)


def test_histograms_hold_every_weight_and_gradient(watched):
    """`logger.histograms: 2` writes, after the second epoch, the bins and a plot of each tensor and its gradient."""
    folder = watched.folder / "histograms"
    assert [path.name for path in folder.iterdir()] == ["epoch_1"]
    tensors = weights(watched.folder / "last.ckpt")
    found = {path.stem for path in (folder / "epoch_1").glob("*.png")}
    assert found == {*tensors, *(f"{name}.grad" for name in tensors)}
    bins = json.loads((folder / "epoch_1" / "network.classifier.weight.json").read_text())
    assert sum(bins["counts"]) == 1280
    assert bins["edges"][0] == pytest.approx(float(tensors["network.classifier.weight"].min()))
