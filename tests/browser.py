"""Chromium without a window, which its DevTools protocol steers over two pipes.

What the tests of the pages of the server and `tools/screenshots/page.py` share. The protocol:
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
  others: card.querySelector("table + .others:not([hidden])")?.textContent ?? null,
  hint: card.querySelector(".hint:not([hidden])")?.textContent ?? null,
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
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        loader = self.call("Page.navigate", url=f"{url}{prefix}/{path}")["loaderId"]
        while not any(
            (event["loaderId"], event["name"]) == (loader, "load") for event in self.told("Page.lifecycleEvent")
        ):  # about:blank is loaded as well
            self.browser.receive()
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
        self.evaluate("Promise.all([...document.images].map((image) => image.decode().catch(() => {})))")
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
