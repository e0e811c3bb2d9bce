"""A launch of `train`: its stages together and alone, each way to end, several processes, overfitting and fast runs."""

import json
import re
import signal

import pytest
import torch
from conftest import OWN, digest, weights
from tiny import csv_rows

from deeplightning.config.examine import load_config
from deeplightning.run.assemble import init_module
from deeplightning.runfolder import RunFolder

BEST = "train.checkpoint={monitor: val_acc, mode: min}"  # so that the first of two epochs is best
CHECKPOINTS = ["last.ckpt", "best.ckpt", ""]
STAGES = ["stages=[train,validate,test,predict]", "logger.pictures={}", "train.export=true"]
STAGES += ["data.num_splits=9", "data.fold=8"]  # 133 train (the last step has 3 + 2), 17 validate, 150 test
FAULT = 'raise KeyError("a fault of the user\'s")'


@pytest.fixture(scope="module")
def trained(train):
    """A run of two epochs with a best checkpoint."""
    return train(BEST)


@pytest.fixture(scope="module")
def uninterrupted(train):
    """An uninterrupted run of two epochs."""
    return train()


def count_runs(store):
    return len(list(store.glob("*/*/artifacts")))


def test_the_same_config_gives_the_same_bits_however_it_is_loaded_and_watched(train, trained, tracked):
    """Metric series and weights are identical with two loader workers, from disk, and with figures."""
    loaded = ["data.num_workers=2", "data.module.params.in_memory=false"]
    again = train(BEST, *loaded, "logger.pictures={every_n_epochs: 1}", "engine.deterministic=true")
    assert digest(again.folder / "last.ckpt") == digest(trained.folder / "last.ckpt")
    assert tracked(again.folder).series() == tracked(trained.folder).series()


def test_another_seed_gives_another_run_and_none_is_drawn_and_recorded(train, trained):
    """`seed: null` draws a seed and records it in `cfg.yaml`; a run with that seed is the same."""
    drawn = train("seed=null", "train.num_epochs=1")
    assert "seed: null → " in drawn.out
    assert digest(drawn.folder / "last.ckpt") != digest(trained.folder / "last.ckpt")
    seed = drawn.out.partition("seed: null → ")[2].split()[0]
    assert f"seed: {seed}\n" in (drawn.folder / "cfg.yaml").read_text()
    again = train(f"seed={seed}", "train.num_epochs=1")
    assert digest(again.folder / "last.ckpt") == digest(drawn.folder / "last.ckpt")


def test_all_stages_follow_a_training_in_the_same_run(train, tracked, store):
    """validate, test and predict after train use the best weights and write into the one run."""
    before = count_runs(store)
    done = train("stages=[train,validate,test,predict]", "train.checkpoint={monitor: val_acc, mode: max}")
    assert count_runs(store) == before + 1
    folder = RunFolder(done.folder)
    best = json.loads(folder.best_score.read_text())
    assert json.loads(folder.results("validate").read_text())["val_acc"] == best["value"]
    assert [int(row["index"]) for row in csv_rows(folder.predictions)] == list(range(150))
    assert len(csv_rows(folder.stage_predictions("validate"))) == 16
    tested, predicted = csv_rows(folder.stage_predictions("test")), csv_rows(folder.predictions)
    assert [r["predicted_class"] for r in tested] == [r["predicted_class"] for r in predicted]
    run = tracked(done.folder)
    assert run.metrics["test_acc"] == json.loads(folder.results("test").read_text())["test_acc"]
    assert run.status == "FINISHED"
    assert run.tags["mlflow.runName"] == f"{run.tags['network']}-{run.tags['data']}-{run.id[:4]}"
    assert run.tags["engine"] == "CPU, fp32"
    assert f"deeplightning serve {done.folder}" in run.tags["mlflow.note.content"]
    (used,) = run.client.get_run(run.id).inputs.dataset_inputs
    assert (used.dataset.name, len(used.dataset.digest)) == (run.tags["data"], 16)


@pytest.mark.slow
def test_a_stage_alone_uses_the_weights_that_are_named(train, trained, tmp_path):
    """`stages=[test]` takes a path, a run, or the best or last of the newest run as `test.ckpt`, and trains nothing."""
    files = [RunFolder(train("stages=[test]", f"test.ckpt='{trained.folder / name}'").folder) for name in CHECKPOINTS]
    last, best, of_run = ((f.results("test").read_text(), f.stage_predictions("test").read_text()) for f in files)
    assert not files[0].last.exists()
    assert of_run == best
    assert last != best
    elsewhere = [f"logger.params.tracking_uri={tmp_path / 'mlruns'}"]
    train(*elsewhere, BEST)
    for name, expected in (("last", last), ("best", best)):
        folder = RunFolder(train("stages=[test]", f"test.ckpt={name}", *elsewhere).folder)
        assert (folder.results("test").read_text(), folder.stage_predictions("test").read_text()) == expected


def test_validate_and_predict_alone(train, trained):
    """They write their results and no checkpoint."""
    done = train("stages=[validate,predict]", f"test.ckpt='{trained.folder}'")
    assert {path.name for path in done.folder.iterdir()} == {
        *("cfg.yaml", "environment.json", "code.zip", "metrics.jsonl", ".metrics.sent", "places.json"),
        *("logs", "val_results.json", "val_predictions.csv", "predictions.csv"),
    }
    best = json.loads((trained.folder / "best.json").read_text())
    assert json.loads((done.folder / "val_results.json").read_text())["val_acc"] == best["value"]


@pytest.mark.parametrize(
    ("ckpt", "named"), [("null", "test.ckpt"), ("/nowhere/at/all.ckpt", "/nowhere/at/all.ckpt"), ("nosuch", "nosuch")]
)
def test_a_stage_without_weights_ends_with_exit_4_and_no_run(ckpt, named, train, store):
    """A missing checkpoint or run is named before a run begins."""
    before = count_runs(store)
    refused = train("stages=[test]", f"test.ckpt={ckpt}", code=4)
    assert "Traceback" not in refused.err
    assert named in refused.err
    assert count_runs(store) == before


def test_zero_epochs_validate_and_test_the_initial_weights(train, tracked):
    """`num_epochs: 0` runs the validation and the stages after training; nothing is trained or saved."""
    done = train("train.num_epochs=0", "stages=[train, test]")
    metrics = set(tracked(done.folder).metrics)
    assert {name for name in metrics if not name.startswith("test_")} == {"val_acc", "val_loss"}
    assert "test_acc" in metrics
    assert not (done.folder / "last.ckpt").exists()


def test_test_and_predict_of_a_run_write_into_it_and_leave_its_config(command, place, trained, tracked, store):
    """`deeplightning test RUN` and `predict RUN` finish the same run again, and append to its log; an equal metric gets
    no second point."""
    config, before = (trained.folder / "cfg.yaml").read_bytes(), count_runs(store)
    log = trained.folder / "logs" / "rank_0.log"
    former = log.read_text()
    for verb in ("test", "predict"):
        assert command(verb, trained.folder, cwd=place, code=0).folder == trained.folder
    assert (trained.folder / "cfg.yaml").read_bytes() == config
    assert log.read_text().startswith(former)
    assert "results    test_acc" in log.read_text()[len(former) :]
    assert count_runs(store) == before
    run = tracked(trained.folder)
    assert run.status == "FINISHED"
    assert run.metrics["test_acc"] == json.loads((trained.folder / "test_results.json").read_text())["test_acc"]
    assert len(csv_rows(trained.folder / "predictions.csv")) == 150
    assert [len(run.series()[name]) for name in ("test_acc", "test_loss")] == [1, 1]


@pytest.mark.parametrize(
    ("override", "note", "reason", "shows_calls"),
    [
        (
            "model.module.type=own.Raises",
            rf"error: own\.py:{1 + OWN.splitlines().index(12 * ' ' + FAULT)}: KeyError: \"a fault of the user's\"",
            "a fault of the user's",
            True,
        ),
        ("model.optimizer.params.lr=1e20", "error: .*train_loss is .* at step .*", "train_loss is", False),
    ],
    ids=["user code", "loss of NaN"],
)
def test_a_fault_fails_the_run_with_its_reason(override, note, reason, shows_calls, train, tracked):
    """An error in user code, with its traceback, and a loss that is NaN end with 5; there is no `best.ckpt`."""
    failed = train(override, "train.checkpoint.monitor=val_loss", code=5)
    assert re.fullmatch(note, failed.err.splitlines()[-1])
    assert ("Traceback" in failed.err) == shows_calls
    run = tracked(failed.folder)
    assert run.status == "FAILED"
    assert reason in run.tags["failure"]
    assert not (failed.folder / "best.ckpt").exists()


def test_a_fault_before_the_run_leaves_none(train, store, tmp_path):
    """Missing data end with exit code 3 before a run is opened."""
    before = count_runs(store)
    failed = train("data.module={type: deeplightning.data.mnist.MNIST}", f"data.root={tmp_path}", code=3)
    assert str(tmp_path) in failed.err
    assert "Artifact storage path" not in failed.out
    assert count_runs(store) == before


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_the_run_politely_and_it_goes_on_bit_for_bit(
    number, code, command, tiny, place, train, uninterrupted, tracked, tmp_path
):
    """The batch is finished, `last.ckpt` saved, the run KILLED; the resumed run ends like an uninterrupted one."""
    go = tmp_path / "go"
    waits = f"train.callbacks=[{{type: own.Waits, params: {{until: '{go}'}}}}]"
    running = command.start("train", tiny, waits, cwd=place)
    running.says("waits")
    running.signal(number)
    go.touch()
    killed = running.end(code=code)
    assert "Traceback" not in killed.err
    run = tracked(killed.folder)
    assert (run.status, run.tags["failure"]) == ("KILLED", f"Interrupted: interrupted by {signal.Signals(number).name}")
    resumed = train(f"train.resume_ckpt='{killed.folder / 'last.ckpt'}'")
    assert digest(resumed.folder / "last.ckpt") == digest(uninterrupted.folder / "last.ckpt")
    assert resumed.folder == killed.folder
    assert tracked(resumed.folder).series() == tracked(uninterrupted.folder).series()
    assert tracked(resumed.folder).status == "FINISHED"


def test_a_second_signal_ends_at_once(command, tiny, place, tracked, tmp_path):
    """The first signal waits for the end of the batch, the second does not; the run is KILLED."""
    waits = f"train.callbacks=[{{type: own.Waits, params: {{until: '{tmp_path / 'never'}'}}}}]"
    running = command.start("train", tiny, waits, cwd=place)
    running.says("waits")
    running.signal(signal.SIGINT)
    running.signal(signal.SIGTERM)
    killed = running.end()
    assert killed.code in (130, 143), killed
    assert tracked(killed.folder).status == "KILLED"
    assert (killed.folder / "last.ckpt").is_file()


def test_a_store_that_only_the_environment_names(train, tmp_path):
    """MLFLOW_TRACKING_URI is the default of `tracking_uri`, for a new run and for `resume_ckpt=auto`."""
    store, other = tmp_path / "the store", tmp_path / "other"
    variable = {"MLFLOW_TRACKING_URI": str(store)}
    done = train("train.num_epochs=1", "~logger.params.tracking_uri", **variable)
    assert done.folder.is_relative_to(store)
    more = train("train.num_epochs=2", "~logger.params.tracking_uri", "train.resume_ckpt=auto", **variable)
    assert more.folder == done.folder
    explicit = train("train.num_epochs=1", f"logger.params.tracking_uri='{other}'", **variable)
    assert explicit.folder.is_relative_to(other)


def test_another_logger_takes_the_run_whole(train, tmp_path):
    """With Lightning's CSVLogger as the main logger, its folder is the run's folder and has all files."""
    logger = f"logger={{type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{tmp_path}'}}, pictures: {{}}}}"
    done = train("~logger", logger, "stages=[train,test]", "train.export=true")
    assert "not empty" not in done.err  # Lightning's warning of files in its folder
    assert done.folder == tmp_path / "lightning_logs" / "version_0"
    names = {path.name for path in done.folder.iterdir()}
    assert {"cfg.yaml", "last.ckpt", "metrics.csv", "test_results.json", "bundle", "val_confusion_matrix.png"} <= names
    found = csv_rows(done.folder / "metrics.csv")
    assert next(row["step"] for row in found if row["train_loss"]) == "0"
    assert len([row for row in found if row["val_acc"]]) == 2


def test_lightnings_mlflow_logger_and_an_extra_logger(train, tracked, store, tmp_path):
    """Lightning's MLFlowLogger creates one run like ours; an extra logger gets the same values."""
    extra = f"logger.extra=[{{type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{tmp_path}'}}}}]"
    named = f"logger={{type: pytorch_lightning.loggers.MLFlowLogger, params: {{tracking_uri: '{store}'}}}}"
    before = count_runs(store)
    done = train("~logger", named, "logger.log_every_n_steps=4", extra, "stages=[train,test]")
    assert count_runs(store) == before + 1
    run = tracked(done.folder)
    assert run.status == "FINISHED"
    assert run.params["model/optimizer/params/lr"] == "0.05"
    assert [step for step, _ in run.series()["train_loss"]] == [0, 4, 8, 12, 16]
    found = csv_rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    assert [int(row["step"]) for row in found if row["train_loss"]] == [0, 4, 8, 12, 16]
    assert (done.folder / "last.ckpt").is_file()


@pytest.fixture(scope="module")
def two(job):
    """A run of two processes with 8 samples a step each."""
    return job("engine.backend=ddp", "data.batch_size=8", *STAGES)


@pytest.fixture(scope="module")
def one(train):
    """A run of one process with 16 samples a step."""
    return train(*STAGES)


def test_two_processes_are_one_run_with_a_log_each(two, tracked, store):
    """Two processes give one tracked run and two log files with loss lines; only rank 0 prints."""
    assert tracked(two.folder).status == "FINISHED"
    for rank in (0, 1):
        assert "first loss" in (two.folder / "logs" / f"rank_{rank}.log").read_text()
    assert [rank.out.count("first loss") for rank in two.ranks] == [1, 0]
    assert "16 samples a step: 8 per process x 2 processes" in two.out
    assert (two.folder / "bundle" / "bundle.json").is_file()
    assert (two.folder / "val_confusion_matrix.png").is_file()


def test_two_processes_learn_like_one_with_twice_the_batch(two, one, tracked):
    """Each step uses the same samples, so weights and losses agree within rounding."""
    ours, theirs = weights(two.folder / "last.ckpt"), weights(one.folder / "last.ckpt")
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 1e-5
    series, expected = tracked(two.folder).series(), tracked(one.folder).series()
    assert set(series) == set(expected)
    for name, points in expected.items():
        assert [step for step, _ in series[name]] == [step for step, _ in points]
        assert [value for _, value in series[name]] == pytest.approx([value for _, value in points], abs=1e-5), name


def test_a_process_without_validation_samples_holds_nobody_up(job):
    """Two processes with one validation sample both end, with figures."""
    few = ("data.module.params.limit=10", "data.num_splits=10", "data.batch_size=4", "train.num_epochs=1")
    outcome = job("logger.pictures={}", *few)
    assert "9 training, 1 validation samples" in outcome.out
    assert (outcome.folder / "val_confusion_matrix.png").is_file()


def test_overfit_trains_and_validates_on_the_same_batches(train, tmp_path):
    """`train.overfit: 2` uses the first two batches of the training set in each epoch and each validation."""
    writes = f"train.callbacks=[{{type: own.Batches, params: {{file: '{tmp_path / 'seen.pt'}'}}}}]"

    def seen(*overrides):
        run = train(*overrides, writes)
        return run, {s: [i.tolist() for i in found] for s, found in torch.load(tmp_path / "seen.pt").items()}

    run, found = seen("train.overfit=2", "train.num_epochs=3")
    first = seen("train.max_steps=2")[1]["train"]
    assert found == {"train": first * 3, "val": first * 3}
    assert first[0] != first[1]
    assert "overfit    2 batches of the training set, for training and validation" in run.out


def test_overfit_keeps_batches_of_several_loaders_and_of_a_module_with_its_own(tmp_path, monkeypatch):
    """It keeps batches of a dict of loaders, a CombinedLoader or one loader, as Lightning combines them; the task's own
    loaders count as data."""
    (tmp_path / "loaders_of_mine.py").write_text(
        "import pytorch_lightning as pl\nfrom pytorch_lightning.utilities import CombinedLoader\n"
        "from torch.utils.data import DataLoader\n\n\nclass Own(pl.LightningModule):\n"
        "    def __init__(self, kind: str):\n        super().__init__()\n        self.kind = kind\n\n"
        "    def train_dataloader(self):\n"
        "        both = {'a': DataLoader(range(6), batch_size=2), 'b': DataLoader(range(3), batch_size=3)}\n"
        "        return {'dict': both, 'combined': CombinedLoader(both, 'min_size'), 'one': both['a']}[self.kind]\n"
    )
    monkeypatch.chdir(tmp_path)
    found = {}
    for kind in ("dict", "combined", "one"):
        module = {"type": "loaders_of_mine.Own", "params": {"kind": kind}}
        cfg = load_config({"model": {"module": module}, "train": {"num_epochs": 1, "overfit": 2}})
        task = init_module(cfg, "model")
        assert task.train_dataloader() is task.val_dataloader()
        found[kind] = str([*task.train_dataloader()]).replace("tensor", "")
    assert found["dict"] == "[{'a': ([0, 1]), 'b': ([0, 1, 2])}, {'a': ([2, 3]), 'b': ([0, 1, 2])}]"
    assert found["combined"] == "[{'a': ([0, 1]), 'b': ([0, 1, 2])}]"
    assert found["one"] == "[([0, 1]), ([2, 3])]"


def test_an_overfitted_run_resumes_bit_for_bit(train):
    """It resumes inside an epoch of three batches and ends like an uninterrupted run."""
    settings = ["train.overfit=3", "train.num_epochs=4", "model.network={type: own.Dropout}"]
    half = train(*settings, "train.max_steps=5")
    resumed = train(*settings, f"train.resume_ckpt='{half.folder}'")
    assert "will not end bit for bit" not in resumed.err
    assert digest(resumed.folder / "last.ckpt") == digest(train(*settings).folder / "last.ckpt")


def test_overfit_takes_what_there_is_and_shares_it_out(job):
    """If the set has fewer batches than requested, all are used; under ddp each process uses its share."""
    run = job("train.overfit=20", "train.num_epochs=1", "engine.backend=ddp")
    assert "overfit    5 batches of the training set, which has no more" in run.out


def test_a_fast_run_tries_each_stage_and_keeps_no_weights(train, tracked):
    """`train.fast` runs one batch of training, validation and test, whatever lengths the config has. The run is tagged
    `fast`, and has metrics and predictions but neither a checkpoint nor a bundle."""
    schedule = "{type: torch.optim.lr_scheduler.OneCycleLR, params: {max_lr: 0.1, total_steps: auto}, "
    settings = [f"model.scheduler={schedule}call: {{interval: step}}}}", "train.accumulator_factor=4"]
    settings += ["train.val_every_n_epoch=2", "train.checkpoint.monitor=val_acc", "train.export=true"]
    run = train("train.fast=true", "stages=[train, test]", *settings)
    assert list(run.folder.rglob("*.ckpt")) == []
    assert not (run.folder / "bundle").exists()
    assert not (run.folder / "best.json").exists()
    found = tracked(run.folder)
    assert (found.status, found.tags["fast"]) == ("FINISHED", "true")
    assert {"train_loss", "val_acc", "test_acc"} <= found.metrics.keys()
    assert "fast       one batch of each stage; no checkpoint and no bundle is written" in run.out
    assert "; 1 step" in run.out
    assert len((run.folder / "test_predictions.csv").read_text().splitlines()) == 17


@pytest.mark.slow
def test_a_test_of_a_run_that_still_trains_leaves_its_status(train, command, place, tracked):
    """Results of a run that a process still trains go to a new run."""
    run = train("train.num_epochs=1")
    lock = RunFolder(run.folder).lock()  # as the training holds it
    tested = command("test", str(run.folder), cwd=place, code=0)
    lock.release()
    assert tested.folder != run.folder
    assert tracked(tested.folder).status == "FINISHED"


def test_overfit_gives_hooks_a_batch_of_their_own_to_change(tmp_path, monkeypatch):
    """What a hook writes into a batch is gone at its next reading."""
    (tmp_path / "changed_by_hooks.py").write_text(
        "import pytorch_lightning as pl\nfrom torch.utils.data import DataLoader\n\n\n"
        "class Own(pl.LightningModule):\n    def train_dataloader(self):\n"
        "        return DataLoader([{'x': 1.0}, {'x': 2.0}])\n"
    )
    monkeypatch.chdir(tmp_path)
    module = {"type": "changed_by_hooks.Own"}
    task = init_module(load_config({"model": {"module": module}, "train": {"num_epochs": 1, "overfit": 2}}), "model")
    for batch in task.train_dataloader():
        batch["x"] = batch["x"].sub_(9)
    assert [batch["x"].item() for batch in task.val_dataloader()] == [1.0, 2.0]


def test_a_fast_run_saves_nothing_by_a_callback_of_the_user(train, tmp_path):
    """A ModelCheckpoint of `train.callbacks` saves nothing, as under Lightning's `fast_dev_run`."""
    kept = f"{{type: ModelCheckpoint, params: {{dirpath: '{tmp_path / 'kept'}', save_last: true}}}}"
    assert train("train.fast=true", f"train.callbacks=[{kept}]")
    assert [*tmp_path.rglob("*.ckpt")] == []
