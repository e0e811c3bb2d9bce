"""Calls LightningCLI with classes, defaults, a link, an optimizer's class and a callback. No test runs it."""

from points import Plain, Points, Shrink
from pytorch_lightning.cli import LightningCLI
from torch.optim import Adam


class PointsCLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.batch_size", "model.hidden")
        parser.add_optimizer_args(Adam)
        parser.add_lightning_class_args(Shrink, "shrink")
        parser.set_defaults({"optimizer.lr": 0.05, "shrink.factor": 0.9, "data.batch_size": 6})


if __name__ == "__main__":
    PointsCLI(Plain, Points, trainer_defaults={"accelerator": "cpu", "max_epochs": 7}, seed_everything_default=9)
