"""What `serve` uses of ONNX Runtime (1.31, November 2026) beyond its documented interface.

`tests/unit/test_private_serve.py` asserts each. Of other libraries, `serve` uses public names only."""

import os
from collections.abc import Sequence
from pathlib import Path

# From 1.29 on, importing onnxruntime starts a thread that reports to its makers and keeps a file in the user's home; a
# forked server worker cannot end it and hangs at exit. Without the variable's effect the import starts that thread.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as onnxruntime

Provider = str | tuple[str, dict[str, str]]

NO_MEMORY = (
    "Failed to allocate memory",  # the arena asks the device
    "is smaller than requested bytes",  # the arena is at its limit
    "out of memory",  # CUDA
    "ALLOC_FAILED",  # cuBLAS and cuDNN
)
"""Texts of the errors of a lack of memory, which have no class of their own. Where one changes, a batch that does not
fit is refused as a fault and not halved."""


def open_strictly(
    file: Path, options: onnxruntime.SessionOptions, providers: Sequence[Provider]
) -> onnxruntime.InferenceSession:
    """A session that raises where a provider fails. The keyword is undocumented, and unknown ones are ignored: without
    it the constructor prints an error to stdout and takes the CPU."""
    return onnxruntime.InferenceSession(file, options, providers=providers, enable_fallback=0)


def provider_libraries(word: str) -> tuple[Path, Path]:
    """The shared library of all providers, and that of one, such as `cuda`. Where they are named otherwise, the reason
    why a provider does not load is the loader's word that there is no such file."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    return folder / "libonnxruntime_providers_shared.so", folder / f"libonnxruntime_providers_{word}.so"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of ONNX Runtime reports a lack of memory."""
    text = str(error)
    return any(words in text for words in NO_MEMORY)
