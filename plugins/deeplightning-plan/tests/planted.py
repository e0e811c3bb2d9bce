"""Modules of a user's own with one fault each, that shows on a GPU or with several processes alone.

A line that ends with `# named` is the one that a dry run names.
"""

from typing import NamedTuple

HEAD = """\
import os

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from deeplightning.data.digits import Digits
from deeplightning.task.img_classif import ImageClassification


"""


class Planted(NamedTuple):
    """A fault.

    Attributes:
        code: of the module `own`, after `HEAD`.
        part: the override that uses it.
        words: that the message has, besides the place.
        gpus: that the config asks for; 0: two processes on the CPU.
    """

    code: str
    part: str
    words: str
    gpus: int = 1


TASK, NETWORK, LOSS = "model.module.type=own.Own", "model.network={type: own.Own}", "model.loss={type: own.Own}"
METRIC, CALLBACK = "model.metrics={acc: {type: own.Own}}", "train.callbacks=[{type: own.Own}]"
DATA = "data.module.type=own.Own"
MIXED = "same device, but found at least two devices"
LINEAR = (
    "class Own(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.f = nn.Linear(64, 10)\n"
)
STEP = "        loss = super().training_step(batch, batch_idx)\n"

DEVICES = {
    "a tensor made in forward": Planted(
        LINEAR
        + """
    def forward(self, x):
        return self.f(x.flatten(1)) + torch.zeros(len(x), 10)  # named
""",
        NETWORK,
        MIXED,
    ),
    "a tensor made in training_step": Planted(
        """class Own(ImageClassification):
    def training_step(self, batch, batch_idx):
        weights = torch.ones(len(batch["label"]))
        return super().training_step(batch, batch_idx) * (weights * batch["label"]).mean()  # named
""",
        TASK,
        MIXED,
    ),
    "a tensor made in validation_step": Planted(
        """class Own(ImageClassification):
    def validation_step(self, batch, batch_idx):
        torch.arange(10)[None] == batch["label"][:, None]  # named
        return super().validation_step(batch, batch_idx)
""",
        TASK,
        MIXED,
    ),
    "a table on the CPU, indexed by labels in test_step": Planted(
        """class Own(ImageClassification):
    def test_step(self, batch, batch_idx):
        torch.eye(10)[batch["label"]]  # named
        return super().test_step(batch, batch_idx)
""",
        TASK,
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    ),
    "class weights of a loss that are no buffer": Planted(
        """class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.ones(10)

    def forward(self, outputs, labels):
        return nn.functional.cross_entropy(outputs, labels, weight=self.weight)  # named
""",
        LOSS,
        MIXED,
    ),
    "the sum of a metric that is no state": Planted(
        """class Own(Metric):
    def __init__(self):
        super().__init__()
        self.right = torch.zeros(10)

    def update(self, outputs, labels):
        self.right += torch.bincount(labels, minlength=10)  # named

    def compute(self):
        return self.right.mean()
""",
        METRIC,
        MIXED,
    ),
    "the sum of a callback, a number on the CPU": Planted(
        """class Own(pl.Callback):
    def on_fit_start(self, trainer, module):
        self.total = torch.tensor(0.0)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.total += outputs["loss"]  # named
""",
        CALLBACK,
        MIXED,
    ),
    "lengths in a batch of a class of its own": Planted(
        """class Lengths:
    def __init__(self, values):
        self.values = values


class Own(Digits):
    def example_batch(self, size):
        return super().example_batch(size) | {"lengths": Lengths(torch.arange(size))}


class Task(ImageClassification):
    def training_step(self, batch, batch_idx):
        lengths = batch.pop("lengths").values
        torch.arange(8, device=self.device)[None] < lengths[:, None]  # named
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        return super().validation_step({k: v for k, v in batch.items() if k != "lengths"}, batch_idx)

    def test_step(self, batch, batch_idx):
        return super().test_step({k: v for k, v in batch.items() if k != "lengths"}, batch_idx)
""",
        "data.module.type=own.Own model.module.type=own.Task",
        MIXED,
    ),
    "layers in a list of Python": Planted(
        """class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.others = nn.Linear(64, 10), [nn.Linear(10, 10)]

    def forward(self, x):
        x = self.first(x.flatten(1))
        for layer in self.others:
            x = layer(x)  # named
        return x
""",
        NETWORK,
        MIXED,
    ),
    "numpy of a tensor with a gradient": Planted(
        """class Own(ImageClassification):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = loss.detach().numpy()  # named
        return loss
""",
        TASK,
        "can't convert cuda:0 device type tensor to numpy",
    ),
    "np.asarray of the answers": Planted(
        """class Own(ImageClassification):
    def validation_step(self, batch, batch_idx):
        np.asarray(batch["label"]).mean()  # named
        return super().validation_step(batch, batch_idx)
""",
        TASK,
        "can't convert cuda:0 device type tensor to numpy",
    ),
    "answers that are fetched, and labels that are not": Planted(
        """class Own(nn.Module):
    def forward(self, outputs, labels):
        return nn.functional.cross_entropy(outputs.cpu(), labels)  # named
""",
        LOSS,
        MIXED,
    ),
    "a device by number, where each rank has its own": Planted(
        """class Own(ImageClassification):
    def training_step(self, batch, batch_idx):
        batch["label"] + torch.zeros(1, device="cuda:0")  # named
        return super().training_step(batch, batch_idx)
""",
        TASK,
        "rank 1 fails where rank 0 does not",
        2,
    ),
    "a device by number that the run does not have": Planted(
        LINEAR
        + """
    def forward(self, x):
        return self.f(x.flatten(1).to("cuda:1")).to("cuda:0")  # named
""",
        NETWORK,
        "invalid device ordinal",
    ),
    "float32 in a network of bf16": Planted(
        LINEAR
        + """
    def forward(self, x):
        return self.f(x.flatten(1)) @ torch.ones(10, 10, device=x.device, dtype=torch.float32)  # named
""",
        NETWORK + " engine.precision=bf16-true",
        "same dtype",
    ),
    "a mask that causes a wait at the wrong place": Planted(
        LINEAR
        + """
    def forward(self, x):
        mask = torch.ones(len(x), 10).triu().bool()
        return self.f(x.flatten(1)).masked_fill(mask, 0.0)  # named
""",
        NETWORK,
        MIXED,
    ),
    "a gradient made on the CPU": Planted(
        """class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * torch.full(gradient.shape, 2.0)  # named


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(64, 10)

    def forward(self, x):
        return Twice.apply(self.f(x.flatten(1)))
""",
        NETWORK,
        MIXED,
    ),
    "noise of a generator of the CPU": Planted(
        LINEAR
        + """        self.g = torch.Generator()

    def forward(self, x):
        return self.f(x.flatten(1)) + torch.randn(10, device=x.device, generator=self.g)  # named
""",
        NETWORK,
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "a copy of the network in a list": Planted(
        """import copy


class Own(ImageClassification):
    def on_fit_start(self):
        self.average = [copy.deepcopy(self.network).cpu()]

    def validation_step(self, batch, batch_idx):
        self.average[0](batch["image"] / 255)  # named
        return super().validation_step(batch, batch_idx)
""",
        TASK,
        MIXED,
    ),
    "a constant at import": Planted(
        """MEAN = torch.full((1, 8, 8), 0.5)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(64, 10)

    def forward(self, x):
        return self.f((x - MEAN).flatten(1))  # named
""",
        NETWORK,
        f"{MIXED}",
    ),
    "a table that a checkpoint brings to the CPU": Planted(
        """class Own(ImageClassification):
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
""",
        TASK,
        MIXED,
    ),
    "numpy while a checkpoint is saved": Planted(
        """class Own(pl.Callback):
    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["norms"] = [float(p.detach().numpy().sum()) for p in module.parameters()]  # named
""",
        CALLBACK,
        "can't convert cuda:0 device type tensor to numpy",
    ),
    "a constant on the GPU, which the export has not": Planted(
        """class Shifted(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) + torch.zeros(10, device="cuda")  # named


class Own(ImageClassification):
    def inference_model(self):
        return Shifted(super().inference_model())
""",
        TASK,
        "in the export",
    ),
    "a number of the CPU that all ranks sum": Planted(
        """class Own(ImageClassification):
    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        dist.all_reduce(torch.tensor(1.0))  # named
""",
        TASK,
        "No backend type associated with device type cpu: all_reduce",
        2,
    ),
    "a metric on the CPU that is logged with sync_dist": Planted(
        """class Own(ImageClassification):
    def validation_step(self, batch, batch_idx):
        self.log("own", torch.tensor(1.0), sync_dist=True)  # named
        return super().validation_step(batch, batch_idx)
""",
        TASK,
        "No backend type associated with device type cpu",
        2,
    ),
}

RANKS = {
    "a collective of the first rank": Planted(
        "class Own(ImageClassification):\n    def training_step(self, batch, batch_idx):\n"
        + STEP
        + """        if self.global_rank == 0:
            dist.all_reduce(loss.detach().clone())  # named
        return loss
""",
        TASK,
        "enters all_reduce",
        0,
    ),
    "sync_dist on one rank": Planted(
        "class Own(ImageClassification):\n    def training_step(self, batch, batch_idx):\n"
        + STEP
        + """        if self.global_rank == 0:
            self.log("extra", loss.detach(), sync_dist=True)  # named
        return loss
""",
        TASK,
        "rank 0 logs `extra`",
        0,
    ),
    "a key that one rank logs": Planted(
        """class Own(ImageClassification):
    def validation_step(self, batch, batch_idx):
        if self.global_rank == 1:
            self.log("val_extra", 1.0)  # named
        return super().validation_step(batch, batch_idx)
""",
        TASK,
        "rank 1 logs `val_extra`",
        0,
    ),
    "a step that one rank leaves out": Planted(
        """class Own(ImageClassification):
    def training_step(self, batch, batch_idx):  # named
        if self.global_rank == 1:
            return None
        return super().training_step(batch, batch_idx)
""",
        TASK,
        "rank 1",
        0,
    ),
    "a barrier of one rank while a checkpoint is saved": Planted(
        """class Own(ImageClassification):
    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        if self.global_rank == 0:
            dist.barrier()  # named
""",
        TASK,
        "enters barrier",
        0,
    ),
    "all_gather in the test of one rank": Planted(
        """class Own(ImageClassification):
    def on_test_epoch_end(self):
        super().on_test_epoch_end()
        if self.global_rank == 0:
            self.all_gather(torch.ones(2))  # named
""",
        TASK,
        "enters all_gather",
        0,
    ),
    "another number of layers on each rank": Planted(
        """class Own(nn.Module):
    def __init__(self):  # named
        super().__init__()
        more = [nn.Linear(10, 10) for _ in range(int(os.environ["LOCAL_RANK"]))]
        self.f = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), *more)

    def forward(self, x):
        return self.f(x)
""",
        NETWORK,
        "rank 0 has no further parameter where rank 1 has network.f.2.weight (10, 10)",
        0,
    ),
    "a width that is drawn from the process": Planted(
        """class Own(nn.Module):
    def __init__(self):  # named
        super().__init__()
        width = 8 + np.random.default_rng(int(os.environ["LOCAL_RANK"])).integers(1000)
        self.f = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))

    def forward(self, x):
        return self.f(x)
""",
        NETWORK,
        "the ranks build different networks",
        0,
    ),
    "a metric that the first rank computes": Planted(
        """class Own(pl.Callback):
    def on_validation_end(self, trainer, module):
        if trainer.is_global_zero:
            dist.broadcast(torch.ones(3), 0)  # named
""",
        CALLBACK,
        "enters broadcast",
        0,
    ),
    "different collectives on the ranks": Planted(
        """class Own(ImageClassification):
    def on_train_epoch_end(self):
        x = torch.ones(1)
        if self.global_rank == 0:
            dist.all_reduce(x)  # named
        else:
            dist.broadcast(x, 0)
""",
        TASK,
        "where rank 1 enters broadcast",
        0,
    ),
    "a fault on one rank": Planted(
        """class Own(pl.Callback):
    def on_train_start(self, trainer, module):
        if trainer.global_rank == 1:
            self.file.write("begins")  # named
""",
        CALLBACK,
        "rank 1 fails where rank 0 does not",
        0,
    ),
}

ALL = DEVICES | RANKS


def named_line(code: str) -> int:
    """The number of the line in `HEAD` + code that a dry run names."""
    return next(n for n, line in enumerate((HEAD + code).splitlines(), 1) if line.endswith("# named"))
