"""`engine.backend` changes how a run is distributed, but not its losses, checkpoints, resumes or exports."""

import functools
import json
import shutil

import numpy as np
import pytest

from deeplightning.engine.checkpoint_reading import read_checkpoint

ENGINES = ["null", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
SPREAD = ENGINES[1:]
# Two groups, a schedule by steps, accumulation with a tail (150 samples: five batches of 32, two a step) and clipping.
# Losing the optimizer's state between two epochs changes the last `val_loss` by a tenth.
LEARNING = [
    "model.network={type: own.network, params: {width: 40}}",
    "model.optimizer={type: torch.optim.AdamW, params: {lr: 0.01}, groups: [{match: bias, weight_decay: 0}]}",
    "model.scheduler={type: torch.optim.lr_scheduler.StepLR, call: {interval: step}}",
    "model.scheduler.params={step_size: 2, gamma: 0.8}",
    "train.accumulator_factor=2",
    "train.gradient_clip={value: 0.5}",
    "logger.log_every_n_steps=1",
]


def spread(engine):
    """Return overrides and number of processes for an engine; an optimizer step sees two batches of 32 samples."""
    processes = 1 if engine == "null" else 2
    return [f"engine.backend={engine}", f"data.batch_size={32 // processes}"], processes


@pytest.fixture(scope="module")
def learned(job):
    """`learned(engine, epochs=2)` is a cached run of the same config under an engine."""

    @functools.cache
    def run(engine, epochs=2):
        overrides, ranks = spread(engine)
        return job(*LEARNING, *overrides, f"train.num_epochs={epochs}", ranks=ranks)

    return run


@pytest.fixture(scope="module")
def resume(job, learned, tmp_path_factory, tracked):
    """`resume(before, after)` is the final `val_loss` of a run whose second epoch is under another engine."""

    def run(before, after):
        folder = tmp_path_factory.mktemp("first") / "copy"
        shutil.copytree(learned(before, epochs=1).folder, folder)
        overrides, ranks = spread(after)
        resumed = job(*LEARNING, *overrides, f"train.resume_ckpt='{folder / 'last.ckpt'}'", ranks=ranks)
        return tracked(resumed.folder).metrics["val_loss"]

    return run


@pytest.mark.parametrize(
    "engine",
    [pytest.param(e, marks=[pytest.mark.slow] * (e in ("deepspeed_stage_1", "deepspeed_stage_2"))) for e in SPREAD],
)
def test_every_engine_learns_what_one_process_learns(engine, learned, tracked):
    """Two processes have the losses of each step and the metrics of one with twice the batch, to a thousandth."""
    expected, found = (tracked(learned(name).folder).series() for name in ("null", engine))
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert found[name] == [(step, pytest.approx(value, abs=1e-3)) for step, value in points], name


PAIRS = [(before, after) for before in ENGINES for after in ENGINES]


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(*p, marks=[pytest.mark.slow] * (p != ("null", "ddp"))) for p in PAIRS]
)
def test_a_run_resumes_under_any_engine_from_any(before, after, resume, learned, tracked, record_property):
    """A run whose epochs have different engines ends with the loss of a run in one process."""
    expected, found = tracked(learned("null").folder).metrics["val_loss"], resume(before, after)
    record_property("val_loss", (before, after, found, expected))
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("after", SPREAD)
def test_a_run_resumes_with_more_processes(after, job, learned, tracked, tmp_path, record_property):
    """A run of two processes resumes with three, and ends with the loss of a resume in one process."""
    shutil.copytree(learned(after, epochs=1).folder, tmp_path / "copy")
    equal = ["data.batch_size=10", "train.accumulator_factor=1"]
    resume = f"train.resume_ckpt='{tmp_path / 'copy' / 'last.ckpt'}'"
    three = job(*LEARNING, f"engine.backend={after}", *equal, resume, ranks=3)
    one = job(*LEARNING, *equal, "data.batch_size=30", resume, ranks=1)
    expected, found = (tracked(run.folder).metrics["val_loss"] for run in (one, three))
    record_property("val_loss", (after, after, found, expected))
    assert found == pytest.approx(expected, abs=1e-3)


# The length of the schedule is computed before a run knows where it resumes. An epoch does not use all the data.
AUTO = [
    "model.network={type: own.Dropout}",
    "model.optimizer={type: torch.optim.Adam, params: {lr: 0.01}, groups: [{match: bias, weight_decay: 0.1}]}",
    "model.scheduler={type: torch.optim.lr_scheduler.OneCycleLR, call: {interval: step}}",
    "model.scheduler.params={max_lr: 0.01, total_steps: auto}",
    "train.num_epochs=3",
    "train.limit_batches={train: 0.8}",
    "train.checkpoint={every_n_steps: 1}",
    "train.resume_ckpt=auto",
]
ACCUMULATED = "train.accumulator_factor=2"
OWN_TASK = ["model.module={type: own.AsksForSteps}", "model.scheduler=null", "model.optimizer.groups=[]"]


@pytest.fixture(scope="module")
def end_of(jobs, tiny, place):
    """`end_of(engine, processes, experiment, override, …)` is such a run's Outcome; one process keeps its engine."""

    def run(engine, processes, experiment, *overrides):
        named = [f"logger.params.experiment_name={experiment}", f"engine.backend={engine}"]
        spread = [f"engine.processes={processes}", f"data.batch_size={32 // processes}"]
        main = "single:main" if processes == 1 else "deeplightning.cli:main"
        return jobs("train", tiny, *AUTO, *named, *spread, *overrides, cwd=place, ranks=processes, main=main)

    return run


INSIDE, EDGE = (1, 2), (2, 0)  # of an epoch
KILLS = [(engine, processes, at, ()) for engine in SPREAD for processes in (1, 2) for at in (INSIDE, EDGE)]
KILLS += [(e, 2, INSIDE, (ACCUMULATED,)) for e in ("ddp", "fsdp", "deepspeed_stage_3")]
KILLS += [(e, 2, INSIDE, OWN_TASK) for e in ("ddp", "fsdp", "deepspeed_stage_3")]
QUICK = [("deepspeed_stage_3", 2, INSIDE, ())]


@pytest.mark.parametrize(
    ("engine", "processes", "at", "more"),
    [pytest.param(*kill, marks=[pytest.mark.slow] * (kill not in QUICK)) for kill in KILLS],
)
def test_a_killed_run_whose_schedule_says_auto_ends_bit_for_bit(engine, processes, at, more, end_of):
    """A killed and resumed run ends with the weights, optimizer and schedule of an uninterrupted one."""
    name = f"{engine}-{processes}-{at[0]}-{at[1]}-{len(more)}"
    kill = f"train.callbacks=[{{type: own.Killed, params: {{epoch: {at[0]}, batch: {at[1]}}}}}]"
    killed = end_of(engine, processes, name, *more, kill)
    assert killed.code != 0, killed
    resumed = end_of(engine, processes, name, *more)
    expected = end_of(engine, processes, f"{name}-uninterrupted", *more)
    assert (resumed.code, expected.code) == (0, 0), (resumed, expected)
    assert "last.ckpt (step" in resumed.out, resumed
    assert_same_bits(resumed, expected)


# The sizes that `deeplightning.engine.zero.sizes` sets for billions of parameters, scaled down to 3,000.
ZERO = {f"stage3_{name}": 200 for name in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")}
SIZES = {"reduce_bucket_size": 200, "sub_group_size": 400, "config": {"zero_optimization": ZERO}}


@pytest.mark.slow
def test_sizes_of_stage_3_that_cut_a_network_into_parts_change_no_result(job, learned):
    """Buckets smaller than the network change neither weights nor optimizer; a resume is exact to the last bit."""
    overrides, ranks = spread("deepspeed_stage_3")
    settings = [*LEARNING, *overrides, f"engine.params={json.dumps(SIZES)}", "train.num_epochs=2"]
    uninterrupted = job(*settings, ranks=ranks)
    stopped = job(*settings, "train.max_steps=4", ranks=ranks)
    resumed = job(*settings, f"train.resume_ckpt='{stopped.folder}'", ranks=ranks)
    assert_same_bits(resumed, uninterrupted)
    runs = learned("deepspeed_stage_3"), uninterrupted
    expected, found = (read_checkpoint(run.folder / "last.ckpt") for run in runs)
    assert_close(found, expected, 1e-5, 1e-4)


def assert_same_bits(found, expected):
    """Assert that two runs have the same weights, optimizer, schedule and step to the last bit."""
    theirs, ours = (read_checkpoint(run.folder / "last.ckpt") for run in (found, expected))
    for name in ("global_step", "lr_schedulers", "state_dict"):
        assert _bits(theirs[name]) == _bits(ours[name]), name
    assert _bits(theirs["optimizer_states"][0]["state"]) == _bits(ours["optimizer_states"][0]["state"])


def _bits(value):
    """Convert tensors at any depth to bytes."""
    if isinstance(value, dict):
        return {name: _bits(item) for name, item in value.items()}
    return value.numpy().tobytes() if hasattr(value, "numpy") else value


def assert_close(found, expected, of_weights, of_state):
    """Assert that two checkpoints have the same names, and the same numbers within relative distances."""
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    for name, tensor in expected["state_dict"].items():
        assert _distance(found["state_dict"][name], tensor) < of_weights
    (theirs,), (ours,) = found["optimizer_states"], expected["optimizer_states"]
    assert theirs["state"].keys() == ours["state"].keys()
    for number, state in ours["state"].items():
        for name, value in state.items():
            assert _distance(theirs["state"][number][name], value) < of_state


def test_every_engine_leaves_the_same_checkpoint(learned):
    """The weights, the optimizer's state and its groups are those that one process saves."""
    expected = read_checkpoint(learned("null").folder / "last.ckpt")
    for engine in SPREAD:
        found = read_checkpoint(learned(engine).folder / "last.ckpt")
        assert_close(found, expected, 1e-4, 1e-3)
        (theirs,), (ours,) = found["optimizer_states"], expected["optimizer_states"]
        assert [group["params"] for group in theirs["param_groups"]] == [g["params"] for g in ours["param_groups"]]
        assert [group["weight_decay"] for group in theirs["param_groups"]] == [0, 0.01]
        steps = [state["step"].data_ptr() for state in theirs["state"].values()]
        assert len(set(steps)) == len(steps), "a step count that parameters share is incremented by each"


def _distance(found, expected):
    """Return the relative distance in the Euclidean norm."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "engine", [pytest.param(e, marks=[pytest.mark.slow] * (e not in ("fsdp", "deepspeed_stage_3"))) for e in SPREAD]
)
def test_every_engine_exports_the_same_network(engine, learned, command, place):
    """`deeplightning export` gives a network with the probabilities of one process's, to 1e-5."""
    expected, found = (_probabilities(learned(name).folder, command, place) for name in ("null", engine))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def _probabilities(folder, command, place):
    import onnxruntime

    if not (folder / "bundle").exists():
        command("export", folder, cwd=place, code=0)
    session = onnxruntime.InferenceSession(folder / "bundle" / "model.onnx")
    images = np.arange(40 * 64, dtype=np.uint64).reshape(40, 1, 8, 8) * 7919 % 256
    return session.run(None, {session.get_inputs()[0].name: images.astype(np.uint8)})[0]
