"""Values that depend on the data: `auto` in the params of a network is replaced by what the data module declares;
`weight: balanced` and `pos_weight: balanced` in the params of a loss are computed from the class or label counts of the
training set."""

from collections.abc import Iterator
from typing import Any

from deeplightning.config.schema import Config, with_keys

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
"""The params of a network that may be `auto`, and the attributes of the data module that may provide the value."""

LISTS = ("cardinalities",)
"""Those whose value is a list."""

WEIGHT = "weight"
WEIGHTS = {WEIGHT: "classes", "pos_weight": "labels"}
"""The params of a loss that may be `balanced`, and what they weight: one number per class, or per label if a sample may
have several."""

BALANCED = "balanced"


def unfilled(cfg: Config) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each network param that is still `auto` and each loss weight that is still `balanced`: its key, the params
    that contain it, and its name."""
    for section, names, word in (("network", DECLARED, "auto"), ("loss", WEIGHTS, BALANCED)):
        for key, target in with_keys(getattr(cfg.model, section), f"model.{section}"):
            for param in names:
                if target.params.get(param) == word:
                    yield f"{key}.params.{param}", target.params, param


def source_of(path: tuple[str | int, ...], value: object, cfg: Config) -> str | None:
    """Describe the source of the number at a path; None if its value is neither `auto` nor `balanced`."""
    if len(path) not in (4, 5) or path[0] != "model" or path[-2] != "params":
        return None
    if path[1] == "loss" and path[-1] in WEIGHTS and value == BALANCED:
        counted = WEIGHTS[str(path[-1])]
        return f"numbers, resolved at run start from the {counted} of the training set of {cfg.data.module.type}"
    if path[1] != "network" or value != "auto" or path[-1] not in DECLARED:
        return None
    return f"a number, resolved at run start from {' or '.join(DECLARED[str(path[-1])])} of {cfg.data.module.type}"
