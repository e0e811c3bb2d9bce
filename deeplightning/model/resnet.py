"""Residual networks: torchvision's nine, for pictures of any size and number of channels.

He et al. 2015 (https://arxiv.org/abs/1512.03385), ResNeXt: Xie et al. 2016 (https://arxiv.org/abs/1611.05431), Wide
ResNet: Zagoruyko and Komodakis 2016 (https://arxiv.org/abs/1605.07146). Tensors have torchvision's names, so
`model.init_from` accepts its pretrained weights.

B batch, C channels, H height, W width, K classes.
"""

from torch import nn
from torchvision.models import resnet

from deeplightning.model.sizes import check_sizes


class _Residual(resnet.ResNet):
    """torchvision's network for pictures of any size and number of channels.

    Attributes:
        kind: torchvision's class of the blocks.
        depths: number of blocks in each of the four stages.
        group_count, group_width: torchvision's `groups` and `width_per_group`.
    """

    kind: type[resnet.BasicBlock | resnet.Bottleneck] = resnet.Bottleneck
    depths: tuple[int, ...] = (3, 4, 6, 3)
    group_count, group_width = 1, 64

    def __init__(self, num_classes: int, num_channels: int = 3, small_images: bool = False):
        check_sizes(num_classes=num_classes, num_channels=num_channels)
        if not isinstance(small_images, bool):
            raise ValueError(f"small_images must be true or false, not {small_images!r}")
        super().__init__(
            self.kind, [*self.depths], num_classes, groups=self.group_count, width_per_group=self.group_width
        )
        if small_images or num_channels != 3:
            size, stride = (3, 1) if small_images else (7, 2)
            self.conv1 = nn.Conv2d(num_channels, 64, size, stride, size // 2, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")  # as in torchvision
        if small_images:
            self.maxpool = nn.Identity()


class ResNet18(_Residual):
    """ResNet-18, 11.7 million parameters for 1,000 classes: float (B, C, H, W) to logits (B, K), pictures of any size.

    Args:
        num_classes: K, at least 1.
        num_channels: C, at least 1. If it is not 3, the first convolution cannot use pretrained weights.
        small_images: for pictures below about 64 pixels a side: the first convolution is 3x3 with stride 1 instead of
            7x7 with stride 2, without pooling after it; sixteen times the work per picture.

    Raises:
        ValueError: an argument is invalid.
    """

    kind, depths = resnet.BasicBlock, (2, 2, 2, 2)


class ResNet34(_Residual):
    """ResNet-34, 21.8 million parameters for 1,000 classes; otherwise like `ResNet18`."""

    kind = resnet.BasicBlock


class ResNet50(_Residual):
    """ResNet-50, 25.6 million parameters for 1,000 classes; otherwise like `ResNet18`."""


class ResNet101(_Residual):
    """ResNet-101, 44.5 million parameters for 1,000 classes; otherwise like `ResNet18`."""

    depths = (3, 4, 23, 3)


class ResNet152(_Residual):
    """ResNet-152, 60.2 million parameters for 1,000 classes; otherwise like `ResNet18`."""

    depths = (3, 8, 36, 3)


class ResNeXt50(_Residual):
    """ResNeXt-50 32x4d, 25.0 million parameters for 1,000 classes; otherwise like `ResNet18`."""

    group_count, group_width = 32, 4


class ResNeXt101(_Residual):
    """ResNeXt-101 32x8d, 88.8 million parameters for 1,000 classes; otherwise like `ResNet18`."""

    depths = (3, 4, 23, 3)
    group_count, group_width = 32, 8


class WideResNet50(_Residual):
    """Wide ResNet-50-2, 68.9 million parameters for 1,000 classes; otherwise like `ResNet18`."""

    group_width = 128


class WideResNet101(_Residual):
    """Wide ResNet-101-2, 126.9 million parameters for 1,000 classes; otherwise like `ResNet18`."""

    depths = (3, 4, 23, 3)
    group_width = 128
