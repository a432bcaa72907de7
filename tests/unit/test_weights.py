"""Weights that are saved whole or not at all, and taken up by a model that they fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.checkpoint import file_format
from paceline.errors import UsageError
from paceline.models.build import build
from paceline.strategies import weights

SHAPE = (1, 16, 16)


def model(seed: int, classes: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    return build("shallow-cnn", SHAPE, classes)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in one if one[name].shape == other[name].shape and torch.equal(one[name], other[name])}


def test_what_was_saved_is_started_from(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    saved, started = model(0), model(1)
    file_format.save(saved.state_dict(), path)
    assert list(tmp_path.iterdir()) == [path]
    assert weights.start_from(started, str(path)) == []
    assert same(saved.state_dict(), started.state_dict()) == set(saved.state_dict())


def test_a_file_of_channels_last_tensors_is_contiguous(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    plain = model(0).double()
    turned = model(0).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert not turned.state_dict()["conv2.weight"].is_contiguous()
    file_format.save(turned.state_dict(), path)
    saved = load_file(path)
    assert all(tensor.is_contiguous() for tensor in saved.values())
    assert same(plain.state_dict(), saved) == set(saved) == set(plain.state_dict())


def test_a_last_layer_for_other_classes_stays_new(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    saved, started = model(0), model(1, classes=3)
    file_format.save(saved.state_dict(), path)
    before = {name: tensor.clone() for name, tensor in started.state_dict().items()}
    fresh = weights.start_from(started, str(path))
    assert sorted(fresh) == ["dense2.bias", "dense2.weight"]
    after = started.state_dict()
    assert same(before, after) == set(fresh)
    assert same(saved.state_dict(), after) == set(after) - set(fresh)


def test_weights_take_the_type_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    file_format.save(model(0).double().state_dict(), path)
    started = model(1)
    weights.start_from(started, str(path))
    assert {tensor.dtype for tensor in started.state_dict().values()} == {torch.float32}
    assert same(model(0).state_dict(), started.state_dict()) == set(started.state_dict())


def test_weights_of_another_model_are_refused_by_their_tensors_names(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    file_format.save(build("mlp", SHAPE, 10).state_dict(), path)
    started = model(1)
    before = {name: tensor.clone() for name, tensor in started.state_dict().items()}
    with pytest.raises(UsageError) as error:
        weights.start_from(started, str(path))
    message = str(error.value)
    assert f"--weights {path} is the file of another model" in message
    assert "conv1.weight: not in the file" in message
    assert "more" in message
    assert same(before, started.state_dict()) == set(before)


def test_a_tensor_of_another_shape_or_too_many_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    file_format.save(model(0).state_dict() | {"conv1.bias": torch.zeros(7), "extra": torch.zeros(1)}, path)
    with pytest.raises(UsageError) as error:
        weights.start_from(model(1), str(path))
    assert "conv1.bias: (7,) in the file, (20,) in the model" in str(error.value)
    assert "extra: not in the model" in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"not a safetensors file", b"\xff" * 64, None], ids=["empty", "text", "bytes", "cut"]
)
def test_what_is_no_safetensors_file_is_a_usage_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.safetensors"
    if content is None:
        file_format.save(model(0).state_dict(), path)
        content = path.read_bytes()[:-100]
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"--weights .*model\.safetensors cannot be read as safetensors"):
        weights.start_from(model(1), str(path))


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
@pytest.mark.parametrize("old", [None, b"the old weights"])
def test_a_save_that_ends_half_way_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes | None, error: BaseException
) -> None:
    path = tmp_path / "model.safetensors"
    if old is not None:
        path.write_bytes(old)

    def half(_: dict[str, Tensor], place: Path) -> None:
        Path(place).write_bytes(b"half")
        raise error

    monkeypatch.setattr(file_format, "save_file", half)
    with pytest.raises(type(error)):
        file_format.save(model(0).state_dict(), path)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == ([(path.name, old)] if old is not None else [])


def test_other_programs_can_read_the_names(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    file_format.save(model(0).state_dict(), path)
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(model(0).state_dict())
