"""What a config asks for and what the machine has become one plan: the effective engine, and the Trainer's arguments.

Torch and Lightning are imported only where a machine must be asked or a strategy made.
"""

import os
from dataclasses import dataclass
from typing import Any

from deeplightning.config.fault import ConfigError, Fault, SetupError
from deeplightning.config.schema import Config, Engine
from deeplightning.config.target import is_installed

_BACKENDS = {
    "horovod": "ddp",
    "dp": "ddp",
    "fairscale_oss": "deepspeed_stage_1",
    "fairscale_sddp": "deepspeed_stage_2",
    "fairscale_fsdp": "fsdp",
}
_PRECISIONS = {"amp": "16-mixed", "apex_O1": "16-mixed", "apex_O2": "16-mixed"}
_WORDS = {16: "16-mixed", 32: "32-true", 64: "64-true", "bf16": "bf16-mixed"}


@dataclass(frozen=True)
class Notice:
    """What was changed in a config, and why; `unasked` if the user did not leave it to us."""

    text: str
    unasked: bool = True


def settle(cfg: Config) -> list[Notice]:
    """Makes `cfg.engine` what will really run, in place; returns a notice for each thing that was changed.

    Raises:
        SetupError: the machine lacks devices or a package that the engine needs.
        ConfigError: engine keys that contradict each other.
    """
    engine, notices = cfg.engine, []

    def change(key: str, value: Any, why: str) -> None:
        before = getattr(engine, key)
        words = ("null" if v is None else v for v in (before, value))
        notices.append(Notice("engine.{}: {} → {} ({})".format(key, *words, why), unasked=before != "auto"))
        setattr(engine, key, value)

    if engine.backend in _BACKENDS:
        change("backend", _BACKENDS[engine.backend], f"{engine.backend} is its older name")
    if engine.precision in _PRECISIONS:
        change("precision", _PRECISIONS[engine.precision], f"{engine.precision} is its older name")
    _settle_devices(engine, change)
    world = world_size(engine)
    if world == 1 and engine.gpus is None and engine.backend is not None:
        change("backend", None, "there is one process and no GPU")
    if world > 1 and engine.backend is None:
        change("backend", "ddp", f"there are {world} processes")
    if engine.gpus is None and engine.precision in (16, "16-mixed"):
        change("precision", "bf16-mixed", "half precision on CPU is bf16")
    _refuse(cfg, world)
    return notices


def _settle_devices(engine: Engine, change: Any) -> None:
    if engine.gpus is None:
        return
    import torch

    found = torch.cuda.device_count()
    if engine.gpus == "auto":
        change("gpus", list(range(found)) or None, f"this machine has {found or 'none'}")
        return
    if engine.gpus in (0, []):
        change("gpus", None, "no GPU is asked for")
        return
    asked = engine.gpus if isinstance(engine.gpus, list) else list(range(engine.gpus))
    missing = [str(i) for i in asked if not 0 <= i < found]
    if missing:
        message = (
            f"asks for {', '.join(map(str, asked))}, and this machine has {found or 'none'}; "
            "`engine.gpus=null` runs on the CPU, `engine.gpus=auto` takes what is there"
        )
        raise SetupError(Fault(message, "engine.gpus"))


def world_size(engine: Engine) -> int:
    """Processes of the whole run."""
    if engine.gpus is None:
        return engine.processes
    return engine.gpus if isinstance(engine.gpus, int) else len(engine.gpus)


def _refuse(cfg: Config, world: int) -> None:
    engine, faults = cfg.engine, []
    sharded = engine.backend is not None and engine.backend != "ddp"
    if sharded and engine.gpus is None:
        message = f"{engine.backend} needs GPUs in this version; over CPU processes use `engine.backend=ddp`"
        faults.append(Fault(message, "engine.backend"))
    deepspeed = (engine.backend or "").startswith("deepspeed")
    clip = cfg.train.gradient_clip
    if deepspeed and clip is not None and clip.algorithm == "value":
        message = f"DeepSpeed ({engine.backend}) clips by norm only; set `train.gradient_clip.algorithm=norm`"
        faults.append(Fault(message, "train.gradient_clip.algorithm"))
    if sharded and clip is not None and clip.algorithm == "norm" and clip.norm_type != 2:
        message = f"{engine.backend} knows the second norm only; set `train.gradient_clip.norm_type=2`"
        faults.append(Fault(message, "train.gradient_clip.norm_type"))
    if engine.sync_batchnorm and engine.gpus is None:
        faults.append(Fault("torch synchronises batch norm on GPUs only; set it to false", "engine.sync_batchnorm"))
    if engine.params and engine.backend is None:
        message = f"there is no strategy to give {', '.join(engine.params)} to; set `engine.backend`, or remove them"
        faults.append(Fault(message, "engine.params"))
    if engine.params.get("process_group_backend") == "nccl" and engine.gpus is None:
        faults.append(Fault("nccl needs GPUs; over CPU processes it is gloo", "engine.params.process_group_backend"))
    if faults:
        raise ConfigError(faults)
    if deepspeed and not is_installed("deepspeed"):
        message = f"{engine.backend} needs the package deepspeed: install the extra `deeplightning[deepspeed]`"
        raise SetupError(Fault(message, "engine.backend"))


def trainer_arguments(cfg: Config) -> dict[str, Any]:
    """Keyword arguments of Lightning's Trainer for a settled config."""
    engine = cfg.engine
    return {
        "accelerator": "cpu" if engine.gpus is None else "gpu",
        "devices": engine.processes if engine.gpus is None else engine.gpus,
        "num_nodes": engine.num_nodes,
        "strategy": _strategy(engine),
        "precision": _WORDS.get(engine.precision, engine.precision),
        "deterministic": engine.deterministic,
        "sync_batchnorm": engine.sync_batchnorm,
        "profiler": "pytorch" if engine.profiler == "torch" else engine.profiler,
    }


def _strategy(engine: Engine) -> Any:
    if engine.backend is None:
        return "auto"
    from pytorch_lightning import strategies

    params = dict(engine.params)
    try:
        if engine.backend == "ddp":
            params.setdefault("process_group_backend", "gloo" if engine.gpus is None else "nccl")
            return strategies.DDPStrategy(**params)
        if engine.backend == "fsdp":
            return strategies.FSDPStrategy(**params)
        stage, _, offload = engine.backend.removeprefix("deepspeed_stage_").partition("_")
        moved = {"offload_optimizer": True, "offload_parameters": stage == "3"} if offload else {}
        return strategies.DeepSpeedStrategy(**{"stage": int(stage), **moved, **params})
    except (TypeError, ValueError) as error:
        raise ConfigError(Fault(f"{engine.backend} refuses its arguments: {error}", "engine.params")) from error


def own_rank() -> int:
    """This process's number, as launchers tell it before there is a process group."""
    return int(next((os.environ[n] for n in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if os.environ.get(n)), 0))


def effective_batch(cfg: Config) -> str:
    """How many samples one optimizer step sees, and what multiplies to it."""
    batch, world, factor = cfg.data.batch_size, world_size(cfg.engine), cfg.train.accumulator_factor
    parts = [f"{batch} per process"]
    parts += [f"{world} processes"] if world > 1 else []
    parts += [f"{factor} batches accumulated"] if factor > 1 else []
    late = f" from epoch {cfg.train.accumulator_epoch} on" if factor > 1 and cfg.train.accumulator_epoch else ""
    return f"{batch * world * factor} samples a step: {' x '.join(parts)}{late}"
