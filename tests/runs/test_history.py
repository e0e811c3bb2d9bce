"""Configs outlive releases: those of ten commits of the repository's history, which `tests/history` holds.

Each file there has the configs of one commit as they were written, and complete as the `check` of that commit printed
them, which is also the `cfg.yaml` of a run.
"""

import shutil
from pathlib import Path

import pytest
import yaml

from deeplightning.checks.examine import examine
from deeplightning.cli.migrate import migrated
from deeplightning.config import versions
from deeplightning.config.moved import MOVED, present
from deeplightning.config.tree import flat, parse, plain
from deeplightning.config.versions import ROWS, Changed, Renamed
from deeplightning.run.load import load_run
from deeplightning.runfolder import RunFolder

ROOT = Path(__file__).parents[2]
RELEASES = sorted((ROOT / "tests" / "history").glob("*.yaml"))
CHANGED = {row.key for row in ROWS if isinstance(row, Changed)}
"""The keys whose defaults have changed since."""


def settings(path: Path) -> dict[str, object]:
    """The complete config of a file by dotted keys; it has no faults."""
    report = examine(path)
    assert report.faults == [], (path, [str(fault) for fault in report.faults])
    return dict(flat(report.config.public()))


@pytest.mark.parametrize(
    "release",
    [pytest.param(file, marks=() if n in (1, 2) else pytest.mark.slow) for n, file in enumerate(RELEASES)],
    ids=lambda file: file.stem,
)
def test_configs_of_a_former_release_mean_the_same(release, tmp_path, monkeypatch):
    """As written, migrated, and complete as a run kept it: each key that was there has its value, but for defaults
    that the table of changes lists."""
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.chdir(tmp_path)
    for folder in (ROOT / "examples").iterdir():
        if folder.is_dir():
            shutil.copytree(folder, tmp_path / "examples" / folder.name, ignore=shutil.ignore_patterns("*.yaml"))
    for file in RELEASES[: RELEASES.index(release) + 1]:
        found = yaml.safe_load(file.read_text())
        for name, texts in found.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts["written"])
    for name, texts in found.items():
        if "complete" not in texts:  # an option of a group
            continue
        path = tmp_path / name
        now = settings(path)
        complete = path.with_name(f"complete.{path.name}")
        complete.write_text(texts["complete"])
        then = {
            key: present(value) if isinstance(value, str) else value
            for key, value in flat(plain(parse(texts["complete"], name, [])))
        }
        kept = settings(complete)
        assert {key: kept[key] for key in then} == then, name
        differs = {key for key in then if now.get(key) != then[key]}
        assert differs <= CHANGED, (name, {key: (then[key], now.get(key)) for key in differs - CHANGED})
        result = migrated(path)
        moved = [change for change in result.changes if change.startswith(tuple(MOVED))]
        assert [change for change in result.changes if change not in moved] == ["version: 1"]
        assert bool(moved) == any(f"{module}." in texts["written"] for module in MOVED)
        path.write_text(result.after)
        assert settings(path) == now, name
        path.write_text(texts["written"])


def test_ten_releases_are_there():
    """From the first commit with a config on."""
    assert len(RELEASES) == 10
    assert sum(len(yaml.safe_load(file.read_text())) for file in RELEASES) > 140


def test_a_run_of_an_older_version_is_loaded(tmp_path, monkeypatch):
    """Its `cfg.yaml` is migrated in memory, as in `test`, `predict`, `export` and `serve`, and stays as it is."""
    row = Renamed(1, "train.epochs_in_all", "train.num_epochs")
    monkeypatch.setattr(versions, "ROWS", (*ROWS, row))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    text = yaml.safe_load(RELEASES[-2].read_text())["configs/base.yaml"]["complete"]
    assert "  num_epochs: 15\n" in text
    (run / "cfg.yaml").write_text(text.replace("  num_epochs: 15\n", "  epochs_in_all: 15\n"))
    before = (run / "cfg.yaml").read_bytes()
    cfg = load_run(RunFolder(run), [], "test")
    assert (cfg.version, cfg.train.num_epochs) == (1, 15)
    assert (run / "cfg.yaml").read_bytes() == before
    (run / "cfg.yaml").write_text(f"version: 2\n{text}")
    with pytest.raises(Exception, match="this config has version 2") as refused:
        load_run(RunFolder(run), [], "test")
    assert refused.value.exit_code == 2
