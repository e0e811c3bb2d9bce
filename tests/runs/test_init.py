"""A project that `deeplightning init` writes passes `check --dry-run` and trains unchanged, with data and without."""

import csv
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deeplightning.cli.init import KINDS

LIMITS = {"images": 60, "text": 60, "segmentation": 20, "own": 60}
"""By kind, the number of samples for a short epoch; tables and signals are small."""

TABLES = {"table", "regression"}
"""Kinds whose project has a table, which is inspected like a user's."""


def pictures(root):
    rng = np.random.default_rng(0)
    for name, low in (("a dark one", 0), ("light", 128)):
        (root / name).mkdir(parents=True)
        for number in range(20):
            Image.fromarray(rng.integers(low, low + 127, (16, 16), np.uint8)).save(root / name / f"{number}.png")


def texts(path):
    with path.open("w", newline="") as file:
        rows = [[f"a {'good' if i % 2 else 'bad'} film, number {i}", "+" if i % 2 else "-"] for i in range(60)]
        csv.writer(file).writerows([["review", "sentiment"], *rows])


def masks(root):
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for number in range(20):
        values = rng.integers(0, 255, (16, 24, 3), np.uint8)
        Image.fromarray(values).save(root / "images" / f"{number}.jpg")
        Image.fromarray((values[..., 0] > 128).astype(np.uint8)).save(root / "masks" / f"{number}.png")


def numbers(path):
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        rows = [[a, "x", b, 3 * a - b] for a, b in rng.normal(1000, 3, (60, 2)).tolist()]
        csv.writer(file).writerows([["width", "name", "height", "price"], *rows])


def awkward(path):
    """Write a table with semicolons, decimal commas, a marker among numbers, dates, codes, gaps in the target, and
    classes of one row."""
    rng = np.random.default_rng(0)
    lines = ["# by hand", "Tag;zip;Fläche;;kind"]
    for number, area in enumerate(rng.uniform(1000, 9000, 60)):
        value = "?" if number == 7 else f"{area:,.1f}".translate({ord(","): ".", ord("."): ","})
        kind = "" if number % 10 == 9 else f"rare{number}" if number % 20 == 0 else "None" if area > 4000 else "Some"
        lines.append(f"2024-02-{number % 28 + 1:02d};0{number % 5};{value};{number};{kind}")
    path.write_text("\n".join(lines), encoding="latin-1")


def waves(root):
    rng = np.random.default_rng(0)
    for name, speed in (("slow", 0.2), ("quick", 0.9)):
        (root / name).mkdir(parents=True)
        for number in range(20):
            np.save(root / name / f"{number}.npy", np.sin(np.arange(32 + number % 3) * speed + rng.random()))


def labelled(root):
    rng = np.random.default_rng(0)
    root.mkdir()
    lines = ["file,labels"]
    for number in range(30):
        has = rng.random(2) < 0.5
        pixels = rng.integers(0, 90, (8, 8, 3)) + 150 * np.append(has, False)
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"{number}.png")
        lines.append(f"{number}.png,{'|'.join(name for name, each in zip(('red', 'green'), has, strict=True) if each)}")
    (root / "labels.csv").write_text("\n".join(lines))


DATA = [("images", pictures), ("images", labelled), ("text", texts), ("segmentation", masks), ("table", numbers)]
DATA += [("table", awkward), ("regression", numbers), ("signal", waves)]
QUICK = [("text", None), ("images", pictures), ("table", numbers)]
WRITTEN = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
    for case in (*((kind, None) for kind in KINDS), *DATA)
]


@pytest.mark.parametrize(("kind", "data"), WRITTEN)
def test_what_is_written_passes_the_checks_and_trains(command, tmp_path, kind, data):
    """A project in a folder with a space in its name passes the checks and trains an epoch; the commands in its
    README work, and its modules are in the run's code.zip."""
    arguments = []
    if data is not None:
        data(tmp_path / "my data")
        arguments = ["--data", "my data"]
    written = command("init", "a new project", "--kind", kind, *arguments, cwd=tmp_path, code=0)
    assert ("guessed " in written.out) == (data is not None or kind in TABLES)
    assert written.out.endswith("next       cd 'a new project' && deeplightning train\n")
    project = tmp_path / "a new project"
    assert {"config.yaml", "README.md", ".gitignore"} <= {path.name for path in project.iterdir()}
    checked = command("check", "--dry-run", cwd=project, code=0)
    known = ("engine.gpus: auto", "unchecked: engine.gpus: tried in one process")  # the second without the plug-in
    assert [line for line in checked.err.splitlines() if not line.startswith(known)] == []
    limit = [f"data.module.params.limit={LIMITS[kind]}"] if data is None and kind in LIMITS else []
    trained = command("train", "train.num_epochs=1", *limit, cwd=project, code=0)
    assert (trained.folder / "bundle" / "bundle.json").is_file()
    assert trained.folder.is_relative_to(project)
    readme = (project / "README.md").read_text()
    assert "deeplightning serve last" in readme
    for explained in re.findall("`deeplightning (explain[^`]*)`", readme):
        assert command(*explained.split(), cwd=project).code == 0, explained
    modules = {path.name for path in project.glob("*.py")}
    assert {name for name in modules if f"`{name}`" not in readme} == set()
    with zipfile.ZipFile(trained.folder / "code.zip") as code:
        assert modules <= {Path(name).name for name in code.namelist()}


def test_every_kind_is_in_the_help(command, tmp_path):
    """`--help` lists every kind; an unknown kind is exit code 2."""
    text = command("init", "--help", cwd=tmp_path).out
    assert [kind for kind in KINDS if kind not in text] == []
    refused = command("init", "--kind", "imges", cwd=tmp_path, code=2)
    assert "Did you mean images?" in refused.err
    assert [*tmp_path.iterdir()] == []
