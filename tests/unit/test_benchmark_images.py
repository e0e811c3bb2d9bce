"""benchmarks/images.py draws what it says, counts what it says, and judges by its bounds."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import images


@pytest.mark.parametrize(
    ("run", "epoch", "broken"),
    [(0.149, 0.15, []), (0.16, 0.1, ["a second run"]), (0.1, 0.2, ["a second epoch"])],
)
def test_bounds_are_judged_by_medians(run, epoch, broken, capsys):
    """Of all rounds, against torchvision without workers."""
    plain = [{"first": 1.0, "second": 1.0, "images": 5}] * 2
    taken = {name: [{"first": 9.0, "second": 9.0, "images": 5}, *plain] for name in images.WAYS}
    taken["ours, first run"] = [{"first": 7.0, "second": value, "images": 5} for value in (epoch, epoch, 5.0)]
    taken["ours, second run"] = [{"first": value, "second": 1.0, "images": 5} for value in (run, 0.0, 7.0)]
    assert [promise.partition(" takes")[0] for promise in images.report(taken)] == broken
    assert f"| ours, second run | {run:.3f} | {run:.3f} |" in capsys.readouterr().out


@pytest.mark.slow
def test_every_way_loads_all_images(tmp_path):
    """In processes of their own, from nothing and with what the first left."""
    images.draw(tmp_path / "images", 40)
    for way in images.WAYS.values():
        found = images.in_process(way, tmp_path / "images", tmp_path / "cache")
        assert found["images"] == 40
        assert found["first"] > 0
        assert found["second"] > 0
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1
