"""`denominator` returns what the mean of a loss divides by, for losses of torch.nn and for others."""

import pytest
import torch
from torch import nn

from deeplightning.task.denominators import denominator, divides_by_samples, mean

WEIGHT = torch.tensor([0.5, 3.0, 0.0, 10.0])
LABELS = torch.tensor([0, 3, 2, 1, 1, 0, 3])
PIXELS = torch.tensor([[0, -100, 1], [3, 3, -100], [2, 1, 1], [-100, -100, -100], [1, 0, 2], [2, 2, 2], [0, 1, 3]])
BITS = torch.tensor(
    [[1.0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 1]]
)


class Counted(nn.Module):
    """The mean over positive values."""

    def forward(self, outputs, truth):
        return (outputs - truth)[truth > 0].sum() / self.denominator(outputs, truth).clamp(min=1)

    def denominator(self, outputs, truth):
        return (truth > 0).sum()


class Twice(nn.CrossEntropyLoss):
    """A subclass that divides by another number than its parent."""

    def forward(self, outputs, truth):
        return 2 * nn.functional.cross_entropy(outputs, truth, reduction="sum") / len(truth)


def losses():
    yield "cross entropy", nn.CrossEntropyLoss(), LABELS
    yield "with weights", nn.CrossEntropyLoss(WEIGHT), LABELS
    yield "an ignored class", nn.CrossEntropyLoss(ignore_index=3), LABELS
    yield "smoothed", nn.CrossEntropyLoss(WEIGHT, ignore_index=1, label_smoothing=0.2), LABELS
    yield "smoothed without weights", nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.2), LABELS
    yield "pixels", nn.CrossEntropyLoss(), PIXELS
    yield "pixels with weights", nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), PIXELS
    yield "probabilities", nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), BITS
    yield "nll", nn.NLLLoss(), LABELS
    yield "nll with weights", nn.NLLLoss(WEIGHT, ignore_index=0), LABELS
    yield "nll of pixels", nn.NLLLoss(WEIGHT), PIXELS
    if hasattr(nn, "LinearCrossEntropyLoss"):
        yield "linear", nn.LinearCrossEntropyLoss(4, 4, weight=WEIGHT, ignore_index=1).requires_grad_(False), LABELS
    yield "mse", nn.MSELoss(), BITS
    yield "l1", nn.L1Loss(), BITS
    yield "smooth l1", nn.SmoothL1Loss(), BITS
    yield "huber", nn.HuberLoss(), BITS
    yield "poisson", nn.PoissonNLLLoss(), BITS
    yield "soft margin", nn.SoftMarginLoss(), BITS * 2 - 1
    yield "hinge", nn.HingeEmbeddingLoss(), BITS * 2 - 1
    yield "bce", nn.BCELoss(WEIGHT), BITS
    yield "bce with logits", nn.BCEWithLogitsLoss(WEIGHT, pos_weight=WEIGHT), BITS
    yield "divergence", nn.KLDivLoss(), BITS
    yield "divergence of a batch", nn.KLDivLoss(reduction="batchmean"), BITS
    yield "several margins", nn.MultiMarginLoss(weight=WEIGHT), LABELS
    yield "soft margins", nn.MultiLabelSoftMarginLoss(WEIGHT), BITS
    yield "own", Counted(), BITS
    yield "derived", Twice(), LABELS


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")
@pytest.mark.parametrize(("loss", "truth"), [pytest.param(*rest, id=name) for name, *rest in losses()])
def test_batches_of_any_size_make_the_loss_of_all(loss, truth):
    """The means of batches of 4, 2 and 1, weighted by their denominators, give the mean of all seven samples."""
    drawn = torch.randn(7, 4, *truth.shape[1:], generator=torch.Generator().manual_seed(1))
    outputs = (drawn if truth.dtype == torch.int64 else drawn[..., 0]).double().log_softmax(1)
    if isinstance(loss, nn.BCELoss):
        outputs = outputs.exp()
    loss, truth = loss.double(), truth.double() if truth.is_floating_point() else truth
    expected = loss(outputs, truth).item()
    batches = list(zip(outputs.split([4, 2, 1]), truth.split([4, 2, 1]), strict=True))
    counts = [denominator(loss, *batch) for batch in batches]
    values = [mean(loss, *batch, count) for batch, count in zip(batches, counts, strict=True)]
    found = sum(v * c for v, c in zip(values, counts, strict=True)) / sum(counts)
    assert found == pytest.approx(expected, abs=1e-12)
    assert all(count.dtype == torch.float64 and count.ndim == 0 for count in counts)
    if divides_by_samples(loss, uniform=True) and not (truth < 0).any():
        assert sum(v * len(t) for v, (_, t) in zip(values, batches, strict=True)) / 7 == pytest.approx(expected)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(WEIGHT, reduction="sum"), nn.NLLLoss(WEIGHT, reduction="sum")])
def test_a_sum_stays_a_sum(loss):
    """A loss with `reduction: sum` has torch's value; like any other sum it is weighted by the number of samples."""
    outputs, truth = torch.randn(7, 4, generator=torch.Generator().manual_seed(1)).log_softmax(1), torch.arange(7) % 4
    count = denominator(loss, outputs, truth)
    assert (count.item(), divides_by_samples(loss, uniform=True)) == (7, True)
    assert mean(loss, outputs, truth, count).item() == pytest.approx(loss(outputs, truth).item())


def test_usual_losses_divide_by_the_number_of_samples():
    """A loss without class weights or an ignored class divides by the number of samples if all targets have one
    shape."""
    usual = (nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss(pos_weight=WEIGHT), nn.MultiMarginLoss())
    assert all(divides_by_samples(loss, uniform=True) for loss in usual)
    others = (nn.CrossEntropyLoss(WEIGHT), nn.CrossEntropyLoss(ignore_index=2), nn.NLLLoss(WEIGHT), Counted())
    assert not any(divides_by_samples(loss, uniform=True) for loss in others)
    assert not divides_by_samples(nn.CrossEntropyLoss(), uniform=False)
    assert not divides_by_samples(nn.MSELoss(), uniform=False)
    assert divides_by_samples(Twice(), uniform=False)


def test_a_batch_of_which_nothing_counts_has_a_loss_of_nothing():
    """If all classes are ignored or weigh 0, torch gives NaN; here the loss, its gradient and the denominator are 0."""
    for loss in (nn.CrossEntropyLoss(WEIGHT), nn.CrossEntropyLoss(ignore_index=2), nn.NLLLoss(WEIGHT)):
        outputs, truth = torch.randn(3, 4, requires_grad=True), torch.tensor([2, 2, 2])
        count = denominator(loss, outputs, truth)
        value = mean(loss, outputs, truth, count)
        value.backward()
        assert (count, value) == (0, 0)
        assert torch.equal(outputs.grad, torch.zeros(3, 4))
        assert loss(outputs, truth).isnan()


def test_many_small_losses_in_half_precision_do_not_overflow():
    """The mean is right for 100,000 pixels with a loss of about 2 each, whose sum exceeds float16."""
    outputs, truth = torch.zeros(10, 8, 10_000, dtype=torch.float16), torch.zeros(10, 10_000, dtype=torch.int64)
    loss = nn.CrossEntropyLoss()
    assert mean(loss, outputs, truth, denominator(loss, outputs, truth)).item() == pytest.approx(2.0794, abs=1e-3)
