"""The shallow network of Pani, Hand and Yalamanchili: two 5x5 convolutions of 20 and 50, 800 features, 500, classes."""

from torch import Tensor, nn


class ShallowCnn(nn.Module):
    """Pooling comes before ReLU: the two commute, and ReLU then sees a quarter of the values."""

    def __init__(self, shape: tuple[int, int, int], classes: int, dropout: float) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        for _ in range(2):
            height, width = (height - 4) // 2, (width - 4) // 2
        self.dense1 = nn.Linear(50 * height * width, 500)
        self.dense2 = nn.Linear(500, classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2):
            x = self.pool(conv(x)).relu_()
        x = self.dense1(self.dropout(x.flatten(1))).relu_()
        out: Tensor = self.dense2(x)
        return out


def build(shape: tuple[int, int, int], classes: int, dropout: float) -> nn.Module:
    """Initialised like PyTorch, which the study used."""
    return ShallowCnn(shape, classes, dropout)
