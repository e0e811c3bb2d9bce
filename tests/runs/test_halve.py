"""A bundle gets an fp16 model if its answers agree with fp32; older servers ignore it."""

import collections
import hashlib
import json

import numpy as np
import onnx
import pytest
import test_text_serving as texts
import torch
from exported import exported
from onnx import TensorProto, helper
from test_quantize import bundle, classifier, contents, pictures
from torch import nn

import deeplightning.export.fp16 as module
from deeplightning.export.bundle import packed
from deeplightning.export.fp16 import MAX_DIFFERENCE, halve
from deeplightning.faults import CheckpointError, SetupError
from deeplightning.runfolder import card_digest
from serve.bundle import TOLERANCES, Bundle, BundleError


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    """A run with both models, the contents before, and the measured difference."""
    folder = classifier(tmp_path_factory.mktemp("run"))
    before = contents(folder)
    return folder, before, halve(folder)


def test_the_bundle_gains_a_file_and_its_digest(halved):
    """Only the card's files and digest change, so an older server still verifies the bundle and serves fp32."""
    folder, before, difference = halved
    after = contents(folder)
    card, former = json.loads(after["bundle.json"]), json.loads(before["bundle.json"])
    assert after.keys() == before.keys() | {"model.fp16.onnx"}
    assert card["files"] == {**former["files"], "model.fp16.onnx": hashlib.sha256(after["model.fp16.onnx"]).hexdigest()}
    assert {key for key in card if card[key] != former[key]} == {"files", "digest"}
    assert card["digest"] == card_digest(card)
    assert 0 < difference < 0.001


def test_weights_take_16_bits_and_the_ends_stay_float(halved):
    """The scaling of pixels and softmax are computed in 32 bits; input and output are those of fp32."""
    graph = onnx.load(halved[0].bundle_fp16).graph
    kinds = collections.Counter(one.data_type for one in graph.initializer if len(one.dims) > 1)
    assert kinds == {TensorProto.FLOAT16: 3}
    order = [node.op_type for node in graph.node]
    assert order[:3] == ["Cast", "Div", "Cast"]
    assert order[-3:] == ["Gemm", "Cast", "Softmax"]
    assert [one.type.tensor_type.elem_type for one in graph.output] == [TensorProto.FLOAT]


def test_both_models_answer(halved):
    """fp16 answers like fp32 within the tolerance, but not identically."""
    images = pictures(100, seed=2)[0]
    ours, theirs = Bundle.open(halved[0].path), Bundle.open(halved[0].path, "fp16")
    assert (ours.precision, theirs.precision) == ("fp32", "fp16")
    expected, given = ours.predict(images), theirs.predict(images)
    np.testing.assert_allclose(given, expected, atol=0.002)
    assert not np.array_equal(given, expected)
    assert TOLERANCES["fp16"] == MAX_DIFFERENCE


@pytest.mark.parametrize("kind", ["text", "table_classification", "array_classification"])
def test_texts_rows_and_arrays_are_halved_too(kind, tmp_path):
    """Answers to rows, arrays, and texts of every length (attention, masks and layer norms) agree with fp32, and the
    server opens the model."""
    folder = texts.run_of(tmp_path) if kind == "text" else exported(tmp_path / "run", kind)[1]
    assert 0 < halve(folder) < 0.005
    ours, theirs = Bundle.open(folder.path), Bundle.open(folder.path, "fp16")
    np.testing.assert_allclose(theirs.predict(ours.samples), ours.predict(ours.samples), atol=0.005)


class Vast(nn.Module):
    """Weights that underflow in fp16, and others that overflow."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(90, 4, bias=False), nn.Linear(4, 3, bias=False))
        nn.init.constant_(self.layers[1].weight, 1e-9)
        self.layers[2].weight.data = torch.tensor([[1e6] * 4, [2e6] * 4, [3e6] * 4])

    def forward(self, images):
        return self.layers(images.float()).softmax(1)


def test_a_network_that_fp16_makes_worse_is_refused(tmp_path):
    """The message has the difference, the limit and the next step; the bundle stays as it was."""
    _, folder = exported(tmp_path, "image_classification", Vast().eval())
    before = contents(folder)
    message = r"is not served in fp16: .* at most 0\.02 is allowed; serve it with"
    with pytest.raises(CheckpointError, match=message) as caught:
        halve(folder)
    assert caught.value.exit_code == 4
    assert contents(folder) == before


def test_what_cannot_be_halved_says_so(tmp_path):
    """A network without weights cannot be converted, and the message says so."""

    class Mean(nn.Module):
        def forward(self, images):
            return torch.softmax(images.float().mean(dim=(2, 3)), dim=1)

    with pytest.raises(CheckpointError, match="has no layer that fp16 would make faster; serve it with"):
        halve(exported(tmp_path, "image_classification", Mean().eval())[1])


def test_the_same_again_replaces_the_model(halved):
    """The conversion is deterministic, and replaces the model."""
    before = contents(halved[0])
    assert halve(halved[0]) == halved[2]
    assert contents(halved[0]) == before


def test_a_server_checks_the_model_at_its_start(tmp_path):
    """A server without the fp16 model ends with a message that names the alternatives; one whose answers differ from
    the golden ones recommends fp32."""
    folder = classifier(tmp_path)
    with pytest.raises(BundleError, match=r"has no model\.fp16\.onnx: .*--precision fp32"):
        Bundle.open(folder.path, "fp16")
    halve(folder)
    card = json.loads(folder.bundle_card.read_text())
    card["golden"]["fp32"] = packed(np.array([[0.9, 0.05, 0.05]] * 5))
    folder.bundle_card.write_text(json.dumps({**card, "digest": card_digest(card)}))
    with pytest.raises(BundleError, match=r"the limit is 0\.02; serve it with serve\.precision=fp32"):
        Bundle.open(folder.path, "fp16")


def test_an_operator_without_fp16_and_all_around_the_layers_stay_in_float(tmp_path):
    """An operator without fp16 between two layers stays in float, and so do numbers before the first layer that fp16
    cannot hold, and a weight that both use."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], np.eye(4, dtype=np.float32).tobytes(), raw=True)
    large = helper.make_tensor("large", TensorProto.FLOAT, [], [1e6])
    axis = helper.make_tensor("axis", TensorProto.INT64, [], [1])
    nodes = [
        helper.make_node("Mul", ["x", "large"], ["far"]),
        helper.make_node("Div", ["far", "large"], ["near"]),
        helper.make_node("MatMul", ["near", "w"], ["a"]),
        helper.make_node("CumSum", ["a", "axis"], ["b"]),
        helper.make_node("Mul", ["a", "b"], ["c"]),
        helper.make_node("MatMul", ["c", "w"], ["d"]),
        helper.make_node("MatMul", ["near", "w"], ["e"]),
        helper.make_node("Add", ["d", "e"], ["f"]),
        helper.make_node("Mul", ["f", "large"], ["y"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    answers = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [given], [answers], [weight, large, axis])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    file, halves = tmp_path / "model.onnx", tmp_path / "halves.onnx"
    onnx.save(model, file)
    module._write_fp16(file, halves)
    onnx.checker.check_model(onnx.load(halves))
    given = np.array([[1, 2, 3, 4], [0.5, 0, 0, 1]], np.float32)
    (answers,) = module.session_of(halves).run(None, {"x": given})
    np.testing.assert_allclose(answers, 1e6 * (given * given.cumsum(1) + given), rtol=2e-3)
    assert answers.dtype == np.float32
    kinds = {one.name: one.data_type for one in onnx.load(halves).graph.initializer}
    assert kinds == {"w": TensorProto.FLOAT16, "large": TensorProto.FLOAT, "axis": TensorProto.INT64}


class Price(nn.Module):
    """Answers of about 250,000."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, rows):
        return self.layers(rows) * 50_000 + 250_000


def test_large_numbers_are_compared_relative_to_their_size(tmp_path):
    """A model with large outputs is accepted by its relative error, by `halve` and by the server."""
    folder = exported(tmp_path, "table_regression", Price().eval())[1]
    assert halve(folder) > MAX_DIFFERENCE
    Bundle.open(folder.path, "fp16")


def test_a_bundle_that_is_replaced_meanwhile_stays_as_it_is(tmp_path, monkeypatch):
    """A bundle that another process exports during the conversion is not mixed with the former one."""
    folder, write = classifier(tmp_path), module._write_fp16

    def slow(model, file):
        write(model, file)
        for name, content in bundle(3.0).items():
            (folder.bundle / name).write_bytes(content)

    monkeypatch.setattr(module, "_write_fp16", slow)
    with pytest.raises(SetupError, match="changed meanwhile"):
        halve(folder)
    assert contents(folder) == bundle(3.0)
