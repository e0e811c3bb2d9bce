"""Run a bundle's model with ONNX Runtime, on the CPU or on a GPU.

On a GPU, batches go through page-locked buffers that are allocated once (`Bound`), and out-of-memory errors become
MemoryError. Letters: N images or texts.
"""

import contextlib
import ctypes
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import LifoQueue
from typing import NamedTuple

import numpy as np

from deeplightning.words import first_line
from serve.cuda import CudaError, Driver
from serve.device import CPU, LANES, MEMORY_SHARE, Device, DeviceError
from serve.log import log_event
from serve.private import Provider, is_out_of_memory, onnxruntime, open_strictly, provider_libraries

CUDA, TENSORRT, ON_CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"

TEXT_TOKENS = 512
"""Tokens per text that a buffer has room for if the model has no limit; longer batches are copied from pageable
memory."""


def providers(device: Device, tensorrt: dict[str, str] | None = None) -> list[Provider]:
    """Return ONNX Runtime's execution providers in order of preference; each runs the operators that earlier ones lack.

    Args:
        device: device of the model.
        tensorrt: options of TensorRT; None: it is not used.
    """
    if not device.on_gpu:
        return [ON_CPU]
    cuda = {
        "device_id": str(device.index),
        # Without a limit, the arena may take all memory; by default it also grows by powers of two.
        "gpu_mem_limit": str(int(MEMORY_SHARE * device.free)),
        "arena_extend_strategy": "kSameAsRequested",
        # EXHAUSTIVE, the default, measures every algorithm at each new batch size, which takes seconds.
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",  # on by default, but fp32 must compute in 32 bits
    }
    first: list[Provider] = [] if tensorrt is None else [(TENSORRT, {"device_id": str(device.index), **tensorrt})]
    return [*first, (CUDA, cuda), ON_CPU]


def tensorrt_options(name: str, shape: Sequence[int], most: int, fp16: bool) -> dict[str, str]:
    """Return TensorRT's options for a model.

    Args:
        name, shape: of the model's input; of pictures (C, H, W).
        most: the largest batch. Without a range of sizes, TensorRT would recompile the model for each new one.
        fp16: whether it may compute in 16 bits.
    """
    sizes = {"min": 1, "opt": most, "max": most}
    shapes = {f"trt_profile_{word}_shapes": f"{name}:{'x'.join(map(str, (n, *shape)))}" for word, n in sizes.items()}
    return {**shapes, "trt_fp16_enable": str(int(fp16))}


def open_session(
    file: Path, device: Device = CPU, tensorrt: dict[str, str] | None = None
) -> onnxruntime.InferenceSession:
    """Load the model in `file`, with one CPU thread per call. ONNX Runtime keeps it from reading files outside its
    folder.

    Raises:
        DeviceError: the GPU or TensorRT cannot be used, or does not accept the model.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # requests run in parallel instead
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # errors are raised as well
    onnxruntime.set_default_logger_severity(4)  # the same for messages outside a session, such as of allocations
    wanted = providers(device, tensorrt)
    if not device.on_gpu:
        # Pass the path, since the session would keep a copy of the bytes.
        return onnxruntime.InferenceSession(file, options, providers=wanted)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        onnxruntime.preload_dlls()  # libraries of pip's nvidia packages, which the loader does not search
    first = wanted[0][0]
    try:
        session = open_strictly(file, options, wanted)
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        raise _unusable(device, first, _why_not(first) or first_line(error)) from error
    if first not in session.get_providers():  # a provider whose libraries do not load is skipped silently
        reason = _why_not(first) or " ".join(printed.getvalue().split()) or "its provider does not load"
        raise _unusable(device, first, reason)
    return session


def _unusable(device: Device, provider: str, reason: str) -> DeviceError:
    remedy = (
        "install TensorRT 10, or set serve.tensorrt=false"
        if provider == TENSORRT
        else "see docs/reference/http.md, GPUs"
    )
    version = onnxruntime.__version__
    return DeviceError(f"{device} ({device.name}) cannot be used by onnxruntime-gpu {version}: {reason}; {remedy}.")


def _why_not(provider: str) -> str | None:
    """Return the dynamic loader's error for the library of a provider, or None if it loads."""
    shared, library = provider_libraries("tensorrt" if provider == TENSORRT else "cuda")
    try:
        ctypes.CDLL(str(shared), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return None


# ---- memory


class Bound:
    """A model whose batches go through preallocated buffers, one pair for each lane.

    A GPU reads and writes page-locked memory without the CPU; pageable memory is copied first. ONNX Runtime has no
    device name for page-locked memory in Python (1.31), so the buffers are bound by their addresses.

    Args:
        session: the model, with one input and one output whose first dimension is N.
        most_input, most_output: sizes of the largest batch and of its answers, in bytes.
        lanes: concurrent forward passes; further ones wait.
        allocate: returns the address of the given number of page-locked bytes; None: pageable memory.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        most_input: int,
        most_output: int,
        lanes: int = LANES,
        allocate: Callable[[int], int] | None = None,
    ):
        self._session = session
        self._input = session.get_inputs()[0].name
        output = session.get_outputs()[0]
        self._output, self._row = output.name, tuple(output.shape[1:])
        self._free: LifoQueue[_Buffers] = LifoQueue()
        for _ in range(lanes):
            self._free.put(_Buffers(session.io_binding(), *(_memory(n, allocate) for n in (most_input, most_output))))

    def predict(self, batch: np.ndarray) -> np.ndarray:
        """Return the model's answers, float32 (N, …), to a batch (N, …).

        Raises:
            MemoryError: the device has too little memory for this batch.
        """
        buffers = self._free.get()
        try:
            given = _within(buffers.input, batch.dtype, batch.shape)
            np.copyto(given, batch)
            answers = _within(buffers.output, np.dtype(np.float32), (len(batch), *self._row))
            binding = buffers.binding
            binding.bind_input(self._input, "cpu", 0, given.dtype.type, given.shape, given.ctypes.data)
            binding.bind_output(self._output, "cpu", 0, np.float32, answers.shape, answers.ctypes.data)
            self._session.run_with_iobinding(binding)
            return answers.copy()  # another thread may use the buffer next
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise
        finally:
            self._free.put(buffers)


class _Buffers(NamedTuple):
    """Buffers of one forward pass, as bytes."""

    binding: onnxruntime.IOBinding
    input: np.ndarray
    output: np.ndarray


def _memory(size: int, allocate: Callable[[int], int] | None) -> np.ndarray:
    """Allocate a buffer, uint8 (size,)."""
    if allocate is None:
        return np.empty(size, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(allocate(size)))


def _within(buffer: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array at the start of a buffer, or a new one if it does not fit, such as a batch of long texts."""
    size = int(np.prod(shape)) * dtype.itemsize
    return buffer[:size].view(dtype).reshape(shape) if size <= len(buffer) else np.empty(shape, dtype)


def bound_to(device: Device, session: onnxruntime.InferenceSession, most_input: int, most_output: int) -> Bound:
    """Return a model on a GPU with page-locked buffers; if there are none, log that and use pageable ones."""
    try:
        driver = Driver.load()
        driver.enter(device.index or 0)
        return Bound(session, most_input, most_output, allocate=driver.pinned)
    except (OSError, CudaError) as error:
        log_event(
            "buffers are not page-locked, so copies to the GPU take longer", device=str(device), reason=str(error)
        )
        return Bound(session, most_input, most_output)
