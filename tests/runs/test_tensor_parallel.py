"""Tensor parallelism: groups of processes split layers among them, learn what one process learns, and write and read
the checkpoints of every engine."""

import csv
import json
import shutil

import conftest
import pytest
import test_engines

from deeplightning.engine.checkpoint_io import read_checkpoint
from deeplightning.model.vit import ViT

OWN = '''\
"""Networks, tasks and callbacks of the tests of tensor parallelism."""

import json
import pathlib

import pytorch_lightning as pl
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from deeplightning.data.digits import Digits
from deeplightning.model.transformer import TextTransformer
from deeplightning.task.img_classif import ImageClassification


class Separate(nn.Module):
    """A network with a layer for each of queries, keys and values, and an embedding of grey levels."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.embedding, self.head_width = nn.Embedding(18, width), width // heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, width)
        self.classifier = nn.Linear(width, 10)

    def forward(self, images):
        states = self.embedding((images.flatten(1)[:, ::4] * 16).long().clamp(0, 17))
        q, k, v = (
            layer(states).unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.classifier((states + self.o_proj(found)).mean(1))


class Reads(nn.Module):
    """A picture's grey levels are tokens to a transformer that reads texts."""

    def __init__(self):
        super().__init__()
        self.text = TextTransformer(10, 18, width=16, num_layers=1, num_heads=4, dropout=0.0, max_length=64)

    def forward(self, images):
        return self.text((images.flatten(1) * 16).long().clamp(0, 17))


class Splits(ImageClassification):
    """A task that splits its network itself."""

    def parallelize(self, mesh):
        plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        parallelize_module(self.network, mesh, plan | {"o_proj": RowwiseParallel()})


class ByRank(Digits):
    """Data that take their part by the rank in the whole job."""

    def train_dataloader(self):
        loader = super().train_dataloader()
        loader.sampler.num_replicas, loader.sampler.rank = self.trainer.world_size, self.trainer.global_rank
        return loader



class Weighs(pl.Callback):
    """Notes the bytes of parameters, gradients and optimizer state that each process holds."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def bytes_of(self, tensors):
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradients = self.bytes_of(p.grad for p in module.parameters())

    def on_train_end(self, trainer, module):
        parameters = self.bytes_of(p.data for p in module.parameters())
        states = trainer.optimizers[0].state.values()
        state = self.bytes_of(v for state in states for v in state.values() if v.ndim)
        held = {"parameters": parameters, "gradients": self.gradients, "state": state}
        (self.folder / f"held-{trainer.global_rank}").write_text(json.dumps(held))
'''

VIT = "model.network={type: deeplightning.model.vit.ViT, params: {num_classes: 10, num_channels: 1, image_size: 8, "
VIT += "patch_size: 2, width: 16, depth: 2, heads: 4}}"
LEARNS = [VIT, *test_engines.LEARNS[1:]]
# Engine, processes, and the parts that the data are split into.
SPREAD = {engine: (engine, 2, 2) for engine in test_engines.SPREAD}
SPREAD |= {"null": ("null", 1, 1), "tensor on 2": ("fsdp", 2, 1), "tensor on 4": ("fsdp", 4, 2)}


def spread(name):
    """Overrides and number of processes; each optimizer step sees 32 samples twice."""
    engine, processes, parts = SPREAD[name]
    more = ["engine.params={tensor_parallel: 2}"] if "tensor" in name else []
    return [f"engine.backend={engine}", f"data.batch_size={32 // parts}", *more], processes


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A working directory with the code above."""
    folder = tmp_path_factory.mktemp("tensor")
    (folder / "own.py").write_text(conftest.OWN)
    (folder / "tensor_own.py").write_text(OWN)
    return folder


@pytest.fixture(scope="module")
def run(jobs, command, tiny, own):
    """`run(name, override, …)` trains so spread."""

    def start(name, *overrides, code=0):
        more, ranks = spread(name)
        begin = jobs if "deepspeed" in SPREAD[name][0] else command
        outcome = begin("train", tiny, f"engine.processes={ranks}", *more, *overrides, cwd=own, ranks=ranks)
        codes = {each.code for each in outcome.ranks or [outcome]}
        assert codes == {code} if code is not None else 0 not in codes, outcome
        return outcome

    return start


@pytest.fixture(scope="module")
def learned(run, tmp_path_factory):
    """`learned(name, epochs)` is a run of one config, and the folder with its notes; each runs once."""
    done = {}

    def start(name, epochs=2):
        if (name, epochs) not in done:
            notes = tmp_path_factory.mktemp("notes")
            weighs = f"train.callbacks=[{{type: tensor_own.Weighs, params: {{folder: '{notes}'}}}}]"
            weighs = [] if "deepspeed" in name else [weighs]
            done[name, epochs] = run(name, *LEARNS, *weighs, f"train.num_epochs={epochs}"), notes
        return done[name, epochs]

    return start


SLOW = pytest.mark.slow
TENSOR = ["tensor on 4", pytest.param("tensor on 2", marks=SLOW)]


@pytest.mark.slow
@pytest.mark.parametrize("name", TENSOR)
def test_processes_that_split_layers_learn_what_one_process_learns(name, learned, tracked, record_property):
    """The losses and metrics of each step and epoch are those of one process to 1e-5."""
    expected, found = (tracked(learned(which)[0].folder).series() for which in ("null", name))
    record_property("largest difference", _apart(expected, found))
    assert _apart(expected, found) <= 1e-5


@pytest.mark.parametrize("name", TENSOR)
def test_each_process_holds_the_bytes_that_the_plan_says(name, learned):
    """Half of a layer that is split, and of all its rows among the groups; Adam's state is twice as many."""
    _, notes = learned(name)
    _, processes, replicas = SPREAD[name]
    network = ViT(10, num_channels=1, image_size=8, patch_size=2, width=16, depth=2, heads=4)
    for rank in range(processes):
        expected = 0
        for parameter, tensor in network.named_parameters():
            rows, numbers = tensor.shape[0], tensor[0].numel()
            if ".attention.asked." in parameter or ".mlp.0." in parameter:
                rows //= 2
            if ".attention.out.weight" in parameter or ".mlp.3.weight" in parameter:
                numbers //= 2
            of_each = -(-rows // replicas)
            expected += 4 * numbers * len(range(rows)[rank // 2 * of_each : (rank // 2 + 1) * of_each])
        held = json.loads((notes / f"held-{rank}").read_text())
        assert held == {"parameters": expected, "gradients": expected, "state": 2 * expected}


AROUND = [pytest.param("tensor on 4", "null", marks=SLOW), ("null", "tensor on 4")]
AROUND += [
    pytest.param(before, after, marks=SLOW)
    for other in ("fsdp", "deepspeed_stage_3", "tensor on 2")
    for before, after in (("tensor on 4", other), (other, "tensor on 4"))
]


@pytest.mark.parametrize(("before", "after"), AROUND)
def test_a_checkpoint_moves_to_and_from_every_other_engine(before, after, run, learned, tracked, tmp_path):
    """One epoch under one engine, the second under the other; the end is that of a run under one process."""
    folder = tmp_path / "first"
    shutil.copytree(learned(before, epochs=1)[0].folder, folder)
    resumed = run(after, *LEARNS, f"train.resume_ckpt='{folder / 'last.ckpt'}'")
    (expected, _), found = learned("null"), tracked(resumed.folder).metrics["val_loss"]
    assert found == pytest.approx(tracked(expected.folder).metrics["val_loss"], abs=1e-5)
    weights = [read_checkpoint(each.folder / "last.ckpt")["state_dict"] for each in (expected, resumed)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert weights[1][name].shape == tensor.shape, name


SEPARATE = "model.network={type: tensor_own.Separate}"
PLAN = "{'*.q_proj|*.k_proj|*.v_proj': colwise, '*.o_proj|*.embedding': rowwise, classifier: colwise_gathered}"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([SEPARATE, f"engine.params.tensor_plan={PLAN}"], id="a plan in the config"),
        pytest.param([SEPARATE, "model.module={type: tensor_own.Splits}"], id="a task's parallelize", marks=SLOW),
        pytest.param(["model.network={type: tensor_own.Reads}"], id="the plan of the text transformer", marks=SLOW),
    ],
)
def test_a_plan_comes_from_the_config_the_task_or_the_network(overrides, run, tracked):
    """Each of them leaves the losses as they are with one process to 1e-5."""
    settings = [each for each in overrides if "tensor_plan" not in each]
    one, two = (run(name, *LEARNS, *each) for name, each in (("null", settings), ("tensor on 2", overrides)))
    assert _apart(*(tracked(each.folder).series() for each in (one, two))) <= 1e-5


REFUSED = [
    (["engine.params.tensor_parallel=2"], "there is no plan for SimpleCNN: set `engine.params.tensor_plan`"),
    ([VIT.replace("heads: 4", "heads: 1")], "ViT cannot be split: 2 processes cannot share its heads of 1 evenly"),
    ([VIT, "engine.params.tensor_plan={'*.mpl.0': colwise}"], "no module fits '*.mpl.0'"),
    ([VIT, "data.module={type: tensor_own.ByRank}"], "processes of a tensor-parallel group were given different"),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED)
def test_a_run_that_cannot_be_split_ends_with_2(overrides, words, run):
    """One sentence says why, before the first step."""
    outcome = run("tensor on 2", *overrides, code=2)
    assert any(words in each.err for each in (outcome, *outcome.ranks)), outcome  # the first rank that fails says so


@SLOW
def test_a_killed_run_ends_bit_for_bit(run):
    """With dropout, weights and optimizer of a run that was killed and resumed are those of an uninterrupted one."""
    drops = [*LEARNS, "model.network.params.dropout=0.2", "train.checkpoint={every_n_steps: 1}"]
    resumes = [*drops, "train.resume_ckpt=auto", "logger.params.experiment_name=killed"]
    run("tensor on 4", *resumes, "train.callbacks=[{type: own.Killed, params: {epoch: 1, batch: 2}}]", code=None)
    resumed, whole = run("tensor on 4", *resumes), run("tensor on 4", *drops)
    assert "last.ckpt (step" in resumed.out
    test_engines.assert_same_bits(resumed, whole)


@SLOW
def test_later_stages_count_each_sample_once(run):
    """The test's metrics and predictions are those of one process; the bundle is exported."""
    stages = [*LEARNS, "stages=[train, test]", "test.ckpt=last", "train.export=true"]
    one, four = run("null", *stages), run("tensor on 4", *stages)
    expected, found = (json.loads((each.folder / "test_results.json").read_text()) for each in (one, four))
    assert found == pytest.approx(expected, abs=1e-5)
    rows = list(csv.DictReader((four.folder / "test_predictions.csv").read_text().splitlines()))
    assert [int(row["index"]) for row in rows] == list(range(150))
    assert (four.folder / "bundle").is_dir()


@SLOW
@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.precision=bf16"],
        ["engine.precision=bf16-true"],
        ["engine.params.cpu_offload=true"],
        ["engine.activation_checkpointing=[Block]", "engine.params.wrap=[Block]"],
        ["train.gradient_clip={value: 0.001, algorithm: value}"],
    ],
)
def test_settings_of_fsdp_go_with_it(overrides, run, tracked):
    """The validation's loss is that of one process, within what the precision allows."""
    plain = [each for each in overrides if "params" not in each]
    one, four = (run(name, *LEARNS, *each) for name, each in (("null", plain), ("tensor on 4", overrides)))
    expected, found = (tracked(each.folder).metrics["val_loss"] for each in (one, four))
    assert found == pytest.approx(expected, abs=0.02 if "bf16" in overrides[0] else 1e-5)


def _apart(expected, found):
    """The largest difference of two runs' losses and metrics."""
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
    pairs = (zip(points, found[name], strict=True) for name, points in expected.items())
    return max(abs(value - other) for points in pairs for (_, value), (_, other) in points)
