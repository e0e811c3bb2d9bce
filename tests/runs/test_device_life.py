"""Tensors are on the right device throughout a run, for every engine and task, tested without a GPU.

Runs compute on a simulated device (see `pretend`): an operation on two devices fails as it would on a GPU, and at each
hook parameters, buffers, metrics and the optimizer's state must be on the device of the process.
"""

import functools

import pytest
import torch

pytest.importorskip("sklearn", reason="digits and reference metrics come from scikit-learn")
pytest.importorskip("deeplightning_plan", reason="the simulated GPU belongs to the plug-in `plan`")

from conftest import weights
from example_code import copy_code
from test_gan import CONFIG as GAN
from test_img_recon import CONFIG as RECONSTRUCTION
from test_regression import CONFIG as REGRESSION
from test_regression import SETS
from test_segmentation import CONFIG as SEGMENTATION
from test_segmentation import fill
from test_text_classif import CONFIG as TEXTS
from test_text_classif import reviews

pytestmark = pytest.mark.device

SLOW = pytest.mark.slow
OFFLOADED = {"fsdp": "[parameters, state]"}
ENGINES = [
    *("null", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"),
    *("fsdp offload", "deepspeed_stage_1_offload", "deepspeed_stage_2_offload", "deepspeed_stage_3_offload"),
]
STAGES = "stages=[train, validate, test, predict]"
NORM = "model.network={type: own.Normed}"


def assert_life(start, config, engine, processes, cwd, *overrides, name):
    """Assert that a run passes all stages, and resumes for one more epoch and an export; return its second launch."""
    backend, _, offload = engine.partition(" ")
    offloaded = OFFLOADED.get(backend, "[state]") if "offload" in engine else "[]"
    settings = [
        f"logger.params.experiment_name='{name}'",
        f"engine={{backend: {backend}, processes: {processes}}}",
        f"train.callbacks=[{{type: pretend.DeviceChecks, params: {{offloaded: {offloaded}}}}}]",
        "logger.log_every_n_steps=1",
        *(["engine.params={cpu_offload: true}"] if offload else []),
        *overrides,
    ]
    options = {"cwd": cwd, "ranks": processes, "code": 0, "main": "pretend:main", "PRETEND": backend}
    first = start("train", config, *settings, "train.num_epochs=1", "train.export=false", **options)
    more = ["train.num_epochs=2", "train.export=true", "train.resume_ckpt=auto"]
    second = start("train", config, *settings, *more, **options)
    assert "last.ckpt (step" in second.out, second
    assert second.folder == first.folder
    return second


@pytest.fixture(scope="module")
def lives(jobs, tiny, place):
    """`lives(engine, processes)` returns the outcome of such a run of digits, which is cached."""

    @functools.cache
    def run(engine, processes):
        more = [NORM, STAGES, f"data.batch_size={32 // processes}"]
        name = f"life-{engine.replace(' ', '-')}-{processes}"
        return assert_life(jobs, tiny, engine, processes, place, *more, name=name)

    return run


SOME = ("null", "deepspeed_stage_3")
ONE = [pytest.param(e, 1, marks=() if e == "null" else SLOW) for e in ENGINES]
TWO = [pytest.param(e, 2, marks=() if e in SOME else SLOW) for e in ENGINES if e != "null"]


@pytest.mark.parametrize(("engine", "processes"), [*ONE, *TWO])
def test_tensors_are_on_one_device_from_the_first_step_to_the_export(engine, processes, lives):
    """No stage of a run with batch norm, from training to resume and export, mixes devices; after each stage's teardown
    the task is on its device again."""
    assert (lives(engine, processes).folder / "bundle" / "model.onnx").is_file()


@pytest.mark.parametrize(
    "engine", ["null", *(pytest.param(e, marks=SLOW) for e in ("ddp", "fsdp", "deepspeed_stage_3"))]
)
def test_a_seed_gives_the_same_weights_on_a_device_as_on_the_cpu(engine, lives, train):
    """A run on the simulated device ends with the weights of a CPU run, for each engine's way to build the network."""
    expected = weights(train(NORM, "data.batch_size=32").folder / "last.ckpt")
    found = weights(lives(engine, 1).folder / "last.ckpt")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def configs(tmp_path_factory, store):
    """A folder with a config and data for each task."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "sets.py").write_text(SETS)
    fill(folder / "masks", 20)
    fill(folder / "pictures" / "one", 12)
    fill(folder / "pictures" / "two", 12, seed=1)
    for name, rows in (("train", reviews(64)), ("dev", reviews(33, 1000)), ("test", reviews(20, 2000))):
        lines = "".join(f"{text}\t{label}\n" for text, label in rows)
        (folder / f"{name}.tsv").write_text(f"sentence\tlabel\n{lines}")
    copy_code("dcgan", folder)
    copy_code("vqvae", folder)
    texts = {
        "text": TEXTS.replace("ROOT", str(folder)),
        "gan": GAN,
        "segmentation": SEGMENTATION.replace("ROOT", str(folder / "masks")),
        "reconstruction": RECONSTRUCTION,
        "regression": REGRESSION,
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text.replace("STORE", str(store)))
    return folder


TASKS = [
    pytest.param("gan", "ddp", marks=SLOW),
    ("regression", "fsdp"),  # it has buffers of its own
    *(pytest.param(task, "null", marks=SLOW) for task in ("gan", "text", "segmentation", "reconstruction")),
    *(pytest.param(task, "deepspeed_stage_3", marks=SLOW) for task in ("text", "regression")),
    pytest.param("segmentation", "fsdp", marks=SLOW),
]


@pytest.mark.parametrize(("task", "engine"), TASKS)
def test_every_task_computes_on_one_device(task, engine, jobs, configs):
    """Each task passes all stages and a resume on one device; a GAN cannot predict, and needs null or ddp."""
    more = ["stages=[train, validate, test]", "model.scheduler=null"] if task == "gan" else [STAGES]
    more += ["logger.histograms=null"] if engine in ("fsdp", "deepspeed_stage_3") else []
    assert_life(jobs, f"{task}.yaml", engine, 1, configs, *more, name=f"life-{task}-{engine}")


def test_parameters_that_zero_keeps_complete_are_sharded_again_for_the_next_stage(jobs, tiny, place):
    """With ZeRO stage 3 the test starts with sharded parameters, although small ones are kept complete and the teardown
    of training moves these to the CPU."""
    settings = ["engine={backend: deepspeed_stage_3, processes: 2}", "stages=[train, test]", NORM]
    done = jobs("train", tiny, *settings, "train.callbacks=[{type: own.Partitioned}]", cwd=place, ranks=2, code=0)
    assert "parameters of the test: all in parts" in done.out


def test_the_names_that_the_pretended_device_replaces_exist():
    """torch has the private functions that `pretend` replaces; a rename would disable part of it."""
    from torch.distributed.fsdp import _fully_shard as fsdp

    assert callable(torch.autograd._engine_run_backward)
    assert callable(fsdp._fully_shard._get_device_from_mesh)
    assert callable(fsdp._fsdp_param_group._get_device_handle)
