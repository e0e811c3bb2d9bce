"""A config is tried out: a made-up batch goes through a training and a validation step."""
