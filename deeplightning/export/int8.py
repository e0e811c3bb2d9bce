"""Add an int8 model to a bundle of classes: several times faster, and accepted only if it stays nearly as accurate.

ONNX Runtime quantizes (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html): weights int8 per
channel, activations uint8. Quantization is static, with activation ranges calibrated on the validation set; nodes
before the first and after the last layer with weights, such as pixel scaling and softmax, stay float. For
texts it is dynamic, as usual for transformers: only products with weights are int8, and each batch has its own ranges,
so an answer depends slightly on the other texts in its batch.

Weights use 7 of their 8 bits: processors without VNNI add two products in 16 bits, where 8 bits would overflow
silently, and a bundle may be served on any machine. That costs no speed; int8 activations instead of uint8 would cost
nearly the whole gain. CPU-ms per picture of a resnet18 at 64 x 64, one thread, batch 1, 8 and 16, on a Xeon with VNNI
(ONNX Runtime 1.31, November 2026): float32 5.4, 3.2, 3.0; this 1.1, 0.8, 0.7; with int8 activations 4.6, 2.9, 2.5. A
network of a few small layers gains nothing. Letters: N samples.
"""

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # as in `deeplightning.export.bundle`, which is imported after onnxruntime

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from deeplightning.export.bundle import added_file, answers_of, card_of, golden_inputs, packed, session_of
from deeplightning.export.fp16 import HAVE_WEIGHTS, SERVE_FP32, weighted_layers
from deeplightning.faults import CheckpointError
from deeplightning.kinds import KINDS, Kind
from deeplightning.runfolder import Card, RunFolder

CALIBRATION_SAMPLES = 256
"""Number of validation samples, drawn uniformly, that calibrate the activation ranges."""

MAX_FALL_POINTS = 0.2
"""Maximum fall of the accuracy, in percentage points."""

BATCH_SIZE = 16

Labelled = Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]
"""Return a new iterator over the validation set at each call, in batches: prepared samples, uint8 (N, C, H, W), int64
(N, L) or float32 (N, …), and the truth: class numbers (N,)."""


def quantize(folder: RunFolder, validation: Labelled) -> dict[str, Any]:
    """Add `model.int8.onnx` to `folder.bundle`; on failure, leave the bundle as it was.

    `bundle.json` gets the file's digest, the answers of this model to the golden samples (`golden.int8`), and, under
    `int8`, the accuracy of both models in ONNX Runtime in percent, `accuracy` and `accuracy_fp32`. `images`, `texts`,
    `rows` or `arrays` is the number of samples, and `calibration_images` and so on the number of samples for
    calibration.

    Returns:
        the content of `int8`.

    Raises:
        CheckpointError: the bundle is damaged, does not answer with classes, has nothing to quantize, or its accuracy
            falls by more than `MAX_FALL_POINTS`.
        SetupError: the folder cannot be written.
    """
    card = card_of(folder)
    kind = classification_kind(folder, card)
    noun = kind.nouns
    before, number = _accuracy(session_of(folder.bundle_model), validation)
    if not number:
        raise CheckpointError(f"There are no validation {noun} to judge {folder.bundle} in int8; {SERVE_FP32}.")
    samples = None if kind.takes == "text" else _sample(validation, number)
    with added_file(folder, card, folder.bundle_int8.name) as model:
        _write_int8(folder.bundle_model, samples, model, kind.input)
        session = session_of(model)
        after, _ = _accuracy(session, validation)
        least = before - MAX_FALL_POINTS
        if after < least - 1e-9:
            raise CheckpointError(
                f"The bundle {folder.bundle} is not served in int8: its accuracy on {number} validation {noun} would "
                f"be {after:.4g} instead of {before:.4g}, and the limit is {least:.4g}; {SERVE_FP32}."
            )
        figures: dict[str, Any] = {"accuracy": after, "accuracy_fp32": before, noun: number}
        if samples is not None:
            figures[f"calibration_{noun}"] = len(samples)
        card["golden"]["int8"] = packed(answers_of(session, golden_inputs(folder, card)[kind.input]))
        card["int8"] = figures
    return figures


def classification_kind(folder: RunFolder, card: Card) -> Kind:
    """Return the kind of a bundle's task; raise CheckpointError if it does not answer with classes."""
    kind = KINDS[card["task"]]
    if kind.gives != "classification":
        raise CheckpointError(
            f"The bundle {folder.bundle} is for {card['task']}, and int8 is judged by the accuracy of classes; "
            f"{SERVE_FP32}."
        )
    return kind


def _accuracy(session: onnxruntime.InferenceSession, validation: Labelled) -> tuple[float, int]:
    """Return the accuracy of a model in percent, and the number of samples."""
    right = [answers_of(session, inputs).argmax(1) == truth for inputs, truth in validation()]
    found = np.concatenate([np.empty(0, bool), *right])
    return (100 * float(found.mean()) if len(found) else 0.0), len(found)


def _sample(validation: Labelled, number: int) -> list[np.ndarray]:
    """Return at most `CALIBRATION_SAMPLES` of `number` samples, drawn uniformly with a fixed seed."""
    chosen = {*np.random.default_rng(0).permutation(number)[:CALIBRATION_SAMPLES].tolist()}
    position = itertools.count()
    return [one.copy() for inputs, _ in validation() for one in inputs if next(position) in chosen]


def _write_int8(model: Path, samples: list[np.ndarray] | None, quantized: Path, name: str) -> None:
    """Quantize the model, whose input is `name`, and write it to `quantized`; calibrate with `samples`; None: dynamic
    ranges. Raise CheckpointError if it has nothing to quantize, or ONNX Runtime fails."""
    prepared = quantized.with_name("prepared.onnx")
    try:
        with _quiet():
            # Folds constants and infers shapes; symbolic shapes would need sympy.
            quant_pre_process(model, prepared, skip_symbolic_shape=True)
            loaded = onnx.load(prepared)
            nodes = loaded.graph.node
            first, last = weighted_layers(model, nodes, "int8")
            weights = {one.name: one for one in loaded.graph.initializer}
            # ONNX Runtime 1.24 quantizes a batch of matrices, but cannot multiply by it.
            products = [node for node in nodes if node.op_type == "MatMul"]
            batched = [n.name for n in products if any(len(weights[i].dims) > 2 for i in n.input if i in weights)]
            weight_options: Any = {"per_channel": True, "reduce_range": True, "weight_type": QuantType.QInt8}
            if samples is None:
                # A Gemm becomes a MatMul with a transposed weight, which would contradict the inferred shapes.
                loaded.graph.ClearField("value_info")
                onnx.save(loaded, prepared)
                quantize_dynamic(
                    prepared,
                    quantized,
                    op_types_to_quantize=sorted(HAVE_WEIGHTS & {"Gemm", "MatMul"}),
                    nodes_to_exclude=batched,
                    **weight_options,
                )
            else:
                quantize_static(
                    prepared,
                    quantized,
                    _Reader(samples, name),
                    quant_format=QuantFormat.QDQ,
                    activation_type=QuantType.QUInt8,
                    nodes_to_exclude=batched + [node.name for node in [*nodes[:first], *nodes[last + 1 :]]],
                    # Their outputs stay float until the next layer or the end: logits of 8 bits are too coarse.
                    extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]},
                    **weight_options,
                )
            if not any(one.data_type == onnx.TensorProto.INT8 for one in onnx.load(quantized).graph.initializer):
                raise CheckpointError(f"{model} has no layer that int8 would make faster; {SERVE_FP32}.")
    except CheckpointError:
        raise
    except Exception as error:  # neither onnx nor onnxruntime documents its exceptions
        raise CheckpointError(f"ONNX Runtime cannot quantize {model} ({error}); {SERVE_FP32}.") from error


class _Reader(CalibrationDataReader):
    """Reads samples for the calibration, in batches."""

    def __init__(self, samples: list[np.ndarray], name: str):
        starts = range(0, len(samples), BATCH_SIZE)
        self._batches = iter([{name: np.stack(samples[at : at + BATCH_SIZE])} for at in starts])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence quantization, which logs to the root logger; without a handler, that would print."""
    silent, root = logging.NullHandler(), logging.getLogger()
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)
