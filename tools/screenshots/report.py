"""Take screenshots of the report of a run, narrow and wide, light and dark:

    .venv/bin/python tools/screenshots/report.py OUT

Trains a network on scikit-learn's digits (half a minute), simulates a classifier of 100 classes, and writes
`OUT/report-STATE-WIDTH-SCHEME.png` for each report. Needs Chromium, but no network.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
from deeplightning.figures import class_plots, measures  # noqa: E402
from deeplightning.figures.style import drawn, to_svg  # noqa: E402
from deeplightning.report import write  # noqa: E402
from deeplightning.runfolder import RunFolder  # noqa: E402

WIDTHS, SCHEMES = (360, 1280), {"light": "1", "dark": "0"}  # Blink's numbers for the schemes
WINDOW_HEIGHT = 9000


def command(*words: object, cwd: Path) -> list[str]:
    """Run a verb and return the lines that it prints; exit if it fails."""
    started = [sys.executable, "-m", "deeplightning", *map(str, words)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(started, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.splitlines()


def train(folder: Path) -> RunFolder:
    """Train `configs/base.yaml` and return the run folder."""
    lines = command("train", ROOT / "configs/base.yaml", "logger.params.tracking_uri=mlruns", cwd=folder)
    return RunFolder(lines[-1].removeprefix("Artifact storage path: "))


def hundred_classes() -> str:
    """Return a report of a simulated classifier of 100 classes that confuses classes within groups of five."""
    random = np.random.default_rng(0)
    names = [f"species {number:03}" for number in random.permutation(100)]
    true = random.integers(0, 100, 5000)
    near = true // 5 * 5 + random.integers(0, 5, 5000)
    predicted = np.where(random.random(5000) < 0.8, true, near)
    shuffled = random.permutation(100)
    counts = measures.confusion(shuffled[true], shuffled[predicted], 100)
    found = measures.reliability(random.beta(8, 2, 5000), true == predicted)
    drawings = (
        class_plots.confusion_matrix(counts, names, "test"),
        class_plots.precision_recall(
            measures.from_counts(np.diag(counts), counts.sum(0), counts.sum(1)), names, "test"
        ),
        class_plots.reliability(found, "test"),
    )
    cards = [one for d in drawings for one in write.picture("picture", to_svg(drawn(d), d.alt).encode(), d.alt)]
    return write.document("100 classes", "made up", data_set="test", answers=cards)


def take(file: Path, out: Path, width: int, scheme: str) -> None:
    """Take a screenshot of a whole page, without the empty part below it."""
    browser = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
    )
    if not browser:
        sys.exit("Chromium is not installed: apt-get install chromium")
    words = [browser, "--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{WINDOW_HEIGHT}"]
    words += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--screenshot={out}", file.as_uri()]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    pixels = np.asarray(Image.open(out).convert("RGB"))
    used = np.flatnonzero((pixels != pixels[-1, -1]).any((1, 2)))
    Image.fromarray(pixels[: int(used.max()) + 24]).save(out)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hundred.html").write_text(hundred_classes())
        pages = {"run": train(folder).report, "hundred": folder / "hundred.html"}
        for state, file in pages.items():
            for width in WIDTHS:
                for scheme in SCHEMES:
                    take(file, out / f"report-{state}-{width}-{scheme}.png", width, scheme)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
