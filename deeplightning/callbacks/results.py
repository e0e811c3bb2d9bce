"""Write what the stages leave: metrics as JSON, a row per sample as CSV."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer

from deeplightning.callbacks.record import Record
from deeplightning.runfolder import whole, write_whole


class Results(Callback):
    """Write `<stage>_results.json` and the predictions of validate, test and predict.

    A step that returns a mapping of columns (tensors of shape (B,) or lists of B texts), `index` among them, gives a
    row per sample; rows of all processes are put in data order.
    """

    def __init__(self, record: Record):
        self.record = record
        self._rows: list[dict[str, Any]] = []

    def _collect(self, trainer: Trainer, pl_module: object, outputs: object, *_: object) -> None:
        if trainer.state.fn == "fit" or not isinstance(outputs, dict) or "index" not in outputs:
            return
        columns = {name: v.tolist() if isinstance(v, torch.Tensor) else list(v) for name, v in outputs.items()}
        self._rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _collect  # type: ignore[assignment]

    def _write(self, trainer: Trainer, *_: object, **__: object) -> None:
        if (stage := str(trainer.state.fn and trainer.state.fn.value)) == "fit":
            return
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
            write_whole(folder.results(stage), json.dumps(metrics, indent=1))
        rows = sorted((row for row in rows if row["index"] >= 0), key=lambda row: row["index"])
        if rows:
            path = folder.predictions if stage == "predict" else folder.stage_predictions(stage)
            with whole(path) as file:
                text = io.TextIOWrapper(file, encoding="utf-8", newline="")
                writer = csv.DictWriter(text, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
                text.detach()  # or it would close the file
        if rows and stage != "predict" and self.record.cfg.logger.pictures is not None:
            from deeplightning.callbacks.on_request import keep_mistakes

            keep_mistakes(self.record, trainer, stage, rows)

    on_validation_end = on_test_end = on_predict_end = _write
