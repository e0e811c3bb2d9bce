"""Train each project with Lightning's own Trainer: `python plain.py FOLDER` writes FOLDER/NAME.pt for each."""

import functools
import importlib
import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
import yaml


def build(value):
    """Build the objects of a section; an optimizer and a schedule are callables with their params bound."""
    if isinstance(value, list):
        return [build(item) for item in value]
    if not isinstance(value, dict) or "type" not in value:
        return value
    module, _, name = value["type"].rpartition(".")
    made = getattr(importlib.import_module(module), name)
    params = {key: build(item) for key, item in value.get("params", {}).items()}
    if issubclass(made, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        return functools.partial(made, **params)
    return made(**params)


def main():
    sys.modules["lightning"] = pl
    torch.set_num_threads(1)
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        config = yaml.safe_load(path.read_text())
        pl.seed_everything(42)
        data = build(config["data"]["module"]) if "data" in config else None
        model = build(config["model"]["module"])
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            max_epochs=config["train"]["num_epochs"], accelerator="cpu", enable_checkpointing=False, **quiet
        )
        trainer.fit(model, data)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save({"state_dict": model.state_dict(), "metrics": metrics}, Path(sys.argv[1], f"{path.stem}.pt"))


if __name__ == "__main__":
    main()
