"""Plug-in of Deep Lightning: submit a run as a job of Slurm, and requeue it from inside."""

from deeplightning_slurm.launcher import Slurm

__all__ = ["Slurm"]
