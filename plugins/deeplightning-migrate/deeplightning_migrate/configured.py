"""Configure the optimizer and schedule of a LightningModule from the config, as LightningCLI does."""

from types import MethodType

from pytorch_lightning import LightningModule
from pytorch_lightning.cli import LightningCLI, LRSchedulerCallable, OptimizerCallable
from pytorch_lightning.utilities.types import OptimizerLRScheduler


def with_optimizer(
    module: LightningModule, optimizer: OptimizerCallable, lr_scheduler: LRSchedulerCallable | None = None
) -> LightningModule:
    """Replace the module's `configure_optimizers`, as the sections `optimizer` and `lr_scheduler` of LightningCLI do.

    Returns:
        The same module.
    """

    def configure_optimizers(self: LightningModule) -> OptimizerLRScheduler:
        built = optimizer(self.parameters())
        return LightningCLI.configure_optimizers(self, built, lr_scheduler(built) if lr_scheduler else None)

    module.configure_optimizers = MethodType(configure_optimizers, module)  # type: ignore[method-assign]
    return module
