"""Sharding engines hold only a part of the tensors in each process; their checkpoints are complete or absent."""

import functools
import json
import re
import shutil
from types import SimpleNamespace

import conftest
import pytest
import pytorch_lightning as pl
import torch
from tiny import weights

from deeplightning.config.examine import load_config
from deeplightning.engine.checkpoint_io import copy_checkpoint, remove_checkpoint
from deeplightning.engine.checkpoint_reading import read_checkpoint
from deeplightning.engine.zero import DeepSpeed, sizes
from deeplightning.faults import CheckpointError
from deeplightning.run.resume import resumption

OWN = '''\
"""Networks and callbacks for the tests of sharding."""

import atexit
import json
import os
import pathlib

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from deeplightning.task.img_classif import ImageClassification


class All(ImageClassification):
    """Gives its optimizer the frozen parameters too."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.001)


class Rare(ImageClassification):
    """Updates a metric on rank 0 only."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.rare = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        if self.global_rank == 0:
            self.rare.update(1.0)
        return super().training_step(batch, batch_idx)


class Listed(ImageClassification):
    """Has a parameter in a list, which has no forward pass."""

    learns = False

    def __init__(self, cfg):
        super().__init__(cfg)
        self.extra = nn.ParameterList([nn.Parameter(torch.full((3,), 0.25), requires_grad=self.learns)])


class Learns(Listed):
    learns = True


class Wide(nn.Module):
    """A network that records how many bytes of parameters its process holds after its construction."""

    def __init__(self, folder=None, tied=False):
        super().__init__()
        self.entry = nn.Linear(64, 256)
        self.middle = nn.ModuleList([nn.Linear(256, 256) for _ in range(3)])
        if tied:
            self.middle[2].weight = self.middle[0].weight
        self.head = nn.Linear(256, 10)
        nn.init.constant_(self.head.bias, 0.5)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 64))
        if folder is not None:
            held = sum(p.nbytes for p in self.parameters() if not p.is_meta)
            pathlib.Path(folder, f"built-{os.environ.get('LOCAL_RANK', 0)}").write_text(str(held))

    def forward(self, images):
        values = self.entry(images.flatten(1) * self.scale).relu()
        for layer in self.middle:
            values = layer(values).relu()
        return self.head(values)


class Running(nn.Module):
    """A network whose batch norm keeps running means."""

    def __init__(self, **_):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images):
        return self.layers(images)


class Precise(Running):
    """A network that records the precision of its parameters and of its layers' outputs."""

    def __init__(self, folder):
        super().__init__()
        self.folder = pathlib.Path(folder)

    def forward(self, images):
        logits = super().forward(images)
        weight = self.layers[1].weight
        if self.training:
            (self.folder / "precision").write_text(f"{weight.dtype} {self.layers[1](images.flatten(1)).dtype}")
        return logits


class Scalar(Running):
    """A network with a zero-dimensional parameter."""

    def __init__(self, **_):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, images):
        return super().forward(images) * self.temperature


class Scaled(nn.Module):
    """A loss with a parameter that belongs to no optimizer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, logits, labels):
        return nn.functional.cross_entropy(logits * self.scale, labels)


class Weighs(pl.Callback):
    """Records the bytes of parameters and optimizer state that each process holds between two steps."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def on_train_end(self, trainer, module):
        bytes_of = lambda tensors: sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
        held = [p.data for p in module.network.parameters()]
        held += [p.ds_tensor for p in module.network.parameters() if hasattr(p, "ds_tensor")]
        optimizer = trainer.optimizers[0]
        optimizer = getattr(optimizer, "optimizer", optimizer)
        kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        found = json.dumps({"parameters": bytes_of(held), "state": bytes_of(kept)})
        (self.folder / f"held-{trainer.global_rank}").write_text(found)


class FullDisk(pl.Callback):
    """Makes the disk of rank 1 full from the second epoch on."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1 and trainer.global_rank == 1:
            import deeplightning.engine.checkpoint_io as io

            def full(number):
                raise OSError(28, "No space left on device")

            io.os.fsync = full


class Ends(pl.Callback):
    """Prints at the end of the process whether its process group is still open."""

    def __init__(self, fails):
        self.fails = fails
        atexit.register(lambda: print("open" if distributed.is_initialized() else "left", flush=True))

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        assert distributed.is_initialized()
        if self.fails:
            raise KeyError("a fault of the user's")
'''

TOTAL_BYTES = 4 * (64 * 256 + 256 + 3 * (256 * 256 + 256) + 256 * 10 + 10)
# By default small parameters are not sharded, and those needed again soon stay gathered.
KEPT = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
SHARD_ALL = f"engine.params={{config: {{zero_optimization: {{{', '.join(f'stage3_{name}: 0' for name in KEPT)}}}}}}}"
SHARDING = {"fsdp": "engine.params={wrap: [Linear]}", "deepspeed_stage_3": SHARD_ALL}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A working directory with the code above."""
    folder = tmp_path_factory.mktemp("sharding")
    (folder / "own.py").write_text(conftest.OWN)
    (folder / "sharded_own.py").write_text(OWN)
    return folder


@pytest.fixture(scope="module")
def trained(jobs, tiny, own, tmp_path_factory):
    """`trained(engine, override, …)` trains in two processes; it returns the outcome and the folder of its records."""

    def run(engine, *overrides, ranks=2, code=0):
        records = tmp_path_factory.mktemp("records")
        outcome = jobs(
            "train",
            tiny,
            f"model.network={{type: sharded_own.Wide, params: {{folder: '{records}'}}}}",
            "model.optimizer={type: torch.optim.Adam, params: {lr: 0.001}}",
            f"train.callbacks=[{{type: sharded_own.Weighs, params: {{folder: '{records}'}}}}]",
            "train.num_epochs=1",
            f"engine={{backend: {engine}, processes: {ranks}}}",
            *overrides,
            cwd=own,
            ranks=ranks,
            code=code,
        )
        return outcome, records

    return run


@pytest.fixture(scope="module")
def held(trained):
    """`held(engine)` returns the outcome of a run and the records of its ranks; each engine runs once."""

    @functools.cache
    def run(engine):
        outcome, records = trained(engine, *([SHARDING[engine]] if engine in SHARDING else []))
        of_rank = [json.loads((records / f"held-{rank}").read_text()) for rank in (0, 1)]
        return outcome, of_rank, [int((records / f"built-{rank}").read_text()) for rank in (0, 1)]

    return run


def engines(*names, slow=()):
    """Run a test under each engine; under the `slow` ones only with all tests."""
    return pytest.mark.parametrize("engine", [*names, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)])


@engines("fsdp", "deepspeed_stage_2", "deepspeed_stage_3", slow=["deepspeed_stage_1"])
def test_each_process_holds_a_part(engine, held):
    """Each of two processes holds at most 60 % of Adam's state and, under fsdp and stage 3, of the parameters; together
    they hold all. Under these two the second process never holds the complete network, not even during construction.
    The checkpoint has the values that the network's constructor sets after it has made its layers."""
    outcome, of_rank, built = held(engine)
    is_sharded = engine in SHARDING
    for kind, total in (("state", 2 * TOTAL_BYTES), *([("parameters", TOTAL_BYTES)] * is_sharded)):
        of_each = [records[kind] for records in of_rank]
        assert max(of_each) <= 0.6 * total, kind
        assert sum(of_each) >= total, kind
    assert built == [TOTAL_BYTES, 0 if is_sharded else TOTAL_BYTES]
    found = weights(outcome.folder / "last.ckpt")
    assert found["network.scale"].tolist() == torch.linspace(0.5, 1.5, 64).tolist()
    assert float((found["network.head.bias"] - 0.5).abs().max()) < 0.1


def assert_close(found, expected, atol=1e-5, rtol=1e-3):
    """Compare the weights of two runs; the first may have more."""
    values = weights(found.folder / "last.ckpt")
    for name, tensor in weights(expected.folder / "last.ckpt").items():
        torch.testing.assert_close(values[name], tensor, atol=atol, rtol=rtol)


@engines("fsdp", slow=["deepspeed_stage_2", "deepspeed_stage_3"])
def test_weights_that_two_layers_share_stay_shared(engine, trained):
    """A network with tied weights trains as under ddp; the checkpoint has the initial values of a loss's parameters."""
    settings = ["model.network.params.tied=true", "model.loss={type: sharded_own.Scaled}"]
    expected, found = (trained(name, *settings)[0] for name in ("ddp", engine))
    values = weights(found.folder / "last.ckpt")
    assert [v.tolist() for n, v in values.items() if n.endswith("scale") and "network" not in n] == [[0.5]]
    assert torch.equal(values["network.middle.0.weight"], values["network.middle.2.weight"])
    assert_close(found, expected)


@engines("fsdp", slow=["deepspeed_stage_2", "deepspeed_stage_3"])
def test_part_of_a_network_may_be_frozen(engine, trained):
    """`trainable: head` keeps the initial values of the rest, also after resuming, and trains the head as under ddp."""
    settings = ["model.trainable=head", "train.num_epochs=2"]
    expected, _ = trained("ddp", *settings)
    first, _ = trained(engine, *settings, "train.num_epochs=1")
    resumed, _ = trained(engine, *settings, f"train.resume_ckpt='{first.folder}'")
    assert_close(resumed, expected)


@engines("deepspeed_stage_3", slow=["fsdp", "deepspeed_stage_2"])
def test_a_run_may_begin_with_other_weights(engine, held, trained):
    """`model.init_from` initialises sharded parameters: with a learning rate of 0 the run ends with these weights."""
    before, _, _ = held("fsdp")
    still = "model.optimizer={type: torch.optim.SGD, params: {lr: 0.0}}"
    outcome, _ = trained(engine, still, f"model.init_from='{before.folder}'")
    expected, found = weights(before.folder / "last.ckpt"), weights(outcome.folder / "last.ckpt")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "wrap", ["[entry, middle.1]", *(pytest.param(w, marks=pytest.mark.slow) for w in ("[head]", "60000"))]
)
def test_units_of_fsdp_are_classes_names_or_a_size(wrap, trained, held):
    """The training result does not depend on how a network is split into FSDP units."""
    assert_close(trained("fsdp", f"engine.params={{wrap: {wrap}}}")[0], held("fsdp")[0], atol=1e-6, rtol=1e-5)


UNIT = ["engine.params={wrap: [Liner]}"], 2, "engine.params.wrap.* class Liner; there are Linear, entry, head, middle.0"
SCALAR = (
    ["model.network={type: sharded_own.Scalar}", "train.callbacks=[]"],
    *(2, "network.temperature; give them the shape"),
)
OTHER = ["model.optimizer={type: torch.optim.SGD, params: {lr: 0.01, momentum: 0.9}}", "train.num_epochs=2"]
ADAM = OTHER, 4, "from another optimizer.*model.optimizer.type was torch.optim.Adam and is torch.optim.SGD"


@pytest.mark.parametrize(
    ("engine", "case"),
    [
        *(("fsdp", UNIT), ("fsdp", SCALAR), ("deepspeed_stage_3", ADAM)),
        pytest.param("deepspeed_stage_3", SCALAR, marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(engine, case, held, trained):
    """An unknown unit is reported with the known ones (exit 2), a scalar parameter with a remedy (exit 2), and the
    state of another optimizer with both optimizers (exit 4)."""
    overrides, code, words = case
    more = [f"train.resume_ckpt='{held('fsdp')[0].folder}'"] if case is ADAM else []
    outcome, _ = trained(engine, *overrides, *more, code=code)
    (error,) = (line for rank in outcome.ranks for line in rank.err.splitlines() if "error" in line)
    assert re.search(words, error)
    assert "Traceback" not in "".join(rank.err for rank in outcome.ranks)


@pytest.fixture
def sharded(held, tmp_path):
    """A copy of a checkpoint in two shards."""
    return shutil.copytree(held("fsdp")[0].folder, tmp_path / "run") / "last.ckpt"


def test_a_missing_or_damaged_piece_is_named(sharded, trained):
    """A flipped bit is detected; a missing shard is reported with its name, and ends a resumed run with exit code 4."""
    damaged, missing = sorted((sharded.parent / "last.pieces").iterdir())
    content = damaged.read_bytes()
    middle = len(content) // 2
    damaged.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(CheckpointError, match=f"{damaged.name}: damaged"):
        read_checkpoint(sharded)
    damaged.write_bytes(content)
    missing.unlink()
    with pytest.raises(CheckpointError, match=f"1 of its 2 pieces are missing: last.pieces/{missing.name}"):
        read_checkpoint(sharded)
    outcome, _ = trained("fsdp", f"train.resume_ckpt='{sharded}'", code=4)
    (error,) = (rank.err for rank in outcome.ranks if missing.name in rank.err)  # of the first rank to fail
    assert "Traceback" not in error


def test_a_checkpoint_in_pieces_is_copied_and_removed_whole(sharded):
    """A copy, also over another checkpoint, has the same weights; removing a checkpoint removes its shards."""
    target = sharded.with_name("best.ckpt")
    expected = weights(sharded)
    copy_checkpoint(sharded, target)
    copy_checkpoint(sharded, target)
    found = weights(target)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    remove_checkpoint(sharded)
    assert not sharded.exists()
    assert not (sharded.parent / "last.pieces").exists()
    assert len(list((sharded.parent / "best.pieces").iterdir())) == 2


@pytest.mark.slow
def test_a_full_disk_on_one_process_leaves_the_former_checkpoint(trained):
    """Both processes end with exit code 3, and the checkpoint of the first epoch is complete."""
    outcome, _ = trained("fsdp", "train.callbacks=[{type: sharded_own.FullDisk}]", "train.num_epochs=3", code=3)
    assert sum("No space left on device" in rank.err for rank in outcome.ranks) == 1
    assert read_checkpoint(outcome.folder / "last.ckpt")["epoch"] == 0


@engines("deepspeed_stage_3", slow=["ddp", "fsdp", "deepspeed_stage_2"])
def test_a_checkpoint_reproduces_the_last_val_loss(engine, trained, tracked, jobs, tiny, own):
    """One process with the checkpoint computes the last val_loss of two processes, also with batch norm."""
    settings = ["model.network={type: sharded_own.Running}", "train.callbacks=[]"]
    outcome, _ = trained(engine, *settings)
    alone = jobs("train", tiny, "stages=[validate]", f"test.ckpt='{outcome.folder}'", *settings, cwd=own)
    expected = json.loads((alone.folder / "val_results.json").read_text())["val_loss"]
    assert tracked(outcome.folder).metrics["val_loss"] == pytest.approx(expected, abs=1e-6)


@engines("deepspeed_stage_3", slow=["fsdp"])
def test_a_task_may_build_its_network_in_its_constructor(engine, jobs, tiny, own):
    """A task that builds its network in its constructor needs no code for sharding, and trains as under ddp."""

    def run(backend):
        task = "model={module: {type: own.Measured}, optimizer: null}"
        two = f"engine={{backend: {backend}, processes: 2}}"
        return jobs("train", tiny, task, two, "train.num_epochs=1", cwd=own, ranks=2, code=0)

    assert_close(run(engine), run("ddp"), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("engine", "shares"),
    [
        pytest.param("deepspeed_stage_1", "", marks=pytest.mark.slow),
        ("deepspeed_stage_3", ""),
        pytest.param("deepspeed_stage_3", SHARD_ALL, marks=pytest.mark.slow),
    ],
)
def test_every_stage_computes_in_the_precision_of_the_run(engine, shares, trained, tmp_path):
    """With `bf16` parameters and outputs are bfloat16, also in a resumed run; the checkpoint has float32 weights."""
    network = f"model.network={{type: sharded_own.Precise, params: {{folder: '{tmp_path}'}}}}"
    settings = [network, "train.callbacks=[]", "engine.precision=bf16", *([shares] if shares else [])]
    first, _ = trained(engine, *settings)
    assert (tmp_path / "precision").read_text() == "torch.bfloat16 torch.bfloat16"
    weight = weights(first.folder / "last.ckpt")["network.layers.1.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight.bfloat16().float(), weight)
    (tmp_path / "precision").unlink()
    trained(engine, *settings, f"train.resume_ckpt='{first.folder}'", "train.num_epochs=2")
    assert (tmp_path / "precision").read_text() == "torch.bfloat16 torch.bfloat16"


@pytest.mark.parametrize(("fails", "code"), [("true", 5), pytest.param("false", 0, marks=pytest.mark.slow)])
def test_every_process_of_deepspeed_leaves_its_group(fails, code, trained):
    """Each rank destroys its process group, also after a failed run: torch warns of an NCCL group left open at exit."""
    ends = f"train.callbacks=[{{type: sharded_own.Ends, params: {{fails: {fails}}}}}]"
    done, _ = trained("deepspeed_stage_2", ends, code=code)
    assert [each.out.splitlines()[-1] for each in done.ranks] == ["left", "left"], done


VIT_L = 304_326_632


def test_buckets_fit_the_network():
    """A bucket holds a small network or a sixteenth of a large one; at most a quarter stays gathered for later use."""
    for stage in (1, 2, 3):
        buckets = [sizes(n, n, stage)["reduce_bucket_size"] for n in (282_378, VIT_L, 70_000_000_000)]
        assert buckets == [282_378, VIT_L // 16, 200_000_000]
        mostly_frozen = [sizes(VIT_L, n, stage)["reduce_bucket_size"] for n in (2_000, 0)]
        assert mostly_frozen == [2_000, 1]  # DeepSpeed does not accept 0
    assert sizes(1_000_000, 1_000_000, 3)["stage3_max_live_parameters"] == 50_000_000
    large = sizes(VIT_L, VIT_L, 3)
    assert large["stage3_max_live_parameters"] == large["stage3_max_reuse_distance"] == VIT_L // 4
    assert large["stage3_prefetch_bucket_size"] == VIT_L // 16
    assert large["sub_group_size"] == 50_000_000
    assert sizes(VIT_L, VIT_L, 0) == {}


def test_sizes_that_are_given_stay():
    """Sizes in the strategy's params or DeepSpeed's config are kept; the others follow the network's size."""

    def fitted(strategy, width):
        task = pl.LightningModule()
        task.network = torch.nn.Linear(width, 1)
        strategy.connect(task)
        strategy.fit_sizes()
        return strategy.config

    given = {"zero_optimization": {"stage3_max_live_parameters": 0}}
    strategy = DeepSpeed(stage=3, reduce_bucket_size=5000, config=given)
    for width in (100, 10):
        zero = fitted(strategy, width)["zero_optimization"]
        assert (zero["reduce_bucket_size"], zero["stage3_max_live_parameters"]) == (5000, 0)
        assert zero["stage3_max_reuse_distance"] == 50_000_000
    assert fitted(DeepSpeed(stage=2), 100)["zero_optimization"]["reduce_bucket_size"] == 101
    assert "zero_optimization" not in fitted(DeepSpeed(zero_optimization=False), 100)


@engines("deepspeed_stage_3", slow=["deepspeed_stage_2"])
def test_an_optimizer_may_get_frozen_parameters(engine, trained):
    """They have no state in the checkpoint, all epochs are trained, and the head learns as under ddp."""
    settings = ["model.trainable=head", "model.module={type: sharded_own.All}", "train.num_epochs=2"]
    found, _ = trained(engine, *settings)
    saved = read_checkpoint(found.folder / "last.ckpt")
    (optimizer,) = saved["optimizer_states"]
    assert len(optimizer["state"]) == 2 < len(optimizer["param_groups"][0]["params"])
    assert saved["epoch"] == 1
    assert_close(found, trained("ddp", *settings)[0])


def test_the_share_of_an_offloaded_parameter_is_no_copy():
    """DeepSpeed's own method copies offloaded values to the GPU; weights of a checkpoint must reach the optimizer's."""
    parameter = SimpleNamespace(ds_tensor=torch.zeros(4), ds_numel=4, ds_shape=(2, 2))
    parameter.ds_tensor.ds_numel, flat = 4, torch.zeros(6)
    zero = SimpleNamespace(
        get_param_id=lambda _: 7, grad_position={7: [0, 1, 4]}, fp32_partitioned_groups_flat=[flat],
        get_local_fp32_param=lambda _: flat[1:5].clone(),
    )  # fmt: skip
    strategy = SimpleNamespace(global_rank=0)
    DeepSpeed._share_of_3(strategy, parameter, zero).values.fill_(1)
    assert flat.tolist() == [0, 1, 1, 1, 1, 0]


@pytest.mark.slow
def test_a_model_checkpoint_removes_the_shards_of_what_it_replaces(trained, tmp_path):
    """Lightning's ModelCheckpoint with one kept file leaves one file and its shards."""
    kept = f"{{type: pytorch_lightning.callbacks.ModelCheckpoint, params: {{dirpath: '{tmp_path}'}}}}"
    trained("fsdp", f"train.callbacks=[{kept}]", "train.num_epochs=3")
    assert sorted({path.stem for path in tmp_path.iterdir()}) == [path.stem for path in tmp_path.glob("*.ckpt")]
    assert len(list(tmp_path.iterdir())) == 2


def test_where_a_run_resumes_is_found_without_its_weights(sharded, tiny, own, monkeypatch):
    """Each process would need the memory for all weights and the state of the optimizer."""
    monkeypatch.chdir(own)
    monkeypatch.setattr("deeplightning.engine.shards.Scattered.whole", None)
    adam = "model.optimizer={type: torch.optim.Adam, params: {lr: 0.001}}"
    cfg = load_config(tiny, [f"train.resume_ckpt='{sharded}'", adam])
    assert resumption(cfg).checkpoint == sharded


@pytest.mark.slow
def test_parameters_outside_of_units_are_sent_or_refused(trained):
    """Frozen ones keep their values; trainable ones are refused by name (exit 2)."""
    outcome, _ = trained("fsdp", "model.module={type: sharded_own.Listed}")
    assert weights(outcome.folder / "last.ckpt")["extra.0"].tolist() == [0.25] * 3
    outcome, _ = trained("fsdp", "model.module={type: sharded_own.Learns}", code=2)
    assert "extra.0 of Learns belong to none" in "".join(rank.err for rank in outcome.ranks)


@pytest.mark.slow
def test_a_metric_that_one_rank_has_updated_is_saved(trained):
    """All processes gather its state in a checkpoint inside an epoch."""
    often = ["train.checkpoint.every_n_steps=2", "engine.params={timeout: 60}"]
    outcome, _ = trained("ddp", "model.module={type: sharded_own.Rare}", *often)
    assert (outcome.folder / "last.ckpt").is_file()
