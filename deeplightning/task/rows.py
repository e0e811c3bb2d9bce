"""Base of tasks whose inputs are rows of a table, signals or other arrays of numbers. The spec that prepared them is
saved with the weights.

Shapes: B batch; the shape of one input follows from the spec.
"""

from typing import Any

import torch
from torch import Tensor, nn

from deeplightning.array_spec import ArraySpec
from deeplightning.config.part_config import PartConfig
from deeplightning.kinds import row_spec
from deeplightning.table_spec import TableSpec
from deeplightning.task.networks import MisfitError, check_trained_names, try_network
from deeplightning.task.supervised import Supervised


class RowTask(Supervised):
    """Task whose inputs are `input` float32 (B, …) in each batch.

    The data module's `table_spec` or `array_spec` prepares them and is saved in the checkpoint. Without one, a spec is
    inferred from the shape of the validation batches; if their shapes differ, the run cannot be served.

    Attributes:
        gives: its kind of output, a key of `deeplightning.kinds.OUTPUTS`.
        row_spec: prepares an input; None if unknown.
    """

    gives = "regression"

    def __init__(self, cfg: PartConfig):
        super().__init__(cfg)
        self.row_spec: TableSpec | ArraySpec | None = None
        self._inferred: ArraySpec | None = None  # from validation batches, or from a checkpoint that inferred it
        self._may_infer = True

    @property
    def takes(self) -> str:
        """The kind of input: "table" or "array"."""
        return "table" if isinstance(self.row_spec, TableSpec) else "array"

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kind of the task, a key of `deeplightning.kinds.KINDS`."""
        return f"{self.takes}_{self.gives}"

    @property
    def checkpoint_key(self) -> str:
        return self.gives

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data: object = getattr(self.trainer, "datamodule", None)
        for name in ("table", "array"):
            if (spec := getattr(data, f"{name}_spec", None)) is not None:
                self.row_spec = spec

    def try_out(self, network: nn.Module) -> None:
        """Pass two inputs of zeros and the largest codes through the network; raise MisfitError if they do not fit."""
        if (spec := self.row_spec) is None:
            return
        example = torch.zeros(2, *spec.shape)
        message = f"{self.cfg.model.network.type} does not take the data's inputs {tuple(example.shape)}"
        if isinstance(spec, TableSpec) and spec.categories:
            example[:, -len(spec.categories) :] = torch.tensor(spec.cardinalities) - 1.0
            message += f" with cardinalities {spec.cardinalities}"
            kind, backend = str(self.cfg.engine.precision), str(self.cfg.engine.backend)
            exact = 256 if "bf16" in kind else 2048 if "16" in kind else 2**24
            if max(spec.cardinalities) - 1 > exact and ("true" in kind or "deepspeed" in backend):  # inputs are cast
                raise MisfitError(f"engine.precision: {kind} rounds the codes of categories above {exact}; set 32")
        self.check_outputs(try_network(network, example, message))

    def infer_spec(self, inputs: Tensor, outputs: Any) -> None:
        """Infer the spec of inputs that the data module does not describe."""
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
        """Restore the spec; raise MisfitError if the current data are prepared differently."""
        spec = row_spec(saved["takes"], saved["spec"])
        if self.row_spec is None:
            self.row_spec, self._inferred = spec, spec if isinstance(spec, ArraySpec) else None
        elif self.row_spec != spec:
            raise MisfitError(
                "the checkpoint was trained with inputs that were prepared differently from those of the data now: the "
                "training file, seed, fold or columns have changed; use those of that run",
                "data.module",
            )
        if self.gives != "regression":
            check_trained_names(self.class_names, trained := saved.get("class_names", []))
            self.class_names = self.class_names or trained


class Scaled(nn.Module):
    """Network whose outputs are converted to the unit of the targets: float32 (B, T).

    Args:
        network: returns (B,) or (B, T), with mean 0 and standard deviation 1.
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
