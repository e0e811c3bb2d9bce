"""Write the results of the stages: metrics as JSON, one row per sample as CSV."""

from __future__ import annotations

import csv
import io
import json
import logging
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer

from deeplightning.callbacks.record import Record
from deeplightning.runfolder import write_whole

log = logging.getLogger("deeplightning")


class Results(Callback):
    """Write `<stage>_results.json` and the predictions of validate, test and predict.

    A step that returns a dict of columns (tensors of shape (B,) or lists of B strings) with the tensor `index` gives a
    row per sample; the rows of all processes are sorted by `index`. Other entries are ignored. The rows of several
    loaders follow one another, with a column `dataloader_idx`.
    """

    def __init__(self, record: Record):
        self.record = record
        self._rows: list[tuple[int, dict[str, Any]]] = []  # each with the number of its loader

    def _collect(
        self, trainer: Trainer, pl_module: object, outputs: Any, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        index = outputs.get("index") if isinstance(outputs, dict) else None
        if trainer.state.fn == "fit" or not isinstance(index, torch.Tensor) or index.ndim != 1:
            return
        lists = {name: v.tolist() if isinstance(v, torch.Tensor) else v for name, v in outputs.items()}
        columns = {name: v for name, v in lists.items() if isinstance(v, list | tuple) and len(v) == len(index)}
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        self._rows += [(dataloader_idx, row) for row in rows]

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _collect  # type: ignore[assignment]

    def _write(self, trainer: Trainer, *_: object, **__: object) -> None:
        if (stage := str(trainer.state.fn and trainer.state.fn.value)) == "fit":
            return
        found, self._rows = self._rows, []
        if trainer.world_size > 1:
            shares: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
            torch.distributed.gather_object(found, shares)
            found = [row for share in shares or () for row in share]
        if not trainer.is_global_zero:
            return
        folder = self.record.folder
        if stage != "predict":
            logged = sorted(trainer.callback_metrics.items())
            metrics = {name: float(v) for name, v in logged if torch.as_tensor(v).numel() == 1}
            write_whole(folder.results(stage), json.dumps(metrics, indent=1))
        found = sorted((f for f in found if f[1]["index"] >= 0), key=lambda f: (f[0], f[1]["index"]))
        several = any(loader for loader, _ in found)
        rows = [{"dataloader_idx": loader} | row if several else row for loader, row in found]
        if rows:
            path = folder.predictions if stage == "predict" else folder.stage_predictions(stage)
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, list({name: None for row in rows for name in row}))
            writer.writeheader()
            writer.writerows(rows)
            write_whole(path, text.getvalue().encode(errors="backslashreplace"))  # names of files are bytes
        elif stage == "predict":
            log.info("%-10s no predictions.csv: `predict_step` returns no `index`, a tensor (B,) of positions", stage)
        if rows and not several and stage != "predict" and self.record.cfg.logger.pictures is not None:
            from deeplightning.callbacks.on_request import store_worst

            store_worst(self.record, trainer, stage, rows)

    on_validation_end = on_test_end = on_predict_end = _write
