"""Every key of a config, with its type, default and meaning. The key reference in `docs` is generated from this file.

A config is a tree of these dataclasses. Free-form values are under `params`; every other key is here.
"""

# ruff: noqa: RUF009 (`key` makes a dataclass field, which the rule cannot see)
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

Backend = Literal[
    "ddp", "fsdp",
    "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3",
    "deepspeed_stage_1_offload", "deepspeed_stage_2_offload", "deepspeed_stage_3_offload",
    "deepspeed_stage_1_offload_nvme", "deepspeed_stage_2_offload_nvme", "deepspeed_stage_3_offload_nvme",
    "horovod", "dp", "fairscale_oss", "fairscale_sddp", "fairscale_fsdp",  # older names, mapped with a notice
]  # fmt: skip
Precision = Literal[
    16, 32, 64, "bf16", "16-mixed", "16-true", "bf16-mixed", "bf16-true", "32-true", "64-true",
    "amp", "apex_O1", "apex_O2", "deepspeed",  # older names, mapped with a notice
]  # fmt: skip
VERSION = 1
"""The version of configs that this release reads and writes."""

# Current names of older backends.
BACKENDS: dict[str, Backend] = {
    "horovod": "ddp",
    "dp": "ddp",
    "fairscale_oss": "deepspeed_stage_1",
    "fairscale_sddp": "deepspeed_stage_2",
    "fairscale_fsdp": "fsdp",
}
PRECISIONS = {"amp": "16-mixed", "apex_O1": "16-mixed", "apex_O2": "16-mixed", "deepspeed": "16-mixed"}

# No machine has had more than 16 GPUs (2026).
ServeDevice = Literal[
    "auto", "cpu", "cuda", "cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4", "cuda:5", "cuda:6", "cuda:7",
    "cuda:8", "cuda:9", "cuda:10", "cuda:11", "cuda:12", "cuda:13", "cuda:14", "cuda:15",
]  # fmt: skip

Mode = Literal["min", "max"]
BETTER = "whether lower (`min`) or higher (`max`) is better; null: inferred from the metric's name"
Stage = Literal["train", "validate", "test", "predict"]


def key(
    doc: str, default: Any = MISSING, *, example: str | None = None, low: float | None = None, high: float | None = None
) -> Any:
    """Define a key: its description, default (required without one), an example, and the smallest and largest legal
    number."""
    metadata = {"doc": doc, "example": example, "low": low, "high": high}
    if isinstance(default, type) or callable(default):
        return field(default_factory=default, metadata=metadata, kw_only=True)
    return field(default=default, metadata=metadata, kw_only=True)


def hidden() -> Any:
    """Define a field that the loader sets and a config cannot."""
    return field(default=None, repr=False, compare=False, kw_only=True, metadata={"hidden": True})


def keys(section: Any) -> Iterator[Field[object]]:
    """Return the fields of a section, class or instance, that are keys of the config."""
    return (f for f in fields(section) if not f.metadata.get("hidden"))


class Section:
    """Base of all sections, with mapping access: `cfg["model"]`, `cfg.get("test")`, `"test" in cfg`, `dict(cfg)`."""

    def __getitem__(self, name: str) -> object:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def get(self, name: str, default: object = None) -> Any:
        """Return the value of a key, or the default if the key is missing."""
        return getattr(self, name) if name in self else default

    def keys(self) -> list[str]:
        """Return the names of the keys."""
        return [f.name for f in keys(self)]

    def values(self) -> list[Any]:
        """Return the values of the keys."""
        return [getattr(self, name) for name in self.keys()]

    def items(self) -> list[tuple[str, Any]]:
        """Return the keys with their values."""
        return [(name, getattr(self, name)) for name in self.keys()]

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())


@dataclass
class Target(Section):
    """A class or function named in the config, and its keyword arguments."""

    type: str = key("MODULE.CLASS or MODULE.FUNCTION", example="torch.optim.SGD")
    params: dict[str, Any] = key("keyword arguments; a mapping with `type` inside is a target too and is built", dict)
    place: str | None = hidden()
    name: str | None = hidden()


@dataclass
class Optimizer(Target):
    """The optimizer; `params` must be given, since the learning rate has no silent default."""

    params: dict[str, Any] = key("keyword arguments, at least the learning rate", example="{lr: 0.01}")
    groups: list[dict[str, Any]] = key(
        "parameters whose name matches get other values; the first match wins",
        list,
        example="[{match: 'bias|norm', weight_decay: 0}]",
    )


@dataclass
class Call(Section):
    """When a scheduler steps."""

    interval: Literal["epoch", "step"] = key("the scheduler steps after each `epoch` or optimizer `step`", "epoch")
    frequency: int = key("number of intervals between steps", 1, low=1)
    monitor: str | None = key("metric for schedulers that need one (ReduceLROnPlateau)", None, example="val_loss")


@dataclass
class Scheduler(Target):
    """The learning rate's schedule; `total_steps`, `steps_per_epoch`, `epochs`, `T_max` in its params may be `auto`."""

    call: Call = key("when it steps", Call)
    warmup: float = key(
        "fraction of training steps in which the learning rate grows from almost 0 to that of the schedule; 0: none",
        0.0,
        low=0,
        high=1,
    )


@dataclass
class Loss(Target):
    """A loss; several are added by weight."""

    weight: float = key("factor of this loss among several", 1.0)


@dataclass
class Data(Section):
    """Where samples come from."""

    module: Target = key(
        "a LightningDataModule; a first parameter named `cfg` gets the whole config",
        example="{type: deeplightning.data.digits.Digits}",
    )
    batch_size: int | None = key("samples per step and process; null: the data module's own", None, example="64", low=1)
    root: str | None = key("folder of the data set", None, example="~/data")
    dataset: str | None = key("a display name; nothing depends on it", None, example="MNIST")
    num_workers: int = key("loader processes per training process; 0 loads in the process itself", 0, low=0)
    num_splits: int | None = key(
        "validate on one of this many parts of the training set; null: the module's split", None, low=2
    )
    fold: int = key("index of the part of `num_splits` to validate on", 0, low=0)
    sampler: Target | Literal["balanced"] | None = key(
        "sampling order of training, for data modules that use it, as ours do; balanced: each class equally often in "
        "an epoch; a target is called with the training set, and batch_size, num_replicas, rank and seed by name; "
        "null: shuffled",
        None,
        example="{type: own.Sampler, params: {size: 8}}",
    )
    loader: dict[str, Any] = key("keyword arguments of torch's DataLoader", dict, example="{pin_memory: true}")


@dataclass
class Model(Section):
    """The network, its training and its metrics."""

    module: Target = key(
        "the task: a LightningModule; a first parameter named `cfg` gets the whole config",
        example="{type: deeplightning.task.img_classif.ImageClassification}",
    )
    network: Target | dict[str, Target] | None = key("the network, or several by name", None)
    output: str | int | None = key(
        "the part that the task uses of a network's output that is not a tensor: an attribute, a key, or an index from "
        "0; null: all of it",
        None,
        example="logits",
    )
    optimizer: Optimizer | dict[str, Optimizer] | None = key(
        "the optimizer, or one per network; null: the task's own", None
    )
    scheduler: Scheduler | dict[str, Scheduler] | None = key("the schedule of the learning rate", None)
    loss: Loss | dict[str, Loss] | None = key("the loss, or several by name, added by weight", None)
    metrics: dict[str, Target] | None = key("torchmetrics by name; null: the task's own", None)
    trainable: Literal["all", "head"] | list[str] = key(
        "all, head (the last layer), or regular expressions; the optimizer gets only these parameters", "all"
    )
    init_from: str | None = key(
        "weights to start from: a checkpoint, a run folder, or a file of tensors (.safetensors, .pth)", None
    )


@dataclass
class Engine(Section):
    """Processes, devices and numerical precision of the run."""

    backend: Backend | None = key(
        "how parameters, gradients and the optimizer's state are distributed; null: one process", None
    )
    params: dict[str, Any] = key("keyword arguments of the backend's strategy", dict, example="{timeout: 600}")
    gpus: int | list[int] | Literal["auto"] | None = key(
        "null: CPU; auto: every GPU, or the CPU where there is none; a number; or a list of indexes, counted from 0 "
        "among those that CUDA_VISIBLE_DEVICES shows",
        None,
        low=0,
    )
    processes: int = key("CPU processes when `gpus` is null", 1, low=1)
    num_nodes: int = key("machines", 1, low=1)
    precision: Precision = key("floating-point precision of the forward and backward pass; 16 and bf16 are mixed", 32)
    launcher: Target | None = key(
        "what starts the processes; null: this command, or what started it (torchrun, Slurm, MPI)",
        None,
        example="{type: Slurm, params: {partition: gpu}}",
    )
    max_restarts: int = key("restarts after a lost worker, from the latest complete checkpoint", 0, low=0)
    matmul_precision: Literal["highest", "high", "medium"] | None = key(
        "precision of float32 matrix products on GPUs: high is TF32, medium bf16; null: torch's default", None
    )
    deterministic: bool = key("use only algorithms with bitwise reproducible results, on GPUs too", False)
    compile: bool | Literal["graphs", "reduce-overhead", "max-autotune"] = key(
        "compile the training step's network and losses with torch.compile, for full batches; a text is its mode: "
        "reduce-overhead uses CUDA graphs. graphs: CUDA graphs of the eager kernels, without the compiler",
        False,
    )
    fused: bool | Literal["auto"] = key(
        "use the fused kernel of an optimizer, where torch has one; auto: on a GPU, with one process or ddp; `fused` "
        "or `foreach` in the optimizer's params takes precedence",
        "auto",
    )
    channels_last: bool = key(
        "store pictures in channels-last memory format: convolutions are faster, and round differently", False
    )
    threads: int | None = key(
        "compute threads per process; null: OMP_NUM_THREADS, else the cores, divided among the processes", None, low=1
    )
    keep_memory: bool = key(
        "keep memory that a step frees for the next one instead of returning it to the system; same results", True
    )
    sync_batchnorm: bool = key("synchronize batch norm across all processes", False)
    activation_checkpointing: list[str] | None = key(
        "modules that recompute their activations in the backward pass instead of storing them: names in the network, "
        "or classes",
        None,
        example="[layers.0, TransformerEncoderLayer]",
    )
    profiler: Literal["simple", "advanced", "torch", "flops"] | None = key(
        "profile the run; flops: count the operations of a step by module, in flops.txt of the run folder", None
    )
    setup_hook: str | None = key(
        "MODULE.FUNCTION, called without arguments in every process before rendezvous, also after a restart", None
    )
    env: dict[str, str] = key("environment variables of every worker", dict)


def options_of(hint: object) -> list[object]:
    """Return the types in a hint: those of a union, else the hint itself."""
    return list(get_args(hint)) if get_origin(hint) in (UnionType, Union) else [hint]


def default_of(field: Field[object]) -> Any:
    """Return the default of a key, or MISSING if it is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def defaults(cls: type) -> Iterator[tuple[str, object]]:
    """Return the default of each key of a section that has one."""
    return ((f.name, default_of(f)) for f in keys(cls) if default_of(f) is not MISSING)


def value_at(section: Section, key: str | Sequence[Any]) -> Any:
    """Return the value at a dotted key or at a path of names and indexes, or None if it does not exist."""
    found: Any = section
    for name in key.split(".") if isinstance(key, str) else key:
        if isinstance(found, list) and isinstance(name, int):
            found = dict(enumerate(found))
        found = found.get(name) if isinstance(found, dict | Section) else None
    return found


def with_keys(targets: object, key: str) -> list[tuple[str, Any]]:
    """Return the targets of a key that takes one or several by name, each with its own key."""
    if isinstance(targets, dict):
        return [(f"{key}.{name}", target) for name, target in targets.items() if isinstance(target, Target)]
    return [(key, targets)] if isinstance(targets, Target) else []


def targets_of(section: object) -> list[Any]:
    """Return the targets of a key that takes one or several by name."""
    return [target for _, target in with_keys(section, "")]


def backend_of(engine: Engine) -> Backend | None:
    """Return the current name of an `engine.backend`."""
    return BACKENDS.get(engine.backend or "", engine.backend)


@dataclass
class Clip(Section):
    """Gradient clipping, before each optimizer step."""

    value: float = key(
        "the largest norm or absolute value; for agc, the largest ratio to the weights' norm, such as 0.01", low=0
    )
    algorithm: Literal["norm", "value", "agc"] = key(
        "clip the `norm` of all gradients, or each `value`; agc: each unit's norm relative to that of its weights",
        "norm",
    )
    norm_type: float = key("which norm", 2.0)


@dataclass
class EarlyStop(Section):
    """Stop when a metric no longer improves."""

    metric: str = key("name of a metric", example="val_loss")
    mode: Mode | None = key(BETTER, None)
    delta: float = key("smaller changes do not count as better", 0.0, low=0)
    patience: int = key("stop after this many validations without a better value", 3, low=1)


@dataclass
class Checkpoint(Section):
    """When checkpoints are saved, and which are kept."""

    every_n_epochs: float | None = key("save every N epochs; 0.5: twice an epoch; null: only at the end", 1)
    every_n_steps: int | None = key("also save every N optimizer steps", None, low=1)
    monitor: str | None = key(
        "metric that decides which weights are best, at each validation; a metric of training steps also when a "
        "fraction of an epoch is saved; null: none",
        None,
        example="val_acc",
    )
    mode: Mode | None = key(BETTER, None)
    save_top_k: int = key(
        "number of best checkpoints to keep; the best is best.ckpt. Without `monitor`, a number above 1 "
        "keeps that many of the newest",
        1,
        low=1,
    )


@dataclass
class LimitBatches(Section):
    """Use only a part of the batches: a number of them (3) or a fraction (0.1)."""

    train: int | float = key("of training", 1.0, low=0)
    val: int | float = key("of validation", 1.0, low=0)
    test: int | float = key("of test and prediction", 1.0, low=0)


@dataclass
class Train(Section):
    """Length of training, checkpoints, callbacks and limits."""

    num_epochs: int | None = key("passes over the training set; 0 only validates", None, low=0)
    max_steps: int | None = key("maximum number of optimizer steps; ends training if it is reached first", None, low=1)
    val_every_n_epoch: float = key("validate every N epochs; 0.5: in the middle of an epoch and at its end", 1)
    accumulator_epoch: int = key("accumulate gradients from this epoch on", 0, low=0)
    accumulator_factor: int = key("batches per optimizer step", 1, low=1)
    seeds: int | None = key(
        "number of runs that differ only in the seed, counted up from `seed` (from 0 if that is null), under one "
        "parent run, with mean and 95 % interval of each metric; null and 1: one run",
        None,
        low=1,
        high=1000,
    )
    resume_ckpt: str | None = key("continue from a checkpoint or run: a path, RUN, auto, last or best", None)
    gradient_clip: Clip | None = key("clip gradients", None)
    early_stop: EarlyStop | None = key("stop when a metric no longer improves", None)
    checkpoint: Checkpoint = key("when and what to save", Checkpoint)
    callbacks: list[Target] = key("Lightning callbacks of your own", list)
    limit_batches: LimitBatches | None = key("use a part of the batches", None)
    overfit: int | None = key(
        "train and validate on the first N batches of the training set, which a network that can learn memorizes",
        None,
        low=1,
    )
    fast: bool = key(
        "one batch of each stage, without checkpoints and export, to see whether everything runs; the run has the tag "
        "`fast`",
        False,
    )
    export: bool = key("write the bundle for `serve` when training ends", True)


@dataclass
class Test(Section):
    """What validate, test and predict use."""

    ckpt: str | None = key("path, RUN, best or last; null: best where a metric is monitored, else last", None)


@dataclass
class PerEpoch(Section):
    """A number of points per epoch."""

    per_epoch: int = key("points per epoch", low=1)


@dataclass
class Pictures(Section):
    """Pictures of the task's inputs and predictions."""

    every_n_epochs: int = key(
        "at validation every N epochs, and in the last one; confusion matrix and sheet at most once a minute", 1, low=1
    )


@dataclass
class Logger(Target):
    """Where metrics and pictures of the run are logged."""

    type: str = key("a Lightning logger", "deeplightning.tracking.MLflowLogger")
    log_every_n_steps: int | PerEpoch = key("log every N steps, or {per_epoch: 10}", 10, low=1)
    extra: list[Target] = key("additional Lightning loggers", list)
    pictures: Pictures | None = key("when pictures are made; null: none, and no report.html", Pictures)
    histograms: int | None = key("log histograms of weights and gradients every N epochs", None, low=1)
    gradient_norm: bool = key(
        "log the 2-norm of all gradients before clipping as `grad_norm`; with several optimizers as `grad_norm-NAME`",
        False,
    )
    per_rank_files: bool = key("a log file per process, logs/rank_<r>.log", True)
    progress: Literal["auto", "bar", "lines", "off"] = key("auto: a bar on a terminal, lines elsewhere", "auto")
    ranks: list[int] = key("ranks that report to the terminal", lambda: [0])
    log_model: bool = key(
        "log the bundle as an MLflow model too, which `mlflow models serve` and others can load", False
    )


@dataclass
class PluginSection(Section):
    """A section that a plug-in adds to the config, under the name of its entry point.

    Where it has the keys `metric` and `mode`, `check` compares them with the metrics that are logged.
    """

    def check(self, report: Any, examine: Callable[[list[str]], Any]) -> None:
        """Report faults of the section, in a config whose sections could all be read.

        Args:
            report: a `deeplightning.config.report.Report`.
            examine: checks the same config without this section and with further overrides, and returns its report.
        """


@dataclass
class Serve(Section):
    """The prediction server."""

    host: str = key("address to listen on; 0.0.0.0 is every interface", "127.0.0.1")
    port: int = key("port to listen on; 0: any free port", 5000, low=0, high=65535)
    max_upload_mb: int = key("largest request body, in MB (1,000,000 bytes)", 16, low=1, high=10_000)
    # Pillow refuses more pixels than `high`.
    max_pixels: int = key("largest image, in pixels, checked before decoding", 24_000_000, low=1, high=178_956_970)
    max_side: int = key("largest width and height of an image, in pixels", 16_384, low=1, high=178_956_970)
    max_batch: int = key("images per forward pass, at most", 16, low=1, high=1024)
    max_queue: int = key("requests that may wait for the model; further ones are refused", 256, low=1, high=100_000)
    max_wait: float = key("seconds that a request may wait for the model", 5.0, low=0.1, high=600)
    device: ServeDevice = key(
        "where the model runs: cpu; cuda: every GPU, with a process each; cuda:N: the GPU with this number; auto: "
        "every usable GPU, else the CPU",
        "auto",
    )
    precision: Literal["fp32", "int8", "fp16"] = key(
        "number format of the model; int8 is faster on a CPU, fp16 on a GPU, and both lose precision", "fp32"
    )
    api_key_env: str | None = key(
        "environment variable with the key that clients must send; null: no key", None, example="SERVE_KEY"
    )
    allowed_hosts: list[str] = key(
        "host names that clients may use, besides localhost; `*`: any. Without names, a loopback address accepts only "
        "loopback names, any other address every name",
        list,
    )


@dataclass
class Config(Section):
    """The complete description of one run."""

    version: int = key("version of the config format; files without it are version 1", VERSION, low=1, high=VERSION)
    seed: int | None = key("seeds all random number generators; null: drawn and recorded", 42, low=0, high=2**32 - 1)
    stages: list[Stage] = key("stages to run, in this order: train, validate, test, predict", lambda: ["train"])
    data: Data = key("where samples come from")
    model: Model = key("the network, its training and its metrics")
    engine: Engine = key("processes, devices and precision", Engine)
    train: Train = key("length of training, checkpoints and callbacks", Train)
    test: Test = key("weights that validate, test and predict use", Test)
    logger: Logger = key("where metrics and pictures are logged", Logger)
    serve: Serve = key("the prediction server", Serve)
    secrets: Any = hidden()
    notices: Any = hidden()
    asked: Any = hidden()  # dotted key → the requested value, if the run uses another
    roots: Any = hidden()  # the folders that its names are imported from
    places: Any = hidden()  # dotted key → the place that set it, for every key that is set
    written: Any = hidden()  # the names of its files
    unread: Any = hidden()  # overrides that remove keys of base files that nothing reads

    def plugin_sections(self) -> dict[str, PluginSection]:
        """Return the sections that plug-ins add, by name."""
        return {name: section for name, section in self.items() if isinstance(section, PluginSection)}

    def to_dict(self) -> dict[str, Any]:
        """Return the whole config as plain mappings, lists and scalars, with values from the environment in clear."""
        made: dict[str, Any] = plain(self)
        return made

    def public(self) -> dict[str, Any]:
        """Return the config in a form that may be shown and saved: values from the environment stay as written
        (`${oc.env:NAME}`, or a reference to such a value). Loading it gives an equal config."""
        made: dict[str, object] = literal_values(self.to_dict(), (), self.secrets.texts if self.secrets else {})
        return made

    def redact(self, text: str) -> str:
        """Remove the values that came from the environment from a text."""
        return self.secrets.redact(text) if self.secrets else text

    def redact_message(self, text: str) -> str:
        """Redact a message, including text that looks like a secret."""
        return self.secrets.redact_message(text) if self.secrets else text


def plain(value: object) -> Any:
    """Convert a section to plain mappings, lists and scalars."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in keys(value)}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def literal_values(
    value: object, path: tuple[str | int, ...] = (), texts: dict[tuple[str | int, ...], str] | None = None
) -> Any:
    """Replace the values at the paths in `texts`, and escape other strings so that none becomes a reference."""
    if texts and path in texts:
        return texts[path]
    if isinstance(value, dict):
        return {name: literal_values(item, (*path, name), texts) for name, item in value.items()}
    if isinstance(value, list):
        return [literal_values(item, (*path, number), texts) for number, item in enumerate(value)]
    if isinstance(value, str) and ("${" in value or "???" in value):
        from deeplightning.config.secrets import literal  # imported lazily

        return literal(value)
    return value
