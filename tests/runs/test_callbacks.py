"""When a run validates, saves checkpoints, stops and logs; which checkpoint is best; initial weights; images."""

import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from deeplightning.callbacks.on_request import ShowPictures
from deeplightning.callbacks.steps import SameBuffers, ends_of_parts
from deeplightning.config.schema import Pictures
from deeplightning.faults import CheckpointError, ConfigError
from deeplightning.runfolder import RunFolder

BEST = "train.checkpoint={monitor: val_acc, mode: max, save_top_k: 2}"


def test_every_second_epoch_is_validated(fit):
    """`val_every_n_epoch: 2` validates at the ends of the second and the fourth epoch."""
    fitted = fit("train.val_every_n_epoch=2", "train.num_epochs=4")
    assert [step for step, _ in fitted.series("val_acc")] == [17, 35]


def test_twice_an_epoch_is_validated(fit):
    """`val_every_n_epoch: 0.5` validates after half of the nine batches and at the end of an epoch."""
    fitted = fit("train.val_every_n_epoch=0.5")
    assert fitted.seen.validations == [(0, 4), (0, 9), (1, 13), (1, 18)]


def test_batches_are_limited(fit):
    """`limit_batches` takes a number or a fraction of the batches."""
    fitted = fit("train.limit_batches={train: 3, val: 0.5}", "train.num_epochs=1", "data.batch_size=4")
    assert fitted.trainer.global_step == 3
    assert fitted.trainer.num_val_batches == [2]


@pytest.mark.parametrize(
    ("settings", "saves"),
    [
        ("{}", [(0, 9), (1, 18), (2, 27)]),
        ("{every_n_epochs: 2}", [(1, 18), (2, 27)]),
        ("{every_n_epochs: null}", [(2, 27)]),
        ("{every_n_epochs: null, every_n_steps: 10}", [(1, 10), (2, 20), (2, 27)]),
        ("{every_n_epochs: 0.5}", [(0, 4), (0, 9), (1, 13), (1, 18), (2, 22), (2, 27)]),
    ],
)
def test_last_is_saved_when_it_is_due_and_at_the_end(settings, saves, fit):
    """`last.ckpt` is saved every n epochs, parts of an epoch or steps, and at the end, but only once for a step."""
    fitted = fit(f"train.checkpoint={settings}", "train.num_epochs=3")
    assert [(min(epoch, 2), step) for epoch, step in fitted.seen.saves] == saves
    assert {path.name for path in fitted.folder.glob("*.ckpt")} == {"last.ckpt"}


def test_the_best_k_are_kept_and_the_best_is_recorded(fit):
    """`save_top_k: 2` keeps `best.ckpt` and the second best, named by epoch and step. `best.json` has value, epoch and
    step; of equal values the first is best. `trainer.checkpoint_callback` has their paths."""
    fitted = fit(BEST, "train.num_epochs=4")
    points = [(step + 1, value) for step, value in fitted.series("val_acc")]
    order = sorted(points, key=lambda point: (-point[1], point[0]))
    best = json.loads((fitted.folder / "best.json").read_text())
    assert (best["metric"], best["step"], best["file"]) == ("val_acc", order[0][0], "best.ckpt")
    assert best["value"] == pytest.approx(order[0][1], abs=1e-7)
    assert best["epoch"] == best["step"] // 9 - 1
    second = f"epoch={order[1][0] // 9 - 1}-step={order[1][0]}.ckpt"
    assert {path.name for path in fitted.folder.glob("*.ckpt")} == {"last.ckpt", "best.ckpt", second}
    callback = fitted.trainer.checkpoint_callback
    assert callback.best_model_path == f"{callback.dirpath}/best.ckpt" == str(fitted.folder / "best.ckpt")
    assert callback.last_model_path == f"{callback.dirpath}/last.ckpt"
    assert float(callback.best_model_score) == best["value"]


def test_no_number_is_never_best(fit, caplog):
    """Each validation loss of NaN gives a warning and no `best.ckpt`; training continues."""
    fitted = fit("model.loss.type=own.NoNumber", "train.checkpoint.monitor=val_loss")
    assert all(math.isnan(value) for _, value in fitted.series("val_loss"))
    assert len(fitted.series("val_loss")) == 2
    assert not (fitted.folder / "best.ckpt").exists()
    assert caplog.text.count("val_loss is nan") == 2


def test_a_metric_that_nothing_logs_is_named(fit):
    """An unknown `monitor` that the source cannot rule out is an error after the first validation."""
    with pytest.raises(ConfigError, match=r"train.checkpoint.monitor: no metric is called 'val_f1'; .*val_acc"):
        fit("train.callbacks=[{type: own.Norms}]", "train.checkpoint.monitor=val_f1")


CONSTANT = ["model.loss.type=own.Constant", "train.early_stop={metric: val_loss, mode: max, patience: 2}"]


@pytest.mark.parametrize(
    ("settings", "epochs", "reason"),
    [
        (CONSTANT, 3, "was no better than 1.5000 for 2 validations"),
        ([*CONSTANT, "train.val_every_n_epoch=0.25"], 1, "was no better than 1.5000 for 2 validations"),
        (["train.early_stop={metric: val_loss, delta: 100, patience: 1}"], 2, "was no better than "),  # by `delta`
        (["model.loss.type=own.NoNumber", "train.early_stop={metric: val_loss}"], 1, "is nan"),
    ],
)
def test_training_stops_early_and_says_why(settings, epochs, reason, fit, caplog):
    """A metric that does not improve by `delta` within `patience` validations, or is NaN, ends training, inside an
    epoch too; a log line has epoch, metric and reason."""
    caplog.set_level("INFO")
    fitted = fit(*settings, "train.num_epochs=9")
    assert {step // 9 for step, _ in fitted.series("val_loss")} == set(range(epochs))
    assert f"stopped    early, after epoch {epochs}: val_loss {reason}" in caplog.text


def test_steps_end_a_training_that_has_no_epochs(fit):
    """`max_steps` alone ends training after so many optimizer steps, inside an epoch, and saves a checkpoint."""
    fitted = fit("~train.num_epochs", "train.max_steps=12")
    assert fitted.trainer.global_step == 12
    assert fitted.seen.saves[-1][1] == 12


def test_callbacks_find_the_loggers_when_they_are_set_up(fit):
    """DeviceStatsMonitor logs, a ModelCheckpoint saves in the run folder, and Lightning's progress bar is accepted."""
    names = ("DeviceStatsMonitor", "ModelCheckpoint", "TQDMProgressBar")
    targets = ", ".join(f"{{type: pytorch_lightning.callbacks.{name}}}" for name in names)
    fitted = fit(f"train.callbacks=[{targets}]", "train.num_epochs=1")
    assert fitted.series("DeviceStatsMonitor.on_train_batch_start/cpu_percent")
    assert [path.name for path in (fitted.folder / "checkpoints").iterdir()] == ["epoch=0-step=9.ckpt"]


STILL = ["model.optimizer.params.lr=0.0", "train.num_epochs=1"]


@pytest.mark.slow
def test_training_starts_from_weights(fit, tmp_path):
    """`model.init_from` accepts a checkpoint, a run, a file of plain tensors, and a folder with `model.safetensors`."""
    trained = fit("train.num_epochs=1")
    plain, pth = tmp_path / "plain" / "model.safetensors", tmp_path / "plain.pth"
    plain.parent.mkdir()
    save_file(trained.task.network.state_dict(), plain)
    torch.save(trained.task.network.state_dict(), pth)
    for name in (trained.folder / "last.ckpt", trained.folder, plain, plain.parent, pth):
        started = fit(f"model.init_from='{name}'", *STILL)
        expected = trained.task.network.state_dict()
        assert all(torch.equal(t, expected[name]) for name, t in started.task.network.state_dict().items())
    again = started.trainer.validate(started.task, started.data, verbose=False)
    assert again[0]["val_acc"] == pytest.approx(trained.series("val_acc")[-1][1], abs=1e-6)


@pytest.mark.slow
def test_what_does_not_fit_keeps_its_first_values_and_is_named(fit, tmp_path, caplog):
    """A tensor of another shape is named and not loaded. A file without any tensor that fits, and a damaged or missing
    file, are errors before a run begins."""
    first = fit(*STILL).task.network.state_dict()
    names = list(first)
    torch.manual_seed(1)
    other = {name: torch.randn_like(tensor) for name, tensor in first.items()}
    other[names[-1]] = torch.zeros(1000)
    save_file(other, tmp_path / "other.safetensors")
    started = fit(f"model.init_from='{tmp_path / 'other.safetensors'}'", *STILL).task.network.state_dict()
    assert torch.equal(started[names[-1]], first[names[-1]])
    assert all(torch.equal(started[name], other[name]) for name in names[:-1])
    assert f"network.{names[-1]}" in caplog.text
    before = len(list((tmp_path / "runs").iterdir()))
    save_file({"nothing.of.this": torch.zeros(2)}, tmp_path / "none.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"no tensors")
    for name, words in (("none", "fits the network"), ("damaged", "cannot be read"), ("missing", "cannot be read")):
        with pytest.raises(CheckpointError, match=words):
            fit(f"model.init_from='{tmp_path / name}.safetensors'", *STILL)
    assert len(list((tmp_path / "runs").iterdir())) == before


@pytest.mark.parametrize(
    ("every", "batches", "steps", "ends"),
    [
        ("4", 1, [0, 4, 8, 12, 16], [8, 17]),
        ("{per_epoch: 3}", 1, [0, 3, 6, 9, 12, 15], [8, 17]),
        ("{per_epoch: 100}", 2, [*range(10)], [4, 9]),  # accumulates two batches: a point per optimizer step
    ],
)
def test_points_are_logged_at_step_0_and_every_nth_step(every, batches, steps, ends, fit):
    """`log_every_n_steps` holds for learning rate, training metrics and a callback that uses
    `Trainer.log_every_n_steps`; metrics of an epoch are logged at its end."""
    settings = [f"logger.log_every_n_steps={every}", f"train.accumulator_factor={batches}"]
    fitted = fit(*settings, "train.callbacks=[{type: own.Norms}]")
    norm = next(name for name in fitted.trainer.logged_metrics if name.startswith("norm/"))
    for name in ("train_loss", "train_acc", "lr", norm):
        assert [step for step, _ in fitted.series(name)] == steps, name
    for name in ("train_loss_epoch", "train_acc_epoch", "val_loss", "val_acc"):
        assert [step for step, _ in fitted.series(name)] == ends, name


def test_an_epochs_training_metrics_are_means_over_its_samples(fit):
    """`train_loss_epoch` is the mean over 134 samples in batches of 16 (the last of 6), not of batch means."""
    fitted = fit("model.optimizer.params.lr=0.0", "train.num_epochs=1")
    batches = [value for _, value in fitted.series("train_loss")]
    expected = (16 * sum(batches[:-1]) + 6 * batches[-1]) / 134
    assert fitted.series("train_loss_epoch")[0][1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("batches", "share", "ends"),
    [
        (9, 0.5, {4, 9}),
        (10, 0.25, {2, 5, 8, 10}),
        (3, 0.25, {1, 2, 3}),
        (4, 1e-12, {1, 2, 3, 4}),
        (math.inf, 0.5, set()),
    ],
)
def test_the_parts_of_an_epoch_end_with_batches(batches, share, ends):
    """Each part ends with the nearest batch, the last with the epoch; there are no more parts than batches."""
    assert ends_of_parts(batches, share) == ends


def test_pictures_of_a_task_may_have_any_form(tmp_path, caplog):
    """Images may be half precision, without a channel axis, or arrays; anything else gives a warning."""
    given = {"brain": torch.rand(3, 8, 8).bfloat16(), "flat": torch.rand(8, 8), "array": torch.rand(1, 8, 8).numpy()}
    trainer = SimpleNamespace(max_epochs=1, current_epoch=0, state=SimpleNamespace(fn="fit"))
    show = ShowPictures(Pictures(), SimpleNamespace(folder=RunFolder(tmp_path)))
    task = SimpleNamespace(pictures=lambda stage: given | {"odd": torch.rand(2, 8, 8)})
    show.on_validation_end(trainer, task)
    sizes = {path.stem: Image.open(io.BytesIO(path.read_bytes())).size for path in tmp_path.glob("*.png")}
    assert sizes == dict.fromkeys(given, (8, 8))
    assert "pictures   odd is not stored: A picture has 1, 3 or 4 channels" in caplog.text


def test_buffers_that_ddp_ignores_are_not_broadcast(monkeypatch):
    """A validation may add buffers to a process, on the CPU; NCCL refuses tensors that are not contiguous."""
    module, sent, plain = nn.Module(), [], torch.arange(6.0).view(2, 3)
    module.register_buffer("turned", plain.clone().t())
    module.register_buffer("inferred", torch.zeros(1))
    module._ddp_params_and_buffers_to_ignore = ["inferred"]

    def broadcast(buffer, source):
        sent.append(buffer.is_contiguous())
        buffer.add_(1)

    monkeypatch.setattr("deeplightning.engine.process_group.distributed.broadcast", broadcast)
    trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"), world_size=2)
    SameBuffers().on_validation_start(trainer, module)
    assert sent == [True]
    assert torch.equal(module.turned, plain.t() + 1)


def test_class_weights_are_those_of_the_config_not_of_the_weights(fit):
    """`model.init_from` loads the network; class weights of the loss stay those of the config."""

    def weighted(weight):
        return f"model.loss={{type: torch.nn.CrossEntropyLoss, params: {{weight: {[weight] * 10}}}}}"

    first = fit(weighted(3.0), *STILL)
    second = fit(weighted(1.0), f"model.init_from='{first.folder}'", *STILL)
    assert second.task.losses["loss"].weight.tolist() == [1.0] * 10


@pytest.mark.parametrize("every", [0.5, 2])
def test_a_mean_over_a_training_epoch_is_judged_at_its_end(fit, every):
    """`train_loss_epoch` may be monitored, and may stop the training, whenever a validation runs."""
    stop = "train.early_stop={metric: train_loss_epoch, delta: 100, patience: 1}"
    settings = (f"train.val_every_n_epoch={every}", "train.num_epochs=6", "train.checkpoint.monitor=train_loss_epoch")
    done = fit(*settings, stop)
    assert done.trainer.current_epoch == 2  # the second value is not better by 100
    assert (done.folder / "best.ckpt").is_file()
