"""Test the prediction server under hardship: bad clients for minutes, overload, SIGTERM and changed bundles under load.

    .venv/bin/python benchmarks/soak.py --minutes 10
    .venv/bin/python benchmarks/soak.py --overload --drain --reload

Each starts `deeplightning serve` on a free port, with a model whose ten pictures have a class each, and asks it by
clients that check every answer; `--minutes` and `--overload` also take a server that runs (`--server PORT:PID`), which
first says itself what is right. Prints what was met; ends with 0 when all that was asked for holds, with 1 when it does
not, and says which.
"""

import argparse
import asyncio
import contextlib
import random
import re
import shutil
import signal
import socket
import statistics
import struct
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from servers import PICTURES, Server, Tree, form, free_port, make_run, pictures, post, started

ANSWER_SECONDS = 60  # that a client waits
EXIT_SECONDS = 10
GROWTH = 0.05  # of the memory that is no file's
BAD_SHARE = 0.1
PAUSE_SECONDS = 0.1  # of a client that was refused
ANSWERED_BEFORE = 1000  # a signal
KEPT_ALIVE = 20  # requests on one connection, at most
CLASS = re.compile(rb'"predicted_class": ?"(\d+)"')


# ---- clients


class Connection:
    """One connection, without buffers of its own: when `send` returns, the kernel has all of the request."""

    def __init__(self, port: int):
        self.port = port
        self.loop = asyncio.get_running_loop()
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.asked = 0

    async def open(self) -> None:
        await self.loop.sock_connect(self.socket, ("127.0.0.1", self.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.socket, data)

    async def answer(self) -> tuple[int, bytes, bool]:
        """Return status, body, and whether the server takes another request on this connection.

        Raises:
            EOFError: the connection ends before the answer does.
        """
        head, _, body = (await self._until(b"", lambda got: b"\r\n\r\n" in got)).partition(b"\r\n\r\n")
        length = re.search(rb"(?i)^content-length: *(\d+)", head, re.MULTILINE)
        size = int(length[1]) if length else 0
        body = await self._until(body, lambda got: len(got) >= size)
        return int(head.split(None, 2)[1]), body, not re.search(rb"(?i)^connection: *close", head, re.MULTILINE)

    async def _until(self, got: bytes, enough: Callable[[bytes], bool]) -> bytes:
        while not enough(got):
            more = await self.loop.sock_recv(self.socket, 65536)
            if not more:
                raise EOFError(f"the connection ended after {len(got)} bytes of the answer")
            got += more
        return got

    def abort(self) -> None:
        """Reset the connection."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        self.socket.close()


@dataclass
class Fault:
    """A request without a right answer: when it was sent whole (None: it was not), on which use of its connection, and
    what was met."""

    sent: float | None
    use: int
    what: str


@dataclass
class Load:
    """What clients ask, and what they met.

    Attributes:
        right: for each picture the classes that are right, each with a word for the model that gives it.
        refusals: statuses that are no fault.
        statuses: answers by kind of client and status.
        models: right answers by word.
        seconds: how long each right answer took.
        over: set when clients are to end.
    """

    port: int
    requests: list[bytes]
    right: list[dict[int, str]]
    refusals: tuple[int, ...] = ()
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    seconds: array = field(default_factory=lambda: array("d"))
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def answered(self) -> int:
        return self.models.total()

    async def good(self, number: int) -> None:
        """Run a client that asks again as soon as it has its answer, several times on the same connection.

        It ends when nothing listens any more.
        """
        chance = random.Random(number)
        connection: Connection | None = None
        while not self.over.is_set():
            picture, sent, uses = chance.randrange(PICTURES), None, connection.asked + 1 if connection else 1
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    begun = time.monotonic()
                    if connection is None:
                        connection = Connection(self.port)
                        await connection.open()
                        keeps = chance.randint(1, KEPT_ALIVE)
                    await connection.send(self.requests[picture])
                    sent = time.monotonic()
                    status, body, goes_on = await connection.answer()
            except (OSError, EOFError) as error:  # a time-out is an OSError
                self.faults.append(Fault(sent, uses, f"{type(error).__name__} {error}".strip()))
                if connection is not None:
                    connection.close()
                connection = None
                if isinstance(error, ConnectionRefusedError):
                    return
                continue
            connection.asked += 1
            self._note(picture, status, body, sent, uses, time.monotonic() - begun)
            if status in self.refusals:
                await asyncio.sleep(PAUSE_SECONDS)
            if not goes_on or connection.asked >= keeps:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _note(self, picture: int, status: int, body: bytes, sent: float, uses: int, took: float) -> None:
        self.statuses["good", status] += 1
        found = CLASS.search(body)
        if status == 200 and found and int(found[1]) in self.right[picture]:
            self.models[self.right[picture][int(found[1])]] += 1
            self.seconds.append(took)
        elif status not in self.refusals:
            self.faults.append(Fault(sent, uses, f"picture {picture}: {status} {body[:150]!r}"))

    async def bad(self, number: int) -> None:
        """Run a client that is slow, leaves in the middle of a request, or sends something invalid."""
        chance = random.Random(number)
        ways = [self._slow, self._silent, self._leaving, *[self._malformed] * 6]
        while not self.over.is_set():
            connection, way = Connection(self.port), chance.choice(ways)
            kind = way.__name__.lstrip("_")
            try:
                await connection.open()
                status = await way(connection, chance)
                self.statuses[kind, status] += 1
            except (OSError, EOFError):  # the server may hang up on such as these
                self.statuses[kind, 0] += 1
            connection.close()
            await asyncio.sleep(0.01)

    async def _slow(self, connection: Connection, chance: random.Random) -> int:
        """Send a whole request, a fortieth at a time, in about 4 seconds."""
        request = chance.choice(self.requests)
        step = len(request) // 40 + 1
        for start in range(0, len(request), step):
            await connection.send(request[start : start + step])
            await asyncio.sleep(0.1)
        return (await self._patiently(connection))[0]

    async def _silent(self, connection: Connection, chance: random.Random) -> int:
        """Send the first part of a request and then nothing, until the server hangs up or half a minute is over."""
        request = chance.choice(self.requests)
        await connection.send(request[: chance.randrange(1, len(request))])
        return (await self._patiently(connection, seconds=30))[0]

    async def _leaving(self, connection: Connection, chance: random.Random) -> int:
        request = chance.choice(self.requests)
        await connection.send(request[: chance.randrange(1, len(request))])
        await asyncio.sleep(chance.random() / 10)
        connection.abort()
        return 0

    async def _malformed(self, connection: Connection, chance: random.Random) -> int:
        await connection.send(chance.choice(malformed(self.requests)))
        return (await self._patiently(connection))[0]

    async def _patiently(self, connection: Connection, seconds: float = ANSWER_SECONDS) -> tuple[int, bytes, bool]:
        async with asyncio.timeout(seconds):
            return await connection.answer()


def malformed(requests: list[bytes]) -> list[bytes]:
    """Return requests that must get a 4xx: invalid or truncated pictures, wrong forms and headers."""
    head, _, body = requests[0].partition(b"\r\n\r\n")
    kind, picture = "image/png", body.partition(b"\r\n\r\n")[2].rpartition(b"\r\n--")[0]
    return [
        post("/predict", *form(b"\x89PNG, it says")),
        post("/predict", *form(b"just words")),
        post("/predict", *form(picture[: len(picture) // 2])),
        post("/predict", *form(picture, field="picture")),
        post("/predict", kind, b""),
        post("/predict", kind, picture[len(picture) // 3 :]),
        post("/predict", "multipart/form-data", body),
        post("/predict", "application/json", b'{"images": [1, 2'),
        post("/predict", "application/json", b'{"images": ["%%%"]}'),
        post("/predict", "text/plain", b"a picture of a cat"),
        post("/predict?top_k=none", kind, picture),
        post("/nowhere", kind, b"something"),
        b"GET /predict HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00 no HTTP at all\r\n\r\n",
        head.replace(b"Content-Length: ", b"Content-Length: -") + b"\r\n\r\n" + body,
    ]


@contextlib.asynccontextmanager
async def clients(load: Load, number: int, bad: int = 0):
    """Run so many clients until the block ends; it does not wait for bad ones."""
    good = [asyncio.create_task(load.good(each)) for each in range(number - bad)]
    others = [asyncio.create_task(load.bad(each)) for each in range(bad)]
    try:
        yield
    finally:
        load.over.set()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*good)


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition becomes true in that time."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        await asyncio.sleep(0.01)
    return holds


# ---- servers


@dataclass(frozen=True)
class Target:
    """What is under load: its port, its processes, its requests, and the classes that they should get."""

    port: int
    tree: Tree
    requests: list[bytes]
    classes: list[int]

    def load(self, refusals: tuple[int, ...] = ()) -> Load:
        return Load(self.port, self.requests, [{number: "the model"} for number in self.classes], refusals)


def requests_of(name: str) -> list[bytes]:
    return [post("/predict", *form(picture)) for picture in pictures(name)]


@contextlib.contextmanager
def own_server(options: argparse.Namespace, place: Path, run: Path, *settings: str):
    """Start our server as deploy.sh does, with settings such as serve.max_queue=16."""
    port = free_port()
    command = [sys.executable, "-m", "deeplightning", "serve", str(run), "--port", str(port), *settings]
    requests = requests_of(options.model)
    with started(command, port, place / "log") as server:
        server.wait(requests[0], CLASS.pattern.decode(), "0")
        yield server, Target(port, server, requests, list(range(PICTURES)))


@contextlib.contextmanager
def any_server(options: argparse.Namespace, place: Path, run: Path, *settings: str):
    """Start our server, or use the running one."""
    if options.server is None:
        with own_server(options, place, run, *settings) as (_, target):
            yield target
        return
    port, pid = options.server
    requests, running = requests_of(options.model), Running(pid, port)
    yield Target(port, running, requests, [running.says(request) for request in requests])


@dataclass
class Running(Tree):
    """A server that somebody else started."""

    port: int

    def says(self, request: bytes) -> int:
        status, text = Server.ask(self, request)  # type: ignore[arg-type] # it asks for nothing but the port
        found = CLASS.search(text.encode())
        if status != 200 or not found:
            raise SystemExit(f"The server on port {self.port} answers a picture with {status} {text[:200]}")
        return int(found[1])


# ---- what is asked for; each says what did not hold

Faults = list[str]


async def soak(options: argparse.Namespace, place: Path, run: Path) -> Faults:
    """Run good and bad clients for minutes."""
    bad, seconds = round(BAD_SHARE * options.clients), 60 * options.minutes
    with any_server(options, place, run) as target:
        load = target.load()
        async with clients(load, options.clients, bad):
            await asyncio.sleep(min(60, seconds / 3))
            early, first = load.answered, await memory(target.tree)
            await asyncio.sleep(max(0, seconds - min(60, seconds / 3) - 10))
            last = await memory(target.tree)
        faults = told(load)
        crashed = sum(count for (_, status), count in load.statuses.items() if status >= 500)
    print(
        f"{options.clients} clients, {bad} of them bad, for {options.minutes:g} minutes: {load.answered} right answers"
    )
    print(f"memory: {told_of(first)} after {early} answers, {told_of(last)} at the end")
    growth = last[1] / first[1] - 1
    return [
        *faults,
        *([f"{crashed} answers are 5xx"] if crashed else []),
        *([f"memory grows by {growth:.1%}"] if growth > GROWTH else []),
    ]


async def memory(tree: Tree) -> tuple[float, float]:
    """Return PSS in MiB, and the part that is not mapped from files; medians of five samples, a second apart."""
    looks = []
    for _ in range(5):
        looks.append((tree.memory(), tree.anonymous()))
        await asyncio.sleep(1)
    return statistics.median(pss for pss, _ in looks), statistics.median(own for _, own in looks)


def told_of(memory: tuple[float, float]) -> str:
    return f"{memory[0]:.1f} MiB (PSS), {memory[1]:.1f} of them no file's,"


async def overload(options: argparse.Namespace, place: Path, run: Path) -> Faults:
    """Send several times more than can be answered."""
    settings = (f"serve.max_queue={options.max_queue}", f"serve.max_wait={options.max_wait}")
    with any_server(options, place, run, *settings) as target:
        load = target.load(refusals=(429, 504))
        async with clients(load, options.overload_clients):
            await asyncio.sleep(options.seconds)
        faults = told(load)
    if not load.seconds:
        return [*faults, "nothing was answered"]
    took = sorted(load.seconds)
    middle, late = took[len(took) // 2], took[int(0.99 * (len(took) - 1))]
    refused = sum(load.statuses["good", status] for status in load.refusals)
    print(f"{options.overload_clients} clients, max_queue {options.max_queue}, max_wait {options.max_wait:g} s:")
    print(f"{load.answered} answered (median {middle:.3f} s, p99 {late:.3f} s), {refused} refused")
    return [
        *faults,
        *([] if refused else ["nothing was refused: this is no overload"]),
        *([f"p99 is {late:.2f} s, over twice {options.max_wait:g}"] if late > 2 * options.max_wait else []),
    ]


async def drain(options: argparse.Namespace, place: Path, run: Path) -> Faults:
    """Send SIGTERM under load.

    A request counts as accepted if it was sent completely before, on a connection that the kernel had established.
    """
    faults: Faults = []
    for number in range(options.rounds):
        with own_server(options, place, run) as (server, target):
            load = target.load()
            async with clients(load, options.clients):
                if not await until(lambda load=load: load.answered >= ANSWERED_BEFORE, 120):
                    faults += [f"only {load.answered} answers in two minutes"]
                processes, before, begun = server.processes(), load.answered, time.monotonic()
                server.child.send_signal(signal.SIGTERM)
                left = await until(lambda server=server: server.child.poll() is not None, EXIT_SECONDS + 5)
                took = time.monotonic() - begun
                orphans = [process for process in processes if process.is_running() and _lives(process)]
                closed = refuses(server.port)
        lost = [fault for fault in load.faults if fault.sent is not None and fault.sent < begun]
        print(
            f"SIGTERM {number + 1}: {before} answered before it, {load.answered - before} after it, {len(lost)} lost; "
            f"exit code {server.child.returncode if left else 'none'} after {took:.2f} s, {len(orphans)} orphans, "
            f"port {'closed' if closed else 'open'}; requests sent later: {_kinds(load.faults, lost)}"
        )
        faults += [f"lost, sent {1e3 * (begun - (fault.sent or 0)):.1f} ms before SIGTERM as number {fault.use} of its "
                   f"connection: {fault.what}" for fault in lost]  # fmt: skip
        if not left or took > EXIT_SECONDS or server.child.returncode:
            faults.append(f"SIGTERM: exit code {server.child.returncode} after {took:.1f} s")
        if orphans or not closed:
            faults.append(f"SIGTERM: {len(orphans)} orphans, port {'closed' if closed else 'open'}")
    return faults


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _kinds(faults: list[Fault], lost: list[Fault]) -> str:
    met = Counter(fault.what.split(":")[0][:60] for fault in faults if fault not in lost)
    return ", ".join(f"{count} times {what}" for what, count in met.most_common()) or "none"


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


async def reload(options: argparse.Namespace, place: Path, run: Path) -> Faults:
    """Replace the bundle and send SIGHUP; then put the first one back without a signal."""
    other = make_run(options.model, place, turned=True)
    faults: Faults = []
    with own_server(options, place, run) as (server, target):
        right = [{number: "the first", PICTURES - 1 - number: "the second"} for number in target.classes]
        load = Load(target.port, target.requests, right)
        async with clients(load, options.clients):
            await until(lambda: load.answered >= ANSWERED_BEFORE, 60)
            for word, bundle, told_by in (("the second", other, "SIGHUP"), ("the first", run, "its files")):
                before, begun = load.models[word], time.monotonic()
                swap(run, bundle)
                if told_by == "SIGHUP":
                    server.child.send_signal(signal.SIGHUP)
                seen = await until(lambda before=before, word=word: load.models[word] > before, 30)
                first = time.monotonic() - begun
                settled = seen and await until(Settled(load, word), 30)
                print(f"{word} bundle, told by {told_by}: answers after {first:.1f} s")
                if not settled:
                    faults.append(f"{word} bundle, told by {told_by}, is not the only one that answers after 30 s")
    print(f"answers: {', '.join(f'{count} of {word} bundle' for word, count in load.models.items())}")
    return [*told(load), *faults]


@dataclass
class Settled:
    """True as soon as all of a hundred answers in a row are of one model."""

    load: Load
    word: str
    before: Counter[str] = field(default_factory=Counter)

    def __call__(self) -> bool:
        since = self.load.models - self.before
        if since.total() < 100:
            return False
        self.before = Counter(self.load.models)
        return set(since) == {self.word}


def swap(run: Path, other: Path) -> None:
    """Replace a run's bundle by a copy of another's, as an export does; the old one becomes the run's `spare`."""
    spare = run / "spare"
    source = spare if other == run else other / "bundle"
    shutil.copytree(source, run / "new")
    shutil.rmtree(run / "old", ignore_errors=True)
    (run / "bundle").rename(run / "old")
    (run / "new").rename(run / "bundle")
    if not spare.exists():
        (run / "old").rename(spare)


def told(load: Load) -> Faults:
    """Print the clients' results; return errors that good ones should not have."""
    for kind in dict.fromkeys(kind for kind, _ in load.statuses):
        counts = {status: count for (of, status), count in sorted(load.statuses.items()) if of == kind}
        print(f"{kind}: " + ", ".join(f"{status or 'hung up'} {count} times" for status, count in counts.items()))
    print(f"errors that good clients saw: {len(load.faults)}")
    met = Counter(fault.what for fault in load.faults)
    return [f"{count} times {what}" for what, count in met.most_common(10)]


def address(text: str) -> tuple[int, int]:
    port, _, pid = text.partition(":")
    return int(port), int(pid)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--minutes", type=float, help="a tenth of the clients slow, leaving or malformed for so long")
    words.add_argument("--overload", action="store_true", help="far more than can be answered")
    words.add_argument("--drain", action="store_true", help="SIGTERM under load")
    words.add_argument("--reload", action="store_true", help="another bundle under load")
    words.add_argument(
        "--model", choices=["resnet18", "small"], help="default: resnet18 for --overload, small for the others"
    )
    words.add_argument("--clients", type=int, default=32, help="default 32")
    words.add_argument("--rounds", type=int, default=3, help="of --drain; default 3")
    words.add_argument("--seconds", type=float, default=20, help="of --overload; default 20")
    words.add_argument("--overload-clients", type=int, default=128, help="default 128")
    words.add_argument("--max-queue", type=int, default=16, help="of --overload; default 16 requests")
    words.add_argument("--max-wait", type=float, default=0.5, help="of --overload; default 0.5 seconds")
    words.add_argument("--server", type=address, metavar="PORT:PID", help="one that runs, instead of an own")
    options = words.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no server is left
    parts: list[Callable[..., Coroutine[Any, Any, Faults]]] = [soak] if options.minutes else []
    parts += [part for part in (overload, drain, reload) if getattr(options, part.__name__)]
    if not parts:
        words.error("say what is to be tried: --minutes, --overload, --drain, --reload")
    faults: Faults = []
    asked = options.model
    for part in parts:
        options.model = asked or ("resnet18" if part is overload else "small")
        print(f"## {part.__name__}, {options.model}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            run = Path() if options.server else make_run(options.model, place)
            faults += [f"{part.__name__}: {fault}" for fault in asyncio.run(part(options, place, run))]
        print(flush=True)
    print("\n".join(f"does not hold: {fault}" for fault in faults) or "All holds.")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
