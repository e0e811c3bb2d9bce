"""Questions about a config that the rules and hints of combinations ask: which engine, optimizer, clipping it uses."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deeplightning.checks import strategy
from deeplightning.checks.signature_check import Meanings
from deeplightning.config.schema import Config, Engine, Optimizer, Target
from deeplightning.engine.plan import world_size


def uses_deepspeed(asked: Engine) -> bool:
    return (asked.backend or "").startswith("deepspeed")


def is_sharded(asked: Engine) -> bool:
    return uses_deepspeed(asked) or asked.backend == "fsdp"


def splits_layers(asked: Engine) -> bool:
    """Return whether the engine that was asked for is tensor-parallel."""
    size = asked.params.get("tensor_parallel", 1)
    return asked.backend == "fsdp" and isinstance(size, int) and size > 1


def leaves_processes_over(cfg: Config) -> bool:
    """Return whether the processes, where their number is known, are no multiple of a tensor-parallel group."""
    engine = cfg.engine
    if not splits_layers(engine) or engine.gpus == "auto":
        return False
    return world_size(engine) % int(engine.params["tensor_parallel"]) != 0


def optimizers_of(cfg: Config) -> list[Target]:
    found = cfg.model.optimizer
    return [o for o in (found.values() if isinstance(found, dict) else [found]) if o is not None]


def uses_optimizer(cfg: Config, *names: str) -> bool:
    return any(o.type is not None and o.type.rpartition(".")[2] in names for o in optimizers_of(cfg))


def lacks_fused_kernel(cfg: Config) -> bool:
    """Return whether an optimizer is one of torch's that has no fused kernel."""
    names = [o.type.rpartition(".") for o in optimizers_of(cfg) if isinstance(o.type, str)]
    return any(
        module.startswith("torch.optim") and name not in ("Adam", "AdamW", "Adagrad", "SGD")
        for module, _, name in names
    )


EMA = "deeplightning.callbacks.average.EMA"


def averages(cfg: Config) -> bool:
    """Return whether a training averages its weights by the callback of ours."""
    return "train" in cfg.stages and any(isinstance(c, Target) and c.type == EMA for c in cfg.train.callbacks)


def warms_up(cfg: Config) -> bool:
    found = cfg.model.scheduler
    return any(getattr(s, "warmup", 0.0) for s in (found.values() if isinstance(found, dict) else [found]))


def clips_by(cfg: Config, algorithm: str) -> bool:
    clip = cfg.train.gradient_clip
    return clip is not None and clip.algorithm == algorithm


def clips_by_other_norm(cfg: Config) -> bool:
    clip = cfg.train.gradient_clip
    return clip is not None and clip.algorithm == "norm" and clip.norm_type != 2


def communication_hook(cfg: Config) -> str:
    hook = cfg.engine.params.get("ddp_comm_hook")
    return str(hook.get("ref", "")) if isinstance(hook, Mapping) else str(hook or "")


def names_another_stage(cfg: Config, asked: Engine) -> bool:
    stage = cfg.engine.params.get("stage")
    return uses_deepspeed(asked) and stage is not None and not str(asked.backend).startswith(f"deepspeed_stage_{stage}")


def lacks_nvme_folder(cfg: Config) -> bool:
    """Return whether an NVMe disk would be used that is not there."""
    runs = cfg.engine.backend
    path = strategy.nvme_path(runs, cfg.engine.params) if (runs or "").startswith("deepspeed") else None
    return path is not None and not Path(path).is_dir()


def steps_itself(cfg: Config) -> bool:
    """Return whether the task steps its optimizers itself, as far as its source tells."""
    task = _task(cfg)
    return task is not None and task.steps_itself()


def ignores_config(cfg: Config) -> bool:
    """Return whether the task does not read the config, as far as its source tells."""
    task = _task(cfg)
    return task is not None and task.ignores_config()


def _task(cfg: Config) -> Any:
    """Return what the source says of the task; None where it is missing, or cannot be read."""
    return Meanings().known(cfg.model.module and cfg.model.module.type)


LEAST_EPS = 1e-7
"""Below it `eps` vanishes in half precision, whose smallest number is 6e-8."""


_OWN_32_BITS = ("apex.", "bitsandbytes.")  # their optimizers compute in 32 bits whatever the parameters have


def loses_eps(cfg: Config) -> bool:
    """Return whether an optimizer divides by an `eps` that half precision rounds to 0."""
    for optimizer in optimizers_of(cfg):
        if not isinstance(optimizer.type, str) or optimizer.type.startswith(_OWN_32_BITS):
            continue
        groups = optimizer.groups if isinstance(optimizer, Optimizer) else []
        given = [group["eps"] for group in groups if isinstance(group, Mapping) and "eps" in group]
        own = Meanings().parameters(optimizer.type).get("eps")
        given.append((optimizer.params or {}).get("eps", own and own.default))
        if any(isinstance(eps, int | float) and eps < LEAST_EPS for eps in given):
            return True
    return False


def lacks_weights(cfg: Config) -> bool:
    return "train" not in cfg.stages and bool(cfg.stages) and cfg.test.ckpt is None


def has_convolutions(cfg: Config) -> bool:
    """Return whether the source of a network speaks of convolutions of pictures."""
    found = cfg.model.network
    for target in found.values() if isinstance(found, dict) else [found]:
        file = getattr(Meanings().known(target and target.type), "file", None)
        with contextlib.suppress(OSError):
            if file is not None and any(word in Path(file).read_bytes() for word in (b"Conv2d", b"ConvTranspose2d")):
                return True
    return False
