"""Features that involve several parts, each in a small run: nested batches, loader functions, sums over processes,
schedules of automatic length, and user code."""

import json
import re
from typing import Any, NamedTuple

import pytest
import torch
from conftest import weights

from deeplightning.config.examine import load_config
from deeplightning.data.digits import Digits
from deeplightning.data.of_datasets import OfDatasets
from deeplightning.engine.checkpoint_reading import read_checkpoint
from deeplightning.engine.trainer_arguments import trainer_arguments

PARTS = '''
import torch
from torchmetrics import Metric


class Right(Metric):
    """Counts the correct answers: a sum over batches and processes."""

    def __init__(self):
        super().__init__()
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs, labels):
        self.right += (outputs.argmax(1) == labels).sum()

    def compute(self):
        return self.right
'''


@pytest.fixture(scope="module")
def own(command, tiny, tmp_path_factory):
    """`own(override, …)` trains the tiny config in a folder with `parts.py`."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "parts.py").write_text(PARTS)

    def run(*overrides, ranks=1):
        return command("train", tiny, *overrides, cwd=folder, ranks=ranks, code=0)

    return run


class Pair(NamedTuple):
    left: torch.Tensor
    right: list[Any]


@pytest.mark.parametrize("kind", [Digits, OfDatasets])
def test_nested_batches_move_to_the_device(kind, tiny):
    """Every tensor in nested mappings, lists and named tuples moves; containers keep their types, and texts and numbers
    stay unchanged. The device `meta` stands for a GPU."""
    batch = {"a": [torch.ones(2), {"b": torch.zeros(1)}], "text": ["one", "two"], "pair": Pair(torch.ones(3), [1, "x"])}
    moved = kind(load_config(tiny)).transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert [moved["a"][0].device.type, moved["a"][1]["b"].device.type] == ["meta"] * 2
    assert moved["text"] == ["one", "two"]
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].left.device.type == "meta"
    assert moved["pair"].right == [1, "x"]


def brighter(batch):
    """Return a batch with other pixels."""
    return {**batch, "image": batch["image"] // 2 + 100}


def test_a_loader_takes_functions_by_name(fit):
    """`data.loader.collate_fn` names a user's function, which transforms each batch."""
    collate = "data.loader.collate_fn={ref: test_rows.brighter}"
    plain, changed = (fit("train.num_epochs=1", *more).series("val_loss") for more in ((), (collate,)))
    assert plain != changed


def test_a_metric_may_be_a_sum(own, tracked):
    """A user's counting metric agrees with `acc`: for 16 samples in batches of 16, and of 5 in two processes."""
    metrics = "model.metrics={right: {type: parts.Right}, acc: {type: deeplightning.task.metrics.Accuracy}}"
    for more, ranks in (((), 1), (("engine.processes=2", "data.batch_size=5"), 2)):
        found = tracked(own(metrics, "logger.log_every_n_steps=1", *more, ranks=ranks).folder).metrics
        assert found["val_right"] == pytest.approx(16 * found["val_acc"])
        assert found["train_right_epoch"] == pytest.approx(134 * found["train_acc_epoch"], abs=1e-3)


def test_accumulation_leaves_evaluation_undivided(fit):
    """With constant weights, `val_loss` and the loss of an epoch are those of a run without accumulation."""
    still = ["model.optimizer.params.lr=0.0", "train.num_epochs=1"]
    plain, by_four = (fit(*still, f"train.accumulator_factor={factor}") for factor in (1, 4))
    for name in ("val_loss", "train_loss_epoch"):
        assert by_four.series(name)[0][1] == pytest.approx(plain.series(name)[0][1], rel=1e-6)


def warm_up(optimizer, total_steps, share):
    """Return a schedule that rises linearly from 0 over a share of the steps, then falls linearly to 0."""
    warm = max(1, round(share * total_steps))
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / warm if step < warm else (total_steps - step) / (total_steps - warm)
    )


def test_a_schedule_of_ones_own_knows_how_many_steps_there_are(fit):
    """`total_steps: auto` is the number of optimizer steps: 34 batches accumulated by 4 are 9 steps, with a partial
    last one, in each of two epochs. The rate peaks at step 2 of 18, and would be 0 at step 18."""
    schedule = "{type: test_rows.warm_up, params: {total_steps: auto, share: 0.1111}, call: {interval: step}}"
    fitted = fit(f"model.scheduler={schedule}", "data.batch_size=4", "train.accumulator_factor=4")
    expected = [0.0, 0.025, *(0.05 * (18 - step) / 16 for step in range(2, 18))]
    assert fitted.seen.rates == pytest.approx(expected)


def test_tensorboard_has_one_file_with_the_expected_points(own, tmp_path):
    """TensorBoard as an extra logger of two processes writes one file, with `train_loss` at each logged step."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = f"{{type: pytorch_lightning.loggers.TensorBoardLogger, params: {{save_dir: '{tmp_path}'}}}}"
    outcome = own(f"logger.extra=[{board}]", "engine.processes=2", ranks=2)
    assert outcome.folder.exists()
    (events,) = tmp_path.glob("**/events.out.*")
    found = EventAccumulator(str(events)).Reload().Scalars("train_loss")
    assert [point.step for point in found] == [0, 4, 8]


def scaled(*scaler):
    """Return an engine of two processes in float16 whose gradient scaler has these params."""
    plugin = "{type: pytorch_lightning.plugins.precision.MixedPrecision, params: {precision: 16-mixed, device: cpu, "
    plugin += f"scaler: {{type: torch.amp.GradScaler, params: {{device: cpu, {', '.join(scaler)}}}}}}}}}"
    return f"engine={{backend: ddp, processes: 2, params: {{precision_plugin: {plugin}}}}}"


def test_a_schedule_waits_where_the_scaler_skipped_a_step(job, tracked):
    """If the scale overflows at the first step, neither the optimizer nor the schedule steps."""
    engine = scaled("init_scale: 1.0e+38", "backoff_factor: 1.0e-36")
    scheduler = "{type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.5}, call: {interval: step}}"
    settings = [f"model.scheduler={scheduler}", "logger.log_every_n_steps=1"]
    done = job(engine, *settings, "~train.num_epochs", "train.max_steps=4")
    rates = [value for _, value in tracked(done.folder).series()["lr"]]
    assert rates == pytest.approx([0.05, 0.05, 0.025, 0.0125])


ZERO = {"ignore_unused_parameters": False, "round_robin_gradients": True, "stage3_max_live_parameters": 11}
ZERO |= {"stage3_max_reuse_distance": 12, "stage3_prefetch_bucket_size": 13, "stage3_param_persistence_threshold": 14}
ZERO |= {"stage3_gather_16bit_weights_on_model_save": True}
SHORT = {"allgather_bucket_size": 21, "allgather_partitions": False, "contiguous_gradients": False}
SHORT |= {"overlap_comm": True, "reduce_bucket_size": 22, "reduce_scatter": False, "sub_group_size": 23}
AIO = {"block_size": 31, "queue_depth": 32, "thread_count": 2, "single_submit": True, "overlap_events": False}


def test_what_is_set_stands_in_the_json_that_deepspeed_gets(tiny, place, monkeypatch):
    """DeepSpeed gets the params of the engine, its own names under `config`, and its settings of asynchronous I/O."""
    pytest.importorskip("deepspeed")
    monkeypatch.chdir(place)
    config = {"communication_data_type": "fp32", "steps_per_print": 7, "zero_optimization": ZERO}
    params = {**SHORT, **AIO, "config": config}
    settings = ["engine.backend=deepspeed_stage_3", "engine.processes=2", f"engine.params={json.dumps(params)}"]
    found = trainer_arguments(load_config(tiny, settings))["strategy"].config
    assert {**ZERO, **SHORT, "stage": 3}.items() <= {**found["zero_optimization"]}.items()
    assert found["aio"] == AIO
    assert (found["communication_data_type"], found["steps_per_print"]) == ("fp32", 7)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_moves_state_to_the_cpu(stage, tiny, place, monkeypatch):
    """`offload` keeps the optimizer's state in CPU memory, and with stage 3 the parameters too."""
    pytest.importorskip("deepspeed")
    monkeypatch.chdir(place)
    settings = [f"engine.backend=deepspeed_stage_{stage}_offload", "engine.processes=2"]
    zero = trainer_arguments(load_config(tiny, settings))["strategy"].config["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert ("offload_param" in zero) == (stage == 3)


OWN_RUN = '''\
"""A user's own code."""

import json
import pathlib

import pytorch_lightning as pl
from torch import nn

from deeplightning.task.img_classif import ImageClassification


class Task(ImageClassification):
    """Counts its training samples, and keeps the count in checkpoints."""

    samples = 0

    def training_step(self, batch, batch_idx):
        self.samples += len(batch["label"])
        self.log("counted", float(len(batch["label"])), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        checkpoint["samples"] = self.samples

    def on_load_checkpoint(self, checkpoint):
        super().on_load_checkpoint(checkpoint)
        self.samples = checkpoint["samples"]


class ByHand(ImageClassification):
    """Steps its optimizer itself, and writes the norm of the first gradient after `manual_backward` to a file."""

    def __init__(self, cfg, file):
        super().__init__(cfg)
        self.automatic_optimization, self.file = False, pathlib.Path(file)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if self.global_step == 0 and self.global_rank == 0:
            self.file.write_text(str(float(next(self.network.parameters()).grad.norm())))
        optimizer.step()


class Loose(ImageClassification):
    """Resumes from checkpoints that lack some of its tensors."""

    strict_loading = False


class Notes(pl.Callback):
    """Writes the state at the start of each epoch to a file, and counts epochs over the launches of a run."""

    def __init__(self, file):
        self.file = pathlib.Path(file)
        self.epochs = 0

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]

    def on_train_epoch_start(self, trainer, task):
        note = {
            "config": (trainer.logger.artifact_folder / "cfg.yaml").is_file(),
            "epochs": self.epochs,
            "samples": task.samples,
            "place": [task.global_rank, task.local_rank, trainer.world_size],
            "step": trainer.global_step,
        }
        self.epochs += 1
        with self.file.open("a") as file:
            file.write(json.dumps(note) + "\\n")


class Network(nn.Module):
    """Two layers; with `spare`, a third one that is not used."""

    def __init__(self, spare=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        if spare:
            self.spare = nn.Linear(16, 10)

    def forward(self, images):
        return self.layers(images)
'''

CUSTOM = '''\
from torch import nn


class MyLoss(nn.CrossEntropyLoss):
    """Half of cross-entropy."""

    def forward(self, logits, labels):
        return 0.5 * super().forward(logits, labels)


def make(factor):
    return nn.CrossEntropyLoss(label_smoothing=factor)
'''

NETWORK = "model.network={type: own_rows.Network}"


@pytest.fixture(scope="module")
def own_place(tmp_path_factory):
    """A working directory with this code."""
    folder = tmp_path_factory.mktemp("rows")
    (folder / "own_rows.py").write_text(OWN_RUN)
    (folder / "losses" / "of_mine").mkdir(parents=True)
    (folder / "losses" / "of_mine" / "custom.py").write_text(CUSTOM)
    return folder


@pytest.fixture(scope="module")
def trained(command, tiny, own_place):
    """`trained(override, …)` trains in that directory with `ranks` processes."""

    def run(*overrides, ranks=1, code=0):
        spread = [f"engine.processes={ranks}"] if ranks > 1 else []
        return command("train", tiny, NETWORK, *spread, *overrides, cwd=own_place, ranks=ranks, code=code)

    return run


@pytest.fixture(scope="module")
def resumed(trained, tmp_path_factory):
    """A resumed run, the notes of its epochs, and the folder of its ModelCheckpoint."""
    folder = tmp_path_factory.mktemp("notes")
    name = "{epoch}-{step}-{val_loss:.2f}"
    params = f"{{dirpath: '{folder / 'kept'}', filename: '{name}', save_top_k: -1}}"
    kept = f"{{type: pytorch_lightning.callbacks.ModelCheckpoint, params: {params}}}"
    notes = f"{{type: own_rows.Notes, params: {{file: '{folder / 'notes'}'}}}}"
    settings = ["model.module.type=own_rows.Task", f"train.callbacks=[{notes}, {kept}]"]
    first = trained(*settings, "train.num_epochs=1")
    second = trained(*settings, f"train.resume_ckpt='{first.folder}'")
    assert second.folder == first.folder
    return second, [json.loads(line) for line in (folder / "notes").read_text().splitlines()], folder / "kept"


def test_own_code_finds_its_config_its_place_and_what_it_saved(resumed):
    """`cfg.yaml` is in the run's folder when training begins. `self.global_rank` and `self.trainer.world_size` are
    right without a launcher. A resumed run restores the state of a user's task and callback."""
    _, notes, _ = resumed
    begins = {"config": True, "place": [0, 0, 1]}
    assert notes == [begins | {"epochs": 0, "samples": 0, "step": 0}, begins | {"epochs": 1, "samples": 134, "step": 9}]


def test_further_checkpoints_have_names_of_ones_own(resumed):
    """The files of Lightning's ModelCheckpoint are named by its pattern, and have the content of `last.ckpt`."""
    run, _, kept = resumed
    names = sorted(path.name for path in kept.iterdir())
    assert [re.sub(r"\d\.\d\d", "N", name) for name in names] == [
        "epoch=0-step=9-val_loss=N.ckpt",
        "epoch=1-step=18-val_loss=N.ckpt",
    ]
    ours, last = read_checkpoint(kept / names[1]), read_checkpoint(run.folder / "last.ckpt")
    assert {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "config", "samples"} <= set(ours)
    assert ours["global_step"] == last["global_step"] == 18
    assert all(torch.equal(tensor, last["state_dict"][name]) for name, tensor in ours["state_dict"].items())


def test_a_value_that_is_logged_as_a_sum_is_one(resumed, tracked):
    """`reduce_fx="sum"` in a user's task gives the number of samples of each epoch."""
    series = tracked(resumed[0].folder).series()
    assert [value for _, value in series["counted"]] == [134, 134]


def test_losses_of_a_nested_package_train_over_two_processes(trained, tracked):
    """A class and a function of a package in the working directory are losses, and both are logged."""
    custom = "losses.of_mine.custom"
    losses = f"{{mine: {{type: {custom}.MyLoss}}, smooth: {{type: {custom}.make, params: {{factor: 0.1}}}}}}"
    run = trained("~model.loss", f"model.loss={losses}", "train.num_epochs=1", ranks=2)
    assert {"val_mine", "val_smooth"} <= set(tracked(run.folder).metrics)


@pytest.mark.parametrize(("find", "code"), [("true", 0), ("false", 1)])
def test_a_layer_that_is_not_used_is_found_only_if_ddp_looks_for_it(find, code, trained):
    """With `find_unused_parameters: false` the error of ddp names this key; with true the network trains."""
    engine = f"engine={{backend: ddp, processes: 2, params: {{find_unused_parameters: {find}}}}}"
    outcome = trained("model.network.params.spare=true", engine, "train.num_epochs=1", ranks=2, code=code)
    assert ("find_unused_parameters" in "".join(rank.err for rank in outcome.ranks)) == (code != 0)


@pytest.mark.parametrize("engine", [pytest.param("fsdp", marks=pytest.mark.slow), "deepspeed_stage_3"])
def test_parameters_that_are_shared_out_are_counted_whole(engine, jobs, tiny, place):
    """The table at the start shows the number of parameters of the complete network."""
    settings = [f"engine={{backend: {engine}, processes: 2}}", "train.num_epochs=1", "train.limit_batches={train: 1}"]
    done = jobs("train", tiny, *settings, cwd=place, ranks=2, code=0)
    assert "SimpleCNN: 14,538 parameters (0.015 M)" in done.out


@pytest.mark.slow
def test_a_loop_of_ones_own_scales_its_loss_in_half_precision(trained, tmp_path, tracked):
    """`manual_backward` multiplies by the scale of the configured scaler, and the optimizer divides by it: twice the
    scale gives gradients twice as large, and the same training."""
    gradients, losses = [], []
    for scale in (256.0, 512.0):
        task = f"model.module={{type: own_rows.ByHand, params: {{file: '{tmp_path / 'gradient'}'}}}}"
        run = trained("~model.module", task, scaled(f"init_scale: {scale}"), "train.num_epochs=1", ranks=2)
        gradients.append(float((tmp_path / "gradient").read_text()))
        losses.append(tracked(run.folder).metrics["val_loss"])
    assert gradients[1] == pytest.approx(2 * gradients[0], rel=1e-3)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_run_in_16_bits_goes_on_in_32(trained):
    """The weights of the checkpoint are converted; with a learning rate of 0 they stay equal."""
    half = trained("engine.precision=bf16-true", "model.optimizer.params.lr=0.0", "train.num_epochs=1")
    before = weights(half.folder / "last.ckpt")
    single = trained("engine.precision=32", f"train.resume_ckpt='{half.folder / 'last.ckpt'}'")
    after = weights(single.folder / "last.ckpt")
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert all(torch.equal(after[name], tensor.float()) for name, tensor in before.items())


def test_a_task_may_go_on_without_some_tensors(trained):
    """A task with `strict_loading = False` resumes without tensors that the checkpoint lacks; for others an error names
    them."""
    learns = "model.trainable=[layers]"
    first = trained(learns, "train.num_epochs=1")
    more = [learns, "model.network.params.spare=true", f"train.resume_ckpt='{first.folder}'"]
    assert "network.spare.weight is missing" in trained(*more, code=4).err
    loose = trained("model.module.type=own_rows.Loose", *more)
    assert read_checkpoint(loose.folder / "last.ckpt")["global_step"] == 18
