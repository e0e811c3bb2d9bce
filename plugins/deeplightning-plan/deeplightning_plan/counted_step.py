"""Count what a training step holds, computes and moves, with tensors that have no values and no memory.

The real task is trained for an optimizer step by Lightning, on fake tensors, so that a network of any size is counted
on any machine. torch cannot compute a backward pass on a device that is not there (2.15), so that a GPU's tensors are
fake ones of the CPU, with the kernels of attention and the types of `autocast` that CUDA has.
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
from deeplightning.engine.sharded import places, replace
from deeplightning.run.assemble import init_module
from deeplightning_plan import torch_private
from deeplightning_plan.memory_tracker import MOST_BATCHES, MemoryTracker, Phases


@dataclass
class Count:
    """What a step was seen to hold."""

    task: Any  # with fake parameters; its network is built
    optimizers: list[Any] = field(default_factory=list)  # after their first step; empty: it could not be taken
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)  # phase → kind → bytes when it held the most
    flops: int = 0  # operations of matrix products, convolutions and attentions in an optimizer step
    moved: int = 0  # bytes that operators of that step read and wrote
    launches: int = 0  # operators of its forward and backward passes that did so
    buffers: int = 0  # bytes of the network's buffers
    partial: str | None = None  # why no step was counted; None: one was


def counted(
    attempt: Attempt, batch_size: int, on_gpu: bool, in_half: bool = False, recompute: list[str] | None = None
) -> Count:
    """Count a step of `attempt.cfg`, whose data have been made by `example`.

    Args:
        attempt: of a config for one CPU process.
        batch_size: samples of the batch.
        on_gpu: count what CUDA's kernels would hold.
        in_half: the network itself is in bfloat16, as under DeepSpeed.
        recompute: modules whose activations are computed again.

    Raises:
        Exception: whatever a part raises, except where it asks for values.
    """
    attempt.cfg = cfg = copy.deepcopy(attempt.cfg)
    cfg.engine.activation_checkpointing = recompute
    if in_half:
        cfg.engine.precision = 32
    tracker = MemoryTracker()
    kernels = kernels_of_cuda() if on_gpu else contextlib.nullcontext()
    with torch_private.fake_tensors(), kernels, tracker, Answers(tracker), torch.device("cpu"):
        task = attempt.task = init_module(cfg, "model")
        if in_half:
            _compute_in_half(task)
        watch = Phases(tracker)
        count = Count(task)
        if attempt.batch is None:
            _build(task)
            count.partial = "without an `example_batch` of the data module there is no step to count"
        else:
            try:
                _train(attempt, task, watch, batch_size)
            except Exception as error:
                if not torch_private.needs_values(error):
                    raise
                count.partial = "it branches on values, which tensors without memory do not have"
                _build(task)
        count.optimizers = watch.optimizers or _optimizers(task, cfg)
        if count.partial is None and not tracker.peaks.get("backward"):
            count.partial = "its training step makes no backward pass that could be counted"
        count.peaks = {phase: dict(kinds) for phase, kinds in tracker.peaks.items() if phase != "between"}
        count.flops, count.moved, count.launches = tracker.flops, tracker.moved, tracker.launches
        count.buffers = sum(buffer.nbytes for buffer in task.buffers())
    return count


def _build(task: Any) -> None:
    """Let a task build its network, unless it has done so."""
    with contextlib.suppress(Exception):
        task.configure_model()


def _optimizers(task: Any, cfg: Config) -> list[Any]:
    """Return the config's optimizer over all that learns, for a task that could not be trained; [] if there is none."""
    target, learning = cfg.model.optimizer, [p for p in task.parameters() if p.requires_grad]
    return [find(target.type)(learning, **target.params)] if isinstance(target, Target) and learning else []


def _train(attempt: Attempt, task: Any, watch: Phases, batch_size: int) -> None:
    cfg = attempt.cfg
    cfg.train.limit_batches = LimitBatches(val=0)
    cfg.train.accumulator_factor, cfg.train.max_steps, cfg.train.num_epochs = 1, None, 1
    if hasattr(task, "check_truth"):
        task.check_truth = lambda *_: None  # it looks at labels
    task.cpu = task.cuda = lambda *_: task  # torch moves no fake parameter that somebody knows (2.15)
    task.to = lambda *words, **named: _cast(task, *words, *named.values())
    task.double = lambda: _cast(task, torch.float64)
    for module in task.modules():  # what they log has no values
        if isinstance(module, pl.LightningModule):
            module.log = module.log_dict = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    for metric in filter(lambda module: isinstance(module, Metric), task.modules()):  # looks at values, holds little
        metric.update = lambda *_, **__: None
        metric.forward = metric.compute = lambda *_, **__: torch.zeros(())
    trainer = make_trainer(attempt, watch)
    trainer.loggers = []
    made: list[Tensor] = []

    def of_size(example: Tensor) -> Tensor:
        size = [batch_size, *example.shape[1:]] if example.shape[:1] == (SAMPLES,) else example.shape
        made.append(torch.empty(size, dtype=example.dtype))
        return made[-1]

    batch = apply_to_collection(attempt.batch, Tensor, of_size)
    batches: Any = [batch] * (4 * MOST_BATCHES)
    attempt.data.train_dataloader = lambda: DataLoader(batches, batch_size=None)
    watch.tracker.add("activations", made)
    trainer.fit(task, datamodule=attempt.data)


def _cast(task: nn.Module, *words: object) -> nn.Module:
    """Give parameters and buffers of floating point the dtype among the arguments of `Module.to`, if there is one."""
    for dtype in (word for word in words if isinstance(word, torch.dtype)):
        for parameter, found in places(task).items():
            if parameter.is_floating_point():
                replace(found, nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad))
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
                child.register_forward_pre_hook(_in_half)

    task.configure_model = configure_model


def _in_half(_: nn.Module, inputs: Any) -> Any:
    return apply_to_collection(inputs, Tensor, lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t)


class Answers(torch_private.DispatchMode):
    """Answer code that asks a tensor without values for one, while a network is built and while an optimizer steps:
    no, or 1. In a forward and a backward pass such a branch may change what is computed: there it is an error."""

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
"""Operators that autocast computes in float32 on CUDA and not on the CPU (torch 2.15), as far as they hold much:
https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32"""


@contextlib.contextmanager
def kernels_of_cuda() -> Iterator[None]:
    """Compute tensors of the CPU with the types and the attention that CUDA would take."""
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
    """Call the kernel that CUDA takes: flash attention in 16 bits without a mask, else the memory-efficient one."""
    if query.shape[1] != key.shape[1]:  # a head of keys for several of queries
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256:
        return torch_private.FLASH_ATTENTION(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = bias.expand(*query.shape[:3], key.shape[2])
    return torch_private.EFFICIENT_ATTENTION(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
