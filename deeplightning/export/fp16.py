"""A bundle gets a second model, which computes in fp16 on a GPU: taken only where its answers stay those of fp32.

The layers from the first to the last with weights compute in 16 bits; the scaling of the pixels, and what follows the
last one, such as a softmax, keep 32. ONNX Runtime computes such a model on the CPU with rounded weights but in 32 bits
(1.31), so what overflows in 16 is noticed only by the server, which compares the answers on the GPU it serves from.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from deeplightning.export.added import REFUSED, add_model, card_of, golden_inputs, weighted_layers
from deeplightning.export.bundle import digest_of, session_of
from deeplightning.faults import CheckpointError, SetupError
from deeplightning.runfolder import RunFolder

MAX_DIFFERENCE = 0.02
"""How far an answer of the fp16 model, from 0 to 1, may be from that of fp32; the server has the same bound."""

LARGEST = 65504.0
"""Of fp16. Masks have larger numbers, of which only the size counts."""

ALWAYS_FLOAT = {"Resize": (1, 2)}
"""Inputs that take no fp16, by their place."""

KEEP_FLOAT = {
    *("Range", "CumSum", "TopK", "RoiAlign", "NonMaxSuppression", "Upsample", "Constant", "ConstantOfShape"),
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "EyeLike", "Bernoulli"),
    *("If", "Loop", "Scan", "DequantizeLinear", "QuantizeLinear"),
}
"""Operators that have no fp16 form everywhere, or name their type themselves."""


def halve(folder: RunFolder) -> float:
    """Adds `model.fp16.onnx` to `folder.bundle`, or leaves the bundle as it was. Of `bundle.json` only the digests
    change: the model's answers are compared with those of fp32, and a server of before ignores the file.

    Returns:
        the largest difference of an answer to a golden sample from that in fp32.

    Raises:
        CheckpointError: the bundle is damaged, the model cannot be converted, or differs by more than `MAX_DIFFERENCE`.
        SetupError: the folder cannot be written.
    """
    card = card_of(folder)
    try:
        with tempfile.TemporaryDirectory() as place:
            model = _fp16_model(folder.bundle_model, Path(place))
            inputs = golden_inputs(folder, card)
            expected = session_of(folder.bundle_model).run(None, inputs)[0]
            difference = float(np.abs(session_of(model).run(None, inputs)[0] - expected).max())
            if not difference <= MAX_DIFFERENCE:  # so that nan is refused as well
                raise CheckpointError(
                    f"The bundle {folder.bundle} is not served in fp16: its answers to the golden samples would differ "
                    f"by up to {difference:.3g} from those in fp32, and at most {MAX_DIFFERENCE:g} is allowed; "
                    f"{REFUSED}."
                )
            card["files"][folder.bundle_fp16.name] = digest_of(model)
            add_model(folder, card, model, folder.bundle_fp16.name)
    except OSError as error:
        raise SetupError(f"The bundle {folder.bundle} cannot be written: {error}.") from error
    return difference


def _fp16_model(model: Path, place: Path) -> Path:
    """The model in fp16, as a file in `place`.

    Raises:
        CheckpointError: there is no layer with weights in it, or it cannot be converted.
    """
    file = place / "model.fp16.onnx"
    try:
        loaded = shape_inference.infer_shapes(onnx.load(model))
        _Halves(loaded.graph).convert(*weighted_layers(model, loaded.graph.node, "fp16"))
        onnx.save(loaded, file)
        session_of(file)
    except CheckpointError:
        raise
    except Exception as error:  # neither onnx nor onnxruntime documents which it may raise
        raise CheckpointError(f"{model} cannot be converted to fp16 ({error}); {REFUSED}.") from error
    return file


class _Halves:
    """A graph some of whose nodes come to compute in fp16; where the two meet, a Cast is put between.

    (The converter that ONNX Runtime ships, 1.31, gives two nodes the same name where two that stay in float share an
    input, and rounds what such nodes hand to each other.)
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
        """Has the nodes from the first to the last compute in fp16, where they can; inputs and outputs stay."""
        outputs = {value.name for value in self.graph.output}
        for number, node in enumerate(list(self.graph.node)):
            in_fp16 = first <= number <= last and self._takes_fp16(node)
            for place, name in enumerate(node.input):
                half = in_fp16 and place not in ALWAYS_FLOAT.get(node.op_type, ())
                if name in self.floats or name in self.weights:
                    node.input[place] = self._as_half(name) if half else self._as_float(name)
            self.nodes.append(node)
            if in_fp16:
                self._give_halves(node, outputs)
        used = {name for node in self.nodes for name in node.input}
        weights = [one for one in [*self.graph.initializer, *self.new_weights] if one.name in used]
        for field, values in (("node", self.nodes), ("initializer", weights), ("value_info", [])):
            self.graph.ClearField(field)
            getattr(self.graph, field).extend(values)

    def _takes_fp16(self, node: onnx.NodeProto) -> bool:
        if node.op_type in KEEP_FLOAT or node.domain not in ("", "ai.onnx"):
            return False
        always = ALWAYS_FLOAT.get(node.op_type, ())
        names = [name for place, name in enumerate(node.input) if place not in always]
        return any(name in self.floats or name in self.weights for name in names)

    def _give_halves(self, node: onnx.NodeProto, outputs: set[str]) -> None:
        """Its float results are of fp16 from here on; one that the graph gives is made float again."""
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
        for place, name in enumerate(node.output):
            if name in outputs and name in self.floats:
                node.output[place] = self.other[name] = f"{name}.half"
                self.nodes.append(self._cast(node.output[place], name, TensorProto.FLOAT))
            elif name in self.floats:
                self.halves.add(name)

    def _as_half(self, name: str) -> str:
        return name if name in self.halves else self._changed(name, "half", TensorProto.FLOAT16)

    def _as_float(self, name: str) -> str:
        return self._changed(name, "float", TensorProto.FLOAT) if name in self.halves else name

    def _changed(self, name: str, word: str, kind: int) -> str:
        """The same values in the other type: made once."""
        if name not in self.other:
            self.other[name] = f"{name}.{word}"
            if name in self.weights:
                values = numpy_helper.to_array(self.weights[name]).clip(-LARGEST, LARGEST).astype(np.float16)
                self.new_weights.append(numpy_helper.from_array(values, self.other[name]))
            else:
                self.nodes.append(self._cast(name, self.other[name], kind))
        return self.other[name]

    def _cast(self, source: str, target: str, kind: int) -> onnx.NodeProto:
        return helper.make_node("Cast", [source], [target], name=f"cast to {target}", to=kind)
