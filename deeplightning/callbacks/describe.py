"""The description that MLflow shows of a run: what was trained, how good it is, the commands that use it, and the
confusion matrix."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
from lightning_fabric.utilities.data import sized_len

from deeplightning.callbacks.run_labels import data_name, engine_in_words, network_name
from deeplightning.config.schema import Config
from deeplightning.faults import count
from deeplightning.runfolder import RunFolder, start_folder
from deeplightning.words import printable

if TYPE_CHECKING:
    from deeplightning.callbacks.record import Record

MAX_PICTURES = 2
"""Pictures that a description shows: the confusion matrix first, else the newest."""


class Describe(pl.Callback):
    """Keeps the description of the run up to date, on rank 0: at its start and after each stage."""

    after = ("Record", "Results")

    def __init__(self, cfg: Config, record: Record):
        self.cfg, self.record = cfg, record
        self._learned = ""  # samples and parameters

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            total = sum(getattr(p, "ds_numel", p.numel()) for p in pl_module.parameters())
            sets = {"training": trainer.train_dataloader, "validation": trainer.val_dataloaders}
            sizes = [f"{size:,} {name}" for name, loader in sets.items() if (size := samples_behind(loader))]
            self._learned = f"{count(total, 'parameter')}" + (f"; {' and '.join(sizes)} samples" if sizes else "")
            self._tell(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # The next call of Lightning ends the run in the tracker: later it would have to be opened again.
        if trainer.is_global_zero and self.record.opened and stage in ("fit", "validate", "test"):
            self._tell(trainer)

    def _tell(self, trainer: pl.Trainer) -> None:
        loggers: list[Any] = trainer.loggers
        for logger in loggers:
            if hasattr(logger, "describe"):
                logger.describe(note(self.cfg, self.record.folder, logger.run_id, self._learned))


def note(cfg: Config, folder: RunFolder, run_id: str | None, learned: str = "") -> str:
    """The description of a run, in Markdown.

    Args:
        run_id: of the tracker, which shows the pictures of the run under it.
        learned: the size of network and data; "": not known here.
    """
    is_trained = "train" in cfg.stages
    length = [count(cfg.train.num_epochs, "epoch")] if cfg.train.num_epochs and is_trained else []
    about = "; ".join([*length, _plain(engine_in_words(cfg)), *([learned] if learned else [])])
    lines = [f"**{_plain(network_name(cfg))}** on **{_plain(data_name(cfg))}**: {about}.", ""]
    if figures := list(_figures(folder)):
        lines += ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in figures), ""]
    here = start_folder()
    found = run_id if folder.path.is_relative_to(here / "mlruns") else None
    run, program = shlex.quote(found or str(folder.path)), _program(here)
    commands = [f"{program} {verb} {run}" for verb in ("test", "reproduce", "serve")]
    lines += ["Test it, train it again, or serve it over HTTP:", ""]
    lines += ["```bash", f"cd {shlex.quote(str(here))}", *commands, "```"]
    for picture in _pictures(folder) if run_id else ():
        lines += ["", f"![{picture.stem.replace('_', ' ')}](get-artifact?path={picture.name}&run_uuid={run_id})"]
    return "\n".join(lines)


def _program(here: Path) -> str:
    """The command as a shell in a folder finds it: by its name where that is on the path, else by where it lies."""
    beside = Path(sys.executable).with_name("deeplightning")
    if shutil.which("deeplightning") or not beside.exists():
        return "deeplightning"
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


def _figures(folder: RunFolder) -> Any:
    """Pairs of a name and a text."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        best = json.loads(folder.best_score.read_text())
        where = f"after epoch {best['epoch'] + 1} (step {best['step']})"
        yield "best", f"{printable(best['metric'])} **{best['value']:.4f}** {where}"
    for stage, name in (("validate", "validation"), ("test", "test")):
        with suppress(OSError, ValueError, AttributeError, TypeError):
            found = json.loads(folder.results(stage).read_text())
            yield name, ", ".join(f"{printable(key)} **{value:.4f}**" for key, value in sorted(found.items()))


def _pictures(folder: RunFolder) -> list[Path]:
    found = sorted(folder.path.glob("*confusion*.png")) or sorted(folder.path.glob("*.png"), key=os.path.getmtime)
    return found[-MAX_PICTURES:]


def _plain(text: str) -> str:
    """Text that means nothing in Markdown."""
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#" else sign for sign in printable(text))


def samples_behind(loaders: Any) -> int:
    """Samples behind a loader or several."""
    several = loaders if isinstance(loaders, list | tuple) else [loaders]
    return sum(sized_len(getattr(loader, "dataset", None)) or 0 for loader in several)
