"""The server on a real GPU: its answers are those of the CPU, in fp32 and fp16, from a bundle and from a checkpoint.

Skipped where there is no GPU, and but for torch where ONNX Runtime cannot use it. What needs none is in test_device,
test_session and test_gpu_workers. CUDA does not survive a fork: processes of their own open the model.
"""

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import environment
from served import COLOURS, ROOT, colour_run, gone, picture, probabilities, wait_until
from test_quantize import brightest_channel, exported

from deeplightning.export.fp16 import halve
from serve.bundle import GPU_TOLERANCE, TOLERANCES, Bundle
from serve.cuda import probe
from serve.device import onnxruntime_lacks

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="there is no GPU")]

OPEN = """
import json, sys, numpy as np
from dataclasses import replace
from serve.bundle import Bundle
from serve.device import choose_devices, onnxruntime_lacks
device = choose_devices("cuda:0", onnxruntime_lacks).devices[0]
options = json.loads(sys.argv[2])
if "free" in options:
    device = replace(device, free=options.pop("free"))
bundle = Bundle.open(sys.argv[1], device=device, **options)
"""


@pytest.fixture(scope="module")
def provider():
    """ONNX Runtime can use the GPU."""
    reason = onnxruntime_lacks() or probe()
    if isinstance(reason, str):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def network(tmp_path_factory, provider):
    """The run of a network with convolutions, in fp32 and fp16."""
    folder = exported(tmp_path_factory.mktemp("run"), brightest_channel())
    halve(folder)
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, provider):
    return colour_run(tmp_path_factory.mktemp("a run"))


def on_gpu(program, folder, **options):
    """What a program prints, as JSON, that has opened the bundle of a run as `bundle` on the first GPU."""
    command = [sys.executable, "-c", OPEN + program, str(folder.path), json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ANSWERS = """
answers = []
for number in (1, 2, 3, 7, 16, 40, 1):
    batch = np.random.default_rng(number).integers(60, 160, (number, 3, 6, 5), dtype=np.uint8)
    answers.append(bundle.predict(batch).tolist())
print(json.dumps([bundle.session.get_providers(), answers]))
"""


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_answers_of_every_batch_size_are_those_of_the_cpu(network, precision):
    """CUDA's provider runs the model."""
    providers, answers = on_gpu(ANSWERS, network, precision=precision, max_batch=16)
    assert providers[0] == "CUDAExecutionProvider"
    allowed = max(TOLERANCES[precision], GPU_TOLERANCE)
    on_cpu = Bundle.open(network.path)
    for number, found in zip((1, 2, 3, 7, 16, 40, 1), answers, strict=True):
        given = np.random.default_rng(number).integers(60, 160, (number, 3, 6, 5), dtype=np.uint8)
        np.testing.assert_allclose(found, on_cpu.predict(given), atol=allowed)


FULL = """
try:
    bundle.predict(np.zeros((200_000, 3, 6, 5), np.uint8))
    said = "it fits"
except MemoryError as error:
    said = str(error)
after = bundle.predict(bundle.samples).shape
print(json.dumps([said, after]))
"""


def test_a_batch_beyond_the_arena_is_a_memory_error(network):
    """ONNX Runtime's words are known (a canary), and the model answers afterwards."""
    said, after = on_gpu(FULL, network, free=50_000_000)
    assert "memory" in said
    assert after == [4, 3]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_server_answers_from_the_gpu(network, serving, precision):
    """The first line and /info say so; forty clients at a time get right answers; SIGTERM ends all of it."""
    server = serving(network.path, "--device", "cuda:0", "--precision", precision, "--max-batch", "64")
    assert "on cuda:0 (" in server.line
    info = server.ask("GET", "/info")[1]
    assert (info["device"], info["precision"], info["processes"]) == ("cuda:0", precision, 1)
    assert 1 <= info["limits"]["max_batch"] <= 64
    files = [picture(colour, size=(5, 6)) for colour in COLOURS]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda n: server.ask("POST", "/predict", files[n % 3]), range(400)))
    assert [(status, answer["label"]) for status, answer in answers] == [
        (200, list(COLOURS)[number % 3]) for number in range(400)
    ]
    processes = server.processes()
    assert server.stop() == 0
    assert all(map(gone, processes))


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_probabilities_are_those_of_the_cpu(run_folder, serving, device):
    """To the tolerance of the golden samples; `auto` takes the GPU as well, without a line about the CPU."""
    server = serving(run_folder.path, "--device", device)
    assert server.ask("GET", "/info")[1]["device"].startswith("cuda:")
    assert server.events() == []
    for colour in COLOURS:
        found = server.ask("POST", "/predict", picture(colour))[1]
        assert float(found["predicted_probability"]) == pytest.approx(probabilities(colour).max(), abs=GPU_TOLERANCE)
    assert server.ask("GET", "/info")[1]["processes"] == GPUS


def test_a_changed_bundle_and_a_crash_are_survived(run_folder, serving, tmp_path):
    """A new process takes the GPU over while the old one still holds it; a dead one is replaced."""
    folder = shutil.copytree(run_folder.path, tmp_path / "copy")
    server = serving(folder, "--device", "cuda:0")
    first = server.workers()[0]
    colour_run(Path(folder), ("rot", "green", "blue"))
    wait_until(lambda: "the model is reloaded" in server.events(), 60)
    wait_until(lambda: gone(first), 20)
    assert server.ask("POST", "/predict", picture("red"))[1]["label"] == "rot"
    os.kill(server.workers()[0], signal.SIGKILL)
    wait_until(lambda: "a worker died" in server.events(), 60)
    assert server.ask("POST", "/predict", picture("red"))[1]["label"] == "rot"


@pytest.mark.parametrize(
    ("device", "hidden", "words"),
    [
        (f"cuda:{GPUS}", {}, f"serve.device is cuda:{GPUS}: the visible GPUs are cuda:0 ("),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(run_folder, device, hidden, words):
    """Exit code 3, with those that are; a hidden GPU is no GPU."""
    command = [sys.executable, "-m", "serve", str(run_folder.path), "--port", "0", "--device", device]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | hidden, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert words in done.stderr


def test_torch_answers_from_the_gpu(train, tmp_path):
    """A checkpoint on a GPU answers as it does on the CPU, in every batch size."""
    if torch.version.cuda is None:
        pytest.skip("torch is built without CUDA")
    folder = train("train.num_epochs=1", "data.module.params.limit=100", "train.export=true").folder
    program = (
        "import sys, numpy as np; from deeplightning.runfolder import RunFolder; "
        "from deeplightning.torch_server import Checkpoint; from serve.device import Device; "
        "folder = RunFolder(sys.argv[1]); ours = Checkpoint.open(folder); "
        "theirs = Checkpoint.open(folder, device=Device(0, 'GPU')); "
        "sizes = (1, 3, 16); "
        "print(max(abs(ours.predict(ours.samples[:n]) - theirs.predict(ours.samples[:n])).max() for n in sizes))"
    )
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= GPU_TOLERANCE
