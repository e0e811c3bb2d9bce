"""Count the bytes of tensors, real or fake, during a training step, by kind.

`torch.distributed._tools.mem_tracker.MemTracker` (torch 2.15) counts the same bytes, and tests compare the two. It
cannot be used here: it supports neither metrics that are called nor a network that a step calls twice, as in a GAN.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from deeplightning.private.torch import storage_id
from deeplightning_plan.fake_gpu import tensors
from deeplightning_plan.torch_private import DispatchMode, changes_in_place

KINDS = ("parameters", "gradients", "state", "activations", "communication", "temporary")
"""Uses of memory. `activations`: tensors that the forward pass keeps, the batch, the network's buffers."""

MAX_BATCHES = 64
"""A task with its own loop that has not stepped its optimizer after this many batches is assumed never to do so."""

_KIND_OF_PHASE = {"between": "activations", "forward": "activations"}


class MemoryTracker(DispatchMode):
    """Count tensors while the mode is active.

    Attributes:
        phase: `between`, `forward`, `backward` or `optimizer`, set by the caller.
        total: currently allocated bytes.
        kinds: kind → currently allocated bytes.
        peaks: phase → `kinds` at the peak of that phase.
        flops: operations of matrix products, convolutions and attentions since `reset`, by torch's formulas. (Its
            `FlopCounterMode` keeps the tensors of recomputed modules alive, torch 2.15.)
        moved: bytes that operators read and wrote since `reset`, without views.
        launches: number of such operators in forward and backward passes; on a GPU each launches a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "between"
        self.total = self.flops = self.moved = self.launches = 0
        self.kinds: Counter[str] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        self._peak_totals: dict[str, int] = {}
        self._sizes: dict[int, tuple[int, str]] = {}

    def __enter__(self) -> MemoryTracker:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._count(storage)
            self._update_peaks()
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]  # FSDP calls it
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def reset(self) -> None:
        """Reset the peaks and counters."""
        self.peaks, self._peak_totals = {}, {}
        self.flops = self.moved = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += int(formula(*args, **kwargs, out_val=result))
        is_new = False
        for tensor in tensors(result):
            is_new = self._count(tensor.untyped_storage()) or is_new
        if is_new or changes_in_place(func):
            self.launches += self.phase in ("forward", "backward")
            self.moved += sum(t.nbytes for t in tensors((args, kwargs, result)) if not t.is_sparse)
        self._update_peaks()
        return result

    def add(self, kind: str, values: Iterable[object]) -> int:
        """Count tensors that were allocated earlier, or whose kind is now known.

        Returns:
            Their bytes; shared memory counts once.
        """
        seen, size = set[int](), 0
        for tensor in values:
            if not isinstance(tensor, Tensor):
                continue
            storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
            if (key := storage_id(storage)) not in seen:
                seen.add(key)
                self._count(storage, kind)
                size += storage.nbytes()
        self._update_peaks()
        return size

    def _count(self, storage: torch.UntypedStorage, kind: str | None = None) -> bool:
        """Count a storage under a kind; return whether it is new."""
        key, size = storage_id(storage), storage.nbytes()
        before = self._sizes.get(key)
        if before is None and not size:
            return False
        new_kind = kind or (before[1] if before else _KIND_OF_PHASE.get(self.phase, "temporary"))
        if before == (size, new_kind):
            return False
        if before is None:
            weakref.finalize(storage, self._free, key)
        else:
            self.kinds[before[1]] -= before[0]
            self.total -= before[0]
        self._sizes[key] = size, new_kind
        self.kinds[new_kind] += size
        self.total += size
        return before is None

    def _update_peaks(self) -> None:
        if self.total > self._peak_totals.get(self.phase, 0):
            self._peak_totals[self.phase] = self.total
            self.peaks[self.phase] = self.kinds.copy()

    def _free(self, key: int) -> None:
        size, kind = self._sizes.pop(key)
        self.kinds[kind] -= size
        self.total -= size


def state_of(optimizer: Any) -> list[Tensor]:
    """Return the tensors in the state of an optimizer, or of the one that DeepSpeed's optimizer wraps."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]


class Phases(pl.Callback):
    """Set a tracker's phase and the kinds of tensors during training, and stop after an optimizer step.

    Attributes:
        optimizers: of the trainer.
    """

    def __init__(self, tracker: MemoryTracker):
        self.tracker = tracker
        self.optimizers: list[Any] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.optimizers = trainer.optimizers
        self.tracker.add("parameters", pl_module.parameters())
        self.tracker.add("activations", pl_module.buffers())
        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._count_gradient)

    def _count_gradient(self, parameter: Tensor) -> None:
        self.tracker.add("gradients", [parameter.grad])

    def on_train_batch_start(self, trainer: Any, *_: object) -> None:
        trainer.log_every_n_steps = sys.maxsize  # logging would read values
        self.tracker.phase = "forward"

    def on_before_backward(self, *_: object) -> None:
        self.tracker.phase = "backward"

    def on_before_zero_grad(self, *_: object) -> None:
        self.tracker.phase = "forward"

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.tracker.phase = "optimizer"
        self.tracker.add("gradients", (parameter.grad for parameter in pl_module.parameters()))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: object, batch: object, n: int) -> None:
        self.tracker.phase = "between"
        self.optimizers = trainer.optimizers
        for optimizer in trainer.optimizers:
            self.tracker.add("state", state_of(optimizer))
        if trainer.global_step or n + 1 >= MAX_BATCHES:
            trainer.should_stop = True
