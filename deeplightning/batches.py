"""Name and describe the parts of batches in the forms that torch's loaders return: tensors, tuples, lists, mappings and
named tuples."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, tensor

MAX_PARTS = 8
"""Most parts of a batch, or of a part of one, that `structure` lists."""


def by_name(batch: Any, names: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the columns of a batch by name, or None for a batch of another form.

    A mapping is returned as it is, and so are the fields of a named tuple that has the first name. A tensor is the
    first column; the tensors of a tuple or list are the first columns in the order of `names`.
    """
    if isinstance(batch, Mapping):
        return batch
    if not names:
        return None
    if names[0] in getattr(batch, "_fields", ()):
        return batch._asdict()
    parts = [batch] if isinstance(batch, Tensor) else batch
    if isinstance(parts, tuple | list) and len(parts) <= len(names) and all(isinstance(p, Tensor) for p in parts):
        return dict(zip(names, parts, strict=False))
    return None


def inputs_of(batch: Any) -> Any:
    """Return the part of a batch that a network is most likely called with: the first one."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    return inputs_of(parts[0]) if isinstance(parts, tuple | list) and parts else parts


def class_names_of(module: object) -> list[str]:
    """Return the class names of a data module or task, which may be any sequence or array; [] if it has none."""
    names: Any = getattr(module, "class_names", None)
    return [] if names is None else [*map(str, names)]


def structure(batch: Any, depth: int = 2) -> str:
    """Describe a batch by its containers, dtypes and shapes: `list (float32 (32, 2), int64 (32,))`."""
    kind = type(batch).__name__
    if hasattr(batch, "dtype") and hasattr(batch, "shape"):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if not isinstance(batch, Mapping | tuple | list):
        return kind
    plain = {type(part).__name__ for part in (batch.values() if isinstance(batch, Mapping) else batch)}
    if depth == 0 or plain <= {"str", "int", "float", "bool"}:
        return f"{kind} of {len(batch)}" + (f" {plain.pop()}" if len(plain) == 1 else "")
    shown = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    parts = [(f"{key}: " if isinstance(batch, Mapping) else "") + structure(part, depth - 1) for key, part in shown]
    return f"{kind} ({', '.join([*parts[:MAX_PARTS], *(['…'] if len(parts) > MAX_PARTS else [])])})"


def has_loss(outputs: Any) -> bool:
    """Return whether a batch has a loss; a task that steps its optimizers itself may have none."""
    return (outputs.get("loss") if isinstance(outputs, dict) else outputs) is not None


def batch_loss(trainer: Any, outputs: Any) -> Tensor:
    """Return the loss of one batch from the outputs of `on_train_batch_end`, or nan if they have none. This undoes
    Lightning's division by the accumulation factor, which tasks that step their optimizers themselves do not have."""
    if not has_loss(outputs):
        return tensor(float("nan"))
    loss: Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs
    return loss.detach() * (trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1)


def samples_in(batch: object) -> int:
    """Return the number of rows in a batch: the length of its first tensor that has rows, or 0 if none has."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 0  # `len` of a tensor takes 2 µs at each step
    parts = [getattr(batch, field.name) for field in fields(batch)] if is_dataclass(batch) else batch
    for part in parts.values() if isinstance(parts, Mapping) else parts if isinstance(parts, list | tuple) else ():
        if rows := samples_in(part):
            return rows
    return 0
