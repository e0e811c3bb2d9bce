"""Private names of DeepSpeed 0.19."""

from typing import Any


def skip_shared_memory_sums() -> None:
    """Disable DeepSpeed's shared-memory all-reduce, which takes 74 CPU seconds to compile at first use, like a hang;
    the results are bitwise the same. If the name moves, the first run on a machine takes that time."""
    from deepspeed.ops import __compatible_ops__ as operators

    operators["deepspeed_shm_comm"] = False


def fragment_of(parameter: Any) -> Any:
    """Return the position of a parameter's shard in the flat tensors of ZeRO 1 and 2: `lp_fragment_address` in the
    parameter, `hp_fragment_address` in the tensor, each with `start` and `numel`; None if another process has the
    whole parameter. If the name moves, a checkpoint cannot be saved."""
    return parameter._hp_mapping
