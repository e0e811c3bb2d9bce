"""Find NVIDIA GPUs with the driver library, through ctypes.

Run as a program, this module prints one JSON object about the machine's GPUs (`probe`). The server runs it in a
separate process: CUDA does not survive a fork, so the parent of the workers must never initialize it. Standard library
only.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import NotRequired, TypedDict

LIBRARY = "libcuda.so.1"

PROBE_SECONDS = 60
"""Timeout of `probe`: the first CUDA context on a machine with many GPUs takes seconds, and a driver may hang."""


class Gpu(TypedDict):
    """A GPU: its name and free memory in bytes; or its name and, as `fault`, why it cannot be used."""

    name: str
    free: NotRequired[int]
    fault: NotRequired[str]


class CudaError(Exception):
    """Raised if a call of the driver fails; the message names the call and the driver's reason."""


def has_driver() -> bool:
    """Return whether NVIDIA's driver is installed. Does not initialize it, so a process may fork afterwards."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def find_gpus(library: ctypes.CDLL) -> list[Gpu]:
    """Find the GPUs in this process with the driver library.

    Raises:
        CudaError: the driver finds no GPU, or does not work.
    """
    number = ctypes.c_int()
    _call(library, "cuInit", 0)
    _call(library, "cuDeviceGetCount", ctypes.byref(number))
    return [_describe(library, index) for index in range(number.value)]


def _describe(library: ctypes.CDLL, index: int) -> Gpu:
    device, context, name = ctypes.c_int(), ctypes.c_void_p(), ctypes.create_string_buffer(256)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call(library, "cuDeviceGet", ctypes.byref(device), index)
    _call(library, "cuDeviceGetName", name, len(name), device)
    gpu: Gpu = {"name": name.value.decode(errors="replace")}
    try:
        _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call(library, "cuCtxSetCurrent", context)
        _call(library, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    except CudaError as error:
        return {**gpu, "fault": str(error)}
    return {**gpu, "free": free.value}


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a function of the driver; raise CudaError if it returns an error."""
    if code := getattr(library, name)(*arguments):
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{name}: {(text.value or b'unknown error').decode(errors='replace')}")


def probe() -> list[Gpu] | str:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, or why they are unknown. The search runs in
    a separate process."""
    import subprocess  # imported lazily: most servers compute on the CPU

    try:
        command = [sys.executable, str(Path(__file__))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
        found: list[Gpu] | str = json.loads(done.stdout)
        return found
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"NVIDIA's driver does not answer ({error})"


def _main() -> None:
    try:
        found: list[Gpu] | str = find_gpus(ctypes.CDLL(LIBRARY))
    except (OSError, CudaError) as error:
        found = f"NVIDIA's driver finds no GPU ({error}); see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
