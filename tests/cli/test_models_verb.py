"""`paceline models`: sizes and costs as published."""

import argparse

import pytest

from paceline.cli import models
from paceline.models.table import TABLE

# Shi, "Comparison of distributed training architecture for convolutional neural network in cloud", Table 3.1: MB and
# GFLOPs, but for the ResNets' 3.9 and 11.3: with the stride on the 3x3 it is 4.1 and 11.5.
SHI = {
    "alexnet": ("233", "0.7"),
    "vgg16": ("528", "15.5"),
    "vgg19": ("548", "19.6"),
    "resnet50": ("98", "4.1"),
    "resnet152": ("230", "11.5"),
}


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert models.run(argparse.Namespace(devices=False, json=False)) == 0
    return capsys.readouterr().out.splitlines()


def test_every_model_has_a_line_that_fits(lines: list[str]) -> None:
    names = [line.split()[0] for line in lines[1 : 1 + len(TABLE)]]
    assert names == list(TABLE)
    assert max(map(len, lines)) <= 120
    assert all(line == line.rstrip() for line in lines)


def test_columns_are_aligned(lines: list[str]) -> None:
    end = lines[0].index("used with") - 2
    for line, info in zip(lines[1:], TABLE.values(), strict=False):
        assert line[:end].endswith(" -" if info.takes == "tokens" else f" {info.min_size}x{info.min_size}")
        assert line[end:] == f"  {info.used_with}".rstrip()


def test_numbers_are_the_published_ones(lines: list[str]) -> None:
    cells = {line.split()[0]: line.split() for line in lines[1 : 1 + len(TABLE)]}
    assert {name: tuple(cells[name][3:5]) for name in SHI} == SHI
    assert cells["resnet50v2"][1:3] == ["25,568,360", "25,613,800"]
    assert cells["resnet152v2"][1:3] == ["60,236,904", "60,380,648"]
    assert cells["mnist-cnn"][1:8] == ["690,590", "690,590", "2.6", "0.008", "1x28x28", "10", "22x22"]
    assert cells["gpt2"][1:] == ["124,439,808", "124,439,808", "475", "145.8", "1024", "tokens", "50257", "-"]


def test_every_model_is_explained_and_so_is_the_way_to_ones_own(lines: list[str]) -> None:
    assert all(
        any(line.startswith(name) and line.endswith(info.about) for line in lines) for name, info in TABLE.items()
    )
    text = "\n".join(lines)
    assert "--model package.module:function" in text
    assert "torchvision.models:resnet50" in text
