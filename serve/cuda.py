"""Call NVIDIA's driver library through ctypes: list the GPUs, and allocate page-locked host memory.

Run as a program, this module prints one JSON object about the machine's GPUs (`probe`). The server runs it in a
separate process: CUDA does not survive a fork, so the parent of the workers must never initialize it. Standard library
only.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import NotRequired, TypedDict, cast

LIBRARY = "libcuda.so.1"

PROBE_SECONDS = 60
"""Timeout of `probe`: the first CUDA context on a machine with many GPUs takes seconds, and a driver may hang."""

# From cuda.h, the same in every version since CUDA 4.
_NO_DEVICE = 100
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
_MODES = {2: "prohibited", 3: "exclusive"}


class Gpu(TypedDict):
    """A GPU: its name and memory in bytes; or its name and, as `fault`, why it cannot be used."""

    name: str
    free: NotRequired[int]
    total: NotRequired[int]
    fault: NotRequired[str]


class Probed(TypedDict, total=False):
    """The GPUs of a machine and the CUDA version of the driver; or, as `fault`, why there are none."""

    driver: str
    gpus: list[Gpu]
    fault: str


class CudaError(Exception):
    """Raised if a call of the driver fails; the message names the call and the driver's reason."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed. Does not initialize it, so a process may fork afterwards."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


class Driver:
    """The driver's functions, with errors as exceptions.

    Args:
        library: the loaded library.
    """

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self.call("cuInit", 0)

    @classmethod
    def load(cls) -> "Driver":
        """Load and initialize the driver.

        Raises:
            OSError: there is no driver.
            CudaError: the driver finds no GPU, or does not work.
        """
        return cls(ctypes.CDLL(LIBRARY))

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver.

        Raises:
            CudaError: the function returned an error.
        """
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode(errors='replace')}", code)

    def version(self) -> str:
        """Return the newest CUDA version that the driver supports, such as 12.4."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def count(self) -> int:
        """Return the number of GPUs that CUDA_VISIBLE_DEVICES leaves to this process."""
        number = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def enter(self, index: int) -> None:
        """Make the primary context of a GPU current in this thread; ONNX Runtime and torch use the same one."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def describe(self, index: int) -> Gpu:
        """Return the name and memory (total, free) of a GPU; or its name and, as `fault`, why it cannot be used."""
        device, name, mode = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        self.call("cuDeviceGetName", name, len(name), device)
        found: Gpu = {"name": name.value.decode(errors="replace")}
        self.call("cuDeviceGetAttribute", ctypes.byref(mode), _COMPUTE_MODE, device)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        try:
            self.enter(index)
            self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        except CudaError as error:
            in_mode = f"; its compute mode is {_MODES[mode.value]}" if mode.value in _MODES else ""
            return {**found, "fault": f"{error}{in_mode}"}
        return {**found, "free": free.value, "total": total.value}

    def pinned(self, size: int) -> int:
        """Allocate page-locked host memory in the thread's context, and return its address. It is never freed."""
        address = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), _PORTABLE)
        assert address.value is not None, "the call has succeeded"
        return address.value


def find_gpus(driver: Driver) -> Probed:
    """Find the GPUs in this process."""
    return {"driver": driver.version(), "gpus": [driver.describe(index) for index in range(driver.count())]}


def probe() -> Probed:
    """Find this machine's GPUs in a separate process."""
    import subprocess  # imported lazily: most servers compute on the CPU

    try:
        done = subprocess.run(
            [sys.executable, str(Path(__file__))], capture_output=True, text=True, timeout=PROBE_SECONDS
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"fault": f"NVIDIA's driver does not answer within {PROBE_SECONDS} s; see what `nvidia-smi` says"}
    except (OSError, ValueError) as error:
        return {"fault": f"asking NVIDIA's driver for its GPUs failed ({error})"}
    return cast(Probed, found) if isinstance(found, dict) else {"fault": "NVIDIA's driver gave no list of GPUs"}


def _main() -> None:
    try:
        found = find_gpus(Driver.load())
    except OSError:
        found = {"fault": f"there is no NVIDIA driver ({LIBRARY} is missing); install it, or use serve.device=cpu"}
    except CudaError as error:
        no_gpu = "no GPU is visible to this process; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        found = {"fault": no_gpu if error.code == _NO_DEVICE else f"NVIDIA's driver cannot work ({error})"}
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
