"""The page in a real browser: an image goes in, and what stands in the document is the server's answer.

Chromium is steered by its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/) over two pipes.
"""

import base64
import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from served import COLOURS, ROOT, Server, colour_run, labelled_run, masked_run, negative_run, picture

from deeplightning.kinds import CLASS_COLOURS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

SECONDS = 30
"""How long the browser may take to say something: far more than it needs."""

FLAGS = [
    "--remote-debugging-pipe",
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
]

PREFIX = "/behind/a/proxy"

BECOMES_3_AND_4 = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""

HELPERS = """
globalThis.until = (holds) => new Promise((done) => {
  const look = () => { const found = holds(); if (found) { observer.disconnect(); done(found); } };
  const observer = new MutationObserver(look);
  observer.observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
  look();
});
globalThis.transfer = (files) => {
  const all = new DataTransfer();
  for (const [name, type, data] of files)
    all.items.add(new File([Uint8Array.from(atob(data), (letter) => letter.charCodeAt())], name, { type }));
  return all;
};
globalThis.idle = () => until(() => !document.querySelector("[aria-busy]") && document.querySelector("#answers li"));
"""

READ = """
[...document.querySelectorAll("#answers li")].map((card) => ({
  title: card.querySelector("h2")?.textContent ?? null,
  fault: card.querySelector(".fault")?.textContent ?? null,
  rows: [...card.querySelectorAll("tbody tr")].map((row) => [row.cells[0].textContent, row.cells[2].textContent]),
  shares: [...card.querySelectorAll(".bar i")].map((bar) => bar.clientWidth / bar.parentElement.clientWidth),
  names: [...card.querySelectorAll("figcaption")].map((one) => one.textContent),
  time: card.querySelector(".time").textContent,
}))
"""


class Browser:
    """Chromium without a window, in a process of its own."""

    def __init__(self, folder: Path):
        ours, theirs = os.pipe(), os.pipe()
        self.output, self.input = ours[0], theirs[1]
        given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs[0], ours[1])]
        os.close(theirs[0])
        os.close(ours[1])
        start = [sys.executable, "-c", BECOMES_3_AND_4, *map(str, given), str(CHROMIUM), *FLAGS]
        with (folder / "chromium.log").open("w") as log:
            self.process = subprocess.Popen(
                [*start, f"--user-data-dir={folder / 'profile'}", "about:blank"], pass_fds=given, stdout=log, stderr=log
            )
        for end in given:
            os.close(end)
        self.number, self.unread = 0, b""
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> int:
        """Asks for something; gives the number that its answer will have."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.input, json.dumps(message).encode() + b"\0")
        return self.number

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """The result of one method; events that come before it are kept."""
        number = self.send(method, session, **params)
        while (message := self.receive()).get("id") != number:
            pass
        assert "error" not in message, (method, message["error"])
        return message["result"]

    def receive(self) -> dict[str, Any]:
        """The next message; an event is noted as well."""
        while b"\0" not in self.unread:
            readable, _, _ = select.select([self.output], [], [], SECONDS)
            assert readable, "Chromium says nothing"
            self.unread += os.read(self.output, 1 << 20)
        text, _, self.unread = self.unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        if message.get("method") == "Fetch.requestPaused":  # play the proxy that takes the prefix away
            paused = message["params"]
            url = paused["request"]["url"].replace(PREFIX, "")
            self.send("Fetch.continueRequest", message["sessionId"], requestId=paused["requestId"], url=url)
        return message

    def close(self) -> None:
        self.send("Browser.close")
        self.process.wait(timeout=SECONDS)
        os.close(self.input)
        os.close(self.output)


class Page:
    """One tab with a profile of its own, that shows `url`, or a page below it."""

    def __init__(self, browser: Browser, url: str, prefix: str = "", path: str = ""):
        self.browser, self.url = browser, url
        self.context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=HELPERS)
        if prefix:
            self.call("Fetch.enable", patterns=[{"urlPattern": f"{url}{prefix}/*"}])
        self.look()
        self.call("Page.navigate", url=f"{url}{prefix}/{path}")
        self.wait("Page.loadEventFired")
        self.evaluate(
            "until(() => document.querySelector('#model')?.textContent || document.querySelector('article') || "
            "!document.querySelector('#key').hidden)"
        )

    def call(self, method: str, **params: Any) -> Any:
        return self.browser.call(method, self.session, **params)

    def told(self, method: str) -> list[dict[str, Any]]:
        """The events of one kind so far."""
        ours = [event for event in self.browser.events if event.get("sessionId") == self.session]
        return [event["params"] for event in ours if event["method"] == method]

    def wait(self, method: str) -> dict[str, Any]:
        """The newest event of a kind, or the first that comes."""
        while not (found := self.told(method)):
            self.browser.receive()
        return found[-1]

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript; of a promise once it is there."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def look(self, width: int = 1000, scheme: str = "light", motion: str = "reduce") -> None:
        """Sets what it is looked at with; a narrow window is a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500
        )
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        self.call(
            "Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features.items()]
        )

    def press(self, key: str, text: str = "") -> None:
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=KEYS[key], text=text
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def give(self, event: str, *files: tuple[str, str, bytes]) -> None:
        """Lets go of files over the page, or pastes them."""
        coded = json.dumps([(name, kind, base64.b64encode(data).decode()) for name, kind, data in files])
        kind, key = {"drop": ("DragEvent", "dataTransfer"), "paste": ("ClipboardEvent", "clipboardData")}[event]
        self.evaluate(
            f"document.querySelector('#drop').dispatchEvent(new {kind}('{event}', "
            f"{{bubbles: true, cancelable: true, {key}: transfer({coded})}}))"
        )

    def answers(self) -> list[dict[str, Any]]:
        """What stands in the cards once none is waited for."""
        self.evaluate("idle()")
        found: list[dict[str, Any]] = self.evaluate(READ)
        return found

    def note(self) -> str:
        return str(self.evaluate("document.querySelector('#note').textContent"))

    def shot(self, file: Path) -> np.ndarray:
        """All of the page as seen, uint8 (H, W, 3)."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))

    def close(self) -> None:
        """Closes it, and looks back: no complaint of the browser, and no word to another host."""
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)
        entries = [told["entry"] for told in self.told("Log.entryAdded")]
        assert [entry for entry in entries if entry["source"] != "network"] == []  # those are the refusals
        assert self.told("Runtime.exceptionThrown") == []
        assert self.told("Runtime.consoleAPICalled") == []
        asked = {told["request"]["url"] for told in self.told("Network.requestWillBeSent")}
        assert all(url.startswith((f"{self.url}/", "blob:", "data:")) for url in asked), asked


KEYS = {"Tab": 9, "Enter": 13}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    started = Server(colour_run(place / "colours").path, place / "errors", "--max-upload-mb", "1")
    yield started
    started.stop()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Any]:
    """`open_page(url)` gives a Page."""
    pages: list[Page] = []

    def opened(url: str, prefix: str = "", path: str = "") -> Page:
        pages.append(Page(browser, url, prefix, path))
        return pages[-1]

    yield opened
    for page in pages:
        page.close()


@pytest.fixture
def page(open_page: Any, server: Server) -> Page:
    return open_page(server.url)


def percent(probability: float) -> str:
    return f"{100 * probability:.1f} %"


def expected_rows(server: Server, data: bytes) -> list[list[str]]:
    """What a card's table says, by the server's answer to another client."""
    status, answer = server.ask("POST", "/predict", data)
    assert status == 200
    return [[one["label"], percent(one["probability"])] for one in answer["predictions"]]


SHAPES = {
    "wide": (1000, "light"),
    "wide and dark": (1000, "dark"),
    "phone": (320, "light"),
    "dark phone": (320, "dark"),
}


def test_a_dropped_image_gets_the_servers_answer(page: Page, server: Server, tmp_path: Path) -> None:
    """Classes, probabilities, bars of their length, the picture and the time; told to those who do not see as well."""
    data = picture("green", size=(640, 480))
    page.give("drop", ("a green one.png", "image/png", data))
    (answer,) = page.answers()
    assert answer["rows"] == expected_rows(server, data)
    assert answer["title"] == answer["rows"][0][0] == "green"
    shares = [one["probability"] for one in server.ask("POST", "/predict", data)[1]["predictions"]]
    assert answer["shares"] == pytest.approx(shares, abs=0.01)
    assert answer["names"] == ["a green one.png"]
    assert re.fullmatch(r"\d+(\.\d)? ms from sending to answer, measured in this browser", answer["time"])
    assert re.fullmatch(rf"a green one\.png: green, {answer['rows'][0][1]} \(\d+(\.\d)? ms\)", page.note())
    assert page.evaluate("document.querySelector('#note').role") == "status"
    seen = page.shot(tmp_path / "page.png")
    assert np.all(seen == COLOURS["green"], axis=2).sum() > 10_000  # the picture itself


@pytest.mark.parametrize(("width", "scheme"), SHAPES.values(), ids=SHAPES)
def test_it_can_be_read_everywhere(page: Page, tmp_path: Path, width: int, scheme: str) -> None:
    """Nothing is wider than the window, and words stand out from their ground by WCAG's 4.5 to 1."""
    page.look(width, scheme)
    page.give("drop", ("a" * 200 + ".png", "image/png", picture("blue")), ("b.png", "image/png", b"no picture"))
    assert len(page.answers()) == 2
    page.shot(tmp_path / "page.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    pairs = page.evaluate(COLOURS_OF)
    assert len(pairs) > 8
    for words, ground in pairs:
        assert contrast(words, ground) >= 4.5, (words, ground)
    assert (np.mean(pairs[0][1]) < 128) == (scheme == "dark")


COLOURS_OF = """
[...document.querySelectorAll("body *")].filter((one) => one.checkVisibility() && one.textContent.trim()).map((one) => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  let ground = one;
  while (numbers(getComputedStyle(ground).backgroundColor)[3] === 0) ground = ground.parentElement;
  const colours = [getComputedStyle(one).color, getComputedStyle(ground).backgroundColor];
  return colours.map((text) => numbers(text).slice(0, 3));
})
"""


def contrast(one: list[float], other: list[float]) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio"""

    def luminance(colour: list[float]) -> float:
        shares = [value / 255 for value in colour]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_several_images_are_answered_in_order(page: Page, server: Server) -> None:
    """Each has its own card, whatever becomes of the others; the next choice takes their place."""
    given = [(f"{colour}.png", "image/png", picture(colour)) for colour in ("blue", "red", "green")]
    given.insert(1, ("text.jpg", "image/jpeg", b"no picture"))
    page.give("drop", *given)
    answers = page.answers()
    assert [answer["title"] for answer in answers] == ["blue", None, "red", "green"]
    assert [answer["names"][0] for answer in answers] == [name for name, _, _ in given]
    page.give("drop", given[0])
    assert [answer["title"] for answer in page.answers()] == ["blue"]


def test_what_the_server_refuses_is_told_in_its_words(page: Page, server: Server) -> None:
    """Its sentence stands in the card and is read out; a picture afterwards is answered."""
    page.give("drop", ("text.jpg", "image/jpeg", b"no picture at all"))
    (answer,) = page.answers()
    status, said = server.ask("POST", "/predict", b"no picture at all")
    assert (status, answer["fault"], answer["rows"]) == (415, said["ERROR"], [])
    assert page.note() == f"text.jpg: {said['ERROR']}"
    page.give("drop", ("large.png", "image/png", b"\0" * 3_000_000))
    assert "at most 1 MB" in page.answers()[0]["fault"]
    page.give("drop", ("red.png", "image/png", picture("red")))
    assert page.answers()[0]["title"] == "red"


def test_an_image_can_be_chosen_and_pasted(page: Page, tmp_path: Path) -> None:
    """As well as dropped; the same file also twice. What is no file is told so."""
    for colour in ("red", "blue"):
        (tmp_path / f"{colour}.png").write_bytes(picture(colour))
    for chosen in (["red", "blue"], ["red"], ["red"]):
        root = page.call("DOM.getDocument")["root"]["nodeId"]
        chooser = page.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        files = [str(tmp_path / f"{colour}.png") for colour in chosen]
        page.evaluate("document.querySelector('#answers').replaceChildren()")
        page.call("DOM.setFileInputFiles", files=files, nodeId=chooser)
        assert [answer["title"] for answer in page.answers()] == chosen
    page.give("paste", ("image.png", "image/png", picture("green")))
    assert page.answers()[0]["title"] == "green"
    page.give("drop")
    assert page.note().startswith("That was no file")


def test_the_keyboard_is_enough(page: Page) -> None:
    """Tab comes to the chooser first and shows it, Enter opens it."""
    page.call("Page.setInterceptFileChooserDialog", enabled=True)
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "file"
    assert page.evaluate("getComputedStyle(document.querySelector('#drop')).outlineStyle") == "solid"
    page.press("Enter", "\r")
    assert page.wait("Page.fileChooserOpened")["mode"] == "selectMultiple"
    stops = ["file"]
    while stops[-1]:
        page.press("Tab")
        stops.append(
            page.evaluate("document.activeElement.id || document.activeElement.textContent.slice(0, 9).trim()")
        )
        if stops[-1] == "metrics":
            break
    assert stops == ["file", "3 classes", "docs", "openapi.j", "info", "metrics"]


def test_it_tells_which_model_answers(page: Page, server: Server) -> None:
    """Task, input, run and labels as `/info` has them."""
    info = server.ask("GET", "/info")[1]
    words = page.evaluate("document.querySelector('#model').textContent")
    assert (
        words == "image classification, 8 \N{MULTIPLICATION SIGN} 8 colour, from the run a run; images of up to 1 MB."
    )
    assert info["run"]["folder_name"] == "a run"
    assert page.evaluate("document.querySelector('#classes p').textContent") == ", ".join(info["labels"])


def test_it_may_stand_behind_a_prefix(open_page: Any, server: Server) -> None:
    """A proxy may give the server a path of its own: every address on the page is relative."""
    page = open_page(server.url, PREFIX)
    page.give("drop", ("red.png", "image/png", picture("red")))
    assert page.answers()[0]["title"] == "red"
    asked = [told["request"]["url"] for told in page.told("Network.requestWillBeSent")]
    fetched = {url.removeprefix(server.url) for url in asked if url.startswith("http")}
    assert fetched == {f"{PREFIX}/", f"{PREFIX}/info", f"{PREFIX}/predict"}


def test_a_server_that_is_gone_is_told(open_page: Any, place: Path) -> None:
    """No silence where nobody answers."""
    server = Server(place / "colours", place / "gone")
    page = open_page(server.url)
    server.stop()
    page.give("drop", ("red.png", "image/png", picture("red")))
    assert page.answers()[0]["fault"] == "The server does not answer; see whether it still runs."


def test_a_key_is_asked_for_and_kept_nowhere(open_page: Any, place: Path, server: Server) -> None:
    """The field is there only where a key is needed; images wait for it; it is in no storage and no address."""
    assert open_page(server.url).evaluate("document.querySelector('#key').hidden")
    secured = Server(place / "colours", place / "secured", "--api-key-env", "THE_KEY", THE_KEY="a-key-to-try")
    page = open_page(secured.url)
    assert not page.evaluate("document.querySelector('#key').hidden")
    page.give("drop", *((f"{colour}.png", "image/png", picture(colour)) for colour in ("red", "blue")))
    page.evaluate("until(() => document.querySelector('.fault'))")
    sentence = secured.ask("POST", "/predict", picture("red"))[1]["ERROR"]
    assert page.note() == f"red.png: {sentence}"
    assert page.evaluate("document.activeElement.id") == "secret"
    for key in ("wrong", "a-key-to-try"):
        page.call("Input.insertText", text=key)
        page.press("Enter", "\r")
        if key == "wrong":
            page.evaluate("until(() => document.querySelector('#note').textContent.includes('does not take this key'))")
    page.evaluate("until(() => document.querySelectorAll('h2:not(:empty)').length === 2)")
    assert [answer["title"] for answer in page.answers()] == ["red", "blue"]
    assert page.evaluate("document.querySelector('#key').hidden")
    assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    asked = [told["request"]["url"] for told in page.told("Network.requestWillBeSent")]
    assert not any("a-key-to-try" in url for url in asked)
    secured.stop()


def test_a_picture_is_answered_with_a_picture(open_page: Any, place: Path, tmp_path: Path) -> None:
    """A reconstruction stands beside what was given."""
    server = Server(negative_run(place / "negative").path, place / "negative-errors")
    page = open_page(server.url)
    page.give("drop", ("red.png", "image/png", picture("red")))
    (answer,) = page.answers()
    assert (answer["title"], answer["rows"], answer["names"]) == (None, [], ["red.png", "The model's picture"])
    assert "ms from sending to answer" in answer["time"]
    said = server.ask("POST", "/predict", picture("red"))[1]["image"]
    page.evaluate("Promise.all([...document.images].map((image) => image.decode()))")
    assert page.evaluate("document.images[1].src") == f"data:image/png;base64,{said}"
    seen = page.shot(tmp_path / "page.png")
    for colour in (COLOURS["red"], [255 - value for value in COLOURS["red"]]):
        assert np.all(np.abs(seen.astype(int) - colour) <= 1, axis=2).sum() > 10_000
    server.stop()


def test_a_picture_gets_several_labels(open_page: Any, place: Path) -> None:
    """Those that fit are the title, and bold in the list of all."""
    server = Server(labelled_run(place / "labelled").path, place / "labelled-errors")
    page = open_page(server.url)
    page.give("drop", ("red.png", "image/png", picture("red")))
    (answer,) = page.answers()
    assert answer["title"] == "red, green"
    assert answer["rows"] == expected_rows(server, picture("red"))
    weights = page.evaluate("[...document.querySelectorAll('tbody th')].map((one) => getComputedStyle(one).fontWeight)")
    bold = {row[0] for row, weight in zip(answer["rows"], weights, strict=True) if weight == "600"}
    assert bold == {"red", "green"}
    page.evaluate("until(() => document.querySelector('#classes summary').textContent)")
    assert page.evaluate("document.querySelector('#classes summary').textContent") == "3 labels"
    server.stop()


def test_a_picture_gets_its_mask(open_page: Any, place: Path, tmp_path: Path) -> None:
    """The mask stands beside what was given, and a list says how much each class has, in the colour of the mask."""
    server = Server(masked_run(place / "masked").path, place / "masked-errors")
    page = open_page(server.url)
    page.give("drop", ("green.png", "image/png", picture("green")))
    (answer,) = page.answers()
    assert (answer["title"], answer["names"]) == ("green", ["green.png", "The model's mask"])
    assert answer["rows"] == [["green", "100.0 %"], ["red", "0.0 %"], ["blue", "0.0 %"]]
    said = server.ask("POST", "/predict", picture("green"))[1]
    page.evaluate("Promise.all([...document.images].map((image) => image.decode()))")
    assert page.evaluate("document.images[1].src") == f"data:image/png;base64,{said['mask']}"
    shown = page.evaluate("getComputedStyle(document.querySelector('.bar i')).backgroundColor")
    red, green, blue = CLASS_COLOURS[1]
    assert (said["classes"][1]["colour"], shown) == (f"#{red:02x}{green:02x}{blue:02x}", f"rgb({red}, {green}, {blue})")
    seen = page.shot(tmp_path / "page.png")
    assert np.all(np.abs(seen.astype(int) - CLASS_COLOURS[1]) <= 1, axis=2).sum() > 5_000
    server.stop()


def test_labels_of_markup_are_shown_as_text(open_page: Any, place: Path, tmp_path: Path) -> None:
    """Labels that would run a script in a page that trusted them are words there, and nothing else is asked for."""
    labels = (
        "<img src=x onerror=\"document.title='pwned'\">",
        "</script><script>document.title='pwned'</script>",
        "&lt;b>",
    )
    server = Server(colour_run(place / "markup", labels).path, place / "markup-errors")
    page = open_page(server.url)
    title = page.evaluate("document.title")
    for number, colour in enumerate(COLOURS):
        page.give("drop", (f"<svg onload=document.title='pwned'>{number}.png", "image/png", picture(colour)))
        answer = next(one for one in page.answers() if f">{number}.png" in one["names"][0])
        assert answer["title"] == labels[number]
        assert {row[0] for row in answer["rows"]} == set(labels)
    assert page.evaluate("document.querySelectorAll('#answers script, #answers svg, #answers b').length") == 0
    assert page.evaluate("[...document.images].every((image) => image.src.startsWith('blob:'))")
    assert page.evaluate("document.title") == title
    page.shot(tmp_path / "page.png")
    server.stop()


# The page of the description.

COMMANDS = "[...document.querySelectorAll('figure pre')].map((one) => one.textContent)"


@pytest.mark.parametrize(
    "kind", ["image_classification", "table_regression", "text_classification", "array_multilabel"]
)
def test_the_docs_show_each_address_with_a_command_that_works(open_page: Any, place: Path, kind: str) -> None:
    """Addresses, parameters and statuses are those of `/openapi.json`; each command, run by a shell, is answered."""
    from exported import exported  # here, since it needs torch, and all else does without

    folder = exported(place / kind, kind)[1].path
    server = Server(folder, place / f"{kind}-errors")
    page = open_page(server.url, path="docs")
    described = server.ask("GET", "/openapi.json")[1]["paths"]
    routes = [f"{method.upper()} {path}" for path, methods in described.items() for method in methods]
    assert page.evaluate("[...document.querySelectorAll('nav a')].map((one) => one.textContent)") == routes
    assert page.evaluate("[...document.querySelectorAll('article h2')].map((one) => one.textContent)") == routes
    statuses = page.evaluate(
        "[...document.querySelectorAll('article:first-child summary b')].map((b) => b.textContent)"
    )
    assert statuses == sorted(described["/predict"]["post"]["responses"])
    commands = page.evaluate(COMMANDS)
    assert len(commands) == len(described["/predict"]["post"]["requestBody"]["content"]) + len(routes) - 1
    sent = place / "sent"
    sent.write_bytes(picture("red", size=(5, 6)))
    if kind.startswith("array"):
        np.save(place / "sent.npy", np.zeros((2, 12)))
        sent.write_bytes((place / "sent.npy").read_bytes())
    for command in commands:
        line = re.sub(r"\bFILE\b", str(sent), command).replace("curl -s", "curl -s -w '\n%{http_code}'")
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=SECONDS)
        assert done.stdout.endswith("\n200"), (command, done.stdout)
    server.stop()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_docs_can_be_read_anywhere(open_page: Any, server: Server, scheme: str, width: int, tmp_path: Path) -> None:
    """Narrow or wide, nothing sticks out, opened or not; text stands out from paper and sheet in both schemes."""
    page = open_page(server.url, path="docs")
    page.look(width, scheme)
    for _ in range(2):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    page.shot(tmp_path / "docs.png")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(21, 20, 18)") == (scheme == "dark")


def test_the_docs_work_by_keyboard_and_are_named(open_page: Any, server: Server) -> None:
    """The page links it; each stop has a name; a command is copied, or selected where that is not allowed."""
    page = open_page(server.url)
    assert page.evaluate("document.querySelector('footer a').href") == f"{server.url}/docs"
    page = open_page(server.url, path="docs")
    page.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "POST /predict"
    while page.evaluate("document.activeElement.tagName") != "BUTTON":
        page.press("Tab")
    name = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert name == "Copy the command: multipart/form-data"
    page.press("Enter", "\r")
    page.evaluate("until(() => document.querySelector('#said').textContent)")
    assert re.match("Copied|Selected", page.evaluate("document.querySelector('#said').textContent"))


def test_the_docs_ask_for_a_key_and_stand_behind_a_prefix(open_page: Any, place: Path, server: Server) -> None:
    """A wrong key is refused in words; with the right one all is shown, and commands name the variable, not the key.
    Commands have the address that the browser has."""
    page = open_page(server.url, PREFIX, "docs")
    assert f"{server.url}{PREFIX}/predict" in page.evaluate(COMMANDS)[0]
    secured = Server(place / "colours", place / "docs-key", "--api-key-env", "THE_KEY", THE_KEY="a-key-to-try")
    page = open_page(secured.url, path="docs")
    assert page.evaluate("document.querySelectorAll('article').length") == 0
    page.evaluate("document.querySelector('#secret').focus()")
    for key in ("wrong", "a-key-to-try"):
        page.call("Input.insertText", text=key)
        page.press("Enter", "\r")
        if key == "wrong":
            page.evaluate("until(() => document.querySelector('#note').textContent.includes('does not take this key'))")
    page.evaluate("until(() => document.querySelector('article'))")
    commands = page.evaluate(COMMANDS)
    assert "Authorization: Bearer $API_KEY" in commands[0]
    assert not any("a-key-to-try" in command for command in commands)
    assert page.evaluate("document.activeElement.textContent") == "POST /predict"
    assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    secured.stop()


@pytest.mark.parametrize("name", ["page.html", "docs.html"])
def test_labels_are_words_and_never_markup(name: str) -> None:
    """The page sets text, and text only: nothing that is told to it can run."""
    source = (ROOT / "serve" / name).read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=|\son\w+=", source)
    assert re.findall(r"<(?:script|style)\b[^>]*>", source) == ["<style>", "<script>"]
    assert not re.search(r"(?:https?:)?//[a-z]", source)
