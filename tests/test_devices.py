"""GPUs are counted without torch, as torch would count them: `deeplightning.engine.devices`."""

import ctypes
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from deeplightning.engine import devices


def test_the_count_is_that_of_torch():
    """In a process that never imports torch, on the machine as it is."""
    program = (
        "import sys; from deeplightning.engine.devices import cuda_devices as n; print(n(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(torch.cuda.device_count()), "False"]


@pytest.mark.parametrize(
    ("count", "words", "seen"),
    [
        (4, None, 4),
        (4, "", 0),
        (4, "1", 1),
        (4, "3,1", 2),
        (4, " 0 , 2 ", 2),
        (4, "0,7,1", 1),
        (4, "-1,0", 0),
        (4, "0,0", 1),
        (4, "GPU-8932f937-d72c", 1),
        (4, "none", 0),
        (0, None, 0),
        (0, "0,1", 0),
    ],
)
def test_cuda_visible_devices_counts(count, words, seen):
    """Indexes and identifiers, up to the first that is not there, as CUDA has it."""
    assert devices._visible(count, words) == seen


class Driver:
    """NVIDIA's library with two devices."""

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("cuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n", 2),
        ("cuda = '12.8'\n", 2),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", 0),
    ],
    ids=["cuda", "older", "cpu"],
)
def test_a_build_without_cuda_sees_none(version, found, tmp_path, monkeypatch):
    """Torch's own version file says what it was built for; the driver how many there are."""
    (tmp_path / "version.py").write_text(version)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.cuda_devices() == found


@pytest.mark.parametrize("version", ["cuda = None\nhip: Optional[str] = '6.2'\n", "x = 1\n", None])
def test_a_build_of_another_kind_is_asked_itself(version, tmp_path, monkeypatch):
    """ROCm, or a file that says nothing: torch is imported and counts."""
    if version is not None:
        (tmp_path / "version.py").write_text(version)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert devices._built_for() is None
    assert devices.cuda_devices() == 5


def test_a_machine_without_the_driver_has_none(monkeypatch):
    """No library of NVIDIA's: no devices, no error."""

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert devices._driver_count() == 0
