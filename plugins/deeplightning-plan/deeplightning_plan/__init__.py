"""Plug-in of Deep Lightning: plan processes, memory and time of a run; find a learning rate and a batch size."""
