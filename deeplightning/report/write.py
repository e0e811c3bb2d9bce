"""Write the HTML report of a run, from the template `page.html`, and draw its figures.

A report is one file without scripts or network access: all text is redacted, and escaped by Jinja; pictures are data
URLs in `<img>`, where an SVG cannot run scripts; a Content-Security-Policy forbids everything else.
"""

import base64
import csv
import re
import shlex
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from deeplightning.config.tree import flat, line
from deeplightning.faults import SetupError
from deeplightning.figures import class_plots, curves, measures
from deeplightning.figures.style import DARK, GRID, INK, MUTED, PAPER, RED, Drawing, drawn, save, to_svg
from deeplightning.report.facts import PNG, STAGES, Facts, Mistake, facts, is_inside, pictures, without_secrets
from deeplightning.runfolder import RunFolder, write_whole
from deeplightning.version import __version__
from deeplightning.words import printable, stage_of

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
    return document(
        run.title,
        ", ".join(part for part in subtitle if part),
        headline=_headline(run),
        curves=[one for drawing in charts for one in picture("curve", *_svg(drawing))],
        data_set=found.of,
        answers=[one for name, drawing in drawings.items() for one in picture(name, *_svg(drawing, into, name))],
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


def _other_pictures(run: Facts, drawn_names: set[str]) -> "tuple[list[Picture], list[str]]":
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
    cards, left_out, size = list[Picture](), list[str](), 0
    for name, (path, number) in latest.items():
        content = path.read_bytes()
        if len(cards) >= MAX_PICTURES or size + len(content) > MAX_PICTURES_BYTES:
            left_out.append(path.name)
            continue
        size += len(content)
        cards += picture(name, content, caption=f"{path.stem}, the last of {number}" if number > 1 else path.stem)
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
        if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace")[:2000]:
            raise SetupError(f"{path}: exists and is not a report of Deep Lightning; name another file with --out")
        write_whole(path, content)
    except OSError as error:
        raise SetupError(f"{path}: cannot be written: {error.strerror}; --out FILE sets another file") from error


MAX_ANSWERS_BYTES = 512 * 2**20
"""Maximum size of a file of answers."""

MAX_CLASSES = 100_000


@dataclass
class Evaluation:
    """Results on a data set."""

    of: str  # name of the data set
    drawings: dict[str, Drawing] = field(default_factory=dict)  # by file name
    # For each class: name, precision, recall, F1 and number of samples.
    per_class: list[tuple[str, float, float, float, int]] = field(default_factory=list)
    # True class, predicted class and count, the most frequent first.
    confused: list[tuple[str, str, int]] = field(default_factory=list)


def evaluate(run: Facts) -> Evaluation | None:
    """Evaluate the run's answers to its test set, else to its validation set. Return None if none are readable."""
    stage = run.stage
    if stage is None or not is_inside(run.folder, path := run.folder.stage_predictions(stage), MAX_ANSWERS_BYTES):
        return None
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            names = next(rows, [])
            columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        found, prefix = Evaluation(STAGES[stage]), run.folder.results(stage).name.partition("_")[0]
        if {"label", "predicted_class", "predicted_label"} <= columns.keys():
            _evaluate_classes(run, columns, prefix, found)
        elif {"labels", "predicted_labels"} <= columns.keys():
            _evaluate_labels(columns, prefix, found)
        elif targets := [name for name in columns if name.startswith("target")]:
            _evaluate_targets(run, targets, columns, prefix, found)
        return found
    except (OSError, ValueError, KeyError, csv.Error, OverflowError, MemoryError):
        return None


def _evaluate_targets(run: Facts, targets: list[str], columns: dict[str, Any], prefix: str, found: Evaluation) -> None:
    predictions = [f"prediction{name.removeprefix('target')}" for name in targets]
    truth, predicted = (np.stack([np.array(columns[name], float) for name in of], 1) for of in (targets, predictions))
    kept = np.isfinite(truth).all(1) & np.isfinite(predicted).all(1)
    names = run.classes if len(run.classes) == len(targets) else targets
    if kept.any():
        drawing = curves.truth_against_prediction(truth[kept], predicted[kept], names, found.of)
        found.drawings[f"{prefix}_truth"] = drawing


def _evaluate_classes(run: Facts, columns: dict[str, Any], prefix: str, found: Evaluation) -> None:
    labels, predicted = (np.array(columns[name], np.int64) for name in ("label", "predicted_class"))
    number = max(int(labels.max()), int(predicted.max())) + 1
    if min(labels.min(), predicted.min()) < 0 or number > MAX_CLASSES:
        raise ValueError("no classes")
    names = {int(p): name for p, name in zip(predicted, columns["predicted_label"], strict=True)}
    names |= dict(enumerate(run.classes[:MAX_CLASSES]))
    number = max(number, len(run.classes[:MAX_CLASSES]))
    class_names = [names.get(n, str(n)) for n in range(number)]
    counted = (labels[labels == predicted], predicted, labels)
    each = measures.from_counts(*(np.bincount(one, minlength=number) for one in counted))
    found.per_class = list(zip(class_names, *(one.tolist() for one in each), strict=True))
    found.confused = [(class_names[t], class_names[p], n) for t, p, n in measures.most_confused(labels, predicted)]
    if number <= class_plots.MAX_MATRIX_CLASSES:
        counts = measures.confusion(labels, predicted, number)
        found.drawings[f"{prefix}_confusion_matrix"] = class_plots.confusion_matrix(counts, class_names, found.of)
    found.drawings[f"{prefix}_classes"] = class_plots.precision_recall(each, class_names, found.of)
    probability = np.array(columns.get("predicted_probability", []), float)
    if not len(probability) or not np.isfinite(probability).all():
        return
    reliability = measures.reliability(probability, labels == predicted)
    found.drawings[f"{prefix}_reliability"] = class_plots.reliability(reliability, found.of)
    if number == 2 and 0 < labels.sum() < len(labels):
        score = np.where(predicted == 1, probability, 1 - probability)
        found.drawings[f"{prefix}_roc"] = class_plots.two_classes(score, labels == 1, class_names[1], found.of)


def _evaluate_labels(columns: dict[str, Any], prefix: str, found: Evaluation) -> None:
    names = [name.removeprefix("probability_") for name in columns if name.startswith("probability_")]
    true, answered = (
        np.array([[name in row for name in names] for row in (set(text.split("|")) for text in columns[column])])
        for column in ("labels", "predicted_labels")
    )
    each = measures.from_counts((true & answered).sum(0), answered.sum(0), true.sum(0))
    found.per_class = list(zip(names, *(one.tolist() for one in each), strict=True))
    found.drawings[f"{prefix}_classes"] = class_plots.precision_recall(each, names, found.of)


MARK = '<meta name="generator" content="Deep Lightning'
"""Tag that identifies a file as a report."""

WIDE_PIXELS = 620
"""Width in CSS pixels above which a picture keeps its size and is scrolled on a narrow page."""

_SVG_WIDTH = re.compile(rb'<svg[^>]*?\swidth="([\d.]+)pt"')


@dataclass
class Picture:
    """A PNG or SVG of a page."""

    url: Markup
    alt: str
    caption: str
    kind: str  # "wide" for a drawing that is scrolled, "small" for a PNG that is enlarged, else ""
    width: int | None  # in CSS pixels; None: as large as it is


def picture(name: str, content: bytes, alt: str = "", caption: str = "") -> list[Picture]:
    """Return a PNG or SVG for a page; [] for other content."""
    kind, width, alt = "", None, alt or name.replace("_", " ")
    if content.startswith(PNG):
        size = struct.unpack(">I", content[16:20])[0] if len(content) > 24 else 0
        if size < 300:
            kind, width = "small", max(size, 96)
    elif (found := _SVG_WIDTH.search(content[:2000])) is not None:
        width = round(float(found[1]) * 4 / 3)
        kind = "wide" if width > WIDE_PIXELS else ""
    else:
        return []
    return [Picture(_as_url(content), alt, caption, kind, width)]


def _as_url(content: bytes) -> Markup:
    kind = "png" if content.startswith(PNG) else "svg+xml"
    return Markup(f"data:image/{kind};base64,{base64.b64encode(content).decode()}")


def _as_table(mistakes: Sequence[Mistake]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return head and rows of a table of the worst answers, without empty columns."""
    names = dict.fromkeys(name for one in mistakes for name in one.words)
    columns = {"text": [one.text for one in mistakes]}
    columns |= {name: [one.words.get(name, "") for one in mistakes] for name in names}
    columns |= {"sample": [one.name for one in mistakes]}
    kept = {name: cells for name, cells in columns.items() if name in names or any(cells)}
    return [*kept], list(zip(*kept.values(), strict=True))


def _to_text(value: object) -> str:
    """Redact a value and make it printable, unless it is HTML."""
    return value if isinstance(value, Markup) else printable(without_secrets(str(value)), "\t\n\r")


def _to_breakable(value: object) -> Markup:
    """Return the HTML of a text, such as a key or a path, whose lines may break between its parts."""
    return Markup(re.sub(r"(?<=\w)([._/])(?=\w)", r"\1<wbr>", str(escape(_to_text(value)))))


def _style() -> str:
    """Return the style sheet: colours for light and dark mode, then `page.css`."""
    names = {"ink": INK, "muted": MUTED, "line": GRID, "paper": PAPER}
    light = "".join(f"--{name}: {value}; " for name, value in names.items())
    dark = "".join(f"--{name}: {DARK[value]}; " for name, value in names.items())
    light += f"--back: #f3f5f8; --accent: #1f6fb5; --bad: {RED};"
    dark += "--back: #0e1116; --accent: #6fb1ec; --bad: #ee7272;"
    colours = f":root {{ color-scheme: light dark; {light} }}\n"
    colours += f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    return colours + Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def document(title: str, subtitle: str, **values: Any) -> str:
    """Return the page. The template uses the values in its sections, and leaves out sections without content."""
    templates = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=templates, autoescape=True, finalize=_to_text, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"as_table": _as_table, "as_url": _as_url, "breakable": _to_breakable}
    fixed = {"style": Markup(_style()), "generator": f"Deep Lightning {__version__}"}
    return jinja.get_template("page.html").render(title=title, subtitle=subtitle, **fixed, **values) + "\n"
