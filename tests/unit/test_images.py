"""Images on their way into a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.data.transforms import PrepareImages, draws, shifted

CPU = torch.device("cpu")


def pictures(count: int = 6, channels: int = 3, height: int = 32, width: int = 24) -> Tensor:
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8,
                         generator=torch.Generator().manual_seed(0))  # fmt: skip


@given(st.lists(st.integers(0, 49_999), min_size=1, max_size=20), st.integers(0, 2**32 - 1), st.integers(0, 300))
def test_chance_depends_on_seed_epoch_and_sample_alone(numbers: list[int], seed: int, epoch: int) -> None:
    together = draws(seed, epoch, torch.tensor(numbers)).tolist()
    assert together == [int(draws(seed, epoch, torch.tensor([number]))) for number in numbers]
    assert together != draws(seed, epoch + 1, torch.tensor(numbers)).tolist()
    assert together != draws((seed + 1) % 2**32, epoch, torch.tensor(numbers)).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_shifted_image_is_the_textbooks_random_crop(dtype: torch.dtype) -> None:
    images, bits = pictures(40).to(dtype), draws(3, 1, torch.arange(40))
    out = shifted(images, bits, mirror=True)
    for image, changed, number in zip(images.numpy(), out.numpy(), bits.tolist(), strict=True):
        down, right, flip = (number & 0xFFFFF) % 9, (number >> 20 & 0xFFFFF) % 7, number >> 40 & 1
        padded = np.pad(image, ((0, 0), (4, 4), (3, 3)))
        crop = padded[:, down : down + 32, right : right + 24]
        assert np.array_equal(changed, crop[:, :, ::-1] if flip else crop)
    assert torch.equal(images, pictures(40).to(dtype))


def test_every_shift_comes_as_often_as_the_others_and_half_are_mirrored() -> None:
    marks = torch.zeros(20_000, 1, 16, 16, dtype=torch.uint8)
    marks[:, 0, 8, 7] = 1  # left of the middle, so that a mirrored one is seen
    where = shifted(marks, draws(0, 0, torch.arange(20_000)), mirror=True).view(-1, 256).argmax(1)
    rows, columns = np.bincount(where // 16), np.bincount(where % 16)
    assert rows.nonzero()[0].tolist() == [6, 7, 8, 9, 10]
    assert columns.nonzero()[0].tolist() == [5, 6, 7, 8, 9, 10]
    assert (abs(rows[6:11] / 4_000 - 1) < 0.1).all()
    # A mirrored mark is one further right: the ends are seen in one way only, the others in both.
    assert (abs(columns[5:11] / np.array([2_000, 4_000, 4_000, 4_000, 4_000, 2_000]) - 1) < 0.1).all()
    still = shifted(marks, draws(0, 0, torch.arange(20_000)), mirror=False).view(-1, 256).argmax(1)
    assert set((still % 16).tolist()) == {5, 6, 7, 8, 9}


def test_bytes_become_parts_of_one_and_floats_stay() -> None:
    images = pictures()
    ready = PrepareImages(torch.float64, CPU)
    assert torch.equal(ready.test(images), images.double() * (1 / 255))
    assert torch.equal(ready.test(images.double()), images.double())
    assert ready.test(images).is_contiguous(memory_format=torch.channels_last)
    assert PrepareImages(torch.float32, CPU, layout=torch.contiguous_format).test(images).is_contiguous()


def test_normalised_channels_have_mean_zero_and_deviation_one() -> None:
    images = pictures()
    for stored, scale in ((images, 255), (images.float(), 1)):
        values = stored.double() / scale
        mean, std = values.mean((0, 2, 3)), values.std((0, 2, 3), unbiased=False)
        ready = PrepareImages(torch.float64, CPU, normal=(tuple(mean.tolist()), tuple(std.tolist())))
        out = ready.test(stored)
        assert torch.allclose(out, (values - mean.view(3, 1, 1)) / std.view(3, 1, 1), atol=1e-12)
        assert torch.allclose(out.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-12)
        assert torch.equal(stored, images.to(stored.dtype)), "what is stored is never changed"


@pytest.mark.parametrize("size", [(64, 48), (20, 20), (32, 24), (64, 12)])
def test_images_are_resized_after_they_were_cropped_and_normalised(size: tuple[int, int]) -> None:
    images, numbers = pictures(), torch.arange(6)
    plain = PrepareImages(torch.float64, CPU, augment="crop", normal=((0.5,) * 3, (0.25,) * 3))
    resized = PrepareImages(torch.float64, CPU, augment="crop", normal=((0.5,) * 3, (0.25,) * 3), size=size)
    small = plain.train(images, 0, numbers)
    shrinks = size[0] < 32 or size[1] < 24
    expected = F.interpolate(small, size, mode="bilinear", antialias=shrinks)
    assert torch.allclose(resized.train(images, 0, numbers), expected, atol=1e-14)


def test_what_is_tested_is_not_augmented() -> None:
    images = pictures()
    ready = PrepareImages(torch.float32, CPU, augment="crop-flip")
    assert torch.equal(ready.test(images), PrepareImages(torch.float32, CPU).test(images))
    assert not torch.equal(ready.train(images, 0, torch.arange(6)), ready.test(images))


@pytest.mark.parametrize("augment", ["none", "crop", "crop-flip"])
def test_an_empty_batch_stays_empty(augment: str) -> None:
    ready = PrepareImages(torch.float32, CPU, augment=augment, size=(64, 64), normal=((0.5,) * 3, (0.25,) * 3))
    assert ready.train(pictures(0), 0, torch.arange(0)).shape == (0, 3, 64, 64)
