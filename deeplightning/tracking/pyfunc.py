"""Predict inside an MLflow model. MLflow runs this file when it loads the model; torch is not needed.

`deeplightning.tracking.flavour` copies it there with the bundle and the few files that read a bundle. An input is a
row: `image` has an encoded image, as bytes or as base64 text; `text` a text; `array` nested lists of numbers; a row of
a table has the table's columns.
"""

import base64
import binascii

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext

from deeplightning.image_spec import MAX_PIXELS
from deeplightning.kinds import KINDS
from serve.answers import answers
from serve.bundle import Bundle
from serve.outputs import OUTPUTS


class Answers(PythonModel):
    """Returns a row per input row, with the columns of `serve.outputs`."""

    def load_context(self, context: PythonModelContext) -> None:
        self.bundle = Bundle.open(context.artifacts["bundle"])

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, object] | None = None
    ) -> pd.DataFrame:
        """Answer each row.

        Raises:
            ValueError: a row is invalid; the message has its number.
        """
        kind = KINDS[self.bundle.task]
        found = answers(self.bundle, self._inputs(kind.takes, model_input), MAX_PIXELS, top_k=1)
        output = OUTPUTS[kind.gives]
        return pd.DataFrame([output.record(answer) for answer in found], columns=[name for name, _ in output.columns])

    def _inputs(self, takes: str, rows: pd.DataFrame) -> list[object]:
        if takes == "table":
            return rows.astype(object).to_dict("records")
        if takes != "image":
            return list(rows[takes])
        return [self._picture(number, image) for number, image in enumerate(rows["image"])]

    def _picture(self, number: int, image: bytes | str) -> bytes:
        try:
            return base64.b64decode(image, validate=True) if isinstance(image, str) else bytes(image)
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"input {number}: {error}") from error


mlflow.models.set_model(Answers())
