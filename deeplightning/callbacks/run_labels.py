"""What a run is about, in a few words: the names of its network and its data, and how it is spread."""

from pathlib import Path

from deeplightning.config.schema import Config, Target
from deeplightning.engine.plan import world_size


def network_name(cfg: Config) -> str:
    """What the network of a run is called: its class or function, or the model's name that a library is given; of
    several networks, and where the task has its own, the task's class."""
    network = cfg.model.network
    if not isinstance(network, Target):
        return cfg.model.module.type.rpartition(".")[2]
    name = network.type.rpartition(".")[2]
    if name in ("create_model", "get_model", "from_pretrained", "load"):
        given = (network.params.get(key) for key in ("model_name", "name", "pretrained_model_name_or_path", "model"))
        name = next((Path(text).name for text in given if isinstance(text, str) and text), name)
    return name


def engine_in_words(cfg: Config) -> str:
    """How a run is spread and in which numbers it computes, short enough for a column: `ddp, 2 GPU, bf16`."""
    engine, size = cfg.engine, world_size(cfg.engine)
    device = "CPU" if engine.gpus is None else "GPU"
    precision = f"fp{engine.precision}" if str(engine.precision).isdecimal() else str(engine.precision)
    words = (engine.backend, device if size == 1 else f"{size} {device}", precision)
    return ", ".join(word for word in words if word)


def data_name(cfg: Config) -> str:
    """What the data of a run are called: `data.dataset`, else the class of the data module."""
    return str(cfg.data.dataset or cfg.data.module.type.rpartition(".")[2])
