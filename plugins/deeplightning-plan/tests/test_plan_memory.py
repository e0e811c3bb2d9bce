"""`deeplightning plan --memory` predicts memory and time of a run without a GPU."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deeplightning_plan.gpu_cards import card_of
from deeplightning_plan.memory_table import Gpus, gpus_of, json_of, plan_memory, text_of
from deeplightning_plan.memory_tracker import MemoryTracker
from deeplightning_plan.torch_private import fake_tensors
from torch import nn

from deeplightning.config.examine import load_config
from deeplightning.data.data_errors import DataError
from deeplightning.data.text import TextData
from deeplightning.faults import ConfigError

GIB = 2**30
ROOT = Path(__file__).resolve().parents[3]
CONFIG = """\
seed: 7
data: {module: {type: planned_own.Data, params: {size: SIZE}}, batch_size: BATCH}
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: NETWORK
  optimizer: {type: torch.optim.AdamW, params: {lr: 0.0001}}
  loss: {type: torch.nn.CrossEntropyLoss}
  metrics: {acc: {type: deeplightning.task.metrics.Accuracy}}
engine: {precision: bf16}
train: {max_steps: 1000}
"""
OWN = """\
import pytorch_lightning as pl, torch
from torch import nn
class Data(pl.LightningDataModule):
    def __init__(self, cfg, size): super().__init__(); self.size = size
    def example_batch(self, n):
        return {"image": torch.rand(n, 3, self.size, self.size), "label": torch.zeros(n, dtype=torch.int64)}
class Half(nn.Module):
    def __init__(self): super().__init__(); self.layer = nn.Linear(192, 192)
    def forward(self, x): return x + self.layer(x)
class Blocks(pl.LightningModule):
    def __init__(self, cfg):
        super().__init__()
        self.blocks, self.scale = nn.ModuleList([Half(), Half()]), nn.Parameter(torch.tensor(1.0))
    def training_step(self, batch, n):
        x = batch["image"].flatten(1)
        for block in self.blocks: x = block(x)
        return (self.scale * x).square().mean()
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
class Bare(pl.LightningDataModule):
    def __init__(self, cfg): super().__init__()
class Branches(nn.Module):
    def __init__(self): super().__init__(); self.layer = nn.Linear(3 * 8 * 8, 10)
    def forward(self, images):
        answers = self.layer(images.flatten(1))
        return answers if answers.sum() > 0 else -answers
class OwnLoop(pl.LightningModule):
    def __init__(self, cfg):
        super().__init__(); self.automatic_optimization = False; self.network = Branches().layer
    def training_step(self, batch, n):
        optimizer = self.optimizers()
        loss = self.network(batch["image"].flatten(1)).square().mean()
        self.manual_backward(loss / 2)
        if n % 2:
            optimizer.step(); optimizer.zero_grad()
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
"""
TEXTS = {"loader": None, "num_workers": 0, "num_splits": None, "fold": 0, "batch_size": 2, "sampler": None}
VIT = "{type: deeplightning.model.vit.ViT, params: {num_classes: 10, "
VIT_L = VIT + "image_size: 224, patch_size: 16, width: 1024, depth: 24, heads: 16}}"
SMALL = VIT + "image_size: 8, patch_size: 2, width: 32, depth: 3, heads: 2}}"


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Working directory, and import root, with a user's data modules and networks."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "planned_own.py").write_text(OWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.chdir(folder)
        yield folder


def config(here, network, size=8, batch=16, *overrides):
    path = here / "config.yaml"
    path.write_text(CONFIG.replace("SIZE", str(size)).replace("BATCH", str(batch)).replace("NETWORK", network))
    return load_config(str(path), list(overrides))


def rows_of(plan):
    return {(row.engine, bool(row.recompute)): row for row in plan.rows}


@pytest.fixture(scope="module")
def large(here):
    """Plan, setting and config of a ViT-L/16 on one H100."""
    cfg = config(here, VIT_L, 224, 64)
    plan, setting = plan_memory(cfg, gpus_of("1xH100"), None)
    return plan, setting, cfg


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "measured"),
    [
        *(("null", 15.9), ("ddp", 17.0), ("fsdp", 15.8)),
        *(("deepspeed_stage_1", 13.7), ("deepspeed_stage_2", 13.7), ("deepspeed_stage_3", 14.3)),
    ],
)
def test_the_peak_on_an_h100_is_planned(engine, measured, large):
    """For a ViT-L/16 with AdamW in bf16-mixed and batches of 64, the plan is within 15 % of benchmarks/engines.md."""
    assert rows_of(large[0])[engine, False].peak / GIB == pytest.approx(measured, rel=0.15)


@pytest.mark.slow
def test_a_plan_names_what_fits_the_batch_and_the_time(large):
    """Recomputing activations halves the memory, allows a larger batch, and takes more time."""
    plan, setting, cfg = large
    assert plan.block == "Block"
    text = "\n".join(text_of(plan, setting, cfg))
    for words in ("303,311,882 parameters", "proposal   null", "1,000 steps in"):
        assert words in text
    rows = rows_of(plan)
    assert rows["null", True].peak < rows["null", False].peak / 2  # activations are most of it
    assert rows["null", True].largest > 2 * rows["null", False].largest > 64
    assert 1.1 < rows["null", True].seconds[1] / rows["null", False].seconds[1] < 1.4
    engines = json.loads(json_of(plan, setting, cfg))["engines"]
    assert [entry["engine"] for entry in engines if entry["proposed"]] == ["null"]


def test_a_small_network_is_bound_by_launches_and_holds_the_workspaces_of_cublas(here):
    """A CNN of 14,538 parameters in bf16 with batches of 32 used 67.0 MiB and 2.0 ms per step on an H200; steps with
    CUDA graphs have no launches."""
    plans = {}
    for compiled in ("false", "graphs"):
        overrides = ["engine.precision=bf16", "engine.gpus=auto", f"engine.compile={compiled}"]
        cfg = load_config(str(ROOT / "configs" / "base.yaml"), overrides)
        plans[compiled] = rows_of(plan_memory(cfg, gpus_of("1xH200"), None)[0])["null", False]
    eager = plans["false"]
    assert eager.peak / 2**20 == pytest.approx(67.0, rel=0.15)
    assert eager.seconds[0] < 2.0e-3 < 1.5 * eager.seconds[1]
    assert plans["graphs"].seconds[1] < eager.seconds[0] / 10


@pytest.mark.slow
def test_shares_of_eight_gpus_on_two_machines(here):
    """Sharded parameters, gradients and states take less than a seventh of the memory per process of ddp."""
    cfg = config(here, SMALL)
    plan, setting = plan_memory(cfg, Gpus(8, 10**6, None), 2)
    rows, number = rows_of(plan), plan.parameters
    assert setting.world == 16
    unsharded = rows["ddp", False].held
    assert unsharded["parameters"] == 4 * number
    for engine, kinds in (("fsdp", ("parameters", "gradients", "state")), ("deepspeed_stage_3", ("gradients",))):
        for kind in kinds:
            assert rows[engine, False].held[kind] < unsharded[kind] / 7
    assert all(row.fits is not None for row in plan.rows)
    assert "proposal" in "\n".join(text_of(plan, setting, cfg))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [("fsdp", True), ("deepspeed_stage_1", False), ("fsdp", False)])
def test_the_largest_batch_fits_and_one_that_is_larger_does_not(here, engine):
    """A plan with 0.9 of the largest batch fits, and one with 1.1 of it does not: autocast's 16-bit copies of the
    weights do not grow with the batch."""
    network = VIT + "image_size: 8, patch_size: 2, width: 512, depth: 4, heads: 4}}"
    gpus = gpus_of("2x1GB")

    def planned(batch):
        return rows_of(plan_memory(config(here, network, 8, batch), gpus, None)[0])[engine]

    largest = planned(2).largest
    assert 50 < largest < 5_000
    assert planned(int(largest * 0.9)).fits
    assert not planned(int(largest * 1.1) + 1).fits


@pytest.mark.slow
def test_a_plan_of_texts_counts_the_longest_one(here):
    """Activations are those of a batch with the training set's longest text, and grow with its length."""

    def activations(words):
        (here / "texts.tsv").write_text("sentence\tlabel\n" + "a b c\t0\n" * 20 + " ".join(["d"] * words) + "\t1\n")
        module = "data.module={type: deeplightning.data.text.TextData, params: {train: texts.tsv}}"
        task = "model.module={type: deeplightning.task.text_classif.TextClassification}"
        params = "params: {num_classes: 2, vocabulary_size: 9}"
        network = f"{{type: deeplightning.model.transformer.TextTransformer, {params}}}"
        cfg = config(here, network, 8, 16, module, task, f"data.root='{here}'")
        plan = plan_memory(cfg, gpus_of("80GB"), None)[0]
        assert plan.partial is None
        return rows_of(plan)["null", False].kinds["activations"]

    short, long = activations(120), activations(480)
    assert 0 < 3.5 * short < long < 16 * short, (short, long)


def test_a_plan_of_texts_that_are_elsewhere_counts_those_of_max_length(here):
    """A plan uses texts of `max_length` if the data is missing; without it the error names the missing file."""
    cfg = SimpleNamespace(seed=1, data=SimpleNamespace(**TEXTS, root=str(here)))
    assert TextData(cfg, "nowhere.tsv", max_length=100).longest_batch(2)["tokens"].shape == (2, 100)
    with pytest.raises(DataError, match=r"nowhere\.tsv is missing"):
        TextData(cfg, "nowhere.tsv", max_length=None).longest_batch(2)


def test_a_network_that_branches_on_values_is_planned_in_part(here):
    """Its parameters and gradients are known, and the table says that it is partial."""
    cfg = config(here, "{type: planned_own.Branches}")
    plan, setting = plan_memory(cfg, gpus_of("80GB"), None)
    assert "branches on values" in plan.partial
    held = rows_of(plan)["null", False].held
    assert held["parameters"] == held["gradients"] == 4 * plan.parameters
    assert "partial" in "\n".join(text_of(plan, setting, cfg))


def test_data_without_an_example_are_planned_in_part(here):
    """The plan names the missing `example_batch`."""
    cfg = config(here, SMALL, 8, 16, "data.module={type: planned_own.Bare}")
    assert "example_batch" in plan_memory(cfg, None, None)[0].partial


def test_a_loop_of_ones_own_is_counted(here):
    """A step of a custom training loop consists of all batches until the optimizer steps."""
    cfg = config(here, SMALL, 8, 16, "model.module={type: planned_own.OwnLoop}")
    plan, _ = plan_memory(cfg, None, None)
    held = rows_of(plan)["null", False].held
    assert plan.partial is None
    assert held["state"] == 2 * held["parameters"] + 4 * 2  # AdamW's two moments, and a step count per tensor


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("8x80GB", (8, 80 * 10**9)),
        ("4xV100-16GB", (4, 16 * 10**9)),
        ("8xH100", (8, 80 * 10**9)),
        ("A100", (1, 80 * 10**9)),
        ("2x 24GiB", (2, 24 * GIB)),
    ],
)
def test_gpus_are_named_by_size_or_card(words, found):
    """COUNTxSIZE and COUNTxCARD give number and memory; the count is optional."""
    assert gpus_of(words)[:2] == found


@pytest.mark.parametrize("words", ["8xB9000", "0x80GB", "8x", "", "eight"])
def test_a_device_that_is_not_in_the_table_is_named(words):
    """The error says that the card is unknown, or shows the format."""
    with pytest.raises(ConfigError, match=r"not in the table|must be"):
        gpus_of(words)


def test_cards_are_found_by_their_full_names():
    """The names are those that NVIDIA's driver reports; another card whose name begins alike is unknown."""
    assert card_of("NVIDIA H100 80GB HBM3").name == "H100 80GB HBM3"
    assert card_of("NVIDIA A100-SXM4-40GB").memory == 40 * 10**9
    assert card_of("NVIDIA A1000") is None


def test_the_command_plans_a_run(command, tiny, place):
    """The command prints a table, or JSON."""
    done = command("plan", tiny, "--memory", "--gpus", "8xH100", "--nodes", "2", cwd=place, code=0)
    assert "processes: 16" in done.out
    assert re.search(r"^fsdp .* yes ", done.out, re.M)
    assert re.search(r"^proposal +\w+", done.out, re.M)
    done = command("plan", tiny, "--memory", "--format", "json", cwd=place)
    engines = {row["engine"] for row in json.loads(done.out)["engines"]}
    assert engines >= {"null", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"}


def test_parameters_and_optimizer_state_of_a_training_are_as_planned(fit, tiny, place, monkeypatch):
    """In one process they are equal to the byte."""
    settings = ["model.optimizer.type=torch.optim.Adam", "model.optimizer.params={lr: 0.01}"]
    monkeypatch.chdir(place)
    plan, _ = plan_memory(load_config(tiny, settings), None, None)
    held = rows_of(plan)["null", False].held
    done = fit(*settings)
    (optimizer,) = done.trainer.optimizers
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    assert held["parameters"] == sum(p.numel() * p.element_size() for p in done.task.parameters())
    assert held["state"] == sum(value.numel() * value.element_size() for value in state)


@pytest.mark.parametrize(
    ("device", "precision", "tf32", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", False, 989.4e12),
        ("NVIDIA H100 PCIe", "32-true", True, 378e12),
        ("NVIDIA A100-SXM4-40GB", "32-true", False, 19.5e12),
        ("NVIDIA L4", "16-mixed", False, 121e12),
        ("NVIDIA L40S", "bf16-true", False, 362e12),
        ("NVIDIA A10", "32-true", True, 62.5e12),
        ("Tesla T4", "16-mixed", False, 65e12),
        ("NVIDIA H100 80GB HBM3", "64-true", False, None),
    ],
)
def test_the_peak_of_a_gpu_follows_from_its_name_and_the_precision(device, precision, tf32, expected):
    """It is None if it is unknown; then no time is planned."""
    assert card_of(device).peak(precision, tf32) == expected


def test_fake_tensors_are_counted_as_real_ones_and_as_mem_tracker_counts():
    """Peaks of fake and real tensors are equal to the byte, and within 1 % of torch's MemTracker."""
    from torch.distributed._tools.mem_tracker import MemTracker

    def example():
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)), torch.rand(32, 64)

    def peak():
        held, (network, inputs) = MemoryTracker(), example()
        held.add("parameters", network.parameters())
        held.add("activations", [inputs])
        with held:
            network(inputs).sum().backward()
        return max(sum(kinds.values()) for kinds in held.peaks.values())

    with fake_tensors():
        counted = peak()
    assert counted == peak()
    (network, inputs), tracker = example(), MemTracker()
    tracker.track_external(network, inputs)
    with tracker:
        network(inputs).sum().backward()
    total = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert counted == pytest.approx(total, rel=0.01)


def test_blocks_of_the_task_itself_and_a_scalar_are_planned(here):
    """fsdp wraps the items of the task's list in any case; a scalar cannot be sharded by its first dimension."""
    cfg = config(here, SMALL, 8, 16, "model.module={type: planned_own.Blocks}")
    plan, _ = plan_memory(cfg, gpus_of("2x80GB"), None)
    assert (plan.block, rows_of(plan)["fsdp", False].wrap) == ("Half", None)


@pytest.mark.slow
def test_accumulated_batches_are_samples_of_their_step(here):
    """Samples per second do not depend on `accumulator_factor`."""

    def table(factor):
        cfg = config(here, SMALL, 8, 16, f"train.accumulator_factor={factor}")
        plan, setting = plan_memory(cfg, gpus_of("1xH100"), None)
        return [line for line in text_of(plan, setting, cfg) if line.startswith(("null", "fsdp"))]

    assert table(1) == table(4)
