"""Whether a difference is real."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up import steady, write_run
from test_runs import check_read

from paceline.analysis.compare import compare, slower
from paceline.analysis.scaling import Group, group
from paceline.cli.main import main


def repeats(folder: Path, means: tuple[float, ...], **options: object) -> Group:
    runs = [check_read(write_run(folder / str(i), steady(mean, seed=i), seed=i, **options))  # type: ignore[arg-type]
            for i, mean in enumerate(means)]  # fmt: skip
    [one] = group(runs)
    return one


def test_twice_as_fast_is_real_and_what_differs_is_named(tmp_path: Path) -> None:
    found = compare(
        repeats(tmp_path / "a", (0.2, 0.21, 0.2)), repeats(tmp_path / "b", (0.1, 0.1, 0.11), spec={"lr": 0.5})
    )
    assert found.faster.value == pytest.approx(2.0, rel=0.1)
    assert found.verdict.startswith("the second is significantly faster")
    assert [(each.name, each.first, each.second) for each in found.differences] == [("lr", 0.01, 0.5)]


def test_doubts_of_one_kind_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four runs that were all disturbed, two of them by as much."""
    repeats(tmp_path / "a", (0.2, 0.21), others=1.0)
    repeats(tmp_path / "b", (0.2, 0.21), others=2.0)
    for one, two, said in (
        ("a", "b", "But, in 4 runs, for example 0: other processes used 1.0 of 4 cores"),
        ("a", "a", "But: 0, 1, 0 and 1: other processes used 1.0 of 4 cores"),
    ):
        assert main(["compare", str(tmp_path / one), str(tmp_path / two)]) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("But")]
        assert line.startswith(said)


def test_disturbed_runs_have_no_verdict(tmp_path: Path) -> None:
    quiet = repeats(tmp_path / "a", (0.2, 0.21, 0.2), others=0.0)
    busy = repeats(tmp_path / "b", (0.1, 0.1, 0.11), others=2.0)
    for one, two in ((quiet, busy), (busy, quiet)):
        found = compare(one, two)
        assert found.verdict.startswith("no verdict, because other programs disturbed these runs")
        assert "significantly" not in found.verdict


def test_repeats_that_differ_more_than_the_two_do_show_nothing(tmp_path: Path) -> None:
    found = compare(repeats(tmp_path / "a", (0.08, 0.1, 0.12)), repeats(tmp_path / "b", (0.085, 0.105, 0.125)))
    assert found.verdict.startswith("no significant difference in speed")


def test_five_percent_between_single_runs_is_not_shown(tmp_path: Path) -> None:
    found = compare(repeats(tmp_path / "a", (0.1,)), repeats(tmp_path / "b", (0.095,)))
    assert "runs of one setting vary by as much" in found.verdict


def test_runs_that_are_too_short_have_no_verdict(tmp_path: Path) -> None:
    runs = [check_read(write_run(tmp_path / str(mean), steady(mean, 15))) for mean in (0.1, 0.2)]
    found = compare(*(Group((run,)) for run in runs))
    assert found.verdict.startswith("no verdict, because these runs are too short")


THREE = (0.1, 0.1, 0.1)


@pytest.mark.parametrize(
    ("first", "second", "percent", "expected", "why"),
    [
        (THREE, (0.12, 0.12, 0.12), 5, True, "the second is more than 5 % slower: it is 0.833 times as fast"),
        (
            THREE,
            (0.12, 0.12, 0.12),
            16.5,
            None,
            "whether the second is more than 16.5 % slower: it is 0.83",
        ),
        (THREE, (0.12, 0.12, 0.12), 30, False, "the second is not more than 30 % slower"),
        (THREE, THREE, 5, False, "the second is not more than 5 % slower"),
        (THREE, (0.08, 0.08, 0.08), 0, False, "the second is not more than 0 % slower"),
        (THREE, (0.09, 0.12, 0.15), 5, None, "make more runs of both, or longer ones"),
        ((0.1,), (0.13,), 5, True, "the second is more than 5 % slower"),
        ((0.1,), (0.12,), 10, None, "one run of each does not tell how much runs differ"),
    ],
)
def test_slower_is_what_the_whole_interval_says(
    first: tuple[float, ...],
    second: tuple[float, ...],
    percent: float,
    expected: bool | None,
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = slower(compare(repeats(tmp_path / "a", first), repeats(tmp_path / "b", second)), percent)
    assert found.is_slower is expected
    assert why in found.why
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", *folders, "--fail-if-slower", str(percent)]) == (1 if expected else 0)
    assert found.why[1:] in capsys.readouterr().out.splitlines()[-1]
    assert main(["compare", *folders]) == 0


def test_runs_that_are_disturbed_or_too_short_do_not_tell_what_is_slower(tmp_path: Path) -> None:
    busy = compare(repeats(tmp_path / "a", THREE), repeats(tmp_path / "b", (0.2, 0.2, 0.2), others=2.0))
    short = compare(*(Group((check_read(write_run(tmp_path / str(mean), steady(mean, 15))),)) for mean in (1, 9)))
    for found, why in ((busy, "other programs disturbed these runs"), (short, "these runs are too short")):
        assert slower(found, 5).is_slower is None
        assert why in slower(found, 5).why


@pytest.mark.parametrize("percent", ["-1", "100", "nan", "much"])
def test_a_limit_is_a_percentage(percent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", str(tmp_path), str(tmp_path), f"--fail-if-slower={percent}"])
    assert f"{percent!r} is not a number from 0 to 100" in capsys.readouterr().err


def test_the_verb_prints_it_and_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", steady(0.2))
    write_run(tmp_path / "b", steady(0.1, seed=1), workers=2, cores=1)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "workers         1 -> 2" in said
    assert "significantly faster" in said
    assert "share 1 core:" in said
    (tmp_path / "none").mkdir()
    for wrong in ("none", "nowhere", "."):
        assert main(["compare", str(tmp_path / "a"), str(tmp_path / wrong)]) == 2
    assert "has runs of 2 settings" in capsys.readouterr().err
