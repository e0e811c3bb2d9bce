"""Runs that are over can be listed, compared, repeated, and removed where they did not finish."""

import pytest


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A store of its own, since runs are removed from it."""
    return tmp_path_factory.mktemp("runs") / "mlruns"


@pytest.fixture(scope="module")
def ended(train, here):
    """Two runs that finished, with another seed, and one that failed."""
    store = f"logger.params.tracking_uri={here}"
    first = train(store, "stages=[train,test]", "train.num_epochs=1").folder
    second = train(store, "stages=[train,test]", "train.num_epochs=1", "seed=8").folder
    failed = train(store, "model.optimizer.params.lr=1e30", code=5).folder
    return first, second, failed


def test_runs_are_listed_the_newest_first(ended, here, command, place):
    """A line per run: its id, how it ended, what came out, where it lies."""
    outcome = command("runs", "--tracking-uri", here, cwd=place)
    lines = outcome.out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [folder.parent.name, status]
        for folder, status in zip(reversed(ended), ("FAILED", "FINISHED", "FINISHED"), strict=True)
    ]
    assert "test_acc" in lines[1]
    assert lines[1].endswith(str(ended[1]))


def test_two_runs_differ_in_what_was_set_and_what_came_out(ended, command, place):
    """`diff` names the config keys and the results that differ, and nothing of a run against itself."""
    outcome = command("diff", ended[0], ended[1], cwd=place)
    assert "seed: 7 → 8" in outcome.out.splitlines()
    assert {line.split(":")[0] for line in outcome.out.splitlines()} <= {"seed", "test_loss", "test_acc"}
    assert command("diff", ended[0], ended[0], cwd=place).out == ""


def test_a_run_is_reproduced(ended, command, place):
    """`reproduce` runs the saved config again and finds the same weights and results."""
    outcome = command("reproduce", ended[0], cwd=place)
    assert outcome.code == 0, outcome
    assert outcome.folder != ended[0]
    assert "the same weights and results" in outcome.err


def test_a_run_that_comes_out_differently_is_told(ended, command, place, tmp_path):
    """`reproduce` ends with 5 and names what differs; here the record of the first run was changed."""
    folder = tmp_path / "changed"
    folder.mkdir()
    for name in ("cfg.yaml", "last.ckpt"):
        (folder / name).write_bytes((ended[0] / name).read_bytes())
    (folder / "test_results.json").write_text('{"test_acc": 2.0}')
    outcome = command("reproduce", folder, cwd=place)
    assert outcome.code == 5
    assert "test_acc: 2.0 →" in outcome.err


def test_only_unfinished_runs_are_removed_and_only_when_told(ended, here, command, place):
    """`--remove` asks first; told yes, it deletes failed runs with their files and leaves the others."""
    first, second, failed = ended
    asked = command("runs", "--tracking-uri", here, "--remove", cwd=place)
    assert failed.exists()
    assert "Delete these 1 runs" in asked.out
    assert command("runs", "--tracking-uri", here, "--remove", "--yes", cwd=place).code == 0
    assert not failed.parent.exists()
    assert first.exists()
    assert second.exists()
    assert failed.parent.name not in command("runs", "--tracking-uri", here, cwd=place).out


def test_a_store_that_is_not_there_is_not_made(command, place, tmp_path):
    """`runs` on nothing ends with 3 and creates nothing."""
    outcome = command("runs", "--tracking-uri", tmp_path / "none", cwd=place)
    assert outcome.code == 3
    assert "there are no runs" in outcome.err
    assert not (tmp_path / "none").exists()
