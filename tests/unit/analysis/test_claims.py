"""The thesis's claims, on made-up clusters where each holds, fails, holds in part and cannot be told."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_up import steady, write_run
from test_runs import check_read

from paceline.analysis.claim_file import read_claims
from paceline.analysis.claims import claims
from paceline.analysis.runs import Run
from paceline.analysis.scaling import curves, group
from paceline.analysis.verdicts import CONTRADICTED, IN_PART, OPEN, SUPPORTED, Claim
from paceline.errors import UsageError

GRADIENT = 4_000_000.0  # bytes: a million parameters
COMPUTE = 0.5  # seconds of a step, of every model
# Seconds that the gradient takes over a link, one way.
LINKS = {"big": 0.4, "small": 0.004}


def lab(nodes: int, up: int = 10**9) -> dict[str, Any]:
    return {"nodes": [{"name": f"n{i}", "up": up, "down": up, "cpu": None, "speed": 1.0, "rack": 0}
                      for i in range(nodes)]}  # fmt: skip


def seconds(model: str, workers: int, servers: int) -> float:
    """A server's link carries every worker's gradient; a ring's 2(n-1)/n of one."""
    load = workers / servers if servers else 2 * (workers - 1) / workers
    return COMPUTE + load * LINKS[model]


def cluster(
    folder: Path,
    model: str,
    workers: int,
    servers: int = 0,
    *,
    repeats: int = 3,
    step: float | None = None,
    load: float | None = None,  # gradients each way through a server, or through a ring's node
    steps: int = 12,
    spec: dict[str, Any] | None = None,
    **options: Any,
) -> list[Run]:
    """Repeats of one setting, every rank on a node of its own."""
    hosts = [f"n{rank}" for rank in range(servers + workers)]
    each = GRADIENT * (load if load is not None else workers / servers if servers else 2 * (workers - 1) / workers)
    moves = {host: (each, each) if rank < servers or not servers else (GRADIENT, GRADIENT)
             for rank, host in enumerate(hosts)}  # fmt: skip
    mean = step or seconds(model, workers, servers)
    given: dict[str, Any] = {"hosts": hosts, "moves": moves, "lab": lab(len(hosts)), "parameters": 1_000_000,
                             "train_loss": [], "compute": None, **options}  # fmt: skip
    found = []
    for seed in range(repeats):
        name = folder / f"{model}-{workers}-{servers}-{options.get('strategy', '')}-{seed}"
        times = steady(mean, steps, seed, 0.005)
        found.append(check_read(write_run(name, times, workers=workers, servers=servers, seed=seed,
                                          spec={"model": model, **(spec or {})}, **given)))  # fmt: skip
    return found


FILE = Path(__file__).parents[3] / "experiments" / "ps-vs-ring.toml"
DECLARED = read_claims(tomllib.loads(FILE.read_text())["claim"], "claim")


def check(runs: Sequence[Run]) -> dict[str, Claim]:
    groups = group(runs)
    every = [*curves(groups, "strong"), *curves(groups, "weak")]
    return {claim.name: claim for claim in claims(DECLARED, groups, every)}


def verdicts(claim: Claim) -> dict[str, bool | None]:
    return {case.name: case.holds for case in claim.cases}


def megabytes(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"([\d.]+) MB", text)]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Claim]:
    """A big model that a link hardly carries and a small one; one server, and as many as workers."""
    folder, runs = tmp_path_factory.mktemp("study"), []
    for model in LINKS:
        runs += cluster(folder, model, 1, step=COMPUTE)
        for workers in (2, 3, 6):
            runs += cluster(folder, model, workers)
            for servers in (1, 6):
                runs += cluster(folder, model, workers, servers)
    return check(runs)


def test_a_server_levels_off_where_its_link_is_full(study: dict[str, Claim]) -> None:
    claim = study["server-levels-off"]
    assert verdicts(claim) == {
        "big, ps-sync, 1 server": True,
        "big, ps-sync, 6 servers": False,
        "small, ps-sync, 1 server": False,
        "small, ps-sync, 6 servers": False,
    }
    assert claim.verdict == IN_PART
    assert "ps-sync, 1 server: supported for big, contradicted for small" in claim.why
    assert "ps-sync, 6 servers: contradicted for big and small" in claim.why
    assert "from 3 to 6 workers" in claim.cases[0].why
    assert "25 %" in claim.text


def test_a_ring_s_speedup_is_proportional_where_its_model_is_small(study: dict[str, Claim]) -> None:
    claim = study["ring-proportional"]
    assert verdicts(claim) == {"big, ring": False, "small, ring": True}
    efficiency = COMPUTE / seconds("big", 6, 0)
    assert f"6 workers reach {100 * efficiency:.0f} %" in claim.cases[0].why
    assert claim.cases[0].why.endswith("relative to 1")


def test_traffic_at_the_server_is_proportional_to_the_workers(study: dict[str, Claim]) -> None:
    """In bytes; the rate of one whose link is full cannot grow, and that is said beside it."""
    claim = study["server-traffic-grows"]
    found = verdicts(claim)
    assert {label: holds for label, holds in found.items() if "bytes" in label} == {
        f"{model}, ps-sync, {servers}, in bytes per update": True
        for model in LINKS
        for servers in ("1 server", "6 servers")
    }
    assert (found["big, ps-sync, 1 server, as a rate"], found["small, ps-sync, 1 server, as a rate"]) == (False, True)
    assert claim.verdict == IN_PART
    assert "In bytes per update: supported in all 4 cases." in claim.why
    assert "The thesis shows packets per second. Here, it is bytes per update" in claim.text
    assert megabytes(claim.cases[0].why) == pytest.approx([16, 48], rel=0.03)
    assert "through the busiest server with 2 workers" in claim.cases[0].why
    assert "by the kernel's counters" in claim.cases[0].why


def test_traffic_in_a_ring_is_bounded_and_not_constant_to_the_letter(study: dict[str, Claim]) -> None:
    claim = study["ring-traffic-constant"]
    assert verdicts(claim) == {
        f"{model}, ring, {reading}": reading == "bounded"
        for model in LINKS
        for reading in ("bounded", "constant", "as a rate")
    }
    assert claim.verdict == IN_PART
    assert "Bounded: ring: supported for big and small." in claim.why
    [why] = [case.why for case in claim.cases if case.name == "big, ring, constant"]
    assert megabytes(why) == pytest.approx([8, 13.33], rel=0.03)
    assert re.search(r": 1.[67]. times as much for 3 times the workers$", why)
    assert "The thesis shows packets per second. Here, it is bytes per update" in claim.text


def test_a_ring_beats_one_server_and_not_many(study: dict[str, Claim]) -> None:
    claim = study["ring-beats-server"]
    assert verdicts(claim)["big, ps-sync, 1 server, against ring, overlap auto"] is True
    assert verdicts(claim)["big, ps-sync, 6 servers, against ring, overlap auto"] is False
    assert "on 6 nodes instead of 7" in claim.cases[0].why
    several = study["several-servers-win"]
    assert verdicts(several)["big, against ring, overlap auto"] is True
    assert several.cases[0].why.startswith("already with 6 servers")


def test_half_of_odd_counts_is_the_nearest_and_the_ideal_follows(tmp_path: Path) -> None:
    """From 2 to 5 workers 2.5 would be ideal; 30 % more is a fifth of the ideal gain."""
    runs = cluster(tmp_path, "big", 2, 1, step=1.0) + cluster(tmp_path, "big", 5, 1, step=2.5 / 1.3)
    claim = check(runs + cluster(tmp_path, "big", 2))["server-levels-off"]
    assert claim.verdict == SUPPORTED
    assert re.search(r"20 %.* of the ideal gain", claim.why)


def test_claims_can_fail(tmp_path: Path) -> None:
    """A server that sends the same however many ask, a ring whose nodes carry the more, the more there are."""
    runs = []
    for workers in (2, 4):
        runs += cluster(tmp_path, "big", workers, 1, load=1.0)
        runs += cluster(tmp_path, "big", workers, load=float(workers), step=COMPUTE * workers)
    found = check(runs)
    assert found["server-traffic-grows"].verdict == CONTRADICTED
    assert verdicts(found["ring-traffic-constant"]) == {
        "big, ring, bounded": False,
        "big, ring, constant": False,
        "big, ring, as a rate": True,
    }
    assert found["ring-proportional"].verdict == CONTRADICTED
    assert found["ring-proportional"].why.startswith("4 workers reach 50 %")
    assert "relative to 2" in found["ring-proportional"].why
    assert "several-servers-win" not in found


def test_a_ring_of_four_and_six_is_constant(tmp_path: Path) -> None:
    runs = [run for n in (4, 6) for run in cluster(tmp_path, "big", n, step=1.0)] + cluster(tmp_path, "big", 4, 1)
    assert check(runs)["ring-traffic-constant"].verdict == SUPPORTED


def test_one_number_of_workers_tells_nothing_but_who_is_faster(tmp_path: Path) -> None:
    found = check(cluster(tmp_path, "big", 4) + cluster(tmp_path, "big", 4, 1))
    assert {name: claim.verdict for name, claim in found.items()} == {
        "server-levels-off": OPEN,
        "ring-proportional": OPEN,
        "server-traffic-grows": OPEN,
        "ring-traffic-constant": OPEN,
        "ring-beats-server": SUPPORTED,
    }
    assert found["server-levels-off"].why.startswith("Only 4 workers ran")


def test_a_difference_that_runs_do_not_carry_is_not_claimed(tmp_path: Path) -> None:
    near = [*cluster(tmp_path, "big", 4, step=1.0, repeats=1), *cluster(tmp_path, "big", 4, 1, step=1.05, repeats=1)]
    found = check(near)["ring-beats-server"]
    assert found.verdict == OPEN
    assert "Based on 1 run of each setting" in found.why
    short = [run for workers in (2, 4) for run in cluster(tmp_path / "short", "big", workers, 1, steps=3)]
    assert check(short + near)["server-levels-off"].cases[-1].holds is None


def test_an_update_of_one_worker_s_gradient_says_nothing_about_workers(tmp_path: Path) -> None:
    runs = cluster(tmp_path, "big", 2)
    for workers in (2, 4):
        runs += cluster(tmp_path, "big", workers, 1, strategy="ps-async", global_batch=32)
    claim = check(runs)["server-traffic-grows"]
    assert claim.verdict == OPEN
    assert "gradient of one worker" in claim.why


def test_on_one_machine_the_ranks_own_counts_are_used(tmp_path: Path) -> None:
    runs = []
    for workers in (2, 4):
        per_node = int(GRADIENT) * 2 * (workers - 1) // workers * 12
        counted: dict[str, Any] = {"bytes_sent": [per_node] * workers, "bytes_received": [per_node] * workers}
        runs += cluster(tmp_path, "big", workers, hosts=None, moves=None, lab=None, **counted)
    runs += cluster(tmp_path, "big", 2, 1, hosts=None, moves=None, lab=None)
    claim = check(runs)["ring-traffic-constant"]
    assert verdicts(claim) == {
        "big, ring, bounded": True,
        "big, ring, constant": False,
        "big, ring, as a rate": True,
    }
    assert "as counted by the ranks" in claim.cases[1].why


def test_slow_links_are_told_apart(tmp_path: Path) -> None:
    runs = []
    for speed, up in (("fast", 10**9), ("slow", 10**8)):
        for workers in (2, 4):
            runs += cluster(tmp_path / speed, "big", workers, 1, lab=lab(workers + 1, up))
            runs += cluster(tmp_path / speed, "big", workers, lab=lab(workers, up))
    labels = {case.name for case in check(runs)["ring-beats-server"].cases}
    assert labels == {
        f"big, ps-sync, 1 server, links of {speed}, against ring, overlap auto" for speed in ("1 Gbit/s", "100 Mbit/s")
    }


def test_a_fixed_global_batch_is_a_course_too(tmp_path: Path) -> None:
    runs = []
    for workers in (2, 4):
        runs += cluster(tmp_path, "big", workers, 1, batch=64 // workers)
        runs += cluster(tmp_path, "big", workers, batch=64 // workers)
    assert len(check(runs)["server-levels-off"].cases) == 1


def test_a_claim_about_settings_that_did_not_run_is_left_out(tmp_path: Path) -> None:
    assert check(cluster(tmp_path, "big", 2)).keys() == {"ring-proportional", "ring-traffic-constant"}
    assert check(cluster(tmp_path, "big", 2, 1)).keys() == {"server-levels-off", "server-traffic-grows"}
    assert check([]) == {}


def test_what_holds_where_it_can_be_told_does_not_hold_everywhere(tmp_path: Path) -> None:
    runs = []
    for model, most in (("big", 4), ("small", 2)):
        runs += [run for n in (2, 4) if n <= most for run in cluster(tmp_path, model, n, 1, step=n / 2)]
        runs += cluster(tmp_path, model, 2)
    claim = check(runs)["server-levels-off"]
    assert verdicts(claim) == {"big, ps-sync, 1 server": True, "small, ps-sync, 1 server": None}
    assert claim.verdict == IN_PART
    assert claim.why.startswith("Supported in 1 of 2 cases; the others are undecided.")


def test_a_claim_that_fails_in_half_of_its_cases_and_is_open_in_the_others_is_open(tmp_path: Path) -> None:
    runs = [run for n in (2, 4) for run in cluster(tmp_path, "big", n, 1, step=1.0)]
    runs += cluster(tmp_path, "small", 2, 1) + cluster(tmp_path, "big", 2)
    claim = check(runs)["server-levels-off"]
    assert verdicts(claim) == {"big, ps-sync, 1 server": False, "small, ps-sync, 1 server": None}
    assert claim.verdict == OPEN
    assert claim.why.startswith("Contradicted in 1 of 2 cases; the others are undecided.")
    more = [run for n in (2, 4) for run in cluster(tmp_path, "third", n, 1, step=1.0)]
    assert check(runs + more)["server-levels-off"].verdict == CONTRADICTED


@pytest.mark.parametrize(("repeats", "verdict"), [(1, OPEN), (2, OPEN), (3, SUPPORTED)])
def test_near_a_threshold_few_runs_tell_nothing(tmp_path: Path, repeats: int, verdict: str) -> None:
    """From 3 to 6 workers 22 % of the ideal gain, where 25 % are levelling off."""
    runs = cluster(tmp_path, "big", 3, 1, step=1.0, repeats=repeats)
    runs += cluster(tmp_path, "big", 6, 1, step=2 / 1.22, repeats=repeats) + cluster(tmp_path, "big", 3)
    claim = check(runs)["server-levels-off"]
    assert claim.verdict == verdict
    assert re.search(r"2[123] % ", claim.cases[0].why)


def test_a_baseline_of_few_steps_decides_nothing(tmp_path: Path) -> None:
    runs = cluster(tmp_path, "big", 1, step=0.5, steps=3) + cluster(tmp_path, "big", 4, step=0.5)
    claim = check(runs + cluster(tmp_path, "big", 4, 1))["ring-proportional"]
    assert claim.verdict == OPEN
    assert "too short" in claim.why


def test_workers_that_take_turns_decide_nothing(tmp_path: Path) -> None:
    """Six workers of one thread on two cores, and the same with compute that is emulated."""
    here: dict[str, Any] = {"hosts": None, "moves": None, "lab": None, "cores": 2}
    runs = [run for n in (3, 6) for servers in (0, 1) for run in cluster(tmp_path, "big", n, servers, **here)]
    found = check(runs)
    for name in ("server-levels-off", "ring-proportional", "ring-beats-server"):
        assert found[name].verdict == OPEN
        assert "shared fewer cores" in found[name].why
    emulated: dict[str, Any] = {**here, "spec": {"compute": "emulated:k80"}}
    for run in (runs := [run for n in (3, 6) for servers in (0, 1)
                         for run in cluster(tmp_path / "e", "big", n, servers, **emulated)]):  # fmt: skip
        run.summary.compute = "emulated:k80"
    assert check(runs)["ring-beats-server"].verdict != OPEN


def overlapping(folder: Path, way: str, step: float) -> list[Run]:
    return cluster(folder / way, "big", 4, step=step, spec={"overlap": way}, overlap=way == "on")


def test_which_ring_is_said_and_each_is_a_case(tmp_path: Path) -> None:
    """Three servers are faster than the ring that does not overlap, and slower than the one that does."""
    runs = overlapping(tmp_path, "on", 1.0) + overlapping(tmp_path, "off", 2.0)
    runs += cluster(tmp_path, "big", 4, 3, step=1.5) + cluster(tmp_path, "big", 4, 1, step=3.0)
    found = check(runs)
    assert verdicts(found["ring-beats-server"]) == {
        "big, ps-sync, 3 servers, against ring, overlap on": True,
        "big, ps-sync, 3 servers, against ring, overlap off": False,
        "big, ps-sync, 1 server, against ring, overlap on": True,
        "big, ps-sync, 1 server, against ring, overlap off": True,
    }
    assert verdicts(found["several-servers-win"]) == {
        "big, against ring, overlap on": False,
        "big, against ring, overlap off": True,
    }
    assert "property of the implementation, not of the method" in found["ring-beats-server"].text
    assert set(verdicts(found["ring-proportional"])) == {"big, ring, overlap on", "big, ring, overlap off"}


def test_links_that_smaller_gradients_stand_for_tell_cases_apart(tmp_path: Path) -> None:
    runs = []
    for shrink in (2, 16):
        scaled: dict[str, Any] = {"spec": {"shrink": shrink, "compute": "emulated:k80"}, "shrink": shrink,
                                  "repeats": 1}  # fmt: skip
        for servers in (0, 1, 2):
            made = cluster(tmp_path / str(shrink), "big", 4, servers, step=1.0, **scaled)
            for run in made:
                run.summary.compute = "emulated:k80"
            runs += made
    found = check(runs)
    assert set(verdicts(found["ring-beats-server"])) == {
        f"big, ps-sync, {servers}, links as of {speed} Gbit/s, against ring, overlap auto"
        for servers in ("1 server", "2 servers")
        for speed in (2, 16)
    }
    assert len(found["several-servers-win"].cases) == 2


def test_servers_that_do_not_wait_are_named(tmp_path: Path) -> None:
    runs = cluster(tmp_path, "big", 4) + cluster(tmp_path, "big", 4, 1, strategy="ps-bounded")
    assert [case.name for case in check(runs)["ring-beats-server"].cases] == [
        "big, ps-bounded, 1 server, against ring, overlap auto"
    ]


CLAIM = {"name": "c", "text": "It is fast.", "of": {"strategy": "ring"}, "measure": "efficiency", "at_least": 0.7}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"measure": "sped"}, "unknown measure 'sped'; did you mean 'speed'?"),
        ({"measure": ["speed"]}, "measure is a list, and a text is expected"),
        ({"at_least": "much"}, "at_least is 'much', and a number of 0 or more is expected"),
        ({"below": 0.5}, "the measure efficiency takes below or at_least"),
        ({"law": "n"}, "law is not for the measure efficiency, which has below, at_least"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"of": {"stratgy": "ring"}}, "of: unknown key 'stratgy'; did you mean 'strategy'?"),
        ({"of": {"servers": {"most": 2}}}, "it takes a value, a list of values, or { least = 2 }"),
        ({"of": 3}, "of is 3, and a table is expected"),
        ({"name": 3}, "name is 3, and a text is expected"),
        ({"reading": 3, "measure": None}, "measure is for a claim without readings"),
        ({"say": ["colour"]}, "unknown option 'colour'"),
        ({"reading": []}, "measure is for a claim without readings"),
        ({"measure": "speed"}, "at_least is not for the measure speed, which has faster_than, any"),
    ],
)
def test_a_claim_that_cannot_be_judged_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_claims([CLAIM | wrong], "x.toml: claim")
    assert str(caught.value).startswith("x.toml: claim 1: ")
    assert said in str(caught.value)


def test_other_claims_can_be_declared(tmp_path: Path) -> None:
    """That six workers of a server are slower than three, and that a ring is not below half of the ideal."""
    rows = [{"name": "slower", "text": "Below {below}.", "of": {"servers": 1}, "measure": "added-speed", "below": 0.0},
            CLAIM | {"name": "half", "at_least": 0.5}]  # fmt: skip
    runs = [run for n in (3, 6) for run in cluster(tmp_path, "big", n, 1, step=n / 2)]
    groups = group(runs + cluster(tmp_path, "big", 1, step=0.5) + cluster(tmp_path, "big", 4, step=0.6))
    found = claims(read_claims(rows, "claim"), groups, [*curves(groups, "strong"), *curves(groups, "weak")])
    assert [(each.name, each.verdict) for each in found] == [("slower", OPEN), ("half", SUPPORTED)]
    assert found[0].text == "Below 0 %."
