"""The names of the package `lightning`, with the classes of `pytorch_lightning`, for `import lightning` in own code.

The two packages have the same classes twice, and a class of one is no class of the other.
"""

import lightning_fabric as fabric
import pytorch_lightning as pytorch
from lightning_fabric import Fabric
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer, __version__, seed_everything

__all__ = [
    "Callback",
    "Fabric",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "__version__",
    "fabric",
    "pytorch",
    "seed_everything",
]
