"""`serve.device` resolves to GPUs, to the CPU with a reason, or to exit code 3 with a remedy. No GPU is needed: a fake
driver implements NVIDIA's calls."""

import json
import subprocess
import sys

import pytest
from served import ROOT, Server, colour_run, picture

from serve import cuda
from serve.device import CPU, Device, DeviceError, choose_devices, is_device_word, onnxruntime_lacks
from serve.session import providers, tensorrt_options

ONE = {"name": "H100", "free": 80_000_000_000}
TAKEN = {"name": "H100", "fault": "cuDevicePrimaryCtxRetain: device is busy"}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return colour_run(tmp_path_factory.mktemp("a run"))


@pytest.fixture
def chosen(monkeypatch):
    """Return a function that resolves a word on a machine with these GPUs."""

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


@pytest.mark.parametrize("text", ["auto", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_devices_are_named_as_torch_names_them(text):
    """auto, cpu, cuda and cuda:N are valid."""
    assert is_device_word(text)


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cuda:a", "CUDA", "cuda:0,1", " cpu", "cuda:0 "])
def test_other_words_name_no_device(text):
    """Other values are invalid."""
    assert not is_device_word(text)


# ---- which devices


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
    ("word", "gpus", "words"),
    [
        ("cuda", [], "the GPUs that can be seen are none; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"),
        ("cuda:0", [TAKEN], "are cuda:0 (H100, unusable: cuDevicePrimaryCtxRetain: device is busy); see"),
        ("cuda", [TAKEN, ONE], "device is busy), cuda:1 (H100); see"),
        ("cuda:3", [ONE], "serve.device is cuda:3: the GPUs that can be seen are cuda:0 (H100); see"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_those_that_can(chosen, word, gpus, words):
    """Exit code 3; cuda means every GPU, so an unusable one prevents the start."""
    with pytest.raises(DeviceError) as caught:
        chosen(word, *gpus)
    assert caught.value.exit_code == 3
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("gpus", "lacks", "words"),
    [
        ([ONE], lambda: "torch is built without CUDA", "torch is built without CUDA"),
        ([], lambda: None, "the GPUs that can be seen are none"),
        ([TAKEN], lambda: None, "device is busy"),
    ],
)
def test_auto_falls_back_to_the_cpu_with_the_reason(chosen, gpus, lacks, words):
    choice = chosen("auto", *gpus, lacks=lacks)
    assert choice.devices == (CPU,)
    assert words in choice.reason


# ---- what is installed


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that simulates the installation of further packages."""

    def install(*names):
        for name in names:
            folder = tmp_path / f"{name.replace('-', '_')}-1.31.1.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.31.1\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_a_wrong_package_is_told_the_right_one(installed):
    """The remedy names what to remove and what to install, for a CPU build and for both packages at once."""
    remedy = "uninstall onnxruntime and onnxruntime-gpu, then install 'onnxruntime-gpu[cuda,cudnn]'"
    assert str(onnxruntime_lacks()).endswith(f"is built for the CPU: {remedy}")
    installed("onnxruntime-gpu")
    assert str(onnxruntime_lacks()).endswith(f"are both installed, and overwrite each other's files: {remedy}")


def test_the_extra_is_what_the_remedy_installs():
    """The extra in pyproject.toml has the package with a lower bound."""
    import tomllib

    from serve.device import PACKAGE

    (extra,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    assert extra.startswith(f"{PACKAGE}>=")


# ---- the driver


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
    done = subprocess.run([sys.executable, cuda.__file__], capture_output=True, text=True, check=True)
    assert isinstance(json.loads(done.stdout), type(found))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert "NVIDIA's driver does not answer" in cuda.probe()


# ---- providers


def test_a_gpu_has_its_providers_in_order():
    """TensorRT comes first, then CUDA, then the CPU; the free memory limits the arena, and fp32 is not TF32."""
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
    first, *others = providers(Device(1, "H100", 10_000_000_000), tensorrt_options("images", (3, 8, 8), 16, True))
    assert others == [(name, options), last]
    assert first == (
        "TensorrtExecutionProvider",
        {
            "device_id": "1",
            "trt_profile_min_shapes": "images:1x3x8x8",
            "trt_profile_opt_shapes": "images:16x3x8x8",
            "trt_profile_max_shapes": "images:16x3x8x8",
            "trt_fp16_enable": "1",
        },
    )


# ---- the process


@pytest.mark.skipif(onnxruntime_lacks() is None, reason="onnxruntime-gpu is installed, and may find a GPU")
def test_auto_says_in_one_line_that_the_cpu_answers(run_folder, tmp_path):
    """The server answers; one log line has the reason, and /info the device."""
    server = Server(run_folder.path, tmp_path / "errors", "--device", "auto", "--precision", "fp16")
    try:
        assert server.ask("POST", "/predict", picture("red"))[1]["label"] == "red"
        info = server.ask("GET", "/info")[1]
        assert (info["device"], info["precision"]) == ("cpu", "fp32")
        (line,) = [json.loads(line) for line in server.errors.read_text().splitlines()]
        assert line["event"] == "serving on the CPU"
        assert line["reason"] == (onnxruntime_lacks() if cuda.has_driver() else "this machine has no NVIDIA driver")
    finally:
        assert server.stop() == 0


@pytest.mark.skipif(onnxruntime_lacks() is None, reason="onnxruntime-gpu is installed, and may find a GPU")
@pytest.mark.parametrize("word", ["cuda", "cuda:0"])
def test_cuda_without_a_gpu_ends_with_the_remedy(run_folder, word):
    """cuda without a GPU ends with exit code 3, one sentence and nothing on stdout."""
    command = [sys.executable, "-m", "serve", str(run_folder.path), "--port", "0", "--device", word]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    reason = onnxruntime_lacks() if cuda.has_driver() else "this machine has no NVIDIA driver"
    assert done.stderr == f"error: serve.device is {word}: {reason}.\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "gpu"], "gpu is not auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:0", "--precision", "int8"], "--precision int8 does not go with --device cuda:0"),
        (["--device", "cpu", "--precision", "fp16"], "--precision fp16 does not go with --device cpu"),
        (["--device", "cpu", "--tensorrt"], "--tensorrt does not go with --device cpu"),
    ],
)
def test_options_that_contradict_each_other_are_refused(run_folder, arguments, words):
    """Contradictory options end with exit code 2 before the bundle is opened."""
    command = [sys.executable, "-m", "serve", str(run_folder.path), "--port", "0", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
