"""ONNX Runtime with a bundle's model, on the CPU or on a GPU.

On a GPU, batches go through page-locked buffers that are made once (`Bound`), and a lack of memory becomes a
MemoryError. Letters: N images or texts.
"""

import contextlib
import ctypes
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import LifoQueue

import numpy as np

from deeplightning.words import first_line
from serve.cuda import CudaError, Driver
from serve.device import CPU, LANES, MEMORY_SHARE, Device, DeviceError
from serve.log import log_event
from serve.private import Provider, is_out_of_memory, onnxruntime, open_strictly, provider_libraries

CUDA, TENSORRT, ON_CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"

TEXT_TOKENS = 512
"""Tokens that a buffer holds of each text where the model sets no limit; longer batches are copied from where they
are."""


def providers(device: Device, tensorrt: dict[str, str] | None = None) -> list[Provider]:
    """What ONNX Runtime computes with, the preferred one first; operators that one lacks go to the next.

    Args:
        device: where.
        tensorrt: options of TensorRT; None: it is not used.
    """
    if not device.on_gpu:
        return [ON_CPU]
    cuda = {
        "device_id": str(device.index),
        # Without a limit the arena may take all memory; by default it also grows by powers of two.
        "gpu_mem_limit": str(int(MEMORY_SHARE * device.free)),
        "arena_extend_strategy": "kSameAsRequested",
        # EXHAUSTIVE, the default, measures every algorithm at each new batch size, which takes seconds.
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": "0",  # on by default; fp32 is to mean 32 bits
    }
    first: list[Provider] = [] if tensorrt is None else [(TENSORRT, {"device_id": str(device.index), **tensorrt})]
    return [*first, (CUDA, cuda), ON_CPU]


def tensorrt_options(name: str, shape: Sequence[int], most: int, fp16: bool) -> dict[str, str]:
    """TensorRT's options for a model of images.

    Args:
        name, shape: of the model's input; (C, H, W).
        most: the largest batch. Without a range of sizes TensorRT would compile the model again for each new one.
        fp16: whether it may compute in 16 bits.
    """
    sizes = {"min": 1, "opt": most, "max": most}
    shapes = {f"trt_profile_{word}_shapes": f"{name}:{'x'.join(map(str, (n, *shape)))}" for word, n in sizes.items()}
    return {**shapes, "trt_fp16_enable": str(int(fp16))}


def open_session(
    file: Path, device: Device = CPU, tensorrt: dict[str, str] | None = None
) -> onnxruntime.InferenceSession:
    """The model in `file`, with one CPU thread per call; ONNX Runtime keeps it from reading files outside its folder.

    Raises:
        DeviceError: the GPU, or TensorRT, cannot be used, or does not take the model.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # requests run beside one another instead
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # what goes wrong is raised as well
    onnxruntime.set_default_logger_severity(4)  # the same of what it says outside a session, such as to allocate
    wanted = providers(device, tensorrt)
    if not device.on_gpu:
        # By its path, since of bytes the session would keep a copy.
        return onnxruntime.InferenceSession(file, options, providers=wanted)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        onnxruntime.preload_dlls()  # the libraries of pip's nvidia packages, which the loader does not find by itself
    first = wanted[0][0]
    try:
        session = open_strictly(file, options, wanted)
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        raise _unusable(device, first, _why_not(first) or first_line(error)) from error
    if first not in session.get_providers():  # a provider whose libraries do not load is left out in silence
        reason = _why_not(first) or " ".join(printed.getvalue().split()) or "its provider does not load"
        raise _unusable(device, first, reason)
    return session


def _unusable(device: Device, provider: str, reason: str) -> DeviceError:
    remedy = (
        "install TensorRT 10, or set serve.tensorrt=false"
        if provider == TENSORRT
        else "see docs/explanation/server.md, GPUs"
    )
    version = onnxruntime.__version__
    return DeviceError(f"{device} ({device.name}) cannot be used by onnxruntime-gpu {version}: {reason}; {remedy}.")


def _why_not(provider: str) -> str | None:
    """What the loader of libraries says to the library of a provider."""
    shared, library = provider_libraries("tensorrt" if provider == TENSORRT else "cuda")
    try:
        ctypes.CDLL(str(shared), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return None


# ---- memory


class Bound:
    """A model whose batches go through buffers that are made once, for so many forward passes at a time.

    A GPU reads and writes page-locked memory without help of the CPU; ordinary memory is copied first. ONNX Runtime has
    no device name for such memory in Python (1.31), so the buffers are bound by their addresses.

    Args:
        session: the model, with one input and one output whose first dimension is N.
        most_input, most_output: bytes that the largest batch and its answers take.
        lanes: forward passes at a time; further ones wait.
        allocate: gives the address of so many bytes that stay where they are; None: ordinary memory.
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
        """The model's answers, float32 (N, …), to a batch (N, …).

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
            return answers.copy()  # the buffer is another's from here on
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise
        finally:
            self._free.put(buffers)


class _Buffers:
    """Memory of one forward pass, as bytes."""

    def __init__(self, binding: onnxruntime.IOBinding, input: np.ndarray, output: np.ndarray):
        self.binding, self.input, self.output = binding, input, output


def _memory(size: int, allocate: Callable[[int], int] | None) -> np.ndarray:
    """uint8 (size,)"""
    if allocate is None:
        return np.empty(size, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(allocate(size)))


def _within(buffer: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array in the beginning of a buffer; of its own memory where it does not fit, as a batch of long texts."""
    size = int(np.prod(shape)) * dtype.itemsize
    return buffer[:size].view(dtype).reshape(shape) if size <= len(buffer) else np.empty(shape, dtype)


def bound_to(device: Device, session: onnxruntime.InferenceSession, most_input: int, most_output: int) -> Bound:
    """A model on a GPU, with page-locked buffers; with ordinary ones, and an event, where none are to be had."""
    try:
        driver = Driver.load()
        driver.enter(device.index or 0)
        return Bound(session, most_input, most_output, allocate=driver.pinned)
    except (OSError, CudaError) as error:
        log_event(
            "buffers are not page-locked, so copies to the GPU take longer", device=str(device), reason=str(error)
        )
        return Bound(session, most_input, most_output)
