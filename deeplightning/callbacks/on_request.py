"""Optional outputs of a run: pictures of a validation, the worst predictions, histograms of weights and gradients, and
the floating-point operations of a training step."""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from deeplightning.batches import class_names_of
from deeplightning.callbacks.record import Record
from deeplightning.config.schema import Pictures
from deeplightning.runfolder import write_whole
from deeplightning.tracking.picture import histogram, histogram_figure, to_png
from deeplightning.words import first_line

if TYPE_CHECKING:
    from deeplightning.figures.style import Drawing

log = logging.getLogger("deeplightning")

REDRAW_SECONDS = 60.0
"""Minimum time between two drawings of the same picture during training."""

NUM_WORST = 24
"""Number of worst predictions of a set that are stored with their samples."""

THUMBNAIL_PIXELS = 96
"""Longer side of an image that is stored with a prediction."""

MAX_TEXT_CHARS = 2000
"""Maximum length of a text that is stored with a prediction."""


def store_worst(record: Record, trainer: Any, stage: str, rows: list[dict[str, Any]]) -> None:
    """Store the worst predictions for reports, with their samples if the data module has a `sample` method."""
    data: Any = getattr(trainer, "datamodule", None)
    names = class_names_of(trainer.lightning_module)
    kept = []
    try:
        for row in worst_rows(rows, names):
            part = "val" if stage == "validate" else stage
            kept.append(row | _encode_sample(data.sample(part, row["index"]) if hasattr(data, "sample") else {}))
    except Exception as error:  # raised by a user's data module
        log.warning("pictures   the mistakes cannot be shown: %s", first_line(error))
    content = {"classes": names, "mistakes": kept}
    write_whole(record.folder.mistakes(stage), json.dumps(content, indent=1))


def worst_rows(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Return the worst predictions: of classes the errors, most confident first; of numbers the largest errors; of
    masks the lowest pixel accuracies. Each has `index` and the columns that describe it."""
    columns = rows[0].keys()
    if {"label", "predicted_class", "predicted_probability"} <= columns:
        rows = [row for row in rows if row["label"] != row["predicted_class"]]
        rows.sort(key=lambda row: row["predicted_probability"], reverse=True)
        rows = [row | {"true": names[n] if (n := row["label"]) < len(names) else str(n)} for row in rows[:NUM_WORST]]
        shown = {"true": "true", "predicted": "predicted_label", "probability": "predicted_probability"}
    elif {"prediction", "target"} <= columns:
        shown = {"true": "target", "predicted": "prediction"}
        rows = sorted(rows, key=lambda r: (math.isnan(e := abs(r["prediction"] - r["target"])), e), reverse=True)
    elif {"iou", "acc"} <= columns:
        shown = {"iou": "iou", "acc": "acc"}
        rows = sorted((row for row in rows if not math.isnan(row["acc"])), key=lambda row: row["acc"])
    elif {"labels", "predicted_labels"} <= columns:
        shown = {"true": "labels", "predicted": "predicted_labels"}
        rows = [row for row in rows if row["labels"] != row["predicted_labels"]]
        rows.sort(key=lambda r: -len(({*r["labels"].split("|")} ^ {*r["predicted_labels"].split("|")}) - {""}))
    else:
        return []
    return [{"index": row["index"], **{name: row[of] for name, of in shown.items()}} for row in rows[:NUM_WORST]]


def _encode_sample(sample: dict[str, Any]) -> dict[str, str]:
    """Return the parts of a sample to store: `name`, `text`, and `image` as a PNG in base64."""
    kept: dict[str, str] = {name: str(sample[name])[:MAX_TEXT_CHARS] for name in ("name", "text") if name in sample}
    if "image" in sample:
        pixels = torch.as_tensor(sample["image"])
        image, stream = Image.open(io.BytesIO(to_png(pixels if len(pixels) in (1, 3, 4) else pixels[:1]))), io.BytesIO()
        image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
        image.save(stream, "PNG")
        kept["image"] = base64.b64encode(stream.getvalue()).decode()
    return kept


class ShowPictures(Callback):
    """Store the task's `pictures(stage)` in the run folder at the end of a validation.

    A `Drawing`, whose name does not depend on the epoch, is drawn when training ends, and at most every
    `REDRAW_SECONDS` before: matplotlib takes 0.25 s for two drawings, more than a short epoch.
    """

    def __init__(self, settings: Pictures, record: Record):
        self.settings, self.record = settings, record
        self._pending: dict[str, Drawing] = {}
        self._drawn_at = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        last = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
        due = (trainer.current_epoch + 1) % self.settings.every_n_epochs == 0
        if not hasattr(pl_module, "pictures") or not (due or last or trainer.state.fn != "fit"):
            return
        from deeplightning.figures.style import Drawing

        for name, picture in pl_module.pictures("val").items():
            if isinstance(picture, Drawing):
                self._pending[name] = picture
                continue
            try:
                write_whole(self.record.folder.path / f"{name}.png", to_png(picture))
            except ValueError as error:
                log.warning("pictures   %s is not stored: %s", name, first_line(error))
        if trainer.state.fn != "fit" or time.monotonic() - self._drawn_at > REDRAW_SECONDS:
            self._draw()

    def _draw(self, *_: object, **__: object) -> None:
        from deeplightning.figures.style import save

        waiting, self._pending = self._pending, {}
        try:
            for name, drawing in waiting.items():
                save(drawing, self.record.folder.path / name)
        except Exception as error:  # a picture must not fail the run
            log.warning("pictures   not drawn: %s", first_line(error))
        self._drawn_at = time.monotonic()

    on_fit_end = _draw


class Histograms(Callback):
    """Write `histograms/epoch_E/<tensor>.png` and `.json` (counts, edges) for each trainable tensor, and the same with
    `.grad` for its gradient at the epoch's last optimizer step; E is padded to the width of the epoch count. A task may
    add others by a method `histograms()` that returns {name: (counts, edges)}.

    Args:
        every_n_epochs: epochs between two histograms.
    """

    def __init__(self, every_n_epochs: int, record: Record):
        self.every_n_epochs, self.record = every_n_epochs, record
        self._gradients: dict[str, torch.Tensor] = {}

    def _is_due(self, trainer: Trainer) -> bool:
        return trainer.is_global_zero and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._is_due(trainer) and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            found = ((n, p.grad) for n, p in pl_module.named_parameters())
            self._gradients = {f"{n}.grad": g.detach().clone() for n, g in found if g is not None}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_due(trainer):
            return
        weights = {n: p.detach() for n, p in pl_module.named_parameters() if p.requires_grad}
        found = {name: histogram(values) for name, values in (weights | self._gradients).items()}
        found |= getattr(pl_module, "histograms", dict)()
        epoch = str(trainer.current_epoch).zfill(len(str(max(trainer.max_epochs or 1, 1))))
        folder = self.record.folder.path / "histograms" / f"epoch_{epoch}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, (counts, edges) in found.items():
            write_whole(folder / f"{name}.json", json.dumps({"counts": counts, "edges": edges}))
            histogram_figure(name, counts, edges).savefig(folder / f"{name}.png", format="png", dpi=100)
        self._gradients = {}


class Flops(Callback):
    """Write the FLOPs of the first batch to `flops.txt` in the run folder: matrix products, convolutions and attention,
    forward and backward, of each module, for rank 0's samples. Lightning's ThroughputMonitor needs this number as an
    argument."""

    def __init__(self, record: Record):
        self.record = record
        self._has_counted = False
        self._counter: FlopCounterMode | None = None  # during the first batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.is_global_zero and not self._has_counted:
            self._has_counted, self._counter = True, FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if (counter := self._stop()) is None:
            return
        total, path = counter.get_total_flops(), self.record.folder.flops
        # Names start with the class of the outermost called module: the task or its network.
        tops = {type(module).__name__: f"{name}." for name, module in pl_module.named_children()}
        tops[type(pl_module).__name__] = ""
        parts = ((name.partition("."), sum(found.values())) for name, found in counter.get_flop_counts().items())
        sums = {f"{tops.get(top, '')}{rest}".rstrip("."): count for (top, _, rest), count in parts}
        # Skip modules without parameters: torch 2.15 attributes part of the backward pass to metrics.
        learning = [n for n, m in pl_module.named_modules() if n and next(m.parameters(), None) is not None]
        rows = [f"{sums[name]:>20,}  {name}" for name in learning if name in sums]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "\n".join([*rows, f"{total:>20,}  operations in all"]) + "\n")
        log.info("%-10s %s operations in a batch, by module in %s", "FLOPs", f"{total:,}", path.name)

    def _stop(self, *_: object) -> FlopCounterMode | None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
        return counter

    on_exception = _stop  # type: ignore[assignment]
