"""Try a config out: pass one batch through a training and a validation step."""
