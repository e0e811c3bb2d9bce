"""Control headless Chromium through the DevTools protocol over two pipes.

Shared by the tests of the server's pages and `tools/screenshots/page.py`. The protocol:
https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

ANSWER_SECONDS = 30
"""Timeout for a response of the browser; it usually takes milliseconds."""

FLAGS = [
    *("--remote-debugging-pipe", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--no-first-run", "--hide-scrollbars"),
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
  others: card.querySelector("table + .others:not([hidden])")?.textContent ?? null,
  hint: card.querySelector(".hint:not([hidden])")?.textContent ?? null,
}))
"""


class Browser:
    """Headless Chromium in a child process."""

    def __init__(self, folder: Path):
        ours, theirs = os.pipe(), os.pipe()
        self.output, self.input = ours[0], theirs[1]
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs[0], ours[1])]
        os.close(theirs[0])
        os.close(ours[1])
        start = [sys.executable, "-c", BECOMES_3_AND_4, *map(str, ends), str(CHROMIUM), *FLAGS]
        with (folder / "chromium.log").open("w") as log:
            self.process = subprocess.Popen(
                [*start, f"--user-data-dir={folder / 'profile'}", "about:blank"], pass_fds=ends, stdout=log, stderr=log
            )
        for end in ends:
            os.close(end)
        self.number, self.unread = 0, b""
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> int:
        """Send a command; return the number of its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.input, json.dumps(message).encode() + b"\0")
        return self.number

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """Return the result of a command; events that arrive before it are kept."""
        number = self.send(method, session, **params)
        while (message := self.receive()).get("id") != number:
            pass
        assert "error" not in message, (method, message["error"])
        return message["result"]

    def receive(self) -> dict[str, Any]:
        """Return the next message; an event is also recorded."""
        while b"\0" not in self.unread:
            readable, _, _ = select.select([self.output], [], [], ANSWER_SECONDS)
            assert readable, "Chromium does not respond"
            self.unread += os.read(self.output, 1 << 20)
        text, _, self.unread = self.unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        if message.get("method") == "Fetch.requestPaused":  # act as a proxy that strips the prefix
            paused = message["params"]
            url = paused["request"]["url"].replace(PREFIX, "")
            self.send("Fetch.continueRequest", message["sessionId"], requestId=paused["requestId"], url=url)
        return message

    def close(self) -> None:
        self.send("Browser.close")
        self.process.wait(timeout=ANSWER_SECONDS)
        os.close(self.input)
        os.close(self.output)


class Page:
    """Tab with a separate profile that shows `url/path`, behind a proxy if there is a prefix."""

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
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        loader = self.call("Page.navigate", url=f"{url}{prefix}/{path}")["loaderId"]
        while not any(
            (event["loaderId"], event["name"]) == (loader, "load") for event in self.events("Page.lifecycleEvent")
        ):  # about:blank is loaded as well
            self.browser.receive()
        self.evaluate(
            "until(() => document.querySelector('#model')?.textContent || document.querySelector('article') || "
            "!document.querySelector('#key').hidden)"
        )

    def call(self, method: str, **params: Any) -> Any:
        return self.browser.call(method, self.session, **params)

    def events(self, method: str) -> list[dict[str, Any]]:
        """Return the events of a kind so far."""
        ours = [event for event in self.browser.events if event.get("sessionId") == self.session]
        return [event["params"] for event in ours if event["method"] == method]

    def wait(self, method: str) -> dict[str, Any]:
        """Return the latest event of a kind, or wait for the first."""
        while not (found := self.events(method)):
            self.browser.receive()
        return found[-1]

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; wait for the value of a promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def look(self, width: int = 1000, scheme: str = "light", motion: str = "reduce") -> None:
        """Set size and media features of the window; a narrow one is a phone with touch."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=width < 500, maxTouchPoints=5)
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
        """Drop files on the page, or paste them."""
        coded = json.dumps([(name, kind, base64.b64encode(data).decode()) for name, kind, data in files])
        kind, key = {"drop": ("DragEvent", "dataTransfer"), "paste": ("ClipboardEvent", "clipboardData")}[event]
        self.evaluate(
            f"document.querySelector('#drop').dispatchEvent(new {kind}('{event}', "
            f"{{bubbles: true, cancelable: true, {key}: transfer({coded})}}))"
        )

    def answers(self) -> list[dict[str, Any]]:
        """Return the content of the cards once no answer is pending."""
        self.evaluate("idle()")
        self.evaluate("Promise.all([...document.images].map((image) => image.decode().catch(() => {})))")
        found: list[dict[str, Any]] = self.evaluate(READ)
        return found

    def note(self) -> str:
        return str(self.evaluate("document.querySelector('#note').textContent"))

    def shot(self, file: Path) -> np.ndarray:
        """Take a screenshot of the whole page, uint8 (H, W, 3)."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))

    def close(self) -> None:
        """Close the tab; assert that the browser logged nothing and sent no request to another host."""
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)
        entries = [event["entry"] for event in self.events("Log.entryAdded")]
        assert [entry for entry in entries if entry["source"] != "network"] == []  # failed requests
        assert self.events("Runtime.exceptionThrown") == []
        assert self.events("Runtime.consoleAPICalled") == []
        urls = {event["request"]["url"] for event in self.events("Network.requestWillBeSent")}
        assert all(url.startswith((f"{self.url}/", "blob:", "data:")) for url in urls), urls


KEYS = {"Tab": 9, "Enter": 13}
