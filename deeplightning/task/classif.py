"""Classification of arrays of numbers: rows of a table, signals, or your own inputs.

Shapes: B batch, K classes.
"""

from deeplightning.task import classes
from deeplightning.task.rows import RowTask


class Classification(classes.Classification, RowTask):
    """Trains `model.network` on batches of {"input": float32 (B, …), "label": int64 (B,), "index": int64 (B,)}.

    The data module provides `table_spec` or `array_spec`, which prepares inputs, and `class_names`; both are saved in
    the checkpoint.
    """

    gives = "classification"
