"""Add an fp16 model for GPUs to a bundle, if its answers agree with those of fp32.

The layers from the first to the last with weights compute in 16 bits; the scaling of the pixels, and the nodes after
the last layer, such as a softmax, keep 32. On the CPU, ONNX Runtime (1.31) rounds the weights of such a model but
computes in 32 bits, so only the server, which compares the answers on its GPU, can detect an overflow in 16 bits.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from deeplightning.export.bundle import added, card_of, golden_inputs, session_of
from deeplightning.faults import CheckpointError
from deeplightning.runfolder import RunFolder

MAX_DIFFERENCE = 0.02
"""Maximum difference between an answer of the fp16 model, from 0 to 1, and that of fp32; the same as the server's."""

MAX_FP16 = 65504.0
"""Largest number in fp16. Attention masks have larger ones, which are clipped."""

FLOAT_INPUTS = {"Resize": (1, 2)}
"""Inputs that must stay float32: operator to indices."""

FLOAT_OPERATORS = {
    *("Range", "CumSum", "TopK", "RoiAlign", "NonMaxSuppression", "Upsample", "Constant", "ConstantOfShape"),
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "EyeLike", "Bernoulli"),
    *("If", "Loop", "Scan", "DequantizeLinear", "QuantizeLinear"),
}
"""Operators that lack fp16 on some devices, or have an explicit type."""


HAVE_WEIGHTS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
SERVE_FP32 = "serve it with serve.precision=fp32"


def halve(folder: RunFolder) -> float:
    """Add `model.fp16.onnx` to `folder.bundle`; on failure, leave the bundle as it was. In `bundle.json` only the
    digests change: the answers are compared with those of fp32, and older servers ignore the file.

    Returns:
        the maximum difference between an answer to a golden sample and that in fp32.

    Raises:
        CheckpointError: the bundle is damaged, the model cannot be converted, or differs by more than `MAX_DIFFERENCE`.
        SetupError: the folder cannot be written.
    """
    card = card_of(folder)
    with added(folder, card, folder.bundle_fp16.name) as model:
        _write_fp16(folder.bundle_model, model)
        inputs = golden_inputs(folder, card)
        expected = session_of(folder.bundle_model).run(None, inputs)[0]
        difference = float(np.abs(session_of(model).run(None, inputs)[0] - expected).max())
        if not difference <= MAX_DIFFERENCE:  # so that nan is refused as well
            raise CheckpointError(
                f"The bundle {folder.bundle} is not served in fp16: its answers to the golden samples would differ "
                f"by up to {difference:.3g} from those in fp32, and at most {MAX_DIFFERENCE:g} is allowed; "
                f"{SERVE_FP32}."
            )
    return difference


def _write_fp16(model: Path, file: Path) -> None:
    """Convert the model to fp16, and write it to `file`.

    Raises:
        CheckpointError: no layer has weights, or the model cannot be converted.
    """
    try:
        loaded = shape_inference.infer_shapes(onnx.load(model))
        _Fp16Converter(loaded.graph).convert(*weighted_layers(model, loaded.graph.node, "fp16"))
        onnx.save(loaded, file)
        session_of(file)
    except CheckpointError:
        raise
    except Exception as error:  # neither onnx nor onnxruntime documents which it may raise
        raise CheckpointError(f"{model} cannot be converted to fp16 ({error}); {SERVE_FP32}.") from error


def weighted_layers(model: Path, nodes: Sequence[onnx.NodeProto], precision: str) -> tuple[int, int]:
    """Return the indices of the first and the last layer with weights, between pixel scaling and probabilities.

    Raises:
        CheckpointError: no layer has weights.
    """
    found = [number for number, node in enumerate(nodes) if node.op_type in HAVE_WEIGHTS]
    if not found:
        raise CheckpointError(f"{model} has no layer that {precision} would make quicker; {SERVE_FP32}.")
    return found[0], found[-1]


class _Fp16Converter:
    """Converts nodes of a graph to fp16, and inserts a Cast between fp16 and float32 nodes.

    ONNX Runtime's own converter (1.31) creates two nodes with the same name if two float32 nodes share an input, and
    rounds values that float32 nodes pass to each other.
    """

    def __init__(self, graph: onnx.GraphProto):
        self.graph = graph
        typed = [*graph.input, *graph.output, *graph.value_info]
        self.floats = {value.name for value in typed if value.type.tensor_type.elem_type == TensorProto.FLOAT}
        self.weights = {one.name: one for one in graph.initializer if one.data_type == TensorProto.FLOAT}
        self.halves: set[str] = set()
        self.other: dict[str, str] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.new_weights: list[onnx.TensorProto] = []

    def convert(self, first: int, last: int) -> None:
        """Convert the nodes from `first` to `last` to fp16 where possible; inputs and outputs of the graph stay."""
        outputs = {value.name for value in self.graph.output}
        for number, node in enumerate(list(self.graph.node)):
            in_fp16 = first <= number <= last and self._takes_fp16(node)
            for place, name in enumerate(node.input):
                half = in_fp16 and place not in FLOAT_INPUTS.get(node.op_type, ())
                if name in self.floats or name in self.weights:
                    node.input[place] = self._converted(name, half)
            self.nodes.append(node)
            if in_fp16:
                self._convert_outputs(node, outputs)
        used = {name for node in self.nodes for name in node.input}
        weights = [one for one in [*self.graph.initializer, *self.new_weights] if one.name in used]
        for field, values in (("node", self.nodes), ("initializer", weights), ("value_info", [])):
            self.graph.ClearField(field)
            getattr(self.graph, field).extend(values)

    def _takes_fp16(self, node: onnx.NodeProto) -> bool:
        if node.op_type in FLOAT_OPERATORS or node.domain not in ("", "ai.onnx"):
            return False
        always = FLOAT_INPUTS.get(node.op_type, ())
        names = [name for place, name in enumerate(node.input) if place not in always]
        return any(name in self.floats or name in self.weights for name in names)

    def _convert_outputs(self, node: onnx.NodeProto, outputs: set[str]) -> None:
        """Mark the float outputs of a node as fp16; cast outputs of the graph back to float32."""
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
        for place, name in enumerate(node.output):
            if name in outputs and name in self.floats:
                node.output[place] = self.other[name] = f"{name}.half"
                self.nodes.append(self._cast(node.output[place], name, TensorProto.FLOAT))
            elif name in self.floats:
                self.halves.add(name)

    def _converted(self, name: str, half: bool) -> str:
        """Return the name of a value in fp16 or float32; convert it once."""
        if half == (name in self.halves):
            return name
        if name not in self.other:
            self.other[name] = f"{name}.{'half' if half else 'float'}"
            if name in self.weights:
                values = numpy_helper.to_array(self.weights[name]).clip(-MAX_FP16, MAX_FP16).astype(np.float16)
                self.new_weights.append(numpy_helper.from_array(values, self.other[name]))
            else:
                kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
                self.nodes.append(self._cast(name, self.other[name], kind))
        return self.other[name]

    def _cast(self, source: str, target: str, kind: int) -> onnx.NodeProto:
        return helper.make_node("Cast", [source], [target], name=f"cast to {target}", to=kind)
