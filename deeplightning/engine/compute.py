"""How one process computes: threads, memory, memory formats and the compiler. Results do not change, except for
rounding with `channels_last` and with another number of threads."""

import ctypes
import logging
import os
import shutil
import sys
import weakref
from typing import Any

import torch

from deeplightning.config.schema import Engine
from deeplightning.faults import Fault, SetupError

log = logging.getLogger("deeplightning")

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
_MIB = 2**20


def prepare(engine: Engine) -> None:
    """Apply the settings of `engine` to this process."""
    if engine.matmul_precision is not None:
        torch.set_float32_matmul_precision(engine.matmul_precision)
    if engine.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(engine.threads)  # for child processes; Lightning reads it too
        torch.set_num_threads(engine.threads)
    if engine.keep_memory:
        keep_memory()


def keep_memory() -> None:
    """Make glibc's malloc keep up to 1 GiB of freed memory for reuse; do nothing with other allocators.

    A step frees its activations. Memory that was returned to the system comes back with a page fault per page: 1,340
    per step of a small CNN, a quarter of its time (torch 2.15, glibc 2.36).
    """
    if not sys.platform.startswith("linux"):
        return
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # musl has none
        mallopt(_M_TRIM_THRESHOLD, 1024 * _MIB)
        mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # glibc's maximum: larger blocks are still returned
        mallopt(_M_TOP_PAD, 64 * _MIB)


def use_channels_last(task: Any) -> None:
    """Store the weights of a task's convolutions in channels-last format after the task has built its networks.

    Convolutions propagate the format to their outputs, so input images may have any format.
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
    """Give inputs with one channel, (N, 1, H, W), channels-last strides.

    With one channel both formats have the same bytes, and cuDNN would follow the strides: it would give the gradient
    the strides of the other format, which ddp's buckets do not expect.
    """
    images, *rest = inputs
    if isinstance(images, torch.Tensor) and images.ndim == 4 and images.shape[1] == 1:
        images = images.reshape(*images.shape[:1], *images.shape[2:], 1).permute(0, 3, 1, 2)
    return images, *rest


def prepare_to_compile(engine: Engine) -> None:
    """Check that `engine.compile` has a compiler where torch 2.15 (C++ for CPUs) or Triton 3.9 (C for GPUs) finds it.

    Raises:
        SetupError: there is no compiler.
    """
    on_gpu = engine.gpus is not None
    if engine.compile == "graphs":  # needs only CUDA
        if not on_gpu:
            log.info("engine.compile=graphs records GPU operations; this run uses no GPU, so it trains in eager mode")
        return
    variable, language = ("CC", "C") if on_gpu else ("CXX", "C++")
    usual = ["gcc", "clang"] if on_gpu else ["clang++" if sys.platform == "darwin" else "g++"]
    named = os.environ.get(variable, "").split()
    wanted = named[:1] or usual
    if any(map(shutil.which, wanted)):
        return
    why = f"{variable} names {named[0]}, which does not exist" if named else f"the PATH has no {' or '.join(usual)}"
    remedy = f"install one (Debian: apt-get install g++), set {variable} to its name, or set engine.compile=false"
    raise SetupError(Fault(f"no {language} compiler: {why}; {remedy}", "engine.compile"))
