"""Unbalanced classes and labels: `weight: balanced` and `pos_weight: balanced` in the params of a loss, and
`data.sampler: balanced`, in runs."""

import json
from collections import Counter

import pytest
import yaml
from conftest import digest

from deeplightning.config.examine import examine, load_config
from deeplightning.config.explain import explain
from deeplightning.run.assemble import init_module

WEIGHT = "model.loss.params={weight: balanced}"
SAMPLER = "data.sampler=balanced"
KEY = "model.loss.params.weight"


def test_a_run_keeps_the_weights_that_stats_prints(train, tiny, command, place):
    """`cfg.yaml` has the weights of `stats`, and the loss uses them; a config with these numbers gives the same run."""
    printed = yaml.safe_load(command("stats", tiny, cwd=place).out)["class_weights"]
    run = train(WEIGHT, "train.num_epochs=1")
    assert f"{KEY}: balanced → {printed} (" in run.out
    kept = yaml.safe_load((run.folder / "cfg.yaml").read_text())["model"]["loss"]["params"]["weight"]
    assert kept == {"type": "torch.tensor", "params": {"data": printed}}
    cfg = load_config(tiny, [WEIGHT])
    init_module(cfg, "data")
    assert init_module(cfg, "model").losses["loss"].weight.tolist() == pytest.approx(printed)
    again = train(f"{KEY}={{type: torch.tensor, params: {{data: {printed}}}}}", "train.num_epochs=1")
    assert digest(again.folder / "last.ckpt") == digest(run.folder / "last.ckpt")
    command("test", run.folder, cwd=place, code=0)


def test_check_explain_and_a_dry_run_accept_balanced(tiny, command, place):
    """`balanced` is accepted for a tensor and its source is named; a typo, and a loss without a weight, are errors."""
    report = examine(tiny, [WEIGHT])
    assert report.faults == []
    source = "numbers, resolved at run start from the classes of the training set of deeplightning.data.digits.Digits"
    assert source in explain(report)
    assert f"  means       {source}\n" in explain(report, KEY)
    tried = command("check", tiny, WEIGHT, SAMPLER, "--dry-run", cwd=place)
    assert (tried.code, "the loss was tried without them" in tried.out + tried.err) == (0, True)
    wrong = command("check", tiny, "model.loss={type: torch.nn.MSELoss, params: {weight: balanced}}", cwd=place, code=2)
    assert "torch.nn.MSELoss has no param `weight`" in wrong.err
    wrong = command("check", tiny, "model.loss.params={weight: balance}", "data.sampler=balance", cwd=place, code=2)
    assert f"{KEY}: " in wrong.err
    assert "Did you mean balanced?" in wrong.err


def test_targets_that_are_numbers_have_no_weights(command, place, store):
    """Targets that are numbers end with exit code 2 and the key, before a run begins."""
    config = place.parent / "line.yaml"
    config.write_text(
        "_base_: pkg://deeplightning/examples/linear_regression/linear_regression.yaml\n"
        f"logger: {{params: {{tracking_uri: '{store}'}}}}\n"
    )
    loss = "model.loss={type: torch.nn.CrossEntropyLoss, params: {weight: balanced}}"
    for override, words in (
        (loss, f"{KEY}: `balanced` needs classes"),
        (SAMPLER, "data.sampler=balanced: the training"),
    ):
        refused = command("train", config, override, cwd=place)
        assert (refused.code, words in refused.err) == (2, True), refused


def test_processes_share_balanced_batches(job, tmp_path):
    """Two processes together draw each label equally often; classes are counted before there is a trainer."""
    saw = f"train.callbacks=[{{type: own.SavedColumn, params: {{folder: '{tmp_path}', column: label}}}}]"
    job("data.batch_size=8", SAMPLER, WEIGHT, saw)
    seen = [json.loads((tmp_path / f"saw_{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(2):
        labels = Counter(label for of in seen for batch in of[epoch] for label in batch)
        assert sorted(labels.values()) == [13] * 6 + [14] * 4


LABELS = """\
seed: 3
stages: [train, test]
data:
  root: .
  module: {{type: deeplightning.data.table.TableData, params: {{train: orders.csv, target: [gift, late]}}}}
  batch_size: 20
model:
  module: {{type: deeplightning.task.multilabel.Multilabel}}
  network:
    type: deeplightning.model.table_net.TableNet
    params: {{num_numbers: auto, cardinalities: auto, num_outputs: auto, width: 4, depth: 1}}
  optimizer: {{type: torch.optim.SGD, params: {{lr: 0.01}}}}
  loss: {{type: torch.nn.BCEWithLogitsLoss, params: {{pos_weight: balanced}}}}
train: {{num_epochs: 1, export: false, checkpoint: {{monitor: val_map}}}}
logger: {{params: {{tracking_uri: '{store}', system_metrics: false}}}}
"""
POSITIVE = "model.loss.params.pos_weight"


@pytest.fixture
def orders(tmp_path, store):
    """The folder of a config and a table whose labels `gift` and `late` are rare."""
    (tmp_path / "labels.yaml").write_text(LABELS.format(store=store))
    rows = [f"{n},{int(n % 4 == 0)},{int(n % 10 == 0)}" for n in range(200)]
    (tmp_path / "orders.csv").write_text("\n".join(["age,gift,late", *rows, ""]))
    return tmp_path


@pytest.mark.slow
def test_a_run_keeps_the_positive_weights_that_stats_prints(command, orders):
    """`cfg.yaml` has negatives / positives of each label in the training set, which loss and test use."""
    printed = yaml.safe_load(command("stats", "labels.yaml", cwd=orders).out)
    assert printed["samples"] == 160
    expected = [(160 - count) / count for count in printed["labels"].values()]
    assert printed["pos_weight"] == pytest.approx(expected)
    assert list(printed["labels"]) == ["gift", "late"]
    run = command("train", "labels.yaml", cwd=orders, code=0)
    assert f"{POSITIVE}: balanced → {printed['pos_weight']} (of 160, " in run.out
    kept = yaml.safe_load((run.folder / "cfg.yaml").read_text())["model"]["loss"]["params"]["pos_weight"]
    assert kept == {"type": "torch.tensor", "params": {"data": printed["pos_weight"]}}
    command("test", run.folder, cwd=orders, code=0)
    cfg = load_config(orders / "labels.yaml", [f"data.root='{orders}'"])
    init_module(cfg, "data")
    assert init_module(cfg, "model").losses["loss"].pos_weight.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("late", ["0", "1", "0.5"])
def test_labels_that_cannot_be_balanced(late, command, orders):
    """A label that is constant or not 0 and 1 ends with exit code 2, the key and the remedy, before a run begins."""
    rows = [f"{n},{n % 2},{late}" for n in range(200)]
    (orders / "orders.csv").write_text("\n".join(["age,gift,late", *rows, ""]))
    refused = command("train", "labels.yaml", cwd=orders)
    words = f"{POSITIVE}: `balanced` needs labels (B, K) of 0 and 1 of the training set of deeplightning.data"
    assert (refused.code, words in refused.err) == (2, True), refused
    assert "Artifact storage path" not in refused.out
