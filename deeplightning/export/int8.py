"""A bundle gets a second model, which computes in int8: several times quicker, and taken only where it stays as right.

Static quantization by ONNX Runtime: weights int8 per channel, activations uint8, with ranges found on validation images
(https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html). The scaling of the pixels and what
follows the last layer with weights, the softmax, stay float.

Weights take 7 of their 8 bits: processors without VNNI add two products in 16 bits, where 8 would overflow unnoticed,
and a bundle is judged here and served anywhere. That costs nothing in speed; int8 activations instead of uint8 would
cost nearly all that is gained. CPU-ms per picture of a resnet18 at 64 x 64, one thread, batch 1, 8 and 16, by a Xeon
with VNNI (ONNX Runtime 1.31, November 2026): float32 5.4, 3.2, 3.0; this 1.1, 0.8, 0.7; with int8 activations 4.6, 2.9,
2.5. A network of a few small layers gains nothing. Letters: N images, C channels, H height, W width.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = (
    "1"  # as in `deeplightning.export.bundle`, which the sorted imports leave for later
)

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from deeplightning.export.added import REFUSED, add_model, card_of, golden_samples, weighted_layers
from deeplightning.export.bundle import answers_of, digest_of, packed, session_of
from deeplightning.faults import CheckpointError, SetupError
from deeplightning.runfolder import RunFolder

CALIBRATION = 256
"""How many images, drawn evenly from the validation set, the ranges of activations are found on."""

MAX_FALL = 0.2
"""By how many points of a hundred the accuracy may fall."""

BATCH = 16

Labelled = Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]
"""Gives the validation set anew at each call, in batches: uint8 (N, C, H, W) and the numbers of their classes (N,)."""


def quantize(folder: RunFolder, validation: Labelled) -> dict[str, Any]:
    """Adds `model.int8.onnx` to `folder.bundle`, or leaves the bundle as it was.

    `bundle.json` is sealed anew. It gains the file's digest, the answers of this model to the golden samples
    (`golden.int8`), and under `int8` the figures: `accuracy` and `accuracy_fp32` (percent of the `images` validation
    images, each by its model in ONNX Runtime) and `calibration_images`.

    Returns:
        the figures.

    Raises:
        CheckpointError: the bundle is damaged, is for another task than classification, has nothing to quantize, or its
            accuracy would fall by more than `MAX_FALL`.
        SetupError: the folder cannot be written.
    """
    card = card_of(folder)
    if card["task"] != "image_classification":
        raise CheckpointError(
            f"The bundle {folder.bundle} is for {card['task']}; whether int8 stays as right is judged by the accuracy "
            f"of a classification only; {REFUSED}."
        )
    sample = _EvenSample(CALIBRATION)
    right, images = _right_answers(session_of(folder.bundle_model), validation, sample)
    if not images:
        raise CheckpointError(f"There are no validation images to judge {folder.bundle} in int8 by; {REFUSED}.")
    try:
        with tempfile.TemporaryDirectory() as place:
            model = _int8_model(folder.bundle_model, sample.images, Path(place))
            session = session_of(model)
            still_right, _ = _right_answers(session, validation)
            figures = {
                "accuracy": 100 * still_right / images,
                "accuracy_fp32": 100 * right / images,
                "images": images,
                "calibration_images": len(sample.images),
            }
            if 100 * (right - still_right) > MAX_FALL * images:
                raise CheckpointError(
                    f"The bundle {folder.bundle} is not served in int8: its accuracy on {images} validation images "
                    f"would fall from {figures['accuracy_fp32']:.2f} % to {figures['accuracy']:.2f} %, and at most "
                    f"{MAX_FALL:g} points are allowed; {REFUSED}."
                )
            card["files"][folder.bundle_int8.name] = digest_of(model)
            card["golden"]["int8"] = packed(answers_of(session, golden_samples(card)))
            add_model(folder, {**card, "int8": figures}, model, folder.bundle_int8.name)
    except OSError as error:
        raise SetupError(f"The bundle {folder.bundle} cannot be written: {error}.") from error
    return figures


class _EvenSample:
    """Keeps `size` of a stream of images, each with the same chance (Vitter 1985, algorithm R), the same each time."""

    def __init__(self, size: int):
        self.size, self.seen = size, 0
        self.images: list[np.ndarray] = []
        self._random = np.random.default_rng(0)

    def add(self, batch: np.ndarray) -> None:
        for image in batch:
            self.seen += 1
            if len(self.images) < self.size:
                self.images.append(image.copy())
            elif (place := self._random.integers(self.seen)) < self.size:
                self.images[place] = image.copy()


def _right_answers(
    session: onnxruntime.InferenceSession, validation: Labelled, sample: _EvenSample | None = None
) -> tuple[int, int]:
    """How many images get the right class, and of how many; `sample` sees them all."""
    right = number = 0
    for images, classes in validation():
        right += int((answers_of(session, images).argmax(1) == classes).sum())
        number += len(images)
        if sample is not None:
            sample.add(images)
    return right, number


def _int8_model(model: Path, images: list[np.ndarray], place: Path) -> Path:
    """The model quantized, as a file in `place`.

    Raises:
        CheckpointError: there is nothing in it to quantize, or ONNX Runtime cannot.
    """
    prepared, quantized = place / "prepared.onnx", place / "model.int8.onnx"
    try:
        with _quiet():
            # It folds what can be folded, and names the shapes; without symbols there is no need of sympy.
            quant_pre_process(model, prepared, skip_symbolic_shape=True)
            nodes = onnx.load(prepared).graph.node
            first, last = weighted_layers(model, nodes, "int8")
            quantize_static(
                prepared,
                quantized,
                _Reader(images),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                reduce_range=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=[node.name for node in [*nodes[:first], *nodes[last + 1 :]]],
                # What these give stays float until the next layer, or to the end: logits of 8 bits are coarse.
                extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]},
            )
    except CheckpointError:
        raise
    except Exception as error:  # neither onnx nor onnxruntime says which it may raise
        raise CheckpointError(f"ONNX Runtime cannot quantize {model} ({error}); {REFUSED}.") from error
    return quantized


class _Reader(CalibrationDataReader):
    """Images for the calibration, in batches."""

    def __init__(self, images: list[np.ndarray]):
        self._batches = iter([{"images": np.stack(images[at : at + BATCH])} for at in range(0, len(images), BATCH)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Quantization logs to the root logger, which would begin to print if it had no handler."""
    silent, root = logging.NullHandler(), logging.getLogger()
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)
