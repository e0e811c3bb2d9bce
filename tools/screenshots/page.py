"""Takes pictures of the prediction page in six states and of `/docs`, narrow and wide, light and dark:

    .venv/bin/python tools/screenshots/page.py OUT

A network is trained on scikit-learn's digits (half a minute), and a server answers from it. OUT gets a file
`page-STATE-WIDTH-SCHEME.png` of each. It needs Chromium, and no network.
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

DECODED = "Promise.all([...document.images].map((image) => image.decode().catch(() => {})))"


def photograph() -> tuple[str, str, bytes]:
    """A photograph, by its name, type and content."""
    from sklearn.datasets import load_sample_image

    file = io.BytesIO()
    Image.fromarray(np.asarray(load_sample_image("flower.jpg"))).save(file, "JPEG")
    return "flower.jpg", "image/jpeg", file.getvalue()


def start(page: Page, server: Server) -> None:
    """Nothing is asked yet."""
    page.evaluate("until(() => document.querySelectorAll('#samples img').length)")


def answer(page: Page, server: Server) -> None:
    """One picture of the kind that the network knows."""
    page.give("drop", DIGITS[7])
    page.answers()


def photo(page: Page, server: Server) -> None:
    """A photograph, of which the network gets 8 x 8 pixels."""
    page.give("drop", photograph())
    page.answers()
    page.evaluate("until(() => !document.querySelector('.hint').hidden)")


def several(page: Page, server: Server) -> None:
    """Several files, of which one is no picture."""
    page.give("drop", DIGITS[3], ("notes.png", "image/png", b"no picture"), DIGITS[8])
    page.answers()


def key(page: Page, server: Server) -> None:
    """The server asks for a key."""
    page.give("drop", DIGITS[3])
    page.evaluate("until(() => document.querySelector('#note').textContent.includes('API key'))")


def gone(page: Page, server: Server) -> None:
    """The server does not answer any more."""
    server.stop()
    page.give("drop", DIGITS[3], DIGITS[4])
    page.answers()


STATES: dict[str, Callable[[Page, Server], None]] = {
    each.__name__: each for each in (start, answer, photo, several, key, gone)
}


def trained(folder: Path) -> Path:
    """The folder of a run of `configs/base.yaml`."""
    command = [sys.executable, "-m", "deeplightning", "train", str(ROOT / "configs/base.yaml"), "train.num_epochs=5"]
    done = subprocess.run(
        [*command, f"logger.params.tracking_uri={folder / 'mlruns'}"], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return Path(done.stdout.strip().splitlines()[-1].removeprefix("Artifact storage path: "))


@contextmanager
def served(run: Path, folder: Path, state: str) -> Iterator[Server]:
    """The run on a free port."""
    server = Server(run, folder / f"{state}.err", *(("--api-key-env", "KEY") if state == "key" else ()), KEY="a-key")
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def take(run: Path, folder: Path, out: Path) -> None:
    """All pictures of one run."""
    browser = Browser(folder)
    try:
        for state in [*STATES, "docs"]:
            for width in (360, 1280):
                for scheme in ("light", "dark"):
                    with served(run, folder, state) as server:
                        page = Page(browser, server.url, path="docs" if state == "docs" else "")
                        page.look(width, scheme)
                        if state != "docs":
                            STATES[state](page, server)
                        page.evaluate(DECODED)
                        page.shot(out / f"page-{state}-{width}-{scheme}.png")
                        page.close()
    finally:
        browser.close()


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python tools/screenshots/page.py OUT (a folder, which is made)")
    if CHROMIUM is None:
        sys.exit("No Chromium is installed; on Debian: apt-get install chromium")
    out = Path(sys.argv[1]).absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        take(trained(folder), folder, out)
    print(f"{len([*out.glob('page-*.png')])} pictures in {out}")


if __name__ == "__main__":
    main()
