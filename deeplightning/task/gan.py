"""Adversarial training: a generator learns to make pictures of noise that a discriminator takes for real ones.

Goodfellow et al., "Generative Adversarial Nets", 2014, https://arxiv.org/abs/1406.2661.

Shapes: B batch, Z numbers of noise, C channels, H height, W width, K classes.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ParallelStrategy
from torch import Generator, Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from deeplightning.config.target import build
from deeplightning.image import ImageSpec
from deeplightning.task.columns import columns_of
from deeplightning.task.compiled import ONLY_OWN_STEPS, Compiled
from deeplightning.task.errors import MisfitError
from deeplightning.task.metrics import InOwnPrecision, SampleMean
from deeplightning.task.networks import build_loss, device_of, on_cpu, try_network
from deeplightning.task.optimize import fits, freeze, optimizers_by_name
from deeplightning.task.points import Points
from deeplightning.task.sheets import epoch_suffix, sheet
from deeplightning.transfer import to_device

if TYPE_CHECKING:
    from deeplightning.config.part_config import PartConfig, Scheduler, Target

log = logging.getLogger("deeplightning.gan")

Batch = Mapping[str, Tensor]

SHOWN = 8
"""Made pictures on a sheet, to a side."""


class InceptionScore(Metric):
    """exp of the mean divergence of a classifier's answer to one picture from its mean answer, in [1, K]: K where each
    answer is sure, and all classes come equally often (Salimans et al., "Improved Techniques for Training GANs", 2016,
    https://arxiv.org/abs/1606.03498).

    Over all pictures and processes at once, not over parts of them.
    """

    full_state_update = False
    answers: Tensor
    certainty: Tensor
    pictures: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        # In 64 bits: sums over many pictures, of which differences are taken.
        self.add_state("answers", torch.zeros(num_classes, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("certainty", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("pictures", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor) -> None:
        """Adds a batch of answers, logits (B, K)."""
        log_p = logits.double().log_softmax(1)
        self.answers += log_p.exp().sum(0)
        self.certainty += (log_p.exp() * log_p).sum()
        self.pictures += len(logits)

    def compute(self) -> Tensor:
        mean = self.answers / self.pictures
        return (self.certainty / self.pictures + torch.special.entr(mean).sum()).exp().float()


class Batched(NamedTuple):
    """What the step of the generator needs of a batch of an accumulation.

    Attributes:
        noise: float (B, Z).
        samples: how many of the pictures count.
        parts: the generator and the two losses, compiled or not.
        loss_d: of the discriminator, detached.
    """

    noise: Tensor
    samples: int
    parts: list[Callable[..., Tensor]]
    loss_d: Tensor


class Gan(pl.LightningModule):
    """Trains `model.network.generator` and `model.network.discriminator` against each other, on batches of {"image":
    uint8 (B, C, H, W), "index": int64 (B,)}; `label`, int64 (B,), is needed by a scorer alone.

    The generator takes noise from N(0, 1), float (B, Z), where Z is its attribute `latent_size`, and gives pictures,
    float (B, C, H, W) from -1 to 1; the discriminator takes such, and gives logits, float (B,). At each batch the
    discriminator takes a step, then the generator, each by its own optimizer, so that a batch counts as two optimizer
    steps. `model.loss` is called with logits and what they should be, 1 or 0, both float (B,); or it is a map of
    `generator` and `discriminator`.

    Logs `loss_d` and `loss_g` at steps, their means over samples as `train_…`, `val_…` and `test_…`, and, where there
    is a `model.network.scorer`, the inception score of made pictures: `val_score`, beside `val_score_real`, that of the
    real ones, and `val_scorer_acc`. The scorer is a classifier of pictures from -1 to 1, logits (B, K). It learns from
    the training set's labels before the first step, by `model.optimizer.scorer`, and then stays as it is; its weights
    travel in the checkpoints. Scores of different scorers cannot be compared.

    With `train.accumulator_factor=N` the discriminator accumulates the gradients of N batches and takes its step; then
    the generator does, by the same N batches, whose pictures it makes once more from the same noise. So each network
    learns what it would from one batch of N times the size. Batch norm and dropout still see single batches, and those
    of the generator see N - 1 of them twice.

    Under ddp gradients are means over the samples of all processes, added up before a step only. Other engines cannot
    train two networks in turn.

    Args:
        cfg: the whole config.
        scorer_epochs: passes over the training set from which the scorer learns, at least 1.

    Raises:
        MisfitError: a network, an optimizer or the loss is missing, or one too many. It is a ValueError.
    """

    kind = "image_generation"

    network_names = ("generator", "discriminator")
    """The networks without which there is nothing to train; read from the source by `deeplightning check`."""

    batch_names = ("image", "label")

    loss_arguments = ("logits", "truth")
    """What each loss is called with; read from the source by `deeplightning check`."""

    accumulates = True
    """Its `training_step` heeds `trainer.accumulate_grad_batches`; read from the source by `deeplightning check`."""

    # Also "lr" and "lr-NAME" of each optimizer, which are logged beside each task.
    logged_metrics = (
        *("loss_d", "loss_g", "{stage}_loss_d", "{stage}_loss_g"),
        *("val_score", "val_score_real", "val_scorer_acc"),
    )

    scorer_trained: Tensor

    def __init__(self, cfg: "PartConfig", scorer_epochs: int = 3):
        super().__init__()
        self.automatic_optimization = False
        self.cfg, self.scorer_epochs = cfg, scorer_epochs
        self._targets = self._checked_networks(cfg)
        loss = cfg.model.loss
        of = loss if isinstance(loss, dict) else dict.fromkeys(self.network_names, loss)
        self.losses = nn.ModuleDict({name: build_loss(of[name], self.loss_arguments) for name in self.network_names})
        self.networks = nn.ModuleDict()
        stages = {f"{stage}_stage": _means() for stage in ("train", "val", "test")}
        self.means, self.scores = InOwnPrecision(stages), InOwnPrecision()
        self.register_buffer("scorer_trained", torch.tensor(0))  # 1: it has learned
        self.image_spec: ImageSpec | None = None
        self.class_names: list[str] = []
        self._logged_step, self._points = -1, Points()
        self._waiting: list[Batched] = []  # batches of this accumulation
        self._counted: dict[str, list[float]] = {}
        self._compiled: Compiled | None = None
        self._compiled_parts: list[Callable[..., Tensor]] = []
        self._schedules: dict[str, Any] = {}
        self._scorer_optimizer: torch.optim.Optimizer | None = None

    def _checked_networks(self, cfg: "PartConfig") -> "dict[str, Target]":
        """The networks by name.

        Raises:
            MisfitError: one is missing or unknown, or another key does not suit several networks.
        """
        model, names = cfg.model, cast("Target | dict[str, Target] | None", cfg.model.network)
        if not isinstance(names, dict) or not set(self.network_names) <= set(names):
            found = ", ".join(names) if isinstance(names, dict) else "one network" if names else "none"
            words = " and ".join(self.network_names)
            raise MisfitError(f"model.network: this task needs a map of {words}; there is {found}")
        if unknown := sorted(set(names) - {*self.network_names, "scorer"}):
            known = ", ".join((*self.network_names, "scorer"))
            raise MisfitError(f"model.network.{unknown[0]}: this task has no use for it; it takes {known}")
        fits([*self.network_names, *(["scorer"] if "scorer" in names else [])], model)
        if isinstance(model.scheduler, dict) and "scorer" in model.scheduler:
            raise MisfitError("model.scheduler.scorer: the scorer learns at one rate; remove it")
        if model.loss is None or (isinstance(model.loss, dict) and set(model.loss) != set(self.network_names)):
            example = "for example {type: torch.nn.BCEWithLogitsLoss}, or a map of generator and discriminator"
            raise MisfitError(f"model.loss: this task needs one, {example}")
        if model.output is not None:
            raise MisfitError("model.output: with several networks it is not clear whose; have each give a tensor")
        if model.trainable == "head":
            raise MisfitError("model.trainable: with several networks `head` is not clear; give patterns, or all")
        if cfg.engine.backend not in (None, "ddp"):
            why = "two networks are trained in turn, which one process can, and ddp"
            raise MisfitError(f"engine.backend: {why}, not {cfg.engine.backend}")
        if not isinstance(self.scorer_epochs, int) or self.scorer_epochs < 1:
            raise MisfitError(f"model.module.params.scorer_epochs: must be at least 1, not {self.scorer_epochs!r}")
        return names

    def _learning(self) -> list[str]:
        return [*self.network_names, *(["scorer"] if "scorer" in self._targets else [])]

    # ---- assembling

    def setup(self, stage: str) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        if getattr(data, "image_spec", None) is not None:
            self.image_spec, self.class_names = data.image_spec, list(getattr(data, "class_names", []))

    @on_cpu
    def configure_model(self) -> None:
        """Builds the networks, and passes noise and a black picture through them.

        Raises:
            MisfitError: they do not fit each other, or the data.
        """
        if self.networks:
            return
        for name in self._learning():
            self.networks[name] = build(self._targets[name])
        freeze(self.networks, self.cfg.model.trainable)
        if not isinstance(getattr(self.networks["generator"], "latent_size", None), int):
            raise MisfitError("model.network.generator: it has no attribute `latent_size`, how many numbers it takes")
        spec = self.image_spec
        if spec is None:
            raise MisfitError("data.module: it has no `image_spec`, so the size of its pictures is not known")
        shape, noise = (1, spec.channels, spec.height, spec.width), torch.zeros(1, self._latent_size)
        self._try_out("generator", noise, shape)
        self._try_out("discriminator", torch.zeros(shape), (1,))
        if "scorer" in self.networks:
            self._try_out("scorer", torch.zeros(shape), (1, len(self.class_names)))
            for stage in ("val", "test"):
                made, real = InceptionScore(len(self.class_names)), InceptionScore(len(self.class_names))
                metrics = {"score": made, "score_real": real, "scorer_acc": SampleMean()}
                self.scores[f"{stage}_stage"] = nn.ModuleDict(metrics)
        mode = self.cfg.engine.compile
        if mode and type(self).training_step is not Gan.training_step:  # nobody knows what such a step calls
            if mode == "graphs":
                raise MisfitError(ONLY_OWN_STEPS.format(type(self).__name__))
            for network in self.networks.values():
                network.compile(mode="default" if mode is True else mode)
        elif mode:
            self._compiled = Compiled(mode)
            self._compiled_parts = [self._compiled.compile(part, self.networks) for part in self._eager_parts]

    def _try_out(self, name: str, inputs: Tensor, expected: tuple[int, ...]) -> None:
        kind = self._targets[name].type
        outputs = try_network(self.networks[name], inputs, f"{kind} does not take {tuple(inputs.shape)}", name)
        if (found := tuple(outputs.shape)) != expected:
            message = f"model.network.{name}: {kind} gives {found} for {tuple(inputs.shape)}, and {expected} is needed"
            raise MisfitError(message)

    @property
    def _latent_size(self) -> int:
        return cast(int, self.networks["generator"].latent_size)

    def configure_optimizers(self) -> Any:
        networks = {name: self.networks[name] for name in self._learning()}
        found, self._schedules = optimizers_by_name(networks, self.cfg.model, self.trainer, self.cfg.engine.fused)
        self._scorer_optimizer = found.pop("scorer", None)
        return list(found.values()), list(self._schedules.values())

    # ---- the scorer

    def on_train_start(self) -> None:
        """Lets the scorer learn, once, and continues to count where a resumed run was inside an epoch."""
        counted, self._counted = self._counted, {}
        for name, (total, samples) in counted.items() if self.trainer.is_global_zero else ():
            mean = self._of("train")[name]
            mean.total.fill_(total)
            mean.samples.fill_(int(samples))
        if self._scorer_optimizer is not None and not self.scorer_trained:
            self._train_scorer(self._scorer_optimizer)
            self.scorer_trained.fill_(1)

    def _train_scorer(self, optimizer: torch.optim.Optimizer) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        loader: Any = data.train_dataloader() if data is not None else self.trainer.train_dataloader
        batches, loss = int(min(len(loader), self.trainer.num_training_batches)), torch.tensor(0.0)
        device = device_of(self.networks["scorer"])
        for epoch in range(self.scorer_epochs):
            if hasattr(getattr(loader, "sampler", None), "set_epoch"):
                loader.sampler.set_epoch(epoch)
            for _, batch in zip(range(batches), loader, strict=False):
                batch = columns_of(self, batch, "image")
                if "label" not in batch:
                    found = ", ".join(batch)
                    raise MisfitError(f"model.network.scorer: it learns from labels, and a batch has {found} only")
                batch = {name: value.to(device) for name, value in batch.items()}
                images, samples = self._real(batch)
                labels = batch["label"]
                labels = labels[batch["index"] >= 0] if "index" in batch and samples else labels[:1]
                loss = functional.cross_entropy(self.networks["scorer"](images).float(), labels)
                optimizer.zero_grad()
                with self._alone():
                    loss.backward()
                self._average(optimizer, samples)
                optimizer.step()
        log.info("scorer     has learned for %d epochs: loss %.4f", self.scorer_epochs, float(loss.detach()))

    # ---- learning

    def forward(self, noise: Tensor) -> Tensor:
        """Noise, float (B, Z), to pictures, float (B, C, H, W) from 0 to 1."""
        return self.networks["generator"](noise).float().add(1).div(2).clamp(0, 1)

    def _real(self, batch: Batch, look: bool = True) -> tuple[Tensor, int]:
        """Pictures from -1 to 1 of the rows that count, and how many these are; of none, the first all the same, since
        the other processes wait for this one.

        Args:
            look: whether there may be rows that do not count; to look for them would stall a GPU.
        """
        batch = columns_of(self, batch, "image")
        images = batch["image"]
        samples = len(images)
        if look and "index" in batch:
            keep = batch["index"] >= 0
            samples = int(keep.sum())
            images = images[keep] if samples else images[:1]
        dtype = next(self.networks["discriminator"].parameters()).dtype
        return images.to(dtype).div(127.5).sub(1), samples

    def on_train_epoch_start(self) -> None:
        self._waiting = []

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor] | None:
        real, samples = self._real(batch, look=self.trainer.is_last_batch)
        optimizers = dict(zip(self.network_names, cast(list[Any], self.optimizers()), strict=True))
        step = self.global_step // len(self.network_names)  # before: each network takes one
        if self._waiting and self._compiled is not None:
            self._compiled.own_gradients(self.networks)
        generate, compute_d, compute_g = parts = self._parts(real, batch_idx)
        noise = self._like(real, torch.randn(len(real), self._latent_size))
        made = generate(noise)
        loss_d = compute_d(real, made.detach())
        self._learn(optimizers["discriminator"], loss_d, samples, [of.samples for of in self._waiting])
        self._waiting.append(Batched(noise, samples, parts, self._own(loss_d)))
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches and not self._is_last(batch_idx):
            return None
        *others, last = self._waiting
        self._waiting = []
        total = last.samples + sum(of.samples for of in others)
        self._step(optimizers["discriminator"], total)
        self.toggle_optimizer(optimizers["generator"])  # the discriminator's gradients of this are not wanted
        loss_g = compute_g(made)
        self._learn(optimizers["generator"], loss_g, samples, [])
        done, losses_g = [last], [self._own(loss_g)]
        for of in others:
            loss_g = self._learn_again(optimizers["generator"], of, [before.samples for before in done])
            done, losses_g = [*done, of], [*losses_g, loss_g]
        self._step(optimizers["generator"], total)
        self.untoggle_optimizer(optimizers["generator"])
        self._move_rates("step", self.global_step // len(self.network_names))
        for of, loss in zip(done, losses_g, strict=True):
            self._count("train", {"loss_d": of.loss_d, "loss_g": loss}, of.samples)
        counts = [of.samples for of in done]
        losses = {"loss_d": _mean([of.loss_d for of in done], counts), "loss_g": _mean(losses_g, counts)}
        self._log_step(step, losses, total)
        return {"loss": losses["loss_d"] + losses["loss_g"]}

    def _is_last(self, batch_idx: int) -> bool:
        """Whether a batch is the last one of its epoch."""
        return bool(self.trainer.is_last_batch or batch_idx + 1 >= self.trainer.num_training_batches)

    def _own(self, loss: Tensor) -> Tensor:
        """A loss that stays what it is, detached."""
        return cast(Tensor, self._compiled.own(loss)) if self._compiled is not None else loss.detach()

    def _learn_again(self, optimizer: Any, of: Batched, before: Sequence[int]) -> Tensor:
        """Lets the generator learn from an earlier batch of the accumulation.

        Args:
            before: how many samples each batch has whose gradients are there already.

        Returns:
            Its loss, detached.
        """
        if self._compiled is not None:
            self._compiled.own_gradients(self.networks)
            self._compiled.begin_step(of.noise.device)
        generate, _, compute_g = of.parts
        loss = compute_g(generate(of.noise))
        self._learn(optimizer, loss, of.samples, before)
        return self._own(loss)

    def _parts(self, real: Tensor, batch_idx: int) -> list[Callable[..., Tensor]]:
        """The generator and the two losses: compiled, if this batch is."""
        last = self.trainer.is_last_batch and batch_idx > 0
        if self._compiled is None or not self._compiled.takes(real, may_be_short=last):
            return self._eager_parts
        self._compiled.begin_step(real.device)
        return self._compiled_parts

    @property
    def _eager_parts(self) -> list[Callable[..., Tensor]]:
        return [self._generate, self._loss_d, self._loss_g]

    def _generate(self, noise: Tensor) -> Tensor:
        return cast(Tensor, self.networks["generator"](noise))

    def _loss_d(self, real: Tensor, made: Tensor) -> Tensor:
        loss, discriminator = self.losses["discriminator"], self.networks["discriminator"]
        on_real, on_made = discriminator(real), discriminator(made)
        return loss(on_real, torch.ones_like(on_real)) + loss(on_made, torch.zeros_like(on_made))

    def _loss_g(self, made: Tensor) -> Tensor:
        taken_for = self.networks["discriminator"](made)
        return self.losses["generator"](taken_for, torch.ones_like(taken_for))

    def _learn(self, optimizer: torch.optim.Optimizer, loss: Tensor, samples: int, before: Sequence[int]) -> None:
        """Makes an optimizer's gradients those of the mean over the samples so far.

        Args:
            loss: mean over a batch.
            samples: how many the batch has.
            before: how many each batch of this accumulation has whose gradients are there already.
        """
        if not before:
            optimizer.zero_grad()
        elif total := samples + sum(before):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(sum(before) / total)
            loss = loss * (samples / total)
        with self._alone():
            self.manual_backward(loss)

    def _step(self, optimizer: torch.optim.Optimizer, samples: int) -> None:
        """One step by the mean over the samples of all processes, of which this one has so many."""
        self._average(optimizer, samples)
        optimizer.step()

    def _alone(self) -> Any:
        """Leaves gradients to this process: ddp, also with one process, would wait for those of the other network."""
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else contextlib.nullcontext()

    def _average(self, optimizer: torch.optim.Optimizer, samples: int) -> None:
        """Makes an optimizer's gradients the means over the samples of all processes; each has `samples` of them."""
        if self.trainer.world_size == 1:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        own = torch.cat([*(gradient.flatten() * samples for gradient in gradients), gradients[0].new_tensor([samples])])
        *sums, total = self.trainer.strategy.reduce(own, reduce_op="sum").split([*(g.numel() for g in gradients), 1])
        for gradient, mean in zip(gradients, sums, strict=True):
            gradient.copy_((mean / total).view_as(gradient))

    def _move_rates(self, interval: str, done: int) -> None:
        """Lets the schedules step that are due after so many batches (`step`) or epochs."""
        for name, schedule in self._schedules.items():
            call = cast("dict[str, Scheduler]", self.cfg.model.scheduler)[name].call
            if call.interval != interval or done % call.frequency:
                continue
            if not isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step()
            elif call.monitor in (known := self.trainer.callback_metrics):
                schedule.step(float(known[call.monitor]))
            else:
                message = f"no metric is called {call.monitor!r}; this run has {', '.join(sorted(known))}"
                raise MisfitError(f"model.scheduler.{name}.call.monitor: {message}")

    def _like(self, images: Tensor, noise: Tensor) -> Tensor:
        return to_device(noise.to(images.dtype), images.device)

    def _of(self, stage: str) -> dict[str, Any]:
        return dict(cast(nn.ModuleDict, self.means[f"{stage}_stage"]).items())

    def _count(self, stage: str, losses: dict[str, Tensor], samples: int) -> None:
        for name, loss in losses.items() if samples else ():
            self._of(stage)[name].update(loss, samples)

    def _log_step(self, step: int, losses: dict[str, Tensor], samples: int) -> None:
        """Logs the losses of a batch as means over the samples of all processes, where the step is due."""
        if getattr(self.trainer, "log_every_n_steps", 1) == 0 or step == self._logged_step:
            return
        self._logged_step = step
        values = torch.stack(list(losses.values()))
        if self.trainer.world_size > 1:
            own = torch.cat([values * samples, values.new_tensor([samples])])
            *sums, total = self.trainer.strategy.reduce(own, reduce_op="sum")
            values = torch.stack(sums) / total
        named = dict(zip(losses, values, strict=True))
        self.trainer.callback_metrics.update(named)
        self._points.log(self.loggers, named, step)

    def log_pending(self) -> None:
        """Logs the points of the last logged step, which on a GPU wait for the next; asked for before a checkpoint."""
        self._points.log_pending()

    def on_train_epoch_end(self) -> None:
        self.log_pending()
        self._log_epoch("train")
        self._move_rates("epoch", self.current_epoch + 1)

    def _log_epoch(self, stage: str) -> None:
        scores: Any = self.scores[f"{stage}_stage"] if self.scorer_trained and stage != "train" else {}
        for name, metric in {**self._of(stage), **dict(scores.items())}.items():
            self.log(f"{stage}_{name}", metric)  # computed over all processes and reset by Lightning

    # ---- judging

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._judge("val", batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self._log_epoch("val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._judge("test", batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_epoch("test")

    def _judge(self, stage: str, batch: Batch, batch_idx: int) -> None:
        real, samples = self._real(batch)
        if samples == 0:
            return
        number = 1 + batch_idx + (1 << 20) * (stage == "test")  # a test is not to see the noise that chose the best
        made = self.networks["generator"](self._like(real, self.noise(samples, number)))
        self._count(stage, {"loss_d": self._loss_d(real, made), "loss_g": self._loss_g(made)}, samples)
        if self.scorer_trained:
            metrics: Any = self.scores[f"{stage}_stage"]
            answers, batch = self.networks["scorer"](real), columns_of(self, batch, "image")
            metrics["score"].update(self.networks["scorer"](made))
            metrics["score_real"].update(answers)
            if "label" in batch:
                labels = batch["label"][batch["index"] >= 0] if "index" in batch else batch["label"]
                metrics["scorer_acc"].update((answers.argmax(1) == labels).float().mean(), samples)

    def predict_step(self, batch: Batch, batch_idx: int) -> None:
        raise MisfitError("stages: a generator has nothing to say to pictures; leave `predict` out")

    def noise(self, count: int, number: int) -> Tensor:
        """float (count, Z), the same for a number in each epoch and run of a seed, so that epochs can be compared; each
        process has its own."""
        number = number * self.trainer.world_size + self.trainer.global_rank
        drawn = Generator().manual_seed((self.cfg.seed << 31) + number)
        return torch.randn(count, self._latent_size, generator=drawn)

    def pictures(self, stage: str) -> dict[str, object]:
        """`samples_<epoch>`: 64 made pictures, of the same noise in each epoch, uint8 (C, 8 s H, 8 s W)."""
        if stage != "val" or self.trainer.sanity_checking or not self.trainer.is_global_zero:
            return {}
        generator = self.networks["generator"]
        training = generator.training
        generator.eval()
        with torch.no_grad():
            made = self.forward(self._like(next(generator.parameters()), self.noise(SHOWN**2, 0)))
        generator.train(training)
        return {f"samples{epoch_suffix(self)}": sheet((made * 255).round().byte(), SHOWN)}

    # ---- travelling

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        if self.image_spec is not None:
            checkpoint[self.kind] = {"image_spec": self.image_spec.to_dict(), "class_names": self.class_names}
        epoch: Any = self.trainer.fit_loop.epoch_progress.current
        if epoch.processed < epoch.ready:  # inside an epoch; asked on each process
            of = {name: torch.stack([mean.total, mean.samples.double()]) for name, mean in self._of("train").items()}
            reduced = {name: self.trainer.strategy.reduce(sums, reduce_op="sum") for name, sums in of.items()}
            checkpoint["train_metrics"] = {name: sums.tolist() for name, sums in reduced.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._counted = checkpoint.get("train_metrics", {})
        if self.image_spec is None and self.kind in checkpoint:
            saved = checkpoint[self.kind]
            self.image_spec, self.class_names = ImageSpec.from_dict(saved["image_spec"]), saved["class_names"]


def _mean(losses: list[Tensor], samples: Sequence[int]) -> Tensor:
    """The mean over the samples of batches: of each batch its mean loss, and how many samples it has."""
    if len(losses) == 1:
        return losses[0]
    weights = losses[0].new_tensor(samples if sum(samples) else [1] * len(samples))
    return torch.stack(losses) @ weights / weights.sum()


def _means() -> nn.ModuleDict:
    return nn.ModuleDict({"loss_d": SampleMean(), "loss_g": SampleMean()})
