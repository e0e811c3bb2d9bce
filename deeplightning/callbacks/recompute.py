"""`engine.activation_checkpointing`: chosen modules compute their activations twice and keep none in between.

Source: https://arxiv.org/abs/1604.06174
"""

from collections.abc import Sequence
from functools import partial

import pytorch_lightning as pl
from torch import nn
from torch.utils.checkpoint import checkpoint

from deeplightning.faults import ConfigError, Fault, nearest


class Recompute(pl.Callback):
    """Lets modules run their forward pass again when the backward pass comes to them, with the same random numbers.

    Args:
        modules: names in the network, such as `layers.0`, or classes, such as `TransformerEncoderLayer`.

    Raises:
        ConfigError: (when training begins) the network has no such module.
    """

    def __init__(self, modules: Sequence[str]):
        self.modules = modules

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Only now: what a strategy does before and after a module's forward pass belongs around both of them.
        names = [(name.partition(".")[2], module) for name, module in pl_module.named_modules() if "." in name]
        for word in self.modules:
            chosen = [module for name, module in names if word in (name, _class(module))]
            if not chosen:
                known = {name for name, _ in names} | {_class(module) for _, module in names}
                message = f"no module is called, or is a, {word}.{nearest(word, known)}"
                raise ConfigError(Fault(message, "engine.activation_checkpointing", found=word))
            for module in chosen:
                forward: object = module.forward
                if not isinstance(forward, partial):  # chosen twice: by its name and by its class
                    module.forward = partial(checkpoint, forward, use_reentrant=False)


def _class(module: nn.Module) -> str:
    """The name of a module's class, before `fully_shard` changed it for a unit of its own (torch 2.15)."""
    return type(module).__name__.removeprefix("FSDP")
