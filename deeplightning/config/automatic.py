"""Params of a network that may be `auto`: their numbers come from what the data module declares."""

from collections.abc import Iterator
from typing import Any

from deeplightning.config.schema import Config, Target

DECLARED = {
    "num_classes": ("class_names",),
    "num_outputs": ("class_names", "target_names"),
    "num_channels": ("image_spec", "array_spec"),
    "image_size": ("image_spec",),
    "vocabulary": ("text_spec",),
    "vocabulary_size": ("text_spec",),
    "num_numbers": ("table_spec",),
    "cardinalities": ("table_spec",),
}
"""The params of a network that may be `auto`, and the attributes of the data module of which one has the number."""

LISTS = ("cardinalities",)
"""Those that become lists."""


def unfilled(cfg: Config) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each param of a network that is still `auto`: its key, the params that it is one of, and its name."""
    network = cfg.model.network
    named = network if isinstance(network, dict) else {"": network}
    for name, target in named.items():
        if isinstance(target, Target):
            for param in DECLARED:
                if target.params.get(param) == "auto":
                    yield ".".join(filter(None, ("model.network", name, "params", param))), target.params, param


def source_of(path: tuple[str | int, ...], value: Any, cfg: Config) -> str | None:
    """Where the number of the value at a path comes from, in words; None: it is not `auto`."""
    is_param = path[:2] == ("model", "network") and len(path) in (4, 5) and path[-2] == "params"
    if value != "auto" or not is_param or path[-1] not in DECLARED:
        return None
    return f"a number when the run begins, from {' or '.join(DECLARED[str(path[-1])])} of {cfg.data.module.type}"
