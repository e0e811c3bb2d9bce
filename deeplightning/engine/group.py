"""What surrounds a process group: which data its processes have, how DeepSpeed's is left, and what its set-up says of
a lack."""

import atexit
import contextlib
import io
import re
import warnings
from typing import Any

from torch import distributed

from deeplightning.words import first_line

_PACKAGES = "`sudo apt-get install libaio-dev` (Debian, Ubuntu), `sudo dnf install libaio-devel` (Fedora, RHEL)"


def replicas(trainer: Any) -> tuple[int, int]:
    """How many parts the data are split into, and which is this process'; a tensor-parallel group has one part."""
    return getattr(getattr(trainer, "strategy", None), "replicas", None) or (trainer.world_size, trainer.global_rank)


def scale_gradients(strategy: Any, optimizer: Any, scale: float) -> None:
    """Multiplies the gradients that an optimizer is about to use; a strategy may hold them in its own way."""
    if hasattr(strategy, "scale_gradients"):
        strategy.scale_gradients(scale)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)


def leave_at_exit() -> None:
    """Has this process leave its process group when it ends, also after a failed run.

    Lightning 2.6 does so for the groups that it makes itself; torch warns of one of NCCL that is left open.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def expect_barriers_of_one_process() -> None:
    """DeepSpeed binds a group to its device, but not that of a single process, where NCCL failed (0.19.8, its issue
    8248); its barriers then use the current device, which is the right one, and torch warns of that."""
    warnings.filterwarnings(
        "ignore", message=r"barrier\(\): using the device under current context", category=UserWarning
    )


def why_not_built(error: RuntimeError) -> str:
    """What DeepSpeed lacks to build an operator of its own, and the package that has it.

    Its own text ends in `None` where it was not asked to speak (0.19.8).
    """
    first = first_line(error)
    name = found[1] if (found := re.search(r"JIT load the (\w+) op", first)) else ""
    if name == "async_io":
        lack = "to offload to an NVMe disk it needs libaio with its headers"
        return f"{lack}: {_PACKAGES}; where they are elsewhere, set CFLAGS=-I… and LDFLAGS=-L…"
    if "ninja" in first:
        return f"to compile its operator {name} it needs ninja: pip install ninja"
    return first.removesuffix("None").rstrip(" .") + (f": {reason}" if (reason := _asked(name)) else "")


def _asked(name: str) -> str | None:
    """What the builder of an operator says when it is asked."""
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.ops.op_builder.all_ops import ALL_OPS

        builder = ALL_OPS[name]
        builder.is_compatible(verbose=True)
        return builder.error_log
    return None
