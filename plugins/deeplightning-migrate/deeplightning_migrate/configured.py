"""A LightningModule whose optimizer and schedule come from the config, as LightningCLI gives it."""

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
        made = optimizer(self.parameters())
        return LightningCLI.configure_optimizers(self, made, lr_scheduler(made) if lr_scheduler else None)

    module.configure_optimizers = MethodType(configure_optimizers, module)  # type: ignore[method-assign]
    return module
