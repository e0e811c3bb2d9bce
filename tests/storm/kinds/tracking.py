"""A tracking server that refuses, stalls, resets, answers 500, loses answers, is slow, dies, and comes back.

Saying a point never waits for it, the end of a run waits no longer than its limit, and after it is back each point is
there once, with parameters and status.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from commands import free_port

from storm.place import Place, expect
from storm.proxy import MODES, Proxy, forked, serve_mlflow, wait_for

WHAT = "a tracking server that refuses, stalls, resets, answers 500, loses answers, is slow, dies, comes back"
HOUR = 300
LIMIT = 240
PRELOAD = ("mlflow.server", "mlflow.server.handlers", "werkzeug.serving", "mlflow.store.tracking.sqlalchemy_store")

DRAIN = 2.0
LONGEST = 1.0
"""Seconds that saying a point may take on a busy machine; alone it takes some microseconds."""


def case(draw: random.Random, place: Place) -> str:
    """A few runs against one server, each with its own weather."""
    os.environ["DEEPLIGHTNING_TRACKING_DRAIN"] = str(DRAIN)
    port = int(free_port())
    proxy, told = Proxy(place.folder, port), []
    with forked(serve_mlflow, place.folder, port), forked(proxy.listen):
        wait_for(port)
        wait_for(proxy.port)
        for number in range(4):
            weather = [(draw.choice(MODES), draw.uniform(0.05, 1.5)) for _ in range(draw.randint(1, 4))]
            dies = draw.random() < 0.2
            told.append(", ".join(f"{mode} {seconds:.1f} s" for mode, seconds in weather) + ", killed" * dies)
            _one(place, proxy, weather, draw.randint(20, 400), told[-1], dies)
            place.count = number + 1
    return "; ".join(told)


def _one(place: Place, proxy: Proxy, weather: list[tuple[str, float]], points: int, words: str, dies: bool) -> None:
    address, file = f"http://127.0.0.1:{proxy.port}", place.folder / "told"
    file.unlink(missing_ok=True)
    proxy.set("pass")
    pause = sum(lasts for _, lasts in weather) / points
    with forked(_run, address, file, points, pause, dies) as process:
        _until(lambda: file.exists(), 60, f"{words}: no run is opened")
        for mode, lasts in weather:
            proxy.set(mode)
            time.sleep(lasts)
        begun = time.monotonic()
        process.join()
        waited = time.monotonic() - begun
    run_id, *times = file.read_text().split()
    if not dies:
        expect(len(times) == 2, f"{words}: the process of the run has failed")
        slowest, end = map(float, times)
        expect(slowest < LONGEST, f"{words}: saying a point took {slowest:.2f} s")
        # Stopping waits for its limit, and once more where what came last is tried again.
        expect(end < 2 * DRAIN + 10, f"{words}: the end of the run took {end:.1f} s, waited for {waited:.1f} s")
    proxy.set("pass")
    _until(lambda: _synced(address), 60, f"{words}: what was left cannot be written")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(address)
    found = sorted((point.step, point.value) for point in client.get_metric_history(run_id, "x"))
    said = [(step, float(step)) for step in range(points)]
    expect(found == said, f"{words}: of {points} points there are {len(found)}, {len(set(found))} of them once")
    run = client.get_run(run_id)
    expect(run.data.params == {"lr": "0.1"}, f"{words}: the parameters are {run.data.params}")
    expected = "FAILED" if dies else "FINISHED"
    expect(run.info.status == expected, f"{words}: the run is {run.info.status} instead of {expected}")


def _synced(address: str) -> bool:
    from deeplightning.tracking.store import locate
    from deeplightning.tracking.unsent import SILENT_SECONDS, send_leftovers

    try:
        list(send_leftovers(locate(address), silent=SILENT_SECONDS))
    except Exception as error:
        expect(getattr(error, "exit_code", None) == 3, f"--sync fails with {type(error).__name__}: {error}")
        return False
    return True


def _until(happened: Callable[[], bool], seconds: float, promise: str) -> None:
    end = time.monotonic() + seconds
    while not happened():
        expect(time.monotonic() < end, promise)
        time.sleep(0.05)


def _run(address: str, file: Path, points: int, pause: float, dies: bool) -> None:
    """A run that says points, in a process of its own."""
    from deeplightning.tracking import MLflowLogger

    logger = MLflowLogger(tracking_uri=address, system_metrics=False)
    logger.log_hyperparams({"lr": 0.1})
    run_id = logger.run_id
    beside = file.with_suffix(".new")
    beside.write_text(f"{run_id}\n")
    beside.rename(file)
    slowest = 0.0
    for step in range(points):
        begun = time.monotonic()
        logger.log_metrics({"x": float(step)}, step)
        slowest = max(slowest, time.monotonic() - begun)
        time.sleep(pause)
    if dies:
        os.kill(os.getpid(), 9)
    begun = time.monotonic()
    logger.finalize("success")
    with file.open("a") as told:
        told.write(f"{slowest}\n{time.monotonic() - begun}\n")
    os._exit(0)
