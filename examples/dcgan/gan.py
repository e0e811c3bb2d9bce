"""Train two networks against each other, with a custom loop.

Goodfellow et al., "Generative Adversarial Nets", 2014, https://arxiv.org/abs/1406.2661.

Shapes: B batch, Z noise dimensions, C channels, H height, W width, K classes.
"""

import contextlib

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ParallelStrategy
from torch import nn
from torch.nn import functional
from torchmetrics import MeanMetric, Metric
from torchvision.utils import make_grid

from deeplightning.config.target import build
from deeplightning.task.optimize import optimizers_by_name

SHOWN = 8
"""Rows and columns of generated pictures on a sheet."""


class InceptionScore(Metric):
    """Measure how confident a classifier is about single pictures, and how evenly it predicts its classes.

    exp of the mean divergence of the prediction for a picture from the mean prediction, in [1, K]; K if every
    prediction is certain and all classes are equally frequent. Salimans et al., "Improved Techniques for Training
    GANs", 2016, https://arxiv.org/abs/1606.03498. It is computed over all pictures and processes at once.
    """

    full_state_update = False

    def __init__(self, num_classes):
        super().__init__()
        # 64 bits, because differences of sums over many pictures are taken.
        self.add_state("answers", torch.zeros(num_classes, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("certainty", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("pictures", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits):
        """Add the predictions for a batch, logits (B, K)."""
        log_p = logits.double().log_softmax(1)
        self.answers += log_p.exp().sum(0)
        self.certainty += (log_p.exp() * log_p).sum()
        self.pictures += len(logits)

    def compute(self):
        mean = self.answers / self.pictures
        return (self.certainty / self.pictures + torch.special.entr(mean).sum()).exp().float()


class Gan(pl.LightningModule):
    """Train `model.network.generator` and `model.network.discriminator` against each other.

    A batch is {"image": uint8 (B, C, H, W), "label": int64 (B,), "index": int64 (B,)}; rows with index -1 pad a batch
    and do not count. The generator maps noise (B, Z) to pictures from -1 to 1, where Z is its attribute
    `latent_size`; the discriminator maps pictures to logits (B,). For each batch the discriminator takes a step, then
    the generator.

    With `model.network.scorer`, a classifier of pictures from -1 to 1, the inception score of generated pictures is
    `val_score`, that of real ones `val_score_real`. The scorer is trained on the labels before the first step and
    then frozen; its weights are in the checkpoints.

    Args:
        cfg: the whole config.
        num_classes: K, of the scorer.
        scorer_epochs: number of epochs for which the scorer is trained.
    """

    network_names = ("generator", "discriminator")  # read by `deeplightning check`
    logged_metrics = (
        *("loss_d", "loss_g", "{stage}_loss_d", "{stage}_loss_g"),
        *("{stage}_score", "{stage}_score_real", "{stage}_scorer_acc"),
    )

    def __init__(self, cfg, num_classes: int = 10, scorer_epochs: int = 3):
        super().__init__()
        self.automatic_optimization = False
        self.cfg, self.scorer_epochs = cfg, scorer_epochs
        self.networks = nn.ModuleDict({name: build(target) for name, target in cfg.model.network.items()})
        self.loss = build(cfg.model.loss)
        metrics = {}
        for stage in ("train", "val", "test"):
            metrics |= {f"{stage}_loss_d": MeanMetric(), f"{stage}_loss_g": MeanMetric()}
            if "scorer" in self.networks and stage != "train":
                score, real = InceptionScore(num_classes), InceptionScore(num_classes)
                metrics |= {f"{stage}_score": score, f"{stage}_score_real": real, f"{stage}_scorer_acc": MeanMetric()}
        self.metrics = nn.ModuleDict(metrics)
        self.register_buffer("scorer_trained", torch.tensor(False))

    def configure_optimizers(self):
        found, schedules = optimizers_by_name(self.networks, self.cfg.model, self.trainer, self.cfg.engine.fused)
        self.scorer_optimizer = found.pop("scorer", None)
        return list(found.values()), list(schedules.values())

    # ---- training

    def on_train_start(self):
        """Train the scorer, unless it was loaded from a checkpoint."""
        if self.scorer_optimizer is None or self.scorer_trained:
            return
        loader = self.trainer.datamodule.train_dataloader()
        for epoch in range(self.scorer_epochs):
            if hasattr(getattr(loader, "sampler", None), "set_epoch"):
                loader.sampler.set_epoch(epoch)
            for batch in loader:
                batch = {name: value.to(self.device) for name, value in batch.items()}
                images, samples = self.real(batch)
                labels = batch["label"][batch["index"] >= 0] if samples else batch["label"][:1]
                loss = functional.cross_entropy(self.networks["scorer"](images), labels)
                self.take_step(self.scorer_optimizer, loss, samples)
        self.scorer_trained.fill_(True)
        self.print(f"scorer     trained for {self.scorer_epochs} epochs: loss {loss.item():.4f}")

    def training_step(self, batch, batch_idx):
        optimizer_g, optimizer_d = self.optimizers()
        real, samples = self.real(batch)
        fake = self.networks["generator"](torch.randn(len(real), self.latent_size).to(real))
        loss_d = self.loss_d(real, fake.detach())
        self.take_step(optimizer_d, loss_d, samples)
        self.toggle_optimizer(optimizer_g)  # the discriminator needs no gradients of this loss
        loss_g = self.loss_g(fake)
        self.take_step(optimizer_g, loss_g, samples)
        self.untoggle_optimizer(optimizer_g)
        self.log_dict({"loss_d": loss_d, "loss_g": loss_g})
        self.count("train", loss_d, loss_g, samples)
        return {"loss": (loss_d + loss_g).detach()}

    def loss_d(self, real, fake):
        on_real, on_fake = self.networks["discriminator"](real), self.networks["discriminator"](fake)
        return self.loss(on_real, torch.ones_like(on_real)) + self.loss(on_fake, torch.zeros_like(on_fake))

    def loss_g(self, fake):
        on_fake = self.networks["discriminator"](fake)
        return self.loss(on_fake, torch.ones_like(on_fake))

    def take_step(self, optimizer, loss, samples):
        """Take a step with the mean gradient over the samples of all processes; this one has `samples` of them."""
        optimizer.zero_grad()
        strategy = self.trainer.strategy
        # otherwise ddp waits for the gradients of the other network, too
        with strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else contextlib.nullcontext():
            self.manual_backward(loss)
        if self.trainer.world_size > 1:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            local = torch.cat([*(each.flatten() * samples for each in gradients), gradients[0].new_tensor([samples])])
            *sums, total = strategy.reduce(local, reduce_op="sum").split([*(each.numel() for each in gradients), 1])
            for gradient, total_gradient in zip(gradients, sums, strict=True):
                gradient.copy_((total_gradient / total).view_as(gradient))
        optimizer.step()

    def on_train_epoch_end(self):
        self.log_epoch("train")
        for schedule in self.trainer.lr_scheduler_configs:
            schedule.scheduler.step()

    # ---- validation and test

    def validation_step(self, batch, batch_idx):
        self.evaluate("val", batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.evaluate("test", batch, batch_idx)

    def evaluate(self, stage, batch, batch_idx):
        real, samples = self.real(batch)
        fake = self.networks["generator"](self.noise(len(real), 1 + batch_idx + (1 << 20) * (stage == "test")).to(real))
        self.count(stage, self.loss_d(real, fake), self.loss_g(fake), samples)
        if samples and "scorer" in self.networks:
            answers = self.networks["scorer"](real)
            self.metrics[f"{stage}_score"].update(self.networks["scorer"](fake))
            self.metrics[f"{stage}_score_real"].update(answers)
            labels = batch["label"][batch["index"] >= 0]
            self.metrics[f"{stage}_scorer_acc"].update((answers.argmax(1) == labels).float())

    def on_validation_epoch_end(self):
        self.log_epoch("val")

    def on_test_epoch_end(self):
        self.log_epoch("test")

    def count(self, stage, loss_d, loss_g, samples):
        self.metrics[f"{stage}_loss_d"].update(loss_d.detach(), samples)
        self.metrics[f"{stage}_loss_g"].update(loss_g.detach(), samples)

    def log_epoch(self, stage):
        for name, metric in self.metrics.items():
            if name.startswith(stage):
                self.log(name, metric)

    # ---- pictures

    @property
    def latent_size(self):
        return self.networks["generator"].latent_size

    def real(self, batch):
        """Return the pictures that count, from -1 to 1, and their number; if none counts, the first one and 0, because
        the other processes wait for this one."""
        keep = batch["index"] >= 0
        samples = int(keep.sum())
        return (batch["image"][keep] if samples else batch["image"][:1]) / 127.5 - 1, samples

    def noise(self, count, number):
        """Return noise (count, Z) that depends only on the seed, `number` and the process, so that epochs are
        comparable."""
        number = number * self.trainer.world_size + self.global_rank
        return torch.randn(count, self.latent_size, generator=torch.Generator().manual_seed(self.cfg.seed + number))

    def pictures(self, stage):
        """Return `samples_<epoch>`: 64 pictures generated from the same noise in each epoch, uint8 (3, 8 H, 8 W)."""
        if stage != "val" or self.trainer.sanity_checking or not self.trainer.is_global_zero:
            return {}
        generator = self.networks["generator"].eval()
        with torch.no_grad():
            fake = generator(self.noise(SHOWN**2, 0).to(self.device)).add(1).mul(127.5).round().byte()
        generator.train()
        width = len(str(self.trainer.max_epochs))  # so that names sort by epoch
        return {f"samples_{self.current_epoch:0{width}}": make_grid(fake.cpu(), SHOWN, padding=0)}
