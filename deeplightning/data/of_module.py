"""The target of `data.module` for a LightningModule that has its own loaders."""

import pytorch_lightning as pl


class OfModule(pl.LightningDataModule):
    """Mark a run without a data module: Lightning asks the LightningModule for its loaders.

    A config without `data` gets this target where the class of `model.module` defines `train_dataloader`.
    """
