"""Classification of anything that is an array of numbers: rows of a table, signals, or inputs of your own.

Shapes: B batch, K classes.
"""

from deeplightning.task import classes
from deeplightning.task.rows import RowTask


class Classification(classes.Classification, RowTask):
    """Trains `model.network` on batches of {"input": float32 (B, …), "label": int64 (B,), "index": int64 (B,)}.

    The data module says how inputs are prepared (`table_spec` or `array_spec`) and what the classes are called
    (`class_names`); both travel in the checkpoint.
    """

    gives = "classification"
