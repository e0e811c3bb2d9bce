"""How one process computes: threads, memory, and how tensors lie in it. Nothing here changes what is computed, but
`channels_last` and another number of threads round otherwise."""

import ctypes
import os
import sys
import weakref
from typing import Any

import torch

from deeplightning.config.schema import Engine

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
_MIB = 2**20


def prepare(engine: Engine) -> None:
    """Sets this process up as `engine` says."""
    if engine.matmul_precision is not None:
        torch.set_float32_matmul_precision(engine.matmul_precision)
    if isinstance(engine.threads, int):
        os.environ["OMP_NUM_THREADS"] = str(engine.threads)  # for processes that are started; Lightning heeds it too
        torch.set_num_threads(engine.threads)
    if engine.keep_memory:
        keep_memory()


def matmul_hint(engine: Engine, device: torch.device) -> str | None:
    """That the GPU could multiply matrices of 32 bits faster, where the run computes in them and no key decides it."""
    if device.type != "cuda" or engine.matmul_precision is not None or engine.precision not in (32, "32-true"):
        return None
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return None  # TF32 came with NVIDIA's Ampere
    return (
        "engine.matmul_precision=high multiplies matrices in TF32: faster on this GPU, with 10 bits of mantissa for 23"
    )


def keep_memory() -> None:
    """Has malloc keep up to 1 GiB that is freed for what comes next, where it is glibc's; elsewhere nothing happens.

    A step frees its activations. Given back to the system they come again page by page, each by a fault: 1,340 faults a
    step of a small CNN, a quarter of its time (torch 2.15, glibc 2.36).
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 1024 * _MIB)
        mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # glibc takes no more: larger blocks do go back
        mallopt(_M_TOP_PAD, 64 * _MIB)


def lay_channels_last(task: Any) -> None:
    """Has a task lay its convolutions' weights with their channels last as soon as it has built its networks.

    Convolutions hand the order on to what they give, so that pictures need not come in it.
    """
    build, hooked = task.configure_model, weakref.WeakSet[torch.nn.Module]()

    def configure_model() -> None:  # Lightning calls it before each stage
        build()
        task.to(memory_format=torch.channels_last)
        for module in task.modules():
            if isinstance(module, torch.nn.Conv2d) and module.in_channels == 1 and module not in hooked:
                module.register_forward_pre_hook(_channels_last)
                hooked.add(module)

    task.configure_model = configure_model


def _channels_last(module: torch.nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
    """Inputs of one channel, (N, 1, H, W), with the strides of the order that the weights have.

    With one channel both orders are the same bytes, and cuDNN takes the strides' word: it would give the gradient the
    strides of the other order, in which ddp's buckets do not expect it.
    """
    pictures, *rest = inputs
    if isinstance(pictures, torch.Tensor) and pictures.ndim == 4 and pictures.shape[1] == 1:
        pictures = pictures.reshape(*pictures.shape[:1], *pictures.shape[2:], 1).permute(0, 3, 1, 2)
    return pictures, *rest
