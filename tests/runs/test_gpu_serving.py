"""On a GPU the server answers as on the CPU, in fp32 and fp16, from a bundle and from a checkpoint.

Skipped without a GPU; if ONNX Runtime cannot use the GPU, only the test of torch runs. Tests without a GPU are in
test_device, test_session and test_gpu_workers. CUDA does not survive a fork: new processes open the model.
"""

import concurrent.futures
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import python
from served import COLOURS, colour_run, gone, picture, probabilities, wait_until
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
    """Skip if ONNX Runtime cannot use the GPU."""
    reason = onnxruntime_lacks() or probe()
    if isinstance(reason, str):
        pytest.skip(reason)


@pytest.fixture(scope="module")
def network(tmp_path_factory, provider):
    """The run folder of a network with convolutions, in fp32 and fp16."""
    folder = exported(tmp_path_factory.mktemp("run"), brightest_channel())
    halve(folder)
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, provider):
    return colour_run(tmp_path_factory.mktemp("a run"))


def on_gpu(program, folder, **options):
    """Return the JSON printed by a program for which a run's bundle is open as `bundle` on the first GPU."""
    done = python("-c", OPEN + program, folder.path, json.dumps(options))
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
    """CUDA's provider runs the model, with the answers of the CPU within the tolerance."""
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
    message = "it fits"
except MemoryError as error:
    message = str(error)
after = bundle.predict(bundle.samples).shape
print(json.dumps([message, after]))
"""


def test_a_batch_beyond_the_arena_is_a_memory_error(network):
    """ONNX Runtime's message is recognized, and the model answers afterwards."""
    message, after = on_gpu(FULL, network, free=50_000_000)
    assert "memory" in message
    assert after == [4, 3]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_server_answers_from_the_gpu(network, serving, precision):
    """The first line and /info name the GPU; forty concurrent clients get right answers; SIGTERM ends all processes."""
    server = serving(network.path, "--device", "cuda:0", "--precision", precision, "--max-batch", "64")
    assert "on cuda:0 (" in server.line
    info = server.ask("GET", "/info")[1]
    assert (info["device"], info["precision"], info["processes"]) == ("cuda:0", precision, 1)
    assert 1 <= info["limits"]["max_batch"] <= 64
    files = [picture(colour, size=(5, 6)) for colour in COLOURS]
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda n: server.ask("POST", "/predict", files[n % 3]), range(400)))
    expected = [(200, list(COLOURS)[number % 3]) for number in range(400)]
    assert [(status, answer["label"]) for status, answer in answers] == expected
    processes = server.processes()
    assert server.stop() == 0
    assert all(map(gone, processes))


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_probabilities_are_those_of_the_cpu(run_folder, serving, device):
    """Probabilities are within the tolerance of the golden samples; `auto` selects the GPU without a log line."""
    server = serving(run_folder.path, "--device", device)
    assert server.ask("GET", "/info")[1]["device"].startswith("cuda:")
    assert server.events() == []
    for colour in COLOURS:
        found = server.ask("POST", "/predict", picture(colour))[1]
        assert float(found["predicted_probability"]) == pytest.approx(probabilities(colour).max(), abs=GPU_TOLERANCE)
    assert server.ask("GET", "/info")[1]["processes"] == GPUS


def test_a_changed_bundle_and_a_crash_are_survived(run_folder, serving, tmp_path):
    """A new process loads a changed bundle while the old one still uses the GPU; a dead process is replaced."""
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
    ("device", "hidden", "message"),
    [
        (f"cuda:{GPUS}", {}, f"serve.device is cuda:{GPUS}: the visible GPUs are cuda:0 ("),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(run_folder, device, hidden, message):
    """An absent or hidden GPU is exit code 3, with a list of the visible ones."""
    done = python("-m", "serve", run_folder.path, "--port", "0", "--device", device, **hidden)
    assert (done.returncode, done.stdout) == (3, "")
    assert message in done.stderr


def test_torch_answers_from_the_gpu(train, tmp_path):
    """A checkpoint on a GPU answers as on the CPU at every batch size."""
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
    done = python("-c", program, folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= GPU_TOLERANCE
