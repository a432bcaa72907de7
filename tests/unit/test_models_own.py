"""Models of a user's own: called as they ask, tried before they are trained, refused with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.models.build import build, check, construct
from paceline.models.table import check_fits, describe

SHAPE = (3, 12, 16)

MINE = '''
import torch
from torch import nn


class Net(nn.Module):
    """Notes how it was made; batch-norm and dropout, to see whether it is left alone."""

    def __init__(self, shape, classes, dropout=0.25):
        super().__init__()
        self.made = (shape, classes, dropout)
        self.norm = nn.BatchNorm2d(shape[0])
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(shape[0] * shape[1] * shape[2], classes)

    def forward(self, x):
        return self.dense(self.dropout(self.norm(x)).flatten(1))


def other_names(channels, image_size, num_classes):
    return Net((channels, image_size, 16), num_classes)


def lazy(classes):
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(classes))


def one_too_many(shape, classes):
    return Net(shape, classes + 1)


def not_a_module():
    return 3


def the_class():
    return Net


def frozen(shape, classes):
    return Net(shape, classes).requires_grad_(False)


def not_flat(shape, classes):
    return nn.Conv2d(shape[0], classes, 1)


def layers_alone(classes):  # none of whose lines is run by forward
    return nn.Sequential(nn.Flatten(), nn.Linear(5, classes))


class Integers(Net):
    def forward(self, x):
        return super().forward(x).long()


class Auxiliary(Net):
    """As torchvision's inception_v3: one tensor in evaluation, two in training."""

    def forward(self, x):
        out = super().forward(x)
        return (out, out) if self.training else out


class WrongSize(Net):
    def forward(self, x):
        return self.dense(x)  # line 67


def fails(classes):
    raise ValueError("no such depth")


class Bigrams(nn.Module):
    """The next token from the last; notes how it was made."""

    def __init__(self, block, vocabulary):
        super().__init__()
        self.made = (block, vocabulary)
        self.table = nn.Embedding(vocabulary, vocabulary)

    def forward(self, x):
        return self.table(x)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(3, 1)

    def forward(self, a, b):
        return {"sum": self.dense(a) + b}
'''

# As torchvision.models: keyword-only weights, and num_classes handed down.
VISION = """
from torch import nn


class ResNet(nn.Module):
    def __init__(self, layers, num_classes=1000):
        super().__init__()
        self.conv = nn.Conv2d(3, layers, 3)
        self.fc = nn.Linear(layers, num_classes)

    def forward(self, x):
        return self.fc(self.conv(x).mean((2, 3)))


def _resnet(layers, weights, progress, **kwargs):
    return ResNet(layers, **kwargs)


def resnet50(*, weights=None, progress=True, **kwargs):
    return _resnet(5, weights, progress, **kwargs)
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "vision").mkdir()
    (tmp_path / "vision" / "__init__.py").write_text("")
    (tmp_path / "vision" / "models.py").write_text(VISION)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("mine", "vision", "vision.models"):
        sys.modules.pop(name, None)


def test_a_class_or_a_function_is_called_with_what_it_names() -> None:
    assert build("mine:Net", SHAPE, 7).made == (SHAPE, 7, 0.25)
    assert build("mine:Net", SHAPE, 7, dropout=0.5).made == (SHAPE, 7, 0.5)
    assert build("mine:other_names", SHAPE, 7).made == (SHAPE, 7, 0.25)
    lazy = build("mine:lazy", SHAPE, 7)
    assert not any(nn.parameter.is_lazy(parameter) for parameter in lazy.parameters())


def test_torchvisions_way_of_calling_works() -> None:
    model = build("vision.models:resnet50", (3, 32, 32), 10)
    assert model(torch.zeros(4, 3, 32, 32)).shape == (4, 10)


def test_trying_it_leaves_no_trace() -> None:
    torch.manual_seed(0)
    tried = build("mine:Net", SHAPE, 7)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    fresh = sys.modules["mine"].Net(SHAPE, 7)
    assert torch.equal(after, torch.get_rng_state())
    assert tried.training
    for key, value in fresh.state_dict().items():
        assert torch.equal(tried.state_dict()[key], value), key
    assert all(parameter.grad is None for parameter in tried.parameters())


def test_the_table_knows_nothing_of_it() -> None:
    assert describe("mine:Net") is None
    assert "mine" not in sys.modules
    check_fits("mine:Net", (1, 1, 1))
    assert describe("nowhere_at_all:net") is None
    with pytest.raises(UsageError, match="model nowhere_at_all:net cannot be imported: ModuleNotFoundError"):
        build("nowhere_at_all:net", (1, 8, 8), 2)


@pytest.mark.parametrize(("name", "says"), [
    ("one_too_many", "returned 8 numbers instead of 7, the number of classes in the data set: .* num_classes"),
    ("not_a_module", "returned an object of type int instead of a torch.nn.Module"),
    ("the_class", "returned the class Net instead of a torch.nn.Module"),
    ("frozen", "has nothing to train"),
    ("not_flat", r"in evaluation, returned a tensor of float32 and shape \[2, 7, 12, 16\]; .*\[2, 7\] is expected"),
    ("Integers", r"in evaluation, returned a tensor of int64 and shape \[2, 7\]; a floating-point tensor"),
    ("Auxiliary", r"in training, returned an object of type tuple; .*\[2, 7\] is expected for 2 samples"),
    ("WrongSize", r"in evaluation, fails on inputs of shape \[2, 3, 12, 16\]: .*mine\.py, line 67; in layer 'dense'"),
    ("layers_alone", r"in evaluation, fails on .*RuntimeError: .* \(in layer '1', Linear\(in_features=5"),
    ("fails", r"called with classes=7, failed: ValueError: no such depth \(.*mine\.py, line 71\)"),
])  # fmt: skip
def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"(?s)^model mine:{name}.*{says}"):
        build(f"mine:{name}", SHAPE, 7)


@pytest.mark.parametrize("name", ["mine:other_names", "vision.models:resnet50"])
def test_dropout_needs_a_parameter_of_that_name(name: str) -> None:
    with pytest.raises(UsageError, match=rf"--dropout 0.5: model {name} has no parameter `dropout`"):
        build(name, (3, 16, 16), 7, dropout=0.5)


def test_models_of_tokens_are_tried_with_tokens() -> None:
    name, tokens = "mine:Bigrams", torch.zeros(2, 6, dtype=torch.int64)
    model = construct(name, (6,), 5)
    assert model.made == (6, 5)
    check(name, tokens, (6, 5), model)
    with pytest.raises(UsageError, match=r"returned 5 numbers instead of 9, the number of classes"):
        check(name, tokens, (6, 9), model)
    with pytest.raises(UsageError, match=r"shape \[2, 6, 5\]; .* of shape \[2, 5\] is expected for 2 samples"):
        check(name, tokens, (5,), model)
    with pytest.raises(UsageError, match=r"in evaluation, fails on inputs of shape \[2, 6\]: .*table"):
        check(name, torch.zeros(2, 6), (6, 5), model)  # not integers


@pytest.mark.parametrize("inputs", [
    (torch.zeros(2, 3), torch.zeros(2, 1)),
    {"b": torch.zeros(2, 1, dtype=torch.float64), "a": torch.zeros(2, 3, dtype=torch.float64)},
], ids=["tuple", "dict"])  # fmt: skip
def test_inputs_and_outputs_may_be_anything_that_the_task_allows(inputs: object) -> None:
    check("mine:Two", inputs, None, construct("mine:Two", (3,), 1))
    with pytest.raises(UsageError, match="returned an object of type dict; a floating-point tensor"):
        check("mine:Two", inputs, (1,), construct("mine:Two", (3,), 1))
