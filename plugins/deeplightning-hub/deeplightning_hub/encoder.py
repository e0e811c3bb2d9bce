"""Classify texts with a Hugging Face encoder from a local folder: nothing is downloaded, and no code in the folder is
run. Needs the extra `text`: pip install 'deeplightning[text]'.

B batch, L tokens, K classes.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deeplightning.model.sizes import check_sizes
from deeplightning.words import first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class FolderError(ValueError):
    """Raised if a model's folder is missing or invalid. Ends the run with exit code 3."""

    exit_code = 3


class Encoder(nn.Module):
    """A transformer from `transformers` with a classification head, such as BERT, RoBERTa or DistilBERT.

    The folder contains `config.json` and, unless the model is trained from scratch, the weights as `*.safetensors`;
    other weight files could run code and are not read. A head without weights is initialized randomly. The tokens come
    from `tokenizer.json` in the same folder: `data.module.params.tokenizer`.

    Args:
        folder: the model's folder, relative to the working directory.
        num_classes: K, at least 1.
        pretrained: load the folder's weights instead of random initialization.
        params: values that replace those in `config.json`, such as `hidden_dropout_prob`.

    Attributes:
        max_length: maximum number of tokens; None: no maximum.
        vocabulary_size: size of the vocabulary.
        padding: index of the token that attention ignores.

    Raises:
        ValueError: an argument is invalid.
        FolderError: the folder is missing or has no text model. It is a ValueError.
        ImportError: `transformers` is not installed.
    """

    def __init__(self, folder: str, num_classes: int, pretrained: bool = True, params: dict[str, Any] | None = None):
        super().__init__()
        check_sizes(num_classes=num_classes)
        path = Path(folder).expanduser().absolute()
        _check_folder(path, pretrained)
        os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"  # read at import
        try:
            from transformers import AutoConfig, AutoModelForSequenceClassification
            from transformers.utils import logging
        except ImportError as error:
            raise ImportError(f"{error.name}, of the extra `text`: pip install 'deeplightning[text]'") from error
        options: dict[str, object] = {"local_files_only": True, "trust_remote_code": False}
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # otherwise it lists the weights of the new head
        try:
            config = AutoConfig.from_pretrained(path, num_labels=num_classes, **(params or {}), **options)
            if pretrained:
                self.model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
                    path, config=config, use_safetensors=True, ignore_mismatched_sizes=True, **options
                )
            else:
                self.model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            reason = first_line(error)
            raise FolderError(f"{path} cannot be loaded as a Hugging Face model: {reason}") from error
        finally:
            logging.set_verbosity(verbosity)
        self.model.float().train()  # `from_pretrained` returns it in evaluation mode
        self.vocabulary_size: int = config.vocab_size
        self.padding: int = config.pad_token_id if config.pad_token_id is not None else 0
        self.max_length = _max_tokens(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, float (B, K), for tokens, int64 (B, L)."""
        first = torch.arange(tokens.shape[1], device=tokens.device) == 0
        # The first token is never masked: attention over no token is undefined.
        mask = (tokens != self.padding) | first  # (B, L)
        return self.model(input_ids=tokens, attention_mask=mask.long()).logits


def _check_folder(path: Path, pretrained: bool) -> None:
    if not path.is_dir():
        raise FolderError(
            f"{path} is not a folder; it must contain config.json and the weights of a model. Nothing is downloaded"
        )
    if not (path / "config.json").is_file():
        raise FolderError(f"{path} has no config.json, so it is not a Hugging Face model")
    try:
        settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FolderError(f"{path / 'config.json'} cannot be read: {error}") from error
    if isinstance(settings, dict) and "auto_map" in settings:
        raise FolderError(f"{path / 'config.json'} requires its own code (auto_map), which is never run here")
    if pretrained and not list(path.glob("*.safetensors")):
        raise FolderError(
            f"{path} has no *.safetensors; other weight files could run code and are not read. Save the model with "
            "save_pretrained(folder, safe_serialization=True), or train from scratch: pretrained: false"
        )


def _max_tokens(config: "PretrainedConfig") -> int | None:
    """Return the maximum number of tokens, or None. In RoBERTa and similar models positions start after the padding
    index."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or limit < 1:
        return None
    is_shifted = config.model_type in ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet", "xlm-roberta-xl")
    return int(limit) - (config.pad_token_id + 1 if is_shifted else 0)
