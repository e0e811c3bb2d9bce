"""A resumed run ends like an uninterrupted one, bit for bit; a resume may name a checkpoint in several ways.

The network has dropout, the data are shuffled and augmented, the learning rate falls by steps: any lost random state,
position or counter changes the weights. `test_kill` shows the same for killed runs.
"""

import functools
import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import yaml
from conftest import digest, weights
from torchmetrics.classification import MulticlassAUROC

from deeplightning.callbacks.gathered import Gathered
from deeplightning.callbacks.loop_position import convert_counters
from deeplightning.engine.checkpoint_reading import read_checkpoint
from deeplightning.run.resume import resumption
from deeplightning.runfolder import RunFolder

IN_WORKERS = ["data.num_workers=2", "data.module.params.in_memory=false"]
PLAIN = ["model.network=null", "model.loss=null", "model.optimizer=null"]
RANDOM = [
    "model.network={type: own.Dropout}",
    "data.module.params.augment=[{type: deeplightning.data.augment.RandomCrop, params: {padding: 1}}]",
    "model.scheduler={type: torch.optim.lr_scheduler.StepLR, params: {step_size: 5}, call: {interval: step}}",
    "model.optimizer.groups=[{match: bias, weight_decay: 0.1}]",
    "train.num_epochs=4",
    "train.checkpoint.monitor=val_loss",
]
AUTO = "model.scheduler={type: torch.optim.lr_scheduler.OneCycleLR, params: {max_lr: 0.1, total_steps: auto}}"


@pytest.fixture(scope="module")
def reference(train):
    """An uninterrupted run of four epochs of nine batches."""
    return train(*RANDOM)


@pytest.fixture(scope="module")
def half(train):
    """A run of the first two of these epochs; tests resume from copies of its checkpoint."""
    return train(*RANDOM, "train.num_epochs=2")


@pytest.fixture
def interrupt(command, tiny, place, tmp_path):
    """`interrupt(settings)` ends a run by a signal in its second epoch, in a batch or while it validates."""

    def run(settings, validating=False, more="", number=signal.SIGINT):
        until = tmp_path / "until"
        params = f"{{until: '{until}', validating: {str(validating).lower()}}}"
        waits = f"train.callbacks=[{{type: own.Waits, params: {params}}}{more}]"
        running = command.start("train", tiny, *settings, waits, cwd=place)
        running.says("waits")
        running.signal(number)
        until.touch()
        return running.end(code=128 + number)

    return run


def assert_same_weights(one, other, names=("last.ckpt",)):
    assert [digest(one.folder / name) for name in names] == [digest(other.folder / name) for name in names]


def assert_ends_like(resumed, reference, tracked):
    """The last weights, the best weights and all tracked points are equal, and the run is FINISHED."""
    assert_same_weights(resumed, reference, ("last.ckpt", "best.ckpt"))
    assert tracked(resumed.folder).series() == tracked(reference.folder).series()
    assert tracked(resumed.folder).status == "FINISHED"


def test_a_run_resumed_at_an_epochs_edge_ends_bit_for_bit_like_an_uninterrupted_one(reference, train, tracked):
    """A run that is resumed by its folder stays one run, and keeps the config of each launch."""
    half = train(*RANDOM, "train.num_epochs=2")  # not the fixture, which must not change
    resumed = train(*RANDOM, f"train.resume_ckpt='{half.folder}'")
    assert resumed.folder == half.folder
    assert f"run        {half.folder.parent.name} continues" in resumed.out
    assert "will not end bit for bit" not in resumed.err
    assert_ends_like(resumed, reference, tracked)
    config, former = (yaml.safe_load((half.folder / name).read_text()) for name in ("cfg.yaml", "cfg.1.yaml"))
    assert (config["train"].pop("num_epochs"), former["train"].pop("num_epochs")) == (4, 2)
    assert config == former
    assert config["train"]["resume_ckpt"] is None


def test_a_checkpoint_that_was_copied_begins_a_run_of_its_own(half, reference, train, tracked, tmp_path):
    """The new run tracks the remaining points and names its origin in `cfg.yaml`; the other run stays unchanged."""
    before, files = tracked(half.folder).series(), sorted(half.folder.iterdir())
    copy = shutil.copyfile(half.folder / "last.ckpt", tmp_path / "copy.ckpt")
    resumed = train(*RANDOM, f"train.resume_ckpt='{copy}'")
    assert resumed.folder != half.folder
    assert "run        a new one: copy.ckpt is not a checkpoint's name in a run folder" in resumed.out
    assert_same_weights(resumed, reference)
    expected = tracked(reference.folder).series()
    assert tracked(resumed.folder).series() == {n: [p for p in expected[n] if p[0] >= 18] for n in expected}
    assert yaml.safe_load((resumed.folder / "cfg.yaml").read_text())["train"]["resume_ckpt"] == str(copy)
    assert (tracked(half.folder).series(), sorted(half.folder.iterdir())) == (before, files)


def test_a_run_resumed_inside_an_epoch_ends_bit_for_bit_like_an_uninterrupted_one(reference, train, tracked):
    """After a resume from step 23 of 36 the mean over that epoch includes the batches before it."""
    inside = train(*RANDOM, "train.max_steps=23")
    resumed = train(*RANDOM, f"train.resume_ckpt='{inside.folder / 'last.ckpt'}'")
    assert_same_weights(resumed, reference, ("last.ckpt", "best.ckpt"))
    series, expected = tracked(resumed.folder).series(), tracked(reference.folder).series()
    for name in ("train_loss_epoch", "train_acc_epoch"):  # the first launch ended with means over a part of an epoch
        assert [p for p in series.pop(name) if p[0] != 22] == [p for p in expected.pop(name) if p[0] != 22], name
    assert series == expected


@pytest.mark.parametrize(
    "validating", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in a batch", "while it validates"]
)
def test_a_users_metrics_of_an_epoch_count_the_batches_before_a_resume(validating, train, interrupt, tracked, tmp_path):
    """torchmetrics objects, a MetricCollection and `self.log` of a user's task end like in an uninterrupted run."""
    named = f"logger.params.experiment_name=measured-{validating}"
    settings = [*PLAIN, "model.module.type=own.Measured", "train.val_every_n_epoch=0.5", named]
    reference = train(*settings, f"{named}-reference")
    interrupt(settings, validating)
    if validating:  # a second time, before any batch
        (tmp_path / "until").unlink()
        interrupt([*settings, "train.resume_ckpt=auto"], validating)
    resumed = train(*settings, "train.resume_ckpt=auto")
    values, expected = (tracked(run.folder).series() for run in (resumed, reference))
    assert {"train_acc", "train_f1", "train_mean", "train_loss_epoch", "train_most", "train_sum"} <= expected.keys()
    assert values == expected


def test_gradients_that_wait_for_a_step_of_their_optimizer_are_kept_over_a_resume(train):
    """If a task steps an optimizer at every second of nine batches, the checkpoint has the gradients of the ninth."""
    settings = [*PLAIN, "model.module.type=own.TwoOptimizers", "train.checkpoint.monitor=null"]
    part = train(*settings, "train.num_epochs=1")
    kept = torch.load(part.folder / "last.ckpt", weights_only=True)["gradients"]
    assert set(kept) == {"body.weight", "body.bias"}
    resumed = train(*settings, f"train.resume_ckpt='{part.folder}'", "train.num_epochs=2")
    assert_same_weights(resumed, train(*settings, "train.num_epochs=2"))


@pytest.mark.slow
def test_a_process_that_ends_between_keeping_a_better_checkpoint_and_removing_the_worst_leaves_no_file(train, tmp_path):
    """A resume whose best is of epoch 3, with the last and the replaced checkpoint of epoch 2, removes the latter."""
    settings = [f"logger.params.tracking_uri={tmp_path / 'mlruns'}", "train.resume_ckpt=auto"]
    settings.append("train.checkpoint={monitor: val_loss, mode: min, save_top_k: 2}")
    folder = RunFolder(train(*settings, "train.num_epochs=2").folder)
    before = {path: path.read_bytes() for path in (folder.last, folder.checkpoint(0, 9))}
    kept = {"last.ckpt", "best.ckpt", "epoch=1-step=18.ckpt"}
    for repeated in (False, True):
        for path, content in before.items() if repeated else ():
            path.unlink(missing_ok=True)  # may be a hard link to another
            path.write_bytes(content)
        assert train(*settings, "train.num_epochs=3").folder == folder.path
        assert {path.name for path in folder.path.glob("*.ckpt")} == kept


def test_auto_last_and_best_are_of_the_newest_run(train, tmp_path):
    """`auto` starts a run or resumes the newest from its last checkpoint, `best` from its best; both search only the
    same experiment."""
    settings = [*RANDOM, f"logger.params.tracking_uri={tmp_path / 'mlruns'}", "train.num_epochs=1"]
    newest = train(*settings, "train.resume_ckpt=auto")
    assert "resumes    nothing" in newest.out
    for epochs, word, file in ((2, "auto", "last.ckpt"), (3, "last", "last.ckpt"), (3, "best", "best.ckpt")):
        resumed = train(*settings, f"train.num_epochs={epochs}", f"train.resume_ckpt={word}")
        assert f"resumes    {newest.folder / file}" in resumed.out
        assert resumed.folder == newest.folder
    other = "logger.params.experiment_name=Other"
    assert "no run of this experiment" in train(*settings, other, "train.resume_ckpt=last", code=4).err
    assert "resumes    nothing" in train(*settings, other, "train.resume_ckpt=auto").out


def test_a_run_that_was_done_does_nothing_more(train, tracked):
    """A finished run that is resumed reports it, and changes no file, point or status."""
    stop = "train.early_stop={metric: val_loss, patience: 1, delta: 100}"
    settings = [*RANDOM, stop, "train.export=true", "stages=[train,test]"]
    done = train(*settings)
    files = [done.folder / name for name in ("last.ckpt", "best.ckpt", "cfg.yaml", "bundle/bundle.json")]

    def state():
        run = tracked(done.folder)
        return [(path.stat().st_mtime_ns, path.stat().st_ino) for path in files], run.series(), run.status

    before = state()
    assert before[2] == "FINISHED"
    for setting in (f"train.resume_ckpt='{done.folder}'", "train.resume_ckpt=auto"):
        again = train(*settings, setting)
        assert "done       already: 2 epochs, 18 steps" in again.out
        assert again.folder == done.folder
        assert state() == before


@pytest.mark.slow
def test_a_run_that_has_more_epochs_than_are_asked_for_is_done(train, tmp_path):
    """A run stopped inside its third epoch and resumed with one epoch trains nothing, and its test runs."""
    settings = [*RANDOM, f"logger.params.tracking_uri={tmp_path / 'mlruns'}", "stages=[train,test]"]
    settings += ["train.checkpoint.every_n_steps=5"]
    done = train(*settings, "train.num_epochs=3", "train.max_steps=20")
    again = train(*settings, "train.num_epochs=1", f"train.resume_ckpt='{done.folder / 'last.ckpt'}'")
    assert "done       already: 2 epochs, 20 steps" in again.out
    assert again.folder == done.folder
    assert "results    test_" in again.out


def lightnings_own(folder, settings):
    """Return Lightning's ModelCheckpoint and EarlyStopping as items of `train.callbacks`."""
    kept = f"{{type: pytorch_lightning.callbacks.ModelCheckpoint, params: {{dirpath: '{folder}', {settings}}}}}"
    return f"{kept}, {{type: pytorch_lightning.callbacks.EarlyStopping, params: {{monitor: val_loss, patience: 5}}}}"


def states_in(folder):
    """Return the states of these two in the last checkpoint of a run, without the folder from the config."""
    states = torch.load(folder / "last.ckpt", weights_only=True)["callbacks"]
    named = {key.partition("{")[0]: state for key, state in states.items()}
    kept = {name: str(value).rpartition("/")[2] for name, value in named["ModelCheckpoint"].items()}
    return kept | {"dirpath": None}, named["EarlyStopping"]


def test_checkpoints_hold_the_states_of_callbacks_from_after_their_last_hook(train, tmp_path):
    """Lightning's ModelCheckpoint and EarlyStopping end with the states and files of an uninterrupted run."""

    def ends(name, epochs, *settings):
        own = lightnings_own(tmp_path / name, "monitor: val_loss, filename: '{epoch}'")
        at = f"logger.params.experiment_name=states-{name}"
        return train(f"train.callbacks=[{own}]", at, f"train.num_epochs={epochs}", *settings).folder

    reference = ends("reference", 3)
    kept, stop = states_in(ends("half", 2))
    assert kept["best_model_score"] == str(stop["best_score"])
    assert states_in(ends("half", 3, "train.resume_ckpt=auto")) == states_in(reference)
    files = [[path.name for path in (tmp_path / name).iterdir()] for name in ("half", "reference")]
    assert files[0] == files[1] == [states_in(reference)[0]["best_model_path"]]


def test_a_signal_ends_a_batch_when_all_callbacks_have_seen_it(interrupt, tmp_path):
    """The checkpoint that Ctrl-C saves inside an epoch has the ModelCheckpoint's state of the same step."""
    every = lightnings_own(tmp_path / "kept", "every_n_train_steps: 1, monitor: null")
    folder = interrupt(["logger.params.experiment_name=signalled"], more=f", {every}").folder
    assert states_in(folder)[0]["best_model_path"] == "epoch=1-step=12.ckpt"
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 12


def test_callbacks_that_act_when_an_epoch_begins_act_in_a_run_that_resumes_inside_one(train):
    """With Lightning's GradientAccumulationScheduler and StochasticWeightAveraging the weights are those of an
    uninterrupted run, and the last checkpoint has the averages."""
    kinds = {
        "GradientAccumulationScheduler": "{scheduling: {0: 1, 1: 3}}",
        "StochasticWeightAveraging": "{swa_lrs: 0.01, swa_epoch_start: 1}",
    }
    own = ", ".join(f"{{type: pytorch_lightning.callbacks.{name}, params: {params}}}" for name, params in kinds.items())

    def ends(name, *settings):
        at = f"logger.params.experiment_name=begins-{name}"
        return train(f"train.callbacks=[{own}]", at, "train.num_epochs=3", *settings).folder / "last.ckpt"

    reference = ends("reference")
    ends("half", "train.max_steps=10")
    assert digest(ends("half", "train.resume_ckpt=auto")) == digest(reference)
    saved = torch.load(reference, weights_only=True)
    averages = saved["callbacks"]["StochasticWeightAveraging"]["average_model_state"]
    assert all(torch.equal(averages[name], tensor) for name, tensor in saved["state_dict"].items())


@pytest.mark.parametrize(("engine", "ranks"), [("null", 1), pytest.param("fsdp", 2, marks=pytest.mark.slow)])
def test_a_fine_tuning_callback_that_is_resumed_ends_bit_for_bit_like_a_whole_run(engine, ranks, job):
    """Layers that Lightning's BaseFinetuning unfroze before a resume keep learning, and batch norm keeps its means."""
    settings = ["model.network={type: own.Normed}", "train.callbacks=[{type: own.Thaws}]", f"engine.backend={engine}"]
    settings += [f"logger.params.experiment_name=thaws-{engine}", "train.checkpoint.monitor=val_loss"]
    train = functools.partial(job, ranks=ranks)
    weights = []
    for epochs in (1, 2, 3):
        folder = train(*settings, f"train.num_epochs={epochs}", "train.resume_ckpt=auto").folder
        weights.append(read_checkpoint(folder / "last.ckpt")["state_dict"]["network.0.weight"])
    reference = train(*settings, "train.num_epochs=3", "logger.params.experiment_name=thaws-reference")
    assert digest(folder / "last.ckpt") == digest(reference.folder / "last.ckpt")
    assert not torch.equal(weights[1], weights[2])
    assert read_checkpoint(reference.folder / "last.ckpt")["frozen"] == []


def test_what_cannot_be_resumed_is_named(train, tmp_path, store, half):
    """A missing checkpoint, an unknown run, an empty store and another network end with exit code 4."""
    before = len(list(store.glob("*/*")))
    for name in (tmp_path / "no.ckpt", "nosuchrun", tmp_path / "nowhere"):
        refused = train(f"train.resume_ckpt='{name}'", code=4)
        assert str(name) in refused.err
        assert "Traceback" not in refused.err
    refused = train("train.resume_ckpt=last", f"logger.params.tracking_uri={tmp_path / 'none'}", code=4)
    assert "no run of this experiment in" in refused.err
    assert not (tmp_path / "none").exists()
    assert len(list(store.glob("*/*"))) == before
    copy = shutil.copyfile(half.folder / "last.ckpt", tmp_path / "copy.ckpt")
    refused = train(*RANDOM[1:], f"train.resume_ckpt='{copy}'", code=4)
    assert re.search(r"of another network: \d+ tensors differ: (network\S+ is \w+[^;]*; ){3}and \d+ more", refused.err)
    assert "Traceback" not in refused.err


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("data.batch_size=8", 2, "this schedule ends after 18 steps"),
        ("model.trainable=head", 4, "from another optimizer"),
    ],
    ids=["length of the schedule", "trainable parameters"],
)
def test_a_refused_resume_changes_no_file_of_the_run_or_of_its_store(change, code, words, train, tmp_path):
    """A resume that is refused when the checkpoint is restored leaves status, metrics and files byte for byte."""
    schedule = AUTO.replace("}}", "}, call: {interval: step}}")
    settings = [schedule, "train.num_epochs=2", f"logger.params.tracking_uri='{tmp_path}'"]
    train(*settings)

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = files()
    refused = train(*settings, "train.num_epochs=3", "train.resume_ckpt=auto", change, code=code)
    assert words in refused.err
    assert before == files()


def test_the_config_of_a_resumed_run_has_the_rate_that_is_used(half, train, tmp_path):
    """The checkpoint's optimizer and schedule are used and recorded; `model.init_from` uses the config's. One line
    before the first step, on stderr and in the log, names each changed setting that changes the result, with the
    reason."""
    copy = shutil.copyfile(half.folder / "last.ckpt", tmp_path / "copy.ckpt")
    settings = [*RANDOM, "model.optimizer.params={lr: 0.001, weight_decay: 0.5}", "train.num_epochs=3"]
    settings += ["model.optimizer.groups=[{match: bias, weight_decay: 0.3}]", "model.scheduler.params.step_size=1"]
    changed = ["data.batch_size=8", "engine.precision=64", "engine.threads=2"]
    resumed = train(*settings, *changed, f"train.resume_ckpt='{copy}'")
    assert "model.optimizer.params.lr is 0.05, not 0.001" in resumed.err
    (note,) = [line for line in resumed.err.splitlines() if "will not end bit for bit" in line]
    assert "engine precision 32 → 64 (numbers are added in another order or rounded differently)" in note
    assert "engine.threads 1 → 2 (numbers are added in another order)" in note
    assert "data.batch_size 16 → 8 (something else is learned)" in note
    log = (resumed.folder / "logs" / "rank_0.log").read_text()
    assert log.index("will not end bit for bit") < log.index("first loss")
    was, now = (torch.load(path, weights_only=True) for path in (copy, resumed.folder / "last.ckpt"))
    recorded = yaml.safe_load(RunFolder(resumed.folder).config.read_text())["model"]
    for part in ("optimizer", "scheduler"):
        assert recorded[part] == now["config"]["model"][part] == was["config"]["model"][part]
    bias, rest = now["optimizer_states"][0]["param_groups"]
    assert (rest["initial_lr"], rest["weight_decay"], bias["weight_decay"]) == (0.05, 0, 0.1)
    fresh = train(*settings, "train.num_epochs=1", f"model.init_from='{copy}'")
    bias, rest = torch.load(fresh.folder / "last.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"]
    assert (rest["initial_lr"], rest["weight_decay"], bias["weight_decay"]) == (0.001, 0.5, 0.3)


def test_the_best_of_the_run_before_stays_the_best(train, tmp_path):
    """A resumed run that does not improve keeps the `best.ckpt` and `best.json` of its earlier launch. A resume from
    this best, which is older than the last, starts a new run and reports why."""
    settings = [*RANDOM, f"logger.params.tracking_uri='{tmp_path / 'mlruns'}'", "model.loss.type=own.Constant"]
    settings.append("train.checkpoint={monitor: val_acc, mode: max, save_top_k: 2}")
    former = train(*settings, "train.num_epochs=1")
    kept = digest(former.folder / "best.ckpt")
    resumed = train(*settings, "train.num_epochs=3", f"train.resume_ckpt='{former.folder}'")
    assert json.loads((resumed.folder / "best.json").read_text())["epoch"] == 0
    assert digest(resumed.folder / "best.ckpt") == kept
    assert "best       val_acc" in resumed.out
    assert "after epoch 1 (step 9)" in resumed.out
    assert (resumed.folder / "epoch=1-step=18.ckpt").is_file()
    before = (resumed.folder / "last.ckpt").read_bytes()
    anew = train(*settings, "train.num_epochs=3", "train.resume_ckpt=best")
    assert anew.folder != resumed.folder
    assert "run        a new one: last.ckpt is further along" in anew.out
    assert (resumed.folder / "last.ckpt").read_bytes() == before


EPOCH = "{type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.5}, call: {interval: epoch}}"
PLATEAU = "{type: torch.optim.lr_scheduler.ReduceLROnPlateau, params: {factor: 0.5, patience: 0, threshold: 10.0}"
PLATEAU += ", call: {monitor: val_loss}}"
BY_STEPS = ["train.max_steps=18", "train.checkpoint={every_n_epochs: null, every_n_steps: 9}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "parts"),
    [
        (EPOCH, [BY_STEPS]),
        (PLATEAU, [BY_STEPS, ["train.num_epochs=2"], ["train.max_steps=14"]]),
        (PLATEAU.replace("val_loss", "train_loss"), [["train.max_steps=17"]]),
    ],
    ids=["epoch", "plateau", "plateau of a metric of steps"],
)
def test_schedules_by_epoch_resume_from_any_checkpoint(scheduler, parts, train, tracked):
    """Resumed from the end or the inside of an epoch, a run has the rates and weights of an uninterrupted run."""
    settings = [*RANDOM, "~model.scheduler", f"model.scheduler={scheduler}", "train.num_epochs=3"]
    reference = train(*settings)
    expected = tracked(reference.folder).series()
    assert len({value for _, value in expected["lr"]}) == 3
    for overrides in parts:
        part = train(*settings, *overrides)
        resumed = train(*settings, f"train.resume_ckpt='{part.folder}'")
        assert_same_weights(resumed, reference)
        series = tracked(resumed.folder).series()
        assert (series["lr"], series["val_loss"]) == (expected["lr"], expected["val_loss"])


def test_a_run_stopped_while_it_validates_ends_bit_for_bit_like_an_uninterrupted_one(
    interrupt, train, reference, tracked
):
    """The epoch that was being validated is not trained twice, and is validated."""
    stopped = interrupt(RANDOM, validating=True)
    resumed = train(*RANDOM, f"train.resume_ckpt='{stopped.folder}'")
    assert_ends_like(resumed, reference, tracked)
    assert "failure" not in tracked(resumed.folder).tags


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["train.accumulator_factor=2"], id="accumulation"),
        pytest.param(["train.limit_batches={train: 0.7}", *IN_WORKERS], id="short epochs", marks=pytest.mark.slow),
    ],
)
def test_a_schedule_of_auto_length_resumes_bit_for_bit(more, train, interrupt, tracked):
    """A run that is interrupted inside its second epoch trains on the remaining batches, and tracks every point."""
    settings = [*RANDOM, AUTO, "model.scheduler.call.interval=step", *more]
    stopped = interrupt(settings)
    resumed = train(*settings, f"train.resume_ckpt='{stopped.folder}'")
    assert_ends_like(resumed, train(*settings), tracked)


def test_two_processes_go_on_bit_for_bit(job, tracked):
    """Two processes of ddp resume inside the second epoch and end like an uninterrupted run."""
    settings = [*RANDOM, "data.batch_size=8"]
    reference, part = job(*settings, "train.num_epochs=2"), job(*settings, "train.max_steps=13")
    resumed = job(*settings, "train.num_epochs=2", f"train.resume_ckpt='{part.folder}'")
    assert_same_weights(resumed, reference)
    series, expected = tracked(resumed.folder).series(), tracked(reference.folder).series()
    for name in ("val_loss", "train_loss"):
        assert series[name] == expected[name]
    assert [p for p in series["train_loss_epoch"] if p[0] != 12] == expected["train_loss_epoch"]


def test_auto_takes_the_newest_whole_checkpoint(train, reference, tmp_path):
    """A damaged `last.ckpt` is refused if it is named; `auto` skips it and resumes from the latest complete one."""
    settings = [*RANDOM, "train.checkpoint.save_top_k=2", f"logger.params.tracking_uri='{tmp_path / 'mlruns'}'"]
    done = train(*settings, "train.num_epochs=3")
    last = done.folder / "last.ckpt"
    content = bytearray(last.read_bytes())
    content[content.index(b"data/0") + 200] ^= 1
    last.unlink()  # may have a hard link
    last.write_bytes(content)
    refused = train(*settings, f"train.resume_ckpt='{last}'", code=4)
    assert "last.ckpt: damaged" in refused.err
    assert "The latest complete checkpoint: train.resume_ckpt=auto" in refused.err
    latest = RunFolder(done.folder).checkpoints()[1]
    resumed = train(*settings, "train.resume_ckpt=auto")
    assert "resumes    skipped" in resumed.err
    assert f"resumes    {latest}" in resumed.out
    assert resumed.folder == done.folder
    assert_same_weights(resumed, reference, ("last.ckpt", "best.ckpt"))


def test_a_run_that_another_process_uses_is_not_resumed(train, half):
    """If a process holds the lock of the run folder, another launch starts a new run and reports why."""
    lock = RunFolder(half.folder).lock()
    assert lock is not None
    try:
        resumed = train(*RANDOM, "train.num_epochs=2", f"train.resume_ckpt='{half.folder}'")
    finally:
        lock.release()
    assert f"a new one: a process is using the run {half.folder.parent.name}" in resumed.out
    assert resumed.folder != half.folder


def test_a_resume_with_pruning_warns_that_it_differs(train, half):
    """Lightning's ModelPruning saves no masks, so the run does not end bit for bit like an uninterrupted one."""
    prunes = "{type: pytorch_lightning.callbacks.ModelPruning, params: {pruning_fn: l1_unstructured, amount: 0.1}}"
    resume = f"train.resume_ckpt='{half.folder / 'last.ckpt'}'"
    resumed = train(*RANDOM, f"train.callbacks=[{prunes}]", resume, "train.num_epochs=3")
    (note,) = [line for line in resumed.err.splitlines() if "will not end bit for bit" in line]
    assert "ModelPruning saves no masks (weights that were pruned learn again)" in note


@pytest.mark.slow
def test_three_processes_of_ddp_resume_bit_for_bit_or_tell_why_not(job):
    """torch rebuilds gradient buckets after the first step of each start, which changes the order of sums of three or
    more ranks; with `find_unused_parameters` it does not."""
    settings = ["data.batch_size=4", "engine.backend=ddp", "train.checkpoint={every_n_steps: 4}", "train.max_steps=6"]
    keeps = "engine.params.find_unused_parameters=true"
    note = "engine.processes 3 (from three on torch adds gradients in another order"
    part = job(*settings, "logger.params.experiment_name=three", "train.max_steps=4", ranks=3)
    assert note in job(*settings, f"train.resume_ckpt='{part.folder}'", ranks=3).err
    reference = job(*settings, keeps, ranks=3)
    part = job(*settings, keeps, "train.max_steps=4", ranks=3)
    resumed = job(*settings, keeps, f"train.resume_ckpt='{part.folder}'", ranks=3)
    assert note not in resumed.err
    assert_same_weights(resumed, reference)


def test_a_signal_inside_an_accumulation_waits_for_its_step(interrupt, train):
    """After a signal in the third of four accumulated batches the run stops at the step, so no gradient is lost."""
    settings = [*RANDOM, "train.num_epochs=2", "train.accumulator_factor=4"]
    stopped = interrupt(settings, number=signal.SIGTERM)
    checkpoint = torch.load(stopped.folder / "last.ckpt", weights_only=True)
    assert (checkpoint["global_step"], checkpoint["accumulating"]) == (4, False)
    resumed = train(*settings, f"train.resume_ckpt='{stopped.folder}'")
    assert_same_weights(resumed, train(*settings))


@pytest.mark.slow
def test_a_run_that_has_gone_on_can_be_reproduced_tested_and_checked(command, place, train):
    """Its `cfg.yaml` is that of the complete run, and names no checkpoint to resume from."""
    part = train(*RANDOM, "train.num_epochs=1")
    (part.folder / "places.json").unlink()  # as if the disk had been full after cfg.yaml
    done = train(*RANDOM, "train.num_epochs=2", f"train.resume_ckpt='{part.folder}'")
    assert (done.folder / "places.json").exists()
    again = command("reproduce", done.folder, cwd=place, code=0)
    assert again.folder != done.folder
    command("check", done.folder / "cfg.yaml", cwd=place, code=0)
    assert command("test", done.folder, cwd=place, code=0).folder == done.folder


def test_processes_that_were_started_apart_and_drew_two_seeds_are_refused(job):
    """Each rank draws its own seed, so the job ends with exit code 3 instead of training different replicas."""
    refused = job("seed=null", "data.batch_size=8", "train.num_epochs=1", code=3)
    assert "seed is " in "".join(rank.err for rank in refused.ranks)


@pytest.mark.parametrize(
    ("step", "checkpoint"), [pytest.param(10, "{every_n_epochs: 1}", marks=pytest.mark.slow), (7, "{every_n_steps: 7}")]
)
def test_another_number_of_processes_resumes_at_the_same_sample(step, checkpoint, job):
    """One process that resumes a checkpoint of two ends with their weights, except for the order of additions."""
    store = ["logger.params.experiment_name=other", "logger.log_every_n_steps=1"]
    reference = job("train.num_epochs=3", *store)
    cut = job("train.num_epochs=3", f"train.max_steps={step}", f"train.checkpoint={checkpoint}", *store)
    resume = [f"train.resume_ckpt='{cut.folder / 'last.ckpt'}'", "train.accumulator_factor=2"]
    one = job("train.num_epochs=3", *resume, *store, ranks=1)
    assert one.out.count("val_loss") == (1 if step == 10 else 2)
    ours, theirs = (weights(outcome.folder / "last.ckpt") for outcome in (one, reference))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5


def test_auto_passes_over_a_run_whose_config_is_damaged(train, tmp_path):
    """With a damaged config and no checkpoint a new run starts."""
    settings = [*RANDOM, f"logger.params.tracking_uri={tmp_path / 'mlruns'}", "train.num_epochs=1"]
    damaged = train(*settings).folder
    for path in damaged.glob("*.ckpt"):
        path.unlink()
    (damaged / "cfg.yaml").write_text("train: [")
    begun = train(*settings, "train.resume_ckpt=auto")
    assert "resumes    nothing, a new run starts" in begun.out
    assert begun.folder != damaged


def test_processes_that_lightning_starts_know_the_completed_epochs(monkeypatch):
    """They get the number with the checkpoint: Lightning rejects one with more epochs than it is to train."""
    given = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}
    given["DEEPLIGHTNING_DECIDED"] = json.dumps({"train.resume_ckpt": ["/run/last.ckpt", [], 3]})
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert resumption(None).epochs == 3


def test_another_number_of_processes_resumes_between_two_steps():
    """Twelve batches of one process are six of two: with four to a step, training resumes after the fourth."""
    counts = {"ready": 12, "started": 12, "processed": 12, "completed": 11}
    progress = {"current": counts, "total": {**counts}, "is_last_batch": False}
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress}}
    convert_counters({"engine": {"processes": 1}, "loops": loops}, 2, 4)
    assert counts == {"ready": 4, "started": 4, "processed": 4, "completed": 3}


@pytest.mark.parametrize(
    ("more", "params"),
    [
        pytest.param([], "{batch: 4}", marks=pytest.mark.slow),
        (["train.accumulator_factor=2"], "{batch: 5}"),
        (["train.accumulator_factor=3", "train.val_every_n_epoch=0.5"], "{}"),
        pytest.param(["model.module.type=own.StopsItself"], None, marks=pytest.mark.slow),
        (["model.module.type=own.StopsItself", "train.val_every_n_epoch=2", "train.accumulator_factor=3"], None),
    ],
    ids=["plain", "inside a step", "in a validation inside a step", "by the module", "by the module inside a step"],
)
def test_a_stop_inside_an_epoch_leaves_the_rest_of_it(more, params, train, tracked):
    """A callback or the module stops training inside an epoch; resumed without that, the run ends like an
    uninterrupted one."""
    settings = [*RANDOM, "train.num_epochs=2", "logger.log_every_n_steps=1", *more]
    stops = [f"train.callbacks=[{{type: own.Stops, params: {params}}}]"] if params else []
    stopped = train(*settings, *stops, STOPS="0" if params else "4")
    resumed = train(*settings, f"train.resume_ckpt='{stopped.folder}'")
    reference = train(*settings, "logger.params.experiment_name=whole")
    assert_same_weights(resumed, reference)
    series, expected = tracked(resumed.folder).series(), tracked(reference.folder).series()
    assert [series[name] for name in ("train_loss", "lr")] == [expected[name] for name in ("train_loss", "lr")]


def test_processes_agree_that_a_run_named_through_a_link_is_done(job, tmp_path):
    """Both report that there is nothing to do; neither waits for the other."""
    settings = ["train.num_epochs=1", f"logger.params.tracking_uri={tmp_path / 'mlruns'}", "stages=[train]"]
    done = job(*settings)
    (tmp_path / "link").symlink_to(done.folder)
    again = job(*settings, f"train.resume_ckpt='{tmp_path / 'link' / 'last.ckpt'}'")
    assert "nothing to do" in again.err + again.out


def test_early_stopping_by_a_metric_of_steps_resumes_after_the_last_logged_step(train):
    """Its value is of step 16; no step is logged between step 17, where the run resumes, and the epoch's end."""
    settings = ["train.early_stop={metric: train_loss, patience: 9}", "train.num_epochs=3"]
    part = train(*settings, "train.max_steps=17")
    assert_same_weights(train(*settings, f"train.resume_ckpt='{part.folder}'"), train(*settings))


def test_a_run_that_early_stopping_ended_in_its_first_epoch_is_done(train, tmp_path):
    """Lightning counts epochs from 0, which is also its value for a training that was not stopped."""
    settings = ["model.loss.type=own.NoNumber", "train.early_stop={metric: val_loss}", "train.num_epochs=4"]
    settings += [f"logger.params.tracking_uri={tmp_path / 'mlruns'}", "train.resume_ckpt=auto"]
    done = train(*settings)
    again = train(*settings)
    assert again.folder == done.folder
    assert "done       already" in again.out
    assert torch.load(again.folder / "last.ckpt", weights_only=True)["global_step"] == 9


def test_a_finished_run_with_averages_and_batch_norm_is_done(train, tmp_path):
    """Lightning adds an epoch for batch norm; a resume does not add another one."""
    swa = "{type: pytorch_lightning.callbacks.StochasticWeightAveraging, params: {swa_lrs: 0.01, swa_epoch_start: 1}}"
    settings = [f"train.callbacks=[{swa}]", "model.network={type: own.Normed}", "train.num_epochs=2"]
    settings += [f"logger.params.tracking_uri={tmp_path / 'mlruns'}", "train.resume_ckpt=auto"]
    before = (train(*settings).folder / "last.ckpt").read_bytes()
    again = train(*settings)
    assert "done       already" in again.out
    assert (again.folder / "last.ckpt").read_bytes() == before


def test_a_resume_that_changes_the_length_of_its_schedule_or_its_batches_says_so(train):
    """The note names settings that change what is learned."""
    cosine = "{type: torch.optim.lr_scheduler.CosineAnnealingLR, params: {T_max: auto}, call: {interval: step}}"
    part = train(f"model.scheduler={cosine}", "train.num_epochs=1")
    changed = ["train.num_epochs=2", "train.limit_batches={train: 5}", "engine.channels_last=true"]
    resumed = train(f"model.scheduler={cosine}", *changed, f"train.resume_ckpt='{part.folder}'")
    (note,) = [line for line in resumed.err.splitlines() if "will not end bit for bit" in line]
    assert "train.num_epochs 1 → 2" in note
    assert "train.limit_batches" in note
    assert "engine.channels_last False → True" in note


def test_another_process_begins_with_empty_lists_of_the_same_form():
    """Processes gather lists, and an empty one needs the dimensions and the type of the others."""
    gathered, module = Gathered(), pl.LightningModule()
    module.metric = MulticlassAUROC(3)
    gathered.setup(SimpleNamespace(state=SimpleNamespace(fn="fit")), module, "fit")
    gathered.load_state_dict({"metrics": {"metric": {"preds": torch.rand(4, 3), "target": torch.arange(4)}}})
    gathered.on_train_start(SimpleNamespace(is_global_zero=False), module)
    assert [value.shape for value in module.metric.preds] == [(0, 3)]
    assert module.metric.target[0].dtype == torch.int64


def test_the_epoch_that_averages_add_for_batch_norm_has_no_steps(train):
    """A schedule of the training's length is not too short for it."""
    swa = "{type: pytorch_lightning.callbacks.StochasticWeightAveraging, params: {swa_lrs: 0.01, swa_epoch_start: 2}}"
    schedule = AUTO.replace("}}", "}, call: {interval: step}}")
    done = train(f"train.callbacks=[{swa}]", "model.network={type: own.Normed}", schedule, "train.num_epochs=2")
    assert "2 epochs; 18 steps" in done.out


def test_the_best_by_a_metric_that_is_no_longer_monitored_is_not_the_best(train, tmp_path):
    """It is kept under its epoch and step; test and export use the last weights."""
    at = f"logger.params.tracking_uri='{tmp_path / 'mlruns'}'"
    part = train(at, "train.num_epochs=1", "train.checkpoint.monitor=val_loss")
    done = train(at, "train.num_epochs=2", f"train.resume_ckpt='{part.folder}'")
    assert done.folder == part.folder
    assert {path.name for path in done.folder.glob("*.ckpt")} == {"last.ckpt", "epoch=0-step=9.ckpt"}
    assert not (done.folder / "best.json").exists()


def test_the_epoch_for_batch_norm_does_not_move_the_averages(train):
    """Without a validation before it, the gradients of the last step still exist."""
    swa = "{type: pytorch_lightning.callbacks.StochasticWeightAveraging, params: {swa_lrs: 0.01, swa_epoch_start: 1}}"
    often = "train.val_every_n_epoch=3"
    done = train(f"train.callbacks=[{swa}]", "model.network={type: own.Normed}", "train.num_epochs=2", often)
    saved = torch.load(done.folder / "last.ckpt", weights_only=True)
    averages = saved["callbacks"]["StochasticWeightAveraging"]["average_model_state"]
    trained = [name for name in averages if name.endswith(("weight", "bias"))]
    assert trained
    assert all(torch.equal(averages[name], saved["state_dict"][name]) for name in trained)


def test_the_newest_run_of_a_copy_is_the_one_that_started_last(train, tmp_path):
    """A copy may have new times of its files."""
    settings = [*RANDOM, f"logger.params.tracking_uri={tmp_path / 'mlruns'}", "train.num_epochs=1"]
    _, newest = train(*settings), train(*settings)
    os.utime(newest.folder / "cfg.yaml", (0, 0))
    assert train(*settings, "train.resume_ckpt=auto").folder == newest.folder


def test_a_callback_without_patience_lets_an_improving_run_resume(train):
    """`EarlyStopping(patience=0)` stops at the first validation that is no better, not at a restart."""
    stop = "train.callbacks=[{type: EarlyStopping, params: {monitor: val_loss, patience: 0}}]"
    half = train(stop, "train.num_epochs=1")
    steps = read_checkpoint(half.folder / "last.ckpt")["global_step"]
    resumed = train(stop, "train.num_epochs=2", f"train.resume_ckpt='{half.folder}'")
    assert read_checkpoint(resumed.folder / "last.ckpt")["global_step"] == 2 * steps


def test_a_damaged_file_of_metrics_hides_no_run(train, tmp_path):
    """The newest run of a store is found whatever another run's first line says."""
    settings = [*RANDOM, f"logger.params.tracking_uri={tmp_path / 'mlruns'}", "train.num_epochs=1"]
    newest = train(*settings)
    other = newest.folder.parents[1] / ("a" * 32) / "artifacts"
    other.mkdir(parents=True)
    (other / "cfg.yaml").write_text("seed: 1\n")
    for line in ('{"status": "RUNNING", "run": "x"}', '{"run": {"started": "2025"}}', "[]", ""):
        (other / "metrics.jsonl").write_text(f"{line}\n")
        assert train(*settings, "train.resume_ckpt=auto").folder == newest.folder, line
