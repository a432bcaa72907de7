"""AlexNet in one column (Krizhevsky 2014, arXiv:1404.5997), as in torchvision, with the same names of weights."""

from torch import Tensor, nn

from paceline.models.initial import SMALL


class AlexNet(nn.Module):
    """Pooling comes before ReLU: the two commute, and ReLU then sees a quarter of the values.

    Larger feature maps are averaged to a grid of 6x6, smaller ones are not changed. Three poolings of 3x3 with stride 2
    leave one pixel of 15, the smallest image.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, dropout: float) -> None:
        super().__init__()
        channels, height, width = shape
        small = min(height, width) < SMALL
        self.features = nn.Sequential(
            nn.Conv2d(channels, 64, 3, padding=1) if small else nn.Conv2d(channels, 64, 11, stride=4, padding=2),
            *(nn.MaxPool2d(3, 2), nn.ReLU(inplace=True)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.MaxPool2d(3, 2), nn.ReLU(inplace=True)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.MaxPool2d(3, 2), nn.ReLU(inplace=True)),
        )
        rows, columns = (min(6, _grid(size, small)) for size in (height, width))
        self.avgpool = nn.AdaptiveAvgPool2d((rows, columns))
        self.classifier = nn.Sequential(
            *(nn.Dropout(dropout), nn.Linear(256 * rows * columns, 4096), nn.ReLU(inplace=True)),
            *(nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(inplace=True)),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return out


def _grid(size: int, small: bool) -> int:
    """Side of the feature map for a side of the image."""
    size = size if small else (size - 7) // 4 + 1
    for _ in range(3):
        size = (size - 3) // 2 + 1
    return size


def build(shape: tuple[int, int, int], classes: int, dropout: float) -> nn.Module:
    """Initialised like PyTorch and torchvision."""
    return AlexNet(shape, classes, dropout)
