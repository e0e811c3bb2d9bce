"""MLflow's pages as `deeplightning monitor` serves them: they open with the runs and their charts.

MLflow 3.17 opens in its view for language models, where the runs of a training are hard to find. Its page keeps such
settings in the browser, so the page that is served from here sets them at the first visit; what somebody has chosen
there stays. `mlflow server --app-name deeplightning` finds this module by the entry point `mlflow.app`.
"""

import json
import os
import threading
import time
import urllib.request
import webbrowser
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from deeplightning.private.mlflow import index_page, page_settings, server_application
from deeplightning.tracking.metric_names import DATA, ENGINE, NETWORK
from deeplightning.tracking.monitor import OPENS, newest_runs, runs_page
from deeplightning.words import stage_of

if TYPE_CHECKING:
    from fastapi import FastAPI
    from mlflow.entities import Run

MAX_RUNS = 200
"""The newest runs that are looked at for the columns of the tables."""
MAX_METRICS = 4
"""Metrics that have a column of their own by default."""
_FIRST = ("acc", "map", "f1", "iou", "dice", "auroc", "r2", "rmse", "mae", "perplexity")
"""What a metric of validation and test is called, the most telling first."""

# A description's picture or command that is wider than its column pushes the next one off the page (3.17).
_STYLE = """<style>
.mlflow-ui-container img[src^="get-artifact?"] { max-width: 100%; }
.note-view-text-area pre, .note-editor-preview pre { white-space: pre-wrap; overflow-wrap: anywhere; }
</style>"""

_SCRIPT = """<script>
(function (settings, start) {
  try {
    for (const [key, value] of Object.entries(settings)) {
      if (localStorage.getItem(key) === null) localStorage.setItem(key, JSON.stringify(value));
    }
  } catch { /* a browser that keeps nothing */ }
  if (start && (location.hash === "" || location.hash === "#/")) location.replace(start);
})(%s, %s);
</script>"""


def page() -> str:
    """Return MLflow's page with a script before its own."""
    html = index_page().read_text(encoding="utf-8")
    shown: Mapping[str, list[str]] = {}
    start: str | None = None
    with suppress(Exception):  # the store's own: MLflow's page reports them better
        from mlflow.tracking import MlflowClient

        shown, start = _looked_up(newest_runs(MlflowClient(os.environ["MLFLOW_BACKEND_STORE_URI"]), MAX_RUNS))
    script = _STYLE + _SCRIPT % (_for_script(page_settings(shown)), _for_script(start))
    head, found, rest = html.partition("<head>")
    return head + found + script + rest if found else script + html


def _looked_up(runs: "Iterable[Run]") -> tuple[Mapping[str, list[str]], str | None]:
    """Return the columns of each experiment's table and the first address: the experiment of the newest run."""
    metrics: dict[str, list[str]] = {}
    for run in runs:
        metrics.setdefault(run.info.experiment_id, []).extend(run.data.metrics)
    return {one: columns(metrics[one]) for one in metrics}, runs_page(next(iter(metrics))) if metrics else None


def columns(metrics: Iterable[str]) -> list[str]:
    """Return the columns of a table of runs, besides name and time, as MLflow's page names them.

    Args:
        metrics: the names of the metrics of the runs.
    """
    judged = {name for name in metrics if stage_of(name)[0] in ("val", "test")}
    telling = {name for name in judged if not stage_of(name)[1].endswith("loss")} or judged
    best = sorted(telling, key=lambda name: (_rank(name), stage_of(name)[0] == "test", name))
    shown = [f"metrics.`{name}`" for name in best[:MAX_METRICS]]
    return [*shown, *(f"tags.`{name}`" for name in (NETWORK, DATA, ENGINE)), "attributes.`Duration`"]


def _rank(name: str) -> int:
    of = stage_of(name)[1]
    return _FIRST.index(of) if of in _FIRST else len(_FIRST)


def _for_script(value: object) -> str:
    """Return JSON that cannot end a script element: a metric may have any name."""
    return json.dumps(value).replace("<", "\\u003c")


def _open_browser(address: str) -> None:
    """Open the page as soon as it answers; give up after a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(OSError):
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            webbrowser.open(address)
            return
        time.sleep(0.2)


def create_app() -> "FastAPI":
    """Create MLflow's server with our page at `/`; it opens a browser if the environment variable `OPENS` is set."""
    from starlette.requests import Request
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    def index(request: Request) -> HTMLResponse:
        return HTMLResponse(page(), headers={"Cache-Control": "no-store"})

    application = server_application()
    application.router.routes.insert(0, Route("/", index))
    if address := os.environ.pop(OPENS, None):
        threading.Thread(target=_open_browser, args=(address,), name="browser", daemon=True).start()
    return application
