"""Full sharding with torch's `fully_shard` (FSDP2).

Each process holds a part of every parameter, gradient and optimizer state; a module's parameters are gathered while it
computes.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import distributed, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from deeplightning.engine.process_group import broadcast_buffers, destroy_group_at_exit
from deeplightning.engine.sharded import Sharded, Share, holders_of, replace_parameter
from deeplightning.faults import ConfigError, Fault
from deeplightning.private.torch import apply


class Fsdp(Sharded, ModelParallelStrategy):
    """Shard every module of the task that has parameters, and inside it the modules that `wrap` selects as units.

    A unit is gathered at once: small units save memory, large ones time. A task that calls `fully_shard` in its own
    `configure_model` is not changed.

    Args:
        wrap: the units: classes or names of modules, or the minimum number of parameters of a unit.
        reshard_after_forward: free a unit's parameters after its forward pass and gather them again for the backward
            pass; false takes more memory and less time.
        param_dtype: the dtype that units compute in, such as `bfloat16`; null for the precision of the run.
        reduce_dtype: the dtype in which gradients are summed; null to keep theirs.
        output_dtype: the dtype of a unit's outputs; null to keep theirs.
        cpu_offload: keep parameters, gradients and optimizer state in CPU memory.
        process_group_backend: nccl or gloo; null to follow the device, and to use both for `cpu_offload`.
        timeout: how long a process waits for the others.

    Raises:
        ValueError: a dtype is unknown.
        ConfigError: (when the run is set up) `wrap` matches no module, or the task has parameters outside of its
            modules.
    """

    def __init__(
        self,
        wrap: int | Sequence[str] = 1_000_000,
        reshard_after_forward: bool = True,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        output_dtype: str | None = None,
        cpu_offload: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ):
        super().__init__("auto", 1, process_group_backend=process_group_backend, timeout=timeout)
        self.wrap = wrap
        self._offloads = cpu_offload
        self._options: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(_dtype(param_dtype), _dtype(reduce_dtype), _dtype(output_dtype)),
        }
        if cpu_offload:
            self._options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())

    def setup_environment(self) -> None:
        destroy_group_at_exit()  # Lightning destroys only one of `nccl`
        # Lightning's "auto" counts only the processes of one machine.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        task = self.lightning_module
        if not any(isinstance(module, FSDPModule) for module in task.modules()):
            self.refuse_scalars()
            self.synchronise_batch_norm(trainer)
            self._shard(task)
        if not is_overridden("configure_model", task):
            # Lightning 2.6 requires this hook; tasks that build their network elsewhere are sharded too.
            task.configure_model = lambda: None  # type: ignore[method-assign]
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move the task back to its device after the previous stage; offloaded parameters stay on the CPU."""
        if self._offloads:
            self.move_unsharded()
        else:
            super().model_to_device()

    def _shard(self, task: nn.Module) -> None:
        inside = {parameter for root in roots_of(task) for parameter in root.parameters()}
        own = {name: parameter for name, parameter in task.named_parameters() if parameter not in inside}
        if loose := [name for name, p in own.items() if p.requires_grad or "." not in name]:  # frozen ones have no sum
            message = f"fsdp shards modules, but {', '.join(loose)} of {type(task).__name__} belong to none; put them "
            message += "into a module with a `forward`, or use `engine.backend=ddp`"
            raise ConfigError(Fault(message, "engine.backend"))
        full = [parameter.detach() for parameter in holders_of(task)]
        for parameter, found in holders_of(task).items():
            replace_parameter(found, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))
        mesh = self.device_mesh["data_parallel"]
        for unit in (*_inner_units(task, self.wrap), *roots_of(task)):
            fully_shard(unit, mesh=mesh, **self._options)
        device = torch.device("cpu") if self._offloads else self.root_device
        for child in task.children():
            apply(child, lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(self.root_device))
        self.move_unsharded()  # the task itself may have buffers
        with torch.no_grad():
            shares = self.shares()
            for values, parameter in zip(full, holders_of(task), strict=True):
                received = values if self.global_rank == 0 else torch.empty(values.shape, dtype=values.dtype)
                received = received.to(self.root_device)
                distributed.broadcast(received, 0)
                share = shares.get(parameter)
                (parameter if share is None else share.values).copy_(share.part(received) if share else received)
            broadcast_buffers(task.buffers())

    # ---- checkpoints

    def shares(self) -> dict[nn.Parameter, Share]:
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # it may still be gathered after a validation
        return {p: _share(p) for p in holders_of(self.lightning_module) if isinstance(p.data, DTensor)}

    def groups_of(self, optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
        return optimizer.param_groups

    def state_of(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, object]:
        kept = optimizer.state.get(parameter, {})
        return {name: v.to_local().view(-1) if isinstance(v, DTensor) else v for name, v in kept.items()}

    def set_optimizer_state(
        self, optimizer: Any, groups: list[dict[str, object]], states: dict[nn.Parameter, dict[str, Any]]
    ) -> None:
        ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = {parameter: number for number, parameter in enumerate(ordered)}
        ours = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(
            {
                "state": {numbers[p]: {name: _like(p, v) for name, v in kept.items()} for p, kept in states.items()},
                "param_groups": [{**new, "params": old["params"]} for new, old in zip(groups, ours, strict=True)],
            }
        )


def _inner_units(task: nn.Module, wrap: int | Sequence[str]) -> Iterator[nn.Module]:
    """Yield the modules below the roots that are units of their own, the innermost first."""
    roots = set(roots_of(task))
    inner = {n: m for n, m in task.named_modules() if m is not task and m not in roots and _may_be_unit(m)}
    if isinstance(wrap, int):
        chosen = [m for m in inner.values() if sum(p.numel() for p in m.parameters()) >= wrap]
    else:
        names = {n: {type(m).__name__, n, n.partition(".")[2]} for n, m in inner.items()}
        chosen = [m for n, m in inner.items() if not names[n].isdisjoint(wrap)]
        if unknown := set(wrap).difference(*names.values()):
            some = ", ".join(sorted(set().union(*names.values()) - inner.keys() - {""})[:12])
            message = f"no module inside the network has the name or class {min(unknown)}; there are {some or 'none'}"
            raise ConfigError(Fault(message, "engine.params.wrap"))
    # A parameter shared by modules of two units can belong to neither.
    found = holders_of(task)
    for module in reversed(chosen):
        own = set(module.modules())
        if all(holder in own for parameter in module.parameters() for holder, _ in found[parameter]):
            yield module


def units_of(task: nn.Module, wrap: int | Sequence[str]) -> list[list[nn.Parameter]]:
    """Return the parameters of each unit of a network that is not sharded yet.

    Raises:
        ConfigError: `wrap` matches no module.
    """
    taken, units = set[nn.Parameter](), list[list[nn.Parameter]]()
    for module in (*_inner_units(task, wrap), *roots_of(task)):
        units.append([parameter for parameter in module.parameters() if parameter not in taken])
        taken.update(units[-1])
    return [unit for unit in units if unit]


def roots_of(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules with parameters that can be sharded; for a list of modules, its items."""
    found: list[nn.Module] = []
    for child in module.children():
        if _may_be_unit(child):
            found.append(child)
        elif not isinstance(child, Metric):
            found += roots_of(child)
    return found


def _may_be_unit(module: nn.Module) -> bool:
    """Return whether a module has parameters and a forward pass, as `fully_shard` requires, and is not a metric."""
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and next(module.parameters(), None) is not None and not isinstance(module, Metric)


def _share(parameter: Any) -> Share:
    """Return this process's share of a sharded parameter: rows, as `torch.chunk` splits them."""
    rows, mesh = parameter.shape[0], parameter.device_mesh
    # A task's own `parallelize_module` adds a second dimension to the mesh, of size 1.
    first = min(rows, -(-rows // mesh.size()) * mesh.get_local_rank(0))
    values = parameter.to_local().detach().view(-1)
    return Share(tuple(parameter.shape), first * (parameter.numel() // rows), values)


def _like(parameter: Any, values: Any) -> Any:
    """Return values (n,) of this process as a DTensor that is sharded like a parameter; return others unchanged."""
    local = parameter.to_local()
    if not isinstance(values, torch.Tensor) or values.shape != (local.numel(),):
        return values
    return DTensor.from_local(
        values.to(local).view(local.shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{name!r} is not a floating-point dtype; use bfloat16, float16 or float32")
    return found
