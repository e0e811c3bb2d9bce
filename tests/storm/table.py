"""Format the table of a storm, and the command that repeats a case."""

import shlex

from storm.schedule import Storm


def repeat(kind: str, seed: int, number: int) -> str:
    """Return the command that runs one case again."""
    return shlex.join(["bash", "test.sh", "--storm", "--seed", str(seed), "--only", kind, "--case", str(number)])


def table(storm: Storm) -> str:
    """Return a Markdown table with a row per kind."""
    rows = [("kind", "what", "tried", "cases", "broken", "s a case", "tried an hour")]
    for kind, tally in storm.tallies.items():
        what = str(storm.modules[kind].WHAT)
        if not tally.cases:
            rows.append((kind, what, "0", "0", "", "", f"skipped: {tally.skipped}" if tally.skipped else "not run"))
            continue
        rate = 3600 * tally.tried / storm.elapsed if storm.elapsed else 0
        mean = f"{tally.seconds / tally.cases:.1f}"
        rows.append((kind, what, f"{tally.tried:,}", f"{tally.cases:,}", str(tally.broken), mean, f"{rate:,.0f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )
