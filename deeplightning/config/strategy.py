"""The strategy classes of `engine.backend`, and the keys that `engine.params` may have, including DeepSpeed's JSON.

Nothing is imported: classes are given by name, and the JSON keys are those of DeepSpeed 0.19.8.
tests/unit/test_check.py compares them with the source of the installed DeepSpeed.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from deeplightning.faults import Fault, nearest

DDP = ("pytorch_lightning.strategies.DDPStrategy", "torch.nn.parallel.DistributedDataParallel")
FSDP = ("deeplightning.engine.fsdp.Fsdp",)
DEEPSPEED = ("deeplightning.engine.zero.DeepSpeed",)


def classes_of(backend: str | None) -> tuple[str, ...]:
    """Return the classes that take `engine.params`. The first passes what it does not know to the second, which also
    gets the network."""
    if backend is not None and backend.startswith("deepspeed"):
        return DEEPSPEED
    return {"ddp": DDP, "fsdp": FSDP}.get(backend or "", ())


# Arguments of Lightning's strategies that are set by other keys.
_SET_ELSEWHERE = {
    "accelerator": "engine.gpus",
    "parallel_devices": "engine.gpus and engine.processes",
    "cluster_environment": "the launcher",
    "checkpoint_io": "Deep Lightning",
}
_SET_ELSEWHERE_DEEPSPEED = {"stage": "engine.backend", "precision_plugin": "engine.precision"}

GROUPS = ["gloo", "nccl", "mpi", "ucc", "xccl"]
"""Communication backends of torch (`torch.distributed.Backend.backend_list`)."""

_DTYPES = ["float32", "bfloat16", "float16"]

# Keys of DeepSpeed's JSON that are set by other keys of the config.
_JSON_SET_ELSEWHERE = {
    "train_batch_size": "data.batch_size",
    "train_micro_batch_size_per_gpu": "data.batch_size",
    "gradient_accumulation_steps": "train.accumulator_factor",
    "gradient_clipping": "train.gradient_clip",
    "optimizer": "model.optimizer",
    "scheduler": "model.scheduler",
}

# DeepSpeed ignores other keys at the top level of its JSON. In `zero_optimization` it refuses unknown keys itself.
_JSON_KEYS = [
    "activation_checkpointing", "aio", "autotuning", "bf16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_efficiency", "data_types", "dataloader_drop_last",
    "datastates_ckpt", "disable_allgather", "disable_python_gc", "dump_state", "expert_parallel", "flops_profiler",
    "fp16", "gradient_allreduce_op", "gradient_predivide_factor", "hybrid_engine", "log_level",
    "managed_gradient_accumulation", "memory_breakdown", "pipeline", "prescale_gradients",
    "seq_parallel_communication_data_type", "sequence_parallel_size", "steps_per_print", "tensor_parallel",
    "tensorboard", "timers", "torch_autocast", "use_data_before_expert_parallelism", "vocabulary_size",
    "wall_clock_breakdown", "wandb", "weight_quantization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
]  # fmt: skip


def _fault(key: str, message: str, found: str, allowed: str | None = None) -> Fault:
    """Return a fault of a key below `engine.params`."""
    return Fault(message, f"engine.params.{key}", found=found, allowed=allowed)


def misfits(backend: str, params: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults of `engine.params` that no signature shows."""
    set_elsewhere = _SET_ELSEWHERE | (_SET_ELSEWHERE_DEEPSPEED if backend.startswith("deepspeed") else {})
    for name in params:
        if name in set_elsewhere:
            yield _fault(name, f"is set by {set_elsewhere[name]}; remove it", name)
    timeout = params.get("timeout", 1)
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (is_number and 0 < timeout < math.inf):
        yield _fault("timeout", f"must be a number of seconds, more than 0, not {timeout!r:.60}", repr(timeout)[:60])
    for name in ("param_dtype", "reduce_dtype", "output_dtype") if backend == "fsdp" else ():
        word = params.get(name)
        if isinstance(word, str) and word not in _DTYPES:
            words = ", ".join(_DTYPES)
            yield _fault(name, f"must be one of {words}, not {word!r:.60}.{nearest(word, _DTYPES)}", word, words)
    group = params.get("process_group_backend")
    if isinstance(group, str) and ":" not in group and group.lower() not in GROUPS:  # torch takes `cpu:gloo,…` too
        words = ", ".join(GROUPS)
        message = f"must be one of {words}, not {group!r:.60}.{nearest(group, GROUPS)}"
        yield _fault("process_group_backend", message, group, words)
    config = params.get("config")
    if backend.startswith("deepspeed") and isinstance(config, Mapping):
        yield from _json_misfits(config)


def _json_misfits(config: Mapping[str, object]) -> Iterator[Fault]:
    for word in config:
        if word in _JSON_SET_ELSEWHERE:
            yield _fault(f"config.{word}", f"is set by {_JSON_SET_ELSEWHERE[word]}; remove it", word)
        elif word not in _JSON_KEYS:
            words = ", ".join(_JSON_KEYS)
            message = f"unknown to DeepSpeed.{nearest(word, _JSON_KEYS)} It knows {words}"
            yield _fault(f"config.{word}", message, word, words)
    zero = config.get("zero_optimization")
    if zero is not None and not isinstance(zero, Mapping):
        how = "such as {reduce_bucket_size: 200_000_000}; `engine.params.zero_optimization: false` switches ZeRO off"
        yield _fault("config.zero_optimization", f"must be a mapping, {how}", str(zero), "a mapping")
