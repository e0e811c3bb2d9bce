"""The columns of a batch that a task reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from deeplightning.batches import by_name, structure
from deeplightning.task.task_errors import MisfitError


def columns_of(task: Any, batch: object, *wanted: str) -> Mapping[str, Any]:
    """Return the columns of a batch by name.

    Args:
        task: with `cfg`, and `batch_names`, the names of the parts of a batch that is a tuple or list.
        wanted: columns that the task needs, each a tensor.

    Raises:
        MisfitError: the batch lacks one, or has a form that cannot be understood.
    """
    names: Sequence[str] = task.batch_names
    found = by_name(batch, names)
    if found is not None and all(isinstance(found.get(name), Tensor) for name in wanted):
        return found
    needed = " and ".join(f"`{name}`" for name in dict.fromkeys(wanted))
    forms = " or ".join(f"({', '.join(names[:size])})" for size in range(2, len(names) + 1))
    message = (
        f"{task.cfg.data.module.type} gives batches of the form {structure(batch)}, and {type(task).__name__} needs "
        f"tensors {needed}: return a mapping with these keys, or a tuple {forms}"
    )
    if found is not None and ({"label", "target"} & {*found}) - {*wanted}:
        message += ". Of a table, data.module.params.columns makes the target a number or a category"
    raise MisfitError(message, "data.module")
