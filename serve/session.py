"""Open a bundle's model with ONNX Runtime, on the CPU or on a GPU."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

from deeplightning.words import first_line
from serve.device import CPU, MEMORY_SHARE, Device, DeviceError
from serve.private import Provider, onnxruntime, open_strictly

CUDA, TENSORRT, ON_CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"


def providers(device: Device, tensorrt: dict[str, str] | None = None) -> list[Provider]:
    """Return ONNX Runtime's execution providers in order of preference; each runs the operators that earlier ones lack.
    Without options, TensorRT is not used."""
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
        raise _unusable(device, first, first_line(error)) from error
    if first not in session.get_providers():  # a provider whose libraries do not load is skipped silently
        raise _unusable(device, first, " ".join(printed.getvalue().split()) or "its provider does not load")
    return session


def _unusable(device: Device, provider: str, reason: str) -> DeviceError:
    remedy = (
        "install TensorRT 10, or set serve.tensorrt=false"
        if provider == TENSORRT
        else "see docs/reference/http.md, GPUs"
    )
    version = onnxruntime.__version__
    return DeviceError(f"{device} ({device.name}) cannot be used by onnxruntime-gpu {version}: {reason}; {remedy}.")
