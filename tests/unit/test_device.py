"""`serve.device` resolves to GPUs, to the CPU with a reason, or to exit code 3 with a remedy. No GPU is needed: a fake
driver implements NVIDIA's calls."""

import ctypes
import json
import re
import subprocess
import sys

import pytest
from served import ROOT, Server, colour_run, picture

from serve import cuda
from serve.device import (
    CPU,
    ONNX_RUNTIME,
    Device,
    DeviceError,
    Runtime,
    choose_devices,
    is_device_word,
    onnxruntime_lacks,
)
from serve.session import providers, tensorrt_options

WORKS = Runtime("onnxruntime-gpu", lambda: None, lambda: "13.0")
ONE = {"name": "H100", "free": 80_000_000_000, "total": 85_000_000_000}
TAKEN = {"name": "H100", "fault": "cuDevicePrimaryCtxRetain: device is busy; its compute mode is exclusive"}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return colour_run(tmp_path_factory.mktemp("a run"))


def chosen(word, *gpus, driver="13.1", runtime=WORKS):
    return choose_devices(word, runtime, lambda: {"driver": driver, "gpus": list(gpus)}, lambda: True)


def test_a_machine_without_a_driver_is_not_told_to_install_packages_for_gpus():
    """Without a driver, `auto` gives the plain reason; `cuda`, which requires a GPU, gives the remedy."""
    for_cpus = Runtime("onnxruntime", lambda: "it is built for the CPU; install another", str)
    choice = choose_devices("auto", for_cpus, may_have_gpu=lambda: False)
    assert (choice.devices, choice.reason) == ((CPU,), "this machine has no NVIDIA driver")
    with pytest.raises(DeviceError, match="install another"):
        choose_devices("cuda", for_cpus, may_have_gpu=lambda: False)


def refused(word, *gpus, **options):
    with pytest.raises(DeviceError) as caught:
        chosen(word, *gpus, **options)
    assert caught.value.exit_code == 3
    return str(caught.value)


@pytest.mark.parametrize("text", ["auto", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_devices_are_named_as_torch_names_them(text):
    """auto, cpu, cuda and cuda:N are valid."""
    assert is_device_word(text)


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cuda:a", "CUDA", "cuda:0,1", " cpu", "cuda:0 "])
def test_other_words_name_no_device(text):
    """Other values are invalid."""
    assert not is_device_word(text)


# ---- which devices


def test_each_word_means_its_devices():
    """cuda means every GPU, cuda:1 the second, auto every usable one; cpu does not look for GPUs."""
    gpus = (Device(0, "H100", 80_000_000_000), Device(1, "H100", 80_000_000_000))
    assert chosen("cuda", ONE, ONE).devices == chosen("auto", ONE, ONE).devices == gpus
    assert chosen("cuda:1", ONE, ONE).devices == (gpus[1],)
    assert chosen("auto", TAKEN, ONE).devices == (gpus[1],)
    assert [chosen(word, ONE).may_fall_back for word in ("auto", "cuda")] == [True, False]

    def never():
        raise AssertionError("the CPU needs no driver")

    assert choose_devices("cpu", Runtime("", never, never), never).devices == (CPU,)


@pytest.mark.parametrize(
    ("gpus", "runtime", "words"),
    [
        ([ONE], Runtime("torch", lambda: "torch is built without CUDA", str), "torch is built without CUDA"),
        ([], WORKS, "there is no GPU; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"),
        ([TAKEN], WORKS, "cuda:0 (H100) cannot be used: cuDevicePrimaryCtxRetain: device is busy; its compute mode is"),
    ],
)
def test_auto_falls_back_to_the_cpu_and_cuda_does_not(gpus, runtime, words):
    """auto logs the reason; cuda is refused with the same reason."""
    choice = chosen("auto", *gpus, runtime=runtime)
    assert choice.devices == (CPU,)
    assert words in choice.reason
    assert refused("cuda", *gpus, runtime=runtime).startswith(f"serve.device is cuda: {words}")


def test_a_number_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    """The refusal lists the GPUs and CUDA_VISIBLE_DEVICES, which hides and renumbers them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    words = refused("cuda:3", ONE)
    assert words == (
        "serve.device is cuda:3, and the GPUs that are visible here are cuda:0 (H100), by CUDA_VISIBLE_DEVICES=3."
    )


def test_a_gpu_that_is_taken_is_named_with_one_that_is_not():
    """`cuda` means every GPU, so an unusable one prevents the start; the message suggests a free one."""
    assert refused("cuda", TAKEN, ONE).endswith("; use serve.device=cuda:1.")
    assert refused("cuda:0", TAKEN, ONE).endswith("; end what uses it (`nvidia-smi` lists the processes).")
    assert chosen("cuda:1", TAKEN, ONE).devices[0].index == 1


@pytest.mark.parametrize(("driver", "works"), [("12.8", False), ("13.0", True), ("14.0", True)])
def test_a_driver_that_is_too_old_is_named(driver, works):
    """A driver supports its own major version of CUDA and older ones; an older driver is reported."""
    choice = chosen("auto", ONE, driver=driver)
    assert choice.devices[0].on_gpu == works
    if not works:
        assert choice.reason == (
            "NVIDIA's driver supports CUDA 12.8, and onnxruntime-gpu is built for CUDA 13.0; "
            "update the driver, or install onnxruntime-gpu for CUDA 12"
        )


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


def test_both_packages_at_once_are_refused_with_the_remedy(installed, monkeypatch):
    """Both packages provide the same modules, so they conflict; `auto` uses the CPU and gives the same remedy."""
    installed("onnxruntime-gpu")
    words = refused("cuda", ONE, runtime=ONNX_RUNTIME)
    assert "onnxruntime and onnxruntime-gpu are both installed" in words
    commands = re.search(r"keep one: (.*) && (.*)\.$", words)
    assert re.search(r"uninstall .*onnxruntime onnxruntime-gpu$", commands[1])
    assert re.search(r"install .*'onnxruntime-gpu\[cuda,cudnn\]'$", commands[2])
    assert chosen("auto", ONE, runtime=ONNX_RUNTIME).reason in words
    monkeypatch.setattr(sys, "executable", "/a path/python")
    assert "'/a path/python'" in str(onnxruntime_lacks())


def test_a_cpu_build_is_told_the_extra():
    """For a CPU build, the command removes one package and installs the other."""
    assert re.search(
        r"built for the CPU; the extra `gpu` .*uninstall .*onnxruntime && .*install .*'onnxruntime-gpu\[cuda,cudnn\]'$",
        str(onnxruntime_lacks()),
    )


def test_the_extra_is_what_the_remedy_installs():
    """The extra in pyproject.toml has the package with a lower bound."""
    import tomllib

    from serve.device import PACKAGE

    (extra,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    assert extra.startswith(f"{PACKAGE}>=")


# ---- the driver


class FakeDriver:
    """libcuda with two GPUs; the second is in exclusive mode and in use."""

    def __init__(self, init=0):
        self.init, self.current = init, None

    def cuInit(self, flags):
        return self.init

    def cuGetErrorString(self, code, text):
        text._obj.value = {46: b"device is busy", 100: b"no device", 999: b"unknown"}[code]

    def cuDriverGetVersion(self, number):
        number._obj.value = 13010
        return 0

    def cuDeviceGetCount(self, number):
        number._obj.value = 2
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA H100"
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert attribute == 20
        value._obj.value = 3 if device.value else 0
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 7 + device.value
        return 46 if device.value else 0

    def cuCtxSetCurrent(self, context):
        self.current = context.value
        return 0

    def cuMemGetInfo_v2(self, free, total):
        free._obj.value, total._obj.value = 80, 85
        return 0

    def cuMemHostAlloc(self, address, size, flags):
        assert flags == 1
        self.memory = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(self.memory)
        return 0


def test_the_driver_is_asked_for_what_the_server_needs():
    """It gives version, names, free memory, and why a GPU is unusable; the size of page-locked memory is right."""
    driver = cuda.Driver(FakeDriver())
    assert cuda.find_gpus(driver) == {
        "driver": "13.1",
        "gpus": [
            {"name": "NVIDIA H100", "free": 80, "total": 85},
            {
                "name": "NVIDIA H100",
                "fault": "cuDevicePrimaryCtxRetain: device is busy; its compute mode is exclusive",
            },
        ],
    }
    driver.enter(0)
    assert driver._library.current == 7
    assert driver.pinned(100) == ctypes.addressof(driver._library.memory)
    assert len(driver._library.memory) == 100
    with pytest.raises(cuda.CudaError, match="cuInit: no device") as caught:
        cuda.Driver(FakeDriver(100))
    assert caught.value.code == 100


def test_the_probe_is_a_process_of_its_own(monkeypatch, tmp_path):
    """The probe prints JSON, also without a driver; if it dies or hangs, that is a reason, not an exception."""
    found = cuda.probe()
    assert set(found) in ({"fault"}, {"driver", "gpus"})
    done = subprocess.run([sys.executable, cuda.__file__], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) == set(found)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert "asking NVIDIA's driver for its GPUs failed" in cuda.probe()["fault"]


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
    assert done.stderr == f"error: serve.device is {word}: {onnxruntime_lacks()}.\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "gpu"], "gpu is not auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:0", "--precision", "int8"], "--precision int8 does not go with --device cuda:0"),
        (["--device", "cpu", "--precision", "fp16"], "--precision fp16 does not go with --device cpu"),
        (["--device", "cpu", "--tensorrt"], "--tensorrt is for GPUs"),
    ],
)
def test_options_that_contradict_each_other_are_refused(run_folder, arguments, words):
    """Contradictory options end with exit code 2 before the bundle is opened."""
    command = [sys.executable, "-m", "serve", str(run_folder.path), "--port", "0", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
