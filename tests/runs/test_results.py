"""No result is silently wrong: the best checkpoints, the learning rate, and the record of what ran."""

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
from pytorch_lightning.trainer.states import TrainerFn
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


def test_rows_of_several_loaders_can_be_told_apart(tmp_path):
    """They follow one another, with a column of the loader's number, which those of a single loader lack."""
    record = SimpleNamespace(folder=RunFolder(tmp_path), cfg=SimpleNamespace(logger=SimpleNamespace(pictures=None)))
    state = SimpleNamespace(fn=TrainerFn.PREDICTING)
    trainer = SimpleNamespace(state=state, world_size=1, is_global_zero=True, callback_metrics={})
    results = Results(record)
    for number, names in ((1, ["c", "d"]), (0, ["b", "a"])):
        results.on_predict_batch_end(trainer, None, {"index": torch.tensor([1, 0]), "name": names}, None, 0, number)
    results.on_predict_end(trainer, None)
    written = [{"dataloader_idx": f"{n}", "index": f"{i}", "name": name} for n, i, name in zip(
        (0, 0, 1, 1), (0, 1, 0, 1), "abdc", strict=True
    )]  # fmt: skip
    assert csv_rows(record.folder.predictions) == written
    results.on_predict_batch_end(trainer, None, {"index": torch.tensor([0]), "name": ["e"]}, None, 0)
    results.on_predict_end(trainer, None)
    assert csv_rows(record.folder.predictions) == [{"index": "0", "name": "e"}]
    own = {"index": torch.tensor([0]), "dataloader_idx": torch.tensor([0])}
    results.on_predict_batch_end(trainer, None, own, None, 0)
    results.on_predict_end(trainer, None)
    assert csv_rows(record.folder.predictions) == [{"index": "0", "dataloader_idx": "0"}]


# ---- the mode of a monitored metric


@pytest.mark.parametrize(("monitor", "mode"), [("val_acc", "max"), ("val_loss", "min")])
@pytest.mark.parametrize("importing", [False, True])
def test_the_mode_of_a_metric_is_found(monitor, mode, importing, tiny):
    """Each omitted `mode` follows from the name of the metric; `explain` shows why."""
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
    assert f"then null → {mode} (by the name {monitor})" in explain(report, "train.checkpoint.mode")
    assert f"mode: {mode}" in explain(report, "train.callbacks.0")


def test_a_metric_whose_name_implies_no_mode_needs_one(tiny):
    """If the name of a metric implies no mode, `check` and `train` require one for each key."""
    metric = "model.metrics.steps={type: torchmetrics.MeanMetric}"
    overrides = [metric, "train.checkpoint.monitor=val_steps", "train.early_stop={metric: val_steps}"]
    for importing in (False, True):
        report = examine(tiny, overrides, importing=importing)
        assert set(faults(report)) == {"train.checkpoint.mode", "train.early_stop.mode"}
        assert "set `mode: max` or `mode: min`" in report.faults[0].message
        assert report.exit_code == 2
    cfg = examine(tiny, [*overrides, "train.checkpoint.mode=max", "train.early_stop.mode=min"]).checked()
    assert (cfg.train.checkpoint.mode, cfg.train.early_stop.mode) == ("max", "min")


@pytest.fixture(scope="module")
def judged(train):
    """A run that monitors its accuracy without a mode."""
    return train("train.num_epochs=4", "train.checkpoint.monitor=val_acc", "train.early_stop={metric: val_acc}")


def test_the_best_weights_are_those_of_the_highest_accuracy(judged, tracked):
    """The mode of a monitored accuracy is `max` by default, for the best epoch and early stopping, and in cfg.yaml."""
    folder = judged.folder
    values = [value for _, value in tracked(folder).series()["val_acc"]]
    assert len(values) == 4
    assert json.loads((folder / "best.json").read_text())["value"] == pytest.approx(max(values))
    assert max(values) > min(values)
    saved = yaml.safe_load((folder / "cfg.yaml").read_text())["train"]
    assert (saved["checkpoint"]["mode"], saved["early_stop"]["mode"]) == ("max", "max")


def test_results_are_on_the_disk_whole_or_not_at_all(fit, monkeypatch):
    """Metrics and predictions are written to temporary files and renamed, so an interruption leaves no partial file."""
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


def test_the_index_of_each_sample_is_the_first_column(fit, monkeypatch):
    """`index` is the first column even if a task does not return it from `answers`."""
    done = fit("train.max_steps=1")
    monkeypatch.setattr(done.task, "answers", lambda batch, outputs: {"first": outputs[:, 0]})
    done.trainer.test(done.task, done.data)
    head, *rows = (done.folder / "test_predictions.csv").read_text().split()
    assert head == "index,first"
    assert [int(row.partition(",")[0]) for row in rows] == [*range(len(rows))] != []


class Answers(pl.LightningModule):
    """A user's module whose steps return values of the batch beside columns, as plain Lightning allows."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def test_step(self, batch, batch_idx):
        at = torch.arange(len(batch)) + 4 * batch_idx
        more = {"last": ["yes"] * len(batch)} if len(batch) < 4 else {}
        columns = {"index": at, "value": batch[:, 0], **more}
        return {"loss": batch.mean(), "batch": batch_idx, "names": ("a", "b"), **columns}

    def predict_step(self, batch, batch_idx):
        return {"index": batch_idx, "value": batch}


def test_only_columns_of_a_users_step_are_written_and_a_step_without_any_is_logged(tmp_path, caplog):
    """Only tensors and lists with a row per sample become columns; a step without any is logged."""
    record = SimpleNamespace(folder=RunFolder(tmp_path), cfg=SimpleNamespace(logger=SimpleNamespace(pictures=None)))
    options = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False, "max_epochs": 1}
    trainer = pl.Trainer(callbacks=[Results(record)], **options)
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
    """An optimizer that takes `lr` is refused without it, by `check` and `train`; stages without training need none."""
    params = "max_iter: 4" if name == "LBFGS" else "weight_decay: 0"
    rateless = f"model.optimizer={{type: torch.optim.{name}, params: {{{params}}}}}"
    report = examine(tiny, [rateless], importing=importing)
    assert set(faults(report)) == {"model.optimizer.params.lr"}
    assert "the learning rate, which has no silent default" in report.faults[0].message
    assert report.exit_code == 2
    assert examine(tiny, [rateless, "model.optimizer.params.lr=0.1"], importing=importing).faults == []
    assert examine(tiny, [rateless, "stages=[test]", "test.ckpt=last"], importing=importing).faults == []


def test_each_of_several_optimizers_needs_a_learning_rate():
    """The error names the one that has none."""
    base, key = Path(__file__).parents[2] / "examples" / "dcgan" / "dcgan.yaml", "model.optimizer.generator.params.lr"
    assert set(faults(examine(base, [f"~{key}"]))) == {key}


# ---- requested and effective settings


def test_requested_and_effective_settings_are_both_recorded(train, tracked):
    """cfg.yaml has the effective settings; tags have the requested ones that differ."""
    requested = {"backend": "fairscale_fsdp", "precision": "amp", "gpus": "auto"}
    settings = [f"engine.{key}={value}" for key, value in requested.items()]
    folder = train(*settings, "train.num_epochs=1", CUDA_VISIBLE_DEVICES="").folder
    saved = yaml.safe_load((folder / "cfg.yaml").read_text())["engine"]
    assert [saved[key] for key in requested] == [None, "bf16-mixed", None]
    tags = {name: value for name, value in tracked(folder).tags.items() if name.startswith("asked.")}
    assert tags == {f"asked.engine.{key}": value for key, value in requested.items()}


# ---- checkpoints of fractions of an epoch


def test_without_a_metric_the_newest_are_kept(fit):
    """Without a metric, a run that saves twice an epoch keeps the latest `save_top_k` checkpoints and `last.ckpt`."""
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
    "model.optimizer.params.lr=0.4",  # too large, so that the best are not the last
]


def kept_of(folder: Path) -> list[dict]:
    """Return the best checkpoints that a run's last checkpoint records."""
    states = torch.load(folder / "last.ckpt", weights_only=True)["callbacks"].values()
    return next(state["kept"] for state in states if "kept" in state)


@pytest.fixture(scope="module")
def parts(train):
    """A run of three epochs of nine batches, validated and saved twice an epoch."""
    return train(*PARTS)


def test_a_checkpoint_of_a_fraction_is_judged_by_the_validation_of_that_moment(parts, tracked):
    """A run that validates and saves twice an epoch keeps the best two, each with the weights of its step."""
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
    """Killed in a validation inside an epoch, or right after it, and resumed, it ends like an uninterrupted run."""
    settings = [*PARTS, f"logger.params.experiment_name=killed-{validating}"]
    params = f"{{epoch: 1, batch: 4, validating: {validating}}}"
    train(*settings, f"train.callbacks=[{{type: own.Killed, params: {params}}}]", code=-signal.SIGKILL)
    resumed = train(*settings, "train.resume_ckpt=auto").folder
    expected, found = ({path.name: digest(path) for path in f.glob("*.ckpt")} for f in (parts.folder, resumed))
    assert found == expected
    assert kept_of(resumed) == kept_of(parts.folder)
    assert tracked(resumed).series() == tracked(parts.folder).series()


def test_a_checkpoint_that_nothing_judged_is_the_last_alone(fit):
    """A checkpoint without a validation is kept as `last.ckpt` only; the best is the end of the first epoch."""
    fitted = fit("train.checkpoint={every_n_epochs: 0.5, monitor: val_acc, save_top_k: 2}", "train.max_steps=13")
    steps = {p.name: torch.load(p, weights_only=True)["global_step"] for p in fitted.folder.glob("*.ckpt")}
    assert steps == {"last.ckpt": 13, "best.ckpt": 9}


@pytest.mark.slow
def test_a_checkpoint_of_a_fraction_is_judged_by_the_training_of_that_moment(train, tracked):
    """With `monitor: train_loss` each half is judged by its last step, also in a run that resumes."""
    checkpoint = "train.checkpoint={every_n_epochs: 0.5, monitor: train_loss, save_top_k: 2}"
    settings = [*PARTS, "train.val_every_n_epoch=1", checkpoint, "logger.log_every_n_steps=50"]
    uninterrupted = train(*settings).folder
    points = dict(tracked(uninterrupted).series()["train_loss"])
    assert list(points) == [0, 3, 8, 12, 17, 21, 26]
    del points[0]
    best = sorted(points, key=lambda step: points[step])[:2]
    assert [entry["step"] for entry in kept_of(uninterrupted)] == [step + 1 for step in best]
    killed = [*settings, "logger.params.experiment_name=killed-by-training"]
    train(*killed, "train.callbacks=[{type: own.Killed, params: {epoch: 1, batch: 5}}]", code=-signal.SIGKILL)
    resumed = train(*killed, "train.resume_ckpt=auto").folder
    assert kept_of(resumed) == kept_of(uninterrupted)
    assert {path.name for path in resumed.glob("*.ckpt")} == {path.name for path in uninterrupted.glob("*.ckpt")}


# ---- no validation data, no training batches


def test_a_bundle_is_verified_on_training_data_without_validation_data(train, tiny):
    """A data module whose `val_dataloader` gives an empty list trains, and exports with samples of the training set."""
    own = "from deeplightning.data.digits import Digits\n\n\nclass NoValidation(Digits):\n"
    (tiny.parent / "own_data.py").write_text(f"{own}    def val_dataloader(self):\n        return []\n")
    outcome = train("data.module.type=own_data.NoValidation", "train.num_epochs=1", "train.export=true")
    folder = RunFolder(outcome.folder)
    assert folder.bundle_card.is_file()
    assert len(np.load(folder.samples)["images"]) == 16


@pytest.mark.parametrize("nothing", ["0", "0.0"])
def test_a_training_without_batches_is_refused(nothing, tiny):
    """`train.limit_batches.train=0` is an error of the config; `val: 0` is allowed."""
    report = examine(tiny, [f"train.limit_batches={{train: {nothing}}}"])
    assert set(faults(report)) == {"train.limit_batches.train"}
    assert report.exit_code == 2
    assert examine(tiny, ["train.limit_batches={val: 0}"]).faults == []


# ---- a finished run that is resumed elsewhere


def test_a_copy_of_a_finished_checkpoint_leaves_nothing_to_do(judged, train, store, tmp_path):
    """Resuming from it reports that nothing is to be done, and creates no run; with more epochs it trains."""
    copy = shutil.copy(judged.folder / "last.ckpt", tmp_path / "last.ckpt")
    before = sorted(store.glob("*/*"))
    settings = ["train.num_epochs=4", f"train.resume_ckpt={copy}"]
    outcome = train(*settings)
    assert "nothing to do" in outcome.err
    assert "it has seen 4 epochs, and train.num_epochs is 4" in outcome.err
    assert "Artifact storage path" not in outcome.out
    assert sorted(store.glob("*/*")) == before
    assert train(*settings, "train.num_epochs=5").folder.is_dir()


def test_a_copy_of_a_finished_checkpoint_is_tested_alone(judged, train, tracked, tmp_path):
    """Only the stages after training run; output, log and a tag of the new run record it."""
    copy = shutil.copy(judged.folder / "last.ckpt", tmp_path / "last.ckpt")
    outcome = train("stages=[train,test]", "train.num_epochs=4", f"train.resume_ckpt={copy}")
    line = "training   has finished: it has seen 4 epochs, and train.num_epochs is 4; only test will run"
    assert line in outcome.out
    assert line in (outcome.folder / "logs" / "rank_0.log").read_text()
    run = tracked(outcome.folder)
    assert run.tags["training"] == "none: it has seen 4 epochs, and train.num_epochs is 4"
    assert {name.partition("_")[0] for name in run.series()} == {"test"}
    assert digest(outcome.folder / "last.ckpt") == digest(copy)


# ---- runs of a search


SEARCH = """{metric: val_acc, name: left, num_trials: 3, sampler: {type: optuna.samplers.GridSampler},
  pruner: {type: optuna.pruners.ThresholdPruner, params: {lower: 0.2}},
  space: {model.optimizer.params.lr: {choice: [0.000001, 0.02, 0.1]}}}"""


def listed(store: Path, *overrides: str) -> dict[str, list[str]]:
    """Return the columns of the runs of a store by id."""
    return {row["id"]: list(row.values()) for row in listing(str(store), *overrides)}


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("deeplightning_tune"), reason=not_installed("tune"))
def test_a_finished_search_leaves_nothing_to_clean_and_shows_its_best(command, tiny, place, tmp_path):
    """Pruned trials are listed, and `--clean` does not remove them; the run of the search has the best metric."""
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


def test_only_rank_0_receives_the_predictions(tmp_path, monkeypatch):
    """Another process sends its rows; each would otherwise have those of all in memory."""
    given = []
    monkeypatch.setattr(torch.distributed, "gather_object", lambda rows, shares: given.append((rows, shares)))
    results = Results(SimpleNamespace(folder=RunFolder(tmp_path)))
    results._rows = [{"index": 0}]
    state = SimpleNamespace(fn=SimpleNamespace(value="test"))
    results.on_test_end(SimpleNamespace(world_size=2, is_global_zero=False, state=state))
    assert given == [([{"index": 0}], None)]


def test_names_that_are_not_utf_8_are_written_escaped(tmp_path):
    """Names of files are bytes; that of one sample does not cost the rows of the others."""
    record = SimpleNamespace(folder=RunFolder(tmp_path), cfg=SimpleNamespace(logger=SimpleNamespace(pictures=None)))
    results = Results(record)
    trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.PREDICTING), world_size=1, is_global_zero=True)
    outputs = {"index": torch.tensor([0, 1]), "file": ["Gr\udcfcn.jpg", "rot.jpg"]}
    results.on_predict_batch_end(trainer, None, outputs, None, 0)
    results.on_predict_end(trainer, None)
    assert [row["file"] for row in csv_rows(tmp_path / "predictions.csv")] == ["Gr\\udcfcn.jpg", "rot.jpg"]
