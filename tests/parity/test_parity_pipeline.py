"""A pipeline trains the model that the plain loop trains with the same micro-batches, wherever it is cut."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import divided_models
import parity_cases as cases
import pytest
import torch
from parity_cases import check_trains, distance
from raw_lines import raw_lines
from safetensors.torch import load_file
from worlds import TRANSPORTS, ThreadWorld, Worlds

from paceline.pipeline.plan import StagePlan
from paceline.run.folder import read_summary

STEPS = 10
MICROS = 3
# The last of 5 steps of an epoch has 4 samples of 7: two micro-batches of 2; all others have three, of 2 and 3.
SAMPLES = 7 * 4 + 4
# Model: the side of its images, and what makes it hard.
MODELS = {
    "divided_models:narrow_vgg": 16,
    "divided_models:Inception": 9,
    "parity_cases:TinyNorm": 16,
    "mnist-cnn": 22,
    "divided_models:StackedLstm": 8,
}
SLOW = ("mnist-cnn", "divided_models:StackedLstm")
SCHEDULES = ("one-at-a-time", "gpipe", "1f1b")
TOLERANCE = 1e-10


def values_for(model: str, size: int, **more: Any) -> dict[str, Any]:
    dropout = {"dropout": 0.0} if ":" not in model else {}
    return {
        "model": model, "data": f"synthetic:1x{size}x{size},train={SAMPLES},test=5", "batch_size": 7, "epochs": 2,
        "microbatches": MICROS, "optimizer": "adam", "dtype": "float64", "timeout": 20.0, "cut": "layers", **dropout,
        **more,
    }  # fmt: skip


def whole(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"strategy": "sequential", "workers": 1, "cut": "measured"}


@pytest.mark.parametrize(("transport", "stages"), [("single", 1), *product(TRANSPORTS, (2, 3, 4))])
def test_stages_train_the_model_of_the_plain_loop(
    worlds: Worlds, expected: Any, tmp_path: Path, transport: str, stages: int
) -> None:
    """Every model in 2, 3 and 4 stages, each time with another schedule; slow ones on one transport, others on two."""
    for number, model in enumerate(MODELS):
        turn = transport == "single" or number % 3 == (stages + TRANSPORTS.index(transport)) % 3
        if not turn and (transport != "threads" or model in SLOW):
            continue
        schedule = SCHEDULES[(number + stages) % 3]
        values = values_for(model, MODELS[model], strategy="pipeline", workers=stages, schedule=schedule)
        values |= {"recompute": number % 2 == stages % 2}
        check_trains(worlds.get(transport, stages), tmp_path / model, values, expected(values), TOLERANCE)


def test_a_resnet_in_four_stages_does_too(worlds: Worlds, expected: Any, tmp_path: Path) -> None:
    values = values_for("resnet18", 9, data="synthetic:3x9x9,train=18,test=4", batch_size=4, microbatches=2)
    values |= {"optimizer": "sgd", "lr": 0.05, "strategy": "pipeline", "workers": 4, "recompute": True, "epochs": 1}
    wanted = expected(values)
    assert wanted.weights["bn1.num_batches_tracked"] == 4 * 2 + 1
    check_trains(worlds.get("gloo", 4), tmp_path, values, wanted, TOLERANCE)


@pytest.mark.parametrize(
    ("transport", "averaging"),
    [("threads", "allreduce"), ("threads", "ring"), ("threads", "reduce-bcast"), ("threads", "gather"),
     ("gloo", "ring"), ("mpi", "allreduce")],
)  # fmt: skip
def test_replicas_of_a_pipeline_train_it_too(
    worlds: Worlds, expected: Any, tmp_path: Path, transport: str, averaging: str
) -> None:
    # Global batches of 14: of the last one's 1 sample, one replica has none; of its 3, the replicas have 1 and 2.
    for model, samples in (
        ("divided_models:narrow_vgg", 29),
        ("parity_cases:TinyNorm", 29),
        ("parity_cases:TinyNorm", 31),
    ):
        values = values_for(model, 16, data=f"synthetic:1x16x16,train={samples},test=5")
        values |= {"strategy": "pipeline", "workers": 4, "stages": 2, "averaging": averaging, "check_replicas": 4}
        values |= {"epochs": 3, "bucket_mb": 0.005}
        folder = tmp_path / f"{model}-{samples}"
        check_trains(worlds.get(transport, 4), folder, values, expected(values), TOLERANCE)


CUTS = [(2, "frozen"), (3, "gt,second"), (4, "mul_,gt,first")]


@pytest.mark.parametrize(
    ("transport", "stages", "cut"), [*(("threads", *each) for each in CUTS), ("gloo", *CUTS[2]), ("mpi", *CUTS[2])]
)
def test_whatever_is_a_tensor_can_cross_a_cut(
    worlds: Worlds, expected: Any, tmp_path: Path, transport: str, stages: int, cut: str
) -> None:
    """The images, changed in place; what no gradient comes back for; a mask of truth values."""
    values = values_for("divided_models:Odd", 9, strategy="pipeline", workers=stages, recompute=True, cut=cut)
    check_trains(worlds.get(transport, stages), tmp_path, values, expected(values), TOLERANCE)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_layers_share_stays_one(expected: Any, tmp_path: Path, schedule: str) -> None:
    values = values_for("divided_models:Shared", 6, strategy="pipeline", workers=2, schedule=schedule, cut="body.3")
    values |= {"optimizer": "sgd"}
    check_trains(ThreadWorld(2), tmp_path, values, expected(values), TOLERANCE)
    found = load_file(tmp_path / "model.safetensors")
    assert found["first.weight"].equal(found["body.0.weight"])


def test_replicas_start_from_the_same_weights_whatever_a_layer_draws(worlds: Worlds, tmp_path: Path) -> None:
    values = values_for("divided_models:Unseeded", 6, strategy="pipeline", workers=4, stages=2, check_replicas=1)
    assert worlds.get("gloo", 4).run(cases.train_here, folder=str(tmp_path), values=values | {"steps": 2}) == [2] * 4


CUSTOM = values_for("divided_models:Custom", 12, batch_size=6, microbatches=1) | {"optimizer": "sgd", "cut": "measured"}


def test_weights_that_a_constructor_sets_itself_are_trained_by_whole_models_and_refused_in_parts(
    worlds: Worlds, expected: Any, tmp_path: Path
) -> None:
    """In parts they are trained from a file; what the whole models start from is what torch gives."""
    torch.manual_seed(0)
    plain = divided_models.Custom(12, 10).state_dict()
    start = load_file(expected.start(CUSTOM))
    assert all(torch.equal(start[name], value) for name, value in plain.items())
    check_trains(ThreadWorld(1), tmp_path / "1", CUSTOM | {"strategy": "sequential"}, expected(CUSTOM), TOLERANCE)
    ring = CUSTOM | {"strategy": "ring", "workers": 2, "batch_size": 3}
    check_trains(worlds.get("gloo", 2), tmp_path / "2", ring, expected(ring), TOLERANCE)
    for strategy in ("pipeline", "tensor"):
        values = CUSTOM | {"strategy": strategy, "workers": 2}
        for message in worlds.get("gloo", 2).run(cases.refused_here, folder=str(tmp_path / strategy), values=values):
            assert "the constructor sets weight of a (Linear) elsewhere" in message
            assert message.endswith("or use a strategy that does not split the model")
        values |= {"weights": str(expected.start(CUSTOM))}
        check_trains(ThreadWorld(2), tmp_path / strategy, values, expected(CUSTOM), TOLERANCE)


def test_dropout_is_the_same_when_it_is_computed_again(worlds: Worlds, tmp_path: Path) -> None:
    values = values_for("mnist-cnn", 22, strategy="pipeline", workers=3, schedule="gpipe") | {"dropout": 0.5}
    found = []
    for recompute in (False, True):
        folder = tmp_path / str(recompute)
        worlds.get("gloo", 3).run(cases.train_here, folder=str(folder), values=values | {"recompute": recompute})
        found.append(load_file(folder / "model.safetensors"))
    assert distance(*found) <= TOLERANCE


def test_options_that_must_not_change_a_pipelines_result_do_not(worlds: Worlds, tmp_path: Path) -> None:
    """Cuts that were measured, a validation set, weights to start from."""
    start = tmp_path / "start.safetensors"
    values = values_for("divided_models:Inception", 9) | {"validation": 0.25, "epochs": 2}
    assert ThreadWorld(1).run(cases.train_here, folder=str(tmp_path / "0"), values=whole(values) | {"seed": 5})
    (tmp_path / "0" / "model.safetensors").rename(start)
    values |= {"weights": str(start)}
    more = {"strategy": "pipeline", "workers": 3, "cut": "measured"}
    steps = ThreadWorld(1).run(cases.train_here, folder=str(tmp_path / "1"), values=whole(values))
    assert worlds.get("gloo", 3).run(cases.train_here, folder=str(tmp_path / "3"), values=values | more) == steps * 3
    one, three = (load_file(tmp_path / n / "model.safetensors") for n in ("1", "3"))
    assert distance(one, three) <= TOLERANCE


def test_the_bytes_that_stages_send_are_those_of_the_plan(worlds: Worlds, tmp_path: Path) -> None:
    values = values_for("resnet18", 9, data="synthetic:3x9x9,train=24,test=4", batch_size=6, steps=3)
    values |= {"strategy": "pipeline", "workers": 4, "dtype": "float32"}
    worlds.get("gloo", 4).run(cases.train_here, folder=str(tmp_path), values=values)
    plan = StagePlan.from_dict(json.loads((tmp_path / "plan.json").read_text()))
    summary = read_summary(tmp_path)
    assert summary is not None
    over = [stage.forward_bytes * MICROS * 3 for stage in plan.stages]  # as much comes back
    assert summary.bytes_sent == [ahead + behind for ahead, behind in zip(over, [0, *over], strict=False)]
    assert summary.bytes_received == summary.bytes_sent


def test_a_timeline_has_every_pass_of_every_micro_batch(worlds: Worlds, tmp_path: Path) -> None:
    values = values_for("mnist-cnn", 22, strategy="pipeline", workers=2, batch_size=6, steps=2, recompute=True)
    worlds.get("gloo", 2).run(cases.train_here, folder=str(tmp_path), values=values)
    for rank, passes in enumerate([["forward", "recompute", "backward"], ["forward", "backward"]]):
        lines = [line for line in raw_lines(tmp_path / f"rank_{rank}.jsonl") if line["kind"] == "timeline"]
        assert [line["step"] for line in lines] == [0, 1]
        for line in lines:
            done = [(what, micro) for what, micro, _, _ in line["events"] if what in passes]
            assert sorted(done) == sorted(product(passes, range(MICROS)))
            ends = [start + seconds for _, _, start, seconds in line["events"]]
            assert ends == sorted(ends)
