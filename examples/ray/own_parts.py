"""An optimizer, a schedule and a hook of one's own: plain functions, named in cifar10.yaml."""

import logging

import torch


def hook():
    """Called in every worker before they meet: each line of the logs begins with the time and the process."""
    for handler in logging.getLogger("deeplightning").handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s | %(process)d | %(message)s"))


def optimizer(groups, lr, momentum, weight_decay):
    """SGD with Nesterov's momentum; `groups` are those of `model.optimizer.groups`."""
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=True)


def schedule(optimizer, warm_up):
    """The rate rises evenly over `warm_up` steps, then falls with the root of the steps."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (warm_up / (step + 1)) ** 0.5)
    )
