"""The members of a supervised task that a task of your own may override, with their defaults.

B batch; further dimensions depend on the task.
"""

from collections.abc import Mapping
from typing import Any, cast

import pytorch_lightning as pl
from torch import Tensor, nn

from deeplightning.batches import by_name, structure
from deeplightning.config.part_config import PartConfig
from deeplightning.task.networks import LabelError, MisfitError

Batch = Mapping[str, Tensor]


class Members(pl.LightningModule):
    """What differs between supervised tasks; `deeplightning.task.supervised.Supervised` trains with it."""

    cfg: PartConfig
    network: nn.Module | None

    kind = "supervised"

    network_names: tuple[str, ...] = ()
    """Names of the networks that the task needs; empty: a single one. Read from the source by `deeplightning check`."""

    metric_names: tuple[str, ...] = ()
    """The names of `default_metrics`; read from the source by `deeplightning check`."""

    uniform = False
    """Whether the truth of each sample has the same shape and no class in it is negative. Losses without class weights
    and `ignore_index` then divide by the number of samples, and the truth need not be read."""

    class_names: list[str]
    """The name of each class, label or number of an answer, in order; empty if the data module gives none."""

    input_name, truth_name = "input", "target"
    """The columns of a batch that `inputs` and `truth` read."""

    loss_arguments: tuple[str, ...] = ("outputs", "truth")
    """The arguments of each loss; read from the source by `deeplightning check`."""

    @property
    def batch_names(self) -> tuple[str, ...]:
        """Names of the parts of a batch that is a tuple or list, in order."""
        return (self.input_name, self.truth_name, "weight")

    def column(self, batch: object, name: str) -> Tensor:
        """Return a column of a batch; raise MisfitError if it has none, or has an unsupported form."""
        names, wanted = self.batch_names, dict.fromkeys((self.input_name, name))
        found = by_name(batch, names)
        if found is not None and all(isinstance(found.get(each), Tensor) for each in wanted):
            return cast(Tensor, found[name])
        forms = " or ".join(f"({', '.join(names[:size])})" for size in range(2, len(names) + 1))
        needed = " and ".join(f"`{each}`" for each in wanted)
        message = (
            f"{self.cfg.data.module.type} gives batches of the form {structure(batch)}, and {type(self).__name__} "
            f"needs tensors {needed}: return a mapping with these keys, or a tuple {forms}"
        )
        if found is not None and ({"label", "target"} & {*found}) - {*wanted}:
            message += ". A table's data.module.params.columns, or an array's dtype, makes it a number or a category"
        raise MisfitError(message, "data.module")

    def inputs(self, batch: Batch) -> Tensor:
        """Return the inputs of the network, (B, …)."""
        return self.column(batch, self.input_name)

    def truth(self, batch: Batch) -> Tensor:
        """Return what losses and metrics compare the outputs with, (B, …)."""
        return self.column(batch, self.truth_name)

    def _weight(self, batch: object, samples: int) -> Tensor | None:
        """Return the weight of each sample of a batch, float (B,), or None if the batch has none. Raise MisfitError if
        there is not one number for each sample, LabelError if one is negative or not finite."""
        weight = (by_name(batch, self.batch_names) or {}).get("weight")
        if weight is None:
            return None
        if not isinstance(weight, Tensor) or weight.numel() != samples:
            raise MisfitError(
                f"the weights of a batch are {structure(weight)}, not float ({samples},), one for each sample",
                "data.module",
            )
        if self._may_read(weight) and not bool(((weight >= 0) & weight.isfinite()).all()):
            raise LabelError("the weight of a sample is negative or not finite; it must be 0 or more", "data.module")
        return weight.flatten()

    def _may_read(self, values: Tensor) -> bool:
        """Return whether to read values of a batch: on a GPU, where reading blocks, in the first epoch only."""
        return self.current_epoch == 0 or values.device.type == "cpu"

    def _names_or_numbers(self, number: int) -> list[str]:
        """Return the names of the classes or labels, or their numbers if the data module gives none."""
        return self.class_names or [str(each) for each in range(number)]

    def default_metrics(self) -> dict[str, object]:
        """Return a torchmetrics Metric for each of `metric_names`; used if `model.metrics` is null."""
        return {}

    def measured(self, outputs: Any) -> Tensor:
        """Return the form of the outputs that metrics are called with, (B, …)."""
        return outputs.detach().float()

    def check_outputs(self, outputs: object) -> None:
        """Raise MisfitError if this task cannot use the outputs of the network."""

    def check_truth(self, outputs: Any, truth: Tensor) -> None:
        """Check that a batch's truth fits the outputs, which with `engine.compile` are on `meta`, without values.

        Raises:
            LabelError: the data have a truth that the network cannot predict.
        """

    def try_out(self, network: nn.Module) -> None:
        """Check that a new network fits the data. It must be in training mode before and after."""

    def answers(self, batch: Batch, outputs: Any) -> dict[str, Any]:
        """Return the columns of the predictions file besides `index`: tensors (B,), or lists of B texts."""
        return {}

    def infer_spec(self, inputs: Tensor, outputs: Any) -> None:
        """Infer from a validation batch what an endpoint needs and the data module does not provide."""

    def remember(self, inputs: Tensor, outputs: Any, truth: Tensor) -> None:
        """Collect the samples of a validation batch. Also called on processes without samples."""

    def exported(self, model: nn.Module) -> nn.Module:
        """Return a model ready for a bundle: on the CPU, in eval mode.

        Raises:
            MisfitError: the data module does not describe how inputs are prepared.
        """
        from deeplightning.kinds import has_spec

        if self.network is None or not has_spec(self):
            raise MisfitError(
                "the data module has no `image_spec`, `text_spec`, `table_spec` or `array_spec`, so a server cannot "
                "prepare inputs"
            )
        return model.cpu().float().eval()

    def travels(self) -> dict[str, object]:
        """Return the state to save in a checkpoint, of plain types."""
        return {}

    def arrives(self, saved: dict[str, object]) -> None:
        """Restore the state that `travels` returned."""
