"""Averaged weights: validation, checkpoints, test and bundle use the averages, and training resumes from the weights
that learn."""

import json
import math
import signal
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from conftest import digest, weights
from safetensors.torch import load_file
from test_resume import RANDOM, assert_ends_like

from deeplightning.callbacks.average import EMA
from deeplightning.engine.checkpoint_reading import read_checkpoint
from deeplightning.runfolder import RunFolder

NORMED = "model.network={type: own.Normed}"


def callbacks(file=None, **params):
    """Return an override with EMA, and with a callback that writes the weights of each step into `file`."""
    given = ", ".join(f"{name}: {value}" for name, value in params.items())
    recorder = f", {{type: own.Weights, params: {{file: '{file}'}}}}" if file else ""
    return f"train.callbacks=[{{type: deeplightning.callbacks.average.EMA, params: {{{given}}}}}{recorder}]"


SETTINGS = [*RANDOM, callbacks(decay=0.8, every_n_steps=2)]


def own_ema(seen, decay):
    """Compute the exponential average of the weights of each step in plain torch."""
    average = dict(seen[0])
    for now in seen[1:]:
        for name, value in now.items():
            average[name] = torch.lerp(average[name], value, 1 - decay) if value.is_floating_point() else value
    return average


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def ema(train, tmp_path_factory):
    """A run with batch norm and a decay of 0.9 that tests and exports, and the weights of each of its steps."""
    file = tmp_path_factory.mktemp("ema") / "seen.pt"
    settings = ["stages=[train, test]", "train.export=true", "train.checkpoint.monitor=val_loss"]
    run = train(NORMED, callbacks(file, decay=0.9), *settings)
    return run, torch.load(file)


def test_checkpoints_hold_the_exponential_average_bit_for_bit(ema):
    """`last.ckpt` has the average of the weights of all 18 steps, running means of batch norm included, and beside it
    the weights that learn; `best.ckpt` has the average up to its step."""
    run, seen = ema
    assert len(seen) == 18
    last = read_checkpoint(run.folder / "last.ckpt")
    assert_equal(last["state_dict"], own_ema(seen, 0.9))
    assert_equal(last["averaging"]["weights"], seen[-1])
    best = json.loads((run.folder / "best.json").read_text())
    assert_equal(weights(run.folder / "best.ckpt"), own_ema(seen[: best["step"]], 0.9))
    assert "averaging  EMA (decay=0.9, every_n_steps=1): validation, checkpoints, test and export use" in run.out


def test_validation_and_test_use_the_averages(ema, train, tracked):
    """The tracked losses equal those of a separate validation and test of the checkpoints, which hold the averages."""
    metrics = tracked(ema[0].folder).series()
    for stage, name, loss in (("validate", "last", "val_loss"), ("test", "best", "test_loss")):
        alone = train(NORMED, f"stages=[{stage}]", f"test.ckpt='{ema[0].folder / f'{name}.ckpt'}'").folder
        found = json.loads(RunFolder(alone).results(stage).read_text())[loss]
        assert found == pytest.approx(metrics[loss][-1][1], abs=1e-6)


def test_the_bundle_has_the_averages_and_its_card_says_so(ema):
    """The bundle's weights are the averages bit for bit; its card names kind, settings and number of updates."""
    run, seen = ema
    folder = RunFolder(run.folder)
    best = json.loads((run.folder / "best.json").read_text())["step"]
    stored = load_file(folder.bundle_weights)
    for name, value in own_ema(seen[:best], 0.9).items():
        assert torch.equal(stored[name], value), name
    card = json.loads(folder.bundle_card.read_text())
    assert card["run"]["weights"] == f"averaged by EMA (decay=0.9, every_n_steps=1), {best} updates"


@pytest.fixture(scope="module")
def whole(train):
    """An uninterrupted run of four epochs of nine batches."""
    return train(*SETTINGS)


def test_a_resumed_average_ends_bit_for_bit_like_an_uninterrupted_one(train, whole, tracked):
    """A run resumed after or inside an epoch ends with the same averages, weights that learn, and tracked points."""
    for cut in ("train.num_epochs=2", "train.max_steps=23"):
        half = train(*SETTINGS, cut)
        resumed = train(*SETTINGS, f"train.resume_ckpt='{half.folder}'")
        assert "will not end bit for bit" not in resumed.err
        for name in ("last.ckpt", "best.ckpt"):
            assert digest(resumed.folder / name) == digest(whole.folder / name)
        ends = [read_checkpoint(run.folder / "last.ckpt")["averaging"] for run in (resumed, whole)]
        assert_equal(ends[0].pop("weights"), ends[1].pop("weights"))
        assert ends[0] == ends[1]
        if cut == "train.num_epochs=2":
            assert tracked(resumed.folder).series() == tracked(whole.folder).series()


def test_a_run_that_is_stopped_while_it_validates_averages_resumes_from_the_weights_that_learn(
    command, train, tiny, place, whole, tracked, tmp_path
):
    """A run that Ctrl-C ends in a validation, when the network holds the averages, resumes bit for bit."""
    until = tmp_path / "file"
    waits = f", {{type: own.Waits, params: {{until: '{until}', validating: true}}}}]"
    running = command.start("train", tiny, *SETTINGS[:-1], SETTINGS[-1].removesuffix("]") + waits, cwd=place)
    running.says("waits")
    running.signal(signal.SIGINT)
    until.touch()
    stopped = running.end(code=130)
    assert_ends_like(train(*SETTINGS, f"train.resume_ckpt='{stopped.folder}'"), whole, tracked)


@pytest.mark.slow
def test_a_checkpoint_of_averages_resumes_only_with_them(train, whole):
    """A resume without the callback, which would train the averages, ends with exit code 4 and both remedies. Other
    settings are reported; averaging can start from a checkpoint without averages."""
    last = whole.folder / "last.ckpt"
    refused = train(*RANDOM, "train.num_epochs=5", f"train.resume_ckpt='{last}'", code=4)
    assert "its weights are averages of EMA; keep the callback in train.callbacks" in refused.err
    assert f"model.init_from='{last}'" in refused.err
    other = train(*RANDOM, callbacks(decay=0.5), "train.num_epochs=5", f"train.resume_ckpt='{last}'")
    assert "EMA was decay=0.8, every_n_steps=2 and is decay=0.5, every_n_steps=1" in other.err
    without = train(*RANDOM, "train.num_epochs=1")
    began = train(*SETTINGS, "train.num_epochs=2", f"train.resume_ckpt='{without.folder / 'last.ckpt'}'")
    assert "the checkpoint has no averages; averaging starts here" in began.out


def test_two_processes_average_once_a_step(job):
    """Under ddp each step updates the averages once; a checkpoint has them beside the weights that learn."""
    run = job(callbacks(decay=0.8), NORMED, "train.num_epochs=1", "data.batch_size=8", "engine.backend=ddp")
    saved = read_checkpoint(run.folder / "last.ckpt")
    assert saved["averaging"]["updates"] == 9
    name = "network.0.weight"
    assert not torch.equal(saved["state_dict"][name], saved["averaging"]["weights"][name])


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"decay": 1.0}, "decay: must be from 0 to below 1"),
        ({"every_n_steps": 0}, "every_n_steps: must be a whole number, at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused(params, words):
    """The error names the argument and the allowed range."""
    with pytest.raises(ValueError, match=words):
        EMA(**params)


def test_networks_that_share_weights_are_averaged_once(fit):
    """A tensor with two names is swapped once, so both names hold the average."""
    done = fit("model.network={type: own.Tied}", callbacks(decay=0.5), "train.num_epochs=1")
    saved = read_checkpoint(done.folder / "last.ckpt")
    first, second = (saved["state_dict"][f"network.{name}.weight"] for name in ("first", "second"))
    assert torch.equal(first, second)
    assert torch.equal(done.task.network.first.weight, first)
    assert not torch.equal(first, saved["averaging"]["weights"]["network.first.weight"])


def test_a_mask_of_infinities_stays_one():
    """Infinity minus infinity is no number: a buffer with infinities has no average."""
    module, average, trainer = pl.LightningModule(), EMA(), SimpleNamespace(global_step=0)
    module.layer = torch.nn.Linear(2, 2)
    module.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
    average.on_train_start(trainer, module)
    for trainer.global_step in (1, 2):
        average.on_train_batch_end(trainer, module)
    average.on_save_checkpoint(trainer, module, saved := {"state_dict": module.state_dict()})
    assert torch.equal(saved["state_dict"]["mask"], module.mask)
