"""What the checklist asks of optimization and of the JSON that DeepSpeed gets, where the modules' own tests stop."""

import json

import pytest

from deeplightning.checks.examine import load_config
from deeplightning.engine.plan import trainer_arguments

SCALER = "{type: torch.amp.GradScaler, params: {device: cpu, init_scale: 1.0e+38, backoff_factor: 1.0e-36}}"
PLUGIN = "{type: pytorch_lightning.plugins.precision.MixedPrecision, params: {precision: 16-mixed, device: cpu"


def test_a_schedule_waits_where_the_scaler_skipped_a_step(job, tracked):
    """A scale that overflows at the first step: the optimizer does not step, and neither does the schedule."""
    params = f"{{precision_plugin: {PLUGIN}, scaler: {SCALER}}}}}}}"
    scheduler = "{type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.5}, call: {interval: step}}"
    settings = [f"engine={{backend: ddp, processes: 2, params: {params}}}", f"model.scheduler={scheduler}"]
    done = job(*settings, "~train.num_epochs", "train.max_steps=4", "logger.log_every_n_steps=1")
    rates = [value for _, value in tracked(done.folder).series()["lr"]]
    assert rates == pytest.approx([0.05, 0.05, 0.025, 0.0125])


# ---- what DeepSpeed is told


ZERO = {
    "ignore_unused_parameters": False,
    "round_robin_gradients": True,
    "stage3_max_live_parameters": 11,
    "stage3_max_reuse_distance": 12,
    "stage3_prefetch_bucket_size": 13,
    "stage3_param_persistence_threshold": 14,
    "stage3_gather_16bit_weights_on_model_save": True,
}
SHORT = {
    "allgather_bucket_size": 21,
    "allgather_partitions": False,
    "contiguous_gradients": False,
    "overlap_comm": True,
    "reduce_bucket_size": 22,
    "reduce_scatter": False,
    "sub_group_size": 23,
}
AIO = {"block_size": 31, "queue_depth": 32, "thread_count": 2, "single_submit": True, "overlap_events": False}


def test_what_is_set_stands_in_the_json_that_deepspeed_gets(tiny, place, monkeypatch):
    """Short forms among the params, DeepSpeed's own names under `config`, and its asynchronous input and output; what
    is not set stays as it is."""
    pytest.importorskip("deepspeed")
    monkeypatch.chdir(place)
    config = {"communication_data_type": "fp32", "steps_per_print": 7, "zero_optimization": ZERO}
    params = {**SHORT, **AIO, "config": config}
    settings = ["engine.backend=deepspeed_stage_3", "engine.processes=2", f"engine.params={json.dumps(params)}"]
    told = trainer_arguments(load_config(tiny, settings))["strategy"].config
    assert {name: told["zero_optimization"][name] for name in {**ZERO, **SHORT}} == {**ZERO, **SHORT}
    assert told["zero_optimization"]["stage"] == 3
    assert told["aio"] == AIO
    assert (told["communication_data_type"], told["steps_per_print"]) == ("fp32", 7)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_is_a_word(stage, tiny, place, monkeypatch):
    """The optimizer's state goes to the CPU's memory from stage 1 on, parameters with stage 3."""
    pytest.importorskip("deepspeed")
    monkeypatch.chdir(place)
    settings = [f"engine.backend=deepspeed_stage_{stage}_offload", "engine.processes=2"]
    told = trainer_arguments(load_config(tiny, settings))["strategy"].config["zero_optimization"]
    assert told["offload_optimizer"]["device"] == "cpu"
    assert ("offload_param" in told) == (stage == 3)
