"""Resolve params that depend on the data: `auto` in a network becomes the number that the data module declares, and
`weight: balanced` and `pos_weight: balanced` in a loss become weights of the training set's classes or labels."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from deeplightning.batches import class_names_of
from deeplightning.config.auto_values import BALANCED, DECLARED, WEIGHT, WEIGHTS, unfilled
from deeplightning.config.machine import world_size
from deeplightning.config.schema import Config
from deeplightning.faults import ConfigError, Fault

log = logging.getLogger("deeplightning")


def fill(cfg: Config, data: object, read: bool = True) -> None:
    """Replace each `auto` in the params of networks, and each `balanced` weight of a loss, in place.

    Args:
        data: the data module.
        read: prepare and set up the data if a number is not declared without it; if False, such an `auto` and
            `balanced` stay.

    Raises:
        ConfigError: the data module declares no such number, the training set has no classes or labels, or a label has
            no weight.
    """
    for key, params, name in unfilled(cfg):
        if name in WEIGHTS:
            if read:
                params[name] = {"type": "torch.tensor", "params": {"data": _weights(cfg, data, key, name)}}
            continue
        found = _declared(name, data)
        if found is None and hasattr(data, "example_batch"):
            data.example_batch(1)  # makes an image folder find its classes
            found = _declared(name, data)
        if found is None and read:
            _read(cfg, data)
            found = _declared(name, data)
        if found is None and not read:
            continue
        attributes = [each for each in DECLARED[name] if _attribute(data, each)] or DECLARED[name]
        source = f"{' or '.join(attributes)} of {cfg.data.module.type}"
        if found is None:
            message = f"`auto` needs {source}, which the data module does not declare; set {key} to a number"
            raise ConfigError(Fault(message, key, found="auto"))
        params[name] = found
        log.info("%s: auto → %s (%s)", key, found, source)


def refuse_unfilled(cfg: Config) -> None:
    """Raise if a network's params are not resolved yet.

    Raises:
        ConfigError: with each remaining `auto`.
    """
    message = "is filled when the data module is built; call init_module(cfg, 'data') before, or give a number"
    if faults := [Fault(f"`{p[name]}` {message}", key, found=p[name]) for key, p, name in unfilled(cfg)]:
        raise ConfigError(faults)


def _read(cfg: Config, data: Any) -> None:
    """Prepare and set up the training data."""
    if world_size(cfg.engine) == 1:  # of several, only the first may download
        data.prepare_data()
    data.setup("fit")


def _weights(cfg: Config, data: Any, key: str, name: str) -> list[float]:
    """Return the weight of each class, or of each label's positive samples, and log them."""
    from deeplightning.run.class_weights import class_counts, class_weights, label_counts, positive_weights

    _read(cfg, data)
    needs, found = f"`{BALANCED}` needs", f"of the training set of {cfg.data.module.type}"
    if name == WEIGHT:
        counts = class_counts(data, len(class_names_of(data)))
        if counts is None or not counts.any():
            message = f"{needs} classes, a `label` or `mask` of whole numbers {found}; remove it, or give a tensor"
            raise ConfigError(Fault(message, key, found=BALANCED))
        weights, of = class_weights(counts), f"the classes have {counts.tolist()} samples"
    else:
        positives, samples = label_counts(data) or (np.zeros(1, np.int64), 0)
        if ((positives == 0) | (positives == samples)).any():
            message = f"{needs} labels (B, K) of 0 and 1 {found}, each with samples that have it and samples that have "
            message += f"not (of {samples} have it: {positives.tolist()}); leave a label out, or give a tensor"
            raise ConfigError(Fault(message, key, found=BALANCED))
        weights, of = positive_weights(positives, samples), f"of {samples}, {positives.tolist()} have the label"
    log.info("%s: balanced → %s (%s)", key, weights, of)
    return weights


def _attribute(data: Any, name: str) -> Any:
    return class_names_of(data) if name == "class_names" else getattr(data, name, None)


def _declared(name: str, data: Any) -> int | list[int] | None:
    """Return the value that a data module currently declares for a param of a network, or None."""
    declared = next((found for each in DECLARED[name] if (found := _attribute(data, each))), None)
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
