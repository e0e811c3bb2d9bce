"""Every key of a config: its type, its default, and one sentence. The reference in the README is made from this file.

A config is a tree of these dataclasses. Free-form values are under some `params`; every other key is here.
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
    "horovod", "dp", "fairscale_oss", "fairscale_sddp", "fairscale_fsdp",  # older words, mapped with a notice
]  # fmt: skip
Precision = Literal[
    16, 32, 64, "bf16", "16-mixed", "16-true", "bf16-mixed", "bf16-true", "32-true", "64-true",
    "amp", "apex_O1", "apex_O2", "deepspeed",  # older words, mapped with a notice
]  # fmt: skip
VERSION = 1
"""The version of configs that this release reads and writes."""

# What the older words mean today.
BACKENDS: dict[str, Backend] = {
    "horovod": "ddp",
    "dp": "ddp",
    "fairscale_oss": "deepspeed_stage_1",
    "fairscale_sddp": "deepspeed_stage_2",
    "fairscale_fsdp": "fsdp",
}
PRECISIONS = {"amp": "16-mixed", "apex_O1": "16-mixed", "apex_O2": "16-mixed", "deepspeed": "16-mixed"}

# Sixteen GPUs are the most that one machine has had (2026).
ServeDevice = Literal[
    "auto", "cpu", "cuda", "cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4", "cuda:5", "cuda:6", "cuda:7",
    "cuda:8", "cuda:9", "cuda:10", "cuda:11", "cuda:12", "cuda:13", "cuda:14", "cuda:15",
]  # fmt: skip

Mode = Literal["min", "max"]
BETTER = "whether less (`min`) or more (`max`) is better; null: what the metric's name says"
Stage = Literal["train", "validate", "test", "predict"]


def key(
    doc: str, default: Any = MISSING, *, example: str | None = None, low: float | None = None, high: float | None = None
) -> Any:
    """Define a key: its description, default (required without one), an example, and the smallest and largest legal
    number.
    """
    metadata = {"doc": doc, "example": example, "low": low, "high": high}
    if isinstance(default, type) or callable(default):
        return field(default_factory=default, metadata=metadata, kw_only=True)
    return field(default=default, metadata=metadata, kw_only=True)


def hidden() -> Any:
    """Define what the loader stores in a section and no config can set."""
    return field(default=None, repr=False, compare=False, kw_only=True, metadata={"hidden": True})


def keys(section: Any) -> Iterator[Field[object]]:
    """Return the fields of a section, class or instance, that are keys of the config."""
    return (f for f in fields(section) if not f.metadata.get("hidden"))


class Section:
    """What every section has from being a config: `cfg["model"]`, `cfg.get("test")`, `"test" in cfg`, `dict(cfg)`."""

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
    frequency: int = key("it steps every so many intervals", 1, low=1)
    monitor: str | None = key("metric for schedulers that need one (ReduceLROnPlateau)", None, example="val_loss")


@dataclass
class Scheduler(Target):
    """The learning rate's schedule; `total_steps`, `steps_per_epoch`, `epochs`, `T_max` in its params may be `auto`."""

    call: Call = key("when it steps", Call)
    warmup: float = key(
        "share of the training's steps in which the rate grows from almost 0 to what the schedule gives; 0: none",
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
    dataset: str | None = key("a name for people; nothing depends on it", None, example="MNIST")
    num_workers: int = key("loader processes per training process; 0 loads in the process itself", 0, low=0)
    num_splits: int | None = key(
        "validation is one of so many parts of the training set; null: the module's split", None, low=2
    )
    fold: int = key("which of the `num_splits` parts validates", 0, low=0)
    sampler: Target | Literal["balanced"] | None = key(
        "the order of training, for data modules that heed it, as ours do; balanced: each class equally often in an "
        "epoch; a target is called with the training set, and batch_size, num_replicas, rank and seed by name; null: "
        "shuffled",
        None,
        example="{type: own.Sampler, params: {size: 8}}",
    )
    loader: dict[str, Any] = key("keyword arguments of torch's DataLoader", dict, example="{pin_memory: true}")


@dataclass
class Model(Section):
    """What learns, and how."""

    module: Target = key(
        "the task: a LightningModule; a first parameter named `cfg` gets the whole config",
        example="{type: deeplightning.task.img_classif.ImageClassification}",
    )
    network: Target | dict[str, Target] | None = key("the network, or several by name", None)
    output: str | int | None = key(
        "what the task takes of a network's output that is no tensor: an attribute, a key, or a position from 0; null: "
        "all of it",
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
    """How the run is spread over processes and devices, and in which numbers it computes."""

    backend: Backend | None = key(
        "how parameters, gradients and the optimizer's state are spread; null: one process", None
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
    precision: Precision = key("bits of a number in the forward and backward pass; 16 and bf16 are mixed", 32)
    launcher: Target | None = key(
        "what starts the processes; null: this command, or what started it (torchrun, Slurm, MPI)",
        None,
        example="{type: Slurm, params: {partition: gpu}}",
    )
    max_restarts: int = key("restarts after a lost worker, from the latest complete checkpoint", 0, low=0)
    matmul_precision: Literal["highest", "high", "medium"] | None = key(
        "how precisely GPUs multiply matrices of 32 bits: high is TF32, medium bf16; null: torch's own choice", None
    )
    deterministic: bool = key("only algorithms that give the same bits each time, on GPU too", False)
    compile: bool | Literal["graphs", "reduce-overhead", "max-autotune"] = key(
        "compile the training step's network and losses with torch.compile, for full batches; a word is its mode: "
        "reduce-overhead uses CUDA graphs. graphs: CUDA graphs of the eager kernels, without the compiler",
        False,
    )
    fused: bool | Literal["auto"] = key(
        "take an optimizer's step in one kernel, where torch has one; auto: on a GPU, under one process or ddp; what "
        "the optimizer's params say of `fused` or `foreach` counts before it",
        "auto",
    )
    channels_last: bool = key(
        "lay pictures in memory with their channels last: convolutions are faster, and round otherwise", False
    )
    threads: int | None = key(
        "threads that one process computes with; null: OMP_NUM_THREADS, else the cores, divided among the processes",
        None,
        low=1,
    )
    keep_memory: bool = key(
        "memory that a step frees is kept for the next one instead of given back to the system; the same results", True
    )
    sync_batchnorm: bool = key("batch norm over all processes", False)
    activation_checkpointing: list[str] | None = key(
        "modules that compute their activations again in the backward pass instead of keeping them: names in the "
        "network, or classes",
        None,
        example="[layers.0, TransformerEncoderLayer]",
    )
    profiler: Literal["simple", "advanced", "torch", "flops"] | None = key(
        "measure where time goes; flops: count the operations of a step by module, in flops.txt of the run folder", None
    )
    setup_hook: str | None = key(
        "MODULE.FUNCTION, called without arguments in every process before they meet, also after a restart", None
    )
    env: dict[str, str] = key("environment variables of every worker", dict)


def options_of(hint: object) -> list[object]:
    """Return the types in a hint: those of a union, else the hint itself."""
    union = get_origin(hint) in (UnionType, Union)
    return list(get_args(hint)) if union else [hint]


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


def backend_of(engine: Engine) -> Backend | None:
    """Return the present name of an `engine.backend`."""
    return BACKENDS.get(engine.backend or "", engine.backend)


@dataclass
class Clip(Section):
    """Gradient clipping, before each optimizer step."""

    value: float = key(
        "the largest norm, or the largest absolute value; of agc, the largest share of the weights' norm, such as 0.01",
        low=0,
    )
    algorithm: Literal["norm", "value", "agc"] = key(
        "clip the `norm` of all gradients, or each `value`; agc: the norm of each unit by that of its weights", "norm"
    )
    norm_type: float = key("which norm", 2.0)


@dataclass
class EarlyStop(Section):
    """End when a metric gets no better."""

    metric: str = key("name of a metric", example="val_loss")
    mode: Mode | None = key(BETTER, None)
    delta: float = key("smaller changes do not count as better", 0.0, low=0)
    patience: int = key("so many validations without a better value end the training", 3, low=1)


@dataclass
class Checkpoint(Section):
    """When weights are saved, and which are kept."""

    every_n_epochs: float | None = key("save every so many epochs; 0.5: twice an epoch; null: only at the end", 1)
    every_n_steps: int | None = key("save every so many optimizer steps as well", None, low=1)
    monitor: str | None = key(
        "metric that decides which weights are best, at each validation; one of training steps also where a fraction "
        "of an epoch is saved; null: none are",
        None,
        example="val_acc",
    )
    mode: Mode | None = key(BETTER, None)
    save_top_k: int = key(
        "how many of the best are kept; the best is best.ckpt. Without `monitor`, where more than 1: of the newest",
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
    """How long training lasts and what happens on the way."""

    num_epochs: int | None = key("passes over the training set; 0 only validates", None, low=0)
    max_steps: int | None = key("optimizer steps; ends training when it comes first", None, low=1)
    val_every_n_epoch: float = key("validate every so many epochs; 0.5: at the half of an epoch and at its end", 1)
    accumulator_epoch: int = key("accumulate gradients from this epoch on", 0, low=0)
    accumulator_factor: int = key("batches per optimizer step", 1, low=1)
    seeds: int | None = key(
        "so many runs that differ by the seed alone, counted up from `seed` (from 0 where that is null), under one "
        "parent run, with mean and 95 % interval of each metric; null and 1: one run",
        None,
        low=1,
        high=1000,
    )
    resume_ckpt: str | None = key("continue from a checkpoint or run: a path, RUN, auto, last or best", None)
    gradient_clip: Clip | None = key("clip gradients", None)
    early_stop: EarlyStop | None = key("end when a metric gets no better", None)
    checkpoint: Checkpoint = key("what is saved when", Checkpoint)
    callbacks: list[Target] = key("Lightning callbacks of your own", list)
    limit_batches: LimitBatches | None = key("use a part of the batches", None)
    overfit: int | None = key(
        "train and validate on the same so many batches, the first of the training set, which a network that can learn "
        "learns by heart",
        None,
        low=1,
    )
    fast: bool = key(
        "one batch of each stage, without checkpoints and export, to see whether everything runs; the run has the tag "
        "`fast`",
        False,
    )
    export: bool = key("write the bundle that `serve` answers from when training has ended", True)


@dataclass
class Test(Section):
    """What validate, test and predict use."""

    ckpt: str | None = key("path, RUN, best or last; null: best where a metric is monitored, else last", None)


@dataclass
class PerEpoch(Section):
    """So many times an epoch."""

    per_epoch: int = key("points per epoch", low=1)


@dataclass
class Pictures(Section):
    """Pictures of what the task sees and answers."""

    every_n_epochs: int = key(
        "at the validation of every so many epochs, and of the last; confusion matrix and sheet once a minute at most",
        1,
        low=1,
    )


@dataclass
class Logger(Target):
    """Where numbers and pictures of the run go."""

    type: str = key("a Lightning logger", "deeplightning.tracking.MLflowLogger")
    log_every_n_steps: int | PerEpoch = key("a point every so many steps, or {per_epoch: 10}", 10, low=1)
    extra: list[Target] = key("more Lightning loggers beside this one", list)
    pictures: Pictures | None = key("when pictures are made; null: none, and no report.html", Pictures)
    histograms: int | None = key("histograms of weights and gradients every so many epochs", None, low=1)
    gradient_norm: bool = key(
        "log the second norm of all gradients, before they are clipped, as `grad_norm`; of several optimizers as "
        "`grad_norm-NAME`",
        False,
    )
    per_rank_files: bool = key("a log file per process, logs/rank_<r>.log", True)
    progress: Literal["auto", "bar", "lines", "off"] = key("auto: a bar on a terminal, lines elsewhere", "auto")
    ranks: list[int] = key("processes that report to the terminal", lambda: [0])
    log_model: bool = key(
        "log the bundle as an MLflow model too, which `mlflow models serve` and others can load", False
    )


@dataclass
class PluginSection(Section):
    """A section that a plug-in adds to the config, under the name of its entry point.

    Where it has the keys `metric` and `mode`, `check` compares them with the metrics that are logged.
    """

    def check(self, report: Any, examine: Callable[[list[str]], Any]) -> None:
        """Add what is wrong with the section to the report of a config whose sections could all be read.

        Args:
            report: a `deeplightning.config.report.Report`.
            examine: checks the same config without this section and with further overrides, and returns its report.
        """


@dataclass
class Serve(Section):
    """The prediction server."""

    host: str = key("address to listen on; 0.0.0.0 is every interface", "127.0.0.1")
    port: int = key("port to listen on; 0: any that is free", 5000, low=0, high=65535)
    max_upload_mb: int = key("largest request body, in MB (1,000,000 bytes)", 16, low=1, high=10_000)
    max_pixels: int = key(
        "largest image, in pixels, checked before decoding", 24_000_000, low=1, high=178_956_970
    )  # beyond which Pillow refuses
    max_side: int = key("largest width and height of an image, in pixels", 16_384, low=1, high=178_956_970)
    max_batch: int = key("images per forward pass, at most", 16, low=1, high=1024)
    max_queue: int = key("requests that may wait for the model; further ones are refused", 256, low=1, high=100_000)
    max_wait: float = key("seconds that a request may wait for the model", 5.0, low=0.1, high=600)
    device: ServeDevice = key(
        "where the model computes: cpu; cuda: every GPU, with a process each; cuda:N: the GPU with this number; auto: "
        "every usable GPU, else the CPU",
        "auto",
    )
    precision: Literal["fp32", "int8", "fp16"] = key(
        "numbers that the model computes in; int8 is quicker on a CPU, fp16 on a GPU, and both round", "fp32"
    )
    api_key_env: str | None = key(
        "environment variable that holds the key clients must send; null: they need none", None, example="SERVE_KEY"
    )
    allowed_hosts: list[str] = key(
        "names by which clients may ask for this server, besides localhost; `*`: any. Without a name, a loopback "
        "address answers loopback names alone, any other address every name",
        list,
    )


@dataclass
class Config(Section):
    """One run, described whole."""

    version: int = key("of the keys; a file without it has version 1", VERSION, low=1, high=VERSION)
    seed: int | None = key("everything random follows from it; null: drawn and recorded", 42, low=0, high=2**32 - 1)
    stages: list[Stage] = key("what is done, in this order: train, validate, test, predict", lambda: ["train"])
    data: Data = key("where samples come from")
    model: Model = key("what learns, and how")
    engine: Engine = key("how the run is spread", Engine)
    train: Train = key("how long, and what happens on the way", Train)
    test: Test = key("which weights validate, test and predict", Test)
    logger: Logger = key("where numbers and pictures go", Logger)
    serve: Serve = key("the prediction server", Serve)
    secrets: Any = hidden()
    notices: Any = hidden()
    asked: Any = hidden()  # dotted key → what was asked for and is otherwise in the run
    roots: Any = hidden()  # the folders that its names are imported from
    places: Any = hidden()  # dotted key → the place that set it, for every key that is set
    written: Any = hidden()  # the names of its files

    def of_plugins(self) -> dict[str, PluginSection]:
        """Return the sections that plug-ins add, by name."""
        return {name: section for name, section in self.items() if isinstance(section, PluginSection)}

    def to_dict(self) -> dict[str, Any]:
        """Return the whole config as plain mappings, lists and scalars, with values from the environment in clear."""
        made: dict[str, Any] = plain(self)
        return made

    def public(self) -> dict[str, Any]:
        """Return the config as it may be shown and saved: values from the environment stay as written
        (`${oc.env:NAME}`, or a reference to such a value). It loads to an equal config."""
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
    """Return plain values with some texts in their places, and the others escaped, so that none becomes a reference."""
    if texts and path in texts:
        return texts[path]
    if isinstance(value, dict):
        return {name: literal_values(item, (*path, name), texts) for name, item in value.items()}
    if isinstance(value, list):
        return [literal_values(item, (*path, number), texts) for number, item in enumerate(value)]
    if isinstance(value, str) and ("${" in value or "???" in value):
        from deeplightning.config.secrets import literal  # not for `schema`, which resolves nothing

        return literal(value)
    return value
