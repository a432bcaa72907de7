"""Runs of pipelines with known answers: where stages' time goes, how idle they are, what their plan had said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up import steady, write_run
from made_up_pipeline import Stages, write_pipeline
from test_runs import check_read

from paceline.analysis.breakdown import by_rank
from paceline.analysis.checks import check_losses
from paceline.analysis.findings import findings
from paceline.analysis.lines import all_lines
from paceline.analysis.pipeline import beside_plan, idle, pipeline, rows
from paceline.analysis.resources import rank_series
from paceline.analysis.runs import LeftOut, Run, read_run
from paceline.analysis.scaling import curves, group
from paceline.pipeline.schedule import SCHEDULES, bubble

EVEN = (0.01, 0.01, 0.01, 0.01)
UNEVEN = (0.01, 0.02, 0.01)


def a_run(folder: Path, of: Stages, paces: list[float] | None = None, **options: Any) -> Run:
    return check_read(write_pipeline(folder, of, paces or [1.0] * 12, **options))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", [False, True])
def test_equal_stages_without_messages_are_idle_as_in_theory(tmp_path: Path, schedule: str, recompute: bool) -> None:
    found = pipeline(a_run(tmp_path / "a", Stages(EVEN, schedule=schedule, recompute=recompute)))
    assert found
    assert found.theory == bubble(schedule, 4, 8)
    assert found.measured == pytest.approx(found.theory)
    assert found.uneven == pytest.approx(found.theory)


def test_what_is_idle_more_than_in_theory_is_uneven_stages_and_then_messages(tmp_path: Path) -> None:
    """Of three stages one takes twice as long; with 8 micro-batches it works for 0.48 s of 0.54 s."""
    quiet = pipeline(a_run(tmp_path / "a", Stages(UNEVEN, schedule="gpipe")))
    assert quiet
    assert quiet.theory == pytest.approx(2 / 10)
    assert [quiet.uneven, quiet.measured] == pytest.approx([1 - (0.24 + 0.48 + 0.24) / (3 * 0.54)] * 2)
    busy = pipeline(a_run(tmp_path / "b", Stages(UNEVEN, schedule="gpipe", send=0.004)))
    assert busy
    assert busy.uneven == pytest.approx(quiet.uneven)
    assert busy.measured > busy.uneven + 0.05


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_s_idleness_is_its_bubble_where_stages_are_equal(schedule: str) -> None:
    for stages in (1, 2, 5):
        for micros in (1, 3, 12):
            assert idle(schedule, [1.0] * stages, [2.0] * stages, micros) == pytest.approx(
                bubble(schedule, stages, micros)
            )
    slow = idle(schedule, [1.0, 3.0], [2.0, 5.0], 6)
    assert slow > bubble(schedule, 2, 6) or slow == pytest.approx(bubble(schedule, 2, 6))


def test_a_stage_s_time_by_what_it_did(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", Stages(UNEVEN, replicas=2, send=0.001, average=0.03, recompute=True))
    found = pipeline(run)
    assert found
    first, slow, _ = found.stages
    assert slow.seconds["forward"] == slow.seconds["recompute"] == pytest.approx(8 * 0.02)
    assert slow.seconds["backward"] == pytest.approx(2 * 8 * 0.02)
    assert slow.busy == pytest.approx(8 * 0.08)
    assert slow.each("forward") == pytest.approx(0.02)
    assert first.seconds["send"] == pytest.approx(8 * 0.001)
    assert slow.seconds["send"] == pytest.approx(16 * 0.001)
    assert first.seconds["average"] == pytest.approx(0.03)
    for each in found.stages:
        assert sum(each.seconds.values()) == pytest.approx(run.steps[0][0].seconds)


def test_the_first_steps_are_left_out_and_the_typical_one_is_the_median(tmp_path: Path) -> None:
    paces = [9.0, 5.0, 3.0, 1.0, 1.3, 0.9, 1.1, 1.2]
    found = pipeline(a_run(tmp_path / "a", Stages(EVEN), paces))
    assert found
    assert found.steps == (3, 4, 5, 6, 7)
    assert paces[found.typical] == 1.1
    assert found.stages[0].each("forward") == pytest.approx(0.01 * 1.1)
    later = pipeline(a_run(tmp_path / "b", Stages(EVEN), [2.0] * 30 + [1.0] * 40))  # it warms up after what is written
    assert later
    assert later.steps == tuple(range(3, 20))


def test_a_smaller_last_batch_is_another_kind_of_step(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "a", Stages(EVEN), [1.0] * 8)
    path = folder / "rank_0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(x | {"samples": 9} if (x["kind"], x["step"]) == ("step", 5) else x) + "\n"
                            for x in lines))  # fmt: skip
    found = pipeline(check_read(folder))
    assert found
    assert found.steps == (3, 4, 6, 7)


def test_ranks_are_set_on_one_clock(tmp_path: Path) -> None:
    """Rank 1 began its steps 5 ms later."""
    folder = write_pipeline(tmp_path / "a", Stages((0.01, 0.01)), [1.0] * 8)
    path = folder / "rank_1.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(x | {"time": x["time"] + 0.005} if x["kind"] == "timeline" else x) + "\n"
                            for x in lines))  # fmt: skip
    zero, one = rows(check_read(folder), 4)
    assert (zero.stage, one.stage) == (0, 1)
    assert zero.events[0].start == 0
    assert one.events[0].start == pytest.approx(0.005, abs=1e-6)


def test_stages_beside_their_plan(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", Stages(UNEVEN, replicas=2, send=0.001, planned=0.5))
    found = beside_plan(run)
    assert [each.layers for each in found] == [("layer0",), ("layer1",), ("layer2",)]
    slow = found[1]
    assert slow.compute == pytest.approx(0.06 + 0.001 / 8)
    assert slow.planned_compute == pytest.approx(slow.compute / 2)
    assert slow.sending == pytest.approx(0.002)
    assert slow.planned_transfer == pytest.approx(0.001)
    assert [each.cut_bytes for each in found] == [400_000, 200_000, 0]
    assert slow.planned_memory == 6 * 2 * 10**7
    assert slow.memory == 340 * 10**6, "the most of ranks 1 and 4"
    (run.folder / "plan.json").unlink()
    assert beside_plan(check_read(run.folder)) == []


def test_a_plan_for_which_nothing_was_run_predicts_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", Stages(UNEVEN, send=0.001, planned=0.0))
    found = beside_plan(run)
    assert {(each.planned_compute, each.planned_transfer, each.planned_memory) for each in found} == {(None,) * 3}
    assert [each.cut_bytes for each in found] == [400_000, 200_000, 0], "which the model says"
    assert found[1].compute == pytest.approx(0.06 + 0.001 / 8)
    assert found[1].memory == 310 * 10**6


def test_a_run_without_written_events_has_no_pipeline(tmp_path: Path) -> None:
    plain = check_read(write_run(tmp_path / "a", [0.1] * 9, workers=2))
    assert pipeline(plain) is None
    folder = write_pipeline(tmp_path / "b", Stages(EVEN), [1.0] * 9)
    for path in folder.glob("rank_*.jsonl"):
        path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines() if '"timeline"' not in line))
    assert pipeline(check_read(folder)) is None


def spoil_timeline(**values: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "rank_1.jsonl").read_text().splitlines()]
        lines[0] |= values
        (folder / "rank_1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_timeline(events=[["forward", 0, 0.0]]), "each of what, micro, start, seconds"),
        (spoil_timeline(events=[["forward", 0, 0.0, -1.0]]), "rank_1.jsonl: seconds is -1.0"),
        (spoil_timeline(time=None), "rank_1.jsonl: time is None"),
        (lambda folder: (folder / "plan.json").write_text("{"), "plan.json: Expecting"),
        (lambda folder: (folder / "plan.json").write_text(json.dumps(Stages(EVEN[:3]).plan().as_dict())), "3 stages"),
    ],
)
def test_a_damaged_pipeline_is_left_out(tmp_path: Path, spoil: Callable[[Path], None], why: str) -> None:
    folder = write_pipeline(tmp_path / "a", Stages(EVEN), [1.0] * 9)
    spoil(folder)
    found = read_run(folder)
    assert isinstance(found, LeftOut)
    assert why in found.why


def test_parts_of_a_stage_s_step_are_the_step(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", Stages(UNEVEN, replicas=2, send=0.001, average=0.03))
    parts = by_rank(run)
    assert len(parts) == 6
    for rank, each in parts.items():
        assert each.total == pytest.approx(run.steps[rank][0].seconds)
        assert each.compute == pytest.approx(3 * 8 * UNEVEN[rank % 3])
        assert each.slowest == 0
    assert parts[0].bubble > parts[1].bubble > 0
    assert parts[1].communication == pytest.approx(0.016 + 0.03)
    busy = {each.rank: float(each.busy.mean()) for each in rank_series(run)}
    assert busy[1] > busy[0]


def replicas_and_stages(folder: Path) -> list[Run]:
    shapes = [(1, 2), (1, 4), (2, 2), (4, 2)]
    runs = [check_read(write_run(folder / f"one-{batch}", steady(0.1), batch=batch)) for batch in (64, 32, 16)]
    runs += [a_run(folder / f"{replicas}x{stages}", Stages(EVEN[:stages], replicas), batch=64 // replicas)
             for replicas, stages in shapes]  # fmt: skip
    return runs


def test_more_replicas_are_a_line_and_more_stages_of_one_another(tmp_path: Path) -> None:
    found = {tuple(point.workers for point in curve.points): curve
             for curve in curves(group(replicas_and_stages(tmp_path)), "strong")}  # fmt: skip
    assert set(found) == {(2, 4), (2, 4, 8)}
    stages, replicas = found[2, 4], found[2, 4, 8]
    assert [point.group.first.summary.grid.stages for point in stages.points] == [2, 4]
    assert [point.group.first.replicas for point in replicas.points] == [1, 2, 4]
    assert all(curve.baseline.first.summary.batch_size == 64 for curve in found.values())


def test_fixed_work_for_each_worker_is_the_replica_s_batch_over_its_stages(tmp_path: Path) -> None:
    """Two stages and a batch of 64 are set beside one worker's batch of 32."""
    found = curves(group(replicas_and_stages(tmp_path)), "weak")
    beside = {(p.group.first.replicas, p.workers): curve.baseline.first.summary.batch_size
              for curve in found for p in curve.points}  # fmt: skip
    assert beside == {(1, 2): 32, (1, 4): 16, (2, 4): 16}


def test_labels_say_how_a_model_is_divided(tmp_path: Path) -> None:
    shapes = [
        Stages(EVEN[:2], 2),
        Stages(EVEN, 1),
        Stages(EVEN[:2], 2, schedule="gpipe"),
        Stages(EVEN[:2], 2, micros=4),
        Stages(EVEN[:2], 2, recompute=True),
    ]
    runs = [a_run(tmp_path / f"{i}", shape) for i, shape in enumerate(shapes)]
    runs.append(check_read(write_run(tmp_path / "ring", steady(0.1), workers=4)))
    runs += [check_read(write_run(tmp_path / f"tensor-{shards}", steady(0.1), workers=4, strategy="tensor",
                                  tensor=shards, global_batch=128 // shards, averaging="ring",
                                  spec={"tensor": shards, "memory": "2GB"}))
             for shards in (2, 4)]  # fmt: skip
    groups = group(runs)
    assert [one.label(groups) for one in groups] == [
        "pipeline, 2 replicas × 2 stages, 8 micro-batches, 1f1b",
        "pipeline, 4 stages, 8 micro-batches, 1f1b",
        "pipeline, 2 replicas × 2 stages, 8 micro-batches, gpipe",
        "pipeline, 2 replicas × 2 stages, 4 micro-batches, 1f1b",
        "pipeline, 2 replicas × 2 stages, 8 micro-batches, 1f1b, recomputation",
        "ring, 4 workers",
        "tensor, 2 replicas × 2 shards",
        "tensor, 4 shards",
    ]
    assert [one.label(groups[1:2] + groups[5:6]) for one in groups[1:2]] == ["pipeline, 4 stages"]


def test_labels_say_where_it_is_cut_and_how_replicas_average(tmp_path: Path) -> None:
    cuts = ("measured", "layers", "features.3")
    runs = [a_run(tmp_path / cut, Stages(EVEN[:2], 2), spec={"cut": cut}) for cut in cuts]
    runs.append(a_run(tmp_path / "gather", Stages(EVEN[:2], 2), summary={"averaging": "gather"}))
    runs.append(a_run(tmp_path / "small", Stages(EVEN[:2], 2), spec={"memory": "2GB", "speed": "1,0.5"}))
    groups = group(runs)
    assert [one.label(groups).removeprefix("pipeline, 2 replicas × 2 stages, ") for one in groups] == [
        "averaged by ring, cut by measured times",
        "averaged by ring, cut by layers",
        "averaged by ring, cut after features.3",
        "averaged by gather, cut by measured times",
        "averaged by ring, cut by measured times, stages of at most 2GB, stages of speed 1,0.5",
    ]


def test_lines_of_divided_models_have_names(tmp_path: Path) -> None:
    groups = [one for one in group(replicas_and_stages(tmp_path)) if one.workers > 1]
    strong = [line for line in all_lines(groups) if line.kind == "strong"]
    assert {line.label(strong): list(line.groups) for line in strong} == {
        "pipeline, 1 replica": [2, 4],
        "pipeline, 2 stages": [2, 4, 8],
    }


def test_the_summary_says_why_stages_are_idle(tmp_path: Path) -> None:
    def said(name: str, of: Stages) -> str:
        groups = group([a_run(tmp_path / name, of)])
        return "\n".join(each.text for each in findings(groups, [], []) if each.kind == "cost")

    text = said("few", Stages(EVEN, micros=3))
    assert "are idle for 50 % of the time" in text
    assert "1f1b with 3 micro-batches, equal stages would be idle for 50 %" in text
    assert text.endswith("more micro-batches would help most.")
    uneven = said("uneven", Stages((0.01, 0.04), micros=12))
    assert "stages as unbalanced as these for 39 %" in uneven
    assert uneven.endswith("better balanced stages would help most.")
    assert said("slow", Stages(EVEN[:2], micros=12, send=0.02)).endswith("a core for each rank would help most.")
    assert "% waiting for other stages" in text


def test_a_pipeline_s_loss_is_held_against_one_worker_s(tmp_path: Path) -> None:
    spec = {"model": "mlp", "dropout": 0.0, "scale_lr": True}
    one = check_read(write_run(tmp_path / "one", steady(0.1, 20), batch=64, spec=spec))
    same = a_run(tmp_path / "same", Stages(EVEN), batch=64, summary={"steps": 12}, spec=spec)
    assert list(check_losses(group([one, same]))) == [], "they are of other lengths"
    one = check_read(write_run(tmp_path / "short", steady(0.1, 12), batch=64, spec=spec))
    wrong = a_run(tmp_path / "wrong", Stages(EVEN), batch=64, spec=spec, summary={"train_loss": [0.9]})
    assert [warning.about for warning in check_losses(group([one, same, wrong]))] == ["wrong"]
    for properties, warned in (([], ["own"]), (["dropout"], []), (None, [])):
        own, folder = {"model": "mine.py:net", "scale_lr": True}, tmp_path / str(properties)
        known: dict[str, Any] = {"model_properties": properties}
        one = check_read(write_run(folder / "one", steady(0.1, 12), batch=64, spec=own, **known))
        wrong = a_run(folder / "own", Stages(EVEN), batch=64, spec=own, summary=known | {"train_loss": [0.9]})
        assert [warning.about for warning in check_losses(group([one, wrong]))] == warned, properties
    normed = spec | {"model": "resnet18"}
    whole = check_read(write_run(tmp_path / "bn", steady(0.1, 12), batch=64, spec=normed))
    parts = a_run(tmp_path / "bn-parts", Stages(EVEN), batch=64, spec=normed, summary={"train_loss": [0.9]})
    assert list(check_losses(group([whole, parts]))) == [], "batch-norm is over micro-batches"
