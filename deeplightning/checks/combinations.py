"""Which settings do not go together: each pair with the reason and a remedy. The manual's tables are made from it.

A rule sees the config as it will run here, and the engine as it was asked for, its backend in today's word: what
DeepSpeed refuses on eight GPUs is told on a laptop too, where one process needs no backend.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deeplightning.checks import strategy
from deeplightning.checks.compare import Meanings
from deeplightning.checks.one_gpu import hints_for_one_gpu
from deeplightning.config.schema import (
    Backend,
    Call,
    Clip,
    Config,
    Data,
    Engine,
    Model,
    Optimizer,
    Scheduler,
    Serve,
    Target,
    Train,
    plain,
)
from deeplightning.config.tree import line
from deeplightning.faults import Fault, Notice, upwards
from deeplightning.static.signature import Undecided

Broken = Callable[[Config, Engine], bool]


@dataclass(frozen=True)
class Rule:
    """Two keys whose values contradict each other.

    Attributes:
        key: the key that the fault is told at.
        other: the key that it does not go with.
        when: the two settings, in words.
        why: the reason, in words that follow a colon.
        remedy: what to do.
        broken: whether a config, with the engine that was asked for, has them both.
        exit_code: 2 where the config is wrong, 3 where the machine lacks something, 4 where weights are missing.
        at_start: it ends a run, and is no more than a warning in `check`: the config may be meant for another machine.
    """

    key: str
    other: str
    when: str
    why: str
    remedy: str
    broken: Broken
    exit_code: int = 2
    at_start: bool = False


def _deepspeed(asked: Engine) -> bool:
    return (asked.backend or "").startswith("deepspeed")


def _sharded(asked: Engine) -> bool:
    return _deepspeed(asked) or asked.backend == "fsdp"


def _optimizers(cfg: Config) -> list[Target]:
    found = cfg.model.optimizer
    return [o for o in (found.values() if isinstance(found, dict) else [found]) if o is not None]


def _uses(cfg: Config, *names: str) -> bool:
    return any(o.type is not None and o.type.rpartition(".")[2] in names for o in _optimizers(cfg))


def _has_no_kernel(cfg: Config) -> bool:
    """Whether an optimizer is one of torch's that has no fused kernel."""
    names = [o.type.rpartition(".") for o in _optimizers(cfg) if isinstance(o.type, str)]
    return any(
        module.startswith("torch.optim") and name not in ("Adam", "AdamW", "Adagrad", "SGD")
        for module, _, name in names
    )


def _clips(cfg: Config, algorithm: str) -> bool:
    clip = cfg.train.gradient_clip
    return clip is not None and clip.algorithm == algorithm


def _other_norm(cfg: Config) -> bool:
    clip = cfg.train.gradient_clip
    return clip is not None and clip.algorithm == "norm" and clip.norm_type != 2


def _hook(cfg: Config) -> str:
    hook = cfg.engine.params.get("ddp_comm_hook")
    return str(hook.get("ref", "")) if isinstance(hook, Mapping) else str(hook or "")


def _another_stage(cfg: Config, asked: Engine) -> bool:
    stage = cfg.engine.params.get("stage")
    return _deepspeed(asked) and stage is not None and not str(asked.backend).startswith(f"deepspeed_stage_{stage}")


def _no_folder(cfg: Config) -> bool:
    """Whether an NVMe disk would be used that is not there."""
    runs = cfg.engine.backend
    path = strategy.nvme_path(runs, cfg.engine.params) if (runs or "").startswith("deepspeed") else None
    return path is not None and not Path(path).is_dir()


def _steps_itself(cfg: Config) -> bool:
    """Whether the task steps its optimizers itself, as far as its source tells."""
    name: Any = cfg.model.module and cfg.model.module.type  # where it is missing or no target, a fault says so
    try:
        task: Any = Meanings().of(name) if isinstance(name, str) else None
    except (ValueError, Undecided):
        return False
    return task is not None and task.steps_itself()


LEAST_EPS = 1e-7
"""Below it `eps` vanishes in half precision, whose smallest number is 6e-8."""

_OWN_32_BITS = ("apex.", "bitsandbytes.")  # their optimizers compute in 32 bits whatever the parameters have


def _loses_eps(cfg: Config) -> bool:
    """Whether an optimizer divides by an `eps` that half precision rounds to 0."""
    for optimizer in _optimizers(cfg):
        if not isinstance(optimizer.type, str) or optimizer.type.startswith(_OWN_32_BITS):
            continue
        groups = optimizer.groups if isinstance(optimizer, Optimizer) else []
        given = [group["eps"] for group in groups if isinstance(group, Mapping) and "eps" in group]
        given.append(optimizer.params["eps"] if "eps" in (optimizer.params or {}) else _default(optimizer.type, "eps"))
        if any(isinstance(eps, int | float) and eps < LEAST_EPS for eps in given):
            return True
    return False


def _default(name: str, param: str) -> Any:
    """What a target takes for a parameter that is not given; None where it has none or its source does not say."""
    try:
        return next((p.default for p in Meanings().signature(name).parameters if p.name == param), None)
    except (ValueError, Undecided):
        return None


def _untrained(cfg: Config) -> bool:
    return "train" not in cfg.stages and bool(cfg.stages) and cfg.test.ckpt is None


RULES = [
    Rule(
        "train.gradient_clip.algorithm",
        "engine.backend",
        "clip by value, DeepSpeed",
        "DeepSpeed clips by norm only",
        "set `train.gradient_clip.algorithm=norm`",
        lambda cfg, asked: _deepspeed(asked) and _clips(cfg, "value"),
    ),
    Rule(
        "train.gradient_clip.norm_type",
        "engine.backend",
        "clip by another norm than 2, DeepSpeed or fsdp",
        "it knows the second norm only, and would ignore this one",
        "set `train.gradient_clip.norm_type=2`",
        lambda cfg, asked: _sharded(asked) and _other_norm(cfg),
    ),
    Rule(
        "model.optimizer",
        "engine.backend",
        "two optimizers, DeepSpeed",
        "DeepSpeed drives one optimizer",
        "use `engine.backend=ddp`",
        lambda cfg, asked: _deepspeed(asked) and len(_optimizers(cfg)) > 1,
    ),
    Rule(
        "train.accumulator_epoch",
        "engine.backend",
        "accumulation that begins later, DeepSpeed",
        "DeepSpeed accumulates from the first batch on, or not at all",
        "set `train.accumulator_epoch=0`",
        lambda cfg, asked: _deepspeed(asked) and cfg.train.accumulator_epoch > 0 and cfg.train.accumulator_factor > 1,
    ),
    Rule(
        "train.accumulator_factor",
        "model.module",
        "accumulation, a task that steps its optimizers itself",
        "Lightning cannot accumulate for it",
        "set `train.accumulator_factor=1`",
        lambda cfg, _: cfg.train.accumulator_factor > 1 and _steps_itself(cfg),
    ),
    Rule(
        "train.gradient_clip",
        "model.module",
        "clipping, a task that steps its optimizers itself",
        "Lightning cannot clip for it",
        "call `self.clip_gradients` in its training_step, and set this to null",
        lambda cfg, _: cfg.train.gradient_clip is not None and _steps_itself(cfg),
    ),
    Rule(
        "engine.precision",
        "engine.backend",
        "precision 64, DeepSpeed or fsdp",
        "it computes in 32, 16 and bf16",
        "set `engine.precision=32`, or `engine.backend=ddp`",
        lambda cfg, asked: _sharded(asked) and cfg.engine.precision in (64, "64-true"),
    ),
    Rule(
        "engine.precision",
        "engine.backend",
        "precision 16-mixed, fsdp",
        "it computes in 32 and bf16, or in 16 throughout",
        "set `engine.precision=bf16` or `16-true`, or a DeepSpeed backend",
        lambda cfg, asked: (
            asked.backend == "fsdp" and cfg.engine.precision in (16, "16-mixed") and cfg.engine.gpus is not None
        ),
    ),
    Rule(
        "engine.precision",
        "engine.backend",
        "precision 16-true, DeepSpeed over CPU processes",
        "it scales the loss on GPUs only, and 16 bits without a scale lose small gradients",
        "set `engine.precision=bf16`",
        lambda cfg, _: _deepspeed(cfg.engine) and cfg.engine.precision == "16-true" and cfg.engine.gpus is None,
    ),
    Rule(
        "engine.precision",
        "engine.backend",
        "precision `deepspeed`, another engine",
        "the word means 16 bits as DeepSpeed computes them",
        "set `engine.precision=16`, or a DeepSpeed backend",
        lambda cfg, asked: asked.precision == "deepspeed" and not _deepspeed(asked),
    ),
    Rule(
        "engine.params.stage",
        "engine.backend",
        "another stage than the word says, DeepSpeed",
        "the word names the stage",
        "remove it, and choose the stage by `engine.backend`",
        _another_stage,
    ),
    Rule(
        "engine.params.precision_plugin",
        "engine.backend",
        "a gradient scaler of one's own, DeepSpeed",
        "DeepSpeed scales the loss itself",
        "remove it; `engine.params` takes DeepSpeed's `initial_scale_power`, `loss_scale_window` and their kin",
        lambda cfg, asked: _deepspeed(asked) and "precision_plugin" in cfg.engine.params,
    ),
    Rule(
        "model.optimizer.type",
        "engine.backend",
        "LBFGS, DeepSpeed or fsdp",
        "LBFGS asks for the loss again and again within one step, which a sharded engine cannot give",
        "use another optimizer, or `engine.backend=ddp`",
        lambda cfg, asked: _sharded(asked) and _uses(cfg, "LBFGS"),
    ),
    Rule(
        "model.optimizer.type",
        "engine.precision",
        "LBFGS, precision 16-mixed",
        "the loss cannot be scaled for an optimizer that computes it again within one step",
        "set `engine.precision=32`, or bf16",
        lambda cfg, _: cfg.engine.precision in (16, "16-mixed") and _uses(cfg, "LBFGS"),
    ),
    Rule(
        "engine.precision",
        "model.optimizer",
        "precision 16-true, an optimizer with `eps` below 1e-7 (the default of Adam and its kin), no DeepSpeed",
        "half precision rounds that eps to 0, and the weights become NaN within a few steps",
        "set `eps: 1e-4` in the optimizer's params, or `engine.precision=16` or bf16",
        lambda cfg, _: (
            cfg.engine.precision == "16-true"
            and not _deepspeed(cfg.engine)  # it keeps the optimizer's copy in 32 bits (0.19.8)
            and "train" in cfg.stages
            and _loses_eps(cfg)
        ),
    ),
    Rule(
        "engine.processes",
        "engine.gpus",
        "several CPU processes, GPUs",
        "`processes` counts CPU processes; there is one process for each GPU",
        "remove one of the two",
        lambda cfg, _: cfg.engine.gpus is not None and cfg.engine.processes > 1,
    ),
    Rule(
        "engine.params.process_group_backend",
        "engine.gpus",
        "nccl, no GPU",
        "nccl needs GPUs",
        "over CPU processes it is gloo",
        lambda cfg, _: cfg.engine.params.get("process_group_backend") == "nccl" and cfg.engine.gpus is None,
    ),
    Rule(
        "engine.params.ddp_comm_hook",
        "engine.gpus",
        "16-bit reduction, no GPU",
        "gloo, which CPU processes use, sums numbers of 32 bits",
        "remove it",
        lambda cfg, _: "16" in _hook(cfg) and cfg.engine.gpus is None,
    ),
    Rule(
        "engine.sync_batchnorm",
        "engine.gpus",
        "batch norm over all processes, no GPU",
        "torch synchronises batch norm on GPUs only",
        "set it to false",
        lambda cfg, _: cfg.engine.sync_batchnorm and cfg.engine.gpus is None,
    ),
    Rule(
        "engine.params",
        "engine.backend",
        "parameters of the strategy, no backend",
        "there is no strategy to give them to",
        "set `engine.backend`, or remove them",
        lambda cfg, asked: bool(cfg.engine.params) and asked.backend is None and cfg.engine.backend is None,
    ),
    Rule(
        "model.optimizer.type",
        "engine.gpus",
        "a fused optimizer of DeepSpeed or Apex, no GPU",
        "its step is a CUDA kernel, and there is no CUDA device in use",
        "set `engine.gpus`, or use torch's own optimizer, which `fused: true` fuses too",
        lambda cfg, _: (
            cfg.engine.gpus is None
            and "train" in cfg.stages
            and _uses(cfg, "FusedAdam", "FusedLamb", "FusedLion", "FusedSGD")
        ),
        exit_code=3,
        at_start=True,
    ),
    Rule(
        "engine.backend",
        "engine.gpus",
        "an NVMe disk, several CPU processes",
        "it relieves the memory of GPUs, and there are none",
        "use a backend without `_nvme`",
        lambda cfg, _: cfg.engine.gpus is None and (cfg.engine.backend or "").endswith("_nvme"),
    ),
    Rule(
        "engine.params.nvme_path",
        "engine.backend",
        "an NVMe disk, no such folder",
        "there is no such folder on this machine (where none is given, /local_nvme is meant)",
        "set `engine.params.nvme_path` to one on the disk, or use a backend without `_nvme`",
        lambda cfg, _: _no_folder(cfg),
        exit_code=3,
    ),
    Rule(
        "engine.channels_last",
        "engine.backend",
        "`channels_last`, fsdp or DeepSpeed",
        "they keep parameters flat, where there are no channels",
        "leave out `engine.channels_last`, or use ddp",
        lambda cfg, asked: cfg.engine.channels_last and (asked.backend or "").startswith(("fsdp", "deepspeed")),
    ),
    Rule(
        "logger.histograms",
        "engine.backend",
        "histograms, fsdp or ZeRO stage 3",
        "no process holds a complete parameter",
        "remove `logger.histograms`, or use ddp",
        lambda cfg, asked: (
            cfg.logger.histograms is not None and (asked.backend or "").startswith(("fsdp", "deepspeed_stage_3"))
        ),
    ),
    Rule(
        "serve.precision",
        "serve.device",
        "a server in int8, GPUs",
        "the int8 model is made for CPUs",
        "set `serve.precision=fp16`, or `serve.device=cpu`",
        lambda cfg, _: cfg.serve.precision == "int8" and cfg.serve.device.startswith("cuda"),
    ),
    Rule(
        "serve.precision",
        "serve.device",
        "a server in fp16, the CPU",
        "a CPU computes in 32 bits faster",
        "set `serve.precision=fp32` or `int8`, or `serve.device=cuda`",
        lambda cfg, _: cfg.serve.precision == "fp16" and cfg.serve.device == "cpu",
    ),
    Rule(
        "serve.tensorrt",
        "serve.device",
        "TensorRT, the CPU",
        "TensorRT compiles for GPUs only",
        "set `serve.tensorrt=false`, or `serve.device=cuda`",
        lambda cfg, _: cfg.serve.tensorrt and cfg.serve.device == "cpu",
    ),
    Rule(
        "engine.compile",
        "engine.backend",
        "`compile: graphs`, fsdp or DeepSpeed",
        "they have hooks in the network, which a recorded step would not call",
        "set `engine.compile=reduce-overhead`, or use ddp",
        lambda cfg, asked: cfg.engine.compile == "graphs" and _sharded(asked),
    ),
    Rule(
        "engine.fused",
        "engine.backend",
        "`fused: true`, fsdp or DeepSpeed",
        "parameters are shared out, for which torch has no fused kernel of every optimizer",
        "set `engine.fused=auto`, or use ddp",
        lambda cfg, asked: cfg.engine.fused is True and _sharded(asked),
    ),
    Rule(
        "engine.fused",
        "engine.precision",
        "`fused: true`, precision 16-mixed",
        "a fused optimizer leaves out a step inside its kernel where the scaled gradients overflow: nothing can clip "
        "them, and a schedule by steps would count it",
        "set `engine.fused=auto`, or `engine.precision=bf16`",
        lambda cfg, _: cfg.engine.fused is True and cfg.engine.precision in (16, "16-mixed"),
    ),
    Rule(
        "engine.fused",
        "model.optimizer.type",
        "`fused: true`, an optimizer of torch's without a fused kernel",
        "torch has fused kernels of Adam, AdamW, Adagrad and SGD",
        "set `engine.fused=auto`",
        lambda cfg, _: cfg.engine.fused is True and _has_no_kernel(cfg),
    ),
    Rule(
        "data.fold",
        "data.num_splits",
        "a fold, no or fewer parts",
        "folds are counted from 0 to data.num_splits - 1",
        "set `data.num_splits`, or a smaller fold",
        lambda cfg, _: cfg.data.fold >= (cfg.data.num_splits or 1) and cfg.data.num_splits not in (0, 1),
    ),
    *(
        Rule(
            f"data.loader.{name}",
            "data.num_workers",
            f"`{name}`, no workers",
            "it is about loader processes, and there are none",
            "set `data.num_workers`, or remove it",
            lambda cfg, _, name=name: cfg.data.num_workers == 0 and bool(cfg.data.loader.get(name)),  # type: ignore[misc]
        )
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context")
    ),
    Rule(
        "test.ckpt",
        "train.checkpoint.monitor",
        "the best weights after training, no metric",
        "no metric says which weights are best",
        "set `train.checkpoint.monitor`, or `test.ckpt=last`",
        lambda cfg, _: (
            cfg.test.ckpt == "best"
            and cfg.train.checkpoint.monitor is None
            and "train" in cfg.stages
            and len(cfg.stages) > 1
        ),
    ),
    Rule(
        "test.ckpt",
        "stages",
        "validate, test or predict without train, no weights",
        "without training there must be weights to use",
        "set `test.ckpt` to a path, RUN, best or last",
        lambda cfg, _: _untrained(cfg),
        exit_code=4,
    ),
]


def conflicts(
    cfg: Config, asked: Engine, places: Mapping[str, str], skip: Callable[[str], bool] = lambda key: False
) -> Iterator[tuple[Rule, Fault]]:
    """Each rule that a config breaks, with the fault to tell.

    Args:
        cfg: a whole config, as it will run.
        asked: the engine as it was asked for, its backend in today's word.
        places: dotted key → the place that set it.
        skip: whether a key is wrong by itself, and says nothing of others.
    """
    for rule in RULES:
        if skip(rule.key) or skip(rule.other) or not rule.broken(cfg, asked):
            continue
        value, other = _value(cfg, rule.key, asked), _value(cfg, rule.other, asked)
        at = f" ({places[rule.other]})" if rule.other in places else ""
        message = f"{value} does not go with {rule.other}: {other}{at}: {rule.why}; {rule.remedy}"
        set_ = [key for key in (*upwards(rule.key), *upwards(rule.other)) if key in places]
        place = places[set_[0]] if set_ else None
        yield rule, Fault(message, rule.key, place, found=value, allowed=rule.remedy, exit_code=rule.exit_code)


def hints(cfg: Config, asked: Engine) -> Iterator[Notice]:
    """What is right and could be better."""
    yield from hints_for_one_gpu(cfg.engine)
    runs_on_cpu = _deepspeed(cfg.engine) and cfg.engine.gpus is None  # where DeepSpeed's own have nothing to gain
    if _deepspeed(asked) and not runs_on_cpu:
        for optimizer in _optimizers(cfg):
            if optimizer.type is not None and not optimizer.type.startswith("deepspeed."):
                own = (
                    "deepspeed.ops.adam.DeepSpeedCPUAdam"
                    if "offload" in str(asked.backend)
                    else "deepspeed.ops.adam.FusedAdam"
                )
                text = f"model.optimizer: {optimizer.type} works with DeepSpeed; its own {own} is faster"
                yield Notice(text, unasked=False)
    yield from proposals(cfg, asked)


def proposals(cfg: Config, asked: Engine) -> Iterator[Notice]:
    """What would make a run on GPUs faster and changes its digits or suits not every network, so that a person has to
    choose it."""
    if cfg.engine.gpus is None:
        return
    if cfg.engine.compile is False and not _sharded(asked):
        measured = "measured on an H100: a ResNet-18 at batch 128 saw 29,886 pictures/s instead of 9,014"
        yield Notice(
            f"engine: `engine.compile=graphs` trains small batches faster, with the same weights; {measured}",
            unasked=False,
        )
    words = []
    if cfg.engine.precision in (32, "32-true"):
        words.append("`engine.precision=bf16` (16 bits, on GPUs since Ampere: compare the accuracy)")
    if not cfg.engine.channels_last and not _sharded(asked) and _has_convolutions(cfg):
        words.append("`engine.channels_last=true` (for convolutions)")
    if words:
        both = "both together" if _has_convolutions(cfg) else "with channels_last"
        measured = (
            f"measured on an H100, {both}: a ResNet-18 at batch 128 kept the GPU busy for 25 % of the time instead of "
            "48 %, and saw 8,825 pictures/s instead of 8,483, since launches bound it"
        )
        yield Notice(f"engine: {' and '.join(words)} may be faster; {measured}", unasked=False)


def _has_convolutions(cfg: Config) -> bool:
    """Whether the source of a network speaks of convolutions of pictures."""
    found = cfg.model.network
    for target in found.values() if isinstance(found, dict) else [found]:
        name: Any = target and target.type
        try:
            meaning: Any = Meanings().of(name) if isinstance(name, str) else None  # read from source, not imported
            file = getattr(meaning, "file", None)
            if file is not None and any(word in Path(file).read_bytes() for word in (b"Conv2d", b"ConvTranspose2d")):
                return True
        except (ValueError, Undecided, OSError):
            continue
    return False


def _value(cfg: Config, key: str, asked: Engine) -> str:
    """A key's value in one short line; a section by the names in it."""
    words: dict[str, Any] = {"engine.backend": asked.backend, "engine.precision": asked.precision}
    value: Any = words.get(key, cfg)
    for name in key.split(".") if key not in words else ():
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    if isinstance(value, Mapping):
        return ", ".join(map(str, value))
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return value.type if isinstance(value, Target) else line(plain(value))


def server_conflicts(serve: Serve) -> Iterator[Rule]:
    """The rules that the section `serve` breaks by itself."""
    cfg: Any = SimpleNamespace(serve=serve)
    return (rule for rule in RULES if rule.key.startswith("serve.") and rule.broken(cfg, Engine()))


@dataclass(frozen=True)
class Setting:
    """A row of the table of engines.

    Attributes:
        words: what is set, for people.
        values: keys of the config and their values.
    """

    words: str
    values: dict[str, Any]

    def overrides(self) -> list[str]:
        """The same as a command line says it."""
        return [f"{key}={line(plain(value))}" for key, value in self.values.items()]


ENGINES: dict[str, Backend | None] = {
    "one process": None,
    "ddp": "ddp",
    "fsdp": "fsdp",
    "ZeRO 1": "deepspeed_stage_1",
    "ZeRO 2": "deepspeed_stage_2",
    "ZeRO 3": "deepspeed_stage_3",
}

_SGD = "torch.optim.SGD"
_SCHEDULES = "torch.optim.lr_scheduler"

SETTINGS = [
    *(
        Setting(f"`precision: {word}`", {"engine.precision": word})
        for word in (32, 16, "16-true", "bf16", "bf16-true", 64)
    ),
    Setting("clip by norm", {"train.gradient_clip": Clip(value=0.5)}),
    Setting("clip by another norm", {"train.gradient_clip": Clip(value=0.5, norm_type=1.0)}),
    Setting("clip by value", {"train.gradient_clip": Clip(value=0.5, algorithm="value")}),
    Setting("accumulation", {"train.accumulator_factor": 2}),
    Setting("accumulation that begins later", {"train.accumulator_factor": 2, "train.accumulator_epoch": 1}),
    Setting(
        "parameter groups",
        {"model.optimizer": Optimizer(type=_SGD, params={"lr": 0.1}, groups=[{"match": "bias", "weight_decay": 0}])},
    ),
    Setting("only the head learns", {"model.trainable": "head"}),
    Setting("LBFGS", {"model.optimizer": Optimizer(type="torch.optim.LBFGS", params={"lr": 0.1})}),
    Setting(
        "a schedule by steps",
        {
            "model.scheduler": Scheduler(
                type=f"{_SCHEDULES}.OneCycleLR",
                params={"max_lr": 0.1, "total_steps": "auto"},
                call=Call(interval="step"),
            )
        },
    ),
    Setting(
        "a schedule by a metric",
        {"model.scheduler": Scheduler(type=f"{_SCHEDULES}.ReduceLROnPlateau", call=Call(monitor="val_loss"))},
    ),
    Setting("`activation_checkpointing`", {"engine.activation_checkpointing": ["ReLU"]}),
    Setting("`compile`", {"engine.compile": True}),
    Setting("`deterministic`", {"engine.deterministic": True}),
    Setting("`sync_batchnorm`", {"engine.sync_batchnorm": True}),
]


def refusal(setting: Setting, backend: Backend | None, gpus: int | None = None) -> Rule | None:
    """The rule that a setting breaks with a backend over two processes: of the CPU, or with a GPU each."""
    task = Target(type="own.Task")
    cfg = Config(
        data=Data(module=task, batch_size=1),
        model=Model(module=task, optimizer=Optimizer(type=_SGD, params={"lr": 0.1})),
        engine=Engine(backend=backend, gpus=gpus, processes=1 if gpus or backend is None else 2),
        train=Train(num_epochs=2),
    )
    for key, value in setting.values.items():
        section, _, name = key.rpartition(".")
        setattr(getattr(cfg, section), name, value)
    return next((rule for rule in RULES if rule.broken(cfg, cfg.engine)), None)


def engines(gpus: int | None = None) -> str:
    """Each setting with each engine as a Markdown table, for the manual."""
    rows = [f"| | {' | '.join(ENGINES)} |", "|---" * (len(ENGINES) + 1) + "|"]
    for setting in SETTINGS:
        on_cpu = gpus is None and setting.values.get("engine.precision") == 16
        runs = "as bf16" if on_cpu else "yes"
        cells = [f"no ({rule.exit_code})" if (rule := refusal(setting, b, gpus)) else runs for b in ENGINES.values()]
        rows.append(f"| {setting.words} | {' | '.join(cells)} |")
    return "\n".join(rows)


def table() -> str:
    """All rules as a Markdown table, for the manual."""
    codes = {2: "refused (2)", 3: "refused (3)", 4: "refused (4)"}
    rows = ["| Together | Keys | Answer | Because | Instead |", "|---|---|---|---|---|"]
    for rule in RULES:
        answer = "`check` warns, `train` refuses (3)" if rule.at_start else codes[rule.exit_code]
        rows.append(f"| {rule.when} | `{rule.key}`, `{rule.other}` | {answer} | {rule.why} | {rule.remedy} |")
    return "\n".join(rows)
