"""Measure a machine with GPUs: the tests that need one, a table of engines and precisions, memory and speed.

    bash test.sh --gpu [arguments of pytest]        in at most 8 minutes, to see whether all is well
    .venv/bin/python benchmarks/gpu.py --write      all of it, into benchmarks/gpu.md

Without a GPU it prints one line and runs the tests that are about GPUs and need none. Each run is a fresh process.
Speed is measured beside a script as a user would write it and beside a loop with the data on the GPU, one program at a
time; a ratio is of figures of the same round. Ends with 1 when a test, a program or a bound fails; with `--suite` a
bound is only reported. Ends with 3 where a package is missing that all of it needs.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_rows import ENGINES, FULL, TINY, Bench, compile_graphs, memory, speed
from side_by_side import ROOT, table

PAGE = ROOT / "benchmarks" / "gpu.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

SUITE = 480.0  # seconds of `bash test.sh --gpu`
TESTS = 250.0  # of these, for the tests

NEEDED = ["torch", "torchvision", "pytorch_lightning", "mlflow", "sqlalchemy", "alembic", "click", "yaml", "filelock"]
NEEDED += ["psutil", "rich", "safetensors", "onnx", "onnxscript", "onnxruntime", "pytest"]
OPTIONAL = {
    "deepspeed": "the rows of DeepSpeed",
    "tokenizers": "the task on texts",
    "xdist": "running tests in parallel: not all may end in time (pytest-xdist)",
}

PRECISIONS = ["32", "bf16", "16"]


# ---- the tests


def test_command(arguments: Sequence[str], parallel: int) -> list[str]:
    """Return the command of the tests that need a GPU, in the files that have some; other files may need missing
    packages.

    Tests with a pretended device are for machines without a GPU: DeepSpeed would use the real one.
    """
    import torch

    marked = "gpu" if torch.cuda.is_available() else "gpu or device"
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(path.relative_to(ROOT)) for path in paths if re.search(r"mark\.(gpu|device)\b", path.read_text())]
    spread = ["-p", "xdist", "-n", str(parallel)] if parallel > 1 and importlib.util.find_spec("xdist") else []
    return [sys.executable, "-m", "pytest", "-q", "-m", marked, *spread, *files, *arguments]


def run_tests(arguments: Sequence[str], parallel: int = 1, limit: float | None = None, **variables: str) -> int | None:
    """Run pytest and pass on its output; return its exit code, or None if it was stopped at the limit, in seconds."""
    command = test_command(arguments, parallel)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | variables
    # A warning of a plugin that the machine happens to have would be an error: pytest-benchmark warns beside xdist.
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    child = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        return child.wait(limit)
    except BaseException as stopped:
        # An interrupt, at which pytest ends the runs that it has started.
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(15)
                break
        if isinstance(stopped, subprocess.TimeoutExpired):
            return None
        raise


def tests(bench: Bench, arguments: Sequence[str]) -> None:
    """Run the tests in parallel, and add the table that they make."""
    cells = bench.place / "cells.jsonl"
    limit = min(TESTS, bench.left) if bench.left < float("inf") else None
    parallel = max(1, min(12, (os.cpu_count() or 1) * 3 // 4))  # a run spends most of its time on imports
    code = run_tests(arguments, parallel, limit, GPU_CELLS=str(cells))
    found = [json.loads(line) for line in cells.read_text().splitlines()] if cells.exists() else []
    bench.raw["cells"] = found
    note = (
        "A run of two epochs with the test after it; the same killed inside the second epoch and resumed; the bundle. "
    )
    note += (
        "Adam in groups, accumulation, batch norm, dropout, and a schedule whose number of steps is `auto`. fsdp has "
    )
    note += "no loss scale: its 16 is `16-true`."
    if found or not arguments:
        bench.say("tests", "Engines and precisions", note, cell_table(found))
    if code is None:
        bench.failed.append(f"tests (stopped after {limit:.0f} s)")
    elif code:
        bench.failed.append("tests")


def cell_table(cells: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each engine and precision, also for those that were not run."""
    by_key = {(cell["engine"], cell["precision"], cell["devices"]): cell for cell in cells}
    devices = sorted({cell["devices"] for cell in cells}) or ["1 GPU"]
    rows = []
    for device in devices:
        for engine in ENGINES:
            for precision in PRECISIONS:
                cell = by_key.get((engine, precision, device))
                if cell is not None:
                    rows.append([engine, precision, device, *_words(cell)])
                elif device == devices[0]:
                    missing = engine.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None
                    rows.append([engine, precision, device, "not installed" if missing else "not run", *["-"] * 3])
    return table(["engine", "precision", "devices", "train", "test_acc", "resume digest", "export equal"], rows)


def _words(cell: dict[str, Any]) -> list[str]:
    if not cell["train"]:
        return [f"FAILED: {cell['reason']}".replace("|", "/"), "-", "-", "-"]
    resumed = "equal" if cell["resumed"] else f"NOT equal: {cell['reason']}".replace("|", "/")
    return ["yes", f"{cell['test']:.3f}", resumed, "yes" if cell["exported"] else "NO"]


# ---- the page


def machine() -> str:
    """Return the versions and devices that the figures depend on."""
    names = ["torch", "torchvision", "pytorch-lightning", "deepspeed", "mlflow", "mlflow-skinny"]
    versions = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    devices = ", ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus))) or "no GPU"
    return f"{devices}; {os.cpu_count()} CPU cores; Python {platform.python_version()}, {', '.join(versions)}"


def commit() -> str:
    """Return the state of the clone, as git describes it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "an unknown commit"
    return done.stdout.strip()


def page(text: str, bench: Bench) -> str:
    """Replace the measured part of the page.

    Raises:
        ValueError: its two marks are not there, in this order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} with a {END} behind it")
    today = datetime.datetime.now(datetime.UTC)
    head = f"Measured on {today.day} {today:%B %Y} at {commit()}: {machine()}."
    parts = [BEGIN, head, *bench.said.values(), *([f"## Bounds\n\n{bound_table(bench)}"] if bench.bounds else []), END]
    return before + "\n\n".join(parts) + after


def bound_table(bench: Bench) -> str:
    return table(["what", "bound", "figure", "kept"], [bound.row() for bound in bench.bounds])


# ---- the command


def missing() -> list[str]:
    """Return the names of missing packages without which nothing can run."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def say_what_is_left_out() -> None:
    for name, what in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            print(f"left out, since {name} is not installed: {what}", flush=True)


PARTS = {"tests": tests, "speed": speed, "memory": memory}


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    words.add_argument("--suite", action="store_true", help="as test.sh --gpu: 8 minutes, and bounds are only reported")
    words.add_argument("--only", nargs="+", choices=PARTS, help="only these parts")
    words.add_argument("--rounds", type=int, default=1, help="of the rows of speed; default 1")
    words.add_argument("--write", action="store_true", help="replace the measured part of benchmarks/gpu.md")
    words.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: with --tiny, to try this program"
    )
    words.add_argument("--tiny", action="store_true", help="small networks and data, whose figures mean nothing")
    words.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers as well")
    given, arguments = words.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no program is left
    if absent := missing():
        print(f"Not installed: {', '.join(absent)}. tools/gpu_wheels.sh makes a folder with them.", file=sys.stderr)
        sys.exit(3)
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print(f"No GPU: torch {torch.__version__} sees none, so only the tests that need none are run.", flush=True)
        sys.exit(run_tests(arguments))
    say_what_is_left_out()
    print(machine(), flush=True)
    # pytest's arguments choose tests; the rest is measured when all of it is.
    parts = given.only or (["tests"] if arguments else list(PARTS))
    sys.exit(measure(given, parts, arguments))


def measure(given: argparse.Namespace, parts: Sequence[str], arguments: Sequence[str]) -> int:
    """Run the parts; return the exit code."""
    end = time.monotonic() + SUITE if given.suite else float("inf")
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(1) as aside:
        bench = Bench(TINY if given.tiny else FULL, given.device, Path(place), end, given.rounds)
        if "speed" in parts and bench.on_gpu:
            bench.warm = aside.submit(compile_graphs, bench)
        for part in parts:
            if part == "tests":
                tests(bench, arguments)
            else:
                PARTS[part](bench)
        if bench.bounds:
            print(f"\n## Bounds\n\n{bound_table(bench)}")
        if given.write:
            PAGE.write_text(page(PAGE.read_text(), bench))
        if given.json:
            given.json.write_text(json.dumps(bench.raw, indent=1))
    for what in bench.failed:
        print(f"failed: {what}", file=sys.stderr)
    kept = given.suite or all(bound.kept for bound in bench.bounds)
    return 1 if bench.failed or not kept else 0


if __name__ == "__main__":
    main()
