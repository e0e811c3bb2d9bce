"""Losses of a discrete variational autoencoder, from its outputs and its input picture.

A network's outputs are {"reconstruction": float (B, C, H, W), "logits": float (B, K, h, w)}: the picture, and the
logits of K tokens for each cell. The truth is the input picture of the network, float (B, C, H, W).
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
    """Mean error of the reconstruction over all values of all pictures.

    It is computed in the normalised space: a network that always returns the mean picture has an `mse` of 1.

    Args:
        error: `mse`, the squared difference; `smooth_l1`, half of it below 1 and linear above.

    Raises:
        ValueError: `error` is neither.
    """

    def __init__(self, error: Literal["mse", "smooth_l1"] = "mse"):
        super().__init__()
        if error not in _ERRORS:
            raise ValueError(f"error must be one of {', '.join(_ERRORS)}, not {error!r}")
        self.error = error

    def forward(self, outputs: dict[str, Tensor], truth: Tensor) -> Tensor:
        """Map outputs and truth, as above, to the loss, float ()."""
        return _ERRORS[self.error](outputs["reconstruction"], truth)


class UniformDivergence(nn.Module):
    """Kullback-Leibler divergence of the tokens' distribution q from the uniform prior over K tokens, in nats, averaged
    over cells and pictures: sum over k of q_k ln(q_k K) = ln K - H(q). 0: all tokens are equally likely; ln K: one is
    certain.
    """

    def forward(self, outputs: dict[str, Tensor], truth: Tensor) -> Tensor:
        """Map outputs and truth, as above, to the loss, float (). The truth is not used."""
        log_q = outputs["logits"].float().log_softmax(1)  # (B, K, h, w)
        return (log_q.exp() * log_q).sum(1).mean() + math.log(log_q.shape[1])


class DiscreteVAELoss(nn.Module):
    """The reconstruction error plus `kl_weight` times the divergence from the uniform prior.

        loss = error(reconstruction, picture) + kl_weight * (ln K - H(q))

    Error and divergence are means (see `ReconstructionError`, `UniformDivergence`), so the weight does not depend on
    sizes. To log each of them, list both under `model.loss` and set the weight of the second.

    Args:
        kl_weight: at least 0; 0 does not constrain the tokens, a large weight makes them all equally likely.
        error: `mse` or `smooth_l1`.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(self, kl_weight: float = 0.0, error: Literal["mse", "smooth_l1"] = "mse"):
        super().__init__()
        if not 0 <= kl_weight < math.inf:
            raise ValueError(f"kl_weight must be a number of at least 0, not {kl_weight!r}")
        self.kl_weight = kl_weight
        self.error, self.divergence = ReconstructionError(error), UniformDivergence()

    def forward(self, outputs: dict[str, Tensor], truth: Tensor) -> Tensor:
        """Map outputs and truth, as above, to the loss, float ()."""
        loss = self.error(outputs, truth)
        return loss if self.kl_weight == 0 else loss + self.kl_weight * self.divergence(outputs, truth)
