"""The 690,590-parameter network of Wang and Yang's MPI study: 3x3 convolutions of 32, 128 and 256, then 1000-100-10."""

from torch import Tensor, nn

from paceline.models.initial import as_keras


class MnistCnn(nn.Module):
    """Pooling comes before ReLU: the two commute, and ReLU then sees a quarter of the values."""

    def __init__(self, shape: tuple[int, int, int], classes: int, dropout: float) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 128, 3)
        self.conv3 = nn.Conv2d(128, 256, 3)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        for _ in range(3):
            height, width = (height - 2) // 2, (width - 2) // 2
        self.dense1 = nn.Linear(256 * height * width, 1000)
        self.dense2 = nn.Linear(1000, 100)
        self.dense3 = nn.Linear(100, classes)
        self.apply(self.init_module)

    def init_module(self, module: nn.Module) -> None:
        """As Keras does, which the study used."""
        as_keras(module)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2, self.conv3):
            x = self.pool(conv(x)).relu_()
        x = self.dropout(x.flatten(1))
        x = self.dense1(x).relu_()
        x = self.dense2(x).relu_()
        out: Tensor = self.dense3(x)
        return out


def build(shape: tuple[int, int, int], classes: int, dropout: float) -> nn.Module:
    return MnistCnn(shape, classes, dropout)
