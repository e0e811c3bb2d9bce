"""The prediction server under load from good and bad clients, while the bundle is replaced or damaged, SIGHUP is sent
and workers are killed; SIGTERM at the end.

Every good client gets the right answer to each request that it could send; only clients of a killed worker may lose
theirs. After SIGTERM no accepted request is lost, and no process is left.
"""

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from storm.mutate import damage
from storm.place import Place, expect

WHAT = "the server: good clients beside bad ones, reloads, damaged bundles, killed workers, SIGTERM"
HOUR = 100
LIMIT = 120
GOOD, BAD = 5, 2
SECONDS = 10
"""Limit for an answer on a machine that runs three cases."""

EVENTS = ("reload", "reload", "hup", "damage", "worker", "idle", "nothing")
ORDERS = (("red", "green", "blue"), ("green", "blue", "red"))
"""Labels of the two bundles, which have the same network."""


@dataclass
class Load:
    """State that the clients share.

    Attributes:
        right: for each colour the labels that are correct at present.
        answered: number of answers to good clients.
        lost: errors of good clients.
    """

    port: int
    right: dict[str, set[str]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    answered: int = 0
    longest: float = 0.0
    lost: list[str] = field(default_factory=list)


def case(draw: random.Random, place: Place) -> str:
    """Run one server with up to four events."""
    from served import COLOURS, Server

    from serve.worker import GRACE_SECONDS

    bundles = place.once("bundles", _make)
    folder = place.folder / "a run"
    shutil.copytree(bundles / "0", folder)
    server = Server(folder, place.folder / "errors")
    load = Load(server.port, {colour: {colour} for colour in COLOURS})
    clients = [threading.Thread(target=_good, args=(load, draw.random())) for _ in range(GOOD)]
    clients += [threading.Thread(target=_bad, args=(load, draw.random())) for _ in range(BAD)]
    for client in clients:
        client.start()
    events, now, kills = [], 0, 0
    try:
        for event in draw.choices(EVENTS, k=draw.randint(1, 4)):
            events.append(event)
            time.sleep(draw.uniform(0, 0.4))
            if event == "reload":
                now = 1 - now
                with load.lock:
                    for colour, label in zip(ORDERS[0], ORDERS[now], strict=True):
                        load.right[colour].add(label)
                _replace(folder, bundles / str(now))
            elif event == "hup":
                server.process.send_signal(signal.SIGHUP)
            elif event == "damage":
                damage(draw, folder / "bundle" / "model.onnx", [])
                time.sleep(draw.uniform(0, 0.5))
                _replace(folder, bundles / str(now))
            elif event == "worker":
                for worker in server.workers()[:1]:
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.kill(worker, signal.SIGKILL)
                        kills += 1
            elif event == "idle":
                idle = [socket.create_connection(("127.0.0.1", load.port)) for _ in range(100)]
                time.sleep(draw.uniform(0, 0.3))
                for one in idle:
                    one.close()
            time.sleep(draw.uniform(0, 0.6))
        what = ", ".join(events)
        expect(server.process.poll() is None, f"{what}: the server ended", server.errors.read_text())
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(GRACE_SECONDS + 10)
        seconds = time.monotonic() - begun
    finally:
        load.over.set()
        for client in clients:
            client.join(30)
        if server.process.poll() is None:
            server.process.kill()
    log = server.errors.read_text()[-3000:]
    expect(code == 0, f"{what}: it ends with {code} after SIGTERM", log)
    # A killed worker had at most one request of each good client.
    expect(len(load.lost) <= GOOD * kills, f"{what}: good clients lost {len(load.lost)} answers", *load.lost[:5], log)
    expect(load.answered > 0, f"{what}: no request was answered", log)
    expect(load.longest < SECONDS, f"{what}: an answer took {load.longest:.1f} s", log)
    expect('"error"' not in log, f"{what}: the log has an internal error", log)
    return f"{what}: {load.answered} answers, the slowest in {load.longest:.2f} s, gone {seconds:.1f} s after SIGTERM"


def _make(folder: Path) -> None:
    from served import colour_run

    for number, labels in enumerate(ORDERS):
        colour_run(folder / str(number), labels)


def _replace(folder: Path, other: Path) -> None:
    """Replace the bundle by two renames, like an export."""
    beside, former = folder / "bundle.new", folder / "bundle.former"
    shutil.copytree(other / "bundle", beside)
    (folder / "bundle").rename(former)
    beside.rename(folder / "bundle")
    shutil.rmtree(former)


# ---- clients


def _good(load: Load, seed: float) -> None:
    """Send requests until the load is over; check each answer."""
    from served import COLOURS, encoded, picture

    draw = random.Random(seed)
    while not load.over.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", load.port, timeout=30)
        try:
            connection.connect()
        except OSError:
            if load.over.wait(0.05):
                return
            continue
        try:
            for _ in range(draw.randint(1, 20)):
                colour = draw.choice(list(COLOURS))
                body, kind = picture(colour), "image/png"
                if draw.random() < 0.3:
                    body, kind = json.dumps({"images": [encoded(body)]}).encode(), "application/json"
                begun = time.monotonic()
                connection.request("POST", "/predict", body, {"Content-Type": kind})
                response = connection.getresponse()
                answer = response.read()
                with load.lock:
                    load.longest = max(load.longest, time.monotonic() - begun)
                    load.answered += 1
                    if response.status != 200 or json.loads(answer)["label"] not in load.right[colour]:
                        load.lost.append(f"{colour}: {response.status} {answer[:200]!r}")
                if response.will_close:
                    break
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            with load.lock:
                load.lost.append(f"{type(error).__name__}: {error}")
        finally:
            connection.close()


def _bad(load: Load, seed: float) -> None:
    """Send noise, a partial request, too much, or nothing; close the connection or reset it."""
    draw = random.Random(seed)
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
    while not load.over.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", load.port), 5) as client:
            what = draw.choice(["noise", "half", "large", "silent", "chunks", "pipelined"])
            if what == "noise":
                client.sendall(os.urandom(draw.randint(1, 2000)))
            elif what == "half":
                client.sendall(head + b"Content-Length: 500\r\n\r\n" + bytes(draw.randint(0, 499)))
            elif what == "large":
                client.sendall(head + b"Content-Length: 999999999999\r\n\r\n")
            elif what == "chunks":
                client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n" + bytes(1000))
            elif what == "pipelined":
                client.sendall((head + b"Content-Length: 3\r\n\r\nabc") * 40)
            load.over.wait(draw.uniform(0, 0.1))
            if draw.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        load.over.wait(0.01)
