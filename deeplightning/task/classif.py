"""Classification of anything that is an array of numbers: rows of a table, signals, or inputs of your own.

Shapes: B batch, K classes.
"""

from typing import Any

from torch import nn

from deeplightning.task import classes
from deeplightning.task.classes import Probabilities
from deeplightning.task.rows import RowTask


class Classification(classes.Classification, RowTask):
    """Trains `model.network` on batches of {"input": float32 (B, …), "label": int64 (B,), "index": int64 (B,)}.

    The data module says how inputs are prepared (`table_spec` or `array_spec`) and what the classes are called
    (`class_names`); both travel in the checkpoint. Rows with index -1 fill up a batch and are not counted.

    Metrics: `<stage>_loss` and `<stage>_<name>` for each of `model.metrics` (`acc` by default), weighted by sample.

    Raises:
        ValueError: several networks, optimizers or schedulers, or no loss: this task trains one network.
    """

    gives = "classification"
    sample = "sample"

    def travels(self) -> dict[str, object]:
        own = super().travels()
        return own and own | {"class_names": self.class_names}

    def arrives(self, saved: dict[str, Any]) -> None:
        super().arrives(saved)
        self.class_names = self.class_names or saved["class_names"]

    def inference_model(self) -> nn.Module:
        """Prepared inputs float32 (N, …) to probabilities float32 (N, K), on the CPU, in eval mode."""
        return self.exported(Probabilities(self.network))
