"""A script in the style of RaySGD's printed example of its trainer for PyTorch; it is parsed, never run."""

import torch
from ray.util.sgd import TorchTrainer
from torch import nn


def make_model(config):
    return nn.Linear(in_features=1, out_features=config.get("hidden_size", 1))


def make_optimizer(model, config):
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.01))


def make_data(config):
    train, val = object(), object()
    return train, val


trainer = TorchTrainer(
    model_creator=make_model,
    optimizer_creator=make_optimizer,
    loss_creator=nn.MSELoss,
    data_creator=make_data,
    scheduler_step_freq="epoch",
    num_workers=2,
    use_gpu=False,
    use_fp16=False,
    add_dist_sampler=True,
    config={"lr": 0.02, "hidden_size": 3, "batch_size": 64},
)
for _ in range(5):
    trainer.train(max_retries=3, num_steps=10)
