"""ResNet-18, -50 and -152 (He et al. 2015, arXiv:1512.03385), as in torchvision, with the same names of weights.

The bottleneck has its stride on the 3x3 convolution ("v1.5"); the paper has it on the first 1x1.
"""

from torch import Tensor, nn

from paceline.models.initial import SMALL


class _Block(nn.Module):
    """The shortcut is a 1x1 convolution if the shape changes. In-place is safe: batch-norm keeps only its input."""

    growth: int  # outputs divided by the block's width

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.growth
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(outputs))


class BasicBlock(_Block):
    """3x3, 3x3."""

    growth = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x)).relu_()
        out = self.bn2(self.conv2(out))
        result: Tensor = out.add_(self.downsample(x)).relu_()
        return result


class Bottleneck(_Block):
    """1x1, 3x3, 1x1 to four times the width."""

    growth = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride)
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x)).relu_()
        out = self.bn2(self.conv2(out)).relu_()
        out = self.bn3(self.conv3(out))
        result: Tensor = out.add_(self.downsample(x)).relu_()
        return result


class ResNet(nn.Module):
    """A stem, four stages of `depths` blocks, the mean over all pixels, one dense layer.

    With the small stem the last stage sees four pixels of 9 by 9, the smallest image: batch-norm needs more than one
    value if a batch has one image.
    """

    def __init__(
        self, block: type[_Block], depths: tuple[int, ...], shape: tuple[int, int, int], classes: int, dropout: float
    ) -> None:
        super().__init__()
        small = min(shape[1:]) < SMALL
        size, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(shape[0], 64, size, stride=stride, padding=size // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        self.layer1 = _stage(block, depths[0], 64, 64, 1)
        self.layer2 = _stage(block, depths[1], 64 * block.growth, 128, 2)
        self.layer3 = _stage(block, depths[2], 128 * block.growth, 256, 2)
        self.layer4 = _stage(block, depths[3], 256 * block.growth, 512, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(512 * block.growth, classes)
        self.apply(self.init_module)

    def init_module(self, module: nn.Module) -> None:
        """As torchvision does: convolutions by He et al., by fan-out; batch-norm and the dense layer as PyTorch."""
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x))).relu_()  # pooling and ReLU commute
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(self.dropout(self.avgpool(x).flatten(1)))
        return out


def _stage(block: type[_Block], depth: int, inputs: int, width: int, stride: int) -> nn.Sequential:
    rest = (block(width * block.growth, width, 1) for _ in range(depth - 1))
    return nn.Sequential(block(inputs, width, stride), *rest)


def build18(shape: tuple[int, int, int], classes: int, dropout: float) -> nn.Module:
    return ResNet(BasicBlock, (2, 2, 2, 2), shape, classes, dropout)


def build50(shape: tuple[int, int, int], classes: int, dropout: float) -> nn.Module:
    return ResNet(Bottleneck, (3, 4, 6, 3), shape, classes, dropout)


def build152(shape: tuple[int, int, int], classes: int, dropout: float) -> nn.Module:
    return ResNet(Bottleneck, (3, 8, 36, 3), shape, classes, dropout)
