"""Try a config out: pass a made-up batch through a training and a validation step."""
