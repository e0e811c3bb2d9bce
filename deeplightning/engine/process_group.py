"""Process groups: Lightning's cluster environment, the split of data over processes, data parallelism, teardown."""

import atexit
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning_fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from lightning_fabric.utilities.rank_zero import rank_zero_only
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from deeplightning.faults import RunError
from deeplightning.private.torch import metric_by_item
from deeplightning.process.identity import Identity, identity

log = logging.getLogger("deeplightning")


def cluster() -> ClusterEnvironment:
    """Return the cluster environment of this process: of an external launcher, or one that starts its own processes.

    Lightning 2.6 would use Slurm's variables even in a shell for which Slurm has only allocated a machine.
    """
    # Lightning suggests srun if Slurm is installed.
    warnings.filterwarnings("ignore", "The `srun` command is available")
    found = identity()
    return OwnProcesses() if found is None or not found.is_binding else ExternalProcesses(found)


class OwnProcesses(LightningEnvironment):
    """The processes of a machine, started by the first of them."""

    def teardown(self) -> None:
        """Keep WORLD_SIZE, which Lightning's version deletes and later stages read."""


class ExternalProcesses(ClusterEnvironment):
    """The processes of a launch that were all started externally; see `deeplightning.process.identity`."""

    def __init__(self, process: Identity):
        self.process = process
        rank_zero_only.rank = process.rank  # type: ignore[attr-defined]

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.process.address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT") or self.process.port or 29500)  # torch's own default

    @staticmethod
    def detect() -> bool:
        return identity() is not None

    def world_size(self) -> int:
        return self.process.world

    def set_world_size(self, size: int) -> None:
        """Ignore the size, which is fixed."""

    def global_rank(self) -> int:
        return self.process.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore the rank, which is fixed."""

    def local_rank(self) -> int:
        return self.process.local_rank

    def node_rank(self) -> int:
        return self.process.node


# ---- the data


class EachOnce(BatchSampler):
    """Batches of a process: each sample occurs once over all processes, which have equally many batches.

    A DistributedSampler repeats samples so that all processes have the same number. Here a process with one sample less
    has one or two shorter batches instead.

    Args:
        sampler: yields the samples of this process, a repeated one last.
    """

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int, drop_last: bool):
        super().__init__(sampler, batch_size, drop_last)
        world, total = sampler.num_replicas, len(sampler.dataset)  # type: ignore[arg-type]
        self.samples = len(range(sampler.rank, total, world))
        self.batches = total // world // batch_size if drop_last else -(-total // (world * batch_size))
        self.is_possible = total // world >= self.batches

    def __iter__(self) -> Iterator[list[int]]:
        positions, begin = [*self.sampler][: self.samples], 0
        for left in reversed(range(self.batches)):
            end = min(begin + self.batch_size, self.samples - left)
            yield positions[begin:end]
            begin = end

    def __len__(self) -> int:
        return self.batches


class CountsOnce:
    """Mixin for Lightning's strategies: metrics of an evaluation set count each sample once."""

    lightning_module: Any

    def process_dataloader(self, dataloader: object) -> object:
        """Remove repeated samples from a validation or test loader that is split over the processes."""
        trainer: Any = self.lightning_module.trainer
        if not isinstance(dataloader, DataLoader) or type(dataloader.batch_sampler) is not BatchSampler:
            return dataloader
        sampler: Any = dataloader.sampler
        splitting = (DistributedSampler, DistributedSamplerWrapper)
        if trainer.training or type(sampler) not in splitting or sampler.drop_last:
            return dataloader
        once = EachOnce(sampler, dataloader.batch_sampler.batch_size, dataloader.batch_sampler.drop_last)
        samples, world = len(sampler.dataset), sampler.num_replicas
        by_item = metric_by_item(self.lightning_module) if samples % world else None
        if once.is_possible and by_item is None:
            vars(dataloader)["batch_sampler"] = once  # torch forbids assigning it to a constructed loader
        elif trainer.is_global_zero:
            log.warning(
                f"a set of %d samples cannot be split {'' if by_item is None else f'for {by_item} '}into equally many "
                "batches of %d on each of %d processes, so some samples count twice. Use one process%s",
                *(samples, once.batch_size, world, " or larger batches" if by_item is None else ""),
            )
        return dataloader

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather as Lightning does; in an evaluation, pad tensors of processes that have fewer rows.

        Raises:
            RunError: on every process, if one of them has no row to repeat.
        """
        gather: Any = super().all_gather  # type: ignore[misc]
        if tensor.ndim and not self.lightning_module.trainer.training:
            rows = gather(torch.tensor(len(tensor), device=tensor.device), group)
            if rows.min() < rows.max():
                if rows.min() == 0:
                    raise RunError(f"`all_gather` got no rows from some processes, up to {int(rows.max())} from others")
                warnings.warn("`all_gather` repeats the last row of processes that have fewer rows", stacklevel=2)
                tensor = tensor[torch.arange(int(rows.max())).clamp(max=len(tensor) - 1)]
        return gather(tensor, group, sync_grads)  # type: ignore[no-any-return]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does, but average integers, such as sample counts, as floats (2.6.6)."""
        if reduce_op in ("mean", "avg") and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]


class Ddp(CountsOnce, DDPStrategy):
    """Data parallelism with torch's `DistributedDataParallel`: each process has the network, gradients are averaged.

    The network is wrapped on the current stream. Lightning 2.6.6 wraps it on a side stream, as torch requires for
    capturing a CUDA graph of the step. All else runs on the current stream, so autograd would synchronise the two at
    each parameter, and torch (2.11 and newer) would warn.
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)


def scale_gradients(strategy: Any, optimizer: Any, scale: float) -> None:
    """Multiply the gradients of an optimizer before its step; a strategy may have its own method for it."""
    if hasattr(strategy, "scale_gradients"):
        strategy.scale_gradients(scale)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)


def broadcast_buffers(buffers: Iterable[Tensor]) -> None:
    """Copy the buffers of rank 0 to all processes."""
    for buffer in buffers:
        distributed.broadcast(whole := buffer.contiguous(), 0)  # NCCL refuses others, such as transposed ones
        buffer.copy_(whole)


def destroy_group_at_exit() -> None:
    """Make this process destroy its process group at exit, even after a failed run.

    Lightning 2.6 does so only for groups that it creates itself; torch warns about an NCCL group that is left open.
    """
    atexit.unregister(_destroy_group)
    atexit.register(_destroy_group)


def _destroy_group() -> None:
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
