"""Generate coverage.md, which lists the tests of each capability, from `coverage.txt` and the tests' sources.

`python tests/coverage_page.py tests/coverage.md` renews the page. It exits with 1 and writes nothing if a row of the
table has neither a test nor a reason for having none, or names a test that does not exist.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent
PLUGINS = TESTS.parent / "plugins"
TABLE = TESTS / "coverage.txt"
NEEDS_GPU = "test_gpu.py"  # its tests are skipped on a machine without a GPU
LACKS = ("gpu", "later", "missing")

START = """\
# What is shown by which test

Deep Lightning unites what five older systems could do. The id of a row tells where an ability comes from: DL from the earlier
Deep Lightning, ST from Stoke, RS from RaySGD's PyTorchTrainer, BO from PyTorch Bolt, UT from pytorch_universal_trainer; two ids
in a row are one ability met twice. C and N are combinations of settings, with the answer that they get. Numbers stand for what
has no id: the rules of the bucketed sampler, and what was decided where the five disagreed.

- **shown**: its tests run on any machine.
- **GPU**: shown on a CPU as far as that goes; the rest needs a GPU, and tests in `test_gpu.py` are skipped without one.
- **in part**: there are tests, and the remark says what they leave out.
- **to come**: there is no key for it yet, or one that this version refuses.
- **missing**: it may well work, but no test shows it.

Made by `.venv/bin/python tests/coverage_page.py tests/coverage.md` from `tests/coverage.txt`.

"""  # noqa: E501


@dataclass
class Row:
    """Line of the table.

    Attributes:
        lacks: "gpu", "later" or "missing" if the remark names a gap in the tests; else "".
        line: its number in the table.
    """

    ids: list[str]
    what: str
    tests: list[str]
    lacks: str
    remark: str
    section: str
    line: int

    @property
    def state(self) -> str:
        """State of the row in one word, for the page."""
        if self.lacks in ("", "gpu"):
            return "GPU" if self.lacks else "shown"
        return "in part" if self.tests else {"later": "to come", "missing": "missing"}[self.lacks]


@dataclass
class Table:
    """Rows, and the errors in the text that they come from."""

    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read(text: str) -> Table:
    """Parse the table's text: `ids | what | tests | remark`, under lines `== section`."""
    table, section = Table(), ""
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("=="):
            section = line.strip("= ")
        elif len(cells) == 4:
            lacks, colon, _ = cells[3].partition(":")
            lacks = lacks if colon and lacks in LACKS else ""
            remark = cells[3].removeprefix(f"{lacks}:").strip() if lacks else cells[3]
            table.rows.append(Row(cells[0].split(", "), cells[1], cells[2].split(), lacks, remark, section, number))
        elif line and not line.startswith("#"):
            table.faults.append(f"line {number}: {len(cells)} parts between |, 4 expected")
    return table


def functions(*folders: Path) -> set[str]:
    """Return `file.py::name` of each test below these folders, read from the sources."""
    return {
        f"{path.name}::{node.name}"
        for folder in folders
        for path in folder.rglob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def faults(table: Table, known: set[str]) -> Iterator[str]:
    """Return the errors of a table, each with its line."""
    yield from table.faults
    for name, count in Counter(name for row in table.rows for name in row.ids).items():
        if count > 1:
            yield f"{name} stands in {count} rows"
    for row in table.rows:
        place = f"line {row.line}, {', '.join(row.ids)}"
        yield from (f"{place}: there is no test {test}" for test in row.tests if test not in known)
        if not row.what or not row.section:
            yield f"{place}: no words, or no section above it"
        if not row.tests and row.lacks not in ("later", "missing"):
            yield f"{place}: no test, and no reason that begins with `later:` or `missing:`"
        if row.lacks and not row.remark:
            yield f"{place}: {row.lacks}, without a reason"
        if row.tests and row.lacks != "gpu" and all(test.startswith(NEEDS_GPU) for test in row.tests):
            yield f"{place}: only tests that need a GPU; say so by `gpu:`"


def page(table: Table) -> str:
    """Return the page as Markdown."""
    states = Counter(row.state for row in table.rows)
    order = ("shown", "GPU", "in part", "to come", "missing")
    counts = ", ".join(f"{states[state]} {state}" for state in order if states[state])
    parts = [START, f"{len(table.rows)} rows: {counts}.\n"]
    for section in dict.fromkeys(row.section for row in table.rows):
        parts.append(f"\n## {section}\n\n| id | capability | state | tests | remark |\n|---|---|---|---|---|\n")
        for row in table.rows:
            if row.section == section:
                tests = "<br>".join(f"`{test}`" for test in row.tests)
                parts.append(f"| {', '.join(row.ids)} | {row.what} | {row.state} | {tests} | {row.remark} |\n")
    return "".join(parts)


def main(target: Path) -> None:
    """Write the page."""
    table = read(TABLE.read_text())
    wrong = list(faults(table, functions(TESTS, PLUGINS)))
    if wrong:
        sys.exit("\n".join(f"{TABLE.name}: {fault}" for fault in wrong))
    target.write_text(page(table))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
