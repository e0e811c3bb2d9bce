"""On GPUs each worker loads the model itself, and reports failures to the parent. The workers of these tests pretend to
have a GPU: they compute on the CPU, and fail as a real GPU would."""

import json
import os
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from commands import python
from served import COLOURS, ROOT, Server, colour_run, gone, picture, wait_until

PRETEND = '''\
"""`python -m serve` with pretended GPUs: their number and their failures come from environment variables."""

import json
import os
import sys
import time
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
    time.sleep(3 * (fails.parent / "slow").exists())
    return replace(opened(path, precision), device=device)


Bundle.open = open_pretended
program.choose_devices = lambda device, lacks: Choice(gpus, may_fall_back=device == "auto")
sys.exit(program.main(sys.argv[1:]))
'''


@pytest.fixture
def pretend(tmp_path):
    """Start servers on pretended GPUs; `fails` sets which of them fail."""
    program, failures, log, servers = tmp_path / "pretend.py", tmp_path / "fails.json", tmp_path / "opened", []
    program.write_text(PRETEND)

    class PretendServer(Server):
        program = (sys.executable, str(tmp_path / "pretend.py"))

    def fails(**faults):
        failures.write_text(json.dumps({name.replace("_", ":"): fault for name, fault in faults.items()}))

    def opened():
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    def run(folder, gpus, device="cuda"):
        """Return exit code, stdout and stderr of a start that is expected to fail."""
        done = python(program, folder, "--port", "0", "--device", device, GPUS=str(gpus), FAILS=str(failures))
        return done.returncode, done.stdout, done.stderr

    def start(folder, gpus, device="cuda", *arguments):
        errors, variables = tmp_path / f"errors {len(servers)}", {"FAILS": str(failures), "PYTHONPATH": str(ROOT)}
        server = PretendServer(folder, errors, "--device", device, *arguments, GPUS=str(gpus), **variables)
        servers.append(server)
        return server

    yield SimpleNamespace(fails=fails, opened=opened, run=run, start=start)
    for server in servers:
        server.stop(signal.SIGKILL)


def label(server, colour):
    return server.ask("POST", "/predict", picture(colour))[1]["label"]


def infos(server, number):
    """Return /info by device: connections are distributed over the processes, so several are needed."""
    found, end = {}, time.monotonic() + 20
    while len(found) < number:
        assert time.monotonic() < end
        info = server.ask("GET", "/info")[1]
        found[info["device"]] = info
    return found


def test_each_gpu_has_a_process_that_loads_the_model_itself(pretend, run_folder):
    """The parent loads no model; the first line and /info have the devices, /info the batch limit; SIGTERM ends all."""
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
    ("fault", "code", "message"),
    [
        ("it is busy", 3, "cuda:1 cannot be used: it is busy"),
        ("dies", 3, "the process for cuda:1 (a pretended GPU) died while it loaded the model"),
        ("bug", 1, "ours"),
    ],
)
def test_a_gpu_that_cannot_load_the_model_ends_the_start(pretend, run_folder, fault, code, message):
    """The start ends with one message and exit code; a bug of ours shows its traceback; no process remains."""
    pretend.fails(cuda_1=fault)
    found, out, err = pretend.run(run_folder.path, 2)
    assert (found, out) == (code, "")
    assert err.splitlines()[-1] == f"error: {message}"
    assert ("ZeroDivisionError" in err) == (fault == "bug")
    assert all(gone(int(process)) for process, _ in pretend.opened())


@pytest.mark.parametrize("fault", ["it is busy", "dies"])
def test_auto_answers_on_the_cpu_where_a_gpu_cannot_load_the_model(pretend, run_folder, fault):
    """`auto` falls back to the CPU's layout, and one log line has the reason."""
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
    """A damaged bundle is exit code 4 with its usual message, also if `auto` then tries the CPU."""
    for device in ("cuda", "auto"):
        code, out, err = pretend.run(tmp_path / "none", 1, device)
        assert (code, out) == (4, "")
        assert err.splitlines()[-1].startswith(f"error: There is no folder {tmp_path / 'none'}")


def test_a_worker_that_dies_is_replaced_on_its_gpu(pretend, run_folder):
    """A new worker loads the model; while the GPU fails, the load is retried and the reason logged."""
    server = pretend.start(run_folder.path, 1)
    pretend.fails(cuda_0="it is busy")
    os.kill(server.workers()[0], signal.SIGKILL)
    wait_until(
        lambda: "cuda:0 does not answer, and is tried again: cuda:0 cannot be used: it is busy" in server.events()
    )
    pretend.fails()
    assert label(server, "green") == "green"  # the request waits in the parent's socket until a worker accepts it
    assert [device for _, device in pretend.opened()] == ["cuda:0"] * 2


def test_a_changed_bundle_is_reloaded_on_the_gpu(pretend, run_folder, tmp_path):
    """A new worker loads a changed bundle while the old one answers; if the load fails, the old one stays."""
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


def test_no_connection_waits_at_the_socket_of_a_gpu_that_failed(pretend, run_folder):
    """After a fallback to one process on the CPU, no other socket listens."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        pretend.fails(cuda_0="it is busy")
        server = pretend.start(run_folder.path, 4, "auto")
    finally:
        os.sched_setaffinity(0, cores)
    assert [label(server, "red") for _ in range(20)] == ["red"] * 20


def test_a_worker_that_loads_ends_with_its_pool(pretend, run_folder, tmp_path):
    """A worker whose pool is killed while it loads the model does not answer for ever."""
    server = pretend.start(run_folder.path, 1)
    (tmp_path / "slow").touch()
    os.kill(server.workers()[0], signal.SIGKILL)  # its pool starts another, which loads
    wait_until(lambda: len(pretend.opened()) == 2)
    loading, pool = int(pretend.opened()[1][0]), server.processes()[1]
    os.kill(pool, signal.SIGKILL)
    wait_until(lambda: gone(loading), 15)
    assert gone(loading)


def test_no_connection_waits_at_a_gpu_that_is_lost(pretend, run_folder):
    """While one GPU fails, the other answers every client; afterwards both do."""
    server = pretend.start(run_folder.path, 2)
    pretend.fails(cuda_1="it is lost")
    os.kill(next(int(process) for process, device in pretend.opened() if device == "cuda:1"), signal.SIGKILL)
    wait_until(lambda: any("cuda:1 does not answer" in event for event in server.events()))
    assert [label(server, "red") for _ in range(20)] == ["red"] * 20
    pretend.fails()
    assert set(infos(server, 2)) == {"cuda:0", "cuda:1"}
