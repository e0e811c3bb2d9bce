"""Private names of DeepSpeed 0.19."""

from typing import Any


def skip_shared_memory_sums() -> None:
    """Leaves out a faster sum for the processes of one machine, compiled at first use in 74 CPU seconds that look like
    a hang; the results are the same bits. Where the name has moved, the first run on a machine takes that time."""
    from deepspeed.ops import __compatible_ops__ as operators

    operators["deepspeed_shm_comm"] = False


def fragment_of(parameter: Any) -> Any:
    """Where a parameter's part lies in the flat tensors of ZeRO 1 and 2: `lp_fragment_address` in the parameter,
    `hp_fragment_address` in the tensor, each with `start` and `numel`; None if another process has all of it. Where the
    name has moved, a checkpoint cannot be saved."""
    return parameter._hp_mapping
