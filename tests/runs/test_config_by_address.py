"""A run from a config by address, and a run from the config of a run."""

import json
import shlex

import pytest
from test_addresses import Web

from deeplightning.config.source import read
from deeplightning.config.tree import plain


@pytest.fixture
def web(tiny):
    found = Web()
    found.files["/cfg.yaml"] = "_base_: tiny.yaml\ntrain: {num_epochs: 1}\n"
    found.files["/tiny.yaml"] = tiny.read_text()
    yield found
    found.close()


@pytest.fixture
def trained(command, web, place, tmp_path):
    """`trained(CONFIG)` is the folder of its run."""

    def run(*words, **variables):
        return command("train", *words, cwd=place, XDG_CACHE_HOME=str(tmp_path / "cache"), **variables, code=0)

    return run


def test_a_run_keeps_the_address_and_the_digest(trained, web, tracked, place):
    """It has no signature of the address. Its own config is one by address too: `runs:/ID`."""
    outcome = trained(f"{web.url}/cfg.yaml?signature=s3cret")
    assert [path.partition("?")[0] for path in web.asked] == ["/cfg.yaml", "/tiny.yaml"]
    folder = outcome.folder
    run = tracked(folder)
    lines = dict(line.split() for line in run.tags["config"].splitlines())
    assert sorted(lines) == [f"{web.url}/cfg.yaml", f"{web.url}/tiny.yaml"]
    assert all(len(digest) == 64 for digest in lines.values())
    environment = json.loads((folder / "environment.json").read_text())
    assert shlex.split(environment["command"])[2].endswith("/cfg.yaml")
    for path in folder.rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes()

    again = trained(f"runs:/{run.id}", "seed=8", MLFLOW_TRACKING_URI=str(folder.parents[2])).folder
    before, after = (plain(read(each / "cfg.yaml").root) for each in (folder, again))
    assert after.pop("seed") == 8
    assert before.pop("seed") == 7
    assert after["train"] == before["train"]
    assert f"runs:/{run.id}" in tracked(again).tags["config"]
