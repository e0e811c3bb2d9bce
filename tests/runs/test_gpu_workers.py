"""On GPUs each worker loads the model itself, and reports whether it could. What happens then is shown by workers whose
GPU is pretended: they compute on the CPU, and fail as a real one would."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from served import COLOURS, ROOT, Server, colour_run, gone, picture, wait_until

PRETEND = '''\
"""`python -m serve` whose GPUs are pretended: those that the environment names, failing as it says."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import serve.__main__ as program
from serve.bundle import Bundle
from serve.device import CPU, Choice, Device, DeviceError

gpus = tuple(Device(n, "a pretended GPU", 8_000_000_000) for n in range(int(os.environ["GPUS"])))
fails = Path(os.environ["FAILS"])  # JSON: device to fault
folder = Path(sys.argv[1])
opened = Bundle.open


def open_pretended(path, precision="fp32", device=CPU):
    fault = json.loads(fails.read_text()).get(str(device)) if fails.exists() else None
    if fault == "dies":
        os._exit(9)
    if fault == "bug":
        raise ZeroDivisionError("ours")
    if fault:
        raise DeviceError(f"{device} cannot be used: {fault}")
    with (fails.parent / "opened").open("a") as log:
        log.write(f"{os.getpid()} {device}\\n")
    return replace(opened(path, precision), device=device)


Bundle.open = open_pretended
program.choose_devices = lambda word, lacks: Choice(gpus, may_fall_back=word == "auto")
sys.exit(program.main(sys.argv[1:]))
'''


@pytest.fixture
def pretend(tmp_path):
    """Starts servers on pretended GPUs; `fails` says which cannot be used."""
    program, servers = tmp_path / "pretend.py", []
    program.write_text(PRETEND)
    variables = {"FAILS": str(tmp_path / "fails.json"), "PYTHONPATH": str(ROOT)}

    class Pretended:
        @staticmethod
        def fails(**faults):
            told = {name.replace("_", ":"): fault for name, fault in faults.items()}
            (tmp_path / "fails.json").write_text(json.dumps(told))

        @staticmethod
        def opened():
            log = tmp_path / "opened"
            return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

        @staticmethod
        def run(folder, gpus, word="cuda"):
            """rc, stdout and stderr of a start that is expected to fail."""
            command = [sys.executable, str(program), str(folder), "--port", "0", "--device", word]
            environment = {**os.environ, **variables, "GPUS": str(gpus)}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
            return done.returncode, done.stdout, done.stderr

        @staticmethod
        def start(folder, gpus, word="cuda", *arguments):
            errors = tmp_path / f"errors {len(servers)}"
            server = Server.__new__(Server)
            server.program = [sys.executable, str(program)]
            Server.__init__(server, folder, errors, "--device", word, *arguments, GPUS=str(gpus), **variables)
            servers.append(server)
            return server

    yield Pretended
    for server in servers:
        server.stop(signal.SIGKILL)


def label(server, colour):
    return server.ask("POST", "/predict", picture(colour))[1]["label"]


def infos(server, number):
    """/info of each process: connections are spread, so several are asked."""
    found, end = {}, time.monotonic() + 20
    while len(found) < number:
        assert time.monotonic() < end
        info = server.ask("GET", "/info")[1]
        found[info["device"]] = info
    return found


def test_each_gpu_has_a_process_that_loads_the_model_itself(pretend, run_folder):
    """The parent loads nothing; the first line and /info say the device, /info the measured bound; SIGTERM ends all."""
    server = pretend.start(run_folder.path, 2, "cuda", "--max-batch", "24")
    assert server.line.endswith(": 2 processes with 2 lanes, on cuda:0 (a pretended GPU), cuda:1 (a pretended GPU)")
    processes = server.processes()
    assert len(server.workers()) == 2
    assert sorted(device for _, device in pretend.opened()) == ["cuda:0", "cuda:1"]
    assert {int(process) for process, _ in pretend.opened()} == set(server.workers())
    assert [label(server, colour) for colour in COLOURS] == list(COLOURS)
    for device, info in infos(server, 2).items():
        assert (info["processes"], info["lanes"], info["device"]) == (2, 2, device)
        assert info["device_name"] == "a pretended GPU"
        assert 1 <= info["limits"]["max_batch"] <= 24
    assert server.stop() == 0
    assert all(map(gone, processes))


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("it is busy", 3, "cuda:1 cannot be used: it is busy"),
        ("dies", 3, "the process for cuda:1 (a pretended GPU) died while it loaded the model"),
        ("bug", 1, "ours"),
    ],
)
def test_a_gpu_that_cannot_load_the_model_ends_the_start(pretend, run_folder, fault, code, words):
    """One sentence with the exit code of its kind; a fault of ours keeps its traceback; nobody is left."""
    pretend.fails(cuda_1=fault)
    found, out, err = pretend.run(run_folder.path, 2)
    assert (found, out) == (code, "")
    assert err.splitlines()[-1] == f"error: {words}"
    assert ("ZeroDivisionError" in err) == (fault == "bug")
    assert all(gone(int(process)) for process, _ in pretend.opened())


@pytest.mark.parametrize("fault", ["it is busy", "dies"])
def test_auto_answers_on_the_cpu_where_a_gpu_cannot_load_the_model(pretend, run_folder, fault):
    """One line says why; the layout is that of the CPU."""
    pretend.fails(cuda_0=fault)
    server = pretend.start(run_folder.path, 1, "auto")
    assert [label(server, colour) for colour in COLOURS] == list(COLOURS)
    info = server.ask("GET", "/info")[1]
    assert info["device"] == "cpu"
    assert "device_name" not in info
    assert "ms a forward pass" in server.line
    (event,) = [json.loads(line) for line in server.errors.read_text().splitlines()]
    assert event["event"] == "serving on the CPU"
    assert "cuda:0" in event["reason"]
    wait_until(lambda: len(server.workers()) == info["processes"])
    assert server.stop() == 0


def test_a_damaged_bundle_is_refused_on_gpus_as_well(pretend, tmp_path):
    """Exit code 4 in the words of the bundle, also where `auto` then tries the CPU."""
    for word in ("cuda", "auto"):
        code, out, err = pretend.run(tmp_path / "none", 1, word)
        assert (code, out) == (4, "")
        assert err.splitlines()[-1].startswith(f"error: There is no folder {tmp_path / 'none'}")


def test_a_worker_that_dies_is_replaced_on_its_gpu(pretend, run_folder):
    """The new one loads the model again; while the GPU cannot be used it is tried again, and the reason is told."""
    server = pretend.start(run_folder.path, 1)
    pretend.fails(cuda_0="it is busy")
    os.kill(server.workers()[0], signal.SIGKILL)
    wait_until(
        lambda: "cuda:0 does not answer, and is tried again: cuda:0 cannot be used: it is busy" in server.events()
    )
    pretend.fails()
    assert label(server, "green") == "green"  # it waits in the parent's socket until a worker takes it
    assert [device for _, device in pretend.opened()] == ["cuda:0"] * 2


def test_a_changed_bundle_is_taken_up_on_the_gpu(pretend, run_folder, tmp_path):
    """A new worker loads it beside the old one, which answers until then; a bundle that fails changes nothing."""
    folder = shutil.copytree(run_folder.path, tmp_path / "copied run")
    server = pretend.start(folder, 1)
    first = server.workers()[0]
    pretend.fails(cuda_0="it is full")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "the previous model is kept: cuda:0 cannot be used: it is full" in server.events())
    assert label(server, "red") == "red"
    assert not gone(first)
    pretend.fails()
    colour_run(folder, ("rot", "green", "blue"))
    wait_until(lambda: "the model is reloaded" in server.events())
    wait_until(lambda: gone(first))
    assert label(server, "red") == "rot"
    assert server.stop() == 0
