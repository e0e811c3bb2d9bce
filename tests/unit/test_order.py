"""Callbacks say themselves which of the others they come before and after."""

import graphlib
import itertools
from pathlib import Path

import pytest

from deeplightning.callbacks.order import OWN, in_order

BASE = Path(__file__).parents[2] / "configs" / "base.yaml"


class First:
    before = ("Second",)


class Second:
    before = (OWN,)


class Free:
    pass


class Last:
    after = (OWN, "Second")


def names(callbacks):
    return [type(callback).__name__ for callback in callbacks]


@pytest.mark.parametrize("given", [*itertools.permutations([First, Second, Last])])
def test_what_is_said_holds_in_whatever_order_they_are_given(given):
    """`before` and `after` are met, those of the config among them."""
    assert names(in_order([kind() for kind in given], [Free()])) == ["First", "Second", "Free", "Last"]


def test_what_is_not_said_stays_in_the_order_given():
    """Of ours and of the config's; what one needs comes just before it."""
    ours, own = [Free(), Last(), Free(), Second()], [object(), Free(), object()]
    found = in_order(ours, own)
    assert found == [ours[0], ours[3], *own, ours[1], ours[2]]


def test_a_contradiction_is_an_error():
    """A class that comes before and after another cannot be placed."""

    class Torn:
        before = after = ("First",)

    with pytest.raises(graphlib.CycleError):
        in_order([First(), Torn()])


def test_the_callbacks_of_a_run_are_in_the_order_that_they_need(monkeypatch, tmp_path):
    """All that a config can ask for: weights are found before a run is opened; the config's callbacks find an open run
    and a seed; what judges their metrics comes after them; a signal ends a batch last."""
    from deeplightning import load_config
    from deeplightning.callbacks import TRIAL, all_of

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TRIAL, "{}")
    cfg = load_config(
        BASE,
        [
            "model.init_from=x.ckpt",
            "train.callbacks=[{type: deeplightning.callbacks.watch.ListParameters}]",
            "train.early_stop={metric: val_loss, patience: 2}",
            "logger.histograms=2",
            "train.val_every_n_epoch=0.5",
            f"logger.params.tracking_uri={tmp_path}",
        ],
    )
    order = names(all_of(cfg))
    assert order[:5] == ["StartWeights", "Record", "Seeds", "StreamEnds", "LogSteps"]
    ours = order[: order.index("ListParameters")]
    assert {"FiniteLoss", "Console", "Results", "EarlyStopping", "Histograms", "ValidateParts"} <= {*ours}
    assert order[order.index("ListParameters") :] == ["ListParameters", "Trial", "Checkpoints", "Signals"]
