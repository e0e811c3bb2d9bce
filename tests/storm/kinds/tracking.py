"""A tracking server refuses connections, stalls, resets, answers 500, loses answers, is slow, dies, and comes back.

Logging a point never waits for it, and the end of a run waits no longer than its limit. Once the server is back, it has
each point exactly once, with parameters and status.
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
"""Seconds that logging a point may take on a busy machine; it usually takes microseconds."""


def case(draw: random.Random, place: Place) -> str:
    """Log several runs to one server, each under other faults."""
    os.environ["DEEPLIGHTNING_TRACKING_DRAIN"] = str(DRAIN)
    port = int(free_port())
    proxy, done = Proxy(place.folder, port), []
    with forked(serve_mlflow, place.folder, port), forked(proxy.listen):
        wait_for(port)
        wait_for(proxy.port)
        for number in range(4):
            faults = [(draw.choice(MODES), draw.uniform(0.05, 1.5)) for _ in range(draw.randint(1, 4))]
            dies = draw.random() < 0.2
            done.append(", ".join(f"{mode} {seconds:.1f} s" for mode, seconds in faults) + ", killed" * dies)
            _one(place, proxy, faults, draw.randint(20, 400), done[-1], dies)
            place.count = number + 1
    return "; ".join(done)


def _one(place: Place, proxy: Proxy, faults: list[tuple[str, float]], points: int, what: str, dies: bool) -> None:
    address, file = f"http://127.0.0.1:{proxy.port}", place.folder / "logged"
    file.unlink(missing_ok=True)
    proxy.set("pass")
    pause = sum(seconds for _, seconds in faults) / points
    with forked(_run, address, file, points, pause, dies) as process:
        _until(lambda: file.exists(), 60, f"{what}: no run is opened")
        for mode, seconds in faults:
            proxy.set(mode)
            time.sleep(seconds)
        begun = time.monotonic()
        process.join()
        waited = time.monotonic() - begun
    run_id, *times = file.read_text().split()
    if not dies:
        expect(len(times) == 2, f"{what}: the process of the run has failed")
        slowest, end = map(float, times)
        expect(slowest < LONGEST, f"{what}: logging a point took {slowest:.2f} s")
        # The end waits for its limit, and once more if the last points are sent again.
        expect(end < 2 * DRAIN + 10, f"{what}: the end of the run took {end:.1f} s, waited for {waited:.1f} s")
    proxy.set("pass")
    _until(lambda: _synced(address), 60, f"{what}: unsent points cannot be sent")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(address)
    found = sorted((point.step, point.value) for point in client.get_metric_history(run_id, "x"))
    expected_points = [(step, float(step)) for step in range(points)]
    expect(found == expected_points, f"{what}: {len(found)} of {points} points, {len(set(found))} different ones")
    run = client.get_run(run_id)
    expect(run.data.params == {"lr": "0.1"}, f"{what}: the parameters are {run.data.params}")
    expected = "FAILED" if dies else "FINISHED"
    expect(run.info.status == expected, f"{what}: the run is {run.info.status} instead of {expected}")


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
    """Log points in a separate process."""
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
    with file.open("a") as log:
        log.write(f"{slowest}\n{time.monotonic() - begun}\n")
    os._exit(0)
