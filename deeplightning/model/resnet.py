"""Residual networks by name: torchvision's nine, for pictures of any number of channels, large or small.

He et al. 2015 (https://arxiv.org/abs/1512.03385), ResNeXt: Xie et al. 2016 (https://arxiv.org/abs/1611.05431), Wide
ResNet: Zagoruyko and Komodakis 2016 (https://arxiv.org/abs/1605.07146). Tensors have torchvision's names, so a file of
its pretrained weights is taken by `model.init_from`. torchvision takes a second to import, and is imported when a
network is built.

B batch, C channels, H height, W width, K classes.
"""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torchvision.models import ResNet


def ResNet18(num_classes: int, num_channels: int = 3, small_images: bool = False) -> "ResNet":
    """11.7 million parameters for 1,000 classes.

    Args:
        num_classes: K, at least 1.
        num_channels: C, at least 1. Other than 3, the first convolution has random weights of that shape.
        small_images: true: the first convolution is 3x3 with stride 1 and nothing is pooled behind it, as the paper has
            it for CIFAR-10's 32x32 pixels; for pictures below some 64 pixels, at sixteen times the work per picture.
            false: 7x7 with stride 2, then a pooling with stride 2, as for ImageNet's 224x224.

    Returns:
        A network from float (B, C, H, W) to logits (B, K), for pictures of any size.

    Raises:
        ValueError: if an argument is impossible.
    """
    return _resnet("resnet18", num_classes, num_channels, small_images)


def ResNet34(num_classes: int, num_channels: int = 3, small_images: bool = False) -> "ResNet":
    """21.8 million parameters for 1,000 classes; else as `ResNet18`."""
    return _resnet("resnet34", num_classes, num_channels, small_images)


def ResNet50(num_classes: int, num_channels: int = 3, small_images: bool = False) -> "ResNet":
    """25.6 million parameters for 1,000 classes; else as `ResNet18`."""
    return _resnet("resnet50", num_classes, num_channels, small_images)


def ResNet101(num_classes: int, num_channels: int = 3, small_images: bool = False) -> "ResNet":
    """44.5 million parameters for 1,000 classes; else as `ResNet18`."""
    return _resnet("resnet101", num_classes, num_channels, small_images)


def ResNet152(num_classes: int, num_channels: int = 3, small_images: bool = False) -> "ResNet":
    """60.2 million parameters for 1,000 classes; else as `ResNet18`."""
    return _resnet("resnet152", num_classes, num_channels, small_images)


def ResNeXt50(num_classes: int, num_channels: int = 3, small_images: bool = False) -> "ResNet":
    """ResNeXt-50 32x4d, 25.0 million parameters for 1,000 classes; else as `ResNet18`."""
    return _resnet("resnext50_32x4d", num_classes, num_channels, small_images)


def ResNeXt101(num_classes: int, num_channels: int = 3, small_images: bool = False) -> "ResNet":
    """ResNeXt-101 32x8d, 88.8 million parameters for 1,000 classes; else as `ResNet18`."""
    return _resnet("resnext101_32x8d", num_classes, num_channels, small_images)


def WideResNet50(num_classes: int, num_channels: int = 3, small_images: bool = False) -> "ResNet":
    """Wide ResNet-50-2, 68.9 million parameters for 1,000 classes; else as `ResNet18`."""
    return _resnet("wide_resnet50_2", num_classes, num_channels, small_images)


def WideResNet101(num_classes: int, num_channels: int = 3, small_images: bool = False) -> "ResNet":
    """Wide ResNet-101-2, 126.9 million parameters for 1,000 classes; else as `ResNet18`."""
    return _resnet("wide_resnet101_2", num_classes, num_channels, small_images)


def _resnet(name: str, num_classes: int, num_channels: int, small_images: bool) -> "ResNet":
    for key, number in (("num_classes", num_classes), ("num_channels", num_channels)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{key} must be a whole number of at least 1, not {number!r}")
    if not isinstance(small_images, bool):
        raise ValueError(f"small_images must be true or false, not {small_images!r}")
    from torchvision.models import resnet

    network = getattr(resnet, name)(num_classes=num_classes)
    if small_images or num_channels != 3:
        usual = network.conv1
        network.conv1 = nn.Conv2d(
            num_channels,
            usual.out_channels,
            kernel_size=3 if small_images else usual.kernel_size,
            stride=1 if small_images else usual.stride,
            padding=1 if small_images else usual.padding,
            bias=False,
        )
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")  # torchvision's
    if small_images:
        network.maxpool = nn.Identity()
    return network
