"""The strategies of `engine.backend` and the keys of `engine.params`: classes by name, and DeepSpeed's own words.

Nothing is imported: classes are named, and the words of DeepSpeed's JSON are those of its version 0.19.8, in this one
place. tests/unit/test_check.py compares them with the source of the DeepSpeed that is installed.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from deeplightning.faults import Fault, nearest

DDP = ("pytorch_lightning.strategies.DDPStrategy", "torch.nn.parallel.DistributedDataParallel")
FSDP = ("deeplightning.engine.fsdp.Fsdp",)
DEEPSPEED = ("deeplightning.engine.zero.DeepSpeed",)


def classes_of(backend: str | None) -> tuple[str, ...]:
    """Return the classes that `engine.params` go to: what the first does not name is passed to the second, which is
    given the network."""
    if backend is not None and backend.startswith("deepspeed"):
        return DEEPSPEED
    return {"ddp": DDP, "fsdp": FSDP}.get(backend or "", ())


# Arguments of Lightning's strategies that other keys decide.
_DECIDED = {
    "accelerator": "engine.gpus",
    "parallel_devices": "engine.gpus and engine.processes",
    "cluster_environment": "the launcher",
    "checkpoint_io": "how Deep Lightning writes checkpoints",
}
_DECIDED_OF_DEEPSPEED = {"stage": "engine.backend", "precision_plugin": "engine.precision"}

GROUPS = ["gloo", "nccl", "mpi", "ucc", "xccl"]
"""What torch exchanges tensors by (`torch.distributed.Backend.backend_list`)."""

_DTYPES = ["float32", "bfloat16", "float16"]

# Words of DeepSpeed's JSON that other keys of the config decide.
_DECIDED_JSON = {
    "train_batch_size": "data.batch_size",
    "train_micro_batch_size_per_gpu": "data.batch_size",
    "gradient_accumulation_steps": "train.accumulator_factor",
    "gradient_clipping": "train.gradient_clip",
    "optimizer": "model.optimizer",
    "scheduler": "model.scheduler",
}

# DeepSpeed ignores other words at the top of its JSON; inside `zero_optimization` it refuses them itself.
_JSON = [
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
    """Yield what of `engine.params` is wrong for reasons that no signature tells."""
    decided = _DECIDED | (_DECIDED_OF_DEEPSPEED if backend.startswith("deepspeed") else {})
    for name in params:
        if name in decided:
            yield _fault(name, f"{decided[name]} decides it; remove it", name)
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
        if word in _DECIDED_JSON:
            yield _fault(f"config.{word}", f"{_DECIDED_JSON[word]} decides it; remove it", word)
        elif word not in _JSON:
            words = ", ".join(_JSON)
            message = f"unknown to DeepSpeed.{nearest(word, _JSON)} It knows {words}"
            yield _fault(f"config.{word}", message, word, words)
    zero = config.get("zero_optimization")
    if zero is not None and not isinstance(zero, Mapping):
        message = (
            "must be a mapping, such as {reduce_bucket_size: 200_000_000}; `engine.params.zero_optimization: false`"
        )
        yield _fault("config.zero_optimization", f"{message} switches ZeRO off", str(zero), "a mapping")
