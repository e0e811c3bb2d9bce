"""GPUs are described without torch, as NVIDIA's driver reports them, and counted as torch counts them."""

import ctypes
import importlib.util
import itertools
from types import SimpleNamespace

import pytest
import torch
from commands import python

from deeplightning.config.devices import Gpu, Machine, machine

MIB = 2**20


def test_the_count_is_that_of_torch():
    """`machine` counts this machine's GPUs as torch does, in a process that never imports torch."""
    counting = "import sys; from deeplightning.config.devices import machine"
    program = f"{counting}; print(len(machine().visible_gpus()), 'torch' in sys.modules)"
    assert python("-c", program).stdout.split() == [str(torch.cuda.device_count()), "False"]


UUIDS = ["GPU-a1", "GPU-a2", "GPU-b1", "GPU-c1"]
WORDS = ["0", "3", "4", "-1", " 2 ", "", "none", "GPU-a1", "GPU-a", "GPU-b", "GPU-x"]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_cuda_visible_devices_is_read_as_torch_reads_it(count, monkeypatch):
    """Every list of up to three entries, indexes and prefixes of ids, shows as many GPUs here as in torch: those before
    the first invalid entry, and none if one occurs twice."""
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


CUDA_13 = "cuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n"


class Driver:
    """A fake of NVIDIA's library with two devices."""

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
    """`driver(library, version)` installs a fake of NVIDIA's library and of torch's version file."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(library, version=CUDA_13):
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
    """The driver gives id, name and memory of each GPU, and the CUDA release that it supports."""
    driver(Driver())
    found = machine()
    assert (found.supports, found.built_for) == ((12, 8), (13, 2))
    assert found.gpus[0] == Gpu("GPU-100", "NVIDIA A100", 40 * MIB)
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-100", "GPU-101"]


@pytest.mark.parametrize(
    ("version", "built", "shown"),
    [
        (CUDA_13, (13, 2), 2),
        ("cuda = '12.8'\n", (12, 8), 2),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", None, 0),
    ],
    ids=["cuda", "older", "cpu"],
)
def test_a_build_without_cuda_sees_none(version, built, shown, driver):
    """The CUDA release of the build comes from torch's version file; without one no GPU is visible."""
    driver(Driver(), version)
    found = machine()
    assert (found.built_for, len(found.visible_gpus()), found.is_built) == (built, shown, built is not None)


@pytest.mark.parametrize(
    ("libraries", "version"),
    [((), "cuda = None\nhip: Optional[str] = '6.2'\n"), ((), "x = 1\n"), ((), None), (("libcuda.so.1",), CUDA_13)],
)
def test_other_builds_count_their_gpus_themselves(libraries, version, driver, monkeypatch):
    """With ROCm, an unreadable version file, or CUDA without NVML as on a Jetson, torch counts the GPUs."""
    driver(dict.fromkeys(libraries, object()), version)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # torch has counted with it
    assert machine().visible_gpus() == [Gpu()] * 5


def test_a_machine_without_the_driver_has_none(driver):
    """Without NVIDIA's library there are no GPUs and no error; an error of the library is reported."""
    driver({})
    assert machine() == Machine(built_for=(13, 2))
    driver(Driver(init=9))
    found = machine()
    assert (found.gpus, "NVML error 9" in found.trouble) == ((), True)
