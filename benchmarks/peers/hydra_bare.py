"""Hydra at its fastest: the same with nothing imported before the config is known."""

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=None)
def main(cfg: DictConfig) -> None:
    import pytorch_lightning as pl
    from hydra.utils import instantiate

    pl.seed_everything(cfg.seed)
    data, task, trainer = instantiate(cfg.data), instantiate(cfg.model), instantiate(cfg.trainer)
    trainer.fit(task, data)


if __name__ == "__main__":
    main()
