"""Inside an MLflow model: what answers. MLflow runs this file when the model is loaded; torch is not needed.

`deeplightning.tracking.flavour` puts it there with the bundle and the few files that read one. Each row of the input
has an encoded image in its column `image`, as bytes or as base64 text.
"""

import base64
import binascii
import io
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext
from PIL import Image

from deeplightning.image import MAX_PIXELS, ImageError
from serve.bundle import Bundle

BATCH = 16


class Pictures(PythonModel):
    """Answers a table of images: a row with `class`, `label` and `probability` for each, as the server says them; or,
    of a network that answers with pictures, `image`: a PNG as base64 text."""

    def load_context(self, context: PythonModelContext) -> None:
        self.bundle = Bundle.open(context.artifacts["bundle"])

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """
        Raises:
            ValueError: a row has no image that can be read; it is named.
        """
        pixels = [self._pixels(number, image) for number, image in enumerate(model_input["image"])]
        rows: list[np.ndarray] = []
        for start in range(0, len(pixels), BATCH):
            rows += list(self.bundle.predict(np.stack(pixels[start : start + BATCH])))
        if self.bundle.task == "image_reconstruction":
            return pd.DataFrame({"image": [_png(row) for row in rows]})
        best = [int(row.argmax()) for row in rows]
        return pd.DataFrame(
            {
                "class": best,
                "label": [self.bundle.labels[number] for number in best],
                "probability": [float(row[number]) for number, row in zip(best, rows, strict=True)],
            }
        )

    def _pixels(self, number: int, image: Any) -> np.ndarray:
        try:
            data = base64.b64decode(image, validate=True) if isinstance(image, str) else bytes(image)
            return self.bundle.prepare(data, MAX_PIXELS)
        except (ImageError, binascii.Error, TypeError) as error:
            raise ValueError(f"Row {number}, column image: {error}") from error


def _png(row: np.ndarray) -> str:
    """A picture, float32 (C, H, W) from 0 to 1, as base64."""
    pixels = np.rint(row.clip(0, 1) * 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(
        file, "PNG"
    )
    return base64.b64encode(file.getvalue()).decode()


mlflow.models.set_model(Pictures())
