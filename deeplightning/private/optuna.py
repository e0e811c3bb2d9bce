"""Private names of Optuna 5: a study and its storage know each other's ids, which no public name gives."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna


def storage_and_id(study: "optuna.Study") -> "tuple[optuna.storages.BaseStorage, int]":
    """A study's storage, and its id there. Where a name has moved, `tune` fails at its first trial."""
    return study._storage, study._study_id


def trial_id(trial: "optuna.Trial | optuna.trial.FrozenTrial") -> int:
    """A trial's id in the storage; its `number` counts within its study. Where the name has moved, `tune` fails when
    the first trial reports."""
    return int(trial._trial_id)
