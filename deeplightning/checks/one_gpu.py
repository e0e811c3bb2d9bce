"""What a sharding backend brings on one GPU: a hint for `check`, `plan` and `train`, with measured figures."""

from collections.abc import Iterator, Mapping

from deeplightning.config.schema import Engine
from deeplightning.faults import Notice

# A ViT-L/16 in bf16 with batches of 64 on one NVIDIA H100 80GB; docs/gpu.md has the table.
_WHERE = "Measured on one H100 on 23 November 2026, ViT-L, bf16"
_MEASURED = {
    "fsdp": "fsdp 371 samples/s and 16.0 GiB",
    "deepspeed_stage_1": "deepspeed_stage_1 405 samples/s and 13.7 GiB",
    "deepspeed_stage_2": "deepspeed_stage_2 325 samples/s and 13.7 GiB",
    "deepspeed_stage_3": "deepspeed_stage_3 111 samples/s and 14.3 GiB",
}
_NULL = "null 823 samples/s and 15.9 GiB"


def hints_for_one_gpu(engine: Engine) -> Iterator[Notice]:
    """Recommends `null` where one process on one GPU would shard, unless it moves tensors to the CPU or a disk.

    Args:
        engine: as it will run here.
    """
    backend = engine.backend or ""
    is_one = (engine.gpus == 1 or (isinstance(engine.gpus, list) and len(engine.gpus) == 1)) and engine.num_nodes == 1
    if not is_one or not backend.startswith(("fsdp", "deepspeed")) or _offloads(engine):
        return
    offload = "engine.params.cpu_offload=true" if backend == "fsdp" else "engine.backend=deepspeed_stage_3_offload"
    text = (
        f"engine.backend: with one GPU {backend} has no other process to share with; set engine.backend=null, or "
        f"{offload} if the network does not fit"
    )
    if backend in _MEASURED:
        text += f". {_WHERE}: {_NULL}; {_MEASURED[backend]}"
    yield Notice(text, unasked=False, key="engine.backend")


def _offloads(engine: Engine) -> bool:
    """Whether parameters or the optimizer's state leave the GPU."""
    config = engine.params.get("config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    words = [engine.params.get(name) for name in ("cpu_offload", "offload_optimizer", "offload_parameters")]
    words += [zero.get(name) for name in ("offload_optimizer", "offload_param")] if isinstance(zero, Mapping) else []
    return "offload" in str(engine.backend) or any(words)
