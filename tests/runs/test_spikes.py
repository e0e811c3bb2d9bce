"""Steps whose loss shoots up are left out, reported and counted; after several in a row the weights go back."""

import pytest
import torch
from conftest import digest

from deeplightning.callbacks.spikes import LossSpikes

GUARD = "deeplightning.callbacks.spikes.LossSpikes"


def spiky(*steps):
    return f"model.module={{type: own.Spiky, params: {{steps: {list(steps)}}}}}"


def guarded(file=None, **params):
    given = ", ".join(f"{name}: {value}" for name, value in {"memory": 5, **params}.items())
    watches = f", {{type: own.Weights, params: {{file: '{file}'}}}}" if file else ""
    return f"train.callbacks=[{{type: {GUARD}, params: {{{given}}}}}{watches}]"


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_with_a_spike_leaves_the_weights_as_they_are(train, tracked, tmp_path):
    """Two of 18: the weights after each are those before it, all others move, and both are reported and counted."""
    run = train(spiky(9, 13), guarded(tmp_path / "seen.pt"))
    seen = torch.load(tmp_path / "seen.pt")
    assert [step for step in range(1, 18) if same(seen[step], seen[step - 1])] == [9, 13]
    assert "at step 9 (epoch 2), above" in run.err
    assert "the step is left out (1 spike so far)" in run.err
    assert "the step is left out (2 spikes so far)" in run.err
    assert tracked(run.folder).series()["loss_spikes"] == [(9, 1.0), (13, 2.0)]


def test_several_spikes_in_a_row_go_back_to_the_last_checkpoint(train, tmp_path):
    """The second in a row of the second epoch brings the weights of the first epoch's end; training goes on."""
    run = train(spiky(11, 12), guarded(tmp_path / "seen.pt", roll_back=2))
    seen = torch.load(tmp_path / "seen.pt")
    assert same(seen[11], seen[10])
    assert same(seen[12], seen[8])
    assert not same(seen[13], seen[12])
    assert "2 spikes in a row: back to the weights of step 9" in run.err
    none = train(spiky(6, 7), guarded(roll_back=2))
    assert "there is no checkpoint yet to go back to" in none.err


@pytest.mark.slow
def test_a_resumed_guard_judges_like_an_uninterrupted_one(train):
    """What it has seen is in the checkpoint: bit for bit, also for a spike right after resuming."""
    settings = [spiky(9, 10), guarded(roll_back=3)]
    half = train(*settings, "train.num_epochs=1")
    resumed = train(*settings, f"train.resume_ckpt='{half.folder}'")
    assert "will not end bit for bit" not in resumed.err
    assert digest(resumed.folder / "last.ckpt") == digest(train(*settings).folder / "last.ckpt")


def test_processes_decide_together(job):
    """By the mean of their losses."""
    run = job(spiky(6), guarded(), "engine.backend=ddp", "data.batch_size=8")
    assert run.err.count("the step is left out (1 spike so far)") == 1


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"threshold": 0}, "threshold: must be above 0"),
        ({"memory": 1}, "memory: must be at least 2"),
        ({"roll_back": 0}, "roll_back: must be at least 1, or null"),
    ],
)
def test_arguments_out_of_range_are_refused(params, words):
    """With what is allowed."""
    with pytest.raises(ValueError, match=words):
        LossSpikes(**params)
