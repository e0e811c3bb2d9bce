"""Shell completion offers verbs, options, files and runs: `deeplightning.cli.group`, through click's completion."""

import contextlib
import sqlite3
from contextlib import closing

import pytest
from click.shell_completion import get_completion_class
from commands import python

from deeplightning.cli import cli
from deeplightning.tracking.store import locate

VARIABLE = "_DEEPLIGHTNING_COMPLETE"


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A working directory with a config."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "c.yaml").write_text("seed: 7\n")
    with contextlib.chdir(folder):
        yield folder


def offered(words: str) -> list[str]:
    """Return the lines that bash gets for the last word."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMP_WORDS", words)
        patch.setenv("COMP_CWORD", str(words.count(" ")))
        found = get_completion_class("bash")
        assert found is not None
        return found(cli, {}, "deeplightning", VARIABLE).complete().splitlines()


def test_files_verbs_and_options_are_offered():
    """Click offers verbs and options; for files the shell gets the word `file` and completes them itself."""
    assert offered("deeplightning train more/") == ["file,more/"]
    assert offered("deeplightning check c.yaml --config d") == ["file,d"]
    assert offered("deeplightning tra") == ["plain,train"]
    assert "plain,--dry-run" in offered("deeplightning check c.yaml --d")


def test_runs_are_offered_by_name(place, monkeypatch):
    """Offered are `last` and each run by its name, or by its id if the name is not unique or needs quotes. A missing
    store is not created; a missing or damaged one offers `last`."""

    def found(verb, last=""):
        return offered(f"deeplightning {verb} {last}")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(place / "a store"))
    assert found("test") == ["dir,", "plain,last"]  # bash drops what precedes `dir`
    assert not (place / "a store").exists()
    from deeplightning.tracking.client import Client

    store = locate(place / "a store")
    client = Client(store)
    names = ["SimpleCNN-a3f1", "twice", "twice", "a name; rm"]
    ids = [client.create_run(client.experiment("e"), name, {}).id for name in names]
    words = found("serve")
    assert words[:2] == ["dir,", "plain,last"]
    assert sorted(words[2:]) == sorted(["plain,SimpleCNN-a3f1", *(f"plain,{run}" for run in ids[1:])])
    for verb in ("predict", "export", "reproduce", "diff"):
        assert found(verb, "Simple") == ["dir,Simple", "plain,SimpleCNN-a3f1"]
    assert offered("deeplightning diff last Simple")[1] == "plain,SimpleCNN-a3f1"
    with closing(sqlite3.connect(store.database)) as database:  # an id of a foreign store may be a shell command
        database.execute("UPDATE runs SET run_uuid = 'a;touch x' WHERE run_uuid = ?", (ids[3],))
        database.commit()
    assert not any(";" in word for word in found("serve"))
    store.database.write_text("damaged")
    assert found("test") == ["dir,", "plain,last"]


def test_completion_imports_nothing_heavy():
    """Completion loads neither torch nor any other large library, since the user waits for it."""
    variables = {VARIABLE: "bash_complete", "COMP_WORDS": "deeplightning train c", "COMP_CWORD": "2"}
    done = python("-X", "importtime", "-m", "deeplightning", **variables)
    assert "file,c" in done.stdout.splitlines()
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert loaded & {"torch", "pytorch_lightning", "mlflow", "numpy", "torchvision"} == set()
