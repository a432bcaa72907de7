"""ResNet-50, -101 and -152 with pre-activation (He et al. 2016, arXiv:1603.05027), as in Keras applications.

Their convolutions have biases, as in Keras. A constant added to a channel before batch-norm has no effect: the true
gradient of those biases is zero, and the optimizer sees only rounding errors.
"""

from torch import Tensor, nn

from paceline.models.initial import SMALL, as_keras


def _norm(channels: int) -> nn.BatchNorm2d:
    """Keras keeps 0.99 of the old statistics; torch's momentum is the weight of the new ones."""
    return nn.BatchNorm2d(channels, eps=1.001e-5, momentum=0.01)


class Block(nn.Module):
    """Batch-norm and ReLU come before each convolution: 1x1, 3x3, 1x1 to four times the width.

    A stage's first block widens, with a convolution as its shortcut; its last one has the stride, with every second
    pixel as its shortcut (Keras: max-pooling of 1x1). `x` is never changed in place: it is the input of both.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.stride = stride
        self.bn1 = _norm(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn2 = _norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn3 = _norm(width)
        self.conv3 = nn.Conv2d(width, outputs, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        active = self.bn1(x).relu_()
        if self.shortcut is not None:
            x = self.shortcut(active)
        elif self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        out = self.bn2(self.conv1(active)).relu_()
        out = self.bn3(self.conv2(out)).relu_()
        result: Tensor = self.conv3(out).add_(x)
        return result


class ResNetV2(nn.Module):
    """A stem, four stages of `depths` blocks, batch-norm and ReLU, the mean over all pixels, one dense layer.

    The stem's max-pooling is padded with zeros, as in Keras, which matters because no ReLU comes before it. With the
    small stem the last stage sees four pixels of 9 by 9, the smallest image: batch-norm needs more than one value if a
    batch has one image.
    """

    def __init__(self, depths: tuple[int, ...], shape: tuple[int, int, int], classes: int, dropout: float) -> None:
        super().__init__()
        small = min(shape[1:]) < SMALL
        size, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(shape[0], 64, size, stride=stride, padding=size // 2)
        self.pool = nn.Identity() if small else nn.Sequential(nn.ZeroPad2d(1), nn.MaxPool2d(3, 2))
        self.stage1 = _stage(depths[0], 64, 64, 2)
        self.stage2 = _stage(depths[1], 256, 128, 2)
        self.stage3 = _stage(depths[2], 512, 256, 2)
        self.stage4 = _stage(depths[3], 1024, 512, 1)
        self.bn = _norm(2048)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(2048, classes)
        self.apply(self.init_module)

    def init_module(self, module: nn.Module) -> None:
        """As Keras does."""
        as_keras(module)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.conv1(x))
        x = self.stage4(self.stage3(self.stage2(self.stage1(x))))
        x = self.bn(x).relu_()
        out: Tensor = self.fc(self.dropout(self.avgpool(x).flatten(1)))
        return out


def _stage(depth: int, inputs: int, width: int, stride: int) -> nn.Sequential:
    middle = (Block(4 * width, width, 1) for _ in range(depth - 2))
    return nn.Sequential(Block(inputs, width, 1), *middle, Block(4 * width, width, stride))


def build50(shape: tuple[int, int, int], classes: int, dropout: float) -> nn.Module:
    return ResNetV2((3, 4, 6, 3), shape, classes, dropout)


def build101(shape: tuple[int, int, int], classes: int, dropout: float) -> nn.Module:
    return ResNetV2((3, 4, 23, 3), shape, classes, dropout)


def build152(shape: tuple[int, int, int], classes: int, dropout: float) -> nn.Module:
    return ResNetV2((3, 8, 36, 3), shape, classes, dropout)
