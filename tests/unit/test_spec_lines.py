"""What is written down about a run: lines that read back to the same spec, and an introduction for people."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.spec import FIELDS, Resolved, RunSpec, resolve

Values = Mapping[str, Any]

NUMBERS = st.fixed_dictionaries(
    {"model": st.just("mlp"), "strategy": st.sampled_from(["allreduce", "ring", "reduce-bcast", "gather"])},
    optional={
        "hidden": st.lists(st.integers(1, 10**6), min_size=1, max_size=4),
        "dropout": st.floats(0, 0.95),
        "validation": st.just(0.0) | st.floats(0.001, 0.5),
        "workers": st.integers(1, 5),
        "transport": st.sampled_from(["auto", "gloo", "threads"]),
        "bucket_mb": st.floats(0.001, 1e12) | st.integers(1, 10**12),
        "sync_batchnorm": st.booleans(),
        "epochs": st.integers(1),
        "steps": st.none() | st.integers(1),
        "batch_size": st.integers(1, 1000),
        "optimizer": st.sampled_from(["adam", "adamw", "sgd"]),
        "lr": st.floats(0, 1e308),
        "weight_decay": st.floats(0, 1),
        "scale_lr": st.booleans(),
        "warmup_epochs": st.none() | st.floats(0, 1e9),
        "decay": st.sampled_from(["none", "cosine", "linear"]),
        "seed": st.integers(0, 2**32 - 1),
        "timeout": st.floats(0.1, 1e6),
    },
)


def read_back(resolved: Resolved) -> RunSpec:
    return resolve(("spec.toml", tomllib.loads("\n".join(resolved.lines()) + "\n"))).spec


@given(NUMBERS)
def test_the_lines_are_toml_that_reads_back_to_the_same_spec(values: Values) -> None:
    resolved = resolve(("flag", values))
    assert read_back(resolved) == resolved.spec


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
@example('quo"te \\ back\x7f\n')
@example("größe")
@example("paceline 🚴")
def test_any_text_survives_the_lines(text: str) -> None:
    resolved = resolve(("flag", {"output_dir": text}))
    assert read_back(resolved) == resolved.spec


@pytest.mark.parametrize("path", ["größe 🚴.toml", "two\nlines.toml", "bell\x07.toml"])
def test_the_lines_are_toml_whatever_the_config_file_is_called(path: str) -> None:
    resolved = resolve((f"config file {path}", {"epochs": 2}))
    assert read_back(resolved) == resolved.spec


def test_the_lines_say_where_each_value_came_from() -> None:
    resolved = resolve(("config file run.toml", {"epochs": 2}), ("flag", {"workers": 3}))
    lines = resolved.lines()
    named = {re.split(r"[ :=]+", line.removeprefix("# "), maxsplit=1)[0]: line for line in lines}
    assert list(named) == resolved.spec.names
    assert {"overlap", "epochs"} <= named.keys() <= FIELDS.keys() - {"stages", "servers"}
    assert re.fullmatch(r"epochs = 2 +# config file run\.toml", named["epochs"])
    assert re.fullmatch(r"workers = 3 +# flag", named["workers"])
    assert re.fullmatch(r"lr = 0\.001 +# default for adam", named["lr"])
    assert named["steps"] == "# steps: not set (default)"


def test_the_introduction_shows_each_value_with_its_source() -> None:
    resolved = resolve(("config file run.toml", {"epochs": 2, "scale_lr": False}), ("flag", {"workers": 3, "lr": 0.1}))
    heading, rate, *rows = replace(resolved, verbose=True).introduction()
    assert heading == "mnist-cnn on mnist-mini: allreduce, 3 workers x batch 128 = global batch 384, shm"
    assert rate == "  learning rate 0.1, then falling to 0 along a cosine"
    shown: dict[str, str] = {}
    source = ""
    for row in rows:
        assert len(row) <= 110
        values = row.strip()
        if not row.startswith("   "):
            source, values = re.split(" {2,}", values, maxsplit=1)
        shown[source] = f"{shown.get(source, '')} {values}"
    expected: dict[str, set[str]] = {}
    for name in resolved.spec.names:
        value = getattr(resolved.spec, name)
        text = "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        expected.setdefault(resolved.sources[name], set()).add(f"{name} {text}")
    assert {why: {part.strip() for part in text.split(",")} for why, text in shown.items()} == expected
    assert list(shown)[-1] == "default"


def test_without_being_asked_it_shows_what_was_given_and_derived_and_the_rate_that_is_trained_with() -> None:
    lines = resolve(("flag", {"workers": 4, "lr": 0.01, "epochs": 2})).introduction()
    assert lines[1] == (
        "  learning rate 0.04 (0.01 x 4 workers; --no-scale-lr keeps 0.01), reached after 1 epoch, "
        "then falling to 0 along a cosine"
    )
    text = "\n".join(lines)
    assert "workers 4, epochs 2, lr 0.01" in text
    assert "  derived  normalize false, strategy allreduce, transport shm" in lines
    assert "momentum" not in text
    assert "--verbose" in lines[-1]
    assert len(lines) == 5


def test_the_introduction_leaves_a_long_value_in_one_piece() -> None:
    path = "/scratch/" + "-".join(["run"] * 20)
    assert any(path in line for line in resolve(("flag", {"batch_size": 64, "output_dir": path})).introduction())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"warmup_steps": 200, "decay": "linear"}, "reached after 200 steps from 0, then falling to 0 linearly"),
        ({"warmup_epochs": 1.0, "decay": "none"}, "reached after 1 epoch from 0"),
        ({"decay": "step", "decay_every": 2.0}, "multiplied by 0.1 every 2 epochs"),
        ({"decay": "step", "decay_every": 1.0, "decay_factor": 0.5}, "multiplied by 0.5 every epoch"),
    ],
)
def test_the_introduction_says_how_the_learning_rate_grows_and_falls(values: Values, said: str) -> None:
    assert resolve(("flag", {"lr": 0.1, **values})).introduction()[1] == f"  learning rate 0.1, {said}"
