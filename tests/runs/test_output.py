"""A network may return a dataclass, a dict or a tuple: `model.output` selects what the task uses, in training,
validation and export."""

import dataclasses
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import deeplightning as dl
from deeplightning.task.networks import MisfitError, SelectOutput, output_names
from serve.bundle import Bundle

NETWORKS = '''
import dataclasses

import torch
from torch import nn


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    logits: torch.Tensor


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)

    def outputs(self, images):
        hidden = self.first(images.flatten(1)).relu()
        return hidden, self.last(hidden)


class OfDataclass(Base):
    def forward(self, images):
        return Result(*self.outputs(images))


class OfDict(Base):
    def forward(self, images):
        return dict(zip(("hidden", "logits"), self.outputs(images)))


class OfTuple(Base):
    def forward(self, images):
        return self.outputs(images)


class InTraining(Base):
    """Like torchvision's inception: several outputs in training only."""

    def forward(self, images):
        hidden, logits = self.outputs(images)
        return (logits, hidden) if self.training else logits


class OfText(Base):
    def forward(self, images):
        return "logits"
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory with networks."""
    folder = tmp_path_factory.mktemp("networks")
    (folder / "networks.py").write_text(NETWORKS)
    return folder


def test_a_run_learns_and_answers_by_one_output(command, tiny, place, monkeypatch):
    """Training, validation and export use the selected output; the bundle returns only this tensor, as plain torch."""
    settings = ["model.network={type: networks.OfDataclass}", "model.output=logits", "train.export=true"]
    outcome = command("train", tiny, *settings, cwd=place, code=0)
    monkeypatch.syspath_prepend(place)
    import networks

    bundle = Bundle.open(outcome.folder)
    network = networks.OfDataclass()
    saved = load_file(outcome.folder / "bundle" / "weights.safetensors")
    network.load_state_dict({name.removeprefix("network."): v for name, v in saved.items() if "network" in name})
    pixels = np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8)).astype(np.uint8)
    given = (torch.from_numpy(pixels) / 255 - torch.tensor(bundle.spec.mean)) / torch.tensor(bundle.spec.std)
    expected = network.eval()(given).logits.softmax(1).detach().numpy()
    np.testing.assert_allclose(bundle.predict(pixels), expected, atol=1e-5)
    network = dl.load_run(outcome.folder).network()
    torch.testing.assert_close(network(given).softmax(1), torch.from_numpy(expected))
    sys.modules.pop("networks")


@pytest.mark.parametrize(
    ("network", "output", "message"),
    [
        ("OfDict", "logits", ""),
        ("OfTuple", "1", ""),
        ("InTraining", "0", ""),
        ("OfDict", "logit", "model.output: networks.OfDict gives a dict without 'logit'. Do you mean logits? It"),
        ("OfTuple", "2", "model.output: networks.OfTuple gives a tuple without 2. It has 0, 1"),
        ("OfDataclass", "__class__", "networks.OfDataclass gives a Result without '__class__'. It has hidden, logits"),
        ("OfText", "logits", "model.output: networks.OfText gives a str, which has no outputs by name"),
        ("OfDict", "hidden", "the data has 10 classes (labels 0 to 9), the network 16 outputs"),
        ("OfDict", "null", "gives a dict, not (B, K): one row per picture. Set model.output to one"),
        ("OfTuple", "null", "one row per picture. Set model.output to one of its outputs: 0, 1;"),
        ("OfDataclass", "null", "for example model.output=hidden"),
    ],
)  # fmt: skip
def test_a_dry_run_says_what_a_network_gives(command, tiny, place, network, output, message):
    """A missing or unknown name of an output is one error of the dry run, with exit code 2."""
    settings = [f"model.network={{type: networks.{network}}}", f"model.output={output}"]
    outcome = command("check", tiny, "--dry-run", *settings, cwd=place)
    assert (outcome.code, outcome.err.count("error: ")) == ((2, 1) if message else (0, 0)), outcome
    assert message in outcome.err


def test_names_of_all_kinds_of_outputs():
    """Outputs of Hugging Face, dataclasses, named tuples and dicts are selected by name; a tensor is kept as it is."""
    from transformers.modeling_outputs import SequenceClassifierOutput

    logits = torch.ones(2, 3)
    output = SequenceClassifierOutput(logits=logits, hidden_states=(logits,))
    assert output_names(output) == ["logits", "hidden_states"]
    assert SelectOutput("logits", "network")(None, (), output) is logits
    top = torch.topk(logits, 1)
    assert output_names(logits) == output_names(None) == []
    assert SelectOutput("logits", "network")(None, (), logits) is logits
    pair = dataclasses.make_dataclass("Pair", ["a", "b"])
    assert SelectOutput("b", "network")(None, (), pair(1, 2)) == 2
    assert SelectOutput(0, "network")(None, (), top) is top.values
    with pytest.raises(MisfitError, match="without 'a'"):
        SelectOutput("a", "network")(None, (), {"b": logits})


@pytest.mark.slow
def test_the_output_is_selected_in_every_stage_of_deepspeed(jobs, tiny, place):
    """Lightning removes the hooks of modules before a stage without training."""
    pytest.importorskip("deepspeed")
    settings = ["model.network={type: networks.OfDict}", "model.output=logits", "stages=[train, test]"]
    engine = "engine={backend: deepspeed_stage_2, processes: 2}"
    outcome = jobs("train", tiny, *settings, engine, "train.num_epochs=1", cwd=place, ranks=2, code=0)
    assert (outcome.folder / "test_results.json").is_file()
