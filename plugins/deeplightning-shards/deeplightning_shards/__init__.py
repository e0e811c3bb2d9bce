"""Read pictures from tar shards: a plug-in of Deep Lightning."""

from deeplightning_shards.data import Shards

__all__ = ["Shards"]
