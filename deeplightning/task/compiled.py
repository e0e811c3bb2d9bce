"""Compile or record a part of the training step for batches of one shape. Other batches and validation run eagerly.

Compiling takes seconds to minutes, and would be repeated for the short batch at the end of an epoch and for each mode
of the network.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

log = logging.getLogger("deeplightning")

ONLY_OWN_STEPS = (
    "engine.compile=graphs records network and losses together, but {} has a training_step of its own, or several "
    "losses that do not all divide by the number of samples; set engine.compile=reduce-overhead, which compiles only "
    "the network"
)


class Compiled:
    """Decides which batches are compiled: those of the shape of the first full one.

    Args:
        mode: `engine.compile`, not false.

    Attributes:
        graphs: whether the mode uses CUDA graphs. They write the results of every step into the same memory, so values
            that are kept longer than a step must be cloned (`detach`).
    """

    def __init__(self, mode: bool | str):
        self.mode = "default" if mode is True else str(mode)
        self.graphs = mode in ("graphs", "reduce-overhead", "max-autotune")
        self._shapes: list[tuple[int, ...]] | None = None
        self._has_warned = False

    def compile(self, function: Callable[..., object], owner: nn.Module) -> Callable[..., Any]:
        """Compile a function of tensors. The result must only be called with batches for which `takes` is true.

        Args:
            owner: the module whose submodules the function uses. In the mode `graphs`, only its last result is
                differentiable.
        """
        if self.mode == "graphs":
            from deeplightning.task.cuda_graphs import RecordedFunction

            return RecordedFunction(function, owner)
        # None: at a second length, texts are compiled again for any length. A CUDA graph supports one shape only.
        return torch.compile(function, mode=self.mode, dynamic=False if self.graphs else None)

    def takes(self, *tensors: Tensor, may_be_short: bool) -> bool:
        """Return whether a batch is compiled: its size, or with CUDA graphs its shape, is that of the first full batch.

        Args:
            may_be_short: whether it is the last of several batches of an epoch.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if self._shapes is None:
            if may_be_short:
                return False
            self._shapes = shapes
        taken = shapes == self._shapes if self.graphs else shapes[0][0] == self._shapes[0][0]
        if not taken and not may_be_short and not self._has_warned:
            self._has_warned = True
            log.warning(
                "engine.compile: batches are compiled in the shape of the first, %s; this one is %s and runs eagerly, "
                "as do all others of another shape%s",
                *(self._shapes[0], shapes[0]),
                ". engine.compile=true compiles for any length" if self.graphs else "",
            )
        return taken

    def begin_step(self, module: nn.Module, device: torch.device, accumulates: bool) -> None:
        """Prepare the first compiled call of a batch, which may overwrite the results of the previous batch. If
        gradients are accumulated, those of the previous batch are cloned."""
        if self.graphs and accumulates:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        if self.graphs and self.mode != "graphs" and device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()

    def detach(self, values: object) -> Any:
        """Return values that later steps do not overwrite: detached and, with CUDA graphs, cloned."""
        return apply_to_collection(values, Tensor, lambda v: v.detach().clone() if self.graphs else v.detach())
