"""Hydra with the imports that templates for Lightning have: hydra_run.py --config-path DIR --config-name hydra"""

import hydra
import pytorch_lightning as pl
import torch  # noqa: F401
from hydra.utils import instantiate
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=None)
def main(cfg: DictConfig) -> None:
    pl.seed_everything(cfg.seed)
    data, task, trainer = instantiate(cfg.data), instantiate(cfg.model), instantiate(cfg.trainer)
    trainer.fit(task, data)


if __name__ == "__main__":
    main()
