"""A network for signals: convolutions over time, then the mean over all steps.

B batch, C channels, T steps, O outputs.
"""

from torch import Tensor, nn

from deeplightning.model.sizes import check_sizes


class SignalNet(nn.Module):
    """A fully convolutional network, after Wang et al. 2017, https://arxiv.org/abs/1611.06455.

    Args:
        num_channels: C.
        num_outputs: O.
        width: channels of the first block; the second has twice as many.

    Raises:
        ValueError: a size is invalid.
    """

    def __init__(self, num_channels: int, num_outputs: int, width: int = 32):
        super().__init__()
        check_sizes(num_channels=num_channels, num_outputs=num_outputs, width=width)
        self.layers = nn.Sequential(
            _block(num_channels, width, 7), _block(width, 2 * width, 5), _block(2 * width, width, 3)
        )
        self.last = nn.Linear(width, num_outputs)

    def forward(self, signals: Tensor) -> Tensor:
        """Return outputs (B, O) for signals, float32 (B, C, T)."""
        return self.last(self.layers(signals).mean(2))


def _block(inputs: int, outputs: int, kernel: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()
    )
