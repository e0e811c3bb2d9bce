"""The record of a run's environment: command, machine, packages and Git commit, tested with real repositories."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tiny import git

from deeplightning.tracking import environment
from deeplightning.tracking.parent import Parent


def committed(folder):
    """Make a repository with one commit; return the commit."""
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return subprocess.check_output(["git", "-C", folder, "rev-parse", "HEAD"], text=True).strip()


@pytest.fixture(autouse=True)
def no_settings(tmp_path, monkeypatch):
    """Git reads no settings but the repository's; the working directory is a new folder."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_a_repository_is_its_commit(tmp_path, monkeypatch):
    """A repository is recorded by commit and branch; with a detached head without the branch, before the first commit
    without the commit."""
    commit = committed(".")
    assert environment.describe()["git"] == {"commit": commit, "branch": "trunk"}
    git(".", "checkout", "-q", "--detach")
    assert environment.describe()["git"] == {"commit": commit, "branch": None}
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    git(".", "init", "-q", "-b", "trunk")
    assert environment.describe()["git"] == {"commit": None, "branch": "trunk"}


def test_a_git_that_hangs_is_given_up(monkeypatch, tmp_path_factory):
    """A Git that does not answer within the time limit leaves the record without a commit."""
    committed(".")
    folder = tmp_path_factory.mktemp("bin")
    (folder / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("deeplightning.tracking.environment.SECONDS", 0.2)
    assert environment.describe()["git"] is None


def test_outside_a_repository_the_code_names_its_own(tmp_path, monkeypatch):
    """A run that starts outside a repository records the commit of Deep Lightning itself, if that is a clone. Without
    one, or without Git, the rest is recorded."""
    clone = tmp_path / "clone"
    (clone / "a" / "b").mkdir(parents=True)
    commit = committed(clone)
    monkeypatch.setattr(environment, "__file__", str(clone / "a" / "b" / "environment.py"))
    assert environment.describe()["git"]["commit"] == commit
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "a" / "b" / "environment.py"))
    assert environment.describe()["git"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.describe()["git"] is None


def test_a_description_names_what_a_run_depends_on(tmp_path, monkeypatch):
    """The record is plain JSON with command, machine and package versions, and no environment variables."""
    monkeypatch.setenv("MY_API_KEY", "hunter2-in-a-variable")
    monkeypatch.setattr(sys, "argv", ["train", "a b.yaml", "logger.params.key=hunter2"])
    found = environment.describe(lambda text: text.replace("hunter2", "***"))
    text = json.dumps(found)
    assert "hunter2" not in text
    assert found["command"] == "train 'a b.yaml' logger.params.key=***"
    assert found["directory"] == str(tmp_path / "here")
    assert found["packages"]["torch"].split(".")[0].isdigit()
    assert found["cpu"]["cores"] >= found["cpu"]["usable"] >= 1
    assert found["memory_gib"] > 0
    assert found["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert isinstance(found["gpus"], list)


def test_a_deleted_working_directory_is_survived(tmp_path):
    """If the working directory was deleted, the record has no directory and nothing is raised."""
    (tmp_path / "here").rmdir()
    assert environment.describe()["directory"] is None
    os.chdir(tmp_path)


def test_a_run_of_a_group_under_mlflow_run_keeps_its_store_where_none_is_named(monkeypatch):
    """Child runs get the parent's tracking address only if one is set; otherwise the default leads to the same
    store."""
    logger = SimpleNamespace(type="deeplightning.tracking.MLflowLogger", params={})
    monkeypatch.setenv("MLFLOW_RUN_ID", "a" * 32)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert Parent(SimpleNamespace(logger=logger), "group").overrides("one") == ["logger.params.run_name=one"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "there")
    moved = Parent(SimpleNamespace(logger=logger), "group").overrides("one")
    assert moved == ["logger.params.run_name=one", "logger.params.tracking_uri='there'"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter-47@there")  # files of trials contain no password
    moved = Parent(SimpleNamespace(logger=logger), "group").overrides("one")
    assert moved[1] == "logger.params.tracking_uri='${oc.env:MLFLOW_TRACKING_URI}'"
