"""The arguments of Lightning's Trainer for an engine: devices, strategy, precision, gradient clipping."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from deeplightning.config.schema import Config, Engine
from deeplightning.config.target import build_inside
from deeplightning.faults import ConfigError, Fault

if TYPE_CHECKING:
    from pytorch_lightning.strategies import Strategy

_PRECISIONS = {16: "16-mixed", 32: "32-true", 64: "64-true", "bf16": "bf16-mixed"}


def trainer_arguments(cfg: Config) -> dict[str, Any]:
    """Return the keyword arguments of Lightning's Trainer for a resolved config."""
    from torch import are_deterministic_algorithms_enabled

    engine = cfg.engine
    profiler = None if engine.profiler == "flops" else engine.profiler
    return {
        "accelerator": "cpu" if engine.gpus is None else "gpu",
        "devices": engine.processes if engine.gpus is None else engine.gpus,
        "num_nodes": engine.num_nodes,
        "strategy": _strategy(engine),
        "precision": _PRECISIONS.get(engine.precision, engine.precision),
        # Lightning would pass False to torch, which then imports its compiler (torch 2.15: 1.2 CPU seconds).
        "deterministic": engine.deterministic or (False if are_deterministic_algorithms_enabled() else None),
        "sync_batchnorm": engine.sync_batchnorm,
        "profiler": profiler and {"torch": "pytorch"}.get(profiler, profiler),
    }


def clip_arguments(cfg: Config) -> dict[str, Any]:
    """Return the Trainer's arguments for gradient clipping; none for `agc`, which Lightning does not have."""
    clip = cfg.train.gradient_clip
    if clip is None or clip.algorithm == "agc":
        return {}
    return {"gradient_clip_val": clip.value, "gradient_clip_algorithm": clip.algorithm}


def _strategy(engine: Engine) -> "str | Strategy":
    if engine.backend is None:
        return "auto"
    try:
        params = build_inside(engine.params)
        if "timeout" in params:
            params["timeout"] = timedelta(seconds=params["timeout"])
        if engine.backend == "ddp":
            params.setdefault("process_group_backend", "gloo" if engine.gpus is None else "nccl")
            from deeplightning.engine.process_group import Ddp

            return Ddp(**params)
        if engine.backend == "fsdp":
            from deeplightning.engine.fsdp import Fsdp

            if engine.gpus is not None and params.get("cpu_offload"):  # norms of gradients are added on the CPU
                params["process_group_backend"] = params.get("process_group_backend") or "cpu:gloo,cuda:nccl"
            return Fsdp(**params)
        if engine.gpus is None:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed searches for one and warns
        from deeplightning.engine.zero import DeepSpeed

        stage, _, offload = engine.backend.removeprefix("deepspeed_stage_").partition("_")
        targets: dict[str, object] = {"offload_optimizer": True, "offload_parameters": stage == "3"} if offload else {}
        if offload == "offload_nvme":
            targets |= {"offload_optimizer_device": "nvme", "offload_params_device": "nvme"}
        return DeepSpeed(**{"stage": int(stage), **targets, **params})
    except (TypeError, ValueError) as error:
        raise ConfigError(Fault(f"{engine.backend} refuses its arguments: {error}", "engine.params")) from error
