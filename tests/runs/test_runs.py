"""`deeplightning runs` lists, filters and removes runs."""

import sqlite3
import uuid

import pytest
from mlflow.tracking import MlflowClient

from deeplightning.cli.listing import UNFINISHED, listing, remove
from deeplightning.runfolder import RunFolder
from deeplightning.tracking import MLflowLogger
from deeplightning.tracking.claims import Claim
from deeplightning.tracking.client import Client
from deeplightning.tracking.store import locate


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A separate store, since runs are removed from it."""
    return tmp_path_factory.mktemp("runs") / "mlruns"


@pytest.fixture(scope="module")
def ended(train, here):
    """Folders of two finished runs with different seeds, and of a failed one."""
    store = f"logger.params.tracking_uri={here}"
    short = (store, "stages=[train,test]", "train.num_epochs=1")
    first, second = train(*short).folder, train(*short, "seed=8", "logger.params.run_name=the second one").folder
    return first, second, train(store, "model.optimizer.params.lr=1e30", code=5).folder


def test_runs_are_listed_the_newest_first(ended, here, command, place):
    """Each run is a line with its id, status, results and folder."""
    lines = command("runs", "--tracking-uri", here, cwd=place).out.splitlines()
    first, second, failed = (folder.parent.name for folder in ended)
    assert [line.split()[:2] for line in lines] == [[failed, "FAILED"], [second, "FINISHED"], [first, "FINISHED"]]
    assert "test_acc" in lines[1]
    assert lines[1].endswith(str(ended[1]))


def test_runs_are_found_by_status_name_and_metric(ended, here, command, place):
    """The list can be filtered by status, by parts of the run's or experiment's name, and by metric."""
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
def test_invalid_options_are_refused(options, words, ended, here, command, place):
    """The exit code is 2, and the error says what to write."""
    assert words in command("runs", "--tracking-uri", here, *options, cwd=place, code=2).err


def failed_run(store):
    """Create a failed run without training, and return its folder."""
    logger = MLflowLogger(tracking_uri=store, system_metrics=False)
    logger.log("cfg", {"seed": 1})
    logger.finalize("failed")
    return logger.artifact_folder


def test_a_run_that_has_just_resumed_is_not_removed(tmp_path):
    """A run whose folder a process has locked or claimed keeps its files, even while its store still says FAILED."""
    store, told = tmp_path / "mlruns", []
    kept = failed_run(store)
    rows = listing(str(store), UNFINISHED)
    claim = Claim(locate(str(store)), kept.parent.name, kept / "metrics.jsonl")
    assert remove(str(store), rows, report=told.append) == []
    lock = RunFolder(kept).lock()
    claim.close()
    assert remove(str(store), rows, report=told.append) == []
    assert (kept / "cfg.yaml").exists()
    assert told == [f"{kept.parent.name}: not removed: a process uses it, or has left data to send"] * 2
    lock.release()
    assert len(remove(str(store), rows)) == 1


def test_a_list_is_the_same_whoever_reads_the_store(ended, here, monkeypatch):
    """Rows that are read directly from the database equal MLflow's, value by value."""
    directly = listing(str(here))
    monkeypatch.setattr("deeplightning.cli.listing.open_reader", Client)
    assert listing(str(here)) == directly
    assert {row["id"] for row in directly} >= {folder.parent.name for folder in ended}


@pytest.mark.parametrize("is_direct", [True, False], ids=["directly", "by MLflow"])
def test_only_what_has_ended_is_removed(is_direct, tmp_path, monkeypatch):
    """A run that is RUNNING again by then keeps its files; a failed one is removed, and deleted in MLflow."""
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
    """Write a failed run into a store by hand, with any folder."""
    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    made = client.create_run("0").info.run_id
    client.set_terminated(made, "FAILED")
    with sqlite3.connect(store / "mlflow.db") as database:
        for table in ("tags", "runs"):
            database.execute(f"UPDATE {table} SET run_uuid = ? WHERE run_uuid = ?", (run_id, made))
        database.execute("UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", (str(artifacts), run_id))
    database.close()


def test_a_store_cannot_have_any_other_folder_removed(command, place, tmp_path):
    """A folder is removed only if id and folder, with links resolved, are those of a run of the store; a note names
    each other folder."""
    store = tmp_path / "mlruns"
    failed = failed_run(store)
    outside, unmarked, linked, shared = (uuid.uuid4().hex for _ in range(4))
    (tmp_path / "links").mkdir()
    (store / "0").mkdir(exist_ok=True)
    (store / "0" / linked).symlink_to(tmp_path / "links" / linked)
    parents = {"precious": tmp_path, outside: tmp_path, unmarked: store / "0", linked: tmp_path / "links"}
    folders = {name: parent / name for name, parent in parents.items()}
    for name, folder in folders.items():
        (folder / "artifacts").mkdir(parents=True)
        (folder / "artifacts" / ("notes.txt" if name == unmarked else "cfg.yaml")).write_text("precious")
        planted(store, name, (store / "0" / name if name == linked else folder) / "artifacts")
    planted(store, shared, failed)  # the folder of another run
    outcome = command("runs", "--tracking-uri", store, "--clean", "--delete", cwd=place, code=0)
    assert "6 runs deleted" in outcome.err
    for name, folder in folders.items():
        assert [path.read_text() for path in (folder / "artifacts").iterdir()] == ["precious"]
        assert f"{folder if name != linked else store / '0' / linked}: not removed: " in outcome.err, name
    assert outcome.err.count("not removed") == 5
    assert not failed.parent.exists()


def test_runs_are_removed_only_when_told(ended, here, command, place):
    """`--clean` shows what it would remove; `--delete` removes failed runs with their files, and no others."""
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
    """`runs` on a missing store ends with exit code 3 and creates nothing."""
    outcome = command("runs", "--tracking-uri", tmp_path / "none", cwd=place, code=3)
    assert "there are no runs" in outcome.err
    assert not (tmp_path / "none").exists()


def test_the_files_of_a_moved_store_are_removed_too(tmp_path):
    """They are removed although the rows have the former paths."""
    run_id = failed_run(tmp_path / "mlruns").parent.name
    moved = (tmp_path / "mlruns").rename(tmp_path / "moved")
    assert [row["id"] for row in remove(str(moved), listing(str(moved), UNFINISHED))] == [run_id]
    assert not [*moved.glob(f"*/{run_id}")]


def test_brackets_in_a_name_are_letters(tmp_path):
    """A multirun names its runs by their values, such as a list; only * is special."""
    names = ["hidden=6", "hidden=[64,32]", "what?"]
    for name in names:
        logger = MLflowLogger(tracking_uri=tmp_path, run_name=name, system_metrics=False)
        logger.log_metrics({"x": 1.0}, 0)
        logger.finalize("success")
    for text, found in {"hidden=[64,32]": names[1:2], "t?": names[2:], "h*6": names[:2]}.items():
        assert sorted(row["name"] for row in listing(str(tmp_path), name=text)) == found


def test_the_folder_of_a_failed_group_is_removed(tmp_path):
    """The parent of `--seeds` has tables, but no config."""
    folder = failed_run(tmp_path / "mlruns")
    (folder / "cfg.yaml").rename(folder / "runs.csv")
    told = []
    store = str(tmp_path / "mlruns")
    assert len(remove(store, listing(store, UNFINISHED), report=told.append)) == 1
    assert (told, folder.parent.exists()) == ([], False)
