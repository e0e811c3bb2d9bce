"""Add a model to a bundle: read the card and the golden samples, and rewrite the bundle with one more file.

Letters: N samples, C channels, H height, W width.
"""

import base64
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from deeplightning.export.bundle import card_text, digest_of, replacement_for
from deeplightning.faults import CheckpointError
from deeplightning.image_spec import ImageSpec
from deeplightning.kinds import KINDS, row_spec
from deeplightning.runfolder import BUNDLE_FORMAT, Card, RunFolder, card_digest, golden_digest
from deeplightning.text_spec import TextSpec

HAVE_WEIGHTS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
SERVE_FP32 = "serve it with serve.precision=fp32"


def card_of(folder: RunFolder) -> Card:
    """Return the content of `bundle.json`, after checking its digests."""
    again = "write it again with `deeplightning export RUN`"
    try:
        card = json.loads(folder.bundle_card.read_bytes())
        whole = card["format"] == BUNDLE_FORMAT and card["digest"] == card_digest(card)
        whole = whole and card["files"][folder.bundle_model.name] == digest_of(folder.bundle_model)
        stored = card["golden"].get("digest")  # older bundles have none
        whole = whole and stored in (None, golden_digest(card))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The bundle {folder.bundle} cannot be read ({error}); {again}.") from error
    if not whole:
        raise CheckpointError(f"The bundle {folder.bundle} is damaged, or of another format; {again}.")
    return card


def add_model(folder: RunFolder, card: Card, model: Path, name: str) -> None:
    """Replace the bundle by a copy that also contains `model` under `name`."""
    with replacement_for(folder.bundle) as new:
        for file in card["files"].keys() - {name}:
            _link_or_copy(folder.bundle / file, new / file)
        shutil.copyfile(model, new / name)
        (new / folder.bundle_card.name).write_text(card_text(card), encoding="utf-8")


def golden_inputs(folder: RunFolder, card: Card) -> dict[str, np.ndarray]:
    """Return the golden samples as the model takes them, by the name of its input."""
    kind = KINDS[card["task"]]
    if kind.takes == "image":
        return {"images": golden_samples(card)}
    if kind.takes != "text":
        rows = row_spec(kind.takes, card["input"])
        given = card["golden"]["rows" if kind.takes == "table" else "arrays"]
        values: Any = given if kind.takes == "table" else map(base64.b64decode, given)
        return {kind.input: rows.stack([rows.prepare(one) for one in values])}
    values = card["input"]
    spec = TextSpec.from_dict(values, (folder.bundle / values["file"]).read_text(encoding="utf-8"))
    return {"tokens": spec.stack([spec.prepare(text) for text in card["golden"]["texts"]])}


def golden_samples(card: Card) -> np.ndarray:
    """Return the golden samples of a model of pictures, uint8 (N, C, H, W)."""
    spec = ImageSpec.from_dict(card["input"])
    decoded = [spec.decode(base64.b64decode(png)) for png in card["golden"]["pictures"]]
    return np.stack(decoded).transpose(0, 3, 1, 2).copy()


def weighted_layers(model: Path, nodes: Sequence[onnx.NodeProto], precision: str) -> tuple[int, int]:
    """Return the indices of the first and the last layer with weights, between pixel scaling and probabilities.

    Raises:
        CheckpointError: no layer has weights.
    """
    found = [number for number, node in enumerate(nodes) if node.op_type in HAVE_WEIGHTS]
    if not found:
        raise CheckpointError(f"{model} has no layer that {precision} would make quicker; {SERVE_FP32}.")
    return found[0], found[-1]


def _link_or_copy(file: Path, target: Path) -> None:
    """Put a file into another folder, as a hard link if the file system supports it, since weights are large."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copy2(file, target)
