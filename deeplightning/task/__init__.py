"""One file per task, each with a LightningModule; beside them what tasks share."""
