"""Write histograms of weights and gradients as pictures and numbers: Lightning has no callback for them."""

import json

import pytorch_lightning as pl
import torch

from deeplightning.callbacks.record import Record
from deeplightning.runfolder import write_whole
from deeplightning.tracking.picture import histogram, histogram_figure


class Histograms(pl.Callback):
    """Write `histograms/epoch_E/<tensor>.png` and `.json` (counts, edges) for each trainable tensor, and the same with
    `.grad` for its gradient at the epoch's last optimizer step; E is padded to the width of the epoch count. A task may
    add its own: `histograms()` gives {name: (counts, edges)}.

    Args:
        every_n_epochs: at the end of every so many epochs.
    """

    def __init__(self, every_n_epochs: int, record: Record):
        self.every_n_epochs, self.record = every_n_epochs, record
        self._gradients: dict[str, torch.Tensor] = {}

    def _due(self, trainer: pl.Trainer) -> bool:
        return trainer.is_global_zero and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._due(trainer) and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            found = ((n, p.grad) for n, p in pl_module.named_parameters())
            self._gradients = {f"{n}.grad": g.detach().clone() for n, g in found if g is not None}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._due(trainer):
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
