"""VGG-16 and VGG-19 (Simonyan et al. 2014, arXiv:1409.1556), as in torchvision, with the same names of weights."""

from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512, 512)


class Vgg(nn.Module):
    """`depths` are the 3x3 convolutions before each of the five poolings.

    Pooling comes before ReLU: the two commute, and ReLU then sees a quarter of the values. It rounds up, so that 28
    pixels become 14, 7, 4, 2, 1; for multiples of 32 this changes nothing. Larger feature maps are averaged to a grid
    of 7x7, smaller ones are not changed. The last convolutions see one whole pixel of 16, the smallest image.
    """

    def __init__(self, depths: tuple[int, ...], shape: tuple[int, int, int], classes: int, dropout: float) -> None:
        super().__init__()
        inputs, height, width = shape
        layers: list[nn.Module] = []
        for depth, outputs in zip(depths, WIDTHS, strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = outputs
            layers.insert(-1, nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*layers)
        rows, columns = (min(7, -(-size // 32)) for size in (height, width))
        self.avgpool = nn.AdaptiveAvgPool2d((rows, columns))
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * rows * columns, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout)),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout)),
            nn.Linear(4096, classes),
        )
        self.apply(self.init_module)

    def init_module(self, module: nn.Module) -> None:
        """As torchvision does: convolutions by He et al., by fan-out; dense weights of N(0, 0.01); zero biases."""
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return out


def build16(shape: tuple[int, int, int], classes: int, dropout: float) -> nn.Module:
    """13 convolutions and 3 dense layers: configuration D of the paper."""
    return Vgg((2, 2, 3, 3, 3), shape, classes, dropout)


def build19(shape: tuple[int, int, int], classes: int, dropout: float) -> nn.Module:
    """16 convolutions and 3 dense layers: configuration E of the paper."""
    return Vgg((2, 2, 4, 4, 4), shape, classes, dropout)
