"""The pages of the server have no fault that axe-core finds (https://github.com/dequelabs/axe-core), in a real browser:
names and roles, contrast, order, live regions; narrow and wide, light and dark."""

import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, Page
from served import COLOURS, Server, colour_run, labelled_run, masked_run, negative_run, picture

AXE = "axe-core@4"
LOOKS = [(width, scheme) for width in (360, 1280) for scheme in ("light", "dark")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm, which brings axe-core, is not installed"),
]

RUN = """
axe.run(document, { resultTypes: ["violations"] }).then(({ violations }) => violations.map(
  ({ id, help, nodes }) => `${id}: ${help}: ${nodes.map((node) => node.html.slice(0, 120)).join(" | ")}`))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accessible")


@pytest.fixture(scope="module")
def axe(place: Path) -> str:
    """The source of axe-core, from npm."""
    done = subprocess.run(["npm", "pack", AXE], cwd=place, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"npm cannot bring {AXE}: {done.stderr.strip().splitlines()[-1:]}")
    (packed,) = place.glob("axe-core-*.tgz")
    with tarfile.open(packed) as archive:
        source = archive.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()


@pytest.fixture(scope="module")
def browser(place: Path) -> Iterator[Browser]:
    started = Browser(place)
    yield started
    started.close()


def ask_one(page: Page) -> None:
    page.give("drop", ("red.png", "image/png", picture("red", size=(900, 600))))
    page.answers()


def ask_several(page: Page) -> None:
    files = [(f"{colour}.png", "image/png", picture(colour)) for colour in COLOURS]
    page.give("drop", *files, ("notes.png", "image/png", b"no picture"))
    page.answers()


def ask_for_the_key(page: Page) -> None:
    page.give("drop", ("red.png", "image/png", picture("red")))
    page.evaluate("until(() => document.querySelector('#note').textContent.includes('API key'))")


def ask_a_sample(page: Page) -> None:
    page.evaluate("until(() => document.querySelector('#samples button')).then((button) => button.click())")
    page.answers()


def open_all(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")


STATES: dict[str, tuple[str, str, Callable[[Page], object]]] = {
    "start": ("colours", "", open_all),
    "one": ("colours", "", ask_one),
    "several": ("colours", "", ask_several),
    "key": ("secured", "", ask_for_the_key),
    "picture": ("negative", "", ask_one),
    "labels": ("labelled", "", ask_one),
    "mask": ("masked", "", ask_one),
    "text": ("text_classification", "", ask_a_sample),
    "row": ("table_regression", "", ask_a_sample),
    "array": ("array_multilabel", "", ask_a_sample),
    "docs": ("colours", "docs", open_all),
    "docs of rows": ("table_regression", "docs", open_all),
    "docs with a key": ("secured", "docs", open_all),
}
"""By name: what is served, the path, and what is done there."""

IMAGES = {"colours": colour_run, "secured": colour_run, "negative": negative_run, "labelled": labelled_run}
IMAGES |= {"masked": masked_run}


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[dict[str, Server]]:
    """A server of each kind."""
    from exported import exported  # here, since it needs torch

    servers = {}
    for kind in {kind for kind, _, _ in STATES.values()}:
        folder = IMAGES[kind](place / kind) if kind in IMAGES else exported(place / kind, kind)[1]
        key = ("--api-key-env", "KEY") if kind == "secured" else ()
        servers[kind] = Server(folder.path, place / f"{kind}-errors", *key, KEY="a-key")
    yield servers
    for server in servers.values():
        server.stop()


@pytest.mark.parametrize("state", STATES)
def test_axe_finds_nothing(browser: Browser, served: dict[str, Server], axe: str, state: str) -> None:
    """No violation, whatever the width and the colour scheme."""
    kind, path, act = STATES[state]
    page = Page(browser, served[kind].url, path=path)
    page.evaluate(f"{axe}; 0")
    act(page)
    found = {}
    for width, scheme in LOOKS:
        page.look(width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found[width, scheme] = page.evaluate(RUN)
    page.close()
    assert found == {look: [] for look in LOOKS}
