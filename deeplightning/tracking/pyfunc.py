"""Inside an MLflow model: what answers. MLflow runs this file when the model is loaded; torch is not needed.

`deeplightning.tracking.flavour` puts it there with the bundle and the few files that read one. An input is a row: of
pictures its column `image` has an encoded image, as bytes or as base64 text; of texts its column `text`; of arrays its
column `array` nested lists of numbers; of a table its columns are those of the table.
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


class Answers(PythonModel):
    """A row for each row of the input: of classes `class`, `label` and `probability`; else what the server answers, a
    column for each key."""

    def load_context(self, context: PythonModelContext) -> None:
        self.bundle = Bundle.open(context.artifacts["bundle"])

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, object] | None = None
    ) -> pd.DataFrame:
        """Answer each row.

        Raises:
            ValueError: a row cannot be used; it is named.
        """
        kind = KINDS[self.bundle.task]
        found = answers(self.bundle, self._inputs(kind.takes, model_input), MAX_PIXELS, top_k=1)
        if kind.gives != "classification":
            return pd.DataFrame(found)
        return pd.DataFrame(
            {
                "class": [int(answer["predicted_class"]) for answer in found],
                "label": [answer["label"] for answer in found],
                "probability": [float(answer["predicted_probability"]) for answer in found],
            }
        )

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
