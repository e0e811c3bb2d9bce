"""User code with one fault in each class, which appears only on a GPU or with several processes, and correct code.

A dry run must name the line that ends with `# named`. The tests copy this file to `own.py` beside a config.
"""
# ruff: noqa: B015 (an unused operator is enough to fail)

import copy
import os

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from deeplightning.data.digits import Digits
from deeplightning.task.img_classif import ImageClassification

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# ---- devices


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x.flatten(1))


class MadeInForward(Linear):
    def forward(self, x):
        return super().forward(x) + torch.zeros(len(x), 10)  # named


class TableOnTheCpu(ImageClassification):
    def test_step(self, batch, batch_idx):
        torch.eye(10)[batch["label"]]  # named
        return super().test_step(batch, batch_idx)


class SumThatIsNoState(Metric):
    def __init__(self):
        super().__init__()
        self.right = torch.zeros(10)

    def update(self, outputs, labels):
        self.right += torch.bincount(labels, minlength=10)  # named

    def compute(self):
        return self.right.mean()


class NumberOnTheCpu(pl.Callback):
    def on_fit_start(self, trainer, module):
        self.total = torch.tensor(0.0)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.total += outputs["loss"]  # named


class Lengths:
    def __init__(self, values):
        self.values = values


class WithLengths(Digits):
    def example_batch(self, size):
        return super().example_batch(size) | {"lengths": Lengths(torch.arange(size))}


class LengthsStay(ImageClassification):
    """Lightning does not move a batch's object of a custom class."""

    def training_step(self, batch, batch_idx):
        lengths = batch.pop("lengths").values
        torch.arange(8, device=self.device)[None] < lengths[:, None]  # named
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        return super().validation_step({k: v for k, v in batch.items() if k != "lengths"}, batch_idx)

    def test_step(self, batch, batch_idx):
        return super().test_step({k: v for k, v in batch.items() if k != "lengths"}, batch_idx)


class Numpy(ImageClassification):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = loss.detach().numpy()  # named
        return loss


class FirstGpu(ImageClassification):
    """Each rank has another GPU."""

    def training_step(self, batch, batch_idx):
        batch["label"] + torch.zeros(1, device="cuda:0")  # named
        return super().training_step(batch, batch_idx)


class SecondGpu(Linear):
    """The run has only one GPU."""

    def forward(self, x):
        return super().forward(x.to("cuda:1")).to("cuda:0")  # named


class Float32(Linear):
    """The network is in bf16."""

    def forward(self, x):
        return super().forward(x) @ torch.ones(10, 10, device=x.device, dtype=torch.float32)  # named


class Mask(Linear):
    """A mask on the CPU for a tensor on the GPU."""

    def forward(self, x):
        mask = torch.ones(len(x), 10).triu().bool()
        return super().forward(x).masked_fill(mask, 0.0)  # named


class GradientOnTheCpu(Linear):
    def forward(self, x):
        return Twice.apply(super().forward(x))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * torch.full(gradient.shape, 2.0)  # named


class GeneratorOfTheCpu(Linear):
    def forward(self, x):
        generator = torch.Generator()
        return super().forward(x) + torch.randn(10, device=x.device, generator=generator)  # named


class CopyInAList(ImageClassification):
    def on_fit_start(self):
        self.average = [copy.deepcopy(self.network).cpu()]

    def validation_step(self, batch, batch_idx):
        self.average[0](batch["image"] / 255)  # named
        return super().validation_step(batch, batch_idx)


class TableOfACheckpoint(ImageClassification):
    """A checkpoint is loaded to the CPU."""

    def on_fit_start(self):
        self.table = torch.ones(10, device=self.device)

    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        checkpoint["table"] = self.table

    def on_load_checkpoint(self, checkpoint):
        super().on_load_checkpoint(checkpoint)
        self.table = checkpoint["table"]

    def test_step(self, batch, batch_idx):
        self.table * batch["label"][:, None]  # named
        return super().test_step(batch, batch_idx)


class ConstantOnTheGpu(ImageClassification):
    """The export is on the CPU."""

    def inference_model(self):
        return Shifted(super().inference_model())


class Shifted(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) + torch.zeros(10, device="cuda")  # named


class SumOfTheCpu(ImageClassification):
    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        dist.all_reduce(torch.tensor(1.0))  # named


# ---- ranks


class LogsOnOneRank(ImageClassification):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            self.log("extra", loss.detach(), sync_dist=True)  # named
        return loss


class KeyOfOneRank(ImageClassification):
    def validation_step(self, batch, batch_idx):
        if self.global_rank == 1:
            self.log("val_extra", 1.0)  # named
        return super().validation_step(batch, batch_idx)


class NoStep(ImageClassification):
    def training_step(self, batch, batch_idx):  # named
        if self.global_rank == 1:
            return None
        return super().training_step(batch, batch_idx)


class BarrierOfOneRank(ImageClassification):
    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        if self.global_rank == 0:
            dist.barrier()  # named


class OtherNetwork(nn.Module):
    def __init__(self):  # named
        super().__init__()
        more = [nn.Linear(10, 10) for _ in range(int(os.environ["LOCAL_RANK"]))]
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), *more)

    def forward(self, x):
        return self.layers(x)


class OtherCollectives(ImageClassification):
    def on_train_epoch_end(self):
        x = torch.ones(1)
        if self.global_rank == 0:
            dist.all_reduce(x)  # named
        else:
            dist.broadcast(x, 0)


class FailsOnOneRank(pl.Callback):
    def on_train_start(self, trainer, module):
        if trainer.global_rank == 1:
            self.file.write("begins")  # named


# ---- correct code for machines with and without GPUs


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last.weight = self.first.weight
        self.sequence, self.classes = nn.LSTM(8, 10, batch_first=True), nn.Embedding(10, 10)
        self.register_buffer("shift", torch.zeros(64))

    def forward(self, x):
        x = self.last(self.first(x.flatten(1))) + self.shift
        lengths = torch.full((len(x),), 8)
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 8, 8), lengths, batch_first=True)
        answers, lengths = nn.utils.rnn.pad_packed_sequence(self.sequence(packed)[0], batch_first=True)
        seen = torch.arange(8)[None] < lengths[:, None]
        answers = answers * seen.to(x.device)[..., None]
        with torch.autocast(x.device.type, enabled=False):
            return answers.float().sum(1) / torch.tensor(8.0) + self.classes(torch.arange(10, device=x.device)).mean(0)


class Right(ImageClassification):
    def training_step(self, batch, batch_idx):
        torch.zeros(len(batch["label"])).to(GPU) + batch["label"]
        torch.zeros(10, device=batch["label"].device)[batch["label"]] = torch.tensor(1.0)
        batch["label"].new_zeros(3) + torch.zeros_like(batch["label"])[:3]
        torch.tensor([float(n) for n in batch["label"]]).numpy()
        if torch.cuda.is_available() and batch["image"].is_cuda:
            batch["image"].cuda().detach().cpu().numpy()
            torch.cuda.synchronize()
        loss = super().training_step(batch, batch_idx)
        if dist.is_initialized():
            dist.all_reduce(loss.detach().clone())
            dist.all_gather_object([None] * dist.get_world_size(), {"rank": self.global_rank})
        if self.global_rank == 0:
            self.log("extra", loss.detach(), rank_zero_only=True)
        return loss

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.log("own", torch.tensor(1.0, device=self.device), sync_dist=True)


class Notes(pl.Callback):
    def __init__(self):
        self.total = 0.0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.total += outputs["loss"]
        norms = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None])
        assert norms.device == module.device
        assert norms.is_cuda == (module.device.type == "cuda")

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["norms"] = [p.detach().cpu().numpy().sum() for p in module.parameters()]
