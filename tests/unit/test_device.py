"""`serve.device` resolves to GPUs, to the CPU with a reason, or to exit code 3 with a remedy. No GPU is needed: a fake
driver implements NVIDIA's calls."""

import json
import sys
import tomllib

import pytest
from commands import python
from served import ROOT, picture

from serve import cuda
from serve.device import CPU, PACKAGE, Device, DeviceError, choose_devices, is_device_word, onnxruntime_lacks
from serve.session import providers

ONE = {"name": "H100", "free": 80_000_000_000}
TAKEN = {"name": "H100", "fault": "cuDevicePrimaryCtxRetain: device is busy"}


@pytest.fixture
def chosen(monkeypatch):
    """`chosen(word, gpu, …)` resolves a word on a machine with these GPUs."""

    def choose(word, *gpus, lacks=lambda: None):
        monkeypatch.setattr("serve.device.has_driver", lambda: True)
        monkeypatch.setattr("serve.device.probe", lambda: list(gpus))
        return choose_devices(word, lacks)

    return choose


def test_a_machine_without_a_driver_is_not_told_to_install_packages(monkeypatch):
    """`auto` and `cuda` give the plain reason."""
    monkeypatch.setattr("serve.device.has_driver", lambda: False)
    choice = choose_devices("auto", lambda: "install another")
    assert (choice.devices, choice.reason) == ((CPU,), "this machine has no NVIDIA driver")
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        choose_devices("cuda", lambda: "install another")


def test_devices_are_named_as_torch_names_them():
    """auto, cpu, cuda and cuda:N are valid, and nothing else."""
    assert all(map(is_device_word, ["auto", "cpu", "cuda", "cuda:0", "cuda:15"]))
    wrong = ["", "gpu", "cuda:", "cuda:-1", "cuda:a", "CUDA", "cuda:0,1", " cpu", "cuda:0 "]
    assert not any(map(is_device_word, wrong))


def test_each_word_means_its_devices(chosen):
    """cuda means every GPU, cuda:1 the second, auto every usable one; cpu does not look for GPUs."""
    gpus = (Device(0, "H100", 80_000_000_000), Device(1, "H100", 80_000_000_000))
    assert chosen("cuda", ONE, ONE).devices == chosen("auto", ONE, ONE).devices == gpus
    assert chosen("cuda:1", ONE, ONE).devices == chosen("cuda:1", TAKEN, ONE).devices == (gpus[1],)
    assert chosen("auto", TAKEN, ONE).devices == (gpus[1],)
    assert [chosen(word, ONE).may_fall_back for word in ("auto", "cuda")] == [True, False]

    def never():
        raise AssertionError("the CPU needs no driver")

    assert choose_devices("cpu", never).devices == (CPU,)


@pytest.mark.parametrize(
    ("word", "gpus", "lacks", "words"),
    [
        ("cuda", [], None, "the visible GPUs are none; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"),
        ("cuda:0", [TAKEN], None, "are cuda:0 (H100, unusable: cuDevicePrimaryCtxRetain: device is busy); see"),
        ("cuda", [TAKEN, ONE], None, "device is busy), cuda:1 (H100); see"),
        ("cuda:3", [ONE], None, "serve.device is cuda:3: the visible GPUs are cuda:0 (H100); see"),
        ("auto", [ONE], "torch is built without CUDA", "torch is built without CUDA"),
        ("auto", [], None, "the visible GPUs are none"),
        ("auto", [TAKEN], None, "device is busy"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_those_that_can(chosen, word, gpus, lacks, words):
    """Exit code 3; cuda means every GPU, so an unusable one prevents the start. auto takes the CPU for this reason."""
    if word == "auto":
        choice = chosen(word, *gpus, lacks=lambda: lacks)
        assert (choice.devices, words in choice.reason) == ((CPU,), True)
        return
    with pytest.raises(DeviceError) as caught:
        chosen(word, *gpus)
    assert caught.value.exit_code == 3
    assert words in str(caught.value)


def test_a_wrong_package_is_an_error_with_a_remedy(tmp_path, monkeypatch):
    """The remedy names what to remove and what to install, for a CPU build and for both packages at once; the extra in
    pyproject.toml has the package with a lower bound."""
    remedy = "uninstall onnxruntime and onnxruntime-gpu, then install 'onnxruntime-gpu[cuda,cudnn]'"
    (extra,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    assert extra.startswith(f"{PACKAGE}>=")
    assert str(onnxruntime_lacks()).endswith(f"is built for the CPU: {remedy}")
    folder = tmp_path / "onnxruntime_gpu-1.31.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.31.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert str(onnxruntime_lacks()).endswith(f"are both installed, and overwrite each other's files: {remedy}")


class FakeDriver:
    """libcuda with two GPUs; the second is in use."""

    def __init__(self, init=0):
        self.init = init

    def cuInit(self, flags):
        return self.init

    def cuGetErrorString(self, code, text):
        text._obj.value = {46: b"device is busy", 100: b"no device"}[code]

    def cuDeviceGetCount(self, number):
        number._obj.value = 2
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA H100"
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 7 + device.value
        return 46 if device.value else 0

    def cuCtxSetCurrent(self, context):
        return 0

    def cuMemGetInfo_v2(self, free, total):
        free._obj.value, total._obj.value = 80, 85
        return 0


def test_the_driver_is_asked_for_what_the_server_needs():
    """It gives names, free memory, and why a GPU is unusable."""
    assert cuda.find_gpus(FakeDriver()) == [
        {"name": "NVIDIA H100", "free": 80},
        {"name": "NVIDIA H100", "fault": "cuDevicePrimaryCtxRetain: device is busy"},
    ]
    with pytest.raises(cuda.CudaError, match="cuInit: no device"):
        cuda.find_gpus(FakeDriver(100))


def test_the_probe_is_a_process_of_its_own(monkeypatch, tmp_path):
    """The probe prints JSON, also without a driver; if it dies or hangs, that is a reason, not an exception."""
    found = cuda.probe()
    assert isinstance(found, list | str)
    assert isinstance(json.loads(python(cuda.__file__).stdout), type(found))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert "NVIDIA's driver does not answer" in cuda.probe()


def test_a_gpu_has_its_providers_in_order():
    """CUDA comes first, then the CPU; the free memory limits the arena, and fp32 is not TF32."""
    assert providers(CPU) == ["CPUExecutionProvider"]
    (name, options), last = providers(Device(1, "H100", 10_000_000_000))
    assert (name, last) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert options == {
        "device_id": "1",
        "gpu_mem_limit": "9000000000",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",
    }


WITHOUT = onnxruntime_lacks() if cuda.has_driver() else "this machine has no NVIDIA driver"
"""Why this machine serves on the CPU."""


@pytest.mark.skipif(onnxruntime_lacks() is None, reason="onnxruntime-gpu is installed, and may find a GPU")
def test_auto_says_in_one_line_that_the_cpu_answers(run_folder, serving):
    """The server answers; one log line has the reason, and /info the device."""
    server = serving(run_folder.path, "--device", "auto", "--precision", "fp16")
    assert server.ask("POST", "/predict", picture("red"))[1]["label"] == "red"
    info = server.ask("GET", "/info")[1]
    assert (info["device"], info["precision"]) == ("cpu", "fp32")
    (line,) = [json.loads(line) for line in server.errors.read_text().splitlines()]
    assert (line["event"], line["reason"]) == ("serving on the CPU", WITHOUT)
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpu"], "gpu is not auto, cpu, cuda or cuda:N"),
        (["cuda:0", "--precision", "int8"], "--precision int8 cannot be combined with --device cuda:0"),
        (["cpu", "--precision", "fp16"], "--precision fp16 cannot be combined with --device cpu"),
        (["cuda"], f"error: serve.device is cuda: {WITHOUT}.\n"),
        (["cuda:0"], f"error: serve.device is cuda:0: {WITHOUT}.\n"),
    ],
)
def test_a_device_that_cannot_be_is_refused(run_folder, arguments, words):
    """Contradictory options end with exit code 2 before the bundle is opened, a missing GPU with 3 and a remedy."""
    if arguments[0].startswith("cuda") and len(arguments) == 1 and onnxruntime_lacks() is None:
        pytest.skip("onnxruntime-gpu is installed, and may find a GPU")
    done = python("-m", "serve", run_folder.path, "--port", "0", "--device", *arguments, cwd=ROOT)
    assert (done.returncode, done.stdout) == (3 if words.startswith("error") else 2, "")
    assert words in done.stderr
