"""GPUs are described without torch, as NVIDIA's driver reports them, and counted as torch counts them."""

import ctypes
import importlib.util
import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from deeplightning.config.devices import Gpu, Machine, machine

MIB = 2**20


def test_the_count_is_that_of_torch():
    """In a process that never imports torch, on the machine as it is."""
    program = (
        "import sys; from deeplightning.config.devices import machine; "
        "print(len(machine().visible_gpus()), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(torch.cuda.device_count()), "False"]


UUIDS = ["GPU-a1", "GPU-a2", "GPU-b1", "GPU-c1"]
WORDS = ["0", "3", "4", "-1", " 2 ", "", "none", "GPU-a1", "GPU-a", "GPU-b", "GPU-x"]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_cuda_visible_devices_is_read_as_torch_reads_it(count, monkeypatch):
    """Every list of up to three entries shows the same GPUs to both: indexes and beginnings of ids, up to the first
    that is not there; none at all where one occurs twice."""
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: count)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS[:count])
    gpus = tuple(map(Gpu, UUIDS[:count]))
    for words in itertools.chain.from_iterable(itertools.product(WORDS, repeat=n) for n in (1, 2, 3)):
        visible = ",".join(words)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(Machine(gpus, visible).visible_gpus()) == torch.cuda._device_count_nvml(), visible


def test_the_order_of_cuda_visible_devices_counts():
    """Index 0 is the first entry; without the variable, the first GPU."""
    gpus = tuple(map(Gpu, UUIDS))
    assert [gpu.uuid for gpu in Machine(gpus, "3,1").visible_gpus()] == ["GPU-c1", "GPU-a2"]
    assert Machine(gpus).visible_gpus() == list(gpus)
    assert Machine(gpus, "MIG-1").visible_gpus() == [Gpu("MIG-1")]


class Driver:
    """NVIDIA's library with two devices."""

    def __init__(self, init=0, **functions):
        self.nvmlInit_v2 = lambda: init
        for name, function in functions.items():
            setattr(self, name, function)

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, release):
        release._obj.value = 12080
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 100 + index
        return 0

    def nvmlDeviceGetUUID(self, handle, buffer, size):
        buffer.value = f"GPU-{handle.value}".encode()
        return 0

    def nvmlDeviceGetName(self, handle, buffer, size):
        buffer.value = b"NVIDIA A100"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = 40 * MIB
        return 0

    def nvmlShutdown(self):
        return 0


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """`driver(library, version)` puts a library of NVIDIA's and torch's version file in place."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(library, version="cuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n"):
        if version is not None:
            (tmp_path / "version.py").write_text(version)
        spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

        def load(name, **options):
            if isinstance(library, dict) and name in library:
                return library[name]
            if isinstance(library, dict):
                raise OSError(f"{name}: cannot open shared object file")
            return library

        monkeypatch.setattr(ctypes, "CDLL", load)

    return put


def test_the_driver_describes_the_machine(driver):
    """Id, name and memory of each GPU; the CUDA release of the driver and of torch."""
    driver(Driver())
    found = machine()
    assert (found.supports, found.built_for) == ((12, 8), (13, 2))
    first, second = found.gpus
    assert first == Gpu("GPU-100", "NVIDIA A100", 40 * MIB)
    assert second.uuid == "GPU-101"


@pytest.mark.parametrize(
    ("version", "built", "shown"),
    [
        ("cuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n", (13, 2), 2),
        ("cuda = '12.8'\n", (12, 8), 2),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", None, 0),
    ],
    ids=["cuda", "older", "cpu"],
)
def test_a_build_without_cuda_sees_none(version, built, shown, driver):
    """Torch's own version file says what it was built for."""
    driver(Driver(), version)
    found = machine()
    assert (found.built_for, len(found.visible_gpus()), found.is_built) == (built, shown, built is not None)


CUDA_13 = "cuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n"


@pytest.mark.parametrize(
    ("libraries", "version"),
    [((), "cuda = None\nhip: Optional[str] = '6.2'\n"), ((), "x = 1\n"), ((), None), (("libcuda.so.1",), CUDA_13)],
)
def test_a_build_of_another_kind_is_asked_itself(libraries, version, driver, monkeypatch):
    """ROCm, a file that says nothing, or CUDA without NVML, as on a Jetson: torch counts."""
    driver(dict.fromkeys(libraries, object()), version)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # torch has counted with it
    assert machine().visible_gpus() == [Gpu()] * 5


def test_a_machine_without_the_driver_has_none(driver):
    """No library of NVIDIA's: no GPUs, no error; one that does not answer is reported."""
    driver({})
    assert machine() == Machine(built_for=(13, 2))
    driver(Driver(init=9))
    found = machine()
    assert (found.gpus, "NVML error 9" in found.trouble) == ((), True)
