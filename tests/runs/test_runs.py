"""Runs that are over can be listed, repeated, and removed where they did not finish."""

import sqlite3
import uuid

import pytest
from mlflow.tracking import MlflowClient

from deeplightning.cli.listing import UNFINISHED, listing, remove
from deeplightning.tracking import MLflowLogger
from deeplightning.tracking.client import Client


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A store of its own, since runs are removed from it."""
    return tmp_path_factory.mktemp("runs") / "mlruns"


@pytest.fixture(scope="module")
def ended(train, here):
    """Two runs that finished, with another seed, and one that failed."""
    store = f"logger.params.tracking_uri={here}"
    whole = (store, "stages=[train,test]", "train.num_epochs=1")
    first, second = train(*whole).folder, train(*whole, "seed=8", "logger.params.run_name=the second one").folder
    return first, second, train(store, "model.optimizer.params.lr=1e30", code=5).folder


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


def test_runs_are_found_by_status_name_and_metric(ended, here, command, place):
    """Each narrows the list: how a run ended, words of its name or experiment, a metric, and how that compares."""
    first, second, failed = (folder.parent.name for folder in ended)

    def found(*options):
        outcome = command("runs", "--tracking-uri", here, *options, cwd=place, code=0)
        return {line.split()[0]: line for line in outcome.out.splitlines()}

    assert set(found("--status", "failed")) == set(found("--status", "failed", "--status", "killed")) == {failed}
    assert {first, second, failed} <= set(found("--status", "FINISHED", "--status", "failed"))
    assert failed not in found("--status", "finished")
    assert set(found("--status", "running")) == set()
    assert set(found("--name", "second")) == {second}
    assert set(found("--name", "the * one")) == {second}
    assert {first, second, failed} <= set(found("--name", "Default"))
    by_loss = found("--metric", "val_loss")
    assert {first, second} <= set(by_loss)
    assert all("  val_loss " in line for line in by_loss.values())
    assert failed not in found("--metric", "test_acc")
    assert set(found("--metric", "none_such")) == set()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--delete"], "--delete requires --clean"),
        (["--clean", "--status", "running"], "a running run is never removed"),
        (["--status", "lost"], "'lost' is not one of"),
    ],
)
def test_options_that_mean_nothing_are_told(options, words, ended, here, command, place):
    """Exit code 2 and one line that says what to write."""
    outcome = command("runs", "--tracking-uri", here, *options, cwd=place, code=2)
    assert words in outcome.err


def failed_run(store):
    """The folder of a run that failed, made without a training."""
    logger = MLflowLogger(tracking_uri=store, system_metrics=False)
    logger.log("cfg", {"seed": 1})
    logger.finalize("failed")
    return logger.artifact_folder


def test_a_list_is_the_same_whoever_reads_the_store(ended, here, monkeypatch):
    """The rows that are read directly are MLflow's, value by value."""
    directly = listing(str(here))
    monkeypatch.setattr("deeplightning.cli.listing.open_reader", Client)
    assert listing(str(here)) == directly
    assert {row["id"] for row in directly} >= {folder.parent.name for folder in ended}


@pytest.mark.parametrize("is_direct", [True, False], ids=["directly", "by MLflow"])
def test_only_what_has_ended_is_removed(is_direct, tmp_path, monkeypatch):
    """A run that is RUNNING again by then stays with its files; a failed one is gone, and deleted for MLflow."""
    if not is_direct:
        monkeypatch.setattr("deeplightning.cli.listing.open_reader", Client)
    store = tmp_path / "mlruns"
    kept, gone = failed_run(store), failed_run(store)
    rows = listing(str(store), UNFINISHED)
    assert {row["id"] for row in rows} == {kept.parent.name, gone.parent.name}
    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    client.update_run(kept.parent.name, status="RUNNING")
    assert [row["id"] for row in remove(str(store), rows)] == [gone.parent.name]
    assert not gone.parent.exists()
    assert (kept / "cfg.yaml").exists()
    assert [row["status"] for row in listing(str(store))] == ["RUNNING"]
    assert client.get_run(gone.parent.name).info.lifecycle_stage == "deleted"
    with pytest.raises(AssertionError):
        remove(str(store), rows, ["RUNNING"])


def planted(store, run_id, artifacts):
    """A failed run that somebody has written into a store, with a folder of their choice."""
    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    made = client.create_run("0").info.run_id
    client.set_terminated(made, "FAILED")
    with sqlite3.connect(store / "mlflow.db") as database:
        for table in ("tags", "runs"):
            database.execute(f"UPDATE {table} SET run_uuid = ? WHERE run_uuid = ?", (run_id, made))
        database.execute("UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", (str(artifacts), run_id))
    database.close()


def test_a_store_cannot_have_any_other_folder_removed(command, place, tmp_path):
    """Files go only where id and folder, links resolved, are those of a run of the store; a note names the others."""
    store = tmp_path / "mlruns"
    failed = failed_run(store)
    outside, unmarked, linked, held = (uuid.uuid4().hex for _ in range(4))
    (tmp_path / "links").mkdir()
    (store / "0").mkdir(exist_ok=True)
    (store / "0" / linked).symlink_to(tmp_path / "links" / linked)
    folders = {
        "precious": tmp_path / "precious",
        outside: tmp_path / outside,
        unmarked: store / "0" / unmarked,
        linked: tmp_path / "links" / linked,
    }
    for name, folder in folders.items():
        (folder / "artifacts").mkdir(parents=True)
        (folder / "artifacts" / ("notes.txt" if name == unmarked else "cfg.yaml")).write_text("precious")
        planted(store, name, (store / "0" / name if name == linked else folder) / "artifacts")
    planted(store, held, failed)  # the folder of another run
    outcome = command("runs", "--tracking-uri", store, "--clean", "--delete", cwd=place, code=0)
    assert "6 runs deleted" in outcome.err
    for name, folder in folders.items():
        assert [path.read_text() for path in (folder / "artifacts").iterdir()] == ["precious"]
        assert f"{folder if name != linked else store / '0' / linked}: not removed: " in outcome.err, name
    assert outcome.err.count("not removed") == 5
    assert not failed.parent.exists()


def test_runs_are_removed_only_when_told(ended, here, command, place):
    """`--clean` shows what it would remove; with `--delete` failed runs go with their files, and the others stay."""
    first, second, failed = ended
    shown = command("runs", "--tracking-uri", here, "--clean", cwd=place)
    assert [line.split()[0] for line in shown.out.splitlines()] == [failed.parent.name]
    assert "1 run would be removed, with all files; --delete removes them" in shown.err
    assert failed.exists()
    assert "1 run deleted" in command("runs", "--tracking-uri", here, "--clean", "--delete", cwd=place).err
    assert not failed.parent.exists()
    assert first.exists()
    assert second.exists()
    assert failed.parent.name not in command("runs", "--tracking-uri", here, cwd=place).out


def test_a_store_that_is_not_there_is_not_made(command, place, tmp_path):
    """`runs` on nothing ends with 3 and creates nothing."""
    outcome = command("runs", "--tracking-uri", tmp_path / "none", cwd=place, code=3)
    assert "there are no runs" in outcome.err
    assert not (tmp_path / "none").exists()


def test_the_files_of_a_moved_store_are_removed_too(tmp_path):
    """The rows still have the former paths."""
    run_id = failed_run(tmp_path / "mlruns").parent.name
    moved = (tmp_path / "mlruns").rename(tmp_path / "moved")
    assert [row["id"] for row in remove(str(moved), listing(str(moved), UNFINISHED))] == [run_id]
    assert not [*moved.glob(f"*/{run_id}")]
