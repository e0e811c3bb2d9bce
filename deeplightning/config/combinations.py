"""Rules for settings that cannot be combined, with reasons and remedies. The manual's tables are generated from them.

A rule gets the config as it will run here, and the engine as requested, with the current name of its backend: what
DeepSpeed refuses on eight GPUs is also reported on a laptop, where a single process needs no backend.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from deeplightning.config.schema import Config, Engine, Optimizer, Target, plain, targets_of, value_at
from deeplightning.config.signature_check import Meanings
from deeplightning.config.tree import line
from deeplightning.faults import Fault, upwards

# ---- predicates


def uses_deepspeed(asked: Engine) -> bool:
    return (asked.backend or "").startswith("deepspeed")


def is_sharded(asked: Engine) -> bool:
    return uses_deepspeed(asked) or asked.backend == "fsdp"


def uses_optimizer(cfg: Config, *names: str) -> bool:
    return any(o.type is not None and o.type.rpartition(".")[2] in names for o in targets_of(cfg.model.optimizer))


EMA = "deeplightning.callbacks.average.EMA"


def has_callback(cfg: Config, name: str) -> bool:
    """Return whether training uses a callback of a class, given by its path or its bare name."""
    paths = [str(c.type) for c in cfg.train.callbacks if isinstance(c, Target)]
    return "train" in cfg.stages and any(name in (path, path.rpartition(".")[2]) for path in paths)


def clips_by(cfg: Config, algorithm: str) -> bool:
    clip = cfg.train.gradient_clip
    return clip is not None and clip.algorithm == algorithm


def steps_itself(cfg: Config) -> bool:
    """Return whether the run trains a task that steps its optimizers itself, as far as the task's source shows."""
    trains = "train" in cfg.stages and cfg.train.num_epochs != 0
    task = Meanings().known(cfg.model.module and cfg.model.module.type) if trains else None
    return task is not None and task.uses_manual_optimization()


MIN_EPS = 1e-7
"""A smaller `eps` underflows in half precision, whose smallest number is 6e-8."""

_FP32_OPTIMIZERS = ("apex.", "bitsandbytes.")  # they compute in 32 bits whatever the parameters' precision


def loses_eps(cfg: Config) -> bool:
    """Return whether an optimizer divides by an `eps` that half precision rounds to 0."""
    for optimizer in targets_of(cfg.model.optimizer):
        if not isinstance(optimizer.type, str) or optimizer.type.startswith(_FP32_OPTIMIZERS):
            continue
        groups = optimizer.groups if isinstance(optimizer, Optimizer) else []
        given = [group["eps"] for group in groups if isinstance(group, Mapping) and "eps" in group]
        own = Meanings().parameters(optimizer.type).get("eps")
        given.append((optimizer.params or {}).get("eps", own and own.default))
        if any(isinstance(eps, int | float) and eps < MIN_EPS for eps in given):
            return True
    return False


# ---- the rules


@dataclass(frozen=True)
class Rule:
    """Two settings that cannot be combined.

    Attributes:
        key: the key at which the fault is reported.
        when: the two settings, in words.
        why: the reason, worded to follow a colon.
        remedy: what to do.
        broken: whether a config and the requested engine break the rule.
        other: the key that it cannot be combined with.
        exit_code: 2 if the config is wrong, 3 if the machine lacks something, 4 if weights are missing.
    """

    key: str
    when: str
    why: str
    remedy: str
    broken: Callable[[Config, Engine], bool]
    other: str = "engine.backend"
    exit_code: int = 2


RULES = [
    Rule(
        "train.gradient_clip.algorithm",
        "clip by value, DeepSpeed",
        "DeepSpeed clips by norm only",
        "set `train.gradient_clip.algorithm=norm`",
        lambda cfg, asked: uses_deepspeed(asked) and clips_by(cfg, "value"),
    ),
    Rule(
        "train.gradient_clip.algorithm",
        "adaptive clipping (`agc`), fsdp or DeepSpeed",
        "it needs the norm of each complete weight, and no process holds one",
        "set `train.gradient_clip.algorithm=norm`, or use ddp",
        lambda cfg, asked: is_sharded(asked) and clips_by(cfg, "agc"),
    ),
    Rule(
        "model.scheduler",
        "`warmup`, DeepSpeed",
        "DeepSpeed steps the optimizer itself, at a rate that cannot be scaled for one step",
        "set a schedule that warms up, such as OneCycleLR, or use fsdp or ddp",
        lambda cfg, asked: uses_deepspeed(asked) and any(s.warmup for s in targets_of(cfg.model.scheduler)),
    ),
    Rule(
        "logger.gradient_norm",
        "`gradient_norm`, fsdp or DeepSpeed",
        "no process holds a complete gradient",
        "set `logger.gradient_norm=false`, or use ddp",
        lambda cfg, asked: is_sharded(asked) and cfg.logger.gradient_norm,
    ),
    Rule(
        "train.gradient_clip.norm_type",
        "clip by a norm other than 2, DeepSpeed or fsdp",
        "it supports the 2-norm only, and would ignore this one",
        "set `train.gradient_clip.norm_type=2`",
        lambda cfg, asked: (
            is_sharded(asked) and clips_by(cfg, "norm") and value_at(cfg, "train.gradient_clip.norm_type") != 2
        ),
    ),
    Rule(
        "model.optimizer",
        "two optimizers, DeepSpeed",
        "DeepSpeed drives one optimizer",
        "use `engine.backend=ddp`",
        lambda cfg, asked: uses_deepspeed(asked) and len(targets_of(cfg.model.optimizer)) > 1,
    ),
    Rule(
        "train.accumulator_epoch",
        "accumulation that begins later, DeepSpeed",
        "DeepSpeed accumulates from the first batch on, or not at all",
        "set `train.accumulator_epoch=0`",
        lambda cfg, asked: (
            uses_deepspeed(asked) and cfg.train.accumulator_epoch > 0 and cfg.train.accumulator_factor > 1
        ),
    ),
    Rule(
        "train.callbacks",
        "GradientAccumulationScheduler, DeepSpeed",
        "DeepSpeed accumulates from the first batch on, or not at all",
        "set `train.accumulator_factor` instead",
        lambda cfg, asked: uses_deepspeed(asked) and has_callback(cfg, "GradientAccumulationScheduler"),
    ),
    Rule(
        "train.accumulator_factor",
        "accumulation, a task that steps its optimizers itself",
        "Lightning cannot accumulate for it",
        "set `train.accumulator_factor=1`",
        lambda cfg, _: cfg.train.accumulator_factor > 1 and steps_itself(cfg),
        other="model.module",
    ),
    Rule(
        "train.gradient_clip",
        "clipping, a task that steps its optimizers itself",
        "Lightning cannot clip for it",
        "set `train.gradient_clip=null`, and call `self.clip_gradients` in `training_step`",
        lambda cfg, _: (clips_by(cfg, "norm") or clips_by(cfg, "value")) and steps_itself(cfg),
        other="model.module",
    ),
    Rule(
        "train.seeds",
        "several seeds, a checkpoint to resume from",
        "runs that continue the same training are not independent",
        "set `train.resume_ckpt=null` (the same command continues interrupted runs by itself), or start all of them "
        "from the weights of `model.init_from`",
        lambda cfg, _: (cfg.train.seeds or 1) > 1 and cfg.train.resume_ckpt is not None,
        other="train.resume_ckpt",
    ),
    Rule(
        "engine.precision",
        "precision 64, DeepSpeed or fsdp",
        "it computes in 32, 16 and bf16",
        "set `engine.precision=32`, or `engine.backend=ddp`",
        lambda cfg, asked: is_sharded(asked) and cfg.engine.precision in (64, "64-true"),
    ),
    Rule(
        "engine.precision",
        "precision 16-mixed, fsdp",
        "it computes in 32 and bf16, or in 16 throughout",
        "set `engine.precision=bf16` or `16-true`, or a DeepSpeed backend",
        lambda cfg, asked: (
            asked.backend == "fsdp" and cfg.engine.precision in (16, "16-mixed") and cfg.engine.gpus is not None
        ),
    ),
    Rule(
        "engine.precision",
        "precision 16-true, DeepSpeed over CPU processes",
        "it scales the loss on GPUs only, and small gradients underflow in 16 bits without a scale",
        "set `engine.precision=bf16`",
        lambda cfg, _: uses_deepspeed(cfg.engine) and cfg.engine.precision == "16-true" and cfg.engine.gpus is None,
    ),
    Rule(
        "engine.precision",
        "precision `deepspeed`, another engine",
        "it stands for DeepSpeed's own 16-bit precision",
        "set `engine.precision=16`, or a DeepSpeed backend",
        lambda cfg, asked: asked.precision == "deepspeed" and not uses_deepspeed(asked),
    ),
    Rule(
        "model.optimizer.type",
        "LBFGS, DeepSpeed or fsdp",
        "LBFGS evaluates the loss several times per step, which a sharded engine does not support",
        "use another optimizer, or `engine.backend=ddp`",
        lambda cfg, asked: is_sharded(asked) and uses_optimizer(cfg, "LBFGS"),
    ),
    Rule(
        "model.optimizer.type",
        "LBFGS, accumulation",
        "LBFGS evaluates the loss again within a step, when only the last of the accumulated batches is available",
        "set `train.accumulator_factor=1` and a larger `data.batch_size`, or use another optimizer",
        lambda cfg, _: cfg.train.accumulator_factor > 1 and uses_optimizer(cfg, "LBFGS") and "train" in cfg.stages,
        other="train.accumulator_factor",
    ),
    Rule(
        "engine.precision",
        "precision 16-true, an optimizer with `eps` below 1e-7 (the default of Adam and its variants), no DeepSpeed",
        "half precision rounds that eps to 0, and the weights become NaN within a few steps",
        "set `eps: 1e-4` in the optimizer's params, or `engine.precision=16` or bf16",
        lambda cfg, _: (
            cfg.engine.precision == "16-true"
            and not uses_deepspeed(cfg.engine)  # it keeps a 32-bit copy for the optimizer (0.19.8)
            and "train" in cfg.stages
            and loses_eps(cfg)
        ),
        other="model.optimizer",
    ),
    Rule(
        "engine.processes",
        "several CPU processes, GPUs",
        "`processes` counts CPU processes; there is one process for each GPU",
        "remove one of the two",
        lambda cfg, _: cfg.engine.gpus is not None and cfg.engine.processes > 1,
        other="engine.gpus",
    ),
    Rule(
        "engine.params.process_group_backend",
        "nccl, no GPU",
        "nccl needs GPUs",
        "use gloo for CPU processes",
        lambda cfg, _: cfg.engine.params.get("process_group_backend") == "nccl" and cfg.engine.gpus is None,
        other="engine.gpus",
    ),
    Rule(
        "engine.params.ddp_comm_hook",
        "16-bit reduction, no GPU",
        "gloo, which CPU processes use, reduces in 32 bits",
        "remove it",
        lambda cfg, _: "16" in str(cfg.engine.params.get("ddp_comm_hook")) and cfg.engine.gpus is None,
        other="engine.gpus",
    ),
    Rule(
        "engine.sync_batchnorm",
        "batch norm over all processes, no GPU",
        "torch synchronises batch norm on GPUs only",
        "set it to false",
        lambda cfg, _: cfg.engine.sync_batchnorm and cfg.engine.gpus is None,
        other="engine.gpus",
    ),
    Rule(
        "engine.params",
        "parameters of the strategy, no backend",
        "there is no strategy to give them to",
        "set `engine.backend`, or remove them",
        lambda cfg, asked: bool(cfg.engine.params) and asked.backend is None and cfg.engine.backend is None,
    ),
    Rule(
        "model.optimizer.type",
        "a fused optimizer of DeepSpeed or Apex, no GPU",
        "its step is a CUDA kernel, and there is no CUDA device in use",
        "set `engine.gpus`, or use torch's own optimizer, which `fused: true` fuses too",
        lambda cfg, _: (
            cfg.engine.gpus is None
            and "train" in cfg.stages
            and uses_optimizer(cfg, "FusedAdam", "FusedLamb", "FusedLion", "FusedSGD")
        ),
        exit_code=3,
        other="engine.gpus",
    ),
    Rule(
        "engine.channels_last",
        "`channels_last`, fsdp or DeepSpeed",
        "they flatten parameters, which then have no channels",
        "remove `engine.channels_last`, or use ddp",
        lambda cfg, asked: cfg.engine.channels_last and is_sharded(asked),
    ),
    Rule(
        "logger.histograms",
        "histograms, fsdp or ZeRO stage 3",
        "no process holds a complete parameter",
        "remove `logger.histograms`, or use ddp",
        lambda cfg, asked: (
            cfg.logger.histograms is not None and (asked.backend or "").startswith(("fsdp", "deepspeed_stage_3"))
        ),
    ),
    Rule(
        "train.callbacks",
        "averaged weights (EMA), fsdp or DeepSpeed",
        "each process holds a shard of the weights, and the checkpoint is assembled without the averages",
        "use `engine.backend=ddp`, or remove the callback",
        lambda cfg, asked: is_sharded(asked) and has_callback(cfg, EMA),
    ),
    Rule(
        "train.fast",
        "`fast`, a run that resumes",
        "its single batch would follow those of the checkpoint, and it saves no checkpoint itself",
        "set `train.resume_ckpt=null`, or `train.fast=false`",
        lambda cfg, _: cfg.train.fast and cfg.train.resume_ckpt is not None and "train" in cfg.stages,
        other="train.resume_ckpt",
    ),
    Rule(
        "train.callbacks",
        "averaged weights (EMA), precision 16-true or bf16-true",
        "16 bits round the small updates of an average to zero",
        "set `engine.precision=bf16` or `16`, which keep weights in 32 bits",
        lambda cfg, _: cfg.engine.precision in ("16-true", "bf16-true") and has_callback(cfg, EMA),
        other="engine.precision",
    ),
    Rule(
        "engine.compile",
        "`compile: graphs`, fsdp or DeepSpeed",
        "they add hooks to the network, which a recorded step would not call",
        "set `engine.compile=reduce-overhead`, or use ddp",
        lambda cfg, asked: cfg.engine.compile == "graphs" and is_sharded(asked),
    ),
    Rule(
        "engine.fused",
        "`fused: true`, fsdp or DeepSpeed",
        "parameters are sharded, and not every fused optimizer of torch supports that",
        "set `engine.fused=auto`, or use ddp",
        lambda cfg, asked: cfg.engine.fused is True and is_sharded(asked),
    ),
    Rule(
        "engine.fused",
        "`fused: true`, precision 16-mixed",
        "a fused optimizer skips a step inside its kernel if the scaled gradients overflow: nothing can clip them, and "
        "a schedule by steps would count the skipped step",
        "set `engine.fused=auto`, or `engine.precision=bf16`",
        lambda cfg, _: cfg.engine.fused is True and cfg.engine.precision in (16, "16-mixed"),
        other="engine.precision",
    ),
    Rule(
        "data.fold",
        "a fold, too few splits",
        "folds are counted from 0 to data.num_splits - 1",
        "set `data.num_splits`, or a smaller fold",
        lambda cfg, _: cfg.data.fold >= (cfg.data.num_splits or 1),
        other="data.num_splits",
    ),
    Rule(
        "test.ckpt",
        "the best weights after training, no metric",
        "no metric says which weights are best",
        "set `train.checkpoint.monitor`, or `test.ckpt=last`",
        lambda cfg, _: (
            cfg.test.ckpt == "best"
            and cfg.train.checkpoint.monitor is None
            and "train" in cfg.stages
            and len(cfg.stages) > 1
        ),
        other="train.checkpoint.monitor",
    ),
    Rule(
        "test.ckpt",
        "validate, test or predict without train, no weights",
        "without training there must be weights to use",
        "set `test.ckpt` to a path, RUN, best or last",
        lambda cfg, _: "train" not in cfg.stages and bool(cfg.stages) and cfg.test.ckpt is None,
        exit_code=4,
        other="stages",
    ),
]


def conflicts(
    cfg: Config, asked: Engine, places: Mapping[str, str], skip: Callable[[str], bool] = lambda key: False
) -> Iterator[Fault]:
    """Yield a fault for each rule that a config breaks.

    Args:
        cfg: the complete config, as it will run.
        asked: the engine as requested, with the current name of its backend.
        places: dotted key → the place that set it.
        skip: whether a key already has a fault; rules about it are skipped.
    """
    for rule in RULES:
        if skip(rule.key) or skip(rule.other) or not rule.broken(cfg, asked):
            continue
        value, other = _short_value(cfg, rule.key, asked), _short_value(cfg, rule.other, asked)
        at = f" ({places[rule.other]})" if rule.other in places else ""
        message = f"{value} cannot be combined with {rule.other}: {other}{at}: {rule.why}; {rule.remedy}"
        place = next((places[key] for key in (*upwards(rule.key), *upwards(rule.other)) if key in places), None)
        yield Fault(message, rule.key, place, found=value, allowed=rule.remedy, exit_code=rule.exit_code)


def _short_value(cfg: Config, key: str, asked: Engine) -> str:
    """Return a key's value as one short line; for a target, its name."""
    requested: dict[str, object] = {"engine.backend": asked.backend, "engine.precision": asked.precision}
    value = requested[key] if key in requested else value_at(cfg, key)
    return value.type if isinstance(value, Target) else f"{line(plain(value)):.60}"
