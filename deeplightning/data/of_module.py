"""Stand for the data module where a LightningModule has loaders of its own, as `train_dataloader`."""

import pytorch_lightning as pl


class OfModule(pl.LightningDataModule):
    """No data module: Lightning asks the LightningModule for its loaders.

    A config without `data` gets it where the class of `model.module` defines `train_dataloader`.
    """
