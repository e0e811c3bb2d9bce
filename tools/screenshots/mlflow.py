"""Take screenshots of MLflow's pages as `deeplightning monitor` serves them, 1280 pixels wide, light and dark:

    .venv/bin/python tools/screenshots/mlflow.py OUT

Trains three networks on scikit-learn's digits (a minute), and writes `OUT/mlflow-PAGE-SCHEME.png` for each page: the
start, the table of runs, a run with its charts, the comparison of runs, and a logged model. Needs no network. Without
Chromium it prints a message and takes no screenshots.
"""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from browser import CHROMIUM, Browser  # noqa: E402

SEEDS = (1, 2, 3)
SIZE = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
SCHEMES = ("light", "dark")
HIDE_TOOLBARS = (
    "document.documentElement.insertAdjacentHTML('beforeend', '<style>.modebar { display: none !important }</style>')"
)
"""Hides the toolbar that each chart shows without a mouse."""

RENDERED = """new Promise((done) => {
  let unchanged = 0, before = "";
  const check = () => {
    const now = document.querySelector("#root")?.innerHTML ?? "", busy = document.querySelector("[class*=skeleton i]");
    unchanged = now.length > 20000 && now === before && !busy ? unchanged + 1 : 0;
    before = now;
    if (unchanged >= 6) done(true); else setTimeout(check, 500);
  };
  check();
})"""
"""Resolves once the page has not changed for three seconds, since MLflow does not mark the end of rendering."""


def train(folder: Path, seed: int) -> Path:
    """Train `configs/base.yaml`, log the model too, and return the run folder."""
    command = [sys.executable, "-m", "deeplightning", "train", str(ROOT / "configs/base.yaml"), "train.num_epochs=8"]
    settings = [f"seed={seed}", f"model.optimizer.params.lr={0.001 * seed}", "logger.log_model=true"]
    done = subprocess.run([*command, *settings], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)
    return Path(done.stdout.strip().splitlines()[-1].removeprefix("Artifact storage path: "))


@contextmanager
def monitor(folder: Path) -> Iterator[str]:
    """Start `deeplightning monitor` for the runs of a folder, and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "deeplightning", "monitor", "--port", str(port)]
    with (folder / "monitor.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > until:
                sys.exit((folder / "monitor.log").read_text())
            time.sleep(0.2)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        process.wait(30)


def pages(address: str, runs: list[Path]) -> dict[str, str]:
    """Return page addresses by name, in the order in which a new user sees the pages."""
    ids = [run.parent.name for run in runs]
    # MLflow's client cannot be imported: this file has the same name.
    request = urllib.request.Request(f"{address}/api/2.0/mlflow/logged-models/search", b'{"experiment_ids": ["0"]}')
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as response:
        model = json.load(response)["models"][0]["info"]["model_id"]
    compared = f"runs={quote(json.dumps(ids))}&experiments={quote(json.dumps(['0']))}"
    return {
        "start": f"{address}/",
        "table": f"{address}/#/experiments/0/runs",
        "run": f"{address}/#/experiments/0/runs/{ids[-1]}",
        "charts": f"{address}/#/experiments/0/runs/{ids[-1]}/model-metrics",
        "system": f"{address}/#/experiments/0/runs/{ids[-1]}/system-metrics",
        "compare": f"{address}/#/compare-runs?{compared}",
        "models": f"{address}/#/experiments/0/models",
        "model": f"{address}/#/experiments/0/models/{model}",
    }


def take(browser: Browser, shown: dict[str, str], scheme: str, out: Path) -> None:
    """Take all screenshots in one tab, which keeps the state of MLflow's pages."""
    context = browser.call("Target.createBrowserContext")["browserContextId"]
    target = browser.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
    session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    browser.call("Emulation.setDeviceMetricsOverride", session, **SIZE)
    browser.call("Emulation.setEmulatedMedia", session, features=[{"name": "prefers-color-scheme", "value": scheme}])
    for name, address in shown.items():
        browser.call("Page.navigate", session, url="about:blank")  # otherwise only the part after # changes
        browser.call("Page.navigate", session, url=address)
        browser.call("Runtime.evaluate", session, expression=RENDERED, awaitPromise=True)
        browser.call("Runtime.evaluate", session, expression=HIDE_TOOLBARS)
        data = browser.call("Page.captureScreenshot", session)["data"]
        (out / f"mlflow-{name}-{scheme}.png").write_bytes(base64.b64decode(data))
    browser.call("Target.disposeBrowserContext", browserContextId=context)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1]).resolve()
    if CHROMIUM is None:
        print("skipped: screenshots of MLflow need Chromium; apt-get install chromium", file=sys.stderr)
        return
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [train(folder, seed) for seed in SEEDS]
        with monitor(folder) as address:
            browser = Browser(folder)
            try:
                for scheme in SCHEMES:
                    take(browser, pages(address, runs), scheme, out)
            finally:
                browser.close()


if __name__ == "__main__":
    main()
