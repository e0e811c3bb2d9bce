"""Data parallelism by torch's `DistributedDataParallel`: each process holds the network, gradients are averaged."""

from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deeplightning.engine.process_group import CountsOnce


class Ddp(CountsOnce, DDPStrategy):
    """Lightning's, which computes on the stream on which the gradients are reduced.

    Lightning 2.6.6 wraps the network on a side stream, as torch asks for where a person captures a CUDA graph of the
    step. All else runs on the current stream, so that autograd synchronises the two at each parameter, and torch (2.11
    and newer) warns of it.
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)
