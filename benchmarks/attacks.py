"""Measure how long good clients wait for a right answer while others attack the prediction server.

    .venv/bin/python benchmarks/attacks.py --seconds 10

It starts `deeplightning serve` on a free port of this machine. Some good clients send requests all the time and check
every answer, first alone, then beside each of ten attacks from another process. It prints a table, and exits with 0 if
no good client met an error and the p99 of each row is within the bound, else with 1.
"""

import argparse
import asyncio
import contextlib
import io
import itertools
import multiprocessing
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from PIL import Image
from servers import make_run
from soak import Connection, Load, malformed, own_server

GOOD_CLIENTS = 8
BAD_CLIENTS = 32
BOUND_SECONDS = 1.0  # of the p99

Attack = Callable[[int, list[bytes], Path], Coroutine[Any, Any, None]]


async def drip(port: int, head: bytes, rest: bytes) -> None:
    """Send the rest byte by byte, each after a tenth of a second."""
    connection = Connection(port)
    try:
        await connection.open()
        await connection.send(head)
        for number in range(len(rest)):
            await connection.send(rest[number : number + 1])
            await asyncio.sleep(0.1)
    finally:
        connection.close()


async def send(port: int, data: bytes) -> None:
    """Send all data, then wait for one answer."""
    connection = Connection(port)
    try:
        await connection.open()
        await connection.send(data)
        async with asyncio.timeout(10):
            await connection.answer()
    finally:
        connection.close()


def posted(body: bytes, length: int | None = None, kind: str = "application/octet-stream") -> bytes:
    size = len(body) if length is None else length
    return (
        f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n".encode()
        + body
    )


async def slow_headers(port: int, requests: list[bytes], run: Path) -> None:
    await drip(port, b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX: ", b"x" * 100)


async def slow_bodies(port: int, requests: list[bytes], run: Path) -> None:
    await drip(port, posted(b"", 100_000), b"x" * 100)


async def huge_lengths(port: int, requests: list[bytes], run: Path) -> None:
    await send(port, posted(b"x" * 60_000, random.choice([10**12, 10**18, 16_000_001])))


def vast_picture() -> bytes:
    """Return a PNG of a few kB with slightly more pixels than the server decodes."""
    file = io.BytesIO()
    Image.new("L", (6000, 4001)).save(file, "PNG")
    return file.getvalue()


VAST = vast_picture()


async def oversized_images(port: int, requests: list[bytes], run: Path) -> None:
    await send(port, posted(VAST))


async def malformed_forms(port: int, requests: list[bytes], run: Path) -> None:
    parts = posted(b"--x\r\n\r\n" * 2000 + b"--x--\r\n", kind="multipart/form-data; boundary=x")
    await send(port, random.choice([parts, *malformed(requests)]))


async def pipelining(port: int, requests: list[bytes], run: Path) -> None:
    await send(port, b"GET /info HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)


async def connections(port: int, requests: list[bytes], run: Path) -> None:
    opened = [Connection(port) for _ in range(20)]
    try:
        for connection in opened:
            await connection.open()
        await asyncio.sleep(0.2)
    finally:
        for connection in opened:
            connection.abort()


async def bad_bundles(port: int, requests: list[bytes], run: Path) -> None:
    """Replace the bundle by a bad one, and every other time by the good one; one client is enough."""
    model = next(run.rglob("model.onnx"))
    good = model.read_bytes()
    try:
        for number in itertools.count():
            other = model.with_name("next")
            other.write_bytes(good if number % 2 else random.randbytes(len(good)))
            other.replace(model)
            await asyncio.sleep(0.7)
    finally:
        model.write_bytes(good)


async def garbage(port: int, requests: list[bytes], run: Path) -> None:
    await send(port, random.randbytes(1000))


async def many_hosts(port: int, requests: list[bytes], run: Path) -> None:
    await send(port, f"GET /info HTTP/1.1\r\nHost: {random.randbytes(8).hex()}.example\r\n\r\n".encode())


ATTACKS: dict[str, tuple[Attack, int]] = {
    "slow headers": (slow_headers, 200),
    "slow bodies": (slow_bodies, 200),
    "huge Content-Length": (huge_lengths, BAD_CLIENTS),
    "oversized images": (oversized_images, BAD_CLIENTS),
    "malformed forms": (malformed_forms, BAD_CLIENTS),
    "2,000 pipelined requests": (pipelining, BAD_CLIENTS),
    "connection flood": (connections, BAD_CLIENTS),
    "bad bundles": (bad_bundles, 1),
    "garbage": (garbage, BAD_CLIENTS),
    "many hosts": (many_hosts, BAD_CLIENTS),
}


def attack(name: str, port: int, requests: list[bytes], run: Path, over: Any, count: Any) -> None:
    """Run an attack in a child process until `over` is set."""
    way, number = ATTACKS[name]

    async def client() -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):  # the server may hang up on such as these
                await way(port, requests, run)
            count.value += 1
            await asyncio.sleep(0)

    async def all_of_them() -> None:
        clients = [asyncio.create_task(client()) for _ in range(number)]
        while not over.is_set():
            await asyncio.sleep(0.05)
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    asyncio.run(all_of_them())


async def asked(port: int, requests: list[bytes], seconds: float) -> Load:
    """Load the server with good clients for so many seconds; return their results."""
    load = Load(port, requests, [{picture: "the model"} for picture in range(len(requests))])
    clients = [asyncio.create_task(load.good(number)) for number in range(GOOD_CLIENTS)]
    await asyncio.sleep(seconds)
    load.over.set()
    await asyncio.gather(*clients)
    return load


def row(name: str, load: Load, attacks: int) -> bool:
    """Print a row of results; return whether it is within the bounds."""
    milliseconds = [1e3 * one for one in load.seconds]
    p50, p99 = (statistics.quantiles(milliseconds, n=100)[at] for at in (49, 98))
    print(f"| {name} | {attacks or ''} | {load.answered} | {p50:.0f} | {p99:.0f} | {len(load.faults)} |", flush=True)
    for fault in load.faults[:3]:
        print(f"{name}: {fault.what}", file=sys.stderr)
    return p99 <= 1e3 * BOUND_SECONDS and not load.faults


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    parser.add_argument("--model", default="small", choices=["small", "resnet18"])
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run = make_run(options.model, place)
        with own_server(options, place, run, "serve.device=cpu") as (_, target):
            print("| attack | times | right answers | p50, ms | p99, ms | faults |\n|---|---:|---:|---:|---:|---:|")
            kept = row("none", asyncio.run(asked(target.port, target.requests, options.seconds)), 0)
            for name in ATTACKS:
                over, count = context.Event(), context.Value("q", 0)
                attacker = context.Process(target=attack, args=(name, target.port, target.requests, run, over, count))
                attacker.start()
                try:
                    load = asyncio.run(asked(target.port, target.requests, options.seconds))
                finally:
                    over.set()
                    attacker.join()
                kept &= row(name, load, count.value)
    sys.exit(not kept)


if __name__ == "__main__":
    main()
