"""One file per task, each with a LightningModule, and the code that tasks share."""
