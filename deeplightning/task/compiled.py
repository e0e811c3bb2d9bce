"""A part of a training step, compiled or recorded for batches of one shape; other batches run eagerly, as does
validation.

Compiling takes seconds to minutes, and a compiler would start again for the short batch at an epoch's end and for each
mode of the network.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

log = logging.getLogger("deeplightning")

ONLY_OWN_STEPS = (
    "engine.compile=graphs records network and losses as one, and {} has a training_step of its own, or "
    "several losses that do not all divide by the samples; set engine.compile=reduce-overhead, which compiles the "
    "network alone"
)


class Compiled:
    """Decides which batches are compiled: those of the shape of the first full one.

    Args:
        mode: `engine.compile`, not false.

    Attributes:
        graphs: whether the mode uses CUDA graphs. They write each step's results into the same memory: values that are
            kept for longer than a step are to be cloned (`own`).
    """

    def __init__(self, mode: bool | str):
        self.mode = "default" if mode is True else str(mode)
        self.graphs = mode in ("graphs", "reduce-overhead", "max-autotune")
        self._shapes: list[tuple[int, ...]] | None = None
        self._said = False

    def compile(self, function: Callable[..., object], owner: nn.Module) -> Callable[..., Any]:
        """Return a function of tensors, to be called with batches that `takes` accepts.

        Args:
            owner: the module whose submodules it computes with. In the mode `graphs`, gradients go back through the
                last of its results alone.
        """
        if self.mode == "graphs":
            from deeplightning.task.cuda_graphs import Recorded

            return Recorded(function, owner)
        # None: texts of other lengths are compiled once more, for any length. A CUDA graph is for one shape.
        return torch.compile(function, mode=self.mode, dynamic=False if self.graphs else None)

    def takes(self, *tensors: Tensor, may_be_short: bool) -> bool:
        """Return whether a batch is compiled: it has as many rows as the first full one; for CUDA graphs, its shape.

        Args:
            may_be_short: it is the last of an epoch that has several.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self._shapes is None:
            if may_be_short:
                return False
            self._shapes = shapes
        taken = shapes == self._shapes if self.graphs else shapes[0][0] == self._shapes[0][0]
        if not taken and not may_be_short and not self._said:
            self._said = True
            log.warning(
                "engine.compile: batches are compiled in the shape of the first, %s; this one is %s and runs eagerly, "
                "as do all others of another shape%s",
                *(self._shapes[0], shapes[0]),
                ". engine.compile=true compiles for any length" if self.graphs else "",
            )
        return taken

    def begin_step(self, module: nn.Module, device: torch.device, accumulates: bool) -> None:
        """Announce the first compiled call of a batch, which may overwrite what the batch before gave; where it
        accumulates, the gradients of that batch wait for those of this one, and get memory of their own."""
        if self.graphs and accumulates:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        if self.graphs and self.mode != "graphs" and device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()

    def own(self, values: object) -> Any:
        """Return values that stay what they are: detached from the step and, where it uses CUDA graphs, cloned."""
        return apply_to_collection(values, Tensor, lambda v: v.detach().clone() if self.graphs else v.detach())
