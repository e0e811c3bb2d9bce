"""Undocumented features of ONNX Runtime (1.31, November 2026) that `serve` uses.

`tests/unit/test_private_serve.py` asserts each. `serve` uses only public names of other libraries."""

import os
from collections.abc import Sequence
from pathlib import Path

# Since 1.29, importing onnxruntime starts a telemetry thread, which writes a file to the user's home directory. A
# forked server worker cannot stop the thread and hangs at exit. This variable keeps it from starting.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as onnxruntime

Provider = str | tuple[str, dict[str, str]]

NO_MEMORY = (
    "Failed to allocate memory",  # the device refuses memory to the arena
    "is smaller than requested bytes",  # the arena has reached its limit
    "out of memory",  # CUDA
    "ALLOC_FAILED",  # cuBLAS and cuDNN
)
"""Parts of out-of-memory messages, which have no exception class of their own. If a message changes, a batch that does
not fit fails with status 500 instead of being halved."""


def open_strictly(
    file: Path, options: onnxruntime.SessionOptions, providers: Sequence[Provider]
) -> onnxruntime.InferenceSession:
    """Return a session, or raise if a provider fails. The keyword `enable_fallback` is undocumented, and unknown
    keywords are ignored; without it the constructor prints an error to stdout and falls back to the CPU."""
    return onnxruntime.InferenceSession(file, options, providers=providers, enable_fallback=0)


def refused_values(error: BaseException) -> str:
    """Return why a node of the graph rejects its input values, such as an index out of range, or "" for any other
    exception. The class is not exported."""
    return str(error).partition("Status Message: ")[2] if type(error).__name__ == "InvalidArgument" else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception of ONNX Runtime means out of memory."""
    text = str(error)
    return any(part in text for part in NO_MEMORY)
