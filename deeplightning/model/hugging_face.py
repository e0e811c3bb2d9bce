"""Any encoder of Hugging Face's that classifies texts, from a folder on this machine: nothing is downloaded, and no
code that the folder brings is run. Needs the extra `text`: pip install 'deeplightning[text]'.

B batch, L tokens, K classes.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deeplightning.words import first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class FolderError(ValueError):
    """The folder of a model is missing, or is none. Ends the run with exit code 3."""

    exit_code = 3


class Encoder(nn.Module):
    """A transformer of `transformers` with a head that tells classes apart: BERT, RoBERTa, DistilBERT and their kin.

    The folder holds `config.json`, and unless it is trained from scratch the weights as `*.safetensors`; other files of
    weights could run code and are not read. A head that the weights lack begins at random. The tokens come from the
    `tokenizer.json` of the same folder: `data.module.params.tokenizer`.

    Args:
        folder: of the model; relative to the working directory.
        num_classes: K, at least 1.
        pretrained: whether it begins with the folder's weights; else at random.
        params: values of its `config.json` to be changed, such as `hidden_dropout_prob`.

    Attributes:
        max_length: the most tokens that it takes; None: any number.
        vocabulary_size: how many tokens there may be.
        padding: the token that is not seen.

    Raises:
        ValueError: an argument is impossible.
        FolderError: there is no such folder, or no model of texts in it. It is a ValueError.
        ImportError: `transformers` is not installed.
    """

    def __init__(self, folder: str, num_classes: int, pretrained: bool = True, params: dict[str, Any] | None = None):
        super().__init__()
        if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 1:
            raise ValueError(f"num_classes must be a whole number of at least 1, not {num_classes!r}")
        path = Path(folder).expanduser().absolute()
        _check_folder(path, pretrained)
        os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"  # read when they are imported
        try:
            from transformers import AutoConfig, AutoModelForSequenceClassification
            from transformers.utils import logging
        except ImportError as error:
            raise ImportError(f"{error.name}, of the extra `text`: pip install 'deeplightning[text]'") from error
        known: dict[str, object] = {"local_files_only": True, "trust_remote_code": False}
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # it would list the head's weights, which it makes as we ask
        try:
            config = AutoConfig.from_pretrained(path, num_labels=num_classes, **(params or {}), **known)
            if pretrained:
                self.model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
                    path, config=config, use_safetensors=True, ignore_mismatched_sizes=True, **known
                )
            else:
                self.model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = first_line(error)
            raise FolderError(f"{path} cannot be used as a model of Hugging Face's: {reason}") from error
        finally:
            logging.set_verbosity(verbosity)
        self.model.float()
        self.vocabulary_size: int = config.vocab_size
        self.padding: int = config.pad_token_id if config.pad_token_id is not None else 0
        self.max_length = _most(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens int64 (B, L) to logits, float (B, K)."""
        first = torch.arange(tokens.shape[1], device=tokens.device) == 0
        # The first token is seen whatever it is: of nothing there is no mean.
        seen = (tokens != self.padding) | first  # (B, L)
        return self.model(input_ids=tokens, attention_mask=seen.long()).logits


def _check_folder(path: Path, pretrained: bool) -> None:
    if not path.is_dir():
        raise FolderError(
            f"{path} is no folder; it must hold config.json and the weights of a model. None is downloaded"
        )
    if not (path / "config.json").is_file():
        raise FolderError(f"{path} has no config.json, so it is no model of Hugging Face's")
    try:
        settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FolderError(f"{path / 'config.json'} cannot be read: {error}") from error
    if isinstance(settings, dict) and "auto_map" in settings:
        raise FolderError(f"{path / 'config.json'} asks for code of its own (auto_map), which is never run here")
    if pretrained and not list(path.glob("*.safetensors")):
        raise FolderError(
            f"{path} has no *.safetensors; other files of weights could run code and are not read. Save the model with "
            "save_pretrained(folder, safe_serialization=True), or train from scratch: pretrained: false"
        )


def _most(config: "PretrainedConfig") -> int | None:
    """Of tokens in a text. RoBERTa and its kin number positions from behind the padding's number on."""
    most = getattr(config, "max_position_embeddings", None)
    if most is None or most < 1:
        return None
    behind = config.model_type in ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet", "xlm-roberta-xl")
    return int(most) - (config.pad_token_id + 1 if behind else 0)
