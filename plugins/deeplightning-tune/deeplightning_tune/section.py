"""Define the section `tune` of a config: its keys, and the check of its space. Optuna is not imported here."""

# ruff: noqa: RUF009 (`key` returns a dataclass field, which the rule cannot see)
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from deeplightning.config.report import Report
from deeplightning.config.schema import BETTER, Config, Mode, PluginSection, Target, key
from deeplightning.config.section_kinds import KINDS, Kind
from deeplightning.config.target_check import GIVEN_BY_NAME
from deeplightning.faults import Fault
from deeplightning_tune.space import MAX_CHECKED, faults, space_of, value_faults

GRID = "optuna.samplers.GridSampler"
KINDS["tune.sampler"] = Kind("optuna.samplers.BaseSampler", "an Optuna sampler")
KINDS["tune.pruner"] = Kind("optuna.pruners.BasePruner", "an Optuna pruner")
GIVEN_BY_NAME[GRID] = {"search_space": {}}  # derived from `tune.space`


@dataclass
class Tune(PluginSection):
    """A search over settings, `deeplightning tune CONFIG`; each trial is a run with other values of some keys."""

    metric: str = key("logged metric that is optimized", example="val_acc")
    space: dict[str, Any] = key(
        "values that each dotted config key may have: {uniform: [0, 0.5]}, {log_uniform: [1e-4, 0.1]}, {int: [1, 9]}, "
        "{log_int: [8, 256]} or {choice: [relu, gelu]}; `uniform` and `int` also take a `step`",
        example="{model.optimizer.params.lr: {log_uniform: [1e-4, 0.1]}}",
    )
    mode: Mode | None = key(BETTER, None)
    num_trials: int = key("total number of trials, including those of an interrupted search", 20, low=1)
    sampler: Target | None = key(
        "Optuna sampler that draws the values; null: optuna.samplers.TPESampler. Seeded from `seed`; "
        "optuna.samplers.GridSampler gets its grid from `space`",
        None,
    )
    pruner: Target | None = key(
        "Optuna pruner that ends hopeless trials early, such as optuna.pruners.MedianPruner; null: none", None
    )
    parallel: int = key("number of trials at the same time", 1, low=1)
    name: str | None = key(
        "name of the search; the same name in the same experiment continues it; null: name of the config file", None
    )

    @property
    def makes_grid(self) -> bool:
        """Whether the sampler iterates over a grid derived from the space."""
        return self.sampler is not None and self.sampler.type == GRID and "search_space" not in self.sampler.params

    def check(self, report: Report, examine: Callable[[list[str]], Report]) -> None:
        """Check the space by itself, then the ends of each range and each choice with the whole config."""
        known = {fault.key for fault in report.faults}
        report.add(*(fault for fault in self._faults() if fault.key not in known))
        for d in space_of(self.space) if isinstance(self.space, dict) and len(self.space) <= MAX_CHECKED else ():
            if d.key in report.source.groups and not all(isinstance(choice, dict) for choice in d.choices or ()):
                message = "a search cannot choose options of a group; give whole mappings as choices, or sweep the "
                message += f"options: `train --multirun {d.key}=a,b`"
                report.add(Fault(message, f"tune.space.{d.key}"))
        if any(str(fault.key).startswith("tune.") for fault in report.faults):
            return
        report.add(*value_faults(space_of(self.space), examine, report))

    def _faults(self) -> Iterator[Fault]:
        if isinstance(self.space, dict):
            for name, message in faults(self.space, self.makes_grid):
                yield Fault(message, f"tune.space.{name}".rstrip("."))


def search_of(config: Config | None) -> Tune | None:
    """Return the search of a config, or None."""
    found = None if config is None else config.get("tune")
    return found if isinstance(found, Tune) else None
