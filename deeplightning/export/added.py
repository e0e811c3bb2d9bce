"""Add a model to a bundle: read the card and the golden samples, and rewrite the bundle with one more file."""

import base64
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from deeplightning.export.bundle import card_text, digest_of, replacement_for
from deeplightning.faults import CheckpointError, SetupError
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
        whole = whole and card["golden"]["digest"] == golden_digest(card)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The bundle {folder.bundle} cannot be read ({error}); {again}.") from error
    if not whole:
        raise CheckpointError(f"The bundle {folder.bundle} is damaged, or of another format; {again}.")
    return card


@contextlib.contextmanager
def added(folder: RunFolder, card: Card, name: str) -> Iterator[Path]:
    """Yield the path of a new file, which becomes the file `name` of the bundle when the block succeeds. The block may
    change the card.

    Raises:
        SetupError: the folder cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / name
            yield file
            card["files"][name] = digest_of(file)
            with replacement_for(folder.bundle) as new:
                for other in card["files"].keys() - {name}:
                    _link_or_copy(folder.bundle / other, new / other)
                shutil.copyfile(file, new / name)
                (new / folder.bundle_card.name).write_text(card_text(card), encoding="utf-8")
    except OSError as error:
        raise SetupError(f"The bundle {folder.bundle} cannot be written: {error}.") from error


def golden_inputs(folder: RunFolder, card: Card) -> dict[str, np.ndarray]:
    """Return the golden samples as the model takes them, by the name of its input."""
    kind = KINDS[card["task"]]
    golden, values = card["golden"], card["input"]
    if kind.takes == "image":
        pictures = ImageSpec.from_dict(values)
        decoded = [pictures.decode(base64.b64decode(png)) for png in golden["pictures"]]
        return {kind.input: np.stack(decoded).transpose(0, 3, 1, 2).copy()}
    if kind.takes == "text":
        texts = TextSpec.from_dict(values, (folder.bundle / values["file"]).read_text(encoding="utf-8"))
        return {kind.input: texts.stack([texts.prepare(text) for text in golden["texts"]])}
    rows, given = row_spec(kind.takes, values), golden[kind.input]
    inputs: Any = given if kind.takes == "table" else map(base64.b64decode, given)
    return {kind.input: rows.stack([rows.prepare(one) for one in inputs])}


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
