"""`auto` in the params of a network becomes the number that the data module declares."""

from __future__ import annotations

import logging
from typing import Any

from deeplightning.config.automatic import DECLARED, unfilled
from deeplightning.config.schema import Config
from deeplightning.engine.plan import world_size
from deeplightning.faults import ConfigError, Fault

log = logging.getLogger("deeplightning")


def fill(cfg: Config, data: Any, read: bool = True) -> None:
    """Replaces each `auto` in the params of networks, in place.

    Args:
        data: the data module.
        read: prepare and set up the data where the data module does not declare a number before; where False, such an
            `auto` stays.

    Raises:
        ConfigError: the data module declares no such number.
    """
    for key, params, name in unfilled(cfg):
        found = _declared(name, data)
        if found is None and hasattr(data, "example_batch"):
            data.example_batch(1)  # an image folder knows its classes from here on
            found = _declared(name, data)
        if found is None and read:
            if world_size(cfg.engine) == 1:  # else the first process alone may download
                data.prepare_data()
            data.setup("fit")
            found = _declared(name, data)
        if found is None and not read:
            continue
        attributes = [attribute for attribute in DECLARED[name] if getattr(data, attribute, None)] or DECLARED[name]
        source = f"{' or '.join(attributes)} of {cfg.data.module.type}"
        if found is None:
            message = f"`auto` needs {source}, which the data module does not declare; set {key} to a number"
            raise ConfigError(Fault(message, key, found="auto"))
        params[name] = found
        log.info("%s: auto → %s (%s)", key, found, source)


def refuse_unfilled(cfg: Config) -> None:
    """Refuses to build a network whose params are not known yet.

    Raises:
        ConfigError: with each `auto` that is left.
    """
    message = "`auto` is filled when the data module is built; call init_module(cfg, 'data') before, or give a number"
    if faults := [Fault(message, key, found="auto") for key, _, _ in unfilled(cfg)]:
        raise ConfigError(faults)


def _declared(name: str, data: Any) -> int | list[int] | None:
    """What a data module declares so far for the param of a network."""
    declared = next((found for name in DECLARED[name] if (found := getattr(data, name, None))), None)
    if not declared:
        return None
    if name in ("num_classes", "num_outputs"):
        return len(declared)
    if name == "num_channels":
        return int(declared.channels if hasattr(declared, "channels") else declared.shape[0])
    if name == "num_numbers":
        return len(declared.numbers)
    if name == "cardinalities":
        return list(declared.cardinalities)
    if name == "image_size":
        square = declared.height == declared.width
        return int(declared.height) if square else [int(declared.height), int(declared.width)]
    return int(declared.size)
