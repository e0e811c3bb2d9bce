"""An estimate of whether weights, gradients and optimizer state of a network fit into a GPU's memory.

It is a lower bound, known before anything is moved: activations, buffers and communication need more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from deeplightning.config.schema import Config, Engine, Target
from deeplightning.config.target import find
from deeplightning.engine import devices
from deeplightning.engine.gpus import chosen_of, held_by
from deeplightning.engine.plan import world_size
from deeplightning.faults import Fault, SetupError

_BACKENDS = ("deepspeed_stage_1", "deepspeed_stage_2", "fsdp", "deepspeed_stage_3")
_OFFLOADING = ("deepspeed_stage_2_offload", "deepspeed_stage_3_offload")


class Size(NamedTuple):
    """The quantities that the memory of a run depends on.

    Attributes:
        parameters, learning: elements of the network, and those that the optimizer updates.
        states: numbers that the optimizer keeps for each of the latter.
    """

    parameters: int
    learning: int
    states: float


class Need(NamedTuple):
    """Bytes needed on each GPU."""

    weights: float
    gradients: float
    state: float


def need(size: Size, engine: Engine, backend: str | None) -> Need:
    """Return the minimum memory of one GPU under a backend."""
    name, word = backend or "", str(engine.precision)
    is_deepspeed = name.startswith("deepspeed")
    is_half = word.startswith(("16", "bf16"))
    half_only = is_half and (is_deepspeed or word.endswith("true"))
    number = 8 if word.startswith("64") else 2 if half_only else 4
    # DeepSpeed's optimizer has 32-bit weights and state, in addition to the half-precision weights.
    kept = 4 * (size.states + 1) if is_deepspeed and is_half else number * size.states
    found = Need(number * size.parameters, number * size.learning, kept * size.learning)
    stage = 3 if name == "fsdp" else int(name.removeprefix("deepspeed_stage_")[:1]) if is_deepspeed else 0
    parts = world_size(engine)
    shared = [value / parts if stage >= least else value for value, least in zip(found, (3, 2, 1), strict=True)]
    if "offload" in name or (name == "fsdp" and engine.params.get("cpu_offload")):
        shared = [0 if stage == 3 else shared[0], 0 if stage > 1 else shared[1], 0]
    return Need(*shared)


def states_of(optimizer: Target) -> float:
    """Return how many numbers an optimizer keeps per trained element, measured by a step with a small one; 0 if it
    cannot run here, such as one with a CUDA kernel."""
    probe = nn.Parameter(torch.zeros(4, 4))
    try:
        made = find(optimizer.type)([probe], **optimizer.params)
        probe.grad = torch.ones_like(probe)
        made.step()
        kept = made.state[probe].values()
    except Exception:
        return 0
    return sum(value.numel() for value in kept if isinstance(value, torch.Tensor) and value.ndim) / probe.numel()


def refuse_what_does_not_fit(task: Any, cfg: Config) -> None:
    """Make a task that trains on a GPU raise a SetupError if the network that it built cannot fit."""
    build = task.configure_model

    def configure_model() -> None:
        build()
        try:
            trainer = task.trainer
        except RuntimeError:  # it has none
            return
        if trainer.state.fn != "fit":
            return
        message = lack(task, cfg, getattr(trainer.strategy, "local_rank", 0))
        if message is not None:
            raise SetupError(Fault(message, "engine.gpus"))

    task.configure_model = configure_model


def lack(task: nn.Module, cfg: Config, rank: int) -> str | None:
    """Return why a network cannot train on this process's GPU, with what would fit; None if it may."""
    here = devices.machine()
    chosen = chosen_of(cfg.engine.gpus, here)[rank : rank + 1]
    is_certain = here.by_bus or (isinstance(cfg.engine.gpus, list) and isinstance(cfg.engine.gpus[0], str))
    if not chosen or not is_certain or (free := chosen[0].free) is None:
        return None
    optimizer = cfg.model.optimizer
    has_one = isinstance(optimizer, Target)  # with several, the task decides what each updates
    parameters = list(task.parameters())
    learning = sum(parameter.numel() for parameter in parameters if parameter.requires_grad) if has_one else 0
    states = states_of(optimizer) if isinstance(optimizer, Target) else 0
    size = Size(sum(parameter.numel() for parameter in parameters), learning, states)
    asked = need(size, cfg.engine, cfg.engine.backend)
    if sum(asked) <= free:
        return None
    holders = f" ({held_by(chosen[0])})" if chosen[0].holders else ""
    parts = f"{_gib(asked.weights)} weights, {_gib(asked.gradients)} gradients, {_gib(asked.state)} optimizer state"
    fitting = int(size.parameters * free / sum(asked) / 1e6)
    others = _others(size, cfg, free) if has_one else []
    remedy = f"; {', '.join(others)} would leave room" if others else ""
    return (
        f"the network of {size.parameters / 1e6:,.1f} million parameters needs at least {_gib(sum(asked))} GiB on each "
        f"GPU ({parts}), and {_gib(free)} of {_gib(chosen[0].total or 0)} GiB are free{holders}; about {fitting:,} "
        f"million parameters would fit, without their activations{remedy}"
    )


def _others(size: Size, cfg: Config, free: int) -> list[str]:
    """Return backends that need at most half of the free memory of these GPUs, without offloading first."""
    backends = (_BACKENDS if world_size(cfg.engine) > 1 else ()) + _OFFLOADING
    fits = [name for name in backends if 2 * sum(need(size, cfg.engine, name)) <= free]
    return [f"`engine.backend={name}`" for name in fits[:2]]


def _gib(count: float) -> str:
    return f"{count / 2**30:,.1f}"
