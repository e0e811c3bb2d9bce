"""Take screenshots of the prediction page in six states and of `/docs`, narrow and wide, light and dark:

    .venv/bin/python tools/screenshots/page.py OUT

Trains a network on scikit-learn's digits (half a minute), serves it, and writes `OUT/page-STATE-WIDTH-SCHEME.png` for
each screenshot. Needs Chromium, but no network.
"""

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
from browser import CHROMIUM, Browser, Page  # noqa: E402
from served import Server  # noqa: E402

DIGITS = [(f"{n}.png", "image/png", (ROOT / f"examples/digits/{n}.png").read_bytes()) for n in range(10)]

IMAGES_DECODED = "Promise.all([...document.images].map((image) => image.decode().catch(() => {})))"


def photograph() -> tuple[str, str, bytes]:
    """Return the name, content type and bytes of a photograph."""
    from sklearn.datasets import load_sample_image

    file = io.BytesIO()
    Image.fromarray(np.asarray(load_sample_image("flower.jpg"))).save(file, "JPEG")
    return "flower.jpg", "image/jpeg", file.getvalue()


def start(page: Page, server: Server) -> None:
    """Show the page before any request."""
    page.evaluate("until(() => document.querySelectorAll('#samples img').length)")


def answer(page: Page, server: Server) -> None:
    """Send a picture of a kind that the network was trained on."""
    page.give("drop", DIGITS[7])
    page.answers()


def photo(page: Page, server: Server) -> None:
    """Send a photograph, which is resized to 8 x 8 pixels for the network."""
    page.give("drop", photograph())
    page.answers()
    page.evaluate("until(() => !document.querySelector('.hint').hidden)")


def several(page: Page, server: Server) -> None:
    """Send several files, one of which is not a picture."""
    page.give("drop", DIGITS[3], ("notes.png", "image/png", b"no picture"), DIGITS[8])
    page.answers()


def key(page: Page, server: Server) -> None:
    """Send a picture without the API key that the server requires."""
    page.give("drop", DIGITS[3])
    page.evaluate("until(() => document.querySelector('#note').textContent.includes('API key'))")


def gone(page: Page, server: Server) -> None:
    """Send pictures to a server that has stopped."""
    server.stop()
    page.give("drop", DIGITS[3], DIGITS[4])
    page.answers()


STATES: dict[str, Callable[[Page, Server], None]] = {
    each.__name__: each for each in (start, answer, photo, several, key, gone)
}


def train(folder: Path) -> Path:
    """Train `configs/base.yaml` and return the run folder."""
    command = [sys.executable, "-m", "deeplightning", "train", str(ROOT / "configs/base.yaml"), "train.num_epochs=5"]
    done = subprocess.run(
        [*command, f"logger.params.tracking_uri={folder / 'mlruns'}"], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return Path(done.stdout.strip().splitlines()[-1].removeprefix("Artifact storage path: "))


@contextmanager
def serve(run: Path, folder: Path, state: str) -> Iterator[Server]:
    """Serve the run on a free port."""
    server = Server(run, folder / f"{state}.err", *(("--api-key-env", "KEY") if state == "key" else ()), KEY="a-key")
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def take(run: Path, folder: Path, out: Path) -> None:
    """Take all screenshots of one run."""
    browser = Browser(folder)
    try:
        for state in [*STATES, "docs"]:
            for width in (360, 1280):
                for scheme in ("light", "dark"):
                    with serve(run, folder, state) as server:
                        page = Page(browser, server.url, path="docs" if state == "docs" else "")
                        page.look(width, scheme)
                        if state != "docs":
                            STATES[state](page, server)
                        page.evaluate(IMAGES_DECODED)
                        page.shot(out / f"page-{state}-{width}-{scheme}.png")
                        page.close()
    finally:
        browser.close()


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python tools/screenshots/page.py OUT (a folder, which is created)")
    if CHROMIUM is None:
        sys.exit("Chromium is not installed; on Debian: apt-get install chromium")
    out = Path(sys.argv[1]).absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        take(train(folder), folder, out)
    print(f"{len([*out.glob('page-*.png')])} pictures in {out}")


if __name__ == "__main__":
    main()
