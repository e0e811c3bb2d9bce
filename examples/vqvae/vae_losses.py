"""Losses of a discrete variational autoencoder, from what it gives and the picture it was given.

A network's outputs are {"reconstruction": float (B, C, H, W), "logits": float (B, K, h, w)}: the picture, and how
likely each of K tokens is at each place. The truth is the picture as the network was given it, float (B, C, H, W).
"""

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

_ERRORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": functional.mse_loss,
    "smooth_l1": functional.smooth_l1_loss,
}


class ReconstructionError(nn.Module):
    """How far the reconstruction is from the picture, the mean over all numbers of all pictures.

    In the normalised space: an `mse` of 1 is what a network has that answers each picture with the mean of all.

    Args:
        error: `mse`, the squared difference; `smooth_l1`, half of it below 1 and linear above.

    Raises:
        ValueError: if the error is another word.
    """

    def __init__(self, error: Literal["mse", "smooth_l1"] = "mse"):
        super().__init__()
        if error not in _ERRORS:
            raise ValueError(f"error must be one of {', '.join(_ERRORS)}, not {error!r}")
        self.error = error

    def forward(self, outputs: dict[str, Tensor], truth: Tensor) -> Tensor:
        """outputs and truth as above → float ()."""
        return _ERRORS[self.error](outputs["reconstruction"], truth)


class UniformDivergence(nn.Module):
    """The Kullback-Leibler divergence from the uniform prior over K tokens to the tokens' distribution q, in nats, the
    mean over places and pictures: sum over k of q_k ln(q_k K) = ln K - H(q). 0: all tokens are as likely; ln K: one is
    sure.
    """

    def forward(self, outputs: dict[str, Tensor], truth: Tensor) -> Tensor:
        """outputs and truth as above → float (). The truth does not matter."""
        log_q = outputs["logits"].float().log_softmax(1)  # (B, K, h, w)
        return (log_q.exp() * log_q).sum(1).mean() + math.log(log_q.shape[1])


class DiscreteVAELoss(nn.Module):
    """The reconstruction error plus `kl_weight` times the divergence from the uniform prior.

        loss = error(reconstruction, picture) + kl_weight * (ln K - H(q))

    Error and divergence are means (see `ReconstructionError`, `UniformDivergence`), so the weight does not depend on
    sizes. To have each logged, name both under `model.loss` and give the second the weight.

    Args:
        kl_weight: at least 0; 0 leaves the tokens free, much makes the network use none surely.
        error: `mse` or `smooth_l1`.

    Raises:
        ValueError: if an argument is impossible.
    """

    def __init__(self, kl_weight: float = 0.0, error: Literal["mse", "smooth_l1"] = "mse"):
        super().__init__()
        if not 0 <= kl_weight < math.inf:
            raise ValueError(f"kl_weight must be a number of at least 0, not {kl_weight!r}")
        self.kl_weight = kl_weight
        self.error, self.divergence = ReconstructionError(error), UniformDivergence()

    def forward(self, outputs: dict[str, Tensor], truth: Tensor) -> Tensor:
        """outputs and truth as above → float ()."""
        loss = self.error(outputs, truth)
        return loss if self.kl_weight == 0 else loss + self.kl_weight * self.divergence(outputs, truth)
