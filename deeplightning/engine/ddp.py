"""Data parallelism with torch's `DistributedDataParallel`: each process has the network, gradients are averaged."""

from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deeplightning.engine.process_group import CountsOnce


class Ddp(CountsOnce, DDPStrategy):
    """Lightning's DDPStrategy, computing on the stream on which gradients are reduced.

    Lightning 2.6.6 wraps the network on a side stream, as torch requires for capturing a CUDA graph of the step. All
    else runs on the current stream, so autograd synchronises the two at each parameter, and torch (2.11 and newer)
    warns.
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)
