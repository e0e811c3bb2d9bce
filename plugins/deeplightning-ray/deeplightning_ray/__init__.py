"""Plug-in of Deep Lightning: train on the workers of a Ray cluster, which may come and go."""

from deeplightning_ray.launcher import Ray

__all__ = ["Ray"]
