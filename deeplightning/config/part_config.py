"""The type of the config that a data module or a task receives, for annotations only.

It is the `Config` of the schema, narrowed to what loading and the checks guarantee: the seed is set, a data module that
takes the config has a batch size, and there is one network. A task with several networks checks itself that it has a
mapping of them.
"""

from deeplightning.config.schema import Config, Data, Model, Scheduler, Target

__all__ = ["PartConfig", "Scheduler", "Target"]


class PartData(Data):
    """The section `data` of a data module that takes the config."""

    batch_size: int


class PartModel(Model):
    """The section `model` of a task with one network."""

    network: Target


class PartConfig(Config):
    """The whole config, as it is passed to a data module and a task."""

    seed: int
    data: PartData
    model: PartModel
