"""Text classification: predict the class of a text, with its probability.

Shapes: B batch, L tokens of the longest text, K classes.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deeplightning.config.part_config import PartConfig
from deeplightning.task.classes import Classification
from deeplightning.task.networks import MisfitError, check_trained_names, try_network
from deeplightning.task.supervised import Batch
from deeplightning.text_spec import TextSpec


class TextClassification(Classification):
    """Trains `model.network` on batches of {"tokens": int64 (B, L), "label": int64 (B,), "index": int64 (B,)}.

    The data module provides `text_spec`, which splits texts into tokens, and `class_names`; both are saved in the
    checkpoint. If the network has the attributes `max_length` (the most tokens that it accepts) and `padding`, they are
    compared with the data.
    """

    kind = "text_classification"
    input_name = "tokens"
    sample = "text"

    def __init__(self, cfg: PartConfig):
        super().__init__(cfg)
        self.text_spec: TextSpec | None = None

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.text_spec = getattr(getattr(self.trainer, "datamodule", None), "text_spec", self.text_spec)

    # ---- inputs

    def inputs(self, batch: Batch) -> Tensor:
        """Return the tokens; raise MisfitError if a text has more than the network accepts."""
        tokens, most = super().inputs(batch), getattr(self.network, "max_length", None)
        if most is not None and tokens.shape[1] > most:
            raise MisfitError(
                f"a text of the data has {tokens.shape[1]} tokens, and the network takes at most {most}; set "
                f"model.network.params.max_length={tokens.shape[1]} if it has this param, or cut texts: "
                f"data.module.params.max_length={most} in training, with cut_always=true everywhere",
                "model.network",
            )
        return tokens

    def try_out(self, network: nn.Module) -> None:
        """Pass two short texts, one with the highest token, through the network; raise MisfitError on a misfit."""
        spec = self.text_spec
        if spec is None:
            return
        name = self.cfg.model.network.type
        padding = getattr(network, "padding", spec.padding)
        if padding != spec.padding:
            raise MisfitError(f"{name} uses token {padding} for padding, the data {spec.padding}", "model.network")
        tokens = torch.tensor([[spec.size - 1, spec.size - 1], [spec.size - 1, spec.padding]])
        message = f"{name} does not take the data's tokens, 0 to {spec.size - 1}, as int64 (B, L)"
        self.check_outputs(try_network(network, tokens, message))

    # ---- checkpoints

    def travels(self) -> dict[str, object]:
        if self.text_spec is None:
            return {}
        spec = self.text_spec
        return {"text_spec": spec.to_dict(), "content": spec.content, "class_names": self.class_names}

    def arrives(self, saved: dict[str, Any]) -> None:
        """Restore the spec; raise MisfitError if the tokens of the current data differ from those of the training."""
        spec = TextSpec.from_dict(saved["text_spec"], saved["content"])
        if self.text_spec is None:
            self.text_spec, self.class_names = spec, saved["class_names"]
        elif any(getattr(spec, name) != getattr(self.text_spec, name) for name in ("tokenizer", "content", "lower")):
            raise MisfitError(
                f"the checkpoint was trained with a vocabulary of {spec.size:,} tokens, which differs from that of the "
                f"data ({self.text_spec.size:,} tokens): the training file, seed, fold or vocabulary has changed; use "
                "those of that run, or its bundle's vocabulary.txt as data.module.params.vocabulary",
                "data.module",
            )
        else:
            check_trained_names(self.class_names, saved["class_names"])

    # ---- export

    def exported(self, model: nn.Module) -> nn.Module:
        """Prepare a model for export; `text_spec` then also has the most tokens that the network accepts."""
        found = super().exported(model)
        assert self.text_spec is not None
        self.text_spec = replace(self.text_spec, limit=getattr(self.network, "max_length", None))
        return found
