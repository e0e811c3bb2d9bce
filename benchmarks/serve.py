"""Compare the prediction server with LitServe, `mlflow models serve` and Flask's own server, in one run.

    .venv/bin/python benchmarks/serve.py --peers litserve,mlflow,flask

serves two models (resnet18 on pictures of 64x64, a small network on 28x28) by each server in turn, checks every answer,
and prints Markdown: a table for each model, and each bound with its figure. Further tables have texts, rows, pictures
of 1 and 12 million pixels, connections that are closed, and TLS by nginx in front, with 8 clients. CPU milliseconds per
right answer, of the whole process tree of the server, is the measure that holds on a busy machine. Ends with 0 when all
bounds that were asked for are kept, with 1 when one is not, with 3 when something to measure with is missing.

    .venv/bin/python benchmarks/serve.py --device cuda

does the same on GPUs beside LitServe with accelerator=auto, and measures ours in fp16 too. The bounds are those of a
CPU: on a GPU it ends with 1 where an answer is wrong or a server could not be measured.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import side_by_side
from servers import (
    PICTURES,
    Server,
    busy_neighbours,
    column,
    form,
    free_port,
    make_fp16_model,
    make_int8_run,
    make_run,
    model_of,
    pictures,
    requests_of,
    started,
    tls_in_front,
)
from side_by_side import Bound, table

from deeplightning.faults import UserError

HERE = Path(__file__).resolve().parent
OURS, INT8, FP16 = "deeplightning", "deeplightning int8", "deeplightning fp16"
PEERS = {"litserve": ["litserve", "litserve batch 16"], "mlflow": ["mlflow"], "flask": ["flask"]}
MODELS = ("resnet18", "small")
FURTHER = ("texts", "tables", "resnet18-1mp", "resnet18-12mp", "small-close", "small-tls")
CLIENTS = (1, 8, 32)
NEIGHBOURS = 8
WARM_SECONDS = 2


# ---- servers


@dataclass(frozen=True)
class Kind:
    """How a server is started, asked and read.

    Attributes:
        command: of a model's run folder and a port.
        path, body: where a picture is sent, and as what.
        pattern: finds the class in an answer, for Python and for Lua.
        precision: what /info must say, where that is not the default.
        device: how the device begins that /info must say, where it says one.
    """

    command: Callable[[Path, int], list[str]]
    path: str = "/predict"
    body: Callable[[bytes], tuple[str, bytes]] = form
    pattern: tuple[str, str] = (r'"class": ?(\d+)', '"class": ?(%d+)')
    precision: str | None = None
    device: str | None = None


def kinds(python: str | None, device: str = "cpu") -> dict[str, Kind]:
    """Return the servers by name; `python` is that of the peers' environment."""
    accelerator = "cpu" if device == "cpu" else "auto"
    on = device.partition(":")[0]

    def ours(run: Path, port: int) -> list[str]:  # what deploy.sh runs
        return [sys.executable, "-m", "deeplightning", "serve", str(run), "--port", str(port), "--device", device]

    def int8(run: Path, port: int) -> list[str]:
        return [*ours(run.with_name(f"{run.name}-int8"), port), "--precision", "int8"]

    def fp16(run: Path, port: int) -> list[str]:
        return [*ours(run, port), "--precision", "fp16"]

    def peer(program: str, *more: str) -> Callable[[Path, int], list[str]]:
        file = str(side_by_side.PEERS / program)
        return lambda run, port: [str(python), file, model_of(run.name), f"{run}.pt", str(port), *more]

    def mlflow(run: Path, port: int) -> list[str]:
        options = ["--env-manager", "local", "-h", "127.0.0.1", "-p", str(port)]
        return [str(python), "-m", "mlflow", "models", "serve", "-m", str(run.with_suffix(".mlflow")), *options]

    said = (r'"predicted_class": ?"(\d+)"', '"predicted_class": ?"(%d+)"')
    return {
        OURS: Kind(ours, pattern=said, device=on),
        INT8: Kind(int8, pattern=said, precision="int8", device=on),
        FP16: Kind(fp16, pattern=said, precision="fp16", device=on),
        "litserve": Kind(peer("serve_litserve.py", accelerator)),
        "litserve batch 16": Kind(peer("serve_litserve.py", accelerator, "16")),
        "mlflow": Kind(mlflow, "/invocations", column),
        "flask": Kind(peer("serve_flask.py")),
    }


# ---- one server, one turn


@dataclass
class Load:
    """What so many clients met.

    Attributes:
        cpu: milliseconds per right answer.
        rate: right answers per second.
        p50, p99: milliseconds of latency.
        batch: pictures in a batch, as the server counts them; None: it does not.
        failed: answers that were not right, or did not come; `example` is one.
    """

    cpu: float
    rate: float
    p50: float
    p99: float
    batch: float | None
    failed: int
    example: str


@dataclass
class Turn:
    """One server, once: CPU seconds to its first right answer, MiB under the largest load, loads by number of clients,
    and CPU ms per answer beside busy neighbours (ours only)."""

    start: float
    memory: float
    loads: dict[int, Load]
    beside: float | None = None


def take_turn(kind: Kind, run: Path, name: str, options: argparse.Namespace, neighbours: bool, place: Path) -> Turn:
    """Start a server, ask it about each picture, then load it; `place` is an empty folder.

    Raises:
        RuntimeError: it does not answer, or wrongly.
    """
    asked = requests_of(name, kind.path, kind.body)
    for number, request in enumerate(asked if len(asked[0]) < 2**20 else asked[:3]):  # each client holds all of them
        (place / f"{number}.request").write_bytes(request)
        (place / f"{number}.class").write_text(str(number))
    port = free_port()
    command = kind.command(run, port)
    path = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"  # mlflow looks for uvicorn there
    with started(command, port, place / "log", {"PATH": path}) as server:
        server.wait(asked[0], kind.pattern[0], "0")
        start = server.cpu()
        wanted = {"precision": kind.precision, "device": kind.device}
        if any(wanted.values()):
            _, text = server.ask(b"GET /info HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            for key, word in wanted.items():
                if word and not re.search(rf'"{key}": ?"{word}', text):
                    raise RuntimeError(f"it does not say at /info that its {key} is {word}")
        for number, request in enumerate(asked):
            status, text = server.ask(request)
            found = re.search(kind.pattern[0], text)
            if status != 200 or not found or found[1] != str(number):
                raise RuntimeError(f"picture {number} is answered {status} {text[:200]}")
        front = tls_in_front(port, place) if name.endswith("-tls") else contextlib.nullcontext()
        with front as proxy:
            address = f"https://127.0.0.1:{proxy}" if proxy else f"http://127.0.0.1:{port}"
            put_load(server, kind, place, 4, WARM_SECONDS, address)
            loads = {
                clients: put_load(server, kind, place, clients, options.seconds, address)
                for clients in clients_of(name, options)
            }
        memory = max(memory for _, memory in loads.values())
        turn = Turn(start, memory, {clients: load for clients, (load, _) in loads.items()})
        if neighbours:
            with busy_neighbours(NEIGHBOURS):
                turn.beside = put_load(server, kind, place, max(options.clients), options.seconds, address)[0].cpu
    return turn


def clients_of(name: str, options: argparse.Namespace) -> list[int]:
    return options.clients if name in MODELS else [8]


def servers_of(name: str, options: argparse.Namespace) -> list[str]:
    """Return the servers that a model is measured with: the further models without our other precisions; MLflow takes
    pictures."""
    if name in MODELS:
        return options.servers
    left_out = {INT8, FP16} | ({"mlflow"} if name in ("texts", "tables") else set())
    return [server for server in options.servers if server not in left_out]


def put_load(server: Server, kind: Kind, place: Path, clients: int, seconds: int, address: str) -> tuple[Load, float]:
    """Run clients that ask again as soon as they have their answer; return also the server's MiB after two thirds of
    the time."""
    env = {**os.environ, "LOAD_FOLDER": str(place), "LOAD_PATTERN": kind.pattern[1]}
    command = ["wrk", f"-t{clients}", f"-c{clients}", f"-d{seconds}s", "--timeout", "60s", "-s", str(HERE / "load.lua")]
    batches, begun = batches_of(server), server.cpu()
    wrk = subprocess.Popen([*command, address], env=env, stdout=subprocess.PIPE, text=True)
    time.sleep(seconds * 2 / 3)
    memory = server.memory()
    said, _ = wrk.communicate()
    used = server.cpu() - begun
    batches = tuple(now - before for now, before in zip(batches_of(server), batches, strict=True))
    found = re.search(r"^\{.*\}$", said, re.MULTILINE)
    if wrk.returncode or not found:
        raise RuntimeError(f"wrk ended with {wrk.returncode}: {said[-500:]}")
    met = json.loads(found[0])
    failed = met["wrong"] + met["refused"] + met["lost"]
    per_answer = 1e3 * used / met["right"] if met["right"] else float("inf")
    batch = batches[0] / batches[1] if batches[1] else None
    rate = met["right"] / met["seconds"]
    return Load(per_answer, rate, met["p50"], met["p99"], batch, failed, met["example"]), memory


def batches_of(server: Server) -> tuple[float, float]:
    """Return the numbers of pictures and batches so far from the histogram in /metrics, or zeros."""
    status, text = server.ask(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    sums = [
        sum(float(value) for value in re.findall(rf"^\w*batch\w*_{end}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))
        for end in ("sum", "count")
    ]
    return (sums[0], sums[1]) if status == 200 else (0.0, 0.0)


def cost_in_process(run: Path, name: str, batch: int, seconds: float = 1.0) -> float:
    """Return the CPU ms of one picture without a server, on one thread.

    The bundle's ImageSpec decodes it, and ONNX Runtime answers so many at a time.
    """
    import numpy as np
    import onnxruntime

    from deeplightning.image_spec import ImageSpec
    from deeplightning.runfolder import RunFolder

    bundle, files = RunFolder(run), pictures(name)
    spec = ImageSpec.from_dict(json.loads(bundle.bundle_card.read_text())["input"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(bundle.bundle_model, options, providers=["CPUExecutionProvider"])

    def decoded(number: int) -> np.ndarray:
        return np.ascontiguousarray(spec.decode(files[number % PICTURES]).transpose(2, 0, 1))

    def answer() -> None:
        session.run(["probabilities"], {"images": np.stack([decoded(number) for number in range(batch)])})

    answer()
    begun, end, count = time.thread_time(), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        answer()
        count += batch
    return 1e3 * (time.thread_time() - begun) / count


# ---- all of them, in turn


@dataclass
class Found:
    """What was measured of one model: turns by server, why a server could not be measured, and CPU ms without a server
    by number of clients (at the batch size that came about)."""

    turns: dict[str, list[Turn]] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)
    in_process: dict[int, list[float]] = field(default_factory=dict)

    def middle(self, server: str, of: Callable[[Turn], float | None]) -> float | None:
        values = [value for turn in self.turns.get(server, []) if (value := of(turn)) is not None]
        return statistics.median(values) if values else None


def make_runs(options: argparse.Namespace, python: str | None, place: Path, found: dict[str, Found]) -> dict[str, Path]:
    """Create the runs that the servers serve, by model."""
    runs = {name: make_run(name, place) for name in options.models}
    for name, run in runs.items():
        if "mlflow" in servers_of(name, options) and python:
            program = str(side_by_side.PEERS / "serve_mlflow.py")
            saving = [python, program, model_of(name), str(run.with_suffix(".pt")), str(run.with_suffix(".mlflow"))]
            ended = side_by_side.run(saving, place)
            if ended.code:
                raise RuntimeError(f"the MLflow model cannot be saved: {ended.output[-1000:]}")
        if INT8 in servers_of(name, options):
            try:
                make_int8_run(run, name)
            except UserError as error:
                found[name].lacking[INT8] = str(error)
        if FP16 in servers_of(name, options):
            try:
                make_fp16_model(run)
            except UserError as error:
                found[name].lacking[FP16] = str(error)
    return runs


def measure(options: argparse.Namespace, python: str | None, place: Path, found: dict[str, Found]) -> None:
    """Measure everything; the result is partial if it was interrupted."""
    known, runs = kinds(python, options.device), make_runs(options, python, place, found)
    for number in range(options.rounds):
        for name, run in runs.items():
            for server in servers_of(name, options)[:: 1 if number % 2 == 0 else -1]:
                if server not in found[name].lacking:
                    measure_one(known[server], run, name, server, options, found[name])
                    met = found[name].turns.get(server, [None])[-1]
                    print(f"round {number + 1}: {name}, {server}: {met}", file=sys.stderr, flush=True)


def measure_one(kind: Kind, run: Path, name: str, server: str, options: argparse.Namespace, found: Found) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            turn = take_turn(kind, run, name, options, server == OURS and name in MODELS, Path(folder))
        except (RuntimeError, OSError) as error:
            found.lacking[server] = " ".join(str(error).split())[:600]
            print(f"{name}, {server}: {error}", file=sys.stderr, flush=True)
            return
    found.turns.setdefault(server, []).append(turn)
    if server == OURS and name in MODELS:
        for clients, load in turn.loads.items():
            batch = max(1, round(load.batch or 1))
            found.in_process.setdefault(clients, []).append(cost_in_process(run, name, batch))


# ---- what is printed

HEAD = ["server", "start, CPU s", "PSS, MiB", "CPU ms per answer", "answers/s", "p50, ms", "p99, ms", "not right"]


def rows(found: Found, servers: list[str], clients: list[int]) -> Iterator[list[str]]:
    """Return a line for each server; several numbers in a cell are for the numbers of clients."""
    for server in servers:
        if server not in found.turns:
            yield [server, *["not measured"] * (len(HEAD) - 1)]
            continue
        start, memory = (found.middle(server, of) for of in (lambda turn: turn.start, lambda turn: turn.memory))
        cells = []
        for name, digits in (("cpu", 2), ("rate", 0), ("p50", 1), ("p99", 1)):
            values = [found.middle(server, lambda turn, n=name, c=c: getattr(turn.loads[c], n)) for c in clients]
            cells.append(" / ".join(f"{value:.{digits}f}" for value in values))
        failed = sum(load.failed for turn in found.turns[server] for load in turn.loads.values())
        yield [server, f"{start:.2f}", f"{memory:.0f}", *cells, str(failed)]


CPU_AT_MOST = {  # of a peer's CPU per answer with 32 clients
    "resnet18": {"litserve": 1 / 5, "litserve batch 16": 0.6, "mlflow": 1 / 5},
    "small": {"litserve": 1 / 8, "mlflow": 1 / 14, "flask": 1 / 7},
}
INT8_AT_MOST = 1 / 10
ALONE_AT_MOST = 1 / 3  # CPU and latency of a single client, resnet18
RATE_AT_LEAST = {"litserve": 5.0, "litserve batch 16": 2.0}
START_SECONDS, START_AT_MOST = 1.2, {"mlflow": 1 / 15, "litserve": 1 / 12}
MEMORY = {"resnet18": 280.0, "small": 120.0}  # MiB
OVER_FACTOR, OVER_MS = 1.25, 0.15  # the whole server over decode and forward
BESIDE_AT_MOST = 1.5
BEST_PEER_AT_MOST = 0.5  # CPU per answer of what is in `FURTHER`


def bounds(name: str, found: Found, servers: list[str], clients: list[int]) -> Iterator[Bound]:
    """Return the bounds of one model that apply to the measured servers and numbers of clients."""

    def of(server: str, key: str, number: int) -> float | None:
        return found.middle(server, lambda turn: getattr(turn.loads[number], key))

    def ratio(one: float | None, other: float | None) -> float | None:
        return one / other if one is not None and other else None

    def beside_peers(limits: dict[str, float]) -> Iterator[tuple[str, float]]:
        return ((peer, limit) for peer, limit in limits.items() if peer in servers)

    turns = found.turns.get(OURS, [])
    failed = float(sum(load.failed for turn in turns for load in turn.loads.values()))
    right = Bound(f"{name}, answers of ours that were not right", failed if turns else None, 0)
    if name not in MODELS:
        peers = [cpu for peer in servers if peer not in (OURS, INT8, FP16) and (cpu := of(peer, "cpu", clients[0]))]
        if peers:
            what = f"{name}, {clients[0]} clients, CPU per answer, of the best peer"
            yield Bound(what, ratio(of(OURS, "cpu", clients[0]), min(peers)), BEST_PEER_AT_MOST)
        yield right
        return
    if 32 in clients:
        for peer, limit in beside_peers(CPU_AT_MOST[name]):
            figure = ratio(of(OURS, "cpu", 32), of(peer, "cpu", 32))
            yield Bound(f"{name}, 32 clients, CPU per answer, of {peer}", figure, limit)
    if name == "resnet18":
        for key, word in (("cpu", "CPU per answer"), ("p50", "median latency")):
            for peer, limit in beside_peers({"litserve": ALONE_AT_MOST, "mlflow": ALONE_AT_MOST}):
                if 1 in clients:
                    yield Bound(
                        f"{name}, 1 client, {word}, of {peer}", ratio(of(OURS, key, 1), of(peer, key, 1)), limit
                    )
        if 32 in clients and {INT8, "litserve"} <= set(servers):
            figure = ratio(of(INT8, "cpu", 32), of("litserve", "cpu", 32))
            yield Bound(f"{name}, int8, 32 clients, CPU per answer, of litserve", figure, INT8_AT_MOST)
    for number in {8, 32} & set(clients):
        for peer, limit in beside_peers(RATE_AT_LEAST):
            figure = ratio(of(OURS, "rate", number), of(peer, "rate", number))
            yield Bound(f"{name}, {number} clients, answers/s, times {peer}", figure, limit, at_least=True)
    start = found.middle(OURS, lambda turn: turn.start)
    yield Bound(f"{name}, start to first right answer, CPU s", start, START_SECONDS)
    for peer, limit in beside_peers(START_AT_MOST):
        figure = ratio(start, found.middle(peer, lambda turn: turn.start))
        yield Bound(f"{name}, start to first right answer, of {peer}", figure, limit)
    yield Bound(f"{name}, PSS under load, MiB", found.middle(OURS, lambda turn: turn.memory), MEMORY[name])
    for number in clients:
        alone, batch = statistics.median(found.in_process.get(number) or [0.0]), of(OURS, "batch", number) or 1
        what = f"CPU ms of the whole server over decode + forward ({alone:.3f} with {batch:.1f} at a time)"
        limit = OVER_FACTOR * alone + OVER_MS
        yield Bound(f"{name}, {number} client{'s' if number > 1 else ''}, {what}", of(OURS, "cpu", number), limit)
    quiet = of(OURS, "cpu", max(clients))
    figure = ratio(found.middle(OURS, lambda turn: turn.beside), quiet)
    what = f"{name}, {max(clients)} clients and {NEIGHBOURS} busy neighbours, CPU per answer, of the quiet figure"
    yield Bound(what, figure, BESIDE_AT_MOST)
    yield right


def rounds_of(found: dict[str, Found]) -> str:
    """Measure each server in turn; each round reverses the order."""
    counts = {len(turns) for of_model in found.values() for turns in of_model.turns.values()} or {0}
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def machine(python: str | None) -> str:
    """Return the versions that the figures depend on."""
    ours = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("onnxruntime", "httptools", "uvloop", "pillow")
    )
    words = [f"Python {platform.python_version()}, {os.cpu_count()} cores; ours: {ours}"]
    if python:
        pinned = re.findall(r"^(\w+)==(\S+)", (side_by_side.PEERS / "serve_requirements.txt").read_text(), re.MULTILINE)
        words.append("peers: " + ", ".join(f"{name} {version}" for name, version in pinned))
    return "; ".join(words)


def wrong_answers(turn: Turn) -> int:
    """Return answers that were wrong or missing."""
    return sum(load.failed for load in turn.loads.values())


def device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text} is not cpu, cuda or cuda:N")
    return text


def listed(known: dict[str, Any]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        words = [word for word in text.split(",") if word]
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
        return words

    return parse


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--peers", type=listed(PEERS), help="default: litserve,mlflow,flask; on a GPU litserve")
    known = [*MODELS, *FURTHER]
    words.add_argument("--models", type=listed(dict.fromkeys(known)), default=known, help=f"of {', '.join(known)}")
    words.add_argument("--clients", type=listed({str(n): n for n in CLIENTS}), default=list(map(str, CLIENTS)))
    words.add_argument("--rounds", type=int, default=3, help="in which each server has its turn; default 3")
    words.add_argument("--seconds", type=int, default=6, help="of each load; default 6")
    words.add_argument("--no-int8", action="store_true", help="leave the 8-bit row out")
    words.add_argument("--device", type=device, default="cpu", help="cpu (default), cuda or cuda:N")
    words.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers as well")
    options = words.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no server is left
    options.clients = [int(number) for number in options.clients]
    on_gpu = options.device != "cpu"
    if options.peers is None:
        options.peers = ["litserve"] if on_gpu else list(PEERS)
    options.servers = [OURS, FP16] if on_gpu else [OURS] + ([] if options.no_int8 else [INT8])
    options.servers += [server for peer in options.peers for server in PEERS[peer]]
    if shutil.which("wrk") is None:
        print("The load comes from wrk, which is not installed: apt-get install wrk, or see its page.", file=sys.stderr)
        sys.exit(3)
    try:
        python = side_by_side.environment("serve_requirements.txt", ".venv-serve") if options.peers else None
    except side_by_side.NotMade as error:
        print(f"The peers' environment cannot be made: {error}. `--peers ''` measures ours alone.", file=sys.stderr)
        sys.exit(3)
    found = {name: Found() for name in options.models}
    with tempfile.TemporaryDirectory() as place, contextlib.suppress(KeyboardInterrupt):  # what is there is told
        measure(options, python, Path(place), found)
    print(machine(python))
    print(f"Medians of {rounds_of(found)} rounds; clients: {' / '.join(map(str, options.clients))}")
    for name, of_model in found.items():
        lines = list(rows(of_model, servers_of(name, options), clients_of(name, options)))
        print(f"\n## {name}\n\n{table(HEAD, lines)}")
        for server, reason in of_model.lacking.items():
            print(f"\n{server}: not measured: {reason}")
    on_cpu = {} if on_gpu else found
    promises = [
        bound
        for name, of_model in on_cpu.items()
        for bound in bounds(name, of_model, servers_of(name, options), clients_of(name, options))
    ]
    if promises:
        print(f"\n## Bounds\n\n{table(['what', 'bound', 'figure', 'kept'], [bound.row() for bound in promises])}")
    failed = [turn for of in found.values() for turns in of.turns.values() for turn in turns if wrong_answers(turn)]
    missing = [server for name, of in found.items() for server in servers_of(name, options) if server not in of.turns]
    if options.json:
        options.json.write_text(json.dumps({name: vars(of) for name, of in found.items()}, default=vars, indent=1))
    sys.exit(1 if not all(bound.kept for bound in promises) or (on_gpu and (failed or missing)) else 0)


if __name__ == "__main__":
    main()
