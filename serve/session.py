"""Open a bundle's model with ONNX Runtime, on the CPU or on a GPU."""

import contextlib
import io
from pathlib import Path

from deeplightning.words import first_line
from serve.device import CPU, MEMORY_SHARE, Device, DeviceError
from serve.private import Provider, onnxruntime, open_strictly

CUDA, ON_CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def providers(device: Device) -> list[Provider]:
    """Return ONNX Runtime's execution providers in order of preference: each runs the operators that others lack."""
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
    return [(CUDA, cuda), ON_CPU]


def open_session(file: Path, device: Device = CPU) -> onnxruntime.InferenceSession:
    """Load the model in `file`, with one CPU thread per call. ONNX Runtime keeps it from reading files outside its
    folder.

    Raises:
        DeviceError: the GPU cannot be used, or does not accept the model.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # requests run in parallel instead
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # errors are raised as well
    onnxruntime.set_default_logger_severity(4)  # the same for messages outside a session
    wanted = providers(device)
    if not device.on_gpu:
        # Pass the path, since the session would keep a copy of the bytes.
        return onnxruntime.InferenceSession(file, options, providers=wanted)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        onnxruntime.preload_dlls()  # libraries of pip's nvidia packages, which the loader does not search
    try:
        session = open_strictly(file, options, wanted)
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        raise _unusable(device, first_line(error)) from error
    if CUDA not in session.get_providers():  # a provider whose libraries do not load is skipped silently
        raise _unusable(device, " ".join(printed.getvalue().split()) or "its provider does not load")
    return session


def _unusable(device: Device, reason: str) -> DeviceError:
    by = f"onnxruntime-gpu {onnxruntime.__version__}"
    return DeviceError(f"{device} ({device.name}) cannot be used by {by}: {reason}; see docs/reference/http.md, GPUs.")
