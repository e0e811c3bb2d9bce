"""Every engine on GPUs learns, tests, resumes and exports as on a CPU, in each precision and for each task.

Skipped without a GPU, and in part with one GPU. Each run is a new process: CUDA does not survive a fork.
`bash test.sh --gpu` runs this file in parallel. A run that has not ended after 75 seconds is killed and fails.
"""

import json
import os
import re
import shutil
import sqlite3
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import write_mnist
from conftest import weights
from filelock import FileLock
from gpu_runs import ENGINES, PRECISIONS, Runs, lacks, note, spread
from tiny import SEED

GPUS = torch.cuda.device_count()
ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="there is no GPU")]
TWO = pytest.mark.skipif(GPUS < 2, reason="there are not two GPUs")

SPREAD = ENGINES[1:]
OFFLOAD = ["deepspeed_stage_2_offload", "deepspeed_stage_3_offload"]
LINEAR = "model.network={type: gpu_own.network, params: {width: 64}}"
SGD = "model.optimizer={type: torch.optim.SGD, params: {lr: 0.05, momentum: 0.9}}"
PLAIN = [LINEAR, SGD, "~model.scheduler", "train.callbacks=[]", "stages=[train]", "train.export=false"]
# Units and buckets smaller than the wide network, which would be gathered at once by default.
SMALL = 5_000_000
STAGE_3 = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
ALL_SHARED = {"stage3_param_persistence_threshold": 0, **dict.fromkeys(STAGE_3, SMALL)}
PARAMS = {
    "fsdp": {"wrap": ["Linear"]},
    "deepspeed_stage_3": {"reduce_bucket_size": SMALL, "config": {"zero_optimization": ALL_SHARED}},
    "deepspeed_stage_2_offload": {"reduce_bucket_size": SMALL},
    "deepspeed_stage_3_offload": {"config": {"zero_optimization": ALL_SHARED}},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Runs with a common tracking store, whose creation takes two seconds."""
    return Runs(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def plain(shared):
    """`plain(engine, override, …)` trains linear layers by SGD; any number of GPUs has 16 samples per step."""

    def run(engine, *overrides, gpus=1, code=0, **options):
        if reason := lacks(engine):
            pytest.skip(reason)
        number = len(gpus) if isinstance(gpus, list) else gpus or 1
        params = [f"engine.params={json.dumps(PARAMS[engine])}"] if engine in PARAMS and gpus else []
        settings = [*PLAIN, *spread(engine, gpus), f"data.batch_size={16 // number}", *params]
        return shared.train(*settings, *overrides, code=code, **options)

    return run


@pytest.fixture(scope="module")
def series(shared):
    """`series(folder)` is the tracked metrics of a run: by name, (step, value). MLflow's client would need
    cryptography, which `tools/gpu_wheels.sh` omits."""
    select = "SELECT step, value FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY step"

    def of(folder):
        names = ("train_loss", "train_loss_epoch", "val_loss")
        with closing(sqlite3.connect(shared.store / "mlflow.db")) as database:
            return {name: database.execute(select, (folder.parent.name, name)).fetchall() for name in names}

    return of


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, make)` is the result of `make()`, tensors and numbers; only one of pytest's workers calls it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def value(name, make):
        path = base / f"{name}.pt"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                torch.save(make(), path)
        return torch.load(path, weights_only=True)

    return value


@pytest.fixture(scope="module")
def on_cpu(plain, series, once):
    """The metrics of two epochs in one CPU process: the reference."""
    return once("on_cpu", lambda: series(plain(None, gpus=None).folder))


def assert_alike(found, expected):
    """Assert that the losses of every step and epoch agree to a thousandth."""
    for name in expected:
        assert found[name] == [(step, pytest.approx(value, abs=1e-3)) for step, value in expected[name]], name


# ---- the table: every engine in every precision

CELLS = [(engine, precision, 1) for engine in ENGINES for precision in PRECISIONS]
CELLS += [pytest.param(engine, "32", 2, marks=TWO) for engine in SPREAD]


@pytest.mark.parametrize(("engine", "precision", "gpus"), CELLS)
def test_every_engine_trains_tests_resumes_and_exports(engine, precision, gpus, tmp_path):
    """A run killed in an epoch and resumed ends with the weights and results of an uninterrupted one, and a bundle."""
    if reason := lacks(engine):
        pytest.skip(reason)
    cell = Runs(tmp_path).cell(engine, precision, gpus)
    note(cell)
    assert cell.right, cell
    assert precision == "16" or cell.test > 0.5  # in 16 bits the first of 16 steps are skipped to find the loss scale


# ---- the same numbers as on a CPU


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=TWO)])
@pytest.mark.parametrize("engine", ["null", *SPREAD, *OFFLOAD])
def test_every_engine_learns_what_one_cpu_process_learns(engine, gpus, plain, on_cpu, series):
    """All losses in 32 bits are those of the CPU, also on two GPUs with half the batch each."""
    if (engine, gpus) == ("null", 2):
        pytest.skip("one process needs no engine, two need one")
    done = plain(engine, gpus=gpus)
    assert_alike(series(done.folder), on_cpu)
    assert gpus == 1 or stray(done.err) == []


NO_LEARNING = ["model.network={type: gpu_own.mixed}", "train.max_steps=1"]
NO_LEARNING += ["model.optimizer={type: torch.optim.SGD, params: {lr: 0.0}}"]


@pytest.fixture(scope="module")
def drawn_on_cpu(plain, once):
    """The parameters that seed 7 gives on the CPU, after a step with a learning rate of 0."""
    return once("drawn_on_cpu", lambda: dict(weights(plain(None, *NO_LEARNING, gpus=None).folder / "last.ckpt")))


@pytest.mark.parametrize("engine", ["null", *SPREAD])
def test_a_seed_gives_the_same_weights_as_on_a_cpu(engine, plain, drawn_on_cpu):
    """A seed gives the same initial weights to the last bit under every engine, from the CPU's generator."""
    found = weights(plain(engine, *NO_LEARNING, "engine.params={}").folder / "last.ckpt")
    parameters = [name for name in drawn_on_cpu if "running" not in name and "num_batches" not in name]
    assert parameters
    assert [name for name in parameters if not torch.equal(found[name].cpu(), drawn_on_cpu[name])] == []


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=TWO)])
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed_stage_3"])
def test_a_run_resumes_on_the_cpu_what_a_gpu_began_and_the_reverse(engine, gpus, plain, on_cpu, series):
    """An epoch on each device, in either order, ends with the loss of two epochs on the CPU."""
    expected = on_cpu["val_loss"][-1][1]
    on_gpu, on_one_cpu = (engine, gpus), (None, None)
    for (before, first), (after, second) in ((on_gpu, on_one_cpu), (on_one_cpu, on_gpu)):
        stopped = plain(before, "train.num_epochs=1", gpus=first)
        resumed = plain(after, f"train.resume_ckpt='{stopped.folder}'", gpus=second)
        assert series(resumed.folder)["val_loss"][-1][1] == pytest.approx(expected, abs=1e-3)


# ---- the stage after training

SETTINGS = {
    "fsdp, offloaded": ("fsdp", ["engine.params={cpu_offload: true}"]),
    "fsdp, compiled": ("fsdp", ["engine.compile=true"]),
    "fsdp, clipped by norm": ("fsdp", ["train.gradient_clip={value: 1.0}"]),
    "fsdp, clipped by value": ("fsdp", ["train.gradient_clip={value: 0.1, algorithm: value}"]),
    "fsdp, units": ("fsdp", ["engine.params={wrap: [Linear]}"]),
    "fsdp, bf16-true": ("fsdp", ["engine.precision=bf16-true", "model.optimizer.params.eps=0.0001"]),
    "stage 1, bf16-true": ("deepspeed_stage_1", ["engine.precision=bf16-true"]),
    "stage 2, offloaded": ("deepspeed_stage_2_offload", []),
    "stage 3, offloaded": ("deepspeed_stage_3_offload", []),
    "stage 3, recomputed": ("deepspeed_stage_3", ["engine.activation_checkpointing=[Linear]"]),
    "stage 3, all shared": ("deepspeed_stage_3", [f"engine.params={json.dumps(PARAMS['deepspeed_stage_3'])}"]),
    "ddp, channels last": ("ddp", ["engine.channels_last=true"]),
    "ddp, synchronised batch norm": ("ddp", ["engine.sync_batchnorm=true"]),
}


@pytest.mark.parametrize(("engine", "overrides"), SETTINGS.values(), ids=SETTINGS)
def test_every_stage_after_training_finds_its_network(engine, overrides, shared):
    """Each setting of an engine validates, tests, predicts and exports, without a warning of a library."""
    if reason := lacks(engine):
        pytest.skip(reason)
    stages = "stages=[train, validate, test, predict]"
    done = shared.train(*spread(engine, 1), stages, "train.num_epochs=1", *overrides)
    for name in ("val_results.json", "test_results.json", "predictions.csv", "bundle/model.onnx"):
        assert (done.folder / name).is_file(), name
    assert stray(done.err) == []


STRAY = ["destroy_process_group", "AccumulateGrad", "bucket view", "device under current context", "Tensor Cores"]
STRAY += ["GPU available", "but not used", r"\w*Warning:", r"\[rank\d\]:\[W"]


def stray(err):
    """Return the lines on stderr that libraries wrote and that do not concern the user's config."""
    return [line for line in err.splitlines() if re.search("|".join(STRAY), line)]


TASKS = {
    "segmentation": ("segmentation/segmentation.yaml", ["data.module.params.count=60", "data.root=shapes"]),
    "text": ("sst2/sst2.yaml", ["data.module.params.limit=1200", "data.batch_size=32"]),
    "reconstruction": ("vqvae/vqvae.yaml", ["data.module={type: gpu_own.Synthetic, params: {image_size: 16}}"]),
    "regression": ("linear_regression/linear_regression.yaml", []),
    "gan": (
        "dcgan/dcgan.yaml",
        ["data.module={type: gpu_own.Synthetic, params: {image_size: 16}}", "model.module.params.scorer_epochs=1"],
    ),
}
TASK_CELLS = [(task, engine) for task in TASKS if task != "gan" for engine in ("null", "fsdp", "deepspeed_stage_3")]
TASK_CELLS += [("gan", "null"), ("gan", "ddp")]  # no other engine trains two networks in turn


@pytest.mark.parametrize(("task", "engine"), TASK_CELLS)
def test_every_task_trains_and_tests(task, engine, tmp_path):
    """The shipped example of each task trains and tests on a GPU at reduced size."""
    if reason := lacks(engine):
        pytest.skip(reason)
    if task == "text":
        pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    config, overrides = TASKS[task]
    runs = Runs(tmp_path)
    for code in (ROOT / "examples" / config).parent.glob("*.py"):
        shutil.copy(code, tmp_path)
    tracked = f"logger.params={{tracking_uri: '{runs.store}', system_metrics: false}}"
    quick = ["train.num_epochs=1", "logger.pictures=null", "logger.histograms=null", tracked]
    done = runs.train(*spread(engine, 1), *quick, *overrides, config=ROOT / "examples" / config)
    assert (done.folder / "test_results.json").is_file()
    assert stray(done.err) == []


@pytest.mark.parametrize("gpus", [[0], pytest.param([0, 1], marks=TWO)])
def test_the_seed_configuration_trains_and_tests(gpus, tmp_path):
    """The first config of the project trains and tests on GPUs, with an MNIST folder of noise."""
    if reason := lacks("deepspeed_stage_3"):
        pytest.skip(reason)
    runs = Runs(tmp_path)
    write_mnist(tmp_path / "data", np.random.RandomState(6).randint(256, size=(1000, 28, 28)), np.arange(1000) % 10)
    (tmp_path / "seed.yaml").write_text(SEED)
    settings = [f"engine.gpus={json.dumps(gpus)}", f"data.root='{tmp_path / 'data'}'", "logger.pictures=null"]
    if find_spec("cryptography") is None:  # needed by MLflow's store, which Lightning's logger opens
        settings.append("logger.type=deeplightning.tracking.MLflowLogger")
    done = runs.train(*settings, "stages=[train, test]", "train.num_epochs=2", config=tmp_path / "seed.yaml")
    assert (done.folder / "test_results.json").is_file()
    assert stray(done.err) == []


# ---- failures


@pytest.mark.parametrize("engine", ["null", "deepspeed_stage_2"])
def test_a_lack_of_memory_is_an_error_of_the_run(engine, plain):
    """Activations larger than the GPU give exit code 5 and one message, without warnings of libraries."""
    failed = plain(engine, "model.network={type: gpu_own.TooLarge}", "engine.params={}", code=5)
    assert "memory" in failed.err
    assert "Traceback" not in failed.err
    assert stray(failed.err) == []


# ---- two GPUs

WIDE = ["model.network.params={width: 2048, depth: 8}", "model.optimizer={type: torch.optim.Adam, params: {lr: 0.001}}"]


def notes_in(folder):
    """Return an override for the callback that writes device and peak memory to a folder."""
    return f"train.callbacks=[{{type: gpu_own.Notes, params: {{folder: '{folder}'}}}}]"


@TWO
def test_sharding_takes_less_memory(plain, tmp_path, record_property):
    """Every sharding or offloading engine needs less memory than ddp on the fuller of two GPUs."""
    found = {}
    for engine in ("ddp", "fsdp", "deepspeed_stage_3", "deepspeed_stage_2_offload"):
        (notes := tmp_path / engine).mkdir()
        plain(engine, *WIDE, "train.max_steps=3", notes_in(notes), gpus=2)
        found[engine] = max(json.loads((notes / f"{rank}.json").read_text())["bytes"] for rank in (0, 1))
    record_property("bytes", found)
    assert max(most for engine, most in found.items() if engine != "ddp") < found["ddp"]


@TWO
def test_the_gpu_that_is_named_is_used(plain, tmp_path):
    """`engine.gpus=[1]` computes on the second GPU."""
    plain("ddp", notes_in(tmp_path), gpus=[1])
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert found["device"] == "cuda:1"
    assert found["bytes"] > 0


@TWO
def test_batch_norm_is_over_all_processes(plain, series):
    """With `sync_batchnorm` two GPUs with half of the samples each learn like one GPU with all."""
    norm = "model.network.params.norm=true"
    expected = series(plain("ddp", norm).folder)
    assert_alike(series(plain("ddp", norm, "engine.sync_batchnorm=true", gpus=2).folder), expected)
