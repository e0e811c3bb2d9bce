"""Deep Lightning: a YAML file becomes a tracked training run, and the run an HTTP endpoint."""

__version__ = "0.1.0"
