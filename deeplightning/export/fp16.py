"""Add an fp16 model for GPUs to a bundle, if its answers agree with those of fp32.

The layers from the first to the last with weights compute in 16 bits; the scaling of the pixels, and the nodes after
the last layer, such as a softmax, keep 32. On the CPU, ONNX Runtime (1.31) rounds the weights of such a model but
computes in 32 bits, so only the server, which compares the answers on its GPU, can detect an overflow in 16 bits.
"""

from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, shape_inference
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

from deeplightning.export.bundle import added_file, card_of, golden_inputs, session_of
from deeplightning.faults import CheckpointError
from deeplightning.runfolder import RunFolder

MAX_DIFFERENCE = 0.02
"""Maximum difference between the answers in fp16 and in fp32, relative to the largest, or to 1; as in the server."""

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
    with added_file(folder, card, folder.bundle_fp16.name) as model:
        _write_fp16(folder.bundle_model, model)
        inputs = golden_inputs(folder, card)
        expected = session_of(folder.bundle_model).run(None, inputs)[0]
        difference = float(np.abs(session_of(model).run(None, inputs)[0] - expected).max())
        allowed = MAX_DIFFERENCE * max(1.0, float(np.abs(expected).max()))
        if not difference <= allowed:  # so that nan is refused as well
            raise CheckpointError(
                f"The bundle {folder.bundle} is not served in fp16: its answers to the golden samples would differ "
                f"by up to {difference:.3g} from those in fp32, and at most {allowed:g} is allowed; {SERVE_FP32}."
            )
    return difference


def _write_fp16(model: Path, file: Path) -> None:
    """Convert the model to fp16, and write it to `file`; raise CheckpointError if no layer has weights, or the model
    cannot be converted."""
    try:
        loaded = shape_inference.infer_shapes(onnx.load(model))
        _halve_between(loaded, *weighted_layers(model, loaded.graph.node, "fp16"))
        onnx.save(loaded, file)
        session_of(file)
    except CheckpointError:
        raise
    except Exception as error:  # neither onnx nor onnxruntime documents which it may raise
        raise CheckpointError(f"{model} cannot be converted to fp16 ({error}); {SERVE_FP32}.") from error


def _halve_between(model: onnx.ModelProto, first: int, last: int) -> None:
    """Convert the nodes from `first` to `last` to fp16: they become a graph with float32 inputs and outputs, which ONNX
    Runtime converts. So the nodes around them can exchange numbers outside the range of fp16."""
    graph, nodes = model.graph, [*model.graph.node]
    inner, outer = nodes[first : last + 1], nodes[:first] + nodes[last + 1 :]
    produced = {name for node in inner for name in node.output}
    outside = {name for node in outer for name in node.input} | {value.name for value in graph.output}
    weights = {one.name: one for one in graph.initializer}
    used = dict.fromkeys(name for node in inner for name in node.input if name and name not in produced)
    inner_weights = [weights[name] for name in used if name in weights and name not in outside]
    infos = {one.name: helper.make_tensor_value_info(one.name, one.data_type, one.dims) for one in graph.initializer}
    infos |= {value.name: value for value in [*graph.input, *graph.output, *graph.value_info]}
    inputs = [infos[name] for name in used if name not in weights or name in outside]
    outputs = [infos[name] for node in inner for name in node.output if name in outside]
    inner_infos = [value for value in graph.value_info if value.name in produced - outside]
    middle = helper.make_graph(inner, "middle", inputs, outputs, inner_weights, value_info=inner_infos)
    part = helper.make_model(middle, opset_imports=model.opset_import, ir_version=model.ir_version)
    blocked = {*DEFAULT_OP_BLOCK_LIST} - {"Min", "Max"}
    half = convert_float_to_float16(part, keep_io_types=True, disable_shape_infer=True, op_block_list=blocked).graph
    producer = {name: number for number, node in enumerate(half.node) for name in node.output}
    needs = {n: [producer[name] for name in node.input if name in producer] for n, node in enumerate(half.node)}
    ordered = [half.node[number] for number in TopologicalSorter(needs).static_order()]  # the conversion appends casts
    for field, values in (
        ("node", [*nodes[:first], *ordered, *nodes[last + 1 :]]),
        ("initializer", [*(one for one in graph.initializer if one.name in outside), *half.initializer]),
        ("value_info", []),
    ):
        graph.ClearField(field)
        getattr(graph, field).extend(values)


def weighted_layers(model: Path, nodes: Sequence[onnx.NodeProto], precision: str) -> tuple[int, int]:
    """Return the indices of the first and the last layer with weights.

    Raises:
        CheckpointError: no layer has weights.
    """
    found = [number for number, node in enumerate(nodes) if node.op_type in HAVE_WEIGHTS]
    if not found:
        raise CheckpointError(f"{model} has no layer that {precision} would make faster; {SERVE_FP32}.")
    return found[0], found[-1]
