"""Tables for the manual: all rules, and whether each engine allows each setting."""

from dataclasses import dataclass

from deeplightning.config.combinations import RULES, Rule
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
    Target,
    Train,
    plain,
)
from deeplightning.config.tree import line


@dataclass(frozen=True)
class Setting:
    """A row of the table of engines.

    Attributes:
        words: description of the setting.
        values: keys of the config and their values.
    """

    words: str
    values: dict[str, object]

    def overrides(self) -> list[str]:
        """Return the setting as overrides for a command line."""
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
    Setting("only the head trainable", {"model.trainable": "head"}),
    Setting("LBFGS", {"model.optimizer": Optimizer(type="torch.optim.LBFGS", params={"lr": 0.1})}),
    Setting(
        "a schedule per step",
        {
            "model.scheduler": Scheduler(
                type=f"{_SCHEDULES}.OneCycleLR",
                params={"max_lr": 0.1, "total_steps": "auto"},
                call=Call(interval="step"),
            )
        },
    ),
    Setting(
        "a schedule on a metric",
        {"model.scheduler": Scheduler(type=f"{_SCHEDULES}.ReduceLROnPlateau", call=Call(monitor="val_loss"))},
    ),
    Setting("`activation_checkpointing`", {"engine.activation_checkpointing": ["ReLU"]}),
    Setting("`compile`", {"engine.compile": True}),
    Setting("`deterministic`", {"engine.deterministic": True}),
    Setting("`sync_batchnorm`", {"engine.sync_batchnorm": True}),
]


def broken_rule(setting: Setting, backend: Backend | None, gpus: int | None = None) -> Rule | None:
    """Return the rule that a setting breaks with a backend and two processes, on CPU or a GPU each, or None."""
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


AS_BF16 = {"engine.precision": 16}


def engines() -> str:
    """Return a Markdown table of the settings that not every engine allows; cells give the result on CPUs first."""
    allowed, limited = [], {}
    for setting in SETTINGS:
        found = [(check_result(setting, b), check_result(setting, b, gpus=2)) for b in ENGINES.values()]
        if {*found} == {("yes", "yes")}:
            allowed.append(setting.words)
        else:
            limited[setting.words] = [cpu if cpu == gpu else f"{cpu}; on GPUs {gpu}" for cpu, gpu in found]
    columns: dict[tuple[str, ...], list[str]] = {}  # engines with the same results share one
    for name, results in zip(ENGINES, zip(*limited.values(), strict=True), strict=True):
        columns.setdefault(results, []).append(name)
    rows = [f"| Setting | {' | '.join(map(', '.join, columns.values()))} |", "|---" * (len(columns) + 1) + "|"]
    rows += [f"| {words} | {' | '.join(row)} |" for words, *row in zip(limited, *columns, strict=True)]
    return (
        f"`check` rejects a cell with a number, which is the exit code. All engines allow {', '.join(allowed)}.\n\n"
        + "\n".join(rows)
    )


def check_result(setting: Setting, backend: Backend | None, gpus: int | None = None) -> str:
    """Return the result of `check` for a setting with a backend, on CPUs or GPUs."""
    if rule := broken_rule(setting, backend, gpus):
        return f"no ({rule.exit_code})"
    return "as bf16" if gpus is None and setting.values == AS_BF16 else "yes"


def table() -> str:
    """Return all rules as a Markdown table; exit codes other than 2 are named."""
    rows = ["| Combination | Remedy |", "|---|---|"]
    for rule in RULES:
        code = f" (exit code {rule.exit_code})" if rule.exit_code != 2 else ""
        rows.append(f"| {rule.when}{code} | {rule.remedy} |")
    return "\n".join(rows)
