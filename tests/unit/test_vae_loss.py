"""The losses of a discrete VAE, against torch's distributions."""

import math

import pytest
import torch
from example_code import module_of
from torch.distributions import Categorical, kl_divergence

losses = module_of("vqvae/vae_losses.py")
DiscreteVAELoss = losses.DiscreteVAELoss
ReconstructionError, UniformDivergence = losses.ReconstructionError, losses.UniformDivergence


@pytest.fixture
def outputs():
    torch.manual_seed(0)
    return {"reconstruction": torch.randn(3, 2, 4, 4), "logits": 3 * torch.randn(3, 7, 2, 2, requires_grad=True)}


TRUTH = torch.linspace(-2, 2, 96).view(3, 2, 4, 4)


def divergence(logits):
    """Mean over pictures and places, by torch."""
    q = Categorical(logits=logits.permute(0, 2, 3, 1))
    return kl_divergence(q, Categorical(logits=torch.zeros_like(q.logits))).mean()


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_the_loss_is_error_plus_weighted_divergence(weight, outputs):
    """error + kl_weight * KL(q || uniform), both means; for either kind of error."""
    squared = (outputs["reconstruction"] - TRUTH).square().mean()
    expected = squared + weight * divergence(outputs["logits"])
    torch.testing.assert_close(DiscreteVAELoss(weight)(outputs, TRUTH), expected)
    difference = (outputs["reconstruction"] - TRUTH).abs()
    smooth = torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean()
    expected = smooth + weight * divergence(outputs["logits"])
    torch.testing.assert_close(DiscreteVAELoss(weight, "smooth_l1")(outputs, TRUTH), expected)


def test_divergence_runs_from_0_to_the_logarithm_of_the_tokens():
    """0 where all tokens are as likely, ln K where one is sure; no number is infinite."""
    sure = torch.zeros(1, 8, 1, 1)
    sure[:, 3] = 1e4
    assert UniformDivergence()({"logits": torch.zeros(2, 8, 3, 3)}, TRUTH).item() == pytest.approx(0, abs=1e-6)
    assert UniformDivergence()({"logits": sure}, TRUTH).item() == pytest.approx(math.log(8))
