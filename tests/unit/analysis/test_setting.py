"""A setting's facts, how two of them differ, and what one is called among others."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import steady, write_run
from test_runs import check_read

from paceline.analysis.scaling import group
from paceline.analysis.setting import MACHINE, NETWORK, Setting, setting_from, shared
from paceline.options import AFFECTS, DIVISION, LEARNING, LENGTH, NOTHING, PROBLEM, in_words, option
from paceline.spec import FIELDS, OWN
from paceline.strategies import table
from paceline.strategies.base import Strategy
from paceline.strategies.table import TABLE

SOURCE = Path(__file__).parents[3] / "src" / "paceline"


def of(strategy: str, environment: dict[str, Any] | None = None, nodes: int = 1, **options: Any) -> Setting:
    """A setting with defaults for all that is not given."""
    names = [name for name in FIELDS if name not in OWN or name in TABLE[strategy].names]
    values: dict[str, Any] = {name: FIELDS[name].default for name in names}
    values |= {"strategy": strategy, "workers": 1 if TABLE[strategy].single else 2, "device": "cpu"} | options
    parts = values.get("stages") or values.get("tensor") or 1
    return setting_from(values, environment, nodes, values["workers"] // parts)


def test_every_option_says_what_it_affects() -> None:
    found: dict[str, set[str]] = {kind: set() for kind in AFFECTS}
    for name, made in FIELDS.items():
        found[made.metadata["affects"]].add(name)
    saving = {"resume", "checkpoint_every", "checkpoint_seconds", "keep_checkpoints", "on_nan"}
    assert {
        "seed",
        "name",
        "output_dir",
        "timeout",
        "log_every",
        "check_replicas",
        "record_norms",
        "elastic",
        "tensorboard",
        *saving,
    } == found[NOTHING]
    assert {"epochs", "steps", "test", "validation", "evaluate_every", "patience"} == found[LENGTH]
    assert {"model", "data", "optimizer", "dtype", "compute", "shrink", "sync_batchnorm"} <= found[PROBLEM]
    assert {"lr", "momentum", "weight_decay", "staleness_lr"} <= found[LEARNING]
    assert {"strategy", "workers", "batch_size", "transport", "overlap", "stages", "sync_every"} <= found[DIVISION]


def test_facts_are_by_what_they_affect(tmp_path: Path) -> None:
    machine = {"processor": "x", "torch": "2.1", "lab": {"nodes": [{"up": 10**9, "down": 10**9}] * 2}}
    one = of("ring", machine, 2, steps=5, seed=7, lr=0.1)
    assert {"processor", "torch"} == one.only(MACHINE).facts.keys()
    assert {"lab", "links", "mtu", "racks", "faults"} == one.only(NETWORK).facts.keys()
    assert {"epochs", "steps", "test", "validation", "evaluate_every", "patience"} == one.only(LENGTH).facts.keys()
    assert one.only(LEARNING).get("lr") == 0.1
    assert "seed" not in one.facts
    assert one.key() != of("ring", machine, 2, steps=6, lr=0.1).key()
    assert one.key((PROBLEM, MACHINE)) == of("ps-sync", machine, 2, steps=6, lr=0.2, servers=1).key((PROBLEM, MACHINE))
    assert one.key((PROBLEM, MACHINE)) != of("ring", machine, 2, dtype="float64").key((PROBLEM, MACHINE))
    assert (
        of("ring", sync_batchnorm=True).key((PROBLEM,))
        != of("sequential").key((PROBLEM,))
        == of("ring").key((PROBLEM,))
    )


def test_what_differs_is_named_and_what_is_shared_is_kept() -> None:
    one, two = of("ring", lr=0.1, overlap="on"), of("ring", lr=0.2, overlap="on", threads=2)
    assert sorted(one.difference(two)) == sorted(two.difference(one)) == ["lr", "threads"]
    assert one.difference(one) == []
    both = shared([one, two])
    assert both.text("overlap") == "overlap on"
    assert not {"lr", "threads"} & both.facts.keys()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("workers", 1, "1 worker"),
        ("batch_size", 2048, "batch 2,048"),
        ("microbatches", 8, "8 micro-batches"),
        ("epochs", 3, "3 epochs"),
        ("bucket_mb", 4.0, "buckets of 4 MB"),
        ("lr", 0.012345678, "learning rate 0.012345678"),
        ("warmup_epochs", 1.0, "warm-up of 1 epoch"),
        ("hidden", [256, 64], "hidden layers of 256 and 64"),
        ("encrypt", True, ""),
        ("encrypt", False, "no encryption"),
        ("recompute", True, "recomputation"),
        ("cut", "features.3", "cut after features.3"),
        ("compute", "emulated:k80", "emulated compute (k80)"),
        ("shrink", 32, "gradients 32 times smaller"),
        ("steps", None, ""),
    ],
)
def test_options_are_said_as_people_say_them(name: str, value: object, said: str) -> None:
    assert in_words(name, value, FIELDS[name]) == said


def test_an_option_without_words_is_said_by_its_name() -> None:
    assert in_words("how_far", 2) == "how far 2"
    assert in_words("how_far", True, _field()) == "how far"


def _field() -> Any:
    @dataclass
    class Options:
        how_far: bool = option(False, "")

    return Options.__dataclass_fields__["how_far"]


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["mlp", "vgg16"]),
    "dtype": st.sampled_from(["float32", "float64"]),
    "lr": st.sampled_from([0.1, 0.100001]),
    "hidden": st.sampled_from([None, [8], [8, 8]]),
    "normalize": st.sampled_from([None, True, False]),
    "image_size": st.sampled_from([None, 64]),
    "batch_size": st.sampled_from([32, 1024]),
    "global_batch": st.sampled_from([None, 33]),
    "threads": st.sampled_from([None, 1, 2]),
    "steps": st.sampled_from([None, 10]),
    "test": st.booleans(),
    "shrink": st.sampled_from([1, 8]),
    "compute": st.sampled_from(["real", "emulated:k80"]),
    "overlap": st.sampled_from(["auto", "on", "off"]),
    "sync_batchnorm": st.booleans(),
    "servers": st.sampled_from([1, 2]),
    "encrypt": st.booleans(),
    "staleness": st.sampled_from([1, 4]),
    "averaging": st.sampled_from([None, "ring"]),
    "memory": st.sampled_from([None, "2GB"]),
    "cut": st.sampled_from(["measured", "layers", "a"]),
    "microbatches": st.sampled_from([None, 4]),
    "schedule": st.sampled_from(["1f1b", "gpipe"]),
    "sync_every": st.sampled_from([4, 16]),
}


@st.composite
def some_setting(draw: st.DrawFn) -> Setting:
    strategy = draw(st.sampled_from(list(TABLE)))
    method = TABLE[strategy]
    workers = 1 if method.single else draw(st.sampled_from([2, 4]))
    drawn = {name: draw(values) for name, values in OPTIONS.items() if name not in OWN or name in method.names}
    drawn |= {name: draw(st.sampled_from([2, workers])) for name in ("stages", "tensor") if name in method.names}
    link = {"up": draw(st.sampled_from([10**8, 10**9])), "down": 10**9, "speed": draw(st.sampled_from([None, 2.0]))}
    environment = {"torch": draw(st.sampled_from(["2.1", "2.2"])), "processor": draw(st.sampled_from(["x", "y"])),
                   "lab": draw(st.sampled_from([None, {"nodes": [link] * 2, "mtu": 9000}]))}  # fmt: skip
    return of(strategy, environment, draw(st.sampled_from([1, 2])), workers=workers, **drawn)


@settings(max_examples=150, deadline=None)
@given(st.lists(some_setting(), min_size=2, max_size=8))
def test_no_two_settings_have_the_same_name(many: list[Setting]) -> None:
    different = list({one.key(): one for one in many}.values())
    labels = [one.label(different) for one in different]
    assert len(set(labels)) == len(labels), labels
    for one, label in zip(different, labels, strict=True):
        assert label == one.label(reversed(different)), "the order makes no difference"
        assert one.text("strategy") in label


def test_a_plug_in_s_own_option_is_in_names_where_it_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options without declarations make settings of their own, and are said by their names."""

    @dataclass(frozen=True)
    class Options:
        how_often: int = option(1, "steps between two rounds", label="gossip every", unit="step")
        how_far: int = option(1, "neighbours on each side")
        how_loud: int = option(1, "what is printed", affects=NOTHING)

    method = Strategy("whisper", "for a test", "nowhere:prepare", Options)
    monkeypatch.setattr(table, "TABLE", {**TABLE, "whisper": method})
    for name, (made, _) in method.fields().items():
        monkeypatch.setitem(FIELDS, name, made)
        monkeypatch.setitem(OWN, name, (made, int))
    for i, more in enumerate(({}, {"how_often": 4}, {"how_often": 4, "how_far": 2}, {"how_loud": 3})):
        write_run(tmp_path / str(i), steady(0.1, seed=i), workers=2, strategy="whisper", spec=more)
    groups = group(check_read(folder) for folder in sorted(tmp_path.iterdir()))
    assert [one.label(groups) for one in groups] == [
        "whisper, 2 workers, gossip every 1 step, how far 1",
        "whisper, 2 workers, gossip every 4 steps, how far 1",
        "whisper, 2 workers, gossip every 4 steps, how far 2",
    ]
    assert [len(one.runs) for one in groups] == [2, 1, 1]


def test_names_of_settings_are_made_in_one_place() -> None:
    """`Setting.label`: groups and lines pass on what it says, and nobody else lists options."""
    makers, lists, users = set(), set(), set()
    declared = FIELDS.keys() - {"data", "name", "test", "read", "memory", "speed", "validation"}
    for path in [path for room in ("analysis", "report", "bench", "cli") for path in (SOURCE / room).glob("*.py")]:
        where = f"{path.parent.name}/{path.name}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in ("label", "telling", "facets", "in_words"):
                makers.add(f"{where}:{node.name}")
            if isinstance(node, ast.ImportFrom) and {each.name for each in node.names} & {"in_words", "in_words_of"}:
                users |= {where} if node.module in ("paceline.options", "paceline.analysis.setting") else set()
            if isinstance(node, ast.Tuple | ast.List | ast.Set) and where not in ("analysis/setting.py", "cli/cut.py"):
                said = {str(each.value) for each in node.elts if isinstance(each, ast.Constant)} & declared
                if len(said) > 4:
                    lists.add(f"{where}:{node.lineno} {sorted(said)}")
    assert makers == {"analysis/setting.py:label", "analysis/scaling.py:label", "analysis/lines.py:label"}
    assert not lists
    assert users == {"analysis/setting.py", "report/tables.py"}, "a paper's rows are no settings of ours"
