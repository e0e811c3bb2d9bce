"""What tasks share whose inputs are rows of a table, signals or other arrays of numbers: the spec that prepared them
travels with the weights.

Shapes: B batch; the shape of one input follows from the spec.
"""

from typing import Any

import torch
from torch import Tensor, nn

from deeplightning.array_spec import ArraySpec
from deeplightning.config.part_config import PartConfig
from deeplightning.kinds import row_spec
from deeplightning.table_spec import TableSpec
from deeplightning.task.networks import MisfitError, try_network
from deeplightning.task.supervised import Supervised


class RowTask(Supervised):
    """A task whose inputs are `input` float32 (B, …) in each batch.

    The data module says how they are prepared (`table_spec` or `array_spec`), which travels in the checkpoint. Without
    one an input is an array of the shape that all validation batches have; where these differ, there is no endpoint.

    Attributes:
        gives: what it answers, a word of `deeplightning.kinds.OUTPUTS`.
        row_spec: how an input is prepared; None: not known.
    """

    gives = "regression"

    def __init__(self, cfg: PartConfig):
        super().__init__(cfg)
        self.row_spec: TableSpec | ArraySpec | None = None
        self._inferred: ArraySpec | None = None  # of validation batches, or a checkpoint that had it from there
        self._may_infer = True

    @property
    def takes(self) -> str:
        """What goes in: "table" or "array"."""
        return "table" if isinstance(self.row_spec, TableSpec) else "array"

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kind of the task, of `deeplightning.kinds.KINDS`."""
        return f"{self.takes}_{self.gives}"

    @property
    def saved_under(self) -> str:
        return self.gives

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data: object = getattr(self.trainer, "datamodule", None)
        for name in ("table", "array"):
            if (spec := getattr(data, f"{name}_spec", None)) is not None:
                self.row_spec = spec

    def try_out(self, network: nn.Module) -> None:
        """Pass two inputs of zeros through; raise MisfitError if they do not fit."""
        spec = self.row_spec
        if spec is None:
            return
        shape = (2, *spec.shape)
        refusal = f"{self.cfg.model.network.type} does not take the data's inputs {shape}"
        self.check_outputs(try_network(network, torch.zeros(shape), refusal))

    def take_form(self, inputs: Tensor, outputs: Any) -> None:
        """Take the shape of inputs that the data module does not describe."""
        if self._may_infer and self.row_spec is self._inferred:
            shape = tuple(inputs.shape[1:])
            spec = ArraySpec(shape) if shape and all(shape) and inputs.is_floating_point() else None
            self._may_infer = spec is not None and self._inferred in (None, spec)
            self.row_spec = self._inferred = spec if self._may_infer else None

    def travels(self) -> dict[str, object]:
        if self.row_spec is None:
            return {}
        names = {"class_names": self.class_names} if self.gives != "regression" else {}
        return {"takes": self.takes, "spec": self.row_spec.to_dict(), **names}

    def arrives(self, saved: dict[str, Any]) -> None:
        """Take the spec; raise MisfitError if the inputs were prepared otherwise than those of the data now."""
        spec = row_spec(saved["takes"], saved["spec"])
        if self.row_spec is None:
            self.row_spec, self._inferred = spec, spec if isinstance(spec, ArraySpec) else None
        elif self.row_spec != spec:
            raise MisfitError(
                "the checkpoint was trained with inputs that were prepared differently from those of the data now: the "
                "training file, seed, fold or columns changed since; give those of that run",
                "data.module",
            )
        if self.gives != "regression":
            self.class_names = self.class_names or saved.get("class_names", [])


class Scaled(nn.Module):
    """A network whose numbers are brought to the unit of the targets: float32 (B, T).

    Args:
        network: gives (B,) or (B, T), of mean 0 and deviation 1.
        mean, std: (T,)
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module | None, mean: Tensor, std: Tensor):
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.network is not None
        return self.network(inputs).float().reshape(-1, self.mean.shape[0]) * self.std + self.mean
