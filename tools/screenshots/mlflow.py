"""Takes pictures of MLflow's pages as `deeplightning monitor` serves them, 1280 pixels wide, light and dark:

    .venv/bin/python tools/screenshots/mlflow.py OUT

Three networks are trained on scikit-learn's digits (a minute). OUT gets a file `mlflow-PAGE-SCHEME.png` of each page:
the start, the table of runs, a run with its charts, the comparison of runs, and a logged model. It needs Chromium
(CHROMIUM names another one), and no network; without Chromium it says so and takes none.
"""

import json
import os
import shutil
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
SEEDS = (1, 2, 3)
SIZE = (1280, 900)
SCHEMES = {"dark": 0, "light": 1}
"""As Chromium numbers what a page learns of the colours that are preferred."""
NO_TOUCH = "primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4"
"""A mouse: else each chart shows its tools."""


def chromium() -> str | None:
    """The browser's program; None: there is none."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def train(folder: Path, seed: int) -> Path:
    """The folder of a run of `configs/base.yaml`, which is logged as a model too."""
    command = [sys.executable, "-m", "deeplightning", "train", str(ROOT / "configs/base.yaml"), "train.num_epochs=8"]
    settings = [f"seed={seed}", f"model.optimizer.params.lr={0.001 * seed}", "logger.log_model=true"]
    done = subprocess.run([*command, *settings], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)
    return Path(done.stdout.strip().splitlines()[-1].removeprefix("Artifact storage path: "))


@contextmanager
def monitor(folder: Path) -> Iterator[str]:
    """The address at which the runs of a folder are shown."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "deeplightning", "monitor", "--port", str(port), "--no-open"]
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
    """Addresses by the names of the pages, in the order in which a newcomer sees them."""
    ids = [run.parent.name for run in runs]
    # Not by MLflow's client: this file has its name.
    asked = urllib.request.Request(f"{address}/api/2.0/mlflow/logged-models/search", b'{"experiment_ids": ["0"]}')
    asked.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(asked, timeout=30) as answer:
        model = json.load(answer)["models"][0]["info"]["model_id"]
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


def take(browser: str, profile: Path, address: str, scheme: str, file: Path) -> None:
    """One picture; the profile remembers what MLflow's page has kept at earlier ones."""
    command = [browser, "--headless=new", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={profile}"]
    command += [f"--window-size={SIZE[0]},{SIZE[1]}", "--virtual-time-budget=60000", f"--screenshot={file}"]
    command += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]},{NO_TOUCH}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if not file.exists():
        sys.exit(f"{browser} took no picture of {address}: {done.stderr[-500:]}")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    browser, out = chromium(), Path(sys.argv[1]).resolve()
    if browser is None:
        print("skipped: there is no Chromium for pictures of MLflow's pages; apt-get install chromium", file=sys.stderr)
        return
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        runs = [train(folder, seed) for seed in SEEDS]
        with monitor(folder) as address:
            for scheme in SCHEMES:
                for name, page in pages(address, runs).items():
                    take(browser, folder / f"profile-{scheme}", page, scheme, out / f"mlflow-{name}-{scheme}.png")


if __name__ == "__main__":
    main()
