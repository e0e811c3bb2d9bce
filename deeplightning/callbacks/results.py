"""What validate, test and predict leave: metrics as JSON, a row per sample as CSV, and the pictures of a validation."""

import csv
import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch

from deeplightning.callbacks.record import Record
from deeplightning.config.schema import Pictures

if TYPE_CHECKING:
    from typing import BinaryIO

log = logging.getLogger("deeplightning")


class Results(pl.Callback):
    """Writes `<stage>_results.json` and the predictions of validate, test and predict.

    A step that returns a mapping of columns (tensors of shape (B,) or lists of B texts), `index` among them, gives a
    row per sample; rows of all processes are put in data order.
    """

    def __init__(self, record: Record):
        self.record = record
        self._rows: list[dict[str, Any]] = []

    def _collect(self, trainer: pl.Trainer, outputs: object) -> None:
        if trainer.state.fn == "fit" or not isinstance(outputs, dict) or "index" not in outputs:
            return
        columns = {name: v.tolist() if isinstance(v, torch.Tensor) else list(v) for name, v in outputs.items()}
        self._rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def on_validation_batch_end(self, trainer: pl.Trainer, module: object, outputs: object, *_: object) -> None:
        self._collect(trainer, outputs)

    def on_test_batch_end(self, trainer: pl.Trainer, module: object, outputs: object, *_: object) -> None:
        self._collect(trainer, outputs)

    def on_predict_batch_end(self, trainer: pl.Trainer, module: object, outputs: object, *_: object) -> None:
        self._collect(trainer, outputs)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._write(trainer, "validate")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, "test")

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, "predict")

    def _write(self, trainer: pl.Trainer, stage: str) -> None:
        rows, self._rows = self._rows, []
        if trainer.world_size > 1:
            shares: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(shares, rows)
            rows = [row for share in shares for row in share]
        if not trainer.is_global_zero:
            return
        folder = self.record.folder
        if stage != "predict":
            metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
            folder.results(stage).write_text(json.dumps(metrics, indent=1))
        rows = sorted((row for row in rows if row["index"] >= 0), key=lambda row: row["index"])
        if rows:
            path = folder.predictions if stage == "predict" else folder.stage_predictions(stage)
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


class ShowPictures(pl.Callback):
    """Asks the task for `pictures(stage)` at the end of a validation, and stores them in run folder and tracker."""

    def __init__(self, settings: Pictures, record: Record):
        self.settings, self.record = settings, record

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        last = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
        due = (trainer.current_epoch + 1) % self.settings.every_n_epochs == 0
        if not hasattr(pl_module, "pictures") or not (due or last or trainer.state.fn != "fit"):
            return
        for name, picture in pl_module.pictures("val").items():
            with (self.record.folder.path / f"{name}.png").open("wb") as file:
                if hasattr(picture, "savefig"):
                    picture.savefig(file, format="png", dpi=100)
                else:
                    _save_image(np.asarray(picture), file)


def _save_image(pixels: np.ndarray, file: "BinaryIO") -> None:
    """(C, H, W), uint8 or floats 0 … 1, as PNG."""
    from PIL import Image

    if pixels.dtype != np.uint8:
        pixels = (pixels.clip(0, 1) * 255).round().astype(np.uint8)
    Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(file, format="PNG")
