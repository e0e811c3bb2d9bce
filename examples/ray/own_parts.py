"""A custom optimizer, schedule and hook: plain functions, named in cifar10.yaml."""

import logging

import torch


def hook():
    """Start each log line with the time and the process ID; called in every worker before the rendezvous."""
    for handler in logging.getLogger("deeplightning").handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s | %(process)d | %(message)s"))


def optimizer(groups, lr, momentum, weight_decay):
    """Return SGD with Nesterov momentum; `groups` are those of `model.optimizer.groups`."""
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=True)


def schedule(optimizer, warm_up):
    """Increase the learning rate linearly over `warm_up` steps, then decrease it with the square root of the steps."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (warm_up / (step + 1)) ** 0.5)
    )
