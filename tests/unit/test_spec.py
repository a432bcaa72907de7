"""What can be asked for, and what is refused before anything starts."""

from __future__ import annotations

import importlib.util
import math
import shutil
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.data.table import DataInfo
from paceline.errors import UsageError
from paceline.spec import FIELDS, World, check_data, read_config, resolve
from paceline.strategies import table as strategies

Values = Mapping[str, Any]


def refusal(values: Values, world: World | None = None) -> str:
    with pytest.raises(UsageError) as error:
        resolve(("flag", values), world=world)
    return str(error.value)


# Layers and sources.


def test_without_a_word_one_worker_trains_alone() -> None:
    spec = resolve().spec
    assert (spec.model, spec.data, spec.strategy, spec.workers) == ("mnist-cnn", "mnist-mini", "sequential", 1)
    assert (spec.transport, spec.lr, spec.batch_size, spec.update_batch) == ("shm", 0.001, 128, 128)
    assert spec.normalize is False


def test_flags_win_over_the_config_file(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('batch-size = 64\nwarmup_epochs = 2\nworkers = 3\nhidden = [9, 8]\nmodel = "mlp"\n')
    resolved = resolve(("config file", read_config(str(config))), ("flag", {"workers": 2, "seed": 0}))
    spec, sources = resolved.spec, resolved.sources
    assert (spec.batch_size, spec.warmup_epochs, spec.workers, spec.hidden) == (64, 2.0, 2, (9, 8))
    assert type(spec.warmup_epochs) is float
    assert {name: sources[name] for name in ("batch_size", "workers", "seed", "epochs")} == {
        "batch_size": "config file",
        "workers": "flag",
        "seed": "flag",
        "epochs": "default",
    }
    assert set(sources) == set(FIELDS)


@pytest.mark.parametrize(
    ("values", "world", "name", "value", "source"),
    [
        ({}, None, "workers", 1, "default for no strategy"),
        ({"strategy": "sequential"}, None, "workers", 1, "default for sequential"),
        ({"strategy": "ring"}, None, "workers", 2, "default for ring"),
        ({"workers": 3}, None, "strategy", "allreduce", "default for the workers"),
        ({}, World(4, "torchrun"), "workers", 4, "from torchrun"),
        ({}, World(4, "torchrun"), "transport", "shm", "auto: one machine"),
        ({"optimizer": "sgd"}, None, "lr", 0.01, "default for sgd"),
        ({"optimizer": "sgd", "lr": 0.5}, None, "lr", 0.5, "flag"),
    ],
)
def test_what_is_left_open_is_chosen_with_a_reason(
    values: Values, world: World | None, name: str, value: Any, source: str
) -> None:
    resolved = resolve(("flag", values), world=world)
    assert (getattr(resolved.spec, name), resolved.sources[name]) == (value, source)


def test_several_workers_on_gpus_use_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.comm.table.has_gpu", lambda: True)
    resolved = resolve(("flag", {"device": "cuda", "workers": 2}))
    assert (resolved.spec.transport, resolved.sources["transport"]) == ("nccl", "auto: --device cuda")
    assert "need --transport nccl" in refusal({"device": "cuda", "workers": 2, "transport": "mpi"})
    assert "only GPU tensors" in refusal({"device": "cpu", "workers": 2, "transport": "nccl"})


@pytest.mark.parametrize("values", [{"device": "cuda"}, {"transport": "nccl", "workers": 2}])
def test_a_gpu_that_is_not_there_is_refused(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.comm.table.has_gpu", lambda: False)
    assert "NVIDIA GPU" in refusal(values)


# Values that are refused: the message has what was given and what is allowed.


@pytest.mark.parametrize(
    ("name", "given", "meant", "another"),
    [
        ("model", "mnist-cn", "mnist-cnn", "shallow-cnn"),
        ("data", "mnist-min", "mnist-mini", "fashion-mnist"),
        ("strategy", "rings", "ring", "reduce-bcast"),
        ("strategy", "All-Reduce", "allreduce", "gather"),
        ("transport", "glo", "gloo", "threads"),
        ("optimizer", "adamm", "adam", "sgd"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, given: str, meant: str, another: str) -> None:
    message = refusal({name: given})
    assert "unknown" in message
    assert f"{given!r}; did you mean {meant!r}?" in message
    assert another in message


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("workers", "2", "a whole number"),
        ("workers", 2.0, "a whole number"),
        ("workers", True, "a whole number"),
        ("epochs", None, "a whole number"),
        ("lr", "fast", "a number"),
        ("lr", False, "a number"),
        ("lr", [0.1], "a number"),
        ("scale_lr", 1, "true or false"),
        ("scale_lr", "yes", "true or false"),
        ("model", 3, "a text"),
        ("strategy", ["ring"], "a text"),
        ("hidden", "256,64", "whole numbers"),
        ("hidden", 256, "whole numbers"),
        ("hidden", [], "whole numbers"),
        ("hidden", [256, 0], "at least 1"),
        ("hidden", [256, 6.4], "whole numbers"),
        ("hidden", [True], "whole numbers"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name: str, value: Any, expected: str) -> None:
    message = refusal({"model": "mlp", name: value})
    assert f"flag: --{name.replace('_', '-')} is {value!r}" in message
    assert expected in message


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("workers", 0, "at least 1"),
        ("workers", -3, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("steps", 0, "at least 1"),
        ("lr", -0.1, "at least 0"),
        ("momentum", 1.5, "from 0 to 1"),
        ("dropout", 0.96, "from 0 to 0.95"),
        ("validation", 0.51, "from 0 to 0.5"),
        ("timeout", 0.0, "at least 0.1"),
        ("momentum", math.nan, "from 0 to 1"),
        ("lr", math.nan, "at least 0"),
        ("lr", math.inf, ""),
        ("lr", -math.inf, "at least 0"),
        ("timeout", math.inf, ""),
    ],
)
def test_a_number_out_of_range_is_refused(name: str, value: float, limits: str) -> None:
    message = refusal({name: value})
    assert f"flag: --{name.replace('_', '-')} is {value}; it takes numbers" in message
    assert limits in message


def test_a_whole_number_that_no_float_can_hold_is_refused() -> None:
    # TOML's whole numbers have no end in Python.
    assert "--lr" in refusal({"lr": 10**400})


def test_a_seed_that_torch_cannot_hold_is_refused() -> None:
    assert "--seed" in refusal({"seed": 2**64})


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"batch_size": 10_001}, ["10001 x 1 worker = 10001", "mnist-mini (10000)", "--batch-size"]),
        ({"batch_size": 5_001, "workers": 2}, ["5001 x 2 workers = 10002", "(10000)"]),
        ({"batch_size": 8_001, "validation": 0.2}, ["8001", "(8000)"]),
        ({"data": "synthetic:train=100", "batch_size": 4, "validation": 0.001}, ["--validation 0.001", "100 samples"]),
        ({"patience": 3}, ["--patience 3", "--validation"]),
        ({"evaluate_every": 50}, ["--evaluate-every 50", "--validation"]),
        ({"best_by": "accuracy"}, ["--best-by accuracy", "--validation"]),
        ({"best_by": "perplexity", "validation": 0.1}, ["--best-by perplexity: task classification", "loss, accuracy"]),
        (
            {"best_by": "mae", "validation": 0.1, "task": "regression", "model": "a.py:b", "data": "a.py:c"},
            ["--best-by mae", "loss, 'mean absolute error'"],
        ),
        (
            {"best_by": "accuracy", "validation": 0.1, "task": "a.py:d", "model": "a.py:b", "data": "a.py:c"},
            ["task a.py:d", "loss, metric"],
        ),
        ({"data": "synthetic:train=100"}, ["128 x 1", "synthetic:train=100 (100)"]),
        ({"strategy": "sequential", "workers": 2}, ["sequential with 2 workers", "allreduce, ring"]),
        ({"hidden": [64]}, ["--hidden", "mlp", "mnist-cnn"]),
        ({"model": "shallow-cnn", "hidden": [64]}, ["--hidden", "mlp", "shallow-cnn"]),
        ({"data": "synthetic:1x8x8"}, ["mnist-cnn", "at least 22x22", "8x8"]),
        ({"data": "synthetic:1x64x21"}, ["mnist-cnn", "at least 22x22", "64x21"]),
        ({"data": "synthetic:8"}, ["'8'", "synthetic:3x32x32"]),
        ({"model": "resnet18", "data": "synthetic:3x32x32", "image_size": 4}, ["resnet18", "at least 9x9", "4x4"]),
        ({"data": "synthetic:1x8x8", "normalize": True, "image_size": 28}, ["--normalize", "synthetic:1x8x8"]),
        ({"read": "mpi-io", "transport": "gloo", "workers": 2}, ["--read mpi-io", "--transport mpi"]),
        ({"data": "images:own\udcff"}, ["--data 'images:own", "rename"]),
        ({"read": "mpi-io"}, ["--read mpi-io", "one worker", "--read own"]),
        ({"read": "mpi-io", "workers": 2}, ["--read mpi-io", "mnist-mini is not in a file"]),
        ({"read": "mpi-io", "workers": 2, "data": "json:loads"}, ["json:loads is not in a file"]),
        ({"weights": "/no/such.safetensors"}, ["--weights /no/such.safetensors", "no such file"]),
        ({"data_dir": "/no/such"}, ["--data-dir /no/such", "no such folder"]),
        ({"name": "a/b"}, ["--name 'a/b'", "--output-dir"]),
        ({"name": "a\x1b[2Jb"}, [r"--name 'a\x1b[2Jb'", "control characters"]),
        ({"name": ".."}, ["--name '..'"]),
        ({"name": ""}, ["--name ''"]),
        ({"name": "a\0b"}, [r"--name 'a\x00b'"]),
        ({"output_dir": "a\0b"}, ["--output-dir"]),
    ],
)
def test_values_that_do_not_fit_together_are_refused(values: Values, parts: list[str]) -> None:
    message = refusal(values)
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    "values",
    [
        {"batch_size": 10_000},
        {"batch_size": 5_000, "workers": 2},
        {"batch_size": 8_000, "validation": 0.2},
        {"data": "synthetic:1x22x22"},
        {"data": "synthetic:1x8x8", "image_size": 22},
    ],
)
def test_the_largest_batch_and_the_smallest_image_fit(values: Values) -> None:
    spec = resolve(("flag", values)).spec
    assert {name: getattr(spec, name) for name in values} == values


@pytest.mark.parametrize("name", ["weights", "data_dir"])
def test_an_empty_path_is_not_taken_for_none_at_all(name: str) -> None:
    # --weights "$FILE" with FILE unset would train from new weights.
    assert f"--{name.replace('_', '-')}" in refusal({name: ""})


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec", "srun"])
def test_workers_must_be_as_many_as_the_launcher_has_started(launcher: str) -> None:
    message = refusal({"workers": 2}, World(4, launcher))
    assert "--workers 2" in message
    assert f"{launcher} has started 4 ranks" in message
    assert resolve(("flag", {"workers": 4}), world=World(4, launcher)).spec.workers == 4


def test_data_are_normalised_where_that_is_usual_unless_told() -> None:
    for values, expected, source in (
        ({"data": "cifar10", "model": "resnet18"}, True, "default for cifar10"),
        ({"data": "mnist"}, False, "default for mnist"),
        ({"data": "mnist", "normalize": True}, True, "flag"),
        ({"data": "json:loads"}, None, "default"),  # chosen when the data are loaded
    ):
        resolved = resolve(("flag", values))
        assert (resolved.spec.normalize, resolved.sources["normalize"]) == (expected, source)


def test_reading_with_mpi_io_chooses_mpi() -> None:
    resolved = resolve(("flag", {"data": "mnist", "read": "mpi-io", "workers": 2}))
    assert (resolved.spec.transport, resolved.sources["transport"]) == ("mpi", "auto: --read mpi-io")


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"warmup_epochs": 2.0, "warmup_steps": 100}, ["--warmup-epochs 2", "--warmup-steps 100", "only one"]),
        ({"decay": "step"}, ["--decay step", "--decay-every"]),
        ({"decay_every": 2.0}, ["--decay-every 2", "--decay cosine", "leave it out"]),
        ({"decay": "none", "decay_factor": 0.5}, ["--decay-factor 0.5", "--decay none"]),
    ],
)
def test_options_of_the_learning_rate_that_would_have_no_effect_are_refused(values: Values, parts: list[str]) -> None:
    assert [part for part in parts if part not in refusal(values)] == []


@pytest.mark.parametrize(
    ("optimizer", "lr", "weight_decay"), [("adam", 0.001, 0.0), ("adamw", 0.001, 0.01), ("sgd", 0.01, 0.0)]
)
def test_optimizers_have_their_own_defaults(optimizer: str, lr: float, weight_decay: float) -> None:
    spec = resolve(("flag", {"optimizer": optimizer})).spec
    assert (spec.lr, spec.weight_decay) == (lr, weight_decay)
    assert resolve(("flag", {"optimizer": optimizer, "weight_decay": 0.0})).spec.weight_decay == 0.0


def test_step_decay_has_a_usual_factor() -> None:
    resolved = resolve(("flag", {"decay": "step", "decay_every": 2.0}))
    assert (resolved.spec.decay_factor, resolved.sources["decay_factor"]) == (0.1, "default for step")


# MPI, which may not be there.


def test_mpi_without_mpi4py_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    for values, world in (({"transport": "mpi"}, None), ({}, World(2, "mpiexec"))):
        message = refusal(values, world)
        assert "mpi4py" in message
        assert "pip install 'paceline[mpi]'" in message
    resolve(("flag", {"workers": 2}))


def test_mpi_without_mpiexec_is_refused_unless_ranks_have_been_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    message = refusal({"transport": "mpi"})
    assert "mpiexec" in message
    assert "--transport gloo" in message
    started = resolve(world=World(2, "mpiexec"))
    assert (started.spec.transport, started.sources["transport"]) == ("mpi", "auto: started by mpiexec")


def test_mpi_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of its ranks would be an MPI world of its own, and train alone.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: object())
    message = refusal({"transport": "mpi"}, World(2, "torchrun"))
    assert "mpi" in message
    assert "torchrun" in message


# Config files.


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("batchsize = 3\n", ["'batchsize'", "did you mean 'batch_size'?", "warmup_epochs"]),
        ("[train]\nepochs = 3\n", ["unknown key 'train'"]),
        ("epochs = \n", ["not valid TOML", "line 1"]),
        ("epochs = 1\nepochs = 2\n", ["not valid TOML"]),
        (b"\xff\xfe", ["not valid TOML"]),
        (None, ["cannot read", "No such file"]),
    ],
)
def test_a_config_file_that_cannot_be_used_is_named(
    tmp_path: Path, content: str | bytes | None, parts: list[str]
) -> None:
    config = tmp_path / "run.toml"
    if content is not None:
        config.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as error:
        read_config(str(config))
    assert [part for part in [str(config), *parts] if part not in str(error.value)] == []


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the config file"):
        read_config(str(tmp_path))


def test_a_wrong_value_in_a_config_file_is_told_with_the_file(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("lr = nan\n")
    with pytest.raises(UsageError, match=r"run\.toml: --lr is nan"):
        resolve((f"config file {config}", read_config(str(config))), ("flag", {"lr": 0.1}))


@pytest.mark.parametrize("written", strategies.TABLE)
@pytest.mark.parametrize("asked", strategies.TABLE)
def test_the_spec_of_one_strategy_is_a_config_file_for_another(written: str, asked: str) -> None:
    """Options that only the first has, and that have its defaults, are ignored, and are as if nobody had given them."""
    lines = resolve(("flag", {"strategy": written, "epochs": 3})).lines()
    config = tomllib.loads("\n".join(lines))
    flags = {"strategy": asked, "workers": 1 if asked == "sequential" else 2, "transport": "auto"}
    found = resolve(("config file spec.toml", config), ("flag", flags)).spec
    assert found.epochs == 3
    plain = resolve(("flag", flags | {"epochs": 3})).spec
    shared = set(strategies.TABLE[written].names) & set(strategies.TABLE[asked].names)
    assert {name for name in FIELDS if getattr(found, name) != getattr(plain, name)} <= shared


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"strategy": "pipeline", "workers": 2, "stages": 2, "microbatches": 3}, "microbatches"),
        ({"strategy": "ps-bounded", "workers": 2, "servers": 1, "staleness": 9}, "staleness"),
        ({"stages": 2}, "stages"),
        ({"strategy": "ring", "workers": 2, "averaging": "gather"}, "averaging"),
    ],
)
def test_an_option_of_another_strategy_that_is_not_at_its_default_is_refused(config: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=f"^config file a.toml: strategy ring has no --{name}: "):
        resolve(("config file a.toml", config), ("flag", {"strategy": "ring", "workers": 2}))
    with pytest.raises(UsageError, match=r"^flag: strategy ring has no --stages"):
        resolve(("config file a.toml", {"strategy": "ring"}), ("flag", {"stages": 2, "workers": 2}))


def test_a_global_batch_is_divided_over_the_workers_and_keeps_the_rate() -> None:
    spec = resolve(("flag", {"workers": 4, "global_batch": 256})).spec
    assert (spec.batch_size, spec.update_batch, spec.lr_scale) == (64, 256, 1)
    spec = resolve(("flag", {"workers": 4, "batch_size": 64})).spec
    assert (spec.batch_size, spec.update_batch, spec.lr_scale) == (64, 256, 4)
    scaled = resolve(("flag", {"workers": 4, "global_batch": 256, "scale_lr": True})).spec
    assert (scaled.batch_size, scaled.lr_scale) == (64, 4)


def test_a_global_batch_need_not_be_a_multiple_of_the_workers() -> None:
    resolved = resolve(("flag", {"workers": 4, "global_batch": 10}))
    assert (resolved.spec.batch_size, resolved.spec.update_batch) == (3, 10)
    assert "4 workers with a global batch of 10, up to 3 each" in resolved.introduction()[0]


def test_a_global_batch_is_divided_over_replicas_not_workers() -> None:
    spec = resolve(("flag", {"strategy": "pipeline", "workers": 4, "stages": 2, "global_batch": 64})).spec
    assert (spec.batch_size, spec.microbatches) == (32, 8)
    assert resolve(("flag", {"strategy": "ps-async", "workers": 4, "global_batch": 64})).spec.batch_size == 64


def test_a_batch_of_a_worker_and_one_of_all_must_fit() -> None:
    assert resolve(("flag", {"workers": 4, "global_batch": 10, "batch_size": 3})).spec.update_batch == 10
    with pytest.raises(UsageError, match="--global-batch 10 is 3 samples for each of 4, but --batch-size is 4"):
        resolve(("flag", {"workers": 4, "global_batch": 10, "batch_size": 4}))


def test_a_global_batch_that_is_too_large_is_named() -> None:
    with pytest.raises(UsageError, match="--global-batch 100003 is larger than the training set of mnist-mini"):
        resolve(("flag", {"workers": 4, "global_batch": 100_003}))


def test_a_spec_that_is_resolved_again_with_other_workers_keeps_the_batch_that_was_given() -> None:
    written = tomllib.loads("\n".join(resolve(("flag", {"workers": 4, "batch_size": 32})).lines()))
    assert "global_batch" not in written
    assert resolve(("spec.toml", written), ("flag", {"workers": 8})).spec.update_batch == 256


@pytest.mark.parametrize("kind", ["tokens", "arrays"])
@pytest.mark.parametrize(
    "given", [{"image_size": 32}, {"normalize": True}, {"augment": "crop"}], ids=["image-size", "normalize", "augment"]
)
def test_options_for_images_are_refused_for_other_data(given: Values, kind: str) -> None:
    data = DataInfo("mine.py:load", (64,), 256, 1000, 100, "", kind=kind, target_shape=(64,))
    spec = resolve(("flag", {"data": "json:loads", "model": "json:loads", "task": "language-model"})).spec
    check_data(spec, data)
    flag = "--" + min(given).replace("_", "-")
    with pytest.raises(UsageError, match=f"^{flag} is for images, but json:loads has {kind}: leave it out"):
        check_data(replace(spec, **given), data)


def test_a_model_of_images_is_refused_for_rows_of_numbers() -> None:
    rows = DataInfo("mine.py:load", (13,), 3, 1000, 100, "", kind="arrays")
    check_data(resolve(("flag", {"data": "json:loads", "model": "mlp"})).spec, rows)
    with pytest.raises(UsageError, match=r"^model resnet18 takes images .* has samples of shape \[13\]"):
        check_data(resolve(("flag", {"data": "json:loads", "model": "resnet18"})).spec, rows)


def test_a_model_is_refused_for_data_of_another_kind() -> None:
    says = "^model gpt takes tokens, but mnist has images: use one of mnist-cnn, .*, or your own$"
    with pytest.raises(UsageError, match=says):
        resolve(("flag", {"model": "gpt", "data": "mnist"}))
    with pytest.raises(UsageError, match="model mlp takes images, but shakespeare has tokens: use one of gpt, gpt-10m"):
        resolve(("flag", {"model": "mlp", "data": "shakespeare"}))
    rows = DataInfo("mine.py:load", (64,), 9, 1000, 100, "", kind="arrays", input_dtype="int64", target_shape=(64,))
    check_data(resolve(("flag", {"data": "json:loads", "model": "gpt", "task": "language-model"})).spec, rows)
