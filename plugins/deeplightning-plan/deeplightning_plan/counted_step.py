"""Count the memory, operations and data movement of a training step, on tensors that have no values and no memory.

Lightning trains the real task for one optimizer step on fake tensors, so a network of any size can be counted on any
machine. torch 2.15 cannot compute a backward pass on a missing device, so a GPU's tensors are fake CPU tensors, with
the attention kernels and `autocast` dtypes of CUDA.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from deeplightning.config.schema import Config, LimitBatches, Target
from deeplightning.config.target import find
from deeplightning.dry_run.diagnosis import Attempt
from deeplightning.dry_run.one_batch import SAMPLES, make_trainer
from deeplightning.engine.sharded import holders_of, replace_parameter
from deeplightning.run.assemble import init_module
from deeplightning_plan import torch_private
from deeplightning_plan.memory_tracker import MAX_BATCHES, MemoryTracker, Phases


@dataclass
class Count:
    """Memory and work of one step."""

    task: Any  # has fake parameters and a built network
    optimizers: list[Any] = field(default_factory=list)  # after their first step; empty if that failed
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)  # phase → kind → bytes at its peak
    flops: int = 0  # operations of matrix products, convolutions and attentions in an optimizer step
    moved: int = 0  # bytes that operators of that step read and wrote
    launches: int = 0  # number of such operators in its forward and backward passes
    buffers: int = 0  # bytes of the network's buffers
    partial: str | None = None  # why no step was counted; None: a step was counted


def count_step(
    attempt: Attempt, batch_size: int, on_gpu: bool, in_half: bool = False, recompute: list[str] | None = None
) -> Count:
    """Count a step of `attempt.cfg`, whose data module `example` has built.

    Args:
        attempt: of a config for one CPU process.
        batch_size: samples per batch.
        on_gpu: count the memory of CUDA's kernels.
        in_half: the network itself is in bfloat16, as under DeepSpeed.
        recompute: modules whose activations are recomputed.

    Raises:
        Exception: any error of the task or its parts, unless it comes from reading a value.
    """
    attempt.cfg = cfg = copy.deepcopy(attempt.cfg)
    cfg.engine.activation_checkpointing = recompute
    if in_half:
        cfg.engine.precision = 32
    tracker = MemoryTracker()
    kernels = cuda_kernels() if on_gpu else contextlib.nullcontext()
    with torch_private.fake_tensors(), kernels, tracker, PlaceholderValues(tracker), torch.device("cpu"):
        task = attempt.task = init_module(cfg, "model")
        if in_half:
            _compute_in_half(task)
        phases = Phases(tracker)
        count = Count(task)
        if attempt.batch is None:
            _build(task)
            count.partial = "the data module has no `example_batch`, so there is no step to count"
        else:
            try:
                _train(attempt, task, phases, batch_size)
            except Exception as error:
                if not torch_private.needs_values(error):
                    raise
                count.partial = "the training step branches on values, which tensors without memory do not have"
                _build(task)
        count.optimizers = phases.optimizers or _optimizers(task, cfg)
        if count.partial is None and not tracker.peaks.get("backward"):
            count.partial = "the training step has no backward pass to count"
        count.peaks = {phase: dict(kinds) for phase, kinds in tracker.peaks.items() if phase != "between"}
        count.flops, count.moved, count.launches = tracker.flops, tracker.moved, tracker.launches
        count.buffers = sum(buffer.nbytes for buffer in task.buffers())
    return count


def _build(task: Any) -> None:
    """Build the task's network if it is not built yet."""
    with contextlib.suppress(Exception):
        task.configure_model()


def _optimizers(task: Any, cfg: Config) -> list[Any]:
    """Return the config's optimizer over all trainable parameters, for a task that failed to train; [] if none."""
    target, trainable = cfg.model.optimizer, [p for p in task.parameters() if p.requires_grad]
    return [find(target.type)(trainable, **target.params)] if isinstance(target, Target) and trainable else []


def _train(attempt: Attempt, task: Any, phases: Phases, batch_size: int) -> None:
    cfg = attempt.cfg
    cfg.train.limit_batches = LimitBatches(val=0)
    cfg.train.accumulator_factor, cfg.train.max_steps, cfg.train.num_epochs = 1, None, 1
    if hasattr(task, "check_truth"):
        task.check_truth = lambda *_: None  # it reads labels
    task.cpu = task.cuda = lambda *_: task  # torch 2.15 cannot move a fake parameter that has other references
    task.to = lambda *args, **kwargs: _cast(task, *args, *kwargs.values())
    task.double = lambda: _cast(task, torch.float64)
    for module in task.modules():  # logged tensors have no values
        if isinstance(module, pl.LightningModule):
            module.log = module.log_dict = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    for metric in filter(lambda module: isinstance(module, Metric), task.modules()):  # reads values, uses little memory
        metric.update = lambda *_, **__: None
        metric.forward = metric.compute = lambda *_, **__: torch.zeros(())
    trainer = make_trainer(attempt, phases)
    trainer.loggers = []
    made: list[Tensor] = []

    def of_size(example: Tensor) -> Tensor:
        size = [batch_size, *example.shape[1:]] if example.shape[:1] == (SAMPLES,) else example.shape
        made.append(torch.empty(size, dtype=example.dtype))
        return made[-1]

    batch = apply_to_collection(attempt.batch, Tensor, of_size)
    batches: Any = [batch] * (4 * MAX_BATCHES)
    attempt.data.train_dataloader = lambda: DataLoader(batches, batch_size=None)
    phases.tracker.add("activations", made)
    trainer.fit(task, datamodule=attempt.data)


def _cast(task: nn.Module, *args: object) -> nn.Module:
    """Cast floating-point parameters and buffers to the dtype among the arguments of `Module.to`, if there is one."""
    for dtype in (arg for arg in args if isinstance(arg, torch.dtype)):
        for parameter, found in holders_of(task).items():
            if parameter.is_floating_point():
                replace_parameter(found, nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad))
        for module in task.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and not isinstance(module, Metric):
                    setattr(module, name, buffer.to(dtype))
    return task


def _compute_in_half(task: Any) -> None:
    """Make a network compute in bfloat16, parameters and all, as DeepSpeed does."""
    build = task.configure_model

    def configure_model() -> None:
        build()
        _cast(task, torch.bfloat16)
        for child in task.children():
            if next(child.parameters(), None) is not None:
                child.register_forward_pre_hook(_to_bfloat16)

    task.configure_model = configure_model


def _to_bfloat16(_: nn.Module, inputs: Any) -> Any:
    return apply_to_collection(inputs, Tensor, lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t)


class PlaceholderValues(torch_private.DispatchMode):
    """Return False or 1 when code reads the value of a fake tensor while a network is built or an optimizer steps. In a
    forward or backward pass the value may change what is computed, so reading it is an error there."""

    def __init__(self, tracker: MemoryTracker):
        super().__init__()
        self.tracker = tracker

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func is torch_private.ITEM and self.tracker.phase in ("between", "optimizer"):
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


_IN_32_BITS = (
    *("layer_norm", "group_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss", "pow.Tensor_Scalar", "exp"),
    *("log", "rsqrt", "softplus", "cumsum", "l1_loss", "smooth_l1_loss", "sum.dim_IntList"),
)
"""Operators that autocast computes in float32 on CUDA but not on the CPU (torch 2.15), if they use much memory:
https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32"""


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Compute CPU tensors with the dtypes and attention kernels that CUDA would use."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        for name in _IN_32_BITS:
            library.impl(name, _upcast(name), "AutocastCPU")
        yield
    finally:
        torch_private.end_library(library)


def _upcast(name: str) -> Any:
    base, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, base), overload or "default")

    def computed(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            args, kwargs = apply_to_collection(
                (args, kwargs), Tensor, lambda t: t.float() if t.is_floating_point() else t
            )
            return operator(*args, **kwargs)

    return computed


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Call the kernel that CUDA uses: flash attention in 16 bits without a mask, else the memory-efficient one."""
    if query.shape[1] != key.shape[1]:  # grouped queries: several query heads share a key head
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256:
        return torch_private.FLASH_ATTENTION(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = bias.expand(*query.shape[:3], key.shape[2])
    return torch_private.EFFICIENT_ATTENTION(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
