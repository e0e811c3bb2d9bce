"""One file per kind of data, each with a LightningDataModule."""
