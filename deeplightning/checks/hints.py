"""What is right in a config and could be faster, as notices."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from deeplightning.checks.combinations import is_sharded, optimizers_of, uses_deepspeed
from deeplightning.checks.signature_check import Meanings
from deeplightning.config.auto_values import BALANCED, WEIGHT, unfilled
from deeplightning.config.schema import Config, Engine, with_keys
from deeplightning.faults import Notice

# A ViT-L/16 in bf16 with batches of 64; benchmarks/gpu.md has the table.
_WHERE = "Measured on one H200 on 26 November 2026, ViT-L, bf16"
_MEASURED = {
    "fsdp": "fsdp 652 samples/s and 16.0 GiB",
    "deepspeed_stage_1": "deepspeed_stage_1 590 samples/s and 13.7 GiB",
    "deepspeed_stage_2": "deepspeed_stage_2 487 samples/s and 13.7 GiB",
    "deepspeed_stage_3": "deepspeed_stage_3 182 samples/s and 14.3 GiB",
}
_NULL = "null 735 samples/s and 15.9 GiB"


def hints(cfg: Config, asked: Engine) -> Iterator[Notice]:
    """Yield what is right and could be better."""
    yield from _hints_for_one_gpu(cfg.engine)
    if cfg.data.sampler == BALANCED:
        for key, _, name in unfilled(cfg):
            if name == WEIGHT:
                text = f"{key} and data.sampler: each makes the classes count alike; both together favour rare classes"
                yield Notice(f"{text}. Remove one of them", unasked=False, key=key)
    runs_on_cpu = uses_deepspeed(cfg.engine) and cfg.engine.gpus is None  # where DeepSpeed's own have nothing to gain
    if uses_deepspeed(asked) and not runs_on_cpu:
        for optimizer in optimizers_of(cfg):
            if optimizer.type is not None and not optimizer.type.startswith("deepspeed."):
                own = (
                    "deepspeed.ops.adam.DeepSpeedCPUAdam"
                    if "offload" in str(asked.backend)
                    else "deepspeed.ops.adam.FusedAdam"
                )
                text = f"model.optimizer: {optimizer.type} works with DeepSpeed; its own {own} is faster"
                yield Notice(text, unasked=False)
    yield from rates_without_effect(cfg)
    yield from proposals(cfg, asked)


def rates_without_effect(cfg: Config, searched: Collection[str] = ()) -> Iterator[Notice]:
    """Report what sets the learning rate instead of the optimizer's `lr`: the user's task, or a schedule.

    Who writes both rates knows the schedule's; who changes `lr` alone, or searches over it, may not.

    Args:
        searched: keys that a search gives values to.
    """
    if "train" not in cfg.stages:
        return
    task = Meanings().known(cfg.model.module and cfg.model.module.type)
    if cfg.model.optimizer is not None and task is not None and task.ignores_config():
        text = f"model.optimizer has no effect: {cfg.model.module.type} does not read its config"
        yield Notice(text, key="model.optimizer")
        return
    optimizers = dict(with_keys(cfg.model.optimizer, "model.optimizer"))
    for key, schedule in with_keys(cfg.model.scheduler, "model.scheduler"):
        name = str(schedule.type).rpartition(".")[2]
        rate = {"OneCycleLR": "max_lr", "CyclicLR": "base_lr"}.get(name)
        of = key.replace("scheduler", "optimizer", 1)
        if not rate or of not in optimizers or optimizers[of].params.get("lr") == schedule.params.get(rate):
            continue
        changed = cfg.written[1] if cfg.written else []
        is_alone = f"{of}.params.lr" in changed and f"{key}.params.{rate}" not in changed
        if is_alone or f"{of}.params.lr" in searched:
            yield Notice(f"{of}.params.lr has no effect: {name} sets the rate, from {key}.params.{rate}", key=key)


def proposals(cfg: Config, asked: Engine) -> Iterator[Notice]:
    """Yield what would make a run on GPUs faster and changes its digits or suits not every network, so that a person
    has to choose it."""
    if cfg.engine.gpus is None:
        return
    if cfg.engine.compile is False and not is_sharded(asked):
        measured = "measured on an H200: a ResNet-18 at batch 128 saw 40,442 pictures/s instead of 18,069"
        yield Notice(
            f"`engine.compile=graphs` trains small batches faster, with the same weights; {measured}",
            unasked=False,
        )
    words = []
    if cfg.engine.precision in (32, "32-true"):
        words.append("`engine.precision=bf16` (16 bits, on GPUs since Ampere: compare the accuracy)")
    if not cfg.engine.channels_last and not is_sharded(asked) and _has_convolutions(cfg):
        words.append("`engine.channels_last=true` (for convolutions)")
    if words:
        both = "both together" if _has_convolutions(cfg) else "with channels_last"
        measured = (
            f"measured on an H100, {both}: a ResNet-18 at batch 128 kept the GPU busy for 25 % of the time instead of "
            "48 %, and saw 8,825 pictures/s instead of 8,483, since launches bound it"
        )
        yield Notice(f"{' and '.join(words)} may be faster; {measured}", unasked=False)


def _has_convolutions(cfg: Config) -> bool:
    """Return whether the source of a network speaks of convolutions of pictures."""
    for _, target in with_keys(cfg.model.network, "model.network"):
        file = getattr(Meanings().known(target.type), "file", None)
        with contextlib.suppress(OSError):
            if file is not None and any(word in Path(file).read_bytes() for word in (b"Conv2d", b"ConvTranspose2d")):
                return True
    return False


def _hints_for_one_gpu(engine: Engine) -> Iterator[Notice]:
    """Recommend `null` where one process on one GPU would shard, unless it moves tensors to the CPU or a disk.

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
    """Return whether parameters or the optimizer's state leave the GPU."""
    config = engine.params.get("config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    words = [engine.params.get(name) for name in ("cpu_offload", "offload_optimizer", "offload_parameters")]
    words += [zero.get(name) for name in ("offload_optimizer", "offload_param")] if isinstance(zero, Mapping) else []
    return "offload" in str(engine.backend) or any(words)
