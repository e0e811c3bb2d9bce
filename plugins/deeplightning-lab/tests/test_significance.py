"""`compare` selects runs, judges their difference, and words the verdict."""

import csv
import json
import shutil

import numpy as np
import pytest
from deeplightning_lab import compared
from deeplightning_lab.groups import group_of, runs_in
from deeplightning_lab.significance import compare

from deeplightning.config.metric_check import mode_by_name
from deeplightning.faults import CheckpointError
from deeplightning.process.terminal import number
from deeplightning.reproduce.past import PastRun
from deeplightning.runfolder import RunFolder

CONFIG = "seed: {seed}\nmodel: {{lr: {lr}}}\ntrain: {{checkpoint: {{monitor: {monitor}, mode: {mode}}}}}\n"
BASE = [0.905, 0.912, 0.899, 0.908, 0.903]


@pytest.fixture
def runs(tmp_path):
    """`runs(name, values, …)` makes a group of finished runs with these values of a metric."""

    def make(name, values, metric="test_acc", seeds=None, answers=None, monitor="val_acc", mode="max", lr="0.1"):
        found = []
        for index, value in enumerate(values):
            seed = seeds[index] if seeds else 42 + index
            folder = RunFolder(tmp_path / name / str(index))
            folder.path.mkdir(parents=True)
            folder.config.write_text(CONFIG.format(seed=seed, lr=lr, monitor=monitor, mode=mode))
            folder.results("test").write_text(json.dumps({metric: value}))
            if answers is not None:
                rows = [["index", "label", "predicted_class"]]
                rows += [[n, 3, 3 if right else 4] for n, right in answers[index]]
                with folder.stage_predictions("test").open("w", newline="") as file:
                    csv.writer(file).writerows(rows)
            found.append(PastRun(folder, None, None))
        return group_of(name, found)

    return make


def test_a_difference_larger_than_the_spread_is_judged(runs):
    """The verdict names the better side, with the interval, the number of pairs and the effect size."""
    other = [value + step for value, step in zip(BASE, [0.05, 0.048, 0.053], strict=False)]
    found = compare(runs("a", BASE), runs("b", other))
    row = found.rows[0]
    assert (row.state, row.pairs, row.more) == ("higher", 3, None)
    assert 0.04 < row.low < row.difference < row.high < 0.06
    assert found.sentences[0].startswith("B is better than A: test_acc of B is 0.0503 higher (95 % interval 0.04")
    assert "bootstrap over 3 pairs of runs with the same seed; effect size g = " in found.sentences[0]
    assert found.sentences[1].startswith("The evidence is enough: ")
    assert found.a == "a (5 runs, seeds 42 to 46)"


def test_a_loss_is_better_where_it_is_lower(runs):
    """The direction follows from the metric's name or from the config's monitor; without either, it is left open."""
    less = jitter([value - 0.2 for value in BASE])
    loss = compare(runs("a", BASE, "test_loss"), runs("b", less, "test_loss"))
    assert loss.sentences[0].startswith("B is better than A: test_loss of B is 0.200 lower")
    own = compare(*(runs(n, v, "test_skill", monitor="val_skill", mode="min") for n, v in (("c", BASE), ("d", less))))
    assert own.sentences[0].startswith("B is better than A: test_skill of B is 0.2")
    unknown = compare(runs("e", BASE, "test_foo"), runs("f", less, "test_foo"))
    assert unknown.sentences[0].startswith("B is lower than A: test_foo of B is 0.2")


def jitter(values):
    """Add small deviations, so that the spread of the values changes."""
    return [value + step for value, step in zip(values, [0.001, -0.001, 0.002, 0, -0.002], strict=True)]


def test_a_difference_within_the_spread_may_be_luck(runs):
    """The number of further seeds is that of a paired test with power 0.8, for the difference `by` if given."""
    other = [value + step for value, step in zip(BASE, [0.012, -0.006, 0.011, -0.009, 0.007], strict=True)]
    a, b = runs("a", BASE), runs("b", other)
    found = compare(a, b)
    assert found.rows[0].state == "open"
    assert found.sentences[0].startswith("Whether A or B is better is open: test_acc of B is 0.003")
    assert "and the interval contains 0" in found.sentences[0]
    assert "The evidence is not enough, the difference may be luck" in found.sentences[1]
    assert 50 < found.rows[0].more < 150
    matters = compare(a, b, by=0.01)
    assert 5 <= matters.rows[0].more < 20
    assert "a difference of 0.01 takes about" in matters.sentences[1]


def test_a_difference_that_does_not_matter_is_the_same(runs):
    """With `--by`, an interval within ± that value is evidence of equality."""
    found = compare(runs("a", BASE), runs("b", jitter(BASE)), by=0.01)
    assert found.rows[0].state == "same"
    assert found.sentences[0].startswith("A and B are the same within 0.01: test_acc of B is 0.0000")
    large = compare(runs("c", BASE), runs("d", jitter([value + 0.02 for value in BASE])), by=0.1)
    assert large.rows[0].state == "same"
    part = compare(runs("e", BASE), runs("f", jitter([value + 0.02 for value in BASE])), by=0.0199)
    assert part.sentences[1].endswith("whether the difference is at least 0.0199 is open.")


def test_runs_of_other_seeds_are_not_paired(runs):
    """Pairing needs shared seeds for at least half of the smaller side."""
    a = runs("a", BASE)
    other = compare(a, runs("b", jitter([v + 0.05 for v in BASE]), seeds=range(5)))
    assert other.rows[0].pairs == 0
    assert "bootstrap over 5 and 5 runs" in other.sentences[0]
    assert compare(a, runs("c", jitter(BASE), seeds=[46, 47, 48, 49, 50])).rows[0].pairs == 0
    assert compare(a, runs("d", jitter(BASE), seeds=[44, 45, 46, 47, 48])).rows[0].pairs == 3


def test_one_run_each_cannot_tell_the_settings_from_the_seeds(runs):
    """The verdict is open; only the answers of the two networks are compared."""
    one = [(n, n % 10 != 0) for n in range(200)]
    two = [(n, n % 40 != 1) for n in range(200)]
    found = compare(runs("a", [0.9], answers=[one]), runs("b", [0.975], answers=[two]))
    assert found.rows[0].state == "unknown"
    assert found.sentences[0] == (
        "Whether A or B is better is open: test_acc is 0.9000 in A and 0.9750 in B, but A and B have one seed each, "
        "and another seed may reverse the order."
    )
    assert "only A answers 5 of them correctly and only B 20, McNemar's p = 0.0041" in found.sentences[1]
    assert "this is about these networks, not about other seeds: train both with `--seeds 5`" in found.sentences[1]
    without = compare(runs("c", [0.9]), runs("d", BASE))
    assert "but A has one seed" in without.sentences[0]
    assert without.samples is None
    assert any("test_predictions.csv" in note for note in without.notes)


def test_answers_to_one_test_set_are_compared_by_sample(runs):
    """The comparison has the mean over all runs of a side, and McNemar's test of each pair."""
    rng = np.random.default_rng(0)
    draw = lambda p: [[(n, bool(right)) for n, right in enumerate(rng.random(300) < p)] for _ in BASE]  # noqa: E731
    found = compare(runs("a", BASE, answers=draw(0.7)), runs("b", jitter(BASE), answers=draw(0.95)))
    assert found.samples is not None
    assert found.samples.low > 0.2
    assert (found.samples.significant, found.samples.pairs) == (5, 5)
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_test_set_for_each_seed_is_compared_in_pairs_only(runs):
    """If the split depends on the seed, only runs with the same seed are compared; different test sets never are."""
    sets = [[(n, n % 9 != 0) for n in range(seed, 100 + seed)] for seed in range(5)]
    found = compare(runs("a", BASE, answers=sets), runs("b", jitter(BASE), answers=sets))
    assert found.samples is not None
    assert np.isnan(found.samples.low)
    assert (found.samples.significant, found.samples.pairs) == (0, 5)
    other = compare(runs("c", BASE[:1], answers=sets[:1]), runs("d", BASE[:1], answers=sets[1:2]))
    assert other.samples is None
    assert any("not tested on the same samples" in note for note in other.notes)
    seeds = compare(runs("e", BASE, answers=sets), runs("f", jitter(BASE), answers=[*sets[1:], sets[0]]))
    assert any("not tested on the same samples" in note for note in seeds.notes)


def test_runs_without_a_spread_give_no_interval(runs):
    """Neither runs with equal values nor pairs with a constant difference have an interval."""
    a = runs("a", [0.5, 0.5, 0.5])
    assert compare(a, a).sentences[0] == "A and B have the same test_acc (0.500) with every seed."
    assert any("share runs" in note for note in compare(a, a).notes)
    apart = compare(a, runs("b", [0.6, 0.6, 0.6]))
    assert "0.500 in A and 0.600 in B, with the same difference for every seed" in apart.sentences[0]
    assert "The seeds give no evidence" in apart.sentences[1]


def test_runs_that_are_no_sample_of_one_setting_are_noted(runs):
    """Notes name settings that differ, duplicate seeds, and diverged runs."""
    mixed = runs("m", BASE[:2])
    mixed.members += runs("n", BASE[2:4], lr="0.2").members
    again = group_of("m", [member.run for member in mixed.members])
    assert any("its runs differ in more than the seed: model.lr" in note for note in again.notes)
    assert any("4 runs have 2 seeds; runs with the same seed count once" in note for note in again.notes)
    assert len(again.values("test_acc")) == 2
    found = compare(runs("o", [0.9, float("nan"), 0.91]), runs("p", BASE))
    assert "A: 1 of 3 runs have no finite test_acc and are left out" in found.notes
    assert found.rows[0].runs_a == 2


def test_what_cannot_be_compared_is_named(runs, tmp_path):
    """The error names the metrics of both sides, the nearest name of a missing metric, or a run without metrics."""
    a, b = runs("a", BASE), runs("b", BASE, "test_iou")
    with pytest.raises(CheckpointError, match="a and b share no metric: test_acc and test_iou"):
        compare(a, b)
    with pytest.raises(ValueError, match=r"--metric test_ac: both sides have test_acc\. Did you mean test_acc\?"):
        compare(a, a, "test_ac")
    empty = RunFolder(tmp_path / "empty")
    empty.path.mkdir()
    empty.config.write_text("seed: 1\n")
    with pytest.raises(CheckpointError, match="this run has no metrics to compare"):
        group_of("e", [PastRun(empty, None, None)])


def test_the_table_of_a_group_leads_to_its_runs(runs, tmp_path):
    """Unfinished runs are left out and counted; a folder without the table is no group."""
    runs("a", BASE[:2])
    home = tmp_path / "group"
    home.mkdir()
    rows = [[n, state, tmp_path / "a" / str(n)] for n, state in enumerate(("finished", "failed"))]
    with (home / "runs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["run", "state", "folder"], *rows])
    found = runs_in(home)
    assert found is not None
    assert [run.folder.path for run in found[0]] == [tmp_path / "a" / "0"]
    assert found[1] == ["1 of its 2 runs left out: not finished"]
    assert runs_in(tmp_path / "a" / "0") is None


def test_numbers_have_the_digits_that_the_difference_asks_for():
    """Numbers are rounded to three significant digits of the difference."""
    assert [number(0.91234, 0.0031), number(12.3456, 2.0), number(1234.5, 300), number(0.5)] == [
        *("0.91234", "12.35", "1234", "0.500")
    ]
    assert number(float("nan")) == "-"
    assert mode_by_name("test_top5") == "max"
    assert mode_by_name("val_foo") is None


def test_a_search_is_not_a_run_of_a_filter(runs, tmp_path, monkeypatch):
    """The parent run of a search has metrics but no config; it is left out."""
    members = [member.run for member in runs("a", BASE[:2]).members]
    search = RunFolder(tmp_path / "search")
    search.path.mkdir()
    (search.path / "trials.csv").touch()
    found = iter([*members, PastRun(search, None, None)])
    monkeypatch.setattr(compared, "listing", lambda *_: [{"id": "x"}] * 3)
    monkeypatch.setattr(compared, "past_run", lambda _: next(found))
    assert len(compared.resolve_side("experiment=Default").members) == 2


def test_equal_labels_with_other_seeds_may_be_other_samples(runs):
    """A split by the seed of data sorted by class gives the same labels; a note names this."""
    one = [[(n, n % 9 != 0) for n in range(100)]]
    other = compare(runs("a", BASE[:1], answers=one), runs("b", BASE[:1], seeds=[7], answers=one))
    assert any("if the seed divides the data" in note for note in other.notes)
    same = compare(runs("c", BASE[:1], answers=one), runs("d", BASE[:1], answers=one))
    assert not any("if the seed divides the data" in note for note in same.notes)


def test_names_of_a_multirun_are_no_filters():
    """They contain `=`; a misspelt filter is still named."""
    assert compared._parse_filters("batch_size=32 seed=0,batch_size=32 seed=1") == {}
    assert compared._parse_filters("name=wide*,status=failed") == {"name": "wide*", "status": "failed"}
    with pytest.raises(ValueError, match=r"Did you mean name\?"):
        compared._parse_filters("nam=wide*")


def test_equal_means_need_seeds_for_the_difference_that_matters(runs):
    """The number of seeds follows from `by` and the spread, also if the difference is exactly 0."""
    found = compare(runs("a", [0.75, 0.5, 0.625]), runs("b", [0.5, 0.75, 0.625]), by=0.1)
    assert (found.rows[0].difference, found.rows[0].state) == (0, "open")
    assert found.rows[0].more is not None
    assert 100 < found.rows[0].more < 200
    assert "a difference of 0.1 takes about" in found.sentences[1]


def test_the_runs_of_an_archived_group_are_beside_it(runs, tmp_path):
    """The table has the former paths of a store that was moved."""
    runs("a", BASE[:1])
    home, run = tmp_path / "mlruns/multiruns/Default/grid", tmp_path / "mlruns/1/x/artifacts"
    home.mkdir(parents=True)
    shutil.copytree(tmp_path / "a" / "0", run)
    (home / "runs.csv").write_text("run,state,id,folder\n0,finished,x,/former/mlruns/1/x/artifacts\n")
    assert [each.folder.path for each in runs_in(home)[0]] == [run]
