"""A result is not wrong in silence: what is kept, what is learned with, and what is on record."""

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from conftest import digest
from tiny import csv_rows

from deeplightning.callbacks.results import Results
from deeplightning.cli.listing import listing
from deeplightning.config.examine import examine
from deeplightning.config.explain import explain
from deeplightning.config.target import is_installed
from deeplightning.faults import not_installed
from deeplightning.runfolder import RunFolder


def faults(report) -> dict[str, str]:
    return {fault.key: fault.message for fault in report.faults}


# ---- which way of a metric is better


@pytest.mark.parametrize(
    ("monitor", "mode", "why"), [("val_acc", "max", "by the name val_acc"), ("val_loss", "min", "by the name val_loss")]
)
@pytest.mark.parametrize("importing", [False, True])
def test_the_better_way_of_a_metric_is_found(monitor, mode, why, importing, tiny):
    """A `mode` that is not given follows from the metric's name, wherever one is needed; `explain` shows why."""
    plateau = f"{{type: torch.optim.lr_scheduler.ReduceLROnPlateau, call: {{monitor: {monitor}}}}}"
    overrides = [
        f"train.checkpoint.monitor={monitor}",
        f"train.early_stop={{metric: {monitor}}}",
        f"model.scheduler={plateau}",
        f"train.callbacks=[{{type: pytorch_lightning.callbacks.EarlyStopping, params: {{monitor: {monitor}}}}}]",
    ]
    report = examine(tiny, overrides, importing=importing)
    assert faults(report) == {}
    cfg = report.config
    found = [cfg.train.checkpoint.mode, cfg.train.early_stop.mode]
    found += [cfg.model.scheduler.params["mode"], cfg.train.callbacks[0].params["mode"]]
    assert found == [mode] * 4
    assert f"then null → {mode} ({why})" in explain(report, "train.checkpoint.mode")
    assert f"mode: {mode}" in explain(report, "train.callbacks.0")


def test_a_metric_that_does_not_tell_needs_a_mode(tiny):
    """The name of a metric does not tell which way is better: `check` and `train` refuse, each key."""
    counting = "model.metrics.steps={type: torchmetrics.MeanMetric}"
    asked = [counting, "train.checkpoint.monitor=val_steps", "train.early_stop={metric: val_steps}"]
    for importing in (False, True):
        report = examine(tiny, asked, importing=importing)
        assert set(faults(report)) == {"train.checkpoint.mode", "train.early_stop.mode"}
        assert "set `mode: max` or `mode: min`" in report.faults[0].message
        assert report.exit_code == 2
    given = [*asked, "train.checkpoint.mode=max", "train.early_stop.mode=min"]
    cfg = examine(tiny, given).checked()
    assert (cfg.train.checkpoint.mode, cfg.train.early_stop.mode) == ("max", "min")


@pytest.fixture(scope="module")
def judged(train):
    """A run that watches its accuracy and does not say which way is better."""
    return train("train.num_epochs=4", "train.checkpoint.monitor=val_acc", "train.early_stop={metric: val_acc}")


def test_the_best_weights_are_those_of_the_highest_accuracy(judged, tracked):
    """The mode of a monitored accuracy is `max` by default, for the best epoch and early stopping; see cfg.yaml."""
    folder = judged.folder
    values = [value for _, value in tracked(folder).series()["val_acc"]]
    assert len(values) == 4
    assert json.loads((folder / "best.json").read_text())["value"] == pytest.approx(max(values))
    assert max(values) > min(values)
    saved = yaml.safe_load((folder / "cfg.yaml").read_text())["train"]
    assert (saved["checkpoint"]["mode"], saved["early_stop"]["mode"]) == ("max", "max")


def test_results_are_on_the_disk_whole_or_not_at_all(fit, monkeypatch):
    """Metrics and predictions are written beside their names: a loss of power leaves no part of them."""
    done, written, real = fit("train.max_steps=1"), [], Path.open

    def opened(path, mode="r", *arguments, **options):
        if "w" in mode:
            written.append(path.name)
        return real(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", opened)
    done.trainer.test(done.task, done.data)
    assert (done.folder / "test_predictions.csv").read_text().count("\n") > 2
    assert "test_acc" in json.loads((done.folder / "test_results.json").read_text())
    assert len(written) >= 2
    assert all(name.startswith(".test_") for name in written), written


def test_the_position_of_each_sample_stands_before_the_columns_of_a_task(fit, monkeypatch):
    """A task need not return `index` from `answers`."""
    done = fit("train.max_steps=1")
    monkeypatch.setattr(done.task, "answers", lambda batch, outputs: {"first": outputs[:, 0]})
    done.trainer.test(done.task, done.data)
    head, *rows = (done.folder / "test_predictions.csv").read_text().split()
    assert head == "index,first"
    assert [int(row.partition(",")[0]) for row in rows] == [*range(len(rows))] != []


class Answers(pl.LightningModule):
    """A user's module, whose steps return numbers of the batch beside columns, as plain Lightning allows."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def test_step(self, batch, batch_idx):
        at = torch.arange(len(batch)) + 4 * batch_idx
        more = {"last": ["yes"] * len(batch)} if len(batch) < 4 else {}
        return {
            "loss": batch.mean(),
            "batch": batch_idx,
            "index": at,
            "value": batch[:, 0],
            "names": ("a", "b"),
            **more,
        }

    def predict_step(self, batch, batch_idx):
        return {"index": batch_idx, "value": batch}


def test_what_is_no_column_of_a_users_step_is_left_out_of_the_rows_and_no_rows_are_said(tmp_path, caplog):
    """Plain Lightning takes any mapping; only tensors and lists of a row per sample become columns."""
    record = SimpleNamespace(folder=RunFolder(tmp_path), cfg=SimpleNamespace(logger=SimpleNamespace(pictures=None)))
    trainer = pl.Trainer(
        callbacks=[Results(record)], logger=False, accelerator="cpu", enable_progress_bar=False, max_epochs=1
    )
    loader, task = torch.utils.data.DataLoader(torch.arange(7.0)[:, None], batch_size=4), Answers()
    trainer.test(task, loader, verbose=False)
    rows = csv_rows(tmp_path / "test_predictions.csv")
    assert [row["value"] for row in rows] == [str(float(number)) for number in range(7)]
    assert {*rows[0]} == {"index", "value", "last"}
    assert (rows[0]["last"], rows[-1]["last"]) == ("", "yes")
    with caplog.at_level("INFO", "deeplightning"):
        trainer.predict(task, loader)
    assert not (tmp_path / "predictions.csv").exists()
    assert "no predictions.csv" in caplog.text


# ---- the learning rate


@pytest.mark.parametrize(("name", "importing"), [("SGD", False), ("LBFGS", True)])
def test_the_learning_rate_has_no_silent_default(name, importing, tiny):
    """An optimizer that takes `lr` is refused without it, by `check` and `train`; only training needs one."""
    rateless = f"model.optimizer={{type: torch.optim.{name}, params: {{weight_decay: 0}}}}"
    rateless = rateless.replace("weight_decay: 0", "max_iter: 4") if name == "LBFGS" else rateless
    report = examine(tiny, [rateless], importing=importing)
    assert set(faults(report)) == {"model.optimizer.params.lr"}
    assert "the learning rate, which has no silent default" in report.faults[0].message
    assert report.exit_code == 2
    assert examine(tiny, [rateless, "model.optimizer.params.lr=0.1"], importing=importing).faults == []
    assert examine(tiny, [rateless, "stages=[test]", "test.ckpt=last"], importing=importing).faults == []


def test_each_of_several_optimizers_needs_a_learning_rate():
    """The one without is named."""
    base, key = Path(__file__).parents[2] / "examples" / "dcgan" / "dcgan.yaml", "model.optimizer.generator.params.lr"
    assert set(faults(examine(base, [f"~{key}"]))) == {key}


# ---- what was asked for, and what ran


@pytest.fixture(scope="module")
def smaller(train):
    """A run that was asked for more than this machine gave it, and one that asked for just that."""
    return train(
        *("engine.backend=fairscale_fsdp", "engine.precision=amp", "engine.gpus=auto", "train.num_epochs=1"),
        CUDA_VISIBLE_DEVICES="",
    )


ASKED = {"backend": "fairscale_fsdp", "precision": "amp", "gpus": "auto"}


def test_what_was_asked_and_what_ran_are_both_on_record(smaller, tracked):
    """cfg.yaml has what ran; the tags have what was asked for where that is something else."""
    saved = yaml.safe_load((smaller.folder / "cfg.yaml").read_text())["engine"]
    assert [saved[key] for key in ("backend", "precision", "gpus")] == [None, "bf16-mixed", None]
    tags = {name: value for name, value in tracked(smaller.folder).tags.items() if name.startswith("asked.")}
    assert tags == {f"asked.engine.{key}": value for key, value in ASKED.items()}


# ---- checkpoints of fractions of an epoch


def test_without_a_metric_the_newest_are_kept(fit):
    """Saved at each half of an epoch without a metric: the newest four, by name and step, and `last.ckpt`."""
    fitted = fit("train.checkpoint={every_n_epochs: 0.5, save_top_k: 4}", "train.num_epochs=3")
    names = {f"epoch={epoch}-step={step}.ckpt": step for epoch, step in [(1, 13), (1, 18), (2, 22), (2, 27)]}
    assert {path.name for path in fitted.folder.glob("*.ckpt")} == {"last.ckpt", *names}
    for name, step in names.items():
        assert torch.load(fitted.folder / name, weights_only=True)["global_step"] == step


PARTS = [
    "train.num_epochs=3",
    "train.val_every_n_epoch=0.5",
    "train.checkpoint={every_n_epochs: 0.5, monitor: val_loss, save_top_k: 2}",
    "model.network={type: own.Dropout}",
    "model.optimizer.params.lr=0.4",  # too much: the best are not the last
]


def kept_of(folder: Path) -> list[dict]:
    """What a run's last checkpoint knows of the best."""
    states = torch.load(folder / "last.ckpt", weights_only=True)["callbacks"].values()
    return next(state["kept"] for state in states if "kept" in state)


@pytest.fixture(scope="module")
def parts(train):
    """Three epochs of nine batches, validated and saved at each half."""
    return train(*PARTS)


def test_a_checkpoint_of_a_fraction_is_judged_by_the_validation_of_that_moment(parts, tracked):
    """Validated and saved at each half of an epoch: the best two are kept, each with the weights of its step."""
    points = [(step + 1, value) for step, value in tracked(parts.folder).series()["val_loss"]]
    assert [step for step, _ in points] == [4, 9, 13, 18, 22, 27]
    (first, best), (second, _) = sorted(points, key=lambda point: point[1])[:2]
    score = json.loads((parts.folder / "best.json").read_text())
    assert (score["step"], score["value"]) == (first, pytest.approx(best))
    names = {"best.ckpt": first, f"epoch={(second - 1) // 9}-step={second}.ckpt": second, "last.ckpt": 27}
    assert {path.name for path in parts.folder.glob("*.ckpt")} == set(names)
    for name, step in names.items():
        assert torch.load(parts.folder / name, weights_only=True)["global_step"] == step
    assert {first, second} & {4, 13, 22}


@pytest.mark.parametrize("validating", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_run_killed_inside_an_epoch_keeps_the_same_checkpoints(validating, parts, train, tracked):
    """Killed in a validation inside an epoch, or right behind it, and resumed: as an uninterrupted run."""
    settings = [*PARTS, f"logger.params.experiment_name=killed-{validating}"]
    params = f"{{epoch: 1, batch: 4, validating: {validating}}}"
    train(*settings, f"train.callbacks=[{{type: own.Killed, params: {params}}}]", code=-signal.SIGKILL)
    resumed = train(*settings, "train.resume_ckpt=auto").folder
    expected, found = ({path.name: digest(path) for path in f.glob("*.ckpt")} for f in (parts.folder, resumed))
    assert found == expected
    assert kept_of(resumed) == kept_of(parts.folder)
    assert tracked(resumed).series() == tracked(parts.folder).series()


def test_a_checkpoint_that_nothing_judged_is_the_last_alone(fit):
    """Of halves that no validation judged, only `last.ckpt` stays; the best is the end of the first epoch."""
    fitted = fit("train.checkpoint={every_n_epochs: 0.5, monitor: val_acc, save_top_k: 2}", "train.max_steps=13")
    steps = {p.name: torch.load(p, weights_only=True)["global_step"] for p in fitted.folder.glob("*.ckpt")}
    assert steps == {"last.ckpt": 13, "best.ckpt": 9}


@pytest.mark.slow
def test_a_checkpoint_of_a_fraction_is_judged_by_the_training_of_that_moment(train, tracked):
    """`monitor: train_loss`: each half is judged by the step that it ends with, also in a run that is resumed."""
    checkpoint = "train.checkpoint={every_n_epochs: 0.5, monitor: train_loss, save_top_k: 2}"
    settings = [*PARTS, "train.val_every_n_epoch=1", checkpoint, "logger.log_every_n_steps=50"]
    whole = train(*settings).folder
    points = dict(tracked(whole).series()["train_loss"])
    assert list(points) == [0, 3, 8, 12, 17, 21, 26]
    del points[0]
    best = sorted(points, key=lambda step: points[step])[:2]
    assert [entry["step"] for entry in kept_of(whole)] == [step + 1 for step in best]
    killed = [*settings, "logger.params.experiment_name=killed-by-training"]
    train(*killed, "train.callbacks=[{type: own.Killed, params: {epoch: 1, batch: 5}}]", code=-signal.SIGKILL)
    resumed = train(*killed, "train.resume_ckpt=auto").folder
    assert kept_of(resumed) == kept_of(whole)
    assert {path.name for path in resumed.glob("*.ckpt")} == {path.name for path in whole.glob("*.ckpt")}


# ---- a task without validation data, a training without batches


def test_training_data_serve_where_there_are_no_validation_data(train, tiny):
    """A data module whose `val_dataloader` gives an empty list trains, and its bundle is proved on training data."""
    own = "from deeplightning.data.digits import Digits\n\n\nclass NoValidation(Digits):\n"
    (tiny.parent / "own_data.py").write_text(f"{own}    def val_dataloader(self):\n        return []\n")
    outcome = train("data.module.type=own_data.NoValidation", "train.num_epochs=1", "train.export=true")
    folder = RunFolder(outcome.folder)
    assert folder.bundle_card.is_file()
    assert len(np.load(folder.samples)["images"]) == 16


@pytest.mark.parametrize("nothing", ["0", "0.0"])
def test_a_training_without_batches_is_refused(nothing, tiny):
    """`train.limit_batches.train=0` is a fault of the config; validation may be left out so."""
    report = examine(tiny, [f"train.limit_batches={{train: {nothing}}}"])
    assert set(faults(report)) == {"train.limit_batches.train"}
    assert report.exit_code == 2
    assert examine(tiny, ["train.limit_batches={val: 0}"]).faults == []


# ---- a finished run that is resumed elsewhere


def test_a_copy_of_a_finished_checkpoint_leaves_nothing_to_do(judged, train, store, tmp_path):
    """Resuming from it says that nothing is to be done, and makes no run; with more epochs it trains on."""
    shutil.copy(judged.folder / "last.ckpt", tmp_path / "last.ckpt")
    before = sorted(store.glob("*/*"))
    asked = ["train.num_epochs=4", f"train.resume_ckpt={tmp_path / 'last.ckpt'}"]
    outcome = train(*asked)
    assert "nothing to do" in outcome.err
    assert "it has seen 4 epochs, and train.num_epochs is 4" in outcome.err
    assert "Artifact storage path" not in outcome.out
    assert sorted(store.glob("*/*")) == before
    assert train(*asked, "train.num_epochs=5").folder.is_dir()


def test_a_copy_of_a_finished_checkpoint_is_tested_alone(judged, train, tracked, tmp_path):
    """With a stage behind the training only that stage runs, as output, log and a tag of the new run say."""
    shutil.copy(judged.folder / "last.ckpt", tmp_path / "last.ckpt")
    resumed = f"train.resume_ckpt={tmp_path / 'last.ckpt'}"
    outcome = train("stages=[train,test]", "train.num_epochs=4", resumed)
    said = "training   has finished: it has seen 4 epochs, and train.num_epochs is 4; only test will run"
    assert said in outcome.out
    assert said in (outcome.folder / "logs" / "rank_0.log").read_text()
    run = tracked(outcome.folder)
    assert run.tags["training"] == "none: it has seen 4 epochs, and train.num_epochs is 4"
    assert {name.partition("_")[0] for name in run.series()} == {"test"}
    assert digest(outcome.folder / "last.ckpt") == digest(tmp_path / "last.ckpt")


# ---- what a search leaves among the runs


SEARCH = """{metric: val_acc, name: left, num_trials: 3, sampler: {type: optuna.samplers.GridSampler},
  pruner: {type: optuna.pruners.ThresholdPruner, params: {lower: 0.2}},
  space: {model.optimizer.params.lr: {choice: [0.000001, 0.02, 0.1]}}}"""


def listed(store: Path, *overrides: str) -> dict[str, list[str]]:
    """The columns of the runs of a store by id."""
    return {row["id"]: list(row.values()) for row in listing(str(store), *overrides)}


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("deeplightning_tune"), reason=not_installed("tune"))
def test_a_finished_search_leaves_nothing_to_clean_and_shows_its_best(command, tiny, place, tmp_path):
    """Pruned trials are shown, and not offered for removal; the search's run has the best trial's metric."""
    store = tmp_path / "mlruns"
    words = ("tune", tiny, f"tune={SEARCH}", f"logger.params.tracking_uri={store}")
    searched = command(*words, cwd=place, code=0)
    rows = csv_rows(searched.folder / "trials.csv")
    assert sorted(row["state"] for row in rows) == ["finished", "finished", "pruned"]
    best = max(float(row["val_acc"]) for row in rows if row["state"] == "finished")
    runs = listed(store)
    assert sorted(run[1] for run in runs.values()) == ["FINISHED"] * 3 + ["PRUNED"]
    assert f"val_acc {best:.4f}" in runs[searched.folder.parent.name]
    shown = command("runs", "--tracking-uri", store, "--clean", cwd=place)
    assert (shown.out, shown.err) == ("", "0 runs would be removed, with all files; --delete removes them\n")

    killed = "train.callbacks=[{type: own.Killed, params: {epoch: 0, batch: 0}}]"
    failed = command(*words, "tune.name=killed", "tune.num_trials=1", killed, cwd=place, code=5)
    assert set(listed(store)) == {*runs, failed.folder.parent.name}
