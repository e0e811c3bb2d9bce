"""Provide the names of the package `lightning`, with the classes of `pytorch_lightning`, for `import lightning`.

Both packages define the same classes, and an instance of a class of one is not an instance of its twin in the other.
"""

# ruff: noqa: F401

__path__: list[str] = []  # marks a package; `deeplightning.own_code` finds its modules

import lightning_fabric as fabric
import pytorch_lightning as pytorch
from lightning_fabric import Fabric
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer, __version__, seed_everything
