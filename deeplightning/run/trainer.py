"""Lightning's Trainer with the right number of steps (2.6.6)."""

import math
from typing import Any

import pytorch_lightning as pl

from deeplightning.callbacks.steps import AccumulateFrom


class Trainer(pl.Trainer):
    """Lightning's Trainer, whose `estimated_stepping_batches` counts each epoch with its own accumulation."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the training; infinite for data without a length if `max_steps` is not set.

        Lightning applies the current accumulation to all epochs, and returns -1 for data without a length.
        """
        total = super().estimated_stepping_batches
        if total < 0:
            return math.inf
        own: Any = self  # Lightning sets `callbacks` without a type
        later = next((callback for callback in own.callbacks if isinstance(callback, AccumulateFrom)), None)
        batches, epochs = self.num_training_batches, self.max_epochs
        if later is None or epochs is None or epochs < 0 or not math.isfinite(batches):
            return total
        first = min(later.epoch, epochs)
        steps = int(first * batches) + (epochs - first) * math.ceil(batches / later.factor)
        return steps if self.max_steps < 0 else min(steps, self.max_steps)
