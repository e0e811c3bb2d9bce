"""Write the HTML report of a run, and draw its figures."""

import re
import shlex
from pathlib import Path

from deeplightning.config.tree import flat, line
from deeplightning.faults import SetupError
from deeplightning.figures import curves
from deeplightning.figures.style import Drawing, drawn, save, to_svg
from deeplightning.report import page
from deeplightning.report.evaluation import Evaluation, evaluate
from deeplightning.report.facts import STAGES, Facts, facts, pictures
from deeplightning.runfolder import RunFolder, write_whole
from deeplightning.words import stage_of

MAX_VALUE_CHARACTERS = 400
"""Characters of a value of the config that a report shows."""

MAX_PICTURES = 40
MAX_PICTURES_BYTES = 24 * 2**20
"""Maximum number and total size of the pictures in a report; further ones are only listed."""


def report(run: Facts, into: Path | None = None) -> str:
    """Return the report of a run.

    Args:
        into: folder to which the figures are written as SVG and PNG; None: write nothing.
    """
    found = evaluate(run) or Evaluation("")
    drawings = found.drawings
    charts = [curves.curve(chart, run.best_step) for chart in curves.charts(run.series)]
    evaluations = [(stage, *item) for stage in STAGES for item in run.results.get(stage, {}).items()]
    others, left_out = _other_pictures(run, {*drawings})
    placed, unplaced = _config(run)
    ignored = ("started", "variables", "launch")  # they differ between any two runs
    machine = dict(flat({name: value for name, value in run.environment.items() if name not in ignored}))
    started = run.environment.get("started")
    subtitle = [f"run {run.run_id}" if run.run_id else str(run.folder.path), run.status.lower()]
    subtitle += [f"started {started}"] if started else []
    return page.document(
        run.title,
        ", ".join(part for part in subtitle if part),
        headline=_headline(run),
        curves=[one for drawing in charts for one in page.picture("curve", *_svg(drawing))],
        data_set=found.of,
        answers=[one for name, drawing in drawings.items() for one in page.picture(name, *_svg(drawing, into, name))],
        metrics=[(name, STAGES[stage], f"{value:.6g}") for stage, name, value in evaluations],
        per_class=[(n, f"{p:.4f}", f"{r:.4f}", f"{f:.4f}", f"{s:,}") for n, p, r, f, s in found.per_class],
        confused=[(true, predicted, f"{n:,}") for true, predicted, n in found.confused],
        mistakes=run.mistakes.get(run.stage or next(iter(run.mistakes), ""), []),
        pictures=others,
        left_out=left_out,
        places=run.places,
        placed=placed,
        unplaced=unplaced,
        machine=[(k, v if isinstance(v, str) else line(v)) for k, v in machine.items() if v not in (None, "", {})],
        folder=shlex.quote(str(run.folder.path)),
        config=shlex.quote(str(run.folder.config)),
    )


def _svg(drawing: Drawing, into: Path | None = None, name: str = "") -> tuple[bytes, str]:
    """Return a drawing as SVG, and its description; also save it in the folder `into` if given."""
    svg = to_svg(drawn(drawing), drawing.alt) if into is None else save(drawing, into / name)
    return svg.encode(), drawing.alt


def _headline(run: Facts) -> list[tuple[str, str]]:
    values = []
    if run.best:
        values.append((f"best {run.best['metric']}", f"{run.best['value']:.4g}"))
    for stage in STAGES:
        values += [(name, f"{value:.4g}") for name, value in run.results.get(stage, {}).items()]
    if not values:
        values = [(name, f"{points[-1][1]:.4g}") for name, points in run.series.items() if stage_of(name)[0] == "val"]
    return values[:8]


def _config(run: Facts) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return keys, values and sources of the config, and keys and values of those without a source."""
    placed, unplaced = [], []
    for key, value in run.config.items():
        found = line(value)
        short = found if len(found) <= MAX_VALUE_CHARACTERS else f"{found[: MAX_VALUE_CHARACTERS - 1]}…"
        place = run.places.get(key) or next((p for k, p in run.places.items() if k.startswith(f"{key}.")), None)
        if place:
            placed.append((key, short, place))
        else:
            unplaced.append((key, short))
    return placed, unplaced


_EPOCH_NAME = re.compile(r"(.+)_\d+")


def _other_pictures(run: Facts, drawn_names: set[str]) -> tuple[list[page.Picture], list[str]]:
    """Return the other pictures in the run folder, and the names of those that exceed the limits; of a series with one
    per epoch, only the last."""
    by_name: dict[str, Path] = {}
    for path in pictures(run.folder):
        if path.stem not in drawn_names and (path.suffix == ".svg" or path.stem not in by_name):
            by_name[path.stem] = path
    latest: dict[str, tuple[Path, int]] = {}
    for stem, path in by_name.items():
        of_epoch = _EPOCH_NAME.fullmatch(stem)
        name = of_epoch[1] if of_epoch else stem
        former, number = latest.get(name, (path, 0))
        latest[name] = max(former, path, key=lambda each: (len(each.stem), each.stem)), number + 1  # 10 after 9
    cards: list[page.Picture] = []
    left_out: list[str] = []
    size = 0
    for name, (path, number) in latest.items():
        content = path.read_bytes()
        if len(cards) >= MAX_PICTURES or size + len(content) > MAX_PICTURES_BYTES:
            left_out.append(path.name)
            continue
        size += len(content)
        caption = f"{path.stem}, the last of {number}" if number > 1 else path.stem
        cards += page.picture(name, content, caption=caption)
    return cards, left_out


def write_run(folder: RunFolder, run: Facts | None = None) -> Path:
    """Write the figures of a run as SVG and PNG, and its report, to the run folder.

    Args:
        run: facts about the run; None: read them from the folder.

    Returns:
        The path of the report.

    Raises:
        CheckpointError: this is not a run folder.
        SetupError: the folder cannot be written.
    """
    try:
        content = report(run or facts(folder), folder.path)
    except OSError as error:
        raise SetupError(f"{folder.path}: cannot be written: {error.strerror}; --out FILE sets another file") from error
    write_report(folder.report, content)
    return folder.report


def write_report(path: Path, content: str) -> None:
    """Write a report atomically. It may replace an earlier report but no other file.

    Raises:
        SetupError: the file exists and is not a report, or cannot be written.
    """
    try:
        if path.exists() and page.MARK not in path.read_text(encoding="utf-8", errors="replace")[:2000]:
            raise SetupError(f"{path}: exists and is not a report of Deep Lightning; name another file with --out")
        write_whole(path, content)
    except OSError as error:
        raise SetupError(f"{path}: cannot be written: {error.strerror}; --out FILE sets another file") from error
