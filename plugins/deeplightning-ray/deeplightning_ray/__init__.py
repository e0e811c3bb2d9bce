"""Plug-in of Deep Lightning: train on the workers of a Ray cluster, whose number may change."""

from deeplightning_ray.launcher import Ray

__all__ = ["Ray"]
