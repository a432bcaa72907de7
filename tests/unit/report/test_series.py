"""What lines are called, which panel they are in, and how they look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_experiments import MadeUp, write

from paceline.analysis.setting import Fact, Setting, distinguishing
from paceline.analysis.study import Study, read_study
from paceline.emulation.table import device
from paceline.report.charts_learning import in_lines
from paceline.report.charts_over_time import MOST_POINTS, thinned
from paceline.report.figure import COLOURS, DASHES, MARKERS, doublings, whole_numbers
from paceline.report.series import SAME_PANEL, arrange, looks, name, natural, short_names
from paceline.report.strands import by_batch, by_workers, few_servers, side_by_side, words
from paceline.spec import FIELDS


def study_of(folder: Path, *runs: MadeUp) -> Study:
    for number, run in enumerate(runs):
        write(folder / f"{number}", run)
    return read_study([folder])


def of(**texts: str) -> Setting:
    return Setting({name: Fact(text, text, FIELDS[name].metadata["affects"]) for name, text in texts.items()})


def test_a_name_has_only_what_tells_apart() -> None:
    ring = of(model="vgg16", strategy="ring", servers="", transport="gloo")
    server = of(model="vgg16", strategy="ps-sync", servers="1 server", transport="zmq")
    assert distinguishing([ring, server]) == ["strategy"], "the rest follows from it"
    servers = server.saying("servers", "2 servers")
    keys = distinguishing([ring, server, servers])
    assert [name(each, keys) for each in (ring, server, servers)] == [
        "ring",
        "ps-sync, 1 server",
        "ps-sync, 2 servers",
    ]
    assert distinguishing([ring, ring]) == []
    assert distinguishing([ring, server], without=["strategy"]) == ["servers"]


def test_a_name_has_only_what_tells_it_apart_within_its_strategy() -> None:
    given = [("allreduce", "2 workers", "1 thread"), ("sequential", "1 worker", "1 thread"),
             ("sequential", "1 worker", "2 threads")]  # fmt: skip
    keys = ("strategy", "workers", "threads")
    assert short_names([of(**dict(zip(keys, each, strict=True))) for each in given], keys) == [
        "allreduce, 2 workers",
        "sequential, 1 worker, 1 thread",
        "sequential, 1 worker, 2 threads",
    ]


def test_numbers_in_names_sort_as_numbers() -> None:
    given = ["resnet152", "vgg16", "resnet50", "sequential", "batch 1,024", "batch 64"]
    assert sorted(given, key=natural) == ["batch 64", "batch 1,024", "resnet50", "resnet152", "vgg16", "sequential"]
    links = ["16 Gbit/s", "1.5 Gbit/s", "500 Mbit/s"]
    assert sorted(links, key=natural) == links[::-1]


@pytest.mark.parametrize(
    ("compute", "said"),
    [("emulated:k80", "k80"), ("emulated:0.175", "0.175 s"), ("emulated:runs/mine/", "as in mine")],
)
def test_what_is_emulated_is_said_shortly(compute: str, said: str) -> None:
    assert device(compute) == said


def test_looks_differ_also_without_colours() -> None:
    many = [of(strategy=f"s{i}", servers=f"{j}") for i in range(7) for j in range(5)]
    found = looks(many, ["strategy", "servers"], [])
    assert len({look.colour for look in found}) == len(COLOURS)
    assert len({(look.dash, look.marker) for look in found}) == 35 == len(DASHES) * len(MARKERS)
    assert [look.rank for look in found] == list(range(1, 36))


def test_a_name_cannot_be_a_tag() -> None:
    assert name(of(model="<b>&"), ["model"]) == "&lt;b&gt;&amp;"


def test_settings_of_all_kinds_are_in_one_strand(tmp_path: Path) -> None:
    """Strong scaling, weak scaling, and a setting that has no baseline."""
    study = study_of(
        tmp_path,
        MadeUp(steps=12),
        *(MadeUp(strategy="ring", workers=n, steps=12) for n in (2, 4)),
        *(MadeUp(strategy="ring", workers=n, batch=128 // n, steps=12) for n in (2, 4)),
        MadeUp(model="resnet18", strategy="ring", workers=2, steps=12),
    )
    strands = by_workers(study)
    assert sorted(len(strand.groups) for strand in strands) == [1, 3, 3]
    assert {id(one) for strand in strands for one in strand.groups} == {id(one) for one in study.groups}
    assert sorted(strand.setting.text("batch_size") for strand in strands) == [
        "batch 128",
        "batch 128 each",
        "batch 128 in all",
    ]


def test_where_workers_do_not_differ_batches_are_side_by_side(tmp_path: Path) -> None:
    study = study_of(tmp_path, *(MadeUp(batch=batch, steps=12) for batch in (256, 32, 64)))
    along, [strand] = side_by_side(study)
    assert along == "batch_size"
    assert [one.first.summary.batch_size for one in strand.groups] == [32, 64, 256]
    assert by_batch(study) == [strand]


def test_batches_are_side_by_side_where_that_takes_fewer_rows(tmp_path: Path) -> None:
    runs = [MadeUp(batch=batch, steps=steps) for batch, steps in ((32, 12), (64, 10), (256, 9))]
    study = study_of(tmp_path, *runs, *(MadeUp(strategy="ring", workers=2, batch=n, steps=12) for n in (16, 64)))
    along, strands = side_by_side(study)
    assert along == "batch_size"
    assert sorted(len(strand.groups) for strand in strands) == [2, 3]
    assert [len(strand.groups) for strand in by_batch(study)] == [2], "lengths differ"


def test_of_many_servers_the_fewest_and_the_most(tmp_path: Path) -> None:
    runs = [MadeUp(strategy="ps-sync", servers=s, workers=2, nodes=s + 2, steps=12) for s in (1, 2, 4)]
    nodes = [MadeUp(strategy="ring", workers=4, nodes=nodes, steps=12) for nodes in (1, 2, 4)]
    study = study_of(tmp_path, *runs, *nodes)
    kept = few_servers(by_workers(study))
    assert sorted(strand.setting.text("servers") for strand in kept) == ["", "", "", "1 server", "4 servers"]


def test_links_and_overlap_are_no_number_of_servers(tmp_path: Path) -> None:
    """One server at other links, and with other gradients, is not one of many servers of these."""
    given: dict[str, Any] = {"strategy": "ps-sync", "workers": 2, "steps": 12, "compute": "emulated:k80"}
    runs = [MadeUp(servers=s, nodes=s + 2, **given) for s in (1, 2, 4)]
    runs += [MadeUp(servers=1, nodes=3, bits=1e8, **given), MadeUp(servers=1, nodes=3, shrink=8, **given)]
    kept = few_servers(by_workers(study_of(tmp_path, *runs)))
    said = [tuple(each.setting.text(name) for name in ("servers", "links", "links_as_of")) for each in kept]
    assert sorted(said) == [
        ("1 server", "links of 1 Gbit/s", ""),
        ("1 server", "links of 1 Gbit/s", "links as of 8 Gbit/s"),
        ("1 server", "links of 100 Mbit/s", ""),
        ("4 servers", "links of 1 Gbit/s", ""),
    ]


def test_many_panels_are_on_several_pages(tmp_path: Path) -> None:
    runs = [MadeUp(model=f"m{i}", strategy=strategy, workers=2, steps=12)
            for i in range(3) for strategy in ("ring", "gather", "allreduce")]  # fmt: skip
    study = study_of(tmp_path, *runs)
    sheets = arrange(study, by_workers(study), words, None, without=("workers",))
    assert [sheet.name for sheet in sheets] == ["m0", "m1", "m2"]
    assert [list(sheet.panels) for sheet in sheets] == [["allreduce", "gather", "ring"]] * 3
    [together] = arrange(study, study.groups, lambda one: one.setting, ("model",))
    assert list(together.panels) == ["m0", "m1", "m2"]
    assert [styled.label for styled in together.panels["m0"]] == ["allreduce", "gather", "ring"]
    assert together.panels["m1"][2].full == "m1, ring"


def test_pages_are_by_links_and_the_slowest_come_first(tmp_path: Path) -> None:
    runs = [MadeUp(model=f"m{i}", strategy="ring", workers=2, nodes=2, steps=12, compute="emulated:k80", shrink=shrink)
            for i in range(4) for shrink in (16, 2)]  # fmt: skip
    study = study_of(tmp_path, *runs)
    sheets = arrange(study, by_workers(study), words, SAME_PANEL, without=("workers",))
    assert [sheet.name for sheet in sheets] == ["links as of 2 Gbit/s", "links as of 16 Gbit/s"]
    assert [list(sheet.panels) for sheet in sheets] == [["m0", "m1", "m2", "m3"]] * 2


def test_too_many_lines_are_divided_so_that_panels_are_few(tmp_path: Path) -> None:
    """By strategy, into two, and not by the batch size, into eight."""
    runs = [
        MadeUp(strategy=strategy, workers=workers, batch=batch, steps=12)
        for strategy, workers in (("sequential", 1), ("ring", 2))
        for batch in (8, 16, 32, 64, 128, 256, 512, 1024)
    ]
    study = study_of(tmp_path, *runs)
    [sheet] = arrange(study, study.groups, lambda one: one.setting, SAME_PANEL)
    assert {title: len(part) for title, part in sheet.panels.items()} == {"ring": 8, "sequential": 8}


def test_long_series_keep_their_mean() -> None:
    seconds, values = np.arange(10_000.0), np.sin(np.arange(10_000.0)) + 2
    values[:80] = np.nan
    x, y = thinned(seconds, values)
    assert len(x) == len(y) == MOST_POINTS
    assert x[-1] == seconds[-1]
    assert np.nanmean(y) == pytest.approx(np.nanmean(values), abs=0.01)
    assert np.isfinite(y[1:]).all()
    assert thinned(seconds[:5], values[:5])[0].tolist() == [0, 1, 2, 3, 4]


def test_ticks_are_whole_numbers_or_what_was_run() -> None:
    assert whole_numbers("workers", [2, 6])["ticktext"] == ["1", "2", "3", "4", "5", "6"]
    assert whole_numbers("workers", [2, 64])["ticktext"] == ["1", "2", "64"]
    assert doublings("batch size, samples", [8192, 32, 32])["tickvals"] == [32, 8192]


def test_a_name_beside_a_bar_is_broken_between_its_parts() -> None:
    assert in_lines("ring, 4 workers") == "ring, 4 workers"
    assert in_lines("reduce-bcast, 8 workers, 2 nodes") == "reduce-bcast,<br>8 workers, 2 nodes"
